"""Grids: which cells, what is refused before anything runs, resume to the same bytes, and what is kept of a grid."""

import json
import shlex
import sys
from types import ModuleType

import pytest

from sysdpo_lab import cli, errors, evaluation, profiles
from sysdpo_lab import figures as drawing
from sysdpo_lab.experiments import grid, grid_table, runner
from sysdpo_lab.experiments.two_llm import EXPERIMENT

ROWS = ("before", "joint")
AXES = {"k": [2, 4], "sampler": ["dbs", "mc"]}
SHORT = {
    "pairs": 4, "heldout": 3, "steps": 1, "batch": 2, "warmup": 0, "max_new_tokens": 10, "candidates": 3,
    "rows": "prompted,joint",
}  # fmt: skip


class Killed(Exception):
    """Stands for whatever ends a run."""


def silent(line: str) -> None:
    pass


@pytest.fixture
def fake(monkeypatch):
    """Two rows, three items; `calls` says what was computed, `stop_at` before which row it ends."""
    module = ModuleType("sysdpo_lab.experiments.fake")
    module.TITLE, module.METRICS, module.calls, module.stop_at = "Fake", ("kl", "wr_prompted"), [], None

    def measured(context, seed, row):
        call = (context.settings["k"], context.settings["sampler"], seed, row)
        if call == module.stop_at:
            raise Killed
        module.calls.append(call)
        level = ROWS.index(row) * context.settings["k"] + len(context.settings["sampler"]) / (seed + 3)
        return [{"seed": seed, "system": row, "item": i, "kl": level + i / 7, "wr_prompted": 0.5} for i in range(3)]

    def run_seed(context, seed):
        records = []
        for row in ROWS:
            folder = context.out / f"seed-{seed}" / row
            records += context.cached_records(folder, lambda row=row: measured(context, seed, row))
        return records

    def check(settings):
        if settings["k"] > 100:
            raise errors.UnknownOptionError(f"k={settings['k']} is too large")

    module.run_seed, module.check = run_seed, check
    module.figures = lambda context, summary, records: {"kl": (drawing.plot_rows(summary["rows"], "kl"), "kl of each row")}
    module.prose = lambda context: "Nothing is measured here."
    module.samples = lambda context, records: []
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(runner.MODULES, "fake", "fake")
    settings = {"k": 2, "sampler": "dbs", "steps": 5, "rows": "all"}
    profile = profiles.Profile("fake", "toy", "none", "-", (0, 1), 1, 1, False, "nothing", settings)
    monkeypatch.setitem(profiles.REGISTRY, ("fake", "toy"), profile)
    return module


def run(out, axes=AXES, **options):
    return grid.run("fake", "toy", out, axes, say=silent, progress=False, **options)


def tables(out) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in grid.TABLES}


# --- cells --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["k", "k=", "=1,2", "k=1,,2", "k=1,1", "rows=a;a"])
def test_an_axis_needs_a_name_and_different_values(word):
    with pytest.raises(errors.UnknownOptionError, match="--axis takes NAME=V1,V2"):
        grid.axis(word)


def test_each_cell_has_a_folder_of_its_own_that_a_file_system_takes():
    cells = grid.cells({"rows": ["prompted,joint", "prompted/joint", "prompted?joint"], "model": ["a" * 90, "a" * 91]})
    names = [grid.cell_name(cell) for cell in cells]
    assert len(set(names)) == len(cells) == 6
    assert all(len(name) <= 90 and not set(name) & set('/\\:*?"<>| ') for name in names)


def test_the_first_axis_is_the_slowest():
    assert [tuple(cell.values()) for cell in grid.cells(AXES)] == [(2, "dbs"), (2, "mc"), (4, "dbs"), (4, "mc")]


