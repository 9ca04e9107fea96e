"""Joints and the graph: projection onto the DAG, how far a joint is from factorising, and whether Direct's optimum does."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.components.categorical import Categorical
from sysdpo_lab.exact.joint import Joint
from sysdpo_lab.exact.tables import cardinality, input_sizes, joint_marginal
from sysdpo_lab.exact.tilting import TiltedStep, h_transform
from sysdpo_lab.system import CompoundSystem

# --- projection -------------------------------------------------------------------------------------------------------


def conditionals(
    grid: Joint, joint: Float[Tensor, "X S"], input_law: Float[Tensor, " X"] | None = None
) -> dict[str, Float[Tensor, "..."]]:
    """p(y_i | Pa_i) of any joint, as tables; inputs that a component does not read are averaged over.

    Components with one shared table get the pooled conditional. Rows that the joint never reaches keep the reference.

    Args:
        grid: whose order the joint values have.
        joint: p(s | x), rows sum to 1.
        input_law: p(x), default uniform.
    """
    system = grid.system
    law = torch.full((grid.inputs,), 1 / grid.inputs, dtype=torch.float64) if input_law is None else input_law
    cells = grid.grid(joint * law[:, None])
    counts: dict[int, Tensor] = {}
    for name in grid.names:
        key = _table_id(system, name)
        counts[key] = counts.get(key, 0) + _family(cells, grid.axes, (*system.parents(name), name))
    return {name: _normalised(counts[_table_id(system, name)], grid, name) for name in grid.names}


def _table_id(system: CompoundSystem, name: str) -> int:
    return id(getattr(system[name], "logits", system[name]))


def _family(cells: Tensor, axes: Sequence[str], own: Sequence[str]) -> Tensor:
    """Sum over everything but `own`, axes in that order."""
    others = [i for i, name in enumerate(axes) if name not in own]
    left = [name for name in axes if name in own]
    summed = cells.sum(others) if others else cells
    return summed.permute([left.index(name) for name in own])


def _normalised(counts: Tensor, grid: Joint, name: str) -> Tensor:
    total = counts.sum(-1, keepdim=True)
    own = (*grid.system.parents(name), name)
    start = grid.term(name, True).detach().squeeze(tuple(i for i, axis in enumerate(grid.axes) if axis not in own))
    left = [axis for axis in grid.axes if axis in own]
    start = start.permute([left.index(axis) for axis in own]).exp()
    return torch.where(total > 0, counts / torch.where(total > 0, total, 1.0), start)


def with_tables(system: CompoundSystem, tables: Mapping[str, Float[Tensor, "..."]]) -> CompoundSystem:
    """A copy whose policy has the given tables; the reference and all other tables stay.

    >>> system = CompoundSystem([Categorical("z", {"x": 1}, 2)])
    >>> moved = with_tables(system, {"z": torch.tensor([[0.25, 0.75]])})
    >>> [[round(p, 6) for p in moved["z"].probabilities(flag)[0].tolist()] for flag in (False, True)]
    [[0.25, 0.75], [0.5, 0.5]]
    """
    moved = copy.deepcopy(system)
    for name, table in tables.items():
        if isinstance(moved[name], Categorical):
            with torch.no_grad():
                moved[name].logits.copy_(torch.as_tensor(table, dtype=torch.float64).log())
    return moved


def project(system: CompoundSystem, joint: Float[Tensor, "X S"], grid: Joint | None = None) -> CompoundSystem:
    """The system of this graph that is closest to a joint: minimises the mean over x of KL(joint || system) (M-projection).

    Its tables are the joint's own conditionals p(y_i | Pa_i). Where the joint is a tilt that factorises along the graph
    this is Direct's optimum itself; else it is neither Direct's nor Sampling's solution (see `minimise`).

    Args:
        joint: (X, S) in the order of `Joint(system)`.

    >>> system = CompoundSystem([Categorical("z", {"x": 1}, 2)])
    >>> [round(p, 6) for p in project(system, torch.tensor([[0.25, 0.75]]).double())["z"].probabilities()[0].tolist()]
    [0.25, 0.75]
    """
    grid = Joint(system) if grid is None else grid
    return with_tables(system, conditionals(grid, joint))


def factorisation_defect(system: CompoundSystem, joint: Float[Tensor, "X S"], grid: Joint | None = None) -> float:
    """max over x, s of |joint - product of its conditionals along the graph|: 0 iff the graph can hold the joint.

    >>> y = [Categorical("y", {"x": 1}, 2), Categorical("z", {"x": 1}, 2)]
    >>> coupled = torch.tensor([[0.5, 0.0, 0.0, 0.5]]).double()
    >>> factorisation_defect(CompoundSystem(y, output="z"), coupled)
    0.25
    """
    grid = Joint(system) if grid is None else grid
    with torch.no_grad():
        product = Joint(project(system, joint, grid)).log_prob().exp()
    return (joint - product).abs().max().item()


# --- can the graph hold it? ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Whether a graph can hold SysDPO-Direct's optimum; truthy when it can.

    Attributes:
        holds: the answer.
        deviations: {component: how much its tilted step varies, in probability, with what it does not see}.
        reasons: one sentence a component that fails.
        edges: (from, to): a smallest set of edges a failing component for which the optimum fits.
    """

    holds: bool
    deviations: dict[str, float]
    reasons: tuple[str, ...] = ()
    edges: tuple[tuple[str, str], ...] = field(default=())

    def __bool__(self) -> bool:
        return self.holds


