"""The checks that exercises call: `checks.lesson_00.check_margin(margin)`; each lesson's module is found by its name.

>>> from sysdpo_lab.coursework import checks
>>> checks.lesson_00.__name__
'sysdpo_lab.coursework.checks.lesson_00'
"""

import importlib
from typing import Any

from sysdpo_lab.coursework.checks.core import Check, CheckFailed, Mistake, fail, message

__all__ = ["Check", "CheckFailed", "Mistake", "fail", "message"]


def __getattr__(name: str) -> Any:
    # a lesson's checks are loaded when it asks for them, so that lesson 00 does not wait for the others'
    if name.startswith("lesson_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
