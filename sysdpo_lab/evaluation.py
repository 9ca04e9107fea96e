"""Metrics and their intervals (E10): win rates with ties, bootstrap over seeds then items, paired differences."""

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy
from jaxtyping import Float

from sysdpo_lab import errors

RESAMPLES = 2000


def win(first: float, second: float) -> float:
    """1 when the first score is higher, 0 when the second is, 1/2 for a tie (E10).

    >>> win(0.5, 0.25), win(0.5, 0.5)
    (1.0, 0.5)
    """
    if numpy.isnan(first) or numpy.isnan(second):
        raise errors.NonFiniteError(f"cannot compare the scores {first} and {second}")
    return 0.5 + 0.5 * (int(first > second) - int(first < second))


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % bootstrap interval; n = number of items times seeds."""

    value: float
    ci_low: float
    ci_high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.ci_low:.3f}, {self.ci_high:.3f}]"


def as_table(values: Sequence[Sequence[float]]) -> Float[numpy.ndarray, "S N"]:
    """Values a seed, items in the same order for every seed, as a (seeds, items) array without NaN.

    Raises:
        BatchMismatchError: seeds have different numbers of items.  NonFiniteError: a value is not finite.
    """
    lengths = {len(row) for row in values}
    if len(values) == 0 or len(lengths) != 1 or lengths == {0}:
        raise errors.BatchMismatchError(f"every seed needs the same items, at least one; found {sorted(lengths)} items")
    table = numpy.asarray(values, dtype=float)
    if not numpy.isfinite(table).all():
        seed, item = numpy.argwhere(~numpy.isfinite(table))[0]
        raise errors.NonFiniteError(f"seed {seed}, item {item}: the value is {table[seed, item]}")
    return table


def resampled_means(table: Float[numpy.ndarray, "S N"], resamples: int = RESAMPLES, seed: int = 0):
    """Means of bootstrap tables: seeds are drawn with replacement, then items (the same items for every seed).

    The items are shared because every seed is measured on the same held-out set: drawing them apart would count one set
    of items as several. Where neither seeds nor items matter (pure noise) the interval is too wide, by up to sqrt(3);
    where only seeds matter, a handful of them gives one that is too narrow (Owen 2007, "The pigeonhole bootstrap").

    >>> resampled_means(numpy.ones((2, 3)), resamples=2).tolist()
    [1.0, 1.0]
    """
    rows, columns = _resampled_counts(*table.shape, resamples, seed)
    means = numpy.einsum("rs,sn,rn->r", rows, table, columns, optimize=True) / table.size
    return numpy.clip(means, table.min(), table.max())  # rounding must not leave the range that every mean lies in


@functools.lru_cache(maxsize=4)  # all rows of a summary have one shape: hundreds of them share what is drawn
def _resampled_counts(seeds: int, items: int, resamples: int, seed: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """How often each bootstrap table holds each seed (R, S) and each item (R, N)."""
    rng = numpy.random.default_rng(seed)
    rows = _counts(rng.integers(0, seeds, (resamples, seeds)), seeds)
    return rows, _counts(rng.integers(0, items, (resamples, items)), items)


def _counts(index: numpy.ndarray, size: int) -> numpy.ndarray:
    counts = numpy.zeros((len(index), size))
    numpy.add.at(counts, (numpy.arange(len(index))[:, None], index), 1)
    return counts


def interval(values: Sequence[Sequence[float]], resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Mean over seeds of the mean over items, with a 95 % bootstrap interval over seeds, then items (section 7).

    Args:
        values: one list of item values a seed.

    >>> interval([[0.0, 1.0], [0.0, 1.0]]).value
    0.5
    """
    table = as_table(values)
    means = resampled_means(table, resamples, seed)
    low, high = numpy.quantile(means, [0.025, 0.975])
    value = numpy.clip(table.mean(), table.min(), table.max())
    return Interval(float(value), float(low), float(high), table.size)


def paired_difference(first, second, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Interval of the mean of first - second, item by item: both systems see the same seeds and items.

    >>> paired_difference([[1.0, 2.0]], [[0.0, 1.0]]).ci_low
    1.0
    """
    one, other = as_table(first), as_table(second)
    if one.shape != other.shape:
        raise errors.BatchMismatchError(f"paired tables have shapes {one.shape} and {other.shape}")
    return interval((one - other).tolist(), resamples, seed)


def summary_row(system: str, metric: str, found: Interval) -> dict:
    """A row of summary.json."""
    return {"system": system, "metric": metric, **asdict(found)}


def summarise(
    records: Sequence[dict],
    metrics: Sequence[str],
    seeds: Sequence[int],
    pairs: Sequence[tuple[str, str]] | None = None,
) -> tuple[list[dict], list[dict]]:
    """Rows and paired differences of all systems, from item records {"seed", "system", "item", metric: value}.

    A metric that a system has for no item is left out. Differences compare the systems of `pairs`, first minus second; by
    default every system with the first one (the start), and then joint with every other one.

    Raises:
        BatchMismatchError: a system has a metric for some items or seeds only.  NonFiniteError: a value is not finite.
    """
    by_system: dict[str, list[dict]] = {}
    for record in records:
        by_system.setdefault(record["system"], []).append(record)
    systems, items = list(by_system), sorted({record["item"] for record in records})
    tables = {
        (system, metric): table
        for system in systems
        for metric in metrics
        if (table := _table(by_system[system], system, metric, seeds, items)) is not None
    }
    rows = [summary_row(system, metric, interval(table)) for (system, metric), table in tables.items()]
    if pairs is None:
        pairs = [(system, systems[0]) for system in systems[1:]]
        pairs += [("joint", system) for system in systems[1:] if "joint" in systems[1:] and system != "joint"]
    differences = []
    for a, b in pairs:
        for metric in metrics:
            if (a, metric) in tables and (b, metric) in tables:
                found = asdict(paired_difference(tables[a, metric], tables[b, metric]))
                differences.append({"a": a, "b": b, "metric": metric, **found})
    return rows, differences


def _table(
    records: Sequence[dict], system: str, metric: str, seeds: Sequence[int], items: Sequence[int]
) -> list[list[float]] | None:
    """A system's values of a metric, items in order, one list a seed; None where it does not have the metric."""
    found = {(r["seed"], r["item"]): r.get(metric) for r in records}
    if all(value is None for value in found.values()):  # a null in the file counts as "does not have it" too
        return None
    missing = [(seed, item) for seed in seeds for item in items if found.get((seed, item)) is None]
    if missing:
        seed, item = missing[0]
        raise errors.BatchMismatchError(
            f"{metric} of {system!r} is missing for {len(missing)} of {len(seeds) * len(items)} records, "
            f"first for seed {seed}, item {item}; intervals need every item of every seed"
        )
    table = [[float(found[seed, item]) for item in items] for seed in seeds]
    try:
        as_table(table)
    except errors.NonFiniteError as error:
        raise errors.NonFiniteError(f"{metric} of {system!r}: {error}") from error
    return table


def find_row(summary: dict, system: str, metric: str) -> dict:
    """The row of summary.json for a system and a metric.

    Raises:
        UnknownOptionError: there is none; the message lists what there is.
    """
    for row in summary["rows"]:
        if row["system"] == system and row["metric"] == metric:
            return row
    known = sorted({(row["system"], row["metric"]) for row in summary["rows"]})
    raise errors.UnknownOptionError(f"the summary has no row ({system!r}, {metric!r}); it has {known}")
