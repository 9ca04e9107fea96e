"""Population objectives on tables: SysDPO-Direct (E6), SysDPO-Sampling (E7) and Separate-DPO (E9), every term summed exactly.

A finite sample is the same objective with an empirical law of pairs (`Objective.sampled`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.exact.joint import Joint
from sysdpo_lab.exact.pairs import PairLaw, expected_loss, final_pairs, trace_pairs
from sysdpo_lab.exact.tables import marginal
from sysdpo_lab.system import CompoundSystem


@dataclass(frozen=True)
class Objective:
    """A loss of a system's tables: call it for a scalar that can be differentiated.

    Attributes:
        grid: the joint values of the system that is trained.
        pairs: the comparisons.
        beta: > 0; larger keeps the optimum closer to the reference.
    """

    grid: Joint
    pairs: PairLaw
    beta: float

    def __call__(self) -> Tensor:
        return self.losses().sum()

    def log_ratio(self) -> Float[Tensor, "X N"]:
        """log p / p_ref of everything that is compared, nats; 0 where the reference is 0."""
        raise NotImplementedError

    def losses(self) -> Float[Tensor, " X"]:
        """Each input's part of the loss, nats; they add up to it."""
        return self.pairs.losses(self.log_ratio(), self.beta)

    @property
    def excess(self) -> float:
        """Loss minus the judge's own entropy, nats: 0 iff every compared pair has the judge's margin."""
        with torch.no_grad():
            return self().item() - self.pairs.floor

    def sampled(self, number: int, generator: torch.Generator, systems: int = 1) -> "Objective":
        """The same objective on `number` independent judgements (for each of `systems` stacked ones) instead of all."""
        return replace(self, pairs=self.pairs.sample(number, generator, systems))

    def copies(self, stacked: CompoundSystem, number: int) -> "Objective":
        """The objective of `number` copies of the system in `stacked`: the sum of their losses."""
        return replace(self, grid=Joint(stacked), pairs=self.pairs.repeated(number))


class Direct(Objective):
    """SysDPO-Direct: whole traces are compared."""

    def log_ratio(self) -> Float[Tensor, "X S"]:
        support = self.grid.support
        ratio = self.grid.log_prob() - torch.where(support, self.grid.log_reference, 0.0)
        return torch.where(support, ratio, 0.0)


class Sampling(Objective):
    """SysDPO-Sampling with every intermediate in A: only the marginal of the output is compared."""

    def log_ratio(self) -> Float[Tensor, "X Z"]:
        log_p, log_ref = self.grid.log_finals(self.grid.log_prob()), self.grid.log_finals(self.grid.log_reference)
        possible = torch.isfinite(log_ref)
        return torch.where(possible, log_p, 0.0) - torch.where(possible, log_ref, 0.0)


@dataclass(frozen=True)
class Separate(Objective):
    """Separate-DPO with finals only: each component in `answers` is trained as if its value were the answer.

    Its parents are drawn from the frozen reference, once a pair; each component has its own sigmoid, and the losses add.
    """

    answers: tuple[str, ...] = ()

    def losses(self) -> Float[Tensor, " X"]:
        return torch.stack([self._component(name) for name in self.answers]).sum(0)

    def _component(self, name: str) -> Float[Tensor, " X"]:
        grid = self.grid
        table, start = (grid.term(name, flag).expand(grid.shape) for flag in (False, True))
        impossible = torch.isinf(start.detach())
        ratio = torch.where(impossible, 0.0, table - torch.where(impossible, 0.0, start.detach()))
        ratio, weight = (self._contexts(values, name) for values in (ratio, grid.grid(grid.log_reference.exp())))
        margin = self.beta * (ratio[..., self.pairs.first] - ratio[..., self.pairs.second])
        loss = expected_loss(margin, self.pairs.preference[:, None, :])
        return torch.einsum("xc,xp,xcp->x", weight.sum(-1), self.pairs.weight, loss)

    def _contexts(self, values: Tensor, name: str) -> Float[Tensor, "X C V"]:
        """The full grid with the component's own axis last and all other components in one."""
        place = self.grid.axes.index(name)
        return values.movedim(place, -1).reshape(self.grid.inputs, -1, values.shape[place])


class SeparateTraces(Objective):
    """Separate-DPO with whole traces: each component on its own log-ratio gap."""

    def losses(self) -> Float[Tensor, " X"]:
        return sum(self.pairs.losses(self._ratio(name), self.beta) for name in self.grid.names)

    def _ratio(self, name: str) -> Float[Tensor, "X S"]:
        support = self.grid.support
        policy, start = (self.grid.log_prob(flag, [name]) for flag in (False, True))
        return torch.where(support, policy - torch.where(support, start.detach(), 0.0), 0.0)


def _input_law(grid: Joint, systems: int) -> Float[Tensor, " X"]:
    return torch.full((grid.inputs,), systems / grid.inputs, dtype=torch.float64)


