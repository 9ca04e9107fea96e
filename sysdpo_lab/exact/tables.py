"""Tables of discrete components, and marginals of a whole system by variable elimination (E1)."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import opt_einsum
import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.components.categorical import Categorical
from sysdpo_lab.components.tool import Tool
from sysdpo_lab.system import CompoundSystem

# --- tables of any discrete component -------------------------------------------------------------------------------------


def cardinality(system: CompoundSystem, name: str) -> int:
    """Number of values of a variable of a discrete system.

    Raises:
        CardinalityError: nothing in the graph says how many values it has.
    """
    known = [name] if name in system.inputs else [n for n in system.order if n == name or n in system.ancestors(name)]
    return _size(known_sizes(system, known), name)


def known_sizes(system: CompoundSystem, names: Iterable[str]) -> dict[str, int]:
    """Cardinalities as far as they are known; `names` in topological order, so that each Tool is called once."""
    sizes = dict(system.cardinalities)
    for name in names:
        if name not in sizes and name in system.order and isinstance(system[name], Tool):
            sizes[name] = max(_tool_values(system[name], sizes).values()) + 1
    return sizes


def input_sizes(system: CompoundSystem) -> tuple[int, ...]:
    """Number of values of each input; their product is X.

    >>> input_sizes(CompoundSystem([Categorical("z", {"x": 2, "w": 3}, 2)], inputs=("x", "w")))
    (2, 3)
    """
    sizes = known_sizes(system, system.order)
    return tuple(_size(sizes, name) for name in system.inputs)


def _size(sizes: Mapping[str, int], name: str) -> int:
    if name not in sizes:
        raise errors.CardinalityError(
            f"the number of values of {name!r} is unknown: no table reads it; exact sums need tables (or Tools over tables)"
        )
    return sizes[name]


def _tool_values(tool: Tool, sizes: Mapping[str, int]) -> dict[tuple[int, ...], int]:
    """{parents' values: returned value} of a deterministic component over tables."""
    grid = list(itertools.product(*(range(_size(sizes, parent)) for parent in tool.parents)))
    columns = {p: torch.tensor([row[i] for row in grid]) for i, p in enumerate(tool.parents)}
    found = tool.greedy(columns)
    if not isinstance(found, Tensor):
        other = next(value for value in found if not isinstance(value, int))
        raise errors.CardinalityError(
            f"component {tool.name!r} returns {other!r} ({type(other).__name__}); exact sums need whole numbers 0, 1, 2, ..."
        )
    if int(found.min()) < 0:
        raise errors.ValueRangeError(f"component {tool.name!r} returns {int(found.min())}; exact sums need 0, 1, 2, ...")
    return dict(zip(grid, found.tolist()))


def probability_table(
    system: CompoundSystem, name: str, reference: bool = False, sizes: Mapping[str, int] | None = None
) -> Float[Tensor, "..."]:
    """p(y | parents) as a float64 table, axes = parents in their order, then the variable; differentiable.

    Args:
        sizes: cardinalities, where they are known already.

    Raises:
        UnsupportedSamplerError: the component has no finite table.
    """
    component = system[name]
    if isinstance(component, Categorical):
        return component.probabilities(reference)
    if not isinstance(component, Tool):
        raise errors.UnsupportedSamplerError(
            f"component {name!r} ({type(component).__name__}) has no finite table; exact sums work on Categorical and Tool"
        )
    sizes = known_sizes(system, system.order[: system.order.index(name) + 1]) if sizes is None else sizes
    shape = [_size(sizes, variable) for variable in (*component.parents, name)]
    table = torch.zeros(shape, dtype=torch.float64)
    for parents, value in _tool_values(component, sizes).items():
        if value >= shape[-1]:
            raise errors.ValueRangeError(f"component {name!r} returns {value} for {parents}, outside 0..{shape[-1] - 1}")
        table[(*parents, value)] = 1.0
    return table


# --- marginals ------------------------------------------------------------------------------------------------------------


def joint_marginal(system: CompoundSystem, names: Sequence[str], reference: bool = False) -> Float[Tensor, "X ..."]:
    """p(names | x) = sum over all other components of prod_i p_i, by variable elimination; differentiable, float64.

    The contraction order comes from opt_einsum, so the cost grows with the graph's width, not with the number of variables.

    Args:
        system: tables and Tools over tables.
        names: components, in the order of the result's axes.
        reference: the frozen start instead of the policy.

    Returns:
        (X, one axis a name); with several inputs X runs over their joint values, the first input slowest.

    >>> y = Categorical("y", {"x": 2}, 2, [[0.5, 0.5], [0.2, 0.8]])
    >>> z = Categorical("z", {"y": 2}, 2, [[1.0, 0.0], [0.5, 0.5]])
    >>> [[round(p, 6) for p in row] for row in joint_marginal(CompoundSystem([y, z]), ["y", "z"])[1].tolist()]
    [[0.2, 0.0], [0.4, 0.4]]
    """
    used = set(names).union(*(system.ancestors(name) for name in names))
    order = [name for name in system.order if name in used]
    axis = {name: number for number, name in enumerate([*system.inputs, *order])}
    sizes = known_sizes(system, order)
    operands: list[Any] = []
    for name in order:
        operands += [probability_table(system, name, reference, sizes), [axis[v] for v in (*system.parents(name), name)]]
    read = {variable for name in order for variable in system.parents(name)}
    for name in system.inputs:  # an input that nothing reads still has its axis in the result
        if name not in read:
            operands += [torch.ones(_size(sizes, name), dtype=torch.float64), [axis[name]]]
    inputs = [_size(sizes, name) for name in system.inputs]
    result = opt_einsum.contract(*operands, [axis[name] for name in (*system.inputs, *names)], optimize="auto")
    return result.reshape(-1, *result.shape[len(inputs) :])


def marginal(system: CompoundSystem, reference: bool = False) -> Float[Tensor, "X Z"]:
    """p(z | x): `joint_marginal` of the output alone; differentiable, float64.

    Args:
        system: tables and Tools over tables.
        reference: the frozen start instead of the policy.

    Returns:
        (X, Z), rows sum to 1; with several inputs X runs over their joint values, the first input slowest.

    >>> y = Categorical("y", {"x": 2}, 2, [[0.5, 0.5], [0.2, 0.8]])
    >>> z = Categorical("z", {"y": 2}, 2, [[1.0, 0.0], [0.5, 0.5]])
    >>> [[round(p, 6) for p in row] for row in marginal(CompoundSystem([y, z])).tolist()]
    [[0.75, 0.25], [0.6, 0.4]]
    """
    return joint_marginal(system, [system.output], reference)


def log_table(system: CompoundSystem, name: str, reference: bool, sizes: Mapping[str, int]) -> Float[Tensor, "..."]:
    """log p(y | parents), nats, axes as in `probability_table`; -inf at a structural zero; differentiable."""
    component = system[name]
    if isinstance(component, Categorical):
        return component.log_table(reference)
    return probability_table(system, name, reference, sizes).log()


def aligned(table: Tensor, axes: Sequence[str], names: Sequence[str]) -> Tensor:
    """`table` with its axes in the order of `names` and size 1 where it has none: ready to broadcast.

    >>> aligned(torch.zeros(2, 3), ["b", "a"], ["a", "b", "c"]).shape
    torch.Size([3, 2, 1])
    """
    order = sorted(range(len(axes)), key=lambda i: names.index(axes[i]))
    shape = [table.shape[axes.index(name)] if name in axes else 1 for name in names]
    return table.permute(order).reshape(shape)
