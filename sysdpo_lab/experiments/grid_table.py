"""The results table of a grid: one row a cell, system and metric; columns are the settings that vary, then what was measured.

A row is a dict. Written as CSV, so that any program reads it; numbers come back as numbers.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sysdpo_lab import atomic, errors

MEASURED = ("system", "metric", "value", "ci_low", "ci_high", "n")
Row = Mapping[str, Any]


def as_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV: settings first, in the order of their first appearance.

    >>> as_csv([{"k": 2, "metric": "kl", "value": 0.5}]).splitlines()
    ['k,metric,value', '2,kl,0.5']
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [name for name in names if name not in MEASURED] + [name for name in MEASURED if name in names]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write(path: Path | str, rows: Sequence[Row]) -> Path:
    """Write a table in one step."""
    return atomic.write_text(path, as_csv(rows))


def read(path: Path | str) -> list[dict[str, Any]]:
    """The rows that `write` wrote; a cell that is empty is left out of its row.

    Raises:
        MissingFileError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise errors.MissingFileError(f"{path}: no such table; `python -m sysdpo_lab grid` writes one")
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: typed(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def typed(text: str) -> int | float | str:
    """A number where the text is one.

    >>> typed("2"), typed("0.5"), typed("dbs")
    (2, 0.5, 'dbs')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def axes(rows: Iterable[Row]) -> dict[str, list]:
    """The columns that vary, with their values: numbers rising, words in the order of the table.

    The column `system` counts only where one cell has several: joint[dbs-2] beside sampler = dbs, k = 2 says nothing new.

    >>> axes([{"k": 4, "system": "joint", "metric": "kl"}, {"k": 2, "system": "joint", "metric": "kl"}])
    {'k': [2, 4]}
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row if name not in MEASURED))
    systems: dict[tuple, set] = {}
    for row in rows:
        systems.setdefault((row["metric"], *(row.get(name) for name in names)), set()).add(row.get("system"))
    names += ["system"] if any(len(found) > 1 for found in systems.values()) else []
    values = {name: ordered(row[name] for row in rows if name in row) for name in names}
    return {name: found for name, found in values.items() if len(found) > 1}


def ordered(values: Iterable) -> list:
    """Each value once.

    >>> ordered([4, 2, 4]), ordered(["mc", "dbs", "mc"])
    ([2, 4], ['mc', 'dbs'])
    """
    found = list(dict.fromkeys(values))
    return sorted(found) if all(isinstance(value, (int, float)) for value in found) else found


def select(rows: Iterable[Row], metric: str, **fixed: Any) -> list[Row]:
    """The rows of one metric in which the settings have the values of `fixed`.

    Raises:
        UnknownOptionError: no row has the metric, or this value; the message lists those that there are.

    >>> select([{"k": 2, "metric": "kl"}, {"k": 4, "metric": "kl"}], "kl", k=4)
    [{'k': 4, 'metric': 'kl'}]
    """
    rows = list(rows)
    errors.check_option("metric", metric, tuple(dict.fromkeys(row["metric"] for row in rows)))
    rows = [row for row in rows if row["metric"] == metric]
    for name, value in fixed.items():
        known = ordered(row[name] for row in rows if name in row)
        errors.check_option(name, value, tuple(known))
        rows = [row for row in rows if row.get(name) == value]
    return rows


def by_places(rows: Iterable[Row], *names: str) -> dict[tuple, Row]:
    """The rows by their values of some settings.

    Raises:
        UnknownOptionError: a row lacks a setting, or two rows share a place: another setting varies too and must be fixed.

    >>> by_places([{"k": 2, "value": 0.5}], "k")
    {(2,): {'k': 2, 'value': 0.5}}
    """
    found: dict[tuple, Row] = {}
    for row in rows:
        for name in names:
            errors.check_option("setting", name, tuple(row))
        place = tuple(row[name] for name in names)
        if place in found:
            differing = [name for name in row if name not in MEASURED[1:] and row[name] != found[place].get(name)]
            raise errors.UnknownOptionError(
                f"several rows at {dict(zip(names, place))}: {', '.join(differing) or 'nothing'} varies too; fix it, "
                "or draw it as another axis"
            )
        found[place] = row
    return found


# --- items --------------------------------------------------------------------------------------------------------------


def item_values(items: Iterable[Row], metric: str, **where: Any) -> list[list[float]]:
    """The values of one system in one cell: a list a seed, items in order; for `evaluation.interval`.

    Args:
        items: the rows of items.csv.
        metric: which number.
        where: what names the cell and the system, for instance sampler="dbs", k=2.

    Raises:
        UnknownOptionError: no item is there, or one is there twice: `where` leaves something open.

    >>> items = [{"seed": 0, "item": i, "system": "joint", "k": 2, "kl": i / 2} for i in (1, 0)]
    >>> item_values(items, "kl", k=2)
    [[0.0, 0.5]]
    """
    mine = [row for row in items if all(row.get(name) == value for name, value in where.items()) and metric in row]
    found = {(row["seed"], row["item"]): float(row[metric]) for row in mine}
    if not found or len(found) < len(mine):
        raise errors.UnknownOptionError(
            f"{len(mine)} values of {metric!r} at {where} for {len(found)} items; name one cell and one system"
        )
    seeds, numbers = (ordered(place[side] for place in found) for side in (0, 1))
    return [[found[seed, number] for number in numbers if (seed, number) in found] for seed in seeds]
