"""All joint values of a small discrete system as one grid: log p(s | x) by broadcasting the components' tables (E1)."""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.exact.tables import aligned, cardinality, known_sizes, log_table
from sysdpo_lab.system import CompoundSystem

LIMIT = 2_000_000


class Joint:
    """The grid of all joint values of a system; the output runs fastest.

    Attributes:
        names: the components, the output last; joint value number s is their values in row-major order.
        sizes: their cardinalities.
        inputs, states: number of inputs X and of joint values S.

    Args:
        system: tables and Tools over tables.
        limit: largest X * S.

    Raises:
        StateSpaceError: there are more than `limit` joint values.

    >>> from sysdpo_lab.components import Categorical
    >>> y, z = Categorical("y", {"x": 2}, 3), Categorical("z", {"y": 3}, 2)
    >>> grid = Joint(CompoundSystem([z, y], output="z"))
    >>> grid.names, grid.log_prob().shape, grid.value("y").tolist()
    (('y', 'z'), torch.Size([2, 6]), [0, 0, 1, 1, 2, 2])
    """

    def __init__(self, system: CompoundSystem, limit: int = LIMIT):
        self.system = system
        self.names = (*(name for name in system.order if name != system.output), system.output)
        known = known_sizes(system, system.order)
        self._sizes = {name: known.get(name) or cardinality(system, name) for name in (*system.inputs, *self.names)}
        self.sizes = tuple(self._sizes[name] for name in self.names)
        self.inputs = math.prod(self._sizes[name] for name in system.inputs)
        self.states = math.prod(self.sizes)
        if self.inputs * self.states > limit:
            raise errors.StateSpaceError(
                f"{self.inputs} inputs x {self.states} joint values of {self.names} are more than limit={limit}; "
                "joint_marginal, posterior and kl_joint need no enumeration"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """Inputs, then components: the axes of the full grid."""
        return (*self.system.inputs, *self.names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of `axes`."""
        return tuple(self._sizes[name] for name in self.axes)

    def value(self, name: str) -> Int[Tensor, " S"]:
        """The value of a component in each joint value."""
        place = self.names.index(name)
        return torch.arange(self.states) // math.prod(self.sizes[place + 1 :]) % self.sizes[place]

    @cached_property
    def answer(self) -> Int[Tensor, " S"]:
        """The output's value in each joint value."""
        return self.value(self.system.output)

    def index(self, **values: int) -> int:
        """The number of the joint value with the given values.

        >>> from sysdpo_lab.components import Categorical
        >>> grid = Joint(CompoundSystem([Categorical("y", {"x": 2}, 3), Categorical("z", {"y": 3}, 2)]))
        >>> grid.index(y=2, z=1)
        5
        """
        number = 0
        for name, size in zip(self.names, self.sizes):
            number = number * size + values[name]
        return number

    def term(self, name: str, reference: bool = False) -> Float[Tensor, "..."]:
        """log p_i(y_i | Pa(y_i)), nats, ready to broadcast over the full grid; differentiable."""
        table = log_table(self.system, name, reference, self._sizes)
        return aligned(table, (*self.system.parents(name), name), self.axes)

    def log_prob(self, reference: bool = False, names: Sequence[str] | None = None) -> Float[Tensor, "X S"]:
        """log p(s | x) = sum of the components' terms, nats; -inf where impossible; differentiable.

        Args:
            reference: the frozen start instead of the policy.
            names: only these components' terms.
        """
        total = torch.zeros(self.shape, dtype=torch.float64)
        for name in self.names if names is None else names:
            total = total + self.term(name, reference)
        return total.reshape(self.inputs, self.states)

    @cached_property
    def log_reference(self) -> Float[Tensor, "X S"]:
        """log p_ref(s | x), nats, computed once: the reference does not move."""
        with torch.no_grad():
            return self.log_prob(reference=True)

    @cached_property
    def support(self) -> Bool[Tensor, "X S"]:
        """Where p_ref(s | x) > 0."""
        return torch.isfinite(self.log_reference)

    def log_finals(self, log_joint: Float[Tensor, "X S"]) -> Float[Tensor, "X Z"]:
        """log p(z | x): logsumexp over everything but the output, nats; -inf where no joint value has z."""
        cells = log_joint.reshape(self.inputs, -1, self.sizes[-1])
        possible = torch.isfinite(cells).any(1)
        # a column of -inf has a NaN gradient in logsumexp: take it out first
        safe = torch.where(possible[:, None], cells, 0.0)
        return torch.where(possible, torch.logsumexp(safe, 1), -torch.inf)

    def grid(self, over_states: Float[Tensor, "X S"]) -> Float[Tensor, "..."]:
        """A number a joint value, with one axis a variable of `axes`."""
        return over_states.reshape(self.shape)
