"""Many systems of one graph as one system with an input more: they train side by side at the cost of one."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.components.categorical import Categorical
from sysdpo_lab.components.tool import Tool
from sysdpo_lab.system import CompoundSystem

MEMBER = "member"


def stack(systems: Sequence[CompoundSystem], name: str = MEMBER) -> CompoundSystem:
    """One system whose first input says which of `systems` it is; no two of them share a number.

    Adam treats every number by itself, so that training the stack on the sum of the losses trains each as if alone.
    X of the stack runs over (member, x), the member slowest.

    Args:
        systems: of one graph and one size; tables and Tools (those of the first are used).
        name: of the new input.

    Raises:
        GraphError: the graphs differ.

    >>> one, other = (CompoundSystem([Categorical("z", {"x": 1}, 2, [[p, 1 - p]])]) for p in (0.25, 0.5))
    >>> stack([one, other])["z"].probabilities()[:, 0, 0].round(decimals=6).tolist()
    [0.25, 0.5]
    """
    first = systems[0]
    shapes = [[(n, s.parents(n), getattr(s[n], "tie", None), s.cardinalities.get(n)) for n in s.order] for s in systems]
    for number, shape in enumerate(shapes):
        if shape != shapes[0] or systems[number].inputs != first.inputs:
            raise errors.GraphError(f"system {number} has another graph than system 0: stacked systems must look alike")
    parts = [_stacked(n, systems, name) for n in first.order]
    return CompoundSystem(parts, inputs=(name, *first.inputs), output=first.output)


def _stacked(component: str, systems: Sequence[CompoundSystem], name: str) -> Categorical | Tool:
    part = systems[0][component]
    if isinstance(part, Tool):
        return Tool(component, part.parents, part.function, part.cardinality)
    if not isinstance(part, Categorical):
        raise errors.UnsupportedSamplerError(f"component {component!r} ({type(part).__name__}) has no table to stack")
    parents = {name: len(systems), **part.parent_cardinalities}
    tables = [torch.stack([s[component].probabilities(flag).detach() for s in systems]) for flag in (False, True)]
    made = Categorical(component, parents, part.cardinality, *tables, tie=part.tie)
    with torch.no_grad():  # the logits themselves, not their normalised form: a stack and its members are the same bits
        made.logits.copy_(torch.stack([s[component].logits for s in systems]))
        made.reference_logits.copy_(torch.stack([s[component].reference_logits for s in systems]))
    made.logits.requires_grad_(part.logits.requires_grad)  # what is frozen stays frozen
    return made


def unstack(stacked: CompoundSystem, member: int, into: CompoundSystem) -> None:
    """Copy the tables of one member into a system of its own."""
    for name in into.order:
        if isinstance(into[name], Categorical):
            with torch.no_grad():
                into[name].logits.copy_(stacked[name].logits[member])


def by_member(values: Float[Tensor, "X ..."], members: int) -> Float[Tensor, "M X2 ..."]:
    """A result of the stack, split by member.

    >>> by_member(torch.arange(6.0), 2)
    tensor([[0., 1., 2.],
            [3., 4., 5.]])
    """
    return values.reshape(members, -1, *values.shape[1:])
