"""Figures of `run faces`: strips before and after, rows of the table, who carries the margin, winners' and losers' errors."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from sysdpo_lab.worlds import faces

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sysdpo_lab.experiments.runner import Context

STRIPS = ("before", "only:captions", "joint")
SIDES = ("chosen", "rejected")
GAP = 2  # white pixels between pictures


def figures(context: "Context", summary: Mapping, records: Sequence[Mapping]) -> dict[str, tuple["Figure", str]]:
    """{name: (figure, alt text)} of a run."""
    from sysdpo_lab import figures as draw
    from sysdpo_lab.experiments.faces_rows import build_system

    pictures = {"graph": (draw.draw_graph(build_system(context)), "the graph: x feeds captions, captions feed images")}
    for metric in ("order_consistency", "preference_score"):
        alt = f"{metric} of each row with its 95 % interval"
        pictures[metric] = (draw.plot_rows(summary["rows"], metric), alt)
    strips = read_strips(context, records)
    if strips:
        systems = ", ".join(dict.fromkeys(system for system, _ in strips))
        pictures["strips"] = (
            _plot_of(context)(strips, records),
            f"rows of pictures, framed where in order, side by side: {systems}",
        )
    history = read_history(context, "joint")
    if history:
        window = max(1, len(history) // 12)
        pictures["training"] = (
            draw.plot_training(history, window=window), "loss, margin and accuracy of joint training in round 2",
        )  # fmt: skip
        pictures["shares"] = (
            draw.plot_shares(history, window=window), "share of captions and of images in the log-ratio gap of joint training",
        )  # fmt: skip
    runs = {name: read_history(context, name) for name in ("joint", "winners-only", "preference-only")}
    runs = {name: found for name, found in runs.items() if found and "images_error_chosen" in found[0]}
    if runs:
        alt = "denoising error of winners and losers relative to the start's, against the step of round 2"
        pictures["errors"] = (plot_errors(runs), alt)
    return pictures


def _plot_of(context: "Context"):
    if context.profile.name != "paper":
        return plot_strips
    from sysdpo_lab.experiments import faces_paper

    return faces_paper.plot_strips


# --- files ------------------------------------------------------------------------------------------------------------


def read_history(context: "Context", stage: str) -> list[dict]:
    """The logged steps of a stage, of the first seed that has it."""
    from sysdpo_lab.experiments.runner import read_records

    found = sorted(context.out.glob(f"seed-*/{stage.replace(':', '-')}/history.jsonl"))
    return read_records(found[0]) if found else []


def read_strips(context: "Context", records: Sequence[Mapping]) -> dict[tuple[str, int], UInt8[Tensor, "n 3 H W"]]:
    """{(system, item): pictures} of the first seed, for the systems of `STRIPS` that the run has."""
    from safetensors.torch import load_file

    seed, found = records[0]["seed"], {}
    measured = {record["system"] for record in records}  # a study's folder may hold strips of other rows
    for system in (system for system in STRIPS if system in measured):
        path = context.out / f"seed-{seed}" / "rows" / system.replace(":", "-") / "strips.safetensors"
        if path.is_file():
            found |= {(system, int(item)): strip for item, strip in load_file(path).items()}
    return found


# --- strips -----------------------------------------------------------------------------------------------------------


def joined(strip: UInt8[Tensor, "n 3 H W"]) -> UInt8[Tensor, "H W3 3"]:
    """Pictures of one row beside each other, white between them.

    >>> joined(torch.zeros(3, 3, 24, 24, dtype=torch.uint8)).shape
    torch.Size([24, 76, 3])
    """
    height = strip.shape[2]
    white = torch.full((height, GAP, 3), 255, dtype=torch.uint8)
    parts = [part for picture in strip for part in (white, picture.permute(1, 2, 0))]
    return torch.cat(parts[1:], 1)


def plot_strips(strips: Mapping[tuple[str, int], Tensor], records: Sequence[Mapping]) -> "Figure":
    """One line a request, one column a system: its first row of pictures with their degree words; a frame where in order.

    Args:
        strips: {(system, item): (n, 3, H, W), 8 bits a colour}.
        records: of the run, for the requests and the captions.
    """
    from matplotlib.figure import Figure

    seed = records[0]["seed"]
    told = {(r["system"], r["item"]): r for r in records if r["seed"] == seed}
    systems = list(dict.fromkeys(system for system, _ in strips))
    items = sorted({item for _, item in strips})
    width, height = max(3.3 * len(systems), 5.2), 0.85 + 1.3 * len(items)  # a request needs five inches
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.subplots(len(items), len(systems), squeeze=False)
    figure.subplots_adjust(0.01, 0.3 / height, 0.99, 1 - 0.6 / height, 0.08, 0.55)
    for line, item in enumerate(items):
        for column, system in enumerate(systems):
            strip = strips.get((system, item))
            _strip(axes[line][column], strip, told[system, item], system if line == 0 else "")
        axes[line][0].annotate(
            told[systems[0], item]["x"], (0, 1.08), xycoords="axes fraction", fontsize=8, va="bottom"
        )
    return figure


def _strip(ax: "Axes", strip: UInt8[Tensor, "n 3 H W"] | None, record: Mapping[str, Any], head: str) -> None:
    ax.set_axis_off()
    ax.annotate(head, (0.5, 1.3), xycoords="axes fraction", ha="center", weight="bold")
    if strip is None:
        ax.text(0.5, 0.5, "no pictures", ha="center", va="center", transform=ax.transAxes, fontsize=8)
        return
    height, width = strip.shape[2:]
    ax.imshow(joined(strip).numpy(), interpolation="nearest")
    ax.set_anchor("W")
    ax.set(xlim=(-2.5, 4 * (width + GAP)), ylim=(height + 1, -2.5))
    for place, caption in enumerate(faces.parse_answer(record["captions"])):
        words = "\n".join(word for _, word in caption.degrees)
        ax.text(
            (place + 0.5) * (width + GAP) - 1, height + 1.8, words, ha="center", va="top", fontsize=7, linespacing=0.95
        )
    if _in_order(strip, faces.parse_request(record["x"])):
        frame = {"fill": False, "edgecolor": "black", "linewidth": 1.5, "clip_on": False}
        from matplotlib.patches import Rectangle

        ax.add_patch(Rectangle((-1.8, -1.8), len(strip) * (width + GAP) + 0.6, height + 2.6, **frame))


def _in_order(strip: UInt8[Tensor, "n 3 H W"], request: faces.Request) -> bool:
    scores = faces.attribute_scores(request, strip.float() / 255)
    return len(strip) == request.number and faces.order_consistency(scores) == 1.0


# --- errors -----------------------------------------------------------------------------------------------------------


def plot_errors(runs: Mapping[str, Sequence[Mapping]], window: int = 20) -> "Figure":
    """Denoising errors of winners (full) and losers (dashed) relative to the frozen start's, under the same noise.

    Preference learning pushes losers up; an anchor keeps winners from rising with them.

    Args:
        runs: {stage: its history}.
        window: running mean over so many steps.
    """
    from sysdpo_lab import figures as draw

    figure, (ax,) = draw.new_figure()
    for style, (name, history) in zip(draw.line_styles(len(runs)), runs.items()):
        for side, dash in zip(SIDES, ("-", "--")):
            rises = [100 * (r[f"images_error_{side}"] / r[f"images_error_{side}_start"] - 1) for r in history]
            smooth = [
                sum(part) / len(part)
                for part in (rises[max(0, end - window) : end] for end in range(1, len(rises) + 1))
            ]
            label = f"{name}, {'winners' if side == 'chosen' else 'losers'}"
            steps = [record["step"] for record in history]
            ax.plot(steps, smooth, color=style["color"], linestyle=dash, linewidth=2, label=label)
    ax.axhline(0, color="0.4", linestyle=":", linewidth=1)
    ax.set(xlabel="step of round 2", ylabel="error against the start's (%)")
    ax.legend(frameon=False, fontsize=8)
    return figure


def plot_study(points: Sequence[Mapping], metric: str, xlabel: str) -> "Figure":
    """A study: the metric of each system against what was varied, with 95 % intervals.

    Args:
        points: {"x": position or label, "rows": rows of a summary}, one a run.
        metric: of the rows.
        xlabel: what was varied.
    """
    from sysdpo_lab import figures as draw

    systems = list(dict.fromkeys(row["system"] for point in points for row in point["rows"] if row["metric"] == metric))
    figure, (ax,) = draw.new_figure()
    for number, (style, system) in enumerate(zip(draw.line_styles(len(systems)), systems)):
        found = [
            (place + 0.06 * (number - (len(systems) - 1) / 2), row)
            for place, point in enumerate(points)
            for row in point["rows"]
            if (row["system"], row["metric"]) == (system, metric)
        ]
        places, rows = [place for place, _ in found], [row for _, row in found]
        low, high = ([abs(row["value"] - row[end]) for row in rows] for end in ("ci_low", "ci_high"))
        ax.errorbar(places, [row["value"] for row in rows], yerr=[low, high], label=system, capsize=3, **style)
    ax.set(xticks=range(len(points)), xticklabels=[str(point["x"]) for point in points], xlabel=xlabel)
    ax.set_ylabel(metric.replace("_", " "))
    ax.legend(frameon=False, fontsize=8)
    return figure
