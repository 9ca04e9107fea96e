"""Figures and sentences from a summary of `run beta`, stored or fresh; lessons draw the same ones."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sysdpo_lab import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STARTS = {"ring": "uniform marginal", "uneven": "uneven start"}
Summary = Mapping  # with "rows" and "settings", as in summary.json
Curve = Mapping[float, Mapping]  # {beta: row}


# --- reading a summary --------------------------------------------------------------------------------------------------


def start_of(row: str) -> str:
    """Which start a row belongs to.

    >>> start_of("joint[beta=0.5]"), start_of("joint[beta=0.5,uneven]")
    ('ring', 'uneven')
    """
    return "uneven" if row.endswith("uneven]") else "ring"


def curve(summary: Summary, metric: str, start: str) -> dict[float, Mapping]:
    """The rows of one metric and one start by beta, rising; {} when the run did not have them.

    >>> rows = [{"system": "joint[beta=2]", "metric": "kl", "value": 0.1}, {"system": "before", "metric": "kl", "value": 0.0}]
    >>> {beta: row["value"] for beta, row in curve({"rows": rows}, "kl", "ring").items()}
    {2.0: 0.1}
    """
    found = {}
    for row in summary["rows"]:
        beta = re.match(r"joint\[beta=([^,\]]+)", row["system"])
        if beta and row["metric"] == metric and start_of(row["system"]) == start:
            found[float(beta.group(1))] = row
    return dict(sorted(found.items()))


def curves(summary: Summary, metric: str) -> dict[str, Curve]:
    """{start: `curve`} of the starts that the run had."""
    found = {start: curve(summary, metric, start) for start in STARTS}
    return {start: rows for start, rows in found.items() if rows}


# --- drawing ------------------------------------------------------------------------------------------------------------


def _band(ax: "Axes", rows: Curve, style: dict) -> None:
    betas, cells = list(rows), list(rows.values())
    ax.plot(betas, [cell["value"] for cell in cells], **style)
    low, high = ([cell[end] for cell in cells] for end in ("ci_low", "ci_high"))
    ax.fill_between(betas, low, high, color=style["color"], alpha=0.2, linewidth=0)


def _beta_axis(ax: "Axes", betas: Mapping) -> None:
    ax.set_xscale("log")
    ax.set_xticks(list(betas), [f"{beta:g}" for beta in betas])
    ax.minorticks_off()
    ax.set_xlabel("beta")


def plot_metric(summary: Summary, metric: str, label: str) -> "Figure":
    """One metric against beta with 95 % intervals, a line a start."""
    figure, (ax,) = figures.new_figure(height=3.2)
    found = curves(summary, metric)
    for style, (start, rows) in zip(figures.line_styles(len(found)), found.items()):
        _band(ax, rows, dict(style, label=STARTS[start]))
        _beta_axis(ax, rows)
    ax.set_ylabel(label)
    ax.legend(frameon=False)
    return figure


def plot_beta_hat(summary: Summary) -> "Figure":
    """The fitted beta against the beta of training: without the start, and with log p_ref as a second regressor."""
    found = curves(summary, "beta_hat")
    figure, axes = figures.new_figure(len(found), width=4.2 * len(found), height=3.4)
    for ax, (start, rows) in zip(axes, found.items()):
        plain, adjusted = figures.line_styles(2)
        betas = list(rows)
        ax.plot(betas, betas, color="0.4", linestyle=":", linewidth=1, label="beta itself")
        _band(ax, rows, dict(plain, label="log p alone"))
        _band(ax, curve(summary, "beta_hat_adjusted", start), dict(adjusted, label="with log p_ref"))
        _beta_axis(ax, rows)
        if (
            min(row["ci_low"] for row in rows.values()) > 0
        ):  # a start that likes what the judge dislikes has a slope below 0
            ax.set_yscale("log")
            ax.set_yticks(betas, [f"{beta:g}" for beta in betas])
            ax.minorticks_off()
        ax.set(ylabel="fitted beta", title=STARTS[start])
    axes[0].legend(frameon=False)
    return figure


def plot_frontier(summary: Summary) -> "Figure":
    """Win rate against the start over the distance from it, one dot a beta."""
    figure, (ax,) = figures.new_figure(height=3.4)
    wins = curves(summary, "wr_prompted")
    for style, (start, rows) in zip(figures.line_styles(len(wins)), wins.items()):
        distance = curve(summary, "kl", start)
        xs, ys = ([cell["value"] for cell in cells.values()] for cells in (distance, rows))
        ax.plot([0.0, *xs[::-1]], [0.5, *ys[::-1]], label=STARTS[start], **style)
        for beta, x, y in zip(rows, xs, ys):
            side = {"ha": "right", "va": "bottom"} if start == "ring" else {"ha": "left", "va": "top"}
            ax.annotate(
                f"{beta:g}", (x, y), (-4, 4) if start == "ring" else (4, -4), textcoords="offset points", **side
            )
    ax.set(xlabel="KL from the start (nats)", ylabel="win rate against the start")
    ax.legend(frameon=False, loc="lower right", title="numbers: beta")
    return figure


def plot_steps(summary: Summary) -> "Figure":
    """Adam steps until the gap is below 0.001 against beta, for the two learning rates; both axes logarithmic."""
    figure, (ax,) = figures.new_figure(height=3.4)
    settings, first = summary["settings"], next(iter(curves(summary, "steps")))
    for style, metric, lr in zip(figures.line_styles(2), ("steps", "steps_slow"), ("lr", "lr_slow")):
        rows = curve(summary, metric, first)
        _band(ax, rows, dict(style, label=f"lr {settings[lr]:g}"))
        _beta_axis(ax, rows)
    ax.set_yscale("log")
    ax.set_yticks([100, 200, 500, 1000, 2000, 5000], ["100", "200", "500", "1000", "2000", "5000"])
    ax.minorticks_off()
    ax.set(ylabel="Adam steps", title=f"steps to a gap of 0.001, {STARTS[first]}")
    ax.legend(frameon=False)
    return figure


def report_figures(summary: Summary) -> dict[str, tuple["Figure", str]]:
    """{name: (figure, alt text)} of a run's report."""
    return {
        "kl": (
            plot_metric(summary, "kl", "KL(system || start) (nats)"),
            "KL from the start against beta: it falls all the way, a larger beta stays closer",
        ),
        "wr_prompted": (plot_frontier(summary), "win rate against the start over KL from it, one dot a beta"),
        "beta_hat": (
            plot_beta_hat(summary),
            "the beta fitted to the trained system against the beta of training, with and without log p_ref; with it on the "
            "diagonal",
        ),
        "gap_unadjusted": (
            plot_metric(summary, "gap_unadjusted", "gap without the reference (nats)"),
            "the plain gap after training against beta: 0 for the uniform marginal, proportional to beta for the uneven start",
        ),
        "steps": (
            plot_steps(summary),
            "Adam steps to a gap of 0.001 against beta for two learning rates, falling to a floor",
        ),
    }