def holds_direct(system: CompoundSystem, reward: Float[Tensor, "X Z"], beta: float, tolerance: float = 1e-9) -> Verdict:
    """Can this graph hold Direct's optimum? It can iff each tilted step depends on (y_i, Pa_i) only (theory S2.2).

    Reachable contexts count only. Components that share a table must need one and the same step; a frozen one must not
    have to move. Where the verdict is True, Direct is exact whatever pairs it sees; where it is False, its result depends
    on the distribution of the pairs, and the suggested edges repair it.

    Args:
        reward: r(x, z).
        beta: > 0.
        tolerance: differences in probability up to this are rounding.

    >>> from sysdpo_lab.components import Tool
    >>> same = Tool("z", ["y1", "y2"], lambda a, b: int(a == b))
    >>> system = CompoundSystem([Categorical("y1", {"x": 1}, 2), Categorical("y2", {"x": 1}, 2), same])
    >>> holds_direct(system, torch.tensor([[0.0, 1.0]]), 0.5).edges
    (('y1', 'y2'),)
    """
    deviations: dict[str, float] = {}
    reasons: list[str] = []
    edges: list[tuple[str, str]] = []
    shared: dict[int, list[tuple[str, Tensor, Tensor]]] = {}
    for step in h_transform(system, reward, beta):
        reachable = _reachable(system, step.context)
        low, high = _range(step, system.parents(step.name), reachable)
        deviations[step.name] = _spread(low, high)
        if deviations[step.name] > tolerance:
            extra = _smallest_repair(system, step, reachable, tolerance)
            edges += [(name, step.name) for name in extra]
            reasons.append(_reason(step.name, extra, deviations[step.name]))
        reasons.append(_check_fixed(system, step.name, low, high, deviations, tolerance))
        shared.setdefault(_table_id(system, step.name), []).append((step.name, low, high))
    reasons += [_check_shared(group, deviations, tolerance) for group in shared.values()]
    found = tuple(reason for reason in reasons if reason)
    return Verdict(not found, deviations, found, tuple(edges))


def with_edge(system: CompoundSystem, parent: str, child: str) -> CompoundSystem:
    """A copy of the system in which a table also reads `parent`; at first it ignores it, so that nothing else changes.

    A component with a tied table loses its tie: it becomes a table of its own.

    Raises:
        UnsupportedSamplerError: the child is no table.  CycleError: the edge would close a circle.

    >>> system = CompoundSystem([Categorical("a", {"x": 1}, 3), Categorical("b", {"x": 1}, 2)], output="b")
    >>> with_edge(system, "a", "b").parents("b")
    ('x', 'a')
    """
    old = system[child]
    if not isinstance(old, Categorical):
        raise errors.UnsupportedSamplerError(f"component {child!r} ({type(old).__name__}) is no table: it cannot read more")
    number = cardinality(system, parent)
    tables = [old.probabilities(flag).detach().unsqueeze(-2) for flag in (False, True)]
    tables = [table.expand(*table.shape[:-2], number, table.shape[-1]) for table in tables]
    new = Categorical(child, {**old.parent_cardinalities, parent: number}, old.cardinality, *tables)
    new.logits.requires_grad_(old.logits.requires_grad)
    parts = copy.deepcopy(list(system.components))  # as one, so that shared tables stay shared
    orphans = [part for part in parts if getattr(part, "tie", None) == child and part.name != child]
    for part in orphans:
        part.tie = None if part is orphans[0] else orphans[0].name
    parts = [new if part.name == child else part for part in parts]
    return CompoundSystem(parts, inputs=system.inputs, output=system.output)