@pytest.mark.parametrize(
    ("axes", "changes", "words"),
    [
        ({"kk": [1]}, {}, "setting='kk'"),
        ({"k": ["two"]}, {}, "--set k: expected a int"),
        ({"k": [2, 4]}, {"k": 2}, "k: fixed by --set and varied by --axis"),
        ({"k": [2, 101]}, {}, "k=101 is too large"),
        ({"k": []}, {}, "0 cells"),
        ({"k": list(range(501))}, {}, "501 cells; a grid has 1 to 500"),
        ({"k": [2, "2"]}, {}, "an axis has a value twice"),
    ],
)
def test_a_grid_that_cannot_run_is_refused_before_anything_is_computed(fake, tmp_path, axes, changes, words):
    with pytest.raises(errors.UnknownOptionError, match=words):
        run(tmp_path / "grid", axes, changes=changes)
    assert fake.calls == [] and not (tmp_path / "grid").exists()


def test_an_axis_that_the_rows_themselves_vary_is_refused(tmp_path):
    # each arm of `samplers` has its own k: the axis would train the same arms twice
    with pytest.raises(errors.UnknownOptionError, match="--axis k: the rows of samplers differ in it already"):
        grid.run("samplers", "tiny", tmp_path / "grid", {"k": [2, 4]}, say=silent)
    assert not (tmp_path / "grid").exists()


# --- tables -------------------------------------------------------------------------------------------------------------


def test_the_table_holds_every_cell_system_and_metric_with_its_interval(fake, tmp_path):
    rows = run(tmp_path / "grid")
    assert grid_table.read(tmp_path / "grid" / "table.csv") == rows and len(rows) == 4 * 2 * 2
    (row,) = [r for r in rows if (r["k"], r["sampler"], r["system"], r["metric"]) == (4, "mc", "joint", "kl")]
    values = [[4 + 2 / (seed + 3) + i / 7 for i in range(3)] for seed in (0, 1)]
    expected = evaluation.interval(values)
    assert (row["value"], row["ci_low"], row["ci_high"], row["n"]) == pytest.approx(
        (expected.value, expected.ci_low, expected.ci_high, 6)
    )


def test_items_of_two_cells_can_be_compared_in_pairs(fake, tmp_path):
    run(tmp_path / "grid")
    items = grid_table.read(tmp_path / "grid" / "items.csv")
    two, four = (grid_table.item_values(items, "kl", k=k, sampler="dbs", system="joint") for k in (2, 4))
    found = evaluation.paired_difference(four, two)
    assert (found.value, found.ci_low, found.n) == (pytest.approx(2.0), pytest.approx(2.0), 6)
    differences = grid_table.read(tmp_path / "grid" / "differences.csv")
    assert {(row["a"], row["b"], row["k"], row["sampler"]) for row in differences} == {
        ("joint", "before", k, sampler) for k in (2, 4) for sampler in ("dbs", "mc")
    }


def test_pictures_are_lines_over_one_axis_a_heat_map_over_two_and_none_over_three(fake, tmp_path):
    two = run(tmp_path / "grid")
    assert sorted(path.name for path in (tmp_path / "grid" / "figures").iterdir()) == [
        "kl.png", "kl.svg", "wr_prompted.png", "wr_prompted.svg",
    ]  # fmt: skip
    one = [row for row in two if row["sampler"] == "dbs"]
    three = [{**row, "beta": beta} for row in two for beta in (1, 2)]
    images = [[len(figure.axes[0].images) for figure in grid.pictures(rows).values()] for rows in (one, two, three)]
    assert images == [[0, 0], [1, 1], []]


def test_a_grid_without_axes_is_one_cell_whose_rows_are_compared(fake, tmp_path):
    rows = run(tmp_path / "grid", {})
    assert {row["system"] for row in rows} == set(ROWS) and (tmp_path / "grid" / "cells" / "all").is_dir()


# --- resume -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [(2, "dbs", 0, "before"), (2, "mc", 1, "joint"), (4, "mc", 0, "joint")])
def test_a_half_finished_grid_goes_on_to_the_same_bytes(fake, tmp_path, stop_at):
    run(tmp_path / "whole")
    everything, fake.calls[:] = list(fake.calls), []
    fake.stop_at = stop_at
    with pytest.raises(Killed):
        run(tmp_path / "grid")
    with pytest.raises(errors.ResumeError, match="is not complete; the same command with --resume"):
        grid.write_tables(tmp_path / "grid")
    fake.stop_at = None
    run(tmp_path / "grid", resume=True)
    assert tables(tmp_path / "grid") == tables(tmp_path / "whole")
    assert fake.calls == everything  # each row was computed once, none again
    assert not (set(everything) - set(fake.calls))


