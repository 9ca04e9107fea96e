"""A slider figure answers its sliders and reads without them."""

import base64

import ipywidgets
import pytest

from sysdpo_lab import errors, figures, widgets


def draw_line(beta, kind="solid"):
    figure, (ax,) = figures.new_figure(width=3, height=2)
    ax.plot([0, 1], [0, beta], linestyle=kind)
    return figure


def line_view():
    return widgets.SliderFigure(
        draw_line, "a line that rises to beta", beta=widgets.slider(1, 0, 5), kind=widgets.choice(["solid", "dashed"])
    )


def test_moving_a_slider_changes_the_picture_and_moving_it_back_restores_it():
    view = line_view()
    start = view.picture.value
    view.sliders["beta"].value = 4
    moved = view.picture.value
    view.sliders["kind"].value = "dashed"
    assert len({start, moved, view.picture.value}) == 3
    view.sliders["kind"].value, view.sliders["beta"].value = "solid", 1
    assert view.picture.value == start == figures.figure_png(draw_line(1))


def test_the_draw_function_gets_the_values_by_name():
    seen = []

    def draw(beta, k):
        seen.append((beta, k))
        return draw_line(beta)

    view = widgets.SliderFigure(draw, "a line", k=widgets.slider(2, 1, 4), beta=widgets.slider(0.5, 0, 1))
    view.sliders["k"].value = 3
    assert seen == [(0.5, 2), (0.5, 3)]


def test_a_reader_without_a_kernel_gets_the_picture_with_its_alt_text():
    view = line_view()
    data, metadata = view._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]) == view.picture.value
    assert data["text/plain"] == "[figure: a line that rises to beta]"  # constant, so that nbval can compare it
    assert metadata["image/png"]["alt"] == "a line that rises to beta"
    assert "application/vnd.jupyter.widget-view+json" in data


def test_the_figure_is_drawn_when_the_slider_is_let_go_and_not_on_the_way():
    view = line_view()
    assert view.sliders["beta"].continuous_update is False


def test_no_output_widget_is_used():
    # nbval does not play Output widgets: what is drawn into one would land in the cell and fail
    def walk(widget):
        yield widget
        for child in getattr(widget, "children", ()):
            yield from walk(child)

    assert not any(isinstance(widget, ipywidgets.Output) for widget in walk(line_view()))


def test_sliders_carry_their_names_unless_they_have_labels_of_their_own():
    labelled = ipywidgets.IntSlider(value=1, min=0, max=3, description="how many")
    view = widgets.SliderFigure(lambda k, beta: draw_line(beta), "a line", k=labelled, beta=widgets.slider(1, 0, 5))
    assert [control.description for control in view.sliders.values()] == ["how many", "beta"]


def test_a_slider_figure_without_alt_text_is_refused():
    with pytest.raises(errors.MissingAltTextError):
        widgets.SliderFigure(draw_line, "", beta=widgets.slider(1, 0, 5))
