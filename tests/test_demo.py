"""`make demo`'s second half on the tiny model: what it runs, prints, replaces and continues."""

import json
from pathlib import Path

import pytest

from sysdpo_lab import cli, demo, errors, paths
from sysdpo_lab.experiments import runner
from sysdpo_lab.experiments.two_llm import EXPERIMENT
from sysdpo_lab.profiles import REGISTRY

QUICK = {"pairs": 4, "heldout": 2, "steps": 1, "warmup": 0, "max_new_tokens": 8, "candidates": 3}


@pytest.fixture(autouse=True)
def small_is_tiny(monkeypatch):
    """The tiny model stands in for SmolLM2, and a text for the executed lesson."""
    monkeypatch.setitem(REGISTRY, ("two-llm", "small"), REGISTRY["two-llm", "tiny"])
    lessons = []

    def run_lesson(target: Path) -> Path:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("lesson")
        lessons.append(target)
        return target

    monkeypatch.setattr(demo, "run_lesson", run_lesson)
    return lessons


def summary_of(out) -> dict:
    return json.loads((out / "two-llm" / "summary.json").read_text(encoding="utf-8"))


def test_the_demo_runs_the_lesson_then_two_llm_and_prints_the_table_and_the_report(tmp_path, capsys, small_is_tiny):
    assert demo.run_demo(tmp_path / "demo", changes=QUICK) == 0
    assert small_is_tiny == [tmp_path / "demo" / "00_start_here.ipynb"]
    out = capsys.readouterr().out
    assert out.index("1 of 2: lesson 00") < out.index("2 of 2: two SmolLM2-135M adapters") < out.index("report: ")
    assert str((tmp_path / "demo" / "two-llm" / "report.html").resolve()) in out
    for wanted in ("prompted task_score", "joint task_score", "joint wr_prompted", "joint margin_accuracy"):
        (line,) = [line for line in out.splitlines() if line.split()[:2] == wanted.split()]
        assert "[" in line and "n = 2" in line  # before and after, with intervals
    assert "joint - prompted, task_score: " in out and "a demonstration, not a result" in out
    summary = summary_of(tmp_path / "demo")
    assert summary["command"] == "python -m sysdpo_lab demo" and summary["seeds"] == [0]


def test_its_short_settings_are_those_of_the_small_profile_and_small(monkeypatch):
    monkeypatch.undo()
    small = REGISTRY["two-llm", "small"]
    assert small.name == "small" and small.with_settings(demo.SHORT) != small.settings
    EXPERIMENT.check(small.with_settings(demo.SHORT))
    assert all(demo.SHORT[key] <= small.settings[key] for key in ("pairs", "heldout", "steps", "batch"))


def test_a_complete_demo_is_replaced_and_a_broken_off_one_is_continued(tmp_path, monkeypatch):
    out = tmp_path / "demo"
    demo.run_demo(out, lesson=False, changes=QUICK)
    (out / "two-llm" / "trace of the first").write_text("x")
    trained = []
    train = EXPERIMENT.train_row

    def broken_off(self, *arguments):
        trained.append(train(*arguments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(EXPERIMENT), "train_row", broken_off)
        with pytest.raises(KeyboardInterrupt):
            demo.run_demo(out, lesson=False, changes=QUICK)
    assert len(trained) == 1 and not (out / "two-llm" / "trace of the first").exists()
    assert not (out / "two-llm" / "summary.json").exists()
    (out / "two-llm" / "trace of the second").write_text("x")
    demo.run_demo(out, lesson=False, changes=QUICK)
    assert (out / "two-llm" / "trace of the second").exists() and summary_of(out)["rows"]


def test_somebodys_own_run_of_that_name_is_not_deleted(tmp_path):
    folder = tmp_path / "two-llm"
    runner.run("two-llm", "small", folder, (0,), {**QUICK, "rows": "prompted"}, say=lambda line: None)
    before = (folder / "summary.json").read_bytes()
    with pytest.raises(errors.ResumeError, match="choose another --out"):
        demo.run_demo(tmp_path, lesson=False, changes=QUICK)
    assert (folder / "summary.json").read_bytes() == before


def test_the_command_line_passes_the_folder_on(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(demo, "run_demo", lambda out: asked.append(out) or 0)
    assert cli.main(["demo"]) == 0 and cli.main(["demo", "--out", str(tmp_path)]) == 0
    assert asked == [Path("runs/demo"), tmp_path]

    def interrupted(out):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "interrupted; the same command goes on\n"


def test_without_a_clone_the_lesson_is_not_found_by_name(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(paths, "repository_folder", lambda: None)
    with pytest.raises(errors.DataFolderError, match="run the demo from a clone"):
        demo.run_lesson(tmp_path / "00.ipynb")


def test_the_lesson_that_the_demo_runs_exists():
    assert (paths.repository_folder() / "notebooks" / f"{demo.LESSON}.ipynb").is_file()
