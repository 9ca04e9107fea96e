"""The worlds of language by name, and what each must have, so that one experiment serves all of them."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from sysdpo_lab import errors

WORLDS = ("restaurants", "arithmetic", "passages", "orca")  # orca has no exact judge
NEEDED = (
    "parse",  # input text x -> record
    "render",  # record -> x
    "records",  # (generator, n, split) -> records
    "judge",  # (record, answer) -> verdict with .score in [0, 1], .valid, .words
    "compare",  # (record, a, b) -> 1, 1/2, 0
    "preference_pairs",  # (n, generator, split) -> written pairs
    "pairs_from_candidates",  # (inputs, answers, generator, min_gap) -> on-policy pairs, number of ties
    "stored_pairs",  # (split) -> the pairs under data/
    "STORED",  # {split: number of stored pairs}
    "PROMPTS",  # {"tiny" or "chat": {role: template}}, roles draft, refine, answer1, answer2, answer2-seeing, merge
    "load_tiny",  # (roles) -> model, tokenizer of the tiny profile
)


def find(name: str) -> ModuleType:
    """The module of a world.

    Raises:
        UnknownOptionError: no such world; the message lists what there is.

    >>> find("restaurants").__name__
    'sysdpo_lab.worlds.restaurants'
    """
    errors.check_option("world", name, WORLDS)
    return importlib.import_module(f"sysdpo_lab.worlds.{name}")


def opened(settings: Mapping[str, Any]) -> Any:
    """The world of a run: its module, or what the module's own `opened` makes of the settings (data outside the package)."""
    module = find(settings["world"])
    return module.opened(settings) if hasattr(module, "opened") else module


def has_exact_judge(name: str) -> bool:
    """Whether a world can score an answer by itself."""
    return hasattr(find(name), "judge")
