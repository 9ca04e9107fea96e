"""Figures that read in print, on a dark page and without colour vision, and come out as the same bytes each time.

matplotlib and seaborn are imported when the first figure is drawn (extra `figures`).
"""

import base64
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sysdpo_lab import atomic, errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sysdpo_lab.system import CompoundSystem

RESOLUTION = 144  # dots per inch of a stored picture
SHOWN_AT = 96  # ... and of the page that shows it: 1.5 picture dots a page dot stay sharp on dense screens
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")
CHANCE = {"wr_prompted": 0.5, "wr_chosen": 0.5, "margin_accuracy": 0.5}
WORDS = {
    "loss": "loss (nats)",
    "margin": "margin (beta x log-ratio gap)",
    "accuracy": "share of positive margins",
    "wr_prompted": "win rate against the prompted start",
    "wr_chosen": "win rate against the chosen answers",
    "margin_accuracy": "held-out pairs with a positive margin",
}
Histories = Any  # one history, or {label: history}; see `records`


# --- making and keeping -----------------------------------------------------------------------------------------------


def new_figure(columns: int = 1, *, rows: int = 1, width: float = 6.4, height: float = 3.4):
    """(figure, [axes, row by row]): white, with 2 pt lines, a light grid, and no frame above and to the right.

    The figure belongs to no window and to no global list, so it needs not be closed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.set_facecolor("white")
        ax.grid(True, color="0.9", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def line_styles(count: int) -> list[dict]:
    """Keyword arguments of `count` lines that differ in colour, dash and marker: colour alone is not enough.

    >>> [style["linestyle"] for style in line_styles(3)]
    ['-', '--', '-.']
    """
    import seaborn

    palette = seaborn.color_palette("colorblind")
    styles = zip(itertools.cycle(palette), itertools.cycle(DASHES), itertools.cycle(MARKERS))
    return [
        {"color": color, "linestyle": dash, "marker": marker, "linewidth": 2, "markersize": 5}
        for color, dash, marker in itertools.islice(styles, count)
    ]


def figure_png(figure: "Figure") -> bytes:
    """The figure as PNG: the same bytes each time, with no date and no program version inside.

    A palette of 128 colours is plenty for lines and bars, and makes the file three times smaller.
    """
    from PIL import Image

    drawn, data = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=RESOLUTION, facecolor="white", metadata={"Software": None})
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(data, format="png", optimize=True)
    return data.getvalue()


def figure_svg(figure: "Figure") -> bytes:
    """The figure as SVG: the same bytes each time (fixed ids, no date), text kept as text."""
    import matplotlib

    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "sysdpo_lab", "svg.fonttype": "none"}):
        figure.savefig(data, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return data.getvalue()


def save_figure(figure: "Figure", stem: Path | str) -> tuple[Path, Path]:
    """Write STEM.png and STEM.svg, each in one step, and close the figure.

    Returns:
        the two paths.
    """
    stem = Path(stem)
    written = (
        atomic.write_bytes(stem.with_name(stem.name + ".png"), figure_png(figure)),
        atomic.write_bytes(stem.with_name(stem.name + ".svg"), figure_svg(figure)),
    )
    close(figure)
    return written


def close(figure: "Figure") -> None:
    """Take a figure that pyplot made out of pyplot's list; nothing to do for others."""
    import sys

    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(figure)


def picture(png: bytes, alt: str) -> tuple[dict, dict]:
    """(data, metadata) of a notebook output: the picture, its alt text, and the alt text as what is read without it."""
    width = int.from_bytes(png[16:20], "big")  # of the PNG header
    data = {"image/png": base64.b64encode(png).decode(), "text/plain": f"[figure: {alt}]"}
    return data, {"image/png": {"alt": alt, "width": round(width * SHOWN_AT / RESOLUTION)}}


def show(figure: "Figure", alt: str) -> None:
    """Show the figure in a notebook, once, with alt text; the last line of a cell.

    Args:
        figure: closed afterwards, so that `%matplotlib inline` does not show it again.
        alt: what is to be seen in it, for whoever cannot see it.

    Raises:
        MissingAltTextError: the alt text is empty.
    """
    if not alt.strip():
        raise errors.MissingAltTextError('a figure needs alt text: show(figure, alt="what is to be seen")')
    from IPython.display import display

    data, metadata = picture(figure_png(figure), alt)
    close(figure)
    display(data, metadata=metadata, raw=True)


# --- training ---------------------------------------------------------------------------------------------------------


def records(history: Any) -> list[Mapping]:
    """The logged steps of a history: its `.records`, or the list itself. Each has "step" and the logged numbers.

    Raises:
        EmptyHistoryError: nothing was logged.
    """
    found = list(getattr(history, "records", history))
    if not found:
        raise errors.EmptyHistoryError("this history holds no step; train for at least one, or read another file")
    return found