def _reachable(system: CompoundSystem, context: Sequence[str]) -> Bool[Tensor, "..."]:
    """Where p_ref(context | x) > 0, axes = context."""
    with torch.no_grad():
        p = joint_marginal(system, [name for name in context if name not in system.inputs], reference=True)
    cells = p.reshape(*input_sizes(system), *p.shape[1:]) > 0
    for place in reversed([i for i, name in enumerate(system.inputs) if name not in context]):
        cells = cells.any(place)
    return cells


def _range(step: TiltedStep, seen: Sequence[str], reachable: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest step over all reachable contexts with the same values of `seen`; axes = seen, the component."""
    unseen = [i for i, name in enumerate(step.context) if name not in seen]
    left = [name for name in step.context if name in seen]
    order = [*(left.index(name) for name in seen), len(left)]
    low = step.kernel.masked_fill(~reachable[..., None], torch.inf)
    high = step.kernel.masked_fill(~reachable[..., None], -torch.inf)
    return (low.amin(unseen) if unseen else low).permute(order), (high.amax(unseen) if unseen else high).permute(order)


def _spread(low: Tensor, high: Tensor) -> float:
    return torch.where(torch.isfinite(low), high - low, 0.0).max().item()


def _smallest_repair(system: CompoundSystem, step: TiltedStep, reachable: Tensor, tolerance: float) -> tuple[str, ...]:
    """The fewest variables that the component would have to see besides its parents."""
    parents = system.parents(step.name)
    unseen = [name for name in step.context if name not in parents]
    for number in range(1, len(unseen) + 1):
        for extra in itertools.combinations(unseen, number):
            if _spread(*_range(step, (*parents, *extra), reachable)) <= tolerance:
                return extra
    return tuple(unseen)


def _reason(name: str, extra: Sequence[str], deviation: float) -> str:
    unseen = " and ".join(repr(variable) for variable in extra)
    return (
        f"component {name!r}: its step in the optimum depends on {unseen}, which it does not read "
        f"(by up to {deviation:.3g} in probability); add the edge {', '.join(f'{v} -> {name}' for v in extra)}"
    )


def _check_fixed(system: CompoundSystem, name: str, low: Tensor, high: Tensor, deviations: dict, tolerance: float) -> str:
    """A sentence if a frozen table would have to move, else ''."""
    if not isinstance(system[name], Categorical) or not system.is_frozen(name):
        return ""
    table = system[name].probabilities().detach()
    moved = torch.where(torch.isfinite(low), torch.maximum((high - table).abs(), (low - table).abs()), 0.0).max().item()
    if moved <= tolerance:
        return ""
    deviations[name] = max(deviations[name], moved)
    return f"component {name!r} is frozen, but the optimum needs it to move by {moved:.3g} in probability; unfreeze it"


def _check_shared(group: list[tuple[str, Tensor, Tensor]], deviations: dict, tolerance: float) -> str:
    """A sentence if components with one table need different steps, else ''."""
    names = [name for name, _, _ in group]
    low = torch.stack([low for _, low, _ in group]).amin(0)
    high = torch.stack([high for _, _, high in group]).amax(0)
    spread = _spread(low, high)
    if len(group) == 1 or spread <= max(tolerance, *(deviations[name] for name in names)):
        return ""
    for name in names:
        deviations[name] = spread
    return (
        f"components {', '.join(map(repr, names))} share one table but need different steps "
        f"(by up to {spread:.3g} in probability); untie them, or let them read a step counter"
    )
