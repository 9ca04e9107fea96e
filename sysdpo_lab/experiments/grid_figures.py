"""Lines with intervals, heat maps and paired differences from the rows of a results table (`grid_table`).

Colours keep their order without colour vision (cividis); lines differ in dash and marker too; numbers stand in the cells.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sysdpo_lab import errors, figures
from sysdpo_lab.experiments.grid_table import Row, by_places, ordered, select

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORDS = {
    **figures.WORDS,
    "kl": "KL from the start (nats a trace)",
    "task_score": "task score (exact judge)",
    "effective_number": "effective number of intermediates",
    "distinct_2": "distinct-2 of sampled drafts",
    "self_bleu": "self-BLEU of sampled drafts",
    "set_distinct": "different drafts in a set",
    "set_distinct_2": "distinct-2 of a set",
    "set_self_bleu": "self-BLEU of a set",
}
FAR = 20  # from this ratio of largest to smallest on, a setting that is a number > 0 gets a logarithmic axis


def words(metric: str) -> str:
    """A metric for people.

    >>> words("kl"), words("draft_score")
    ('KL from the start (nats a trace)', 'draft score')
    """
    return WORDS.get(metric, metric.replace("_", " "))


# --- lines --------------------------------------------------------------------------------------------------------------


def plot_lines(rows: Iterable[Row], metric: str, x: str, line: str | None = None, **fixed: Any) -> "Figure":
    """A metric against a setting with 95 % intervals, one line a value of another setting.

    Points of different lines stand a little apart, so that their intervals can be read.

    Args:
        rows: of a results table.
        metric: what is drawn upwards.
        x: the setting along the axis; numbers keep their distances and are joined by lines, words are spread evenly.
        line: the setting that makes the lines; None: a single line.
        fixed: values of the settings that vary besides.

    Raises:
        UnknownOptionError: an unknown metric or setting, or another setting varies too.
    """
    names = [x, *([line] if line else [])]
    found = by_places(select(rows, metric, **fixed), *names)
    xs = ordered(place[0] for place in found)
    at, logarithmic = positions(xs)
    numbers = all(isinstance(value, (int, float)) for value in xs)
    lines = ordered(place[1] for place in found) if line else [None]
    figure, (ax,) = figures.new_figure(width=6.4, height=3.6)
    for number, (value, style) in enumerate(zip(lines, figures.line_styles(len(lines)))):
        mine = {key: found[place] for key in xs if (place := (key, value) if line else (key,)) in found}
        shift = (number - (len(lines) - 1) / 2) * 0.012
        if not numbers:  # between words there is nothing that a line could mean
            style = {**style, "linestyle": "none"}
        _points(ax, [_apart(at, key, shift, logarithmic) for key in mine], list(mine.values()), style, value)
    _dress(ax, metric, x, xs, at, logarithmic)
    if line:
        ax.legend(title=line.replace("_", " "), frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def positions(values: Sequence) -> tuple[dict, bool]:
    """Where the values of a setting stand on an axis, and whether it is logarithmic.

    >>> positions([2, 4]), positions([0.1, 10.0])[1], positions(["dbs", "mc"])[0]
    (({2: 2, 4: 4}, False), True, {'dbs': 0, 'mc': 1})
    """
    if not all(isinstance(value, (int, float)) for value in values):
        return {value: place for place, value in enumerate(values)}, False
    return {value: value for value in values}, min(values) > 0 and max(values) / min(values) >= FAR


def _apart(at: dict, key: Any, shift: float, logarithmic: bool) -> float:
    if logarithmic:
        return at[key] * (max(at.values()) / min(at.values())) ** shift
    return at[key] + shift * ((max(at.values()) - min(at.values())) or 1)


def _points(ax: "Axes", places: list[float], rows: list[Row], style: dict, label: Any) -> None:
    values = [row["value"] for row in rows]
    below = [max(0.0, row["value"] - row["ci_low"]) for row in rows]
    above = [max(0.0, row["ci_high"] - row["value"]) for row in rows]
    ax.plot(places, values, label=None if label is None else f"{label}", **style)
    ax.errorbar(places, values, [below, above], fmt="none", ecolor=style["color"], elinewidth=1.2, capsize=3)


def _dress(ax: "Axes", metric: str, x: str, xs: list, at: dict, logarithmic: bool) -> None:
    if logarithmic:
        ax.set_xscale("log")
        ax.minorticks_off()
    ax.set_xticks([at[value] for value in xs], [_named(value) for value in xs])
    if metric in figures.CHANCE:
        ax.axhline(figures.CHANCE[metric], color="0.4", linestyle=":", linewidth=1)
    ax.set(xlabel=x.replace("_", " "), ylabel=words(metric))


def _named(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


# --- heat maps ----------------------------------------------------------------------------------------------------------


def plot_heat(rows: Iterable[Row], metric: str, x: str, y: str, **fixed: Any) -> "Figure":
    """A metric over two settings: brighter is larger; each cell says its value and 95 % interval, an empty one was not run.

    Args:
        rows: of a results table.
        metric: what is coloured.
        x, y: the settings across and down.
        fixed: values of the settings that vary besides.

    Raises:
        UnknownOptionError: an unknown metric or setting, x = y, or another setting varies too.
    """
    if x == y:
        raise errors.UnknownOptionError(f"a heat map needs two settings; both are {x!r}")
    found = by_places(select(rows, metric, **fixed), x, y)
    xs, ys = (ordered(place[side] for place in found) for side in (0, 1))
    figure, (ax,) = figures.new_figure(width=1.9 + 1.15 * len(xs), height=1.2 + 0.62 * len(ys))
    values = [[found[a, b]["value"] if (a, b) in found else float("nan") for a in xs] for b in ys]
    picture = ax.imshow(values, cmap="cividis", aspect="auto")
    for place, row in found.items():
        _cell(ax, xs.index(place[0]), ys.index(place[1]), row, picture)
    ax.set_xticks(range(len(xs)), [_named(value) for value in xs])
    ax.set_yticks(range(len(ys)), [_named(value) for value in ys])
    ax.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
    ax.grid(False)
    ax.spines[:].set_visible(False)
    figure.colorbar(picture, ax=ax, label=words(metric))
    return figure


def _cell(ax: "Axes", across: int, down: int, row: Row, picture: Any) -> None:
    red, green, blue, _ = picture.cmap(picture.norm(row["value"]))
    color = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
    text = f"{row['value']:.3g}\n[{row['ci_low']:.3g}, {row['ci_high']:.3g}]"
    ax.text(across, down, text, ha="center", va="center", fontsize=8, color=color)


# --- differences --------------------------------------------------------------------------------------------------------


def plot_differences(differences: Iterable[Row], metric: str, start: str = "prompted") -> "Figure":
    """Paired differences a - b with their 95 % intervals; where a line crosses 0 the run does not say.

    Args:
        differences: of a summary: "a", "b", "metric", "value", "ci_low", "ci_high".
        metric: which of them.
        start: differences with this system are left out.

    Raises:
        UnknownOptionError: no difference of this metric.
    """
    rows = [row for row in differences if start not in (row["a"], row["b"])]
    rows = select(rows, metric)[::-1]  # matplotlib counts upwards, people read downwards
    figure, (ax,) = figures.new_figure(width=6.8, height=1.0 + 0.32 * len(rows))
    style = figures.line_styles(1)[0]
    for place, row in enumerate(rows):
        ax.plot(
            [row["ci_low"], row["ci_high"]], [place, place], color=style["color"], linewidth=2, solid_capstyle="butt"
        )
        ax.plot(row["value"], place, marker="o", color=style["color"], markersize=6)
    ax.axvline(0, color="0.4", linestyle=":", linewidth=1)
    names = [f"{_arm(row['a'])} - {_arm(row['b'])}" for row in rows]
    ax.set(yticks=range(len(rows)), yticklabels=names, ylim=(-0.6, len(rows) - 0.4))
    ax.set_xlabel(f"difference of {words(metric)} (95 %)")
    ax.grid(False, axis="y")
    return figure


def _arm(system: str) -> str:
    return system.removeprefix("joint[").removesuffix("]") if system.startswith("joint[") else system
