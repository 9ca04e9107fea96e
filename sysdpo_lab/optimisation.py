"""What an optimiser step touches: parameter groups a component, learning rates over time, and checks of gradients."""

import math
import numbers
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from sysdpo_lab import errors

if TYPE_CHECKING:
    from sysdpo_lab.system import CompoundSystem

SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "adam", "sgd")
NOTICEABLE = 1e-12  # a gradient below it may leave every weight as it is without anything being wrong


@dataclass
class Group:
    """The parameters that one component brings into training; tied ones belong to the first that names them.

    Attributes:
        name: the component.
        lr: its peak learning rate.
        parameters: {name in the checkpoint: parameter}.
    """

    name: str
    lr: float
    parameters: dict[str, nn.Parameter]


# --- groups -----------------------------------------------------------------------------------------------------------------


def parameter_groups(system: "CompoundSystem", lr: float | Mapping[str, float]) -> list[Group]:
    """One group a trained component; a parameter that several share stands in one of them only.

    Args:
        lr: one number for every component that is not frozen, or {component: number}; a component that a dict does not
            name is not trained.

    Raises:
        UnknownComponentError: a name that does not exist.  NothingToTrainError: a named component is frozen or has no
        parameters, or nothing at all is left.  UnknownOptionError: a rate is no number >= 0, or differs between tied components.
    """
    rates = _rates(system, lr)
    groups, rate_of = [], {}
    for name in (name for name in system.order if name in rates):
        own = [parameter for parameter in system[name].trainable() if parameter.requires_grad]
        if not own and isinstance(lr, Mapping):
            raise errors.NothingToTrainError(
                f"lr names {name!r}, which is frozen or has no parameters; unfreeze it or leave it out"
            )
        for parameter in own:
            if rate_of.setdefault(id(parameter), (rates[name], name))[0] != rates[name]:
                other = rate_of[id(parameter)][1]
                raise errors.UnknownOptionError(f"{name!r} and {other!r} share parameters: give both the same learning rate")
        new = {key: p for key, p in _named(system, name, own).items() if rate_of[id(p)][1] == name}
        if new:
            groups.append(Group(name, rates[name], new))
    if not groups:
        raise errors.NothingToTrainError(f"no component of {tuple(system.order)} has anything to train; unfreeze one")
    return groups


def _rates(system: "CompoundSystem", lr: float | Mapping[str, float]) -> dict[str, float]:
    rates = dict(lr) if isinstance(lr, Mapping) else dict.fromkeys(system.order, lr)
    for name, rate in rates.items():
        system[name]  # a named error for a name that does not exist
        number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
        if not number or not 0 <= rate < math.inf:
            raise errors.UnknownOptionError(f"the learning rate of {name!r} must be a number >= 0, found {rate!r}")
    return {name: float(rate) for name, rate in rates.items()}