def _check_support(grid: Joint, finals_only: bool = False) -> None:
    """A policy that cannot make what is compared has an infinite loss: say so before training."""
    with torch.no_grad():
        policy, reference = grid.log_prob(), grid.log_reference
        if finals_only:
            policy, reference = grid.log_finals(policy), grid.log_finals(reference)
    lost = torch.isfinite(reference) & ~torch.isfinite(policy)
    if bool(lost.any()):
        x, number = lost.nonzero()[0].tolist()
        values = {n: number if finals_only else int(grid.value(n)[number]) for n in grid.names[-1 if finals_only else 0 :]}
        raise errors.NoMarginError(f"input {x}: the policy cannot make {values}, which the reference can: no finite loss")


def direct(
    system: CompoundSystem,
    preference_logits: Float[Tensor, "X Z Z"],
    beta: float,
    law: str | Float[Tensor, "..."] = "reference",
    *,
    systems: int = 1,
) -> Direct:
    """SysDPO-Direct's population loss (E6): two traces from `law` with different outputs, judged by their outputs.

    Args:
        preference_logits: [x, i, j] = logit pref(i > j | x).
        beta: > 0.
        law: "reference", "uniform", or a tensor; see `trace_pairs`.
        systems: how many systems are stacked in this one (`stack`); the loss is the sum of theirs.

    Raises:
        NoMarginError: the policy cannot make something that is compared.  StateSpaceError: too many joint values.

    >>> from sysdpo_lab.components import Categorical
    >>> system = CompoundSystem([Categorical("y", {"x": 1}, 2), Categorical("z", {"y": 2}, 2)])
    >>> loss = direct(system, torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]]), beta=0.5)
    >>> round(loss().item(), 4), round(loss.excess, 4)
    (0.6931, 0.1109)
    """
    grid = Joint(system)
    _check_support(grid)
    return Direct(grid, trace_pairs(grid, preference_logits, law, _input_law(grid, systems)), errors.check_beta(beta))


def sampling(
    system: CompoundSystem,
    preference_logits: Float[Tensor, "X Z Z"],
    beta: float,
    law: str | Float[Tensor, "..."] = "uniform",
    *,
    systems: int = 1,
) -> Sampling:
    """SysDPO-Sampling's population loss with all intermediates (E7): finals are compared, p(z|x) is exact.

    Args:
        preference_logits, beta, systems: as in `direct`.
        law: "uniform", "reference", or a tensor; see `final_pairs`.

    >>> from sysdpo_lab.components import Categorical
    >>> system = CompoundSystem([Categorical("y", {"x": 1}, 2), Categorical("z", {"y": 2}, 2)])
    >>> round(sampling(system, torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]]), beta=0.5)().item(), 4)
    0.6931
    """
    grid = Joint(system)
    _check_support(grid, finals_only=True)
    pairs = final_pairs(preference_logits, law, grid.log_finals(grid.log_reference).exp(), _input_law(grid, systems))
    return Sampling(grid, pairs, errors.check_beta(beta))


def separate(
    system: CompoundSystem,
    preference_logits: Float[Tensor, "X Z Z"],
    beta: float,
    answers: Sequence[str],
    law: str | Float[Tensor, "..."] = "uniform",
    *,
    systems: int = 1,
) -> Separate:
    """Separate-DPO's population loss with finals only (E9): one DPO loss a component, added.

    Args:
        preference_logits, beta, law, systems: as in `sampling`.
        answers: the components whose values are read as answers (value i of each as output i); the output is added.

    Raises:
        CardinalityError: a component in `answers` has another number of values than the output.

    >>> from sysdpo_lab.components import Categorical
    >>> system = CompoundSystem([Categorical("y", {"x": 1}, 2), Categorical("z", {"y": 2}, 2)])
    >>> round(separate(system, torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]]), 0.5, answers=["y"])().item(), 4)  # 2 log 2
    1.3863
    """
    grid = Joint(system)
    names = tuple(dict.fromkeys([*answers, system.output]))
    for name in names:
        if grid.sizes[grid.names.index(name)] != grid.sizes[-1]:
            raise errors.CardinalityError(f"component {name!r} cannot stand for an answer: it has another number of values")
    _check_support(grid)
    p_reference = marginal(system, reference=True).detach()
    pairs = final_pairs(preference_logits, law, p_reference, _input_law(grid, systems))
    return Separate(grid, pairs, errors.check_beta(beta), names)


def separate_traces(
    system: CompoundSystem,
    preference_logits: Float[Tensor, "X Z Z"],
    beta: float,
    law: str | Float[Tensor, "..."] = "reference",
    *,
    systems: int = 1,
) -> SeparateTraces:
    """Separate-DPO's population loss with whole traces (E9): each component on its own log-ratio gap, own sigmoid, added.

    Args:
        preference_logits, beta, law, systems: as in `direct`.
    """
    found = direct(system, preference_logits, beta, law, systems=systems)
    return SeparateTraces(found.grid, found.pairs, found.beta)
