"""The closed-form optima: the tilted marginal (E4), the tilted joint that SysDPO-Direct aims at, and its steps (h-transform)."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.exact.joint import Joint
from sysdpo_lab.exact.tables import aligned, known_sizes, log_table, marginal
from sysdpo_lab.system import CompoundSystem


def tilt(p_reference: Float[Tensor, "X Z"], reward: Float[Tensor, "X Z"], beta: float) -> Float[Tensor, "X Z"]:
    """p*(z|x) = p_ref(z|x) exp(r(x,z)/beta) / Z(x): the optimum of RLHF and of DPO (E4).

    Args:
        beta: > 0; larger stays closer to p_ref.

    >>> tilt(torch.tensor([[0.5, 0.5]]).double(), torch.tensor([[0.0, 1.0]]).double(), 1e9).round(decimals=6).tolist()
    [[0.5, 0.5]]
    """
    beta = errors.check_beta(beta)
    reward = torch.as_tensor(reward, dtype=torch.float64)
    if reward.shape != p_reference.shape:
        raise errors.CardinalityError(f"reward has shape {tuple(reward.shape)}, p_ref {tuple(p_reference.shape)}")
    if not bool(torch.isfinite(reward).all()):
        raise errors.NonFiniteError("the reward holds NaN or an infinity")
    log_p = p_reference.double().log()
    best = torch.where(torch.isfinite(log_p), reward, -torch.inf).amax(-1, keepdim=True)
    advantage = torch.where(torch.isfinite(log_p), reward - best, 0.0)  # <= 0: a tiny beta cannot overflow
    return torch.softmax(log_p + advantage / beta, dim=-1)


def tilted_marginal(system: CompoundSystem, reward: Float[Tensor, "X Z"], beta: float) -> Float[Tensor, "X Z"]:
    """E4 for a whole system: its reference marginal tilted by exp(r / beta)."""
    return tilt(marginal(system, reference=True).detach(), reward, beta)


def check_reward(reward: Float[Tensor, "X Z"], inputs: int, outputs: int) -> Float[Tensor, "X Z"]:
    """The reward as float64 (X, Z), finite, or a named error."""
    reward = torch.as_tensor(reward, dtype=torch.float64)
    if tuple(reward.shape) != (inputs, outputs):
        raise errors.CardinalityError(f"reward has shape {tuple(reward.shape)}, expected ({inputs}, {outputs})")
    if not bool(torch.isfinite(reward).all()):
        raise errors.NonFiniteError("the reward holds NaN or an infinity")
    return reward


def tilted_joint(
    system: CompoundSystem, reward: Float[Tensor, "X Z"], beta: float, grid: Joint | None = None
) -> Float[Tensor, "X S"]:
    """p*(s|x) = p_ref(s|x) exp(r(x,z)/beta) / Z(x): the unique optimum of SysDPO-Direct over all joints (theory S2.1).

    Its output marginal is `tilted_marginal`, and its posterior over intermediates is the reference's.

    Args:
        reward: r(x, z).
        beta: > 0; larger stays closer to the reference.
        grid: the order of the joint values; default `Joint(system)`.

    Returns:
        (X, S), rows sum to 1.

    >>> from sysdpo_lab.components import Categorical
    >>> system = CompoundSystem([Categorical("z", {"x": 1}, 2)])
    >>> tilted_joint(system, torch.tensor([[0.0, 1.0]]), 1e9).round(decimals=6).tolist()
    [[0.5, 0.5]]
    """
    grid = Joint(system) if grid is None else grid
    reward = check_reward(reward, grid.inputs, grid.sizes[-1])
    return tilt(grid.log_reference.exp(), reward[:, grid.answer], beta)


@dataclass(frozen=True)
class TiltedStep:
    """How one component moves in the tilted joint: p*(y_i | everything before it, x) = p_ref(y_i | Pa_i) h_i / h_{i-1}.

    Attributes:
        name: the component.
        context: the variables that the step can depend on, its parents among them; all others before it drop out.
        kernel: p*(y_i | context), axes = context, then the component; NaN-free, 0 where the reference cannot go.
        log_h: log h_i, nats, axes = `h_axes`.
        h_axes: the inputs and those components up to this one that still matter for what comes after.
    """

    name: str
    context: tuple[str, ...]
    kernel: Float[Tensor, "..."]
    log_h: Float[Tensor, "..."]
    h_axes: tuple[str, ...]


def h_transform(system: CompoundSystem, reward: Float[Tensor, "X Z"], beta: float) -> list[TiltedStep]:
    """The steps of the tilted joint in topological order (theory S2.2, after Doob's h-transform).

    h_i(y_1..y_i, x) = E_ref[exp(r/beta) | y_1..y_i, x] by a backward recursion over the graph's frontier, so that the cost
    grows with the frontier's width, not with the number of variables.

    Args:
        reward: r(x, z).
        beta: > 0.

    >>> from sysdpo_lab.components import Categorical
    >>> system = CompoundSystem([Categorical("y", {"x": 1}, 2), Categorical("z", {"y": 2}, 2, [[1.0, 0.0], [0.0, 1.0]])])
    >>> step = h_transform(system, torch.log(torch.tensor([[1.0, 3.0]])), 1.0)[0]  # y decides z, e^r is 3 times as large
    >>> step.name, [round(p, 4) for p in step.kernel[0].tolist()]
    ('y', [0.25, 0.75])
    """
    sizes = known_sizes(system, system.order)
    everything = (*system.inputs, *system.order)
    shape = [sizes[name] for name in (*system.inputs, system.output)]
    reward = check_reward(reward, math.prod(shape[:-1]), shape[-1])
    axes, log_h = (*system.inputs, system.output), (reward / errors.check_beta(beta)).reshape(shape)
    if not bool(torch.isfinite(log_h).all()):
        raise errors.NonFiniteError(f"reward / beta overflows at beta = {beta}")
    steps: list[TiltedStep] = []
    for name in reversed(system.order):
        own = (*system.parents(name), name)
        with torch.no_grad():
            table = log_table(system, name, True, sizes)
        if name not in axes:  # nothing that matters reads it: it stays as it is
            context = tuple(v for v in everything if v in own[:-1])
            steps.append(TiltedStep(name, context, aligned(table, own, (*context, name)).exp(), log_h, axes))
            continue
        joint_axes = tuple(v for v in everything if v in axes or v in own)
        terms = aligned(table, own, joint_axes) + aligned(log_h, axes, joint_axes)
        terms = terms.movedim(joint_axes.index(name), -1)
        context = tuple(v for v in joint_axes if v != name)
        total = torch.logsumexp(terms, -1)
        kernel = (terms - torch.where(torch.isfinite(total), total, 0.0)[..., None]).exp()
        steps.append(TiltedStep(name, context, kernel, log_h, axes))
        axes, log_h = context, total
    return steps[::-1]