def plot_training(
    histories: Histories, quantities: Sequence[str] = ("loss", "margin", "accuracy"), window: int = 1
) -> "Figure":
    """Loss, margin and accuracy against the step; one line a history, with the start (log 2, 0, one half) dotted.

    Args:
        histories: one history, or {label: history} to compare.
        quantities: keys of the logged steps.
        window: running mean over so many steps; 1 shows each step as it was.
    """
    import math

    named = histories if isinstance(histories, Mapping) else {"": histories}
    start = {"loss": math.log(2), "margin": 0.0, "accuracy": 0.5}
    figure, axes = new_figure(len(quantities), width=3.4 * len(quantities), height=3.0)
    for ax, quantity in zip(axes, quantities):
        for style, (label, history) in zip(line_styles(len(named)), named.items()):
            steps, values = _series(records(history), quantity)
            _line(ax, steps, _running_mean(values, window), dict(style, label=label or None))
        if quantity in start:
            ax.axhline(start[quantity], color="0.4", linestyle=":", linewidth=1)
        ax.set(xlabel="step", ylabel=WORDS.get(quantity, quantity))
    if any(named):
        axes[0].legend(frameon=False)
    return figure


def plot_shares(history: Any, window: int = 1) -> "Figure":
    """Each component's share of the log-ratio gap (nats) against the step: who learns how much.

    The shares of one step add up to its gap, which is drawn in black when there is more than one. The entry "posterior"
    of a Sampling loss is the part that comes from re-weighing the intermediates.
    """
    logged = records(history)
    shares = [{"step": record["step"], **(record.get("shares") or {})} for record in logged]
    names = [name for name in dict.fromkeys(name for record in shares for name in record) if name != "step"]
    figure, (ax,) = new_figure()
    for style, name in zip(line_styles(len(names)), names):
        steps, values = _series(shares, name)
        _line(ax, steps, _running_mean(values, window), dict(style, label=name))
    if len(names) > 1:
        # a step in which no pair was kept has no shares
        whole = [record for record in shares if all(record.get(name) is not None for name in names)]
        steps, values = _series([dict(record, gap=sum(record[name] for name in names)) for record in whole], "gap")
        ax.plot(steps, _running_mean(values, window), color="black", linewidth=1, label="sum: the gap")
    ax.axhline(0, color="0.4", linestyle=":", linewidth=1)
    ax.set(xlabel="step", ylabel="share of the log-ratio gap (nats)")
    ax.legend(frameon=False)
    return figure


def _series(logged: Iterable[Mapping], quantity: str) -> tuple[list, list]:
    pairs = [(record["step"], float(record[quantity])) for record in logged if record.get(quantity) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    heads = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(head) / len(head) for head in heads]