# --- words --------------------------------------------------------------------------------------------------------------


def findings(summary: Summary) -> list[str]:
    """Paragraphs that say what a run found, with its numbers."""
    return [
        "Every number is computed, not sampled. Joint SysDPO-Sampling with every intermediate in A, Adam on the population "
        f"loss (lr {summary['settings']['lr']:g}), each system measured where its reference-adjusted gap first falls below "
        "0.001. The ring has a uniform marginal p_ref(z|x); the uneven start has random tables. Both meet the same judges.",
        *(_distance(summary, start) for start in curves(summary, "kl")),
        *(_fit(summary, start) for start in curves(summary, "beta_hat")),
        _time(summary),
    ]


def _ends(rows: Curve) -> tuple[float, float, float, float]:
    (low, first), (high, last) = list(rows.items())[0], list(rows.items())[-1]
    return low, first["value"], high, last["value"]


def _distance(summary: Summary, start: str) -> str:
    low, far, high, near = _ends(curve(summary, "kl", start))
    _, most, _, least = _ends(curve(summary, "wr_prompted", start))
    return (
        f"{STARTS[start].capitalize()}: from beta {low:g} to {high:g} the distance from the start goes from {far:.3f} to "
        f"{near:.3f} nats and the win rate against it from {most:.3f} to {least:.3f}. A larger beta stays closer and wins less."
    )


def _fit(summary: Summary, start: str) -> str:
    plain, adjusted = curve(summary, "beta_hat", start), curve(summary, "beta_hat_adjusted", start)
    off = max(abs(row["value"] - beta) / beta for beta, row in adjusted.items())
    ratios = [row["value"] / beta for beta, row in plain.items()]
    return (
        f"{STARTS[start].capitalize()}: the slope of the judge's logits on log p is {min(ratios):.2f} to {max(ratios):.2f} times "
        f"beta; with log p_ref as a second regressor it is beta, to {100 * off:.1f} %. Only the second one reads beta off a "
        "system that was trained from an uneven start."
    )


def _time(summary: Summary) -> str:
    first = next(iter(curves(summary, "steps")))
    parts = []
    for metric, lr in (("steps", "lr"), ("steps_slow", "lr_slow")):
        low, slow, high, quick = _ends(curve(summary, metric, first))
        parts.append(f"lr {summary['settings'][lr]:g}: {slow:.0f} steps at beta {low:g}, {quick:.0f} at beta {high:g}")
    why = "A small beta asks for large log-ratios, r / beta, and a step moves a logit by about lr."
    return f"Time ({STARTS[first]}): {'; '.join(parts)}. {why}"
