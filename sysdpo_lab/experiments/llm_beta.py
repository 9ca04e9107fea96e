"""`run beta` on language models: distance from the start and win rate against beta, all else alike.

On tables: experiments/beta.py, where everything is exact.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sysdpo_lab.experiments import grid_figures
from sysdpo_lab.experiments.arms import Arms, ArmsExperiment
from sysdpo_lab.experiments.beta import betas_of
from sysdpo_lab.experiments.two_llm import EXPERIMENT as TWO


def arms(settings: Mapping[str, Any]) -> Arms:
    """One arm a beta, from the setting `betas`.

    >>> arms({"betas": "0.5,0.1"})
    {'beta=0.1': {'beta': 0.1}, 'beta=0.5': {'beta': 0.5}}
    """
    return {f"beta={beta:g}": {"beta": beta} for beta in betas_of(settings)}


def rivals(names: Sequence[str]) -> list[tuple[str, str]]:
    """Each beta with the next smaller one.

    >>> rivals(["beta=0.1", "beta=0.5"])
    [('beta=0.5', 'beta=0.1')]
    """
    return [(larger, smaller) for smaller, larger in zip(names, names[1:])]


def columns(arm: str) -> dict[str, Any]:
    """The arm in a results table.

    >>> columns("beta=0.1")
    {'beta': 0.1}
    """
    return {"beta": float(arm.partition("=")[2])}


def pictures(rows: list[dict], differences: list[dict]) -> dict:
    """Win rate and KL from the start against beta."""
    return {
        f"beta_{name}": (grid_figures.plot_lines(rows, name, "beta"), f"{name} against beta, with 95 % intervals")
        for name in ("wr_prompted", "kl")
        if any(row["metric"] == name for row in rows)
    }


def findings(rows: list[dict], differences: list[dict]) -> list[str]:
    """Distance and win rate at each beta."""
    told = []
    for metric in ("kl", "wr_prompted"):
        mine = sorted((row["beta"], row["value"]) for row in rows if row["metric"] == metric)
        if mine:
            told.append(f"{grid_figures.words(metric)}: {', '.join(f'{v:.2f} at beta {b:g}' for b, v in mine)}.")
    return [" ".join(told)] if told else []


EXPERIMENT = ArmsExperiment(
    title="Beta on language models: distance and win rate against one number",
    parents=TWO.parents, roles=TWO.roles, about=TWO.about, arms=arms, columns=columns, rivals=rivals, pictures=pictures,
    findings=findings,
)  # fmt: skip
