"""A progress bar with the time left: on a terminal, in a notebook, and nowhere else."""

import io
import os
import sys
from typing import Any

SWITCH = "SYSDPO_PROGRESS"  # "on" or "off" in the environment overrides what is found out


def place(enabled: bool | None = None) -> str:
    """Where a bar is to be shown: "terminal", "notebook" or "nowhere".

    Args:
        enabled: None finds out: nowhere under pytest or where the output is no terminal; True and False decide.

    >>> place(False)
    'nowhere'
    """
    if enabled is None:
        enabled = {"on": True, "off": False}.get(os.environ.get(SWITCH, ""))
    if enabled is False or (enabled is None and "PYTEST_CURRENT_TEST" in os.environ):
        return "nowhere"
    if _in_notebook():
        return "notebook"
    return "terminal" if enabled or sys.stderr.isatty() else "nowhere"


def _in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")


class Silent:
    """A bar that shows nothing."""

    def update(self, done: int = 1, **numbers: Any) -> None:
        """`done` more units; `numbers` are shown beside the bar."""

    def close(self) -> None:
        """Nothing more will come."""

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.close()


class Bar(Silent):
    """One line: share done, time gone, time left, and the latest numbers.

    Args:
        total: units in all.
        description: shown in front.
        initial: units that were done before (a resumed run).
        notebook: show it as an output of the cell, which is emptied at the end: stored notebooks stay the same.
    """

    def __init__(self, total: int, description: str = "", initial: int = 0, notebook: bool = False):
        from tqdm import tqdm

        class Line(tqdm):
            monitor_interval = 0  # no thread of its own

            def display(self, msg=None, pos=None):
                if not notebook:
                    return super().display(msg, pos)
                handle.update(_text("" if msg == "" else str(self)))

        if notebook:
            from IPython.display import DisplayHandle

            handle = DisplayHandle()
            handle.display(_text(""))
        self._line = Line(
            total=total, desc=description, initial=initial, file=io.StringIO() if notebook else sys.stderr,
            dynamic_ncols=not notebook, ncols=100 if notebook else None, mininterval=0.5, leave=not notebook,
        )  # fmt: skip
        self._handle = handle if notebook else None

    def update(self, done: int = 1, **numbers: Any) -> None:
        shown = {name: f"{value:.4g}" for name, value in numbers.items() if value is not None}
        self._line.set_postfix(shown, refresh=False)
        self._line.update(done)

    def close(self) -> None:
        self._line.close()
        if self._handle is not None:
            self._handle.update(_text(""))


def _text(text: str) -> Any:
    from IPython.display import Pretty

    return Pretty(text)


def bar(total: int, description: str = "", initial: int = 0, enabled: bool | None = None) -> Silent:
    """A bar for `total` units of work, or one that shows nothing where there is nobody to look at it.

    Args:
        total, description, initial: see `Bar`.
        enabled: see `place`.

    >>> with bar(3, enabled=False) as line:
    ...     line.update(1, loss=0.5)
    """
    where = place(enabled)
    return Silent() if where == "nowhere" else Bar(total, description, initial, where == "notebook")