def test_a_complete_grid_is_only_read_again(fake, tmp_path):
    first = run(tmp_path / "grid")
    fake.calls.clear()
    assert run(tmp_path / "grid", resume=True) == first and fake.calls == []


def test_another_grid_in_the_same_folder_is_refused(fake, tmp_path):
    run(tmp_path / "grid")
    with pytest.raises(errors.ResumeError, match="pass --resume"):
        run(tmp_path / "grid")
    with pytest.raises(errors.ResumeError, match="grid: "):
        run(tmp_path / "grid", {"k": [2, 8]}, resume=True)
    with pytest.raises(errors.ResumeError, match="steps: "):
        run(tmp_path / "grid", changes={"steps": 6}, resume=True)


def test_language_models_stopped_between_two_cells_go_on_to_the_same_bytes(tmp_path):
    axes, changes = {"rank": [1, 2]}, {**SHORT, "probe": True}
    grid.run("two-llm", "tiny", tmp_path / "whole", axes, [0], changes, say=silent, progress=False)

    def stop(line):
        if line.startswith("cell 2"):
            raise Killed

    with pytest.raises(Killed):
        grid.run("two-llm", "tiny", tmp_path / "grid", axes, [0], changes, say=stop, progress=False)
    grid.run("two-llm", "tiny", tmp_path / "grid", axes, [0], changes, resume=True, say=silent, progress=False)
    assert tables(tmp_path / "grid") == tables(tmp_path / "whole")


# --- what cells share -----------------------------------------------------------------------------------------------------


def test_settings_of_training_leave_data_start_and_judge_alone():
    # cells that differ in these alone share pairs and the start's answers; one more name here would mix different data up
    data = {"world", "pairs", "heldout", "data", "candidates", "min_gap", "max_new_tokens", "eval_batch", "judge", "model"}
    data |= {"dtype"}
    known = set(profiles.TWO_LLM) | set(profiles.ARMS)
    assert not data & set(grid.TRAINING)
    assert {"beta", "k", "sampler", "diversity_penalty", "rank", "base", "steps", "lr"} <= set(grid.TRAINING) & known


def test_shared_data_give_the_numbers_of_a_run_by_itself(tmp_path):
    changes = {**SHORT, "rank": 2}
    alone = runner.run("two-llm", "tiny", tmp_path / "alone", [0], changes, say=silent, progress=False)
    rows = grid.run("two-llm", "tiny", tmp_path / "grid", {"beta": [1.0, 0.1]}, [0], changes, say=silent, progress=False)
    mine = [{k: v for k, v in row.items() if k != "beta"} for row in rows if row["beta"] == 0.1]
    assert mine == alone["rows"]


# --- shared against separate base -----------------------------------------------------------------------------------------


def context_of(out, **changes):
    profile = profiles.REGISTRY["two-llm", "tiny"]
    return runner.Context(profile, profile.with_settings({**SHORT, **changes}), out, say=silent)


@pytest.mark.parametrize(
    ("base", "same_network", "same_adapter", "parts"),
    [("shared", True, False, 2), ("separate", False, False, 2), ("tied", True, True, 1)],
)
def test_base_says_what_the_nodes_share(tmp_path, base, same_network, same_adapter, parts):
    system = EXPERIMENT.build_system(context_of(tmp_path, base=base))
    draft, refine = system["draft"], system["refine"]
    assert (draft.network is refine.network) is same_network
    assert (draft.trainable()[0] is refine.trainable()[0]) is same_adapter
    assert sum(p.numel() for p in system.trainable_parameters()) == parts * sum(p.numel() for p in draft.trainable())


