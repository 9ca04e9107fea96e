"""A figure with sliders: live where a kernel runs, a still picture where the notebook is only read.

Needs the extra `notebooks`; no other module of the package imports this one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from sysdpo_lab import errors, figures


def slider(value: float, low: float, high: float, step: float | None = None) -> ipywidgets.Widget:
    """A slider from `low` to `high` that starts at `value`: for whole numbers if all that is given is whole.

    >>> type(slider(2, 1, 5)).__name__, type(slider(0.5, 0, 1)).__name__
    ('IntSlider', 'FloatSlider')
    """
    if all(isinstance(number, int) for number in (value, low, high, step or 1)):
        return ipywidgets.IntSlider(value=value, min=low, max=high, step=step or 1)
    return ipywidgets.FloatSlider(value=value, min=low, max=high, step=step or (high - low) / 50)


def choice(options: Sequence[Any]) -> ipywidgets.Widget:
    """A menu that starts at the first of the options."""
    return ipywidgets.Dropdown(options=options, value=options[0])


class SliderFigure(ipywidgets.VBox):
    """Sliders above the picture that `draw(**values)` makes; the last line of a cell.

    It draws into an Image widget, not an Output widget: nbval then sees one constant output. A slow figure is drawn
    once the slider is let go, since every move on the way would queue up.

    Args:
        draw: makes the figure; its arguments are named as the sliders.
        alt: what is to be seen at the values of the start, for whoever cannot see or move it.
        sliders: `slider(...)`, `choice(...)` or any widget with a value.

    Raises:
        MissingAltTextError: the alt text is empty.

    >>> def draw(beta):
    ...     figure, (ax,) = figures.new_figure()
    ...     ax.plot([0, 1], [0, beta])
    ...     return figure
    >>> view = SliderFigure(draw, alt="a line that rises to beta", beta=slider(0.5, 0, 1))
    >>> before, view.sliders["beta"].value = view.picture.value, 1.0
    >>> view.picture.value == before
    False
    """

    def __init__(self, draw: Callable[..., Any], alt: str, **sliders: ipywidgets.Widget):
        if not alt.strip():
            raise errors.MissingAltTextError("a slider figure needs alt text that says what is seen at the start")
        self.sliders, self._draw, self._alt = sliders, draw, alt
        for name, control in sliders.items():
            control.description = control.description or name
            control.style = {"description_width": "initial"}
            if control.has_trait("continuous_update"):
                control.continuous_update = False
            control.observe(self._redraw, names="value")
        # in a column a picture is stretched to the page's width unless it is told where to stand
        layout = ipywidgets.Layout(max_width="100%", align_self="flex-start")
        self.picture = ipywidgets.Image(format="png", value=self._png(), layout=layout)
        _, metadata = figures.picture(self.picture.value, alt)
        self.picture.width = str(metadata["image/png"]["width"])
        super().__init__([*sliders.values(), self.picture])

    def _png(self) -> bytes:
        figure = self._draw(**{name: control.value for name, control in self.sliders.items()})
        png = figures.figure_png(figure)
        figures.close(figure)
        return png

    def _redraw(self, change: Any) -> None:
        self.picture.value = self._png()

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict, dict]:
        live = super()._repr_mimebundle_(**kwargs)
        data, metadata = live if isinstance(live, tuple) else (live, {})
        still, about = figures.picture(self.picture.value, self._alt)
        return {**data, **still}, {**metadata, **about}
