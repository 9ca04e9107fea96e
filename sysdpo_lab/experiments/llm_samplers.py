"""`run samplers` on language models: how the set A of SysDPO-Sampling is drawn, and how large it is (the paper's ablation).

Arms: dbs-K (diverse beam search, K groups), mc-K (K ancestral draws, repeats removed), mc-counted-K (repeats counted),
mc-importance-K, gumbel-K (K without replacement: stochastic beam search), gumbel-ht-K (the same with inclusion weights).
On tables: experiments/samplers.py, where everything is exact.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sysdpo_lab import errors
from sysdpo_lab.experiments import grid_figures, trends
from sysdpo_lab.experiments.arms import Arms, ArmsExperiment, arm_of, names_in
from sysdpo_lab.experiments.two_llm import EXPERIMENT as TWO

KINDS = {
    "dbs": {"sampler": "diverse_beam"},
    "mc": {"sampler": "monte_carlo"},
    "mc-counted": {"sampler": "monte_carlo", "repeats": "count"},
    "mc-importance": {"sampler": "monte_carlo", "weights": "importance"},
    "gumbel": {"sampler": "gumbel_top_k"},
    "gumbel-ht": {"sampler": "gumbel_top_k", "weights": "horvitz_thompson"},
}


def kind_and_size(arm: str) -> tuple[str, int]:
    """Who draws, and how many.

    >>> kind_and_size("gumbel-ht-2")
    ('gumbel-ht', 2)

    Raises:
        UnknownOptionError: no such sampler, or no size.
    """
    kind, _, size = arm.rpartition("-")
    errors.check_option(f"sampler of the arm {arm!r}", kind, tuple(KINDS))
    if not size.isdigit() or int(size) < 1:
        raise errors.UnknownOptionError(f"the arm {arm!r} must end with how many drafts it draws, such as dbs-2")
    return kind, int(size)


def arms(settings: Mapping[str, Any]) -> Arms:
    """The arms of a run, from the setting `arms`.

    >>> arms({"arms": "dbs-2,mc-counted-4"})["mc-counted-4"]
    {'sampler': 'monte_carlo', 'repeats': 'count', 'k': 4}
    """
    found = {arm: kind_and_size(arm) for arm in names_in(settings["arms"])}
    return {arm: {**KINDS[kind], "k": size} for arm, (kind, size) in found.items()}


def rivals(names: Sequence[str]) -> list[tuple[str, str]]:
    """What the paper's two trends are about, then Gumbel: DBS against MC at the same k, k against the smallest k.

    >>> rivals(["dbs-2", "dbs-4", "mc-2", "gumbel-2"])
    [('dbs-2', 'mc-2'), ('dbs-4', 'dbs-2'), ('gumbel-2', 'mc-2'), ('dbs-2', 'gumbel-2')]
    """
    sizes = {arm: kind_and_size(arm) for arm in names}
    ks = sorted({k for _, k in sizes.values()})
    pairs = [(f"dbs-{k}", f"mc-{k}") for k in ks]
    for kind in ("dbs", "mc"):
        mine = sorted(k for own, k in sizes.values() if own == kind)
        pairs += [(f"{kind}-{k}", f"{kind}-{mine[0]}") for k in mine[1:]]
    for kind, against in (("mc-counted", "mc"), ("mc-importance", "mc"), ("gumbel", "mc"), ("gumbel-ht", "gumbel")):
        pairs += [(f"{kind}-{k}", f"{against}-{k}") for k in ks]
    pairs += [(f"dbs-{k}", f"gumbel-{k}") for k in ks]
    return [(a, b) for a, b in pairs if a in sizes and b in sizes]


def columns(arm: str) -> dict[str, Any]:
    """The arm in a results table.

    >>> columns("mc-counted-4")
    {'sampler': 'mc-counted', 'k': 4}
    """
    return dict(zip(("sampler", "k"), kind_and_size(arm)))


def pictures(rows: list[dict], differences: list[dict]) -> dict:
    """Win rate, effective number and distinct drafts against k; the paired differences."""
    found = {
        name: (
            grid_figures.plot_lines(rows, name, "k", "sampler"),
            f"{name} of each sampler against k, with 95 % intervals",
        )
        for name in ("wr_prompted", "effective_number", "set_distinct")
        if any(row["metric"] == name for row in rows)
    }
    if any(row["metric"] == "wr_prompted" and arm_of(row["b"]) for row in differences):
        alt = "paired differences of wr_prompted between samplers, with 95 % intervals"
        found["differences"] = (grid_figures.plot_differences(differences, "wr_prompted"), alt)
    return {f"k_{name}": picture for name, picture in found.items()}


def findings(rows: list[dict], differences: list[dict]) -> list[str]:
    """The paper's two trends, as found here."""
    return [trends.in_words(differences, "wr_prompted")]


EXPERIMENT = ArmsExperiment(
    title="Samplers on language models: who draws the drafts, and how many",
    parents=TWO.parents, roles=TWO.roles, about=TWO.about, arms=arms, columns=columns, rivals=rivals, pictures=pictures,
    findings=findings,
)  # fmt: skip