def test_a_separate_base_gives_the_numbers_of_a_shared_one_and_tied_adapters_others(tmp_path):
    axes = {"base": ["shared", "separate", "tied"]}
    rows = grid.run("two-llm", "tiny", tmp_path / "grid", axes, [0], {**SHORT, "probe": True}, say=silent, progress=False)
    joint = [row for row in rows if row["system"] == "joint"]
    found = {base: {r["metric"]: r["value"] for r in joint if r["base"] == base} for base in axes["base"]}
    assert found["shared"] == found["separate"]  # the base is frozen: copies of it hold nothing that is trained
    assert found["tied"]["kl"] != found["shared"]["kl"]


def test_a_tied_adapter_cannot_be_frozen_in_one_node(tmp_path):
    with pytest.raises(errors.UnknownOptionError, match="base=tied trains all nodes as one; only:draft"):
        EXPERIMENT.check(context_of(tmp_path, base="tied", rows="prompted,only:draft").settings)
    with pytest.raises(errors.UnknownOptionError, match="base='both'"):
        EXPERIMENT.check(context_of(tmp_path, base="both").settings)


# --- keeping, and the command line ----------------------------------------------------------------------------------------


def test_a_stored_grid_keeps_tables_pictures_and_the_command_that_repeats_it(fake, tmp_path):
    run(tmp_path / "runs", changes={"steps": 7})
    target = grid.store(tmp_path / "runs", "grid-k", tmp_path / "results")
    kept = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert kept == ["CARD.md", "differences.csv", "figures/kl.png", "figures/wr_prompted.png", "items.csv", "table.csv"]
    assert tables(target) == tables(tmp_path / "runs")
    assert len(grid.load("grid-k", folder=tmp_path / "results")) == 16
    (line,) = [line for line in (target / "CARD.md").read_text().splitlines() if line.startswith("- Command")]
    options = cli.parser().parse_args(shlex.split(line.split("`")[1])[3:])
    assert dict(grid.axis(word) for word in options.axis) == {"k": ["2", "4"], "sampler": ["dbs", "mc"]}
    assert (options.experiment, options.profile, options.seeds, options.set) == ("fake", "toy", [0, 1], ["steps=7"])


def test_values_with_commas_come_through_the_command_line():
    plan = {"experiment": "two-llm", "profile": "tiny", "seeds": [0], "settings": {}}
    words = shlex.split(grid.command({**plan, "grid": [{"rows": "prompted,joint"}, {"rows": "prompted,only:draft"}]}, "g"))
    assert grid.axis(words[words.index("--axis") + 1]) == ("rows", ["prompted,joint", "prompted,only:draft"])


def test_unfinished_and_foreign_folders_are_refused(fake, tmp_path):
    fake.stop_at = (4, "mc", 0, "joint")
    with pytest.raises(Killed):
        run(tmp_path / "grid")
    with pytest.raises(errors.ResumeError, match="not complete"):
        grid.store(tmp_path / "grid", "x", tmp_path / "results")
    with pytest.raises(errors.ResumeError, match="holds no grid"):
        grid.plan_of(tmp_path / "grid" / "cells" / "k=2,sampler=dbs")
    with pytest.raises(errors.MissingFileError, match="no such table"):
        grid.load("x", folder=tmp_path / "results")
    with pytest.raises(errors.UnknownOptionError, match="table='figure'.*'items'"):
        grid.load("x", "figure", tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_the_command_runs_a_grid_and_store_keeps_it(fake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sysdpo_lab.paths.data_folder", lambda: tmp_path / "data")
    out = tmp_path / "grid"
    words = ["grid", "fake", "--profile", "toy", "--axis", "k=2,4", "--axis", "sampler=dbs,mc", "--seeds", "0"]
    words += ["--set", "steps=6"]
    assert cli.main([*words, "--out", str(out)]) == 0
    assert f"16 rows: {out / 'table.csv'}" in capsys.readouterr().out
    assert json.loads((out / "run.json").read_text())["settings"] == {"steps": "6"}
    assert cli.main(["store", str(out), "grid-k"]) == 0
    assert (tmp_path / "data" / "results" / "grid-k" / "table.csv").is_file()
    assert cli.main([*words, "--out", str(out)]) == 2 and "--resume" in capsys.readouterr().err
    assert cli.main([*words, "--axis", "k=8", "--out", str(tmp_path / "other")]) == 2
    assert "--axis names a setting twice" in capsys.readouterr().err
