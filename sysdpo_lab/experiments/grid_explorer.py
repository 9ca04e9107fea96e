"""An explorer of a results table: choose the metric, what stands along the axis, what makes lines or rows, and what is fixed.

Needs the extra `notebooks`; where the notebook is only read, it is a still picture.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sysdpo_lab import errors
from sysdpo_lab.experiments import grid_figures, grid_table
from sysdpo_lab.experiments.grid_table import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sysdpo_lab.widgets import SliderFigure

KINDS = ("lines", "heat map")
NONE = "(none)"


def draw(rows: list[Row], kind: str, metric: str, across: str, by: str, fixed: dict[str, Any]) -> "Figure":
    """The picture of one choice; settings that are drawn need not be fixed.

    A heat map of one setting alone, or of a setting with itself, is drawn as lines.

    Args:
        rows: of a results table.
        kind: "lines" or "heat map".
        metric: what is drawn.
        across: the setting along the axis.
        by: the setting of the lines or rows, or "(none)".
        fixed: values of all settings; those not drawn are held there.
    """
    errors.check_option("kind", kind, KINDS)
    by = NONE if by == across else by
    held = {name: value for name, value in fixed.items() if name not in (across, by)}
    if kind == "heat map" and by != NONE:
        return grid_figures.plot_heat(rows, metric, across, by, **held)
    return grid_figures.plot_lines(rows, metric, across, None if by == NONE else by, **held)


def explorer(rows: Iterable[Row], alt: str, **start: Any) -> "SliderFigure":
    """Menus over a results table and the picture that they choose; the last line of a cell.

    A choice that the table does not have (a combination that was not run) gives a picture that says so.

    Args:
        rows: of a results table; two settings or more that vary make it worth while.
        alt: what is to be seen at the start, for whoever cannot see or move it.
        start: the first values: kind, metric, across, by, or a setting's own name.

    Raises:
        UnknownOptionError: nothing varies, or a first value does not exist.
    """
    from sysdpo_lab import widgets

    rows = list(rows)
    axes = grid_table.axes(rows)
    if not axes:
        raise errors.UnknownOptionError(
            "nothing varies in this table; an explorer needs at least one setting with two values"
        )
    names, metrics = list(axes), list(dict.fromkeys(row["metric"] for row in rows))
    menus = {"kind": list(KINDS), "metric": metrics, "across": names, "by": [NONE, *names], **axes}
    chosen = {}
    for name, options in menus.items():
        chosen[name] = widgets.choice(options)
        if name in start:
            errors.check_option(name, start[name], tuple(options))
            chosen[name].value = start[name]

    def picture(kind: str, metric: str, across: str, by: str, **fixed: Any) -> "Figure":
        try:
            return draw(rows, kind, metric, across, by, fixed)
        except errors.UnknownOptionError as error:
            return _said(str(error))

    return widgets.SliderFigure(picture, alt, **chosen)


def _said(text: str) -> "Figure":
    """A picture that says why there is none."""
    import textwrap

    from sysdpo_lab import figures

    figure, (ax,) = figures.new_figure(height=2.2)
    ax.set_axis_off()
    ax.text(0.02, 0.5, "\n".join(textwrap.wrap(text, 80)), transform=ax.transAxes, va="center")
    return figure
