"""The command line: what each sub-command prints, what it loads, and how it fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from sysdpo_lab import cli, errors
from sysdpo_lab.experiments import runner
from sysdpo_lab.profiles import REGISTRY

ROOT = Path(__file__).parents[1]
QUICK = ["--profile", "toy", "--seeds", "0,1", "--set", "systems=2", "steps=2"]


def failure(capsys, *arguments) -> str:
    """The one line on stderr of a call that fails with status 2."""
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


# --- list, plan, doctor -------------------------------------------------------------------------------------------------


def test_list_names_each_experiment_and_profile_with_time_memory_and_network(capsys):
    assert cli.main(["list"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["experiment", "profile", "minutes", "memory", "network", "model"]
    for profile in REGISTRY.values():
        (place,) = [i for i, line in enumerate(lines) if line.split()[:2] == [profile.experiment, profile.name]]
        network = "download" if profile.network else "offline"
        words = [f"{profile.minutes:g}", f"{profile.memory_gb:g}", "G", network, *profile.model.split()]
        assert lines[place].split()[2:] == words
        assert profile.expected in lines[place + 1] and f"{len(profile.seeds)} seeds" in lines[place + 1]


@pytest.mark.parametrize(("experiment", "profile"), REGISTRY)
def test_plan_says_what_a_run_costs(capsys, experiment, profile):
    assert cli.main(["plan", experiment, "--profile", profile]) == 0
    text, found = capsys.readouterr().out, REGISTRY[experiment, profile]
    assert found.model in text and found.revision in text and f"{found.memory_gb:g} GB" in text
    place = "one GPU with 80 GB" if found.network else "two CPU cores"
    assert f"{found.minutes:g} minutes on {place}" in text and f"downloads: {'yes' if found.network else 'none'}" in text
    assert all(f"  {key} = {value}" in text.splitlines() for key, value in found.settings.items())


def test_plan_of_a_language_model_counts_tokens(capsys):
    cli.main(["plan", "two-llm", "--profile", "tiny"])
    settings = REGISTRY["two-llm", "tiny"].settings
    drawn = settings["batch"] * settings["k"] * settings["max_new_tokens"]
    assert f"tokens a training step (generated, scored): {drawn:,}, " in capsys.readouterr().out


NOTHING_LOADED = """
import socket, sys
def refuse(*arguments):
    raise SystemExit("the network was asked for")
