"""The nodes of a compound system. `CausalLM` needs the extra `hf`, `Diffusion` the extra `diffusion`: imported on demand."""

from typing import TYPE_CHECKING, Any

from sysdpo_lab.components.base import Component
from sysdpo_lab.components.categorical import Categorical
from sysdpo_lab.components.completion import Completion
from sysdpo_lab.components.tool import Tool

if TYPE_CHECKING:
    from sysdpo_lab.components.conditioning import TextEncoder
    from sysdpo_lab.components.diffusion import Diffusion
    from sysdpo_lab.components.language import CausalLM

__all__ = ["Categorical", "CausalLM", "Completion", "Component", "Diffusion", "TextEncoder", "Tool"]

_LAZY = {
    "CausalLM": "sysdpo_lab.components.language",
    "Diffusion": "sysdpo_lab.components.diffusion",
    "TextEncoder": "sysdpo_lab.components.conditioning",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