def _named(system: "CompoundSystem", name: str, own: Sequence[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Names that are the same in every process; a parameter that the component does not register gets its number."""
    known = {id(p): n for n, p in system[name].named_parameters(remove_duplicate=False)}
    return {f"{name}/{known.get(id(p), index)}": p for index, p in enumerate(own)}


@contextmanager
def only_these(system: "CompoundSystem", groups: Sequence[Group]) -> Iterator[list[str]]:
    """Inside the block only the groups' parameters need gradients; yields the components that are not trained."""
    chosen = {id(p) for group in groups for p in group.parameters.values()}
    resting = [p for p in system.trainable_parameters() if id(p) not in chosen]
    for parameter in resting:
        parameter.requires_grad_(False)
    try:
        yield [n for n in system.order if not any(id(p) in chosen for p in system[n].trainable())]
    finally:
        for parameter in resting:
            parameter.requires_grad_(True)


def check_weights(groups: Sequence[Group], optimizer: str, weight_decay: float) -> None:
    """Named error for weights that cannot be trained; a warning for those that lose small updates.

    Raises:
        NonFiniteError: NaN or +inf among the weights, or a structural zero (-inf) that weight decay would make a NaN.
    """
    for group in groups:
        half = {str(p.dtype) for p in group.parameters.values() if p.dtype in (torch.float16, torch.bfloat16)}
        if half:
            warnings.warn(
                f"component {group.name!r}: trainable weights are {', '.join(sorted(half))}; updates smaller than about "
                "1/256 of a weight are rounded away. Train adapters in float32, or convert the weights",
                errors.HalfPrecisionWarning,
                stacklevel=4,
            )
        for name, parameter in group.parameters.items():
            weights = parameter.detach()
            if bool((torch.isnan(weights) | (weights == torch.inf)).any()):
                raise errors.NonFiniteError(f"component {group.name!r}: {name} holds NaN or infinity before the first step")
            if weight_decay and optimizer != "adamw" and not bool(torch.isfinite(weights).all()):
                raise errors.NonFiniteError(
                    f"component {group.name!r}: weight decay with {optimizer!r} makes the structural zeros of {name} NaN; "
                    "use optimizer='adamw' or weight_decay=0"
                )


# --- optimiser and schedule -----------------------------------------------------------------------------------------------


def make_optimizer(
    groups: Sequence[Group], optimizer: str, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """torch's AdamW, Adam or SGD (no momentum), one parameter group a component."""
    errors.check_option("optimizer", optimizer, OPTIMIZERS)
    sets = [{"params": list(group.parameters.values()), "lr": group.lr, "name": group.name} for group in groups]
    if optimizer == "sgd":
        return torch.optim.SGD(sets, weight_decay=weight_decay)
    kind = torch.optim.AdamW if optimizer == "adamw" else torch.optim.Adam
    return kind(sets, betas=tuple(betas), weight_decay=weight_decay)


def lr_factor(step: int, steps: int, warmup: int = 0, schedule: str = "constant") -> float:
    """What the peak learning rate is multiplied by in a step counted from 0; never 0 within the run.

    Warm-up: (step + 1) / warmup. Then, with u = (step - warmup) / (steps - warmup): 1 (constant), 1 - u (linear),
    (1 + cos(pi u)) / 2 (cosine).

    >>> [lr_factor(step, 6, 2, "linear") for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    errors.check_option("schedule", schedule, SCHEDULES)
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    done = (step - warmup) / max(1, steps - warmup)
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


# --- gradients --------------------------------------------------------------------------------------------------------------


def grad_norm(parameters: Sequence[nn.Parameter]) -> float:
    """L2 norm of the gradients together, summed in float64; parameters without a gradient count 0.

    >>> weight = nn.Parameter(torch.zeros(2)); weight.grad = torch.tensor([3.0, 4.0])
    >>> grad_norm([weight])
    5.0
    """
    squares: dict[torch.device, list] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        wide = torch.float32 if gradient.device.type == "mps" else torch.float64
        norm = torch.linalg.vector_norm(gradient, dtype=wide)
        squares.setdefault(gradient.device, []).append(norm * norm)
    return math.sqrt(sum(torch.stack(found).sum().item() for found in squares.values()))


def component_norms(system: "CompoundSystem", groups: Sequence[Group], step: int) -> dict[str, float]:
    """{component: norm of the gradients of its trained parameters}; tied parameters count for each that shares them.

    Raises:
        NonFiniteError: naming step and component.
    """
    trained = {id(p) for group in groups for p in group.parameters.values()}
    norms = {}
    for name in system.order:
        own = [p for p in system[name].trainable() if id(p) in trained]
        if own:
            norms[name] = grad_norm(own)
            if not math.isfinite(norms[name]):
                raise errors.NonFiniteError(
                    f"step {step}, component {name!r}: the gradient holds NaN or infinity; no weight was changed. "
                    "Lower the learning rate or beta, or look at this step's pairs"
                )
    return norms


class UpdateWatch:
    """Sees whether a step changed any weight: looks at the entry with the largest gradient of every tensor.

    Args:
        groups: parameters with their gradients, before the step.
    """

    def __init__(self, groups: Sequence[Group]):
        self.seen = []
        for parameter in (p for group in groups for p in group.parameters.values() if p.grad is not None):
            entry = int(parameter.grad.reshape(-1).abs().argmax())
            self.seen.append((parameter, entry, parameter.detach().reshape(-1)[entry].item()))

    def check(self, step: int, norm: float) -> None:
        """After the step: NoUpdateError when no entry has moved."""
        if all(p.detach().reshape(-1)[entry].item() == before for p, entry, before in self.seen):
            kinds = ", ".join(sorted({str(p.dtype) for p, _, _ in self.seen}))
            raise errors.NoUpdateError(
                f"step {step}: the gradient has norm {norm:.3g} and the learning rate is positive, yet no trainable tensor "
                f"({kinds}) changed; use float32 weights or a larger learning rate, and see that nothing writes the "
                "weights back after each step"
            )
