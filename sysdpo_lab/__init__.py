"""sysdpo_lab: align a whole compound AI system with preferences on its final output only.

An implementation of SysDPO (Wang, Zhang, Ding, Tsai, Wu, Koyejo, "Aligning Compound AI Systems via System-level DPO",
arXiv 2502.17721) for learning, teaching and trying.

    from sysdpo_lab import CompoundSystem, exact, losses, samplers, alignment, training, preferences
    from sysdpo_lab.components import Categorical, CausalLM, Tool
"""

import importlib
from typing import TYPE_CHECKING, Any

from sysdpo_lab import alignment, errors, exact, losses, preferences, samplers
from sysdpo_lab.system import CompoundSystem

if TYPE_CHECKING:
    from sysdpo_lab import training

__version__ = "0.1.0"
__all__ = ["CompoundSystem", "alignment", "errors", "exact", "losses", "preferences", "samplers", "training"]


def __getattr__(name: str) -> Any:
    if name == "training":  # imports accelerate, which `import sysdpo_lab` must not
        return importlib.import_module("sysdpo_lab.training")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
