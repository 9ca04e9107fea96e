"""A file or folder is the old or the new version, never half of one."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from sysdpo_lab import atomic


def killed_child(code: str, *arguments) -> None:
    """Run `code` in a process that is expected to kill itself with SIGKILL, as the out-of-memory killer would."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)])
    assert done.returncode == -signal.SIGKILL


def test_the_new_content_replaces_the_old_and_nothing_else_stays(tmp_path):
    path = tmp_path / "deep" / "summary.json"
    atomic.write_json(path, {"value": 1})
    atomic.write_json(path, {"value": 2, "name": "β"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"value": 2, "name": "β"}
    assert [p.name for p in path.parent.iterdir()] == ["summary.json"]


def test_line_ends_are_written_as_given(tmp_path):
    assert atomic.write_text(tmp_path / "a", "one\r\ntwo\n").read_bytes() == b"one\r\ntwo\n"


def test_permissions_follow_the_umask_and_are_not_those_of_a_private_temporary_file(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("x")
    assert atomic.write_text(tmp_path / "atomic", "x").stat().st_mode == plain.stat().st_mode


def test_a_value_that_json_does_not_have_leaves_the_old_file(tmp_path):
    path = atomic.write_json(tmp_path / "a.json", [1.0])
    with pytest.raises(ValueError, match="JSON"):
        atomic.write_json(path, [float("nan")])
    assert json.loads(path.read_text()) == [1.0]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_kill_in_the_middle_of_writing_leaves_the_old_file(tmp_path):
    path = atomic.write_text(tmp_path / "a.txt", "old")
    killed_child(
        """
        import os, signal, sys
        from sysdpo_lab import atomic
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        atomic.write_text(sys.argv[1], "new" * 1000)
        """,
        path,
    )
    assert path.read_text() == "old"
    assert atomic.write_text(path, "newer").read_text() == "newer"


def test_the_content_is_synced_before_the_rename(tmp_path, monkeypatch):
    calls = []
    real_sync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), real_sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), real_replace(a, b)))
    atomic.write_text(tmp_path / "a", "x")
    assert calls[:2] == ["sync", "replace"]


def fill(path, **files):
    with atomic.folder(path) as new:
        for name, text in files.items():
            (new / name).write_text(text)


def contents(path):
    return {p.name: p.read_text() for p in path.iterdir()}


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_a_folder_takes_the_place_of_the_old_one(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    fill(tmp_path / "run", a="1", b="2")
    fill(tmp_path / "run", a="3")
    assert contents(tmp_path / "run") == {"a": "3"}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_an_error_while_filling_leaves_the_old_folder(tmp_path):
    fill(tmp_path / "run", a="1")
    with pytest.raises(ZeroDivisionError), atomic.folder(tmp_path / "run") as new:
        (new / "a").write_text("2")
        1 / 0  # noqa: B018
    assert contents(tmp_path / "run") == {"a": "1"}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_kill_while_filling_leaves_the_old_folder(tmp_path):
    fill(tmp_path / "run", a="1")
    killed_child(
        """
        import os, signal, sys
        from pathlib import Path
        from sysdpo_lab import atomic
        with atomic.folder(sys.argv[1]) as new:
            (new / "a").write_text("2")
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path / "run",
    )
    assert contents(tmp_path / "run") == {"a": "1"}


def test_a_kill_between_the_two_renames_is_repaired(tmp_path):
    fill(tmp_path / "run", a="1")
    killed_child(
        """
        import os, signal, sys
        from sysdpo_lab import atomic
        atomic._exchange = lambda first, second: False
        rename = os.rename
        def once(a, b):
            rename(a, b)
            os.kill(os.getpid(), signal.SIGKILL)
        with atomic.folder(sys.argv[1]) as new:
            (new / "a").write_text("2")
            os.rename = once
        """,
        tmp_path / "run",
    )
    assert not (tmp_path / "run").exists()
    atomic.recover(tmp_path / "run")
    assert contents(tmp_path / "run") == {"a": "1"}
