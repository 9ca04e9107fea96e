"""The runner: folders, resume to the same result, the contract of summary.json, figures and report."""

import json
import math
import re
import shlex
import sys
from types import ModuleType

import pytest

from sysdpo_lab import cli, errors, profiles, report
from sysdpo_lab import figures as drawing
from sysdpo_lab.experiments import runner

ROWS = ("before", "only:y", "joint")
SUMMARY = {"experiment", "profile", "seeds", "rows", "differences", "seconds", "peak_memory_mb", "versions"}
TIMES = ("seconds", "peak_memory_mb")


class Killed(Exception):
    """Stands for whatever ends a run."""


@pytest.fixture
def fake(monkeypatch):
    """An experiment of three rows and four items; `fake.calls` says what was computed, `fake.stop_at` where it ends."""
    module = ModuleType("sysdpo_lab.experiments.fake")
    module.TITLE, module.METRICS, module.calls, module.stop_at = "Fake", ("gap", "wr_prompted"), [], None

    def run_row(context, seed, row):
        if (seed, row) == module.stop_at:
            raise Killed
        module.calls.append((seed, row))
        context.note(f"{row} of seed {seed}", "was computed")
        level = ROWS.index(row) + context.settings["shift"]
        return [{"seed": seed, "system": row, "item": i, "gap": level + i / (seed + 3), "wr_prompted": 0.5} for i in range(4)]

    def run_seed(context, seed):
        records = []
        for row in ROWS:
            folder = context.out / f"seed-{seed}" / row.replace(":", "-")
            records += context.cached_records(folder, lambda row=row: run_row(context, seed, row))
        return records

    def figures(context, summary, records):
        return {"gap": (drawing.plot_rows(summary["rows"], "gap"), "the gap of each row")}

    module.run_seed, module.figures = run_seed, figures
    module.check = lambda settings: None
    module.prose = lambda context: "Nothing is <measured> here."
    module.samples = lambda context, records: [{"before": "a", "after": "b & c"}]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(runner.MODULES, "fake", "fake")
    settings = {"shift": 0.0, "steps": 5, "sampler": "diverse_beam"}
    profile = profiles.Profile("fake", "toy", "none", "-", (0, 1), 1, 1, False, "nothing", settings)
    monkeypatch.setitem(profiles.REGISTRY, ("fake", "toy"), profile)
    return module


def run(out, **options):
    return runner.run("fake", "toy", out, say=lambda line: None, **options)


def comparable(summary: dict) -> dict:
    return {key: value for key, value in summary.items() if key not in TIMES}


def contents(folder) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def strict_json(path):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


# --- what a run writes --------------------------------------------------------------------------------------------------


@pytest.fixture
def complete(fake, tmp_path):
    return run(tmp_path / "run"), tmp_path / "run"


def test_the_summary_has_the_keys_of_the_contract(complete):
    summary, out = complete
    assert strict_json(out / "summary.json") == summary
    assert SUMMARY <= set(summary)
    assert (summary["experiment"], summary["profile"], summary["seeds"]) == ("fake", "toy", [0, 1])
    assert all(set(row) == {"system", "metric", "value", "ci_low", "ci_high", "n"} for row in summary["rows"])
    wanted = {"a", "b", "metric", "value", "ci_low", "ci_high"}
    assert summary["differences"] and all(wanted <= set(row) for row in summary["differences"])
    assert all(row["ci_low"] <= row["value"] <= row["ci_high"] for row in summary["rows"] + summary["differences"])
    assert {row["n"] for row in summary["rows"]} == {8}
    assert summary["seconds"] >= 0 and summary["peak_memory_mb"] > 10
    assert {"python", "torch", "sysdpo-lab"} <= set(summary["versions"])