def _line(ax: "Axes", steps: Sequence, values: Sequence, style: dict) -> None:
    ax.plot(steps, values, markevery=max(1, len(steps) // 8), **style)


# --- results ----------------------------------------------------------------------------------------------------------


def plot_rows(rows: Iterable[Mapping], metric: str) -> "Figure":
    """One dot a system with its 95 % interval, in the order of the rows; chance level dotted where there is one.

    Args:
        rows: a summary's rows: "system", "metric", "value", "ci_low", "ci_high", "n".
        metric: which of them to draw.

    Raises:
        UnknownOptionError: no row has this metric.
    """
    rows = list(rows)
    errors.check_option("metric", metric, tuple(dict.fromkeys(row["metric"] for row in rows)))
    rows = [row for row in rows if row["metric"] == metric and row["value"] is not None]
    rows.reverse()  # matplotlib counts upwards, people read downwards
    figure, (ax,) = new_figure(height=1.2 + 0.45 * len(rows))
    color = line_styles(1)[0]["color"]
    for height, row in enumerate(rows):
        ax.plot([row["ci_low"], row["ci_high"]], [height, height], color=color, linewidth=2, solid_capstyle="butt")
        ax.plot(row["value"], height, marker="o", color=color, markersize=8)
        text = {"ha": "center", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
        ax.annotate(f"{row['value']:.3f}", (row["value"], height), (0, 8), textcoords="offset points", **text)
    if metric in CHANCE:
        ax.axvline(CHANCE[metric], color="0.4", linestyle=":", linewidth=1)
    ax.set(yticks=range(len(rows)), yticklabels=[row["system"] for row in rows], ylim=(-0.6, len(rows) - 0.2))
    ax.set_xlabel(f"{WORDS.get(metric, metric.replace('_', ' '))} (95 % interval, n = {_counts(rows)})")
    ax.grid(False, axis="y")
    return figure


def _counts(rows: Sequence[Mapping]) -> str:
    counts = sorted({row["n"] for row in rows})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


# --- graphs -----------------------------------------------------------------------------------------------------------

RADIUS = 0.3  # of a node; columns and neighbours in a column are 1 apart
INCHES = 1.3  # of one such distance in a figure of its own
Point = tuple[float, float]


def draw_graph(system: "CompoundSystem", ax: "Axes | None" = None) -> "Figure":
    """The system's DAG from left to right: inputs square, hidden components round, the output with a double ring,
    deterministic components dashed.

    Args:
        system: read for its `inputs`, `order`, `output` and each component's `parents` and `kind`.
        ax: where to draw; a new figure by default.
    """
    places, routes = graph_layout(system)
    points = [*places.values(), *(point for route in routes for point in route)]
    xs, ys = zip(*points)
    left, right, low, high = min(xs) - 0.4, max(xs) + 0.4, min(ys) - 0.4, max(ys) + 0.4
    if ax is None:
        ax = _bare_axes((right - left) * INCHES, (high - low) * INCHES)
    ax.set_axis_off()
    ax.set(xlim=(left, right), ylim=(low, high), aspect="equal")
    for route in routes:
        _arrow(ax, route)
    for name, place in places.items():
        _node(ax, system, name, place)
    return ax.get_figure()


def graph_layout(system: "CompoundSystem") -> tuple[dict[str, Point], list[list[Point]]]:
    """Where each variable stands, and by which points each arrow goes from its parent to its child.

    A variable's column is its longest distance from the inputs. An arrow that skips a column gets a place of its own in
    it, so that it never runs through a node. In a column all are ordered by the mean height of what they come from.

    Returns:
        {variable: (x, y)}; for each arrow its points, parent and child included.
    """
    column = {name: 0 for name in system.inputs}
    for name in system.order:
        column[name] = 1 + max(column[parent] for parent in system[name].parents) if system[name].parents else 0
    sources: list[dict] = [{} for _ in range(1 + max(column.values()))]  # {what stands in a column: where it is from}
    chains = []
    for name in [*system.inputs, *system.order]:
        own = []
        for parent in () if name in system.inputs else system[name].parents:
            between = [(parent, name, x) for x in range(column[parent] + 1, column[name])]
            chain = [parent, *between, name]
            own.append(chain[-2])
            for before, stop in zip(chain, between):
                sources[stop[2]][stop] = [before]
            chains.append(chain)
        sources[column[name]][name] = own
    places = _ranked(sources)
    variables = {name: places[name] for name in column}
    return variables, [[places[stop] for stop in chain] for chain in chains]


def _ranked(sources: list[dict]) -> dict[Any, Point]:
    places: dict[Any, Point] = {}
    for x, column in enumerate(sources):
        heights = {stop: sum(places[s][1] for s in before) / max(1, len(before)) for stop, before in column.items()}
        names = [stop for stop in column if isinstance(stop, str)]
        passing = [stop for stop in column if not isinstance(stop, str)]
        half = len(names) // 2  # of equally high ones, an arrow that passes by goes between two nodes, or above one
        ranked = sorted([*names[:half], *passing, *names[half:]], key=lambda stop: -heights[stop])
        places |= {stop: (float(x), (len(column) - 1) / 2 - rank) for rank, stop in enumerate(ranked)}
    return places


def _bare_axes(width: float, height: float) -> "Axes":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white").add_axes((0, 0, 1, 1))


def _node(ax: "Axes", system: "CompoundSystem", name: str, place: Point) -> None:
    from matplotlib.patches import Circle, Rectangle

    style = {"facecolor": "white", "edgecolor": "black", "linewidth": 2, "zorder": 2}
    if name in system.inputs:
        side = 1.7 * RADIUS
        ax.add_patch(Rectangle((place[0] - side / 2, place[1] - side / 2), side, side, **style))
    else:
        style["linestyle"] = "--" if system[name].kind == "deterministic" else "-"
        ax.add_patch(Circle(place, RADIUS, **style))
        if name == system.output:
            ax.add_patch(Circle(place, 0.85 * RADIUS, **dict(style, linewidth=1.2)))
    ax.text(*place, name, ha="center", va="center", fontsize=min(12.0, 66.0 / len(name)), zorder=3)


def _arrow(ax: "Axes", route: list[Point]) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    first, last = _towards(route[0], route[1]), _towards(route[-1], route[-2])
    points = [first, *route[1:-1], last]
    codes = [Curve.MOVETO] + [Curve.CURVE4] * 3 * (len(points) - 1)
    curve = Curve(_smooth(points), codes)
    style = {"arrowstyle": "-|>", "mutation_scale": 14, "linewidth": 1.6, "color": "0.25", "zorder": 1}
    ax.add_patch(FancyArrowPatch(path=curve, **style))


def _towards(centre: Point, target: Point) -> Point:
    """The point just outside the node at `centre` on the way to `target`."""
    dx, dy = target[0] - centre[0], target[1] - centre[1]
    step = 1.07 * RADIUS / (dx * dx + dy * dy) ** 0.5
    return centre[0] + step * dx, centre[1] + step * dy


def _smooth(points: list[Point]) -> list[Point]:
    """Cubic Bezier points of the Catmull-Rom spline through the points: straight between two, round through more."""
    padded = [points[0], *points, points[-1]]
    curve = [points[0]]
    for before, a, b, after in zip(padded, padded[1:], padded[2:], padded[3:]):
        curve += [
            (a[0] + (b[0] - before[0]) / 6, a[1] + (b[1] - before[1]) / 6),
            (b[0] - (after[0] - a[0]) / 6, b[1] - (after[1] - a[1]) / 6),
            b,
        ]
    return curve
