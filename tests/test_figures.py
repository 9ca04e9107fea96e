"""Figures come out as the same bytes, carry alt text, and show the numbers that they were given."""

import math
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

from sysdpo_lab import errors, figures

HISTORY = [
    {"step": 0, "loss": math.log(2), "margin": 0.0, "accuracy": 0.5, "shares": {"draft": 0.0, "refine": 0.0}},
    {"step": 1, "loss": 0.6, "margin": 0.2, "accuracy": 0.75, "shares": {"draft": 0.5, "refine": 1.5}},
    {"step": 2, "loss": 0.5, "margin": 0.5, "accuracy": 1.0, "shares": {"draft": 1.0, "refine": 4.0}},
]
ROWS = [
    {"system": "prompted", "metric": "wr_prompted", "value": 0.5, "ci_low": 0.45, "ci_high": 0.55, "n": 90},
    {"system": "joint", "metric": "wr_prompted", "value": 0.7, "ci_low": 0.6, "ci_high": 0.8, "n": 90},
    {"system": "joint", "metric": "validity", "value": 1.0, "ci_low": 1.0, "ci_high": 1.0, "n": 90},
]


class Graph:
    """What `draw_graph` reads of a system."""

    def __init__(self, parents, inputs=("x",), output="z", deterministic=()):
        self.inputs, self.order, self.output = tuple(inputs), list(parents), output
        self._parents, self._deterministic = parents, deterministic

    def __getitem__(self, name):
        kind = "deterministic" if name in self._deterministic else "exact"
        return SimpleNamespace(parents=self._parents[name], kind=kind)


GRAPHS = {
    "chain": Graph({"y": ("x",), "z": ("y",)}),
    "skip": Graph({"y": ("x",), "z": ("x", "y")}),
    "collider": Graph({"y1": ("x",), "y2": ("x",), "z": ("x", "y1", "y2")}),
    "tool": Graph({"call": ("x",), "result": ("call",), "z": ("x", "result")}, deterministic=("result",)),
    "two inputs": Graph(
        {"a": ("x1",), "b": ("x1", "x2"), "c": ("a", "b"), "d": ("b",), "e": ("c", "x1"), "z": ("e", "d", "x2")},
        inputs=("x1", "x2"),
    ),
}


def all_figures():
    yield figures.plot_training(HISTORY)
    yield figures.plot_shares(HISTORY)
    yield figures.plot_rows(ROWS, "wr_prompted")
    yield figures.draw_graph(GRAPHS["two inputs"])


def lines(ax, points):
    """The y-values of each drawn line with so many points (reference lines have two)."""
    return [list(line.get_ydata()) for line in ax.lines if len(line.get_ydata()) == points]


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_two_drawings_give_the_same_png_and_svg_bytes():
    for first, second in zip(all_figures(), all_figures()):
        assert figures.figure_png(first) == figures.figure_png(second)
        assert figures.figure_svg(first) == figures.figure_svg(second)