def test_values_are_means_over_seeds_of_means_over_items(complete):
    summary, _ = complete
    value = {row["system"]: row["value"] for row in summary["rows"] if row["metric"] == "gap"}
    first = (0 + 1 + 2 + 3) / 4 / 3, (0 + 1 + 2 + 3) / 4 / 4  # items i / (seed + 3)
    assert value == pytest.approx({row: level + sum(first) / 2 for level, row in enumerate(ROWS)})


def test_records_hold_every_item_of_every_system_and_seed_once(complete):
    _, out = complete
    found = [(r["seed"], r["system"], r["item"]) for r in runner.read_records(out / "records.jsonl")]
    assert found == [(seed, row, item) for seed in (0, 1) for row in ROWS for item in range(4)]


def test_figures_are_there_as_png_and_svg(complete):
    _, out = complete
    assert (out / "figures" / "gap.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (out / "figures" / "gap.svg").read_bytes()[:1000]


def test_the_report_needs_no_other_file_and_no_network(complete):
    _, out = complete
    page = (out / "report.html").read_text(encoding="utf-8")
    links = re.findall(r"""(?:src|href|action|data|poster)\s*=\s*["']?([^"'\s>]+)|url\(([^)]*)\)|@import\s*([^;]*)""", page)
    assert [link for found in links for link in found if link and not link.startswith("data:image/png;base64,")] == []
    assert "<script" not in page and "<link" not in page and "<iframe" not in page
    assert "Nothing is &lt;measured&gt; here." in page and "b &amp; c" in page and "the gap of each row" in page


def test_the_command_in_the_summary_repeats_the_run(fake, tmp_path):
    changes = {"shift": 1.5, "sampler": "a b"}
    summary = run(tmp_path / "run", seeds=[3], changes=changes)
    assert summary["command"].startswith("python -m sysdpo_lab run fake --profile toy")
    options = cli.parser().parse_args(shlex.split(summary["command"])[3:])
    profile = profiles.find(options.experiment, options.profile)
    assert options.seeds == summary["seeds"] == [3]
    assert profile.with_settings(cli.settings_of(options.set)) == summary["settings"]


def test_the_summary_is_written_last(fake, tmp_path, monkeypatch):
    whole = run(tmp_path / "whole")
    def broken(*arguments, **options):
        assert not (tmp_path / "run" / "summary.json").exists()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(report, "write_report", broken)
        with pytest.raises(Killed):
            run(tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert comparable(run(tmp_path / "run", resume=True)) == comparable(whole)


# --- resume -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [(0, "before"), (0, "only:y"), (0, "joint"), (1, "before"), (1, "joint")])
def test_a_run_stopped_anywhere_and_resumed_gives_the_same_result_and_computes_nothing_twice(fake, tmp_path, stop_at):
    whole = run(tmp_path / "whole")
    fake.calls, fake.stop_at = [], stop_at
    with pytest.raises(Killed):
        run(tmp_path / "run")
    fake.stop_at = None
    resumed = run(tmp_path / "run", resume=True)
    assert comparable(resumed) == comparable(whole)
    assert set(resumed["notes"]) == {f"{row} of seed {seed}" for seed in (0, 1) for row in ROWS}  # of both parts
    assert fake.calls == [(seed, row) for seed in (0, 1) for row in ROWS]
    same = ("records.jsonl", "figures/gap.png", "seed-1/only-y/records.jsonl", "notes.json")
    one, other = contents(tmp_path / "whole"), contents(tmp_path / "run")
    assert one.keys() == other.keys() and all(one[name] == other[name] for name in same)


def test_without_resume_what_lies_in_the_folder_is_never_read(fake, tmp_path):
    run(tmp_path / "run")
    for changed in (False, True):
        with pytest.raises(errors.ResumeError, match="already holds a run; pass --resume"):
            run(tmp_path / "run", changes={"shift": 1.0} if changed else None)


def test_a_complete_run_can_be_resumed_and_stays_the_same(fake, tmp_path):
    first = run(tmp_path / "run")
    fake.calls = []
    again = run(tmp_path / "run", resume=True)
    assert comparable(again) == comparable(first) and fake.calls == []
    assert again["seconds"] >= first["seconds"] - 0.2  # the time of both, not of the last


def test_resume_of_a_folder_that_is_not_there_starts_a_run(fake, tmp_path):
    assert run(tmp_path / "new" / "run", resume=True)["rows"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"changes": {"shift": 2.0}}, r"shift: 0.0 there, 2.0 asked for"),
        ({"changes": {"sampler": "monte_carlo", "steps": 6}}, r"steps: 5 there, 6 asked for; sampler: 'diverse_beam' there"),
        ({"seeds": [0, 1, 2]}, r"seeds: \[0, 1\] there, \[0, 1, 2\] asked for"),
    ],
)
def test_a_resume_with_other_settings_names_what_differs_and_leaves_the_folder(fake, tmp_path, options, words):
    run(tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(errors.ResumeError, match=words):
        run(tmp_path / "run", resume=True, **options)
    assert contents(tmp_path / "run") == before


def test_a_resume_of_another_experiment_is_refused(fake, tmp_path):
    run(tmp_path / "run")
    with pytest.raises(errors.ResumeError, match="experiment: 'fake' there, 'toy' asked for"):
        runner.run("toy", "toy", tmp_path / "run", resume=True)


def test_a_folder_with_other_things_in_it_is_refused(fake, tmp_path):
    (tmp_path / "thesis.txt").write_text("important")
    for resume in (False, True):
        with pytest.raises(errors.ResumeError, match="not empty and holds no run"):
            run(tmp_path, resume=resume)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_empty_folder_is_used_and_a_file_is_refused(fake, tmp_path):
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty")["rows"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.ResumeError, match="is a file"):
        run(tmp_path / "file")


def test_a_broken_run_json_is_named(fake, tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(errors.ResumeError, match=r"run\.json: not a JSON file"):
        run(tmp_path, resume=True)


# --- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("fakes", "toy"), {}, "experiment='fakes'.*'toy', 'two-llm', .*'fake'"),
        (("two-llm", "huge"), {}, "profile of two-llm='huge'.*'tiny', 'small'"),
        (("fake", "toy"), {"changes": {"shfit": "1"}}, "setting='shfit'.*'shift', 'steps', 'sampler'"),
        (("fake", "toy"), {"changes": {"steps": "many"}}, "--set steps: expected a int such as 5"),
        (("fake", "toy"), {"seeds": []}, "at least one"),
        (("fake", "toy"), {"seeds": [-1]}, r"seeds must be whole numbers .* found \[-1\]"),
        (("fake", "toy"), {"seeds": [0, 1.5]}, "seeds must be whole"),
        (("fake", "toy"), {"seeds": [2**40]}, "seeds must be whole"),
        (("two-llm", "tiny"), {"changes": {"rows": "prompted,both"}}, "row='both'.*'prompted', 'best-of-n', 'separate'"),
    ],
)
def test_bad_input_is_named_before_a_folder_is_made(fake, tmp_path, arguments, options, words):
    with pytest.raises(errors.UnknownOptionError, match=words):
        runner.run(*arguments, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_repeated_seeds_count_once(fake, tmp_path):
    assert run(tmp_path / "run", seeds=[5, 0, 5])["seeds"] == [5, 0]
    assert fake.calls == [(seed, row) for seed in (5, 0) for row in ROWS]


def test_a_record_that_is_not_finite_stops_the_run_without_a_summary(fake, tmp_path, monkeypatch):
    def run_seed(context, seed):
        return [{"seed": seed, "system": "before", "item": 0, "gap": math.nan}]

    monkeypatch.setattr(fake, "run_seed", run_seed)
    with pytest.raises(errors.NonFiniteError, match="gap of 'before'"):
        run(tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_peak_memory_is_in_megabytes():
    held = bytearray(50_000_000)
    assert 50 < runner.peak_memory_mb() < 1_000_000 and len(held)