socket.socket.connect = refuse
from sysdpo_lab import cli
status = cli.main(sys.argv[1:])
loaded = {"transformers", "peft", "accelerate", "diffusers", "matplotlib", "safetensors.torch"} & set(sys.modules)
loaded |= {name for name in sys.modules if name.startswith("sysdpo_lab.experiments.")}
sys.exit(f"loaded {loaded}" if loaded else status)
"""


@pytest.mark.parametrize("arguments", [["plan", "two-llm", "--profile", "small"], ["list"]], ids=["plan", "list"])
def test_plan_and_list_load_no_model_library_and_ask_no_network(arguments):
    done = subprocess.run([sys.executable, "-c", NOTHING_LOADED, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "two-llm" in done.stdout and done.stderr == ""


def test_doctor_runs_and_finds_nothing_to_repair(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and out.splitlines()[-1] == "all that is required is here"


# --- run ----------------------------------------------------------------------------------------------------------------


def test_run_prints_every_row_and_where_the_report_lies(capsys, tmp_path):
    assert cli.main(["run", "toy", "--out", str(tmp_path / "run"), *QUICK]) == 0
    out = capsys.readouterr().out
    (report,) = [line.removeprefix("report: ") for line in out.splitlines() if line.startswith("report: ")]
    assert Path(report) == (tmp_path / "run" / "report.html").resolve() and Path(report).is_file()
    rows = [line.split() for line in out.splitlines() if "n = 4" in line]  # two systems, two seeds
    assert len(rows) == 20 and ["joint", "gap"] in [row[:2] for row in rows]
    assert "seeds [0, 1]" in out and "joint - only:y, gap: " in out


def test_what_was_asked_for_reaches_the_runner(monkeypatch, tmp_path):
    asked = []
    summary = {"experiment": "e", "profile": "p", "seeds": [], "rows": [], "differences": [], "seconds": 1, "peak_memory_mb": 1}
    monkeypatch.setattr(runner, "run", lambda *arguments: asked.append(arguments) or summary)
    common = ["run", "two-llm", "--profile", "tiny", "--out", str(tmp_path)]
    cli.main(common)
    cli.main([*common, "--resume", "--seeds", "3,1", "--set", "k=4", "rows=prompted,joint", "--set", "lr=1e-3"])
    changes = {"k": "4", "rows": "prompted,joint", "lr": "1e-3"}
    assert asked == [
        ("two-llm", "tiny", tmp_path, None, {}, False),
        ("two-llm", "tiny", tmp_path, [3, 1], changes, True),
    ]


def test_a_value_may_hold_an_equals_sign():
    assert cli.settings_of(["a=b=c", "d="]) == {"a": "b=c", "d": ""}


def test_an_interrupted_run_says_how_to_go_on(capsys, monkeypatch, tmp_path):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    assert cli.main(["run", "toy", "--out", str(tmp_path / "run"), *QUICK]) == 130
    assert capsys.readouterr().err == "interrupted; the same command with --resume goes on\n"


# --- failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "toys", "--profile", "toy"], "UnknownOptionError: experiment='toys' does not exist; choose one of 'toy'"),
        (["run", "toy", "--profile", "paper"], "UnknownOptionError: profile of toy='paper' does not exist; choose one of 'toy'"),
        (["run", "toy", "--profile", "toy", "--set", "steps"], "UnknownOptionError: --set takes KEY=VALUE, found 'steps'"),
        (["run", "toy", "--profile", "toy", "--set", "step=3"], "UnknownOptionError: --set step: setting='step' does not exist"),
        (["run", "toy", "--profile", "toy", "--set", "steps=x"], "UnknownOptionError: --set steps: expected a int such as 300"),
        (["run", "toy", "--profile", "toy", "--set", "steps=0"], "UnknownOptionError: steps must be a whole number >= 1"),
        (["run", "toy", "--profile", "toy", "--seeds=-1"], "UnknownOptionError: seeds must be whole numbers"),
        (["run", "two-llm", "--profile", "tiny", "--set", "rows=joint"], "UnknownOptionError: rows must begin with 'prompted'"),
    ],
)
def test_bad_input_of_run_is_one_line_and_leaves_no_folder(capsys, tmp_path, arguments, words):
    assert failure(capsys, *arguments, "--out", str(tmp_path / "run")).startswith(words)
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_one_line(capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert failure(capsys, "run", "toy", "--out", str(tmp_path), *QUICK).startswith("ResumeError: ")


def test_bad_input_of_plan_and_store_is_one_line(capsys, tmp_path):
    assert "choose one of 'toy'" in failure(capsys, "plan", "toy", "--profile", "paper")
    assert failure(capsys, "store", str(tmp_path), "name").startswith("ResumeError: ")


@pytest.mark.parametrize("seeds", ["", "a", "0,", "0;1", "0 1", "1.5"])
def test_seeds_that_are_no_numbers_end_with_status_2(capsys, tmp_path, seeds):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "toy", "--profile", "toy", "--out", str(tmp_path / "run"), "--seeds", seeds])
    assert ended.value.code == 2
    assert "seeds must be whole numbers with commas between" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", ["", "walk", "run", "plan", "plan toy", "store x"])
def test_a_command_that_is_not_whole_ends_with_status_2(capsys, words):
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err


def test_python_m_gives_the_exit_status_to_the_shell():
    done = subprocess.run(
        [sys.executable, "-m", "sysdpo_lab", "plan", "toys", "--profile", "toy"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("UnknownOptionError: ") and len(done.stderr.splitlines()) == 1


def test_an_error_that_is_no_named_one_is_not_hidden(monkeypatch, tmp_path):
    def broken(*arguments):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(runner, "run", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", "toy", "--out", str(tmp_path / "run"), *QUICK])
    assert issubclass(errors.ResumeError, errors.SysDPOError)


def test_profile_and_folder_may_be_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "toy", "--seeds", "0", "--set", "systems=2", "steps=2"]) == 0
    assert (tmp_path / "runs" / "toy-toy" / "summary.json").is_file()
    assert "UnknownOptionError: experiment='toys'" in failure(capsys, "run", "toys")


def test_a_long_table_is_cut_on_the_screen_and_says_where_the_rest_is(tmp_path, capsys):
    row = {"metric": "gap", "value": 0.0, "ci_low": 0.0, "ci_high": 0.0, "n": 1}
    rows = [{"system": f"row{number}", **row} for number in range(100)]
    summary = {"experiment": "e", "profile": "p", "seeds": [0], "rows": rows, "differences": [], "seconds": 1}
    summary["peak_memory_mb"] = 1
    cli.print_summary(summary, tmp_path)
    shown = capsys.readouterr().out
    assert "row79 " in shown and "row80 " not in shown and f"20 lines more in {(tmp_path / 'summary.json').resolve()}" in shown
