"""A grid: an experiment run once for every combination of some settings, each in its own folder, then one table.

`python -m sysdpo_lab grid two-llm --profile tiny --axis k=1,2,4 --axis sampler=diverse_beam,monte_carlo --out DIR`

DIR/cells/NAME: a complete run of the runner. DIR/table.csv: value, interval and n of every cell, system and metric.
DIR/items.csv: the numbers of every held-out record, so that any two cells can be compared in pairs. DIR/differences.csv: the
paired differences within the cells. An interrupted grid goes on with the cell that it was in.
"""

import hashlib
import itertools
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sysdpo_lab import atomic, errors, paths, profiles, saving
from sysdpo_lab.experiments import grid_figures, grid_table, runner

TABLES = ("table.csv", "items.csv", "differences.csv")
MOST_CELLS = 500
STARTS = ("prompted", "before")
# Settings that change how a system is trained, but neither the data, nor the start, nor who judges: cells that differ in these
# alone share the base, the sampled pairs and the start's answers.
TRAINING = (
    "steps", "batch", "lr", "warmup", "schedule", "beta", "sampler", "k", "diversity_penalty", "rank", "base", "checkpoint_every",
    "rows", "arms", "betas", "repeats", "weights", "probe", "best_of",
)  # fmt: skip


# --- which cells --------------------------------------------------------------------------------------------------------


def axis(word: str) -> tuple[str, list[str]]:
    """NAME=V1,V2 as a name and its values; with a semicolon in it, NAME=V1;V2, so that values may hold commas.

    >>> axis("k=1,2"), axis("rows=prompted,joint;prompted,separate")
    (('k', ['1', '2']), ('rows', ['prompted,joint', 'prompted,separate']))

    Raises:
        UnknownOptionError: no name, no value, or a value twice.
    """
    name, equals, text = word.partition("=")
    values = [value.strip() for value in text.split(";" if ";" in text else ",")]
    if not (name and equals and all(values)) or len(set(values)) < len(values):
        raise errors.UnknownOptionError(f"--axis takes NAME=V1,V2 with different values, found {word!r}")
    return name, values


def cells(axes: Mapping[str, Sequence]) -> list[dict[str, Any]]:
    """Every combination, the last axis fastest; without axes a single cell.

    >>> cells({"k": [1, 2], "sampler": ["dbs"]})
    [{'k': 1, 'sampler': 'dbs'}, {'k': 2, 'sampler': 'dbs'}]
    """
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def cell_name(cell: Mapping[str, Any]) -> str:
    """The folder of a cell; what a file system may not like is replaced, and told apart by a hash.

    >>> cell_name({"k": 2, "sampler": "diverse_beam"}), cell_name({})
    ('k=2,sampler=diverse_beam', 'all')
    """
    plain = ",".join(f"{name}={value}" for name, value in cell.items()) or "all"
    safe = re.sub(r"[^A-Za-z0-9=,._-]", "-", plain)[:80]
    return safe if safe == plain else f"{safe}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def settings_of(profile: profiles.Profile, changes: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a cell.

    Raises:
        UnknownOptionError: a setting that the profile lacks, a value of another kind, or a setting both fixed and varied.
    """
    if both := sorted(set(changes) & set(cell)):
        raise errors.UnknownOptionError(f"{', '.join(both)}: fixed by --set and varied by --axis; drop one of them")
    return profile.with_settings({**changes, **cell})


def checked_cells(
    profile: profiles.Profile, changes: Mapping[str, Any], axes: Mapping[str, Sequence]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every cell, and its settings; values as the profile has them, so that "4" of a command line and 4 are one value.

    Raises:
        UnknownOptionError: too many cells, the same one twice, one that no run can have, or a setting that the rows of the
            experiment vary themselves.
    """
    combinations = cells(axes)
    if not 1 <= len(combinations) <= MOST_CELLS:
        raise errors.UnknownOptionError(f"{len(combinations)} cells; a grid has 1 to {MOST_CELLS}")
    settings = [settings_of(profile, changes, cell) for cell in combinations]
    combinations = [{name: mine[name] for name in cell} for cell, mine in zip(combinations, settings)]
    if len(set(map(cell_name, combinations))) < len(combinations):
        raise errors.UnknownOptionError(f"an axis has a value twice: {dict(axes)}")
    experiment = runner.experiment_of(profile.experiment, profile.name)
    for mine in settings:
        experiment.check(mine)
        taken = {name for row in _rows(experiment, mine) for name in _columns(experiment, row)} & set(axes)
        if taken:
            raise errors.UnknownOptionError(
                f"--axis {', '.join(sorted(taken))}: the rows of {profile.experiment} differ in it already; choose other rows"
            )
    return combinations, settings