def test_another_process_gives_the_same_bytes(tmp_path):
    code = (
        "import sys; from sysdpo_lab import figures\n"
        "h = [{'step': i, 'loss': 0.7 - i / 50, 'margin': i / 9, 'accuracy': 0.5} for i in range(9)]\n"
        "figures.save_figure(figures.plot_training(h), sys.argv[1])"
    )
    for name in ("a", "b"):
        subprocess.run([sys.executable, "-c", code, tmp_path / name], check=True)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_save_writes_a_png_and_an_svg_beside_each_other_and_keeps_dots_in_the_name(tmp_path):
    written = figures.save_figure(figures.plot_rows(ROWS, "validity"), tmp_path / "new" / "beta_0.1")
    assert [path.name for path in written] == ["beta_0.1.png", "beta_0.1.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(written[1]).getroot().tag.endswith("svg")
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_a_pyplot_figure_is_closed_when_saved(tmp_path):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, _ = plt.subplots()
    figures.save_figure(figure, tmp_path / "a")
    assert figure.number not in plt.get_fignums()


# --- in a notebook ----------------------------------------------------------------------------------------------------


def test_the_picture_carries_alt_text_and_the_width_of_the_page():
    png = figures.figure_png(figures.plot_shares(HISTORY))
    data, metadata = figures.picture(png, "two rising lines")
    assert data["text/plain"] == "[figure: two rising lines]"
    assert metadata["image/png"]["alt"] == "two rising lines"
    assert metadata["image/png"]["width"] == round(struct.unpack(">I", png[16:20])[0] / 1.5) == round(6.4 * 96)


def test_a_figure_without_alt_text_is_refused():
    with pytest.raises(errors.MissingAltTextError, match="alt="):
        figures.show(figures.plot_shares(HISTORY), " ")


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_lines_differ_in_colour_dash_and_marker():
    styles = figures.line_styles(4)
    for key in ("color", "linestyle", "marker"):
        assert len({style[key] for style in styles}) == 4
    assert all(style["linewidth"] == 2 for style in styles)


def test_training_shows_the_logged_numbers_and_the_start():
    axes = figures.plot_training(HISTORY).axes
    for ax, key in zip(axes, ("loss", "margin", "accuracy")):
        assert [record[key] for record in HISTORY] in lines(ax, 3)
    assert [list(line.get_ydata()) for line in axes[0].lines][-1] == [math.log(2)] * 2


def test_histories_are_compared_under_their_labels():
    axes = figures.plot_training({"joint": HISTORY, "separate": HISTORY[:2]}).axes
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["joint", "separate"]
    assert len(lines(axes[0], 3)) == 1


def test_a_history_object_is_read_by_its_records():
    figure = figures.plot_training(SimpleNamespace(records=HISTORY), quantities=["loss"])
    assert lines(figure.axes[0], 3) == [[record["loss"] for record in HISTORY]]


def test_the_running_mean_looks_back_only():
    figure = figures.plot_training(HISTORY, quantities=["margin"], window=2)
    assert lines(figure.axes[0], 3)[0] == pytest.approx([0.0, 0.1, 0.35])


def test_an_empty_history_is_named():
    with pytest.raises(errors.EmptyHistoryError):
        figures.plot_training([])


def test_shares_add_up_to_the_gap():
    draft, refine, gap = lines(figures.plot_shares(HISTORY).axes[0], 3)
    assert gap == [a + b for a, b in zip(draft, refine)] == [0.0, 2.0, 5.0]


def test_a_step_without_a_kept_pair_leaves_a_hole_and_no_error():
    hole = {"step": 3, "loss": None, "margin": None, "accuracy": None, "shares": {"draft": None, "refine": None}}
    assert [len(line) for line in lines(figures.plot_shares([*HISTORY, hole]).axes[0], 3)] == [3, 3, 3]
    assert len(lines(figures.plot_training([*HISTORY, hole]).axes[0], 3)) == 1


def test_rows_show_value_and_interval_with_the_first_row_on_top():
    ax = figures.plot_rows(ROWS, "wr_prompted").axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["joint", "prompted"]
    intervals = [list(line.get_xdata()) for line in ax.lines if len(line.get_xdata()) == 2]
    assert intervals[:2] == [[0.6, 0.8], [0.45, 0.55]]
    assert "n = 90" in ax.get_xlabel()


def test_an_unknown_metric_is_named():
    with pytest.raises(errors.UnknownOptionError, match="wr_promted"):
        figures.plot_rows(ROWS, "wr_promted")


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
def test_parents_stand_left_of_their_children_and_no_two_nodes_meet(name):
    graph = GRAPHS[name]
    places, _ = figures.graph_layout(graph)
    assert len(set(places.values())) == len(places)
    for child in graph.order:
        assert all(places[parent][0] < places[child][0] for parent in graph[child].parents)


@pytest.mark.parametrize("name", GRAPHS)
def test_each_parent_has_an_arrow_that_runs_through_no_third_node(name):
    from matplotlib.path import Path

    graph = GRAPHS[name]
    places, routes = figures.graph_layout(graph)
    expected = {(places[parent], places[child]) for child in graph.order for parent in graph[child].parents}
    assert {(route[0], route[-1]) for route in routes} == expected
    for route in routes:
        curve = figures._smooth(route)
        path = Path(curve, [Path.MOVETO] + [Path.CURVE4] * (len(curve) - 1))
        points = path.interpolated(1).to_polygons(closed_only=False)[0]
        for place in set(places.values()) - {route[0], route[-1]}:
            assert min(math.dist(place, point) for point in points) > figures.RADIUS


def test_shapes_tell_inputs_hidden_outputs_and_deterministic_components_apart():
    from matplotlib.patches import Circle, Rectangle

    ax = figures.draw_graph(GRAPHS["tool"]).axes[0]
    circles = [patch for patch in ax.patches if isinstance(patch, Circle)]
    assert sum(isinstance(patch, Rectangle) for patch in ax.patches) == 1
    assert len(circles) == 4  # call, result, and two rings of z
    assert [patch.get_linestyle() for patch in circles].count("--") == 1


def test_a_grid_of_axes_is_listed_row_by_row():
    _, axes = figures.new_figure(3, rows=2)
    places = [ax.get_subplotspec() for ax in axes]
    expected = [(row, column) for row in (0, 1) for column in (0, 1, 2)]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == expected


def test_a_graph_can_be_drawn_into_given_axes():
    figure, (left, right) = figures.new_figure(2)
    assert figures.draw_graph(GRAPHS["chain"], ax=right) is figure
    assert not left.patches and right.patches
