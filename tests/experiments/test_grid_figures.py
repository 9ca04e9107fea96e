"""Figures of a results table: what stands where, which intervals are drawn, and what is refused."""

import numpy
import pytest

from sysdpo_lab import errors, figures
from sysdpo_lab.experiments import grid_figures


def row(k, sampler, value, metric="wr_prompted", system="joint"):
    return {
        "k": k, "sampler": sampler, "system": system, "metric": metric, "value": value, "ci_low": value - 0.1,
        "ci_high": value + 0.2, "n": 60,
    }  # fmt: skip


ROWS = [row(k, sampler, 0.4 + 0.05 * k + 0.1 * (sampler == "dbs")) for k in (2, 4) for sampler in ("dbs", "mc")]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def bars(ax):
    """The ends of all error bars: [(low, high), ...] in drawing order."""
    return [tuple(segment[:, 1]) for lines in ax.collections for segment in lines.get_segments()]


def test_lines_have_a_value_and_an_interval_for_every_cell():
    (ax,) = grid_figures.plot_lines(ROWS, "wr_prompted", "k", "sampler").axes
    lines = [line for line in ax.lines if line.get_label() in ("dbs", "mc")]
    assert [line.get_ydata().tolist() for line in lines] == [pytest.approx([0.6, 0.7]), pytest.approx([0.5, 0.6])]
    assert bars(ax) == [pytest.approx(pair) for pair in ((0.5, 0.8), (0.6, 0.9), (0.4, 0.7), (0.5, 0.8))]
    assert {line.get_linestyle() for line in lines} == {"-", "--"} and len({line.get_marker() for line in lines}) == 2
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "4"]
    assert ax.get_legend().get_title().get_text() == "sampler"


def test_points_of_different_lines_stand_apart():
    (ax,) = grid_figures.plot_lines(ROWS, "wr_prompted", "k", "sampler").axes
    places = [line.get_xdata()[0] for line in ax.lines if line.get_label() in ("dbs", "mc")]
    assert places[0] < 2 < places[1] and places[1] - places[0] < 0.1


def test_the_level_of_chance_is_dotted_where_there_is_one():
    def level(rows, metric):
        (ax,) = grid_figures.plot_lines(rows, metric, "k").axes
        return [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == ":"]

    assert level([row(k, "dbs", 0.6) for k in (2, 4)], "wr_prompted") == [0.5]
    assert level([row(k, "dbs", 0.6, "kl") for k in (2, 4)], "kl") == []


def test_words_are_not_joined_by_a_line():
    rows = [row(2, "dbs", 0.5, system=system) for system in ("only:draft", "joint")]
    (ax,) = grid_figures.plot_lines(rows, "wr_prompted", "system").axes
    assert ax.lines[0].get_linestyle() == "None" and len(ax.lines[0].get_xdata()) == 2


def test_far_numbers_get_a_logarithmic_axis_and_zero_never():
    assert grid_figures.positions([1, 20])[1] and not grid_figures.positions([1, 19])[1]
    assert not grid_figures.positions([0, 20])[1]
    rows = [{**row(2, "dbs", 0.5), "beta": beta} for beta in (0.03, 0.5, 2.0)]
    (ax,) = grid_figures.plot_lines(rows, "wr_prompted", "beta").axes
    assert ax.get_xscale() == "log" and [t.get_text() for t in ax.get_xticklabels()] == ["0.03", "0.5", "2"]


def test_a_heat_map_writes_value_and_interval_into_each_cell_and_leaves_holes():
    figure = grid_figures.plot_heat(ROWS[:3], "wr_prompted", "k", "sampler")
    ax = figure.axes[0]
    assert texts(ax) == ["0.6\n[0.5, 0.8]", "0.5\n[0.4, 0.7]", "0.7\n[0.6, 0.9]"]
    values = numpy.ma.filled(ax.images[0].get_array(), numpy.nan)
    assert numpy.isnan(values).tolist() == [[False, False], [False, True]]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["dbs", "mc"]


def test_text_on_dark_cells_is_white_and_on_bright_ones_black():
    ax = grid_figures.plot_heat(ROWS, "wr_prompted", "k", "sampler").axes[0]
    colors = {text.get_text().split("\n")[0]: text.get_color() for text in ax.texts}
    assert colors["0.5"] == "white" and colors["0.7"] == "black"


def test_what_varies_besides_must_be_fixed():
    with pytest.raises(errors.UnknownOptionError, match="sampler varies too"):
        grid_figures.plot_lines(ROWS, "wr_prompted", "k")
    assert len(grid_figures.plot_lines(ROWS, "wr_prompted", "k", sampler="mc").axes) == 1
    with pytest.raises(errors.UnknownOptionError, match="both are 'k'"):
        grid_figures.plot_heat(ROWS, "wr_prompted", "k", "k")
    with pytest.raises(errors.UnknownOptionError, match="metric='gap'"):
        grid_figures.plot_heat(ROWS, "gap", "k", "sampler")


def difference(a, b, value, metric="wr_prompted"):
    return {"a": a, "b": b, "metric": metric, "value": value, "ci_low": value - 0.1, "ci_high": value + 0.1}


def test_differences_are_read_downwards_and_those_with_the_start_are_left_out():
    found = [
        difference("joint[dbs-2]", "prompted", 0.3),
        difference("joint[dbs-2]", "joint[mc-2]", 0.05),
        difference("joint[dbs-4]", "joint[dbs-2]", -0.02),
        difference("joint[dbs-2]", "joint[mc-2]", 9.0, "kl"),
    ]
    (ax,) = grid_figures.plot_differences(found, "wr_prompted").axes
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[::-1] == ["dbs-2 - mc-2", "dbs-4 - dbs-2"]
    spans = [[float(x) for x in line.get_xdata()] for line in ax.lines if len(line.get_xdata()) == 2]
    assert spans[:2] == [pytest.approx([-0.12, 0.08]), pytest.approx([-0.05, 0.15])]
    with pytest.raises(errors.UnknownOptionError, match="metric='kl'"):
        grid_figures.plot_differences(found[:3], "kl")


def test_the_pictures_are_the_same_bytes_each_time():
    first, second = (figures.figure_png(grid_figures.plot_heat(ROWS, "wr_prompted", "k", "sampler")) for _ in range(2))
    assert first == second
