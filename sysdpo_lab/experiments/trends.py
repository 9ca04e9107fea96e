"""The two trends of the paper's ablation, tested: DBS above MC at the same k; flat in k.

An interval says "above", "below" or "open". "Flat" is a claim too: it needs an interval that lies within a margin, not only
one that holds 0. Several comparisons at once need wider intervals than one (`simultaneous`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from sysdpo_lab import errors, evaluation
from sysdpo_lab.evaluation import Interval
from sysdpo_lab.experiments.arms import arm_of

MARGIN = 0.03  # of win rate: a difference that nobody would act on
Differences = Sequence[Mapping[str, Any]]  # of a summary: "a", "b", "metric", "value", "ci_low", "ci_high"


def verdict(low: float, high: float) -> str:
    """What an interval of a difference says: "above" 0, "below", or "open".

    >>> verdict(0.01, 0.2), verdict(-0.2, -0.01), verdict(-0.1, 0.1)
    ('above', 'below', 'open')
    """
    return "above" if low > 0 else "below" if high < 0 else "open"


def flatness(low: float, high: float, margin: float = MARGIN) -> str:
    """What an interval of a difference says about "no difference": "flat" within the margin, "not flat", or "open".

    >>> flatness(-0.01, 0.02), flatness(0.04, 0.1), flatness(-0.1, 0.1)
    ('flat', 'not flat', 'open')
    """
    if -margin <= low and high <= margin:
        return "flat"
    return "not flat" if low > margin or high < -margin else "open"


def same_k(differences: Differences, metric: str = "wr_prompted") -> list[Mapping]:
    """The paired differences of DBS and MC at the same k, k rising."""
    found = {(arm_of(row["a"]), arm_of(row["b"])): row for row in _differences(differences, metric)}
    ks = sorted(int(a.partition("-")[2]) for a, b in found if a.startswith("dbs-") and b == a.replace("dbs-", "mc-"))
    return [found[f"dbs-{k}", f"mc-{k}"] for k in ks]


def in_k(differences: Differences, metric: str = "wr_prompted") -> list[Mapping]:
    """The paired differences of DBS, and of MC, at a larger k and at the smallest."""

    def kind(arm: str) -> str:
        return arm.rpartition("-")[0]

    pairs = [(arm_of(row["a"]), arm_of(row["b"]), row) for row in _differences(differences, metric)]
    return [row for a, b, row in pairs if kind(a) == kind(b) and kind(a) in ("dbs", "mc")]


def _differences(differences: Differences, metric: str) -> list[Mapping]:
    return [row for row in differences if row["metric"] == metric and arm_of(row["a"]) and arm_of(row["b"])]


def in_words(differences: Differences, metric: str = "wr_prompted") -> str:
    """Both trends in one paragraph; every number is from the differences."""
    first, second = same_k(differences, metric), in_k(differences, metric)
    if not first and not second:
        return "This run has no two arms that the paper's trends are about."
    verdicts = [verdict(row["ci_low"], row["ci_high"]) for row in first]
    changes = [flatness(row["ci_low"], row["ci_high"]) for row in second]
    return (
        f"The paper reports that DBS is above MC and that the result is flat in k. Here, {metric}, paired: DBS minus MC at the "
        f"same k: {_listed(first) or 'not run'}; {_counted(verdicts, ('above', 'below', 'open'))}. A larger k minus the "
        f"smallest: {_listed(second) or 'not run'}; within {100 * MARGIN:g} points of each other: "
        f"{_counted(changes, ('flat', 'not flat', 'open'))}. Each interval is 95 % by itself; {len(first) + len(second)} of "
        "them together are less sure."
    )


def _listed(rows: Sequence[Mapping]) -> str:
    return ", ".join(
        f"{arm_of(row['a'])} - {arm_of(row['b'])} {100 * row['value']:+.1f} points [{100 * row['ci_low']:+.1f}, "
        f"{100 * row['ci_high']:+.1f}]"
        for row in rows
    )


def _counted(words: Sequence[str], kinds: Sequence[str]) -> str:
    return ", ".join(f"{words.count(kind)} {kind}" for kind in kinds)


def simultaneous(
    tables: Mapping[str, Any], level: float = 0.95, resamples: int = evaluation.RESAMPLES
) -> dict[str, Interval]:
    """Intervals that hold all at once with probability `level`: value +- q x standard error, one q for all.

    q is the quantile of the largest |mean - value| / standard error over the tables in the same bootstrap resamples, so it
    knows how the comparisons hang together; Bonferroni's does not, and is wider.

    Args:
        tables: {name: differences (seeds, items)}, all of one shape.
        level: larger is wider.

    Raises:
        BatchMismatchError: no table, or tables of different shapes.

    >>> one = numpy.array([[0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]])
    >>> found = simultaneous({"a": one, "b": 1 - one})
    >>> found["a"].value, found["a"].ci_low < evaluation.interval(one.tolist()).ci_high
    (0.625, True)
    """
    arrays = {name: evaluation.as_table(table) for name, table in tables.items()}
    if len({array.shape for array in arrays.values()}) != 1:
        raise errors.BatchMismatchError(f"tables must have one shape, found {[a.shape for a in arrays.values()]}")
    means = numpy.array([evaluation.resampled_means(array, resamples) for array in arrays.values()])
    values = numpy.array([array.mean() for array in arrays.values()])
    spread = means.std(axis=1)
    away = numpy.abs(means - values[:, None])
    scaled = numpy.divide(away, spread[:, None], out=numpy.zeros_like(away), where=spread[:, None] > 0)
    q = numpy.quantile(scaled.max(axis=0), level)
    return {
        name: Interval(float(value), float(value - q * error), float(value + q * error), array.size)
        for (name, array), value, error in zip(arrays.items(), values, spread)
    }