def _rows(experiment: Any, settings: Mapping[str, Any]) -> list[str]:
    return experiment.rows_of(settings) if hasattr(experiment, "rows_of") else []


def _columns(experiment: Any, system: str) -> dict[str, Any]:
    """What a row's name says about it in columns of the table."""
    return experiment.columns_of(system) if hasattr(experiment, "columns_of") else {}


# --- running ------------------------------------------------------------------------------------------------------------


def run(
    experiment: str,
    profile: str,
    out: str | Path,
    axes: Mapping[str, Sequence],
    seeds: Sequence[int] | None = None,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    say: Callable[[str], None] = print,
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    """Run every cell that is not complete yet and write the tables and figures of all.

    Args:
        experiment, profile: as for `run`.
        out: a new folder, or that of the same grid with resume=True.
        axes: {setting: its values}; {} runs a single cell.
        seeds: training seeds of every cell; default those of the profile.
        changes: settings that differ from the profile's in every cell.
        resume: keep complete cells, go on with the one that was interrupted.

    Returns:
        the rows of DIR/table.csv.

    Raises:
        UnknownOptionError: a cell that no run can have; found before anything is run.
        ResumeError: `out` is in use, or of another grid.
    """
    chosen, changes = profiles.find(experiment, profile), dict(changes or {})
    seeds = runner.checked_seeds(chosen.seeds if seeds is None else seeds)
    combinations, settings = checked_cells(chosen, changes, axes)
    out, plan = Path(out), {"experiment": experiment, "profile": profile, "seeds": seeds, "grid": combinations}
    spent, started = runner.open_folder(out, {**plan, "settings": changes}, resume), time.monotonic()
    shared: dict[str, dict] = {}
    for number, (cell, mine) in enumerate(zip(combinations, settings), start=1):
        say(f"cell {number} of {len(combinations)}: {cell_name(cell)}")
        data = json.dumps({name: value for name, value in mine.items() if name not in TRAINING}, sort_keys=True)
        _run_cell(out, plan, {**changes, **cell}, cell, say, progress, shared.setdefault(data, {}))
        runner.note_time(out, spent + time.monotonic() - started)
    return write_tables(out)


def _run_cell(
    out: Path, plan: dict, changes: dict, cell: dict, say: Callable, progress: bool | None, shared: dict
) -> None:
    folder = out / "cells" / cell_name(cell)
    if (folder / "summary.json").is_file():
        return
    runner.run(
        plan["experiment"], plan["profile"], folder, plan["seeds"], changes, (folder / "run.json").is_file(), say, progress,
        shared=shared,
    )  # fmt: skip


# --- tables -------------------------------------------------------------------------------------------------------------


def write_tables(out: Path | str) -> list[dict[str, Any]]:
    """Read all cells of a complete grid; write its tables and figures; return the rows of table.csv.

    Raises:
        ResumeError: `out` holds no grid, or a cell is not complete.
    """
    out, plan = Path(out), plan_of(out)
    experiment = runner.experiment_of(plan["experiment"], plan["profile"])
    tables: dict[str, list[dict]] = {name: [] for name in TABLES}
    for cell in plan["grid"]:
        folder = out / "cells" / cell_name(cell)
        if not (folder / "summary.json").is_file():
            raise errors.ResumeError(f"{folder}: this cell is not complete; the same command with --resume goes on")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        records = runner.read_records(folder / "records.jsonl")
        tables["table.csv"] += [{**cell, **_columns(experiment, row["system"]), **row} for row in summary["rows"]]
        tables["items.csv"] += [
            {**cell, **_columns(experiment, r["system"]), **_numbers(r, experiment)} for r in records
        ]
        tables["differences.csv"] += [{**cell, **row} for row in summary["differences"]]
    for name, rows in tables.items():
        grid_table.write(out / name, rows)
    _draw(out, tables["table.csv"])
    return tables["table.csv"]


def plan_of(out: Path | str) -> dict[str, Any]:
    """What a grid's folder says that it is.

    Raises:
        ResumeError: the folder holds no grid.
    """
    if not is_grid(out):
        raise errors.ResumeError(f"{out} holds no grid; `python -m sysdpo_lab grid` makes one")
    return json.loads((Path(out) / "run.json").read_text(encoding="utf-8"))


def is_grid(out: Path | str) -> bool:
    """Whether a folder is one that `run` of this module wrote, complete or not.

    >>> is_grid("no/such/folder")
    False
    """
    path = Path(out) / "run.json"
    return path.is_file() and "grid" in json.loads(path.read_text(encoding="utf-8"))


def _numbers(record: Mapping[str, Any], experiment: Any) -> dict[str, Any]:
    kept = {name: record[name] for name in ("seed", "system", "item")}
    return kept | {name: round(record[name], 6) for name in experiment.METRICS if record.get(name) is not None}


def _draw(out: Path, rows: list[dict]) -> None:
    from sysdpo_lab import figures

    (out / "figures").mkdir(exist_ok=True)
    for metric, figure in pictures(rows).items():
        figures.save_figure(figure, out / "figures" / metric)


def pictures(rows: list[dict], metrics: Sequence[str] = ("wr_prompted", "task_score", "kl", "gap")) -> dict:
    """{metric: figure} of the trained rows: lines over one axis, a heat map over two; of more, the explorer shows them."""
    found = {}
    for metric in metrics:
        mine = [row for row in rows if row["metric"] == metric and row["system"] not in STARTS]
        names = list(grid_table.axes(mine))
        if len(names) in (1, 2):
            found[metric] = (grid_figures.plot_lines if len(names) == 1 else grid_figures.plot_heat)(
                mine, metric, *names
            )
    return found


# --- keeping ------------------------------------------------------------------------------------------------------------


def store(out: str | Path, name: str, folder: str | Path | None = None) -> Path:
    """Copy the tables and pictures of a complete grid to data/results/NAME, with a card.

    Args:
        out: the folder that `run` wrote to.
        name: the new folder's name; an older result of that name is replaced as a whole.
        folder: where results lie; default data/results.

    Raises:
        ResumeError: `out` holds no complete grid.
    """
    out = Path(out)
    target = (Path(folder) if folder else paths.data_folder() / "results") / name
    write_tables(out)
    with atomic.folder(target) as work:
        for file in TABLES:
            shutil.copyfile(out / file, work / file)
        for picture in sorted((out / "figures").glob("*.png")):
            (work / "figures").mkdir(exist_ok=True)
            shutil.copyfile(picture, work / "figures" / picture.name)
        atomic.write_text(work / "CARD.md", card(out, name))
    return target


def load(name: str, table: str = "table", folder: str | Path | None = None) -> list[dict[str, Any]]:
    """The rows of a stored table: "table", "items" or "differences".

    Raises:
        UnknownOptionError: no such table.  MissingFileError: no such result.
    """
    errors.check_option("table", table, tuple(file.removesuffix(".csv") for file in TABLES))
    place = Path(folder) if folder else paths.data_folder() / "results"
    return grid_table.read(place / name / f"{table}.csv")


def command(plan: Mapping[str, Any], name: str) -> str:
    """The command line that repeats a grid."""
    words = ["python", "-m", "sysdpo_lab", "grid", plan["experiment"], "--profile", plan["profile"]]
    axes = {key: list(dict.fromkeys(cell[key] for cell in plan["grid"])) for key in plan["grid"][0]}
    for key, values in axes.items():
        between = ";" if any("," in str(value) for value in values) else ","
        words += ["--axis", f"{key}={between.join(map(str, values))}"]
    words += ["--seeds", ",".join(map(str, plan["seeds"])), "--out", f"runs/{name}"]
    if plan["settings"]:
        words += ["--set", *(f"{key}={value}" for key, value in plan["settings"].items())]
    return shlex.join(words)


def card(out: str | Path, name: str) -> str:
    """What the stored tables are and how they were made, for people."""
    plan = plan_of(out)
    lines = [
        f"# {name}: a grid of {plan['experiment']} at {plan['profile']}",
        "",
        f"- Command: `{command(plan, name)}`",
        f"- Cells: {len(plan['grid'])}; seeds: {', '.join(map(str, plan['seeds']))}; cost: {_seconds(out, plan):.0f} s",
        f"- Versions: {', '.join(f'{package} {version}' for package, version in saving.versions().items())}",
        "- Licence: Apache-2.0, like the code.",
        "",
        "`table.csv`: value, 95 % bootstrap interval over seeds, then items, and n = seeds x items, of every cell, system and",
        "metric. `items.csv`: the numbers of every held-out record. `differences.csv`: paired differences within a cell.",
    ]
    return "\n".join(lines) + "\n"


def _seconds(out: str | Path, plan: Mapping[str, Any]) -> float:
    summaries = (Path(out) / "cells" / cell_name(cell) / "summary.json" for cell in plan["grid"])
    return sum(json.loads(path.read_text(encoding="utf-8"))["seconds"] for path in summaries)
