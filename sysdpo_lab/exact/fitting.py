"""Training on tables: Adam from the reference (or wherever the policy stands), and minima by L-BFGS or many starts."""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sysdpo_lab import errors
from sysdpo_lab.exact.population import Objective
from sysdpo_lab.exact.stacking import by_member, stack, unstack
from sysdpo_lab.system import CompoundSystem


def parameters_of(system: CompoundSystem, only: Sequence[str] | str | None = None) -> list[nn.Parameter]:
    """The tables that training changes, tied ones once: all that are not frozen, or those of `only`.

    Raises:
        NothingToTrainError: there is none.
    """
    names = [only] if isinstance(only, str) else only
    found = system.trainable_parameters()
    if names is not None:
        wanted = {id(parameter) for name in names for parameter in system[name].trainable()}
        found = [parameter for parameter in found if id(parameter) in wanted]
    if not found:
        raise errors.NothingToTrainError(f"no table of {names or list(system.order)} can be trained")
    return found


def train(
    system: CompoundSystem,
    objective: Objective | Callable[[], Tensor],
    steps: int = 500,
    lr: float = 0.1,
    only: Sequence[str] | str | None = None,
    watch: Callable[[int], None] | None = None,
    method: str = "adam",
) -> list[float]:
    """Adam, or plain gradient descent, on the tables' logits, in place, from where the policy stands.

    Args:
        system: the tables to change.
        objective: `direct(...)`, `sampling(...)`, `separate(...)` of this system, or any function that returns its loss.
        steps: number of steps.
        lr: Adam's step size, in nats of a logit; for gradient descent the factor of the gradient.
        only: train these components and leave the others.
        watch: called with the number of steps done, before the first and after each.
        method: "adam", or "gradient": without Adam's rescaling, which blows rounding up and so leaves a saddle by itself.

    Returns:
        the loss before each step, nats.

    Raises:
        NothingToTrainError, UnknownOptionError.  NonFiniteError: the loss is infinite or NaN.

    >>> from sysdpo_lab import exact
    >>> from sysdpo_lab.components import Categorical
    >>> system = CompoundSystem([Categorical("z", {"x": 1}, 2)])
    >>> judge = torch.log(torch.tensor(4.0)) * torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]])  # pref 0.8
    >>> losses = train(system, exact.direct(system, judge, beta=1.0), steps=300)
    >>> [round(p, 4) for p in system["z"].probabilities()[0].tolist()]
    [0.8, 0.2]
    """
    errors.check_option("method", method, ("adam", "gradient"))
    parameters = parameters_of(system, only)
    optimizer = (torch.optim.Adam if method == "adam" else torch.optim.SGD)(parameters, lr=lr)
    found: list[float] = []
    if watch:
        watch(0)
    for step in range(steps):
        loss = objective()
        found.append(_finite(loss.item(), step))
        _set_gradients(loss, parameters)
        optimizer.step()
        if watch:
            watch(step + 1)
    optimizer.zero_grad()
    return found


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise errors.NonFiniteError(
            f"step {step}: the loss is {loss}; the policy cannot make something that is compared, or lr is too large"
        )
    return loss


def _set_gradients(loss: Tensor, parameters: list[nn.Parameter]) -> None:
    """Gradients of these tables only; a structural zero gets none."""
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient


def descend(
    system: CompoundSystem,
    objective: Objective | Callable[[], Tensor],
    steps: int = 500,
    only: Sequence[str] | str | None = None,
    tolerance: float = 1e-12,
) -> float:
    """L-BFGS with a strong-Wolfe line search, in place, to a stationary point near the policy; returns its loss.

    Args:
        steps: largest number of iterations.
        tolerance: stop when no entry of the gradient is larger.
    """
    parameters = parameters_of(system, only)
    free = [torch.isfinite(parameter) for parameter in parameters]  # a logit of -inf must not enter the line search
    start = torch.cat([parameter.detach()[mask] for parameter, mask in zip(parameters, free)])
    flat = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [flat], max_iter=steps, history_size=20, tolerance_grad=tolerance, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        _write(flat.detach(), parameters, free)
        loss = objective()
        _set_gradients(loss, parameters)
        flat.grad = torch.cat([parameter.grad[mask] for parameter, mask in zip(parameters, free)])
        return loss

    optimizer.step(closure)
    _write(flat.detach(), parameters, free)
    with torch.no_grad():
        return objective().item()


def _write(flat: Tensor, parameters: list[nn.Parameter], free: list[Tensor]) -> None:
    start = 0
    with torch.no_grad():
        for parameter, mask in zip(parameters, free):
            number = int(mask.sum())
            parameter[mask] = flat[start : start + number]
            start += number


def scattered(system: CompoundSystem, starts: int, generator: torch.Generator | None, scale: float = 1.0) -> CompoundSystem:
    """A stack of copies of a system: the policy itself, then starts with N(0, scale^2) added to each logit."""
    copies = [system]
    for _ in range(starts - 1):
        moved = copy.deepcopy(system)
        for parameter in parameters_of(moved):
            with torch.no_grad():
                parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        copies.append(moved)
    return stack(copies)


def minimise(
    system: CompoundSystem,
    objective: Objective,
    starts: int = 20,
    generator: torch.Generator | None = None,
    *,
    steps: int = 500,
    lr: float = 0.1,
    scale: float = 1.0,
) -> Tensor:
    """The best of many starts, written into the system: Adam on all of them at once, then L-BFGS on the best.

    A numerical minimum, no proof. The first start is the policy as it stands.

    Args:
        objective: of this system.
        starts: how many; 1 needs no generator.
        steps, lr: of Adam.
        scale: spread of the random starts, nats.

    Returns:
        (starts,) the loss that each start reached under Adam, nats; the system's own loss is at most their minimum.
    """
    if starts > 1 and generator is None:
        raise errors.UnknownOptionError("random starts need generator=torch.Generator()")
    many = scattered(system, starts, generator, scale)
    copies = objective.copies(many, starts)
    train(many, copies, steps, lr)
    with torch.no_grad():
        reached = by_member(copies.losses(), starts).sum(1)
    unstack(many, int(reached.argmin()), system)
    descend(system, objective)
    return reached
