"""Random discrete systems for Hypothesis, and an oracle that sums over all joint values with plain numpy indexing."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from sysdpo_lab import CompoundSystem, losses
from sysdpo_lab.components import Categorical, Tool
from sysdpo_lab.components.base import joint_codes

LARGEST_JOINT = 20_000


@dataclass
class Node:
    """One component: a table (policy, reference) or a function given by its table of values."""

    name: str
    parents: tuple[str, ...]
    cardinality: int
    policy: np.ndarray | None = None
    reference: np.ndarray | None = None
    function: np.ndarray | None = None
    tie: str | None = None


@dataclass
class Spec:
    """What a system is made of; `cardinality` covers inputs and nodes."""

    inputs: tuple[str, ...]
    nodes: list[Node]
    output: str
    cardinality: dict[str, int] = field(default_factory=dict)

    @property
    def variables(self) -> list[str]:
        return [*self.inputs, *(node.name for node in self.nodes)]


# --- building -------------------------------------------------------------------------------------------------------


def build(spec: Spec, shuffle: int | None = None) -> CompoundSystem:
    """The system; `shuffle` seeds the order in which the components are listed."""
    components = [_component(node, spec.cardinality) for node in spec.nodes]
    if shuffle is not None:
        components = [components[i] for i in np.random.default_rng(shuffle).permutation(len(components))]
    return CompoundSystem(components, inputs=spec.inputs, output=spec.output)


def _component(node: Node, cardinality: dict[str, int]):
    if node.function is not None:
        table = node.function
        return Tool(node.name, node.parents, lambda *values: int(table[values]), cardinality=node.cardinality)
    parents = {parent: cardinality[parent] for parent in node.parents}
    return Categorical(node.name, parents, node.cardinality, node.policy, node.reference, tie=node.tie)


# --- the oracle -----------------------------------------------------------------------------------------------------


def all_assignments(spec: Spec) -> np.ndarray:
    """(N, number of variables): every joint value of inputs and nodes."""
    sizes = [spec.cardinality[v] for v in spec.variables]
    return np.indices(sizes).reshape(len(sizes), -1).T


def node_probability(spec: Spec, node: Node, assignments: np.ndarray, reference: bool) -> np.ndarray:
    """(N,) p_i(y_i | parents), read from the node's table."""
    column = {name: assignments[:, i] for i, name in enumerate(spec.variables)}
    index = tuple(column[name] for name in (*node.parents, node.name))
    if node.function is not None:
        return (node.function[index[:-1]] == index[-1]).astype(float)
    return (node.reference if reference else node.policy)[index]


def joint(spec: Spec, reference: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Every assignment and its probability given the inputs, as the product over all nodes."""
    assignments = all_assignments(spec)
    product = np.ones(len(assignments))
    for node in spec.nodes:
        product = product * node_probability(spec, node, assignments, reference)
    return assignments, product


def marginal(spec: Spec, reference: bool = False) -> np.ndarray:
    """(X, Z) by adding up the joint, the first input slowest."""
    assignments, product = joint(spec, reference)
    sizes = [spec.cardinality[name] for name in spec.inputs]
    x = np.ravel_multi_index(tuple(assignments[:, i] for i in range(len(sizes))), sizes)
    z = assignments[:, spec.variables.index(spec.output)]
    result = np.zeros((math.prod(sizes), spec.cardinality[spec.output]))
    np.add.at(result, (x, z), product)
    return result


# --- drawing --------------------------------------------------------------------------------------------------------


def random_table(rng: np.random.Generator, shape: tuple[int, ...], zeros: float) -> np.ndarray:
    """Rows that sum to 1; each entry but one of a row is a structural zero with probability `zeros`."""
    weights = rng.exponential(size=shape) + 0.02
    keep = rng.random(shape) >= zeros
    first = rng.integers(shape[-1], size=shape[:-1])
    np.put_along_axis(keep, first[..., None], True, axis=-1)
    weights = weights * keep
    return weights / weights.sum(-1, keepdims=True)


@st.composite
def specs(draw, largest: int = 8, tools: bool = True, zeros: bool = True, output_is_table: bool = False) -> Spec:
    """DAGs of 1 to `largest` nodes with 1 or 2 inputs, cardinalities 1 to 4, structural zeros, ties and Tools."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    number = draw(st.integers(1, largest))
    inputs = ("x",) if draw(st.booleans()) else ("x", "w")
    cardinality = {name: int(rng.integers(1, 4)) for name in inputs}
    nodes: list[Node] = []
    for i in range(number):
        room = LARGEST_JOINT // math.prod(cardinality.values())
        size = min(int(rng.integers(1, 5)), max(room, 1))
        earlier = [*cardinality]
        parents = tuple(rng.permutation(earlier)[: int(rng.integers(0, min(4, len(earlier)) + 1))].tolist())
        nodes.append(Node(f"n{i}", parents, size))
        cardinality[f"n{i}"] = size
    unread = [name for name in inputs if not any(name in node.parents for node in nodes[1:])]
    nodes[0].parents = (*nodes[0].parents, *(name for name in unread if name not in nodes[0].parents))
    output = draw(st.sampled_from(nodes))
    _reach(output, nodes, inputs)
    share = draw(st.sampled_from([0.0, 0.3, 0.6])) if zeros else 0.0
    for i, node in enumerate(nodes):
        reads_input_alone = any(name in node.parents for name in inputs)  # a table must fix the input's cardinality
        can_be_tool = tools and node.parents and not reads_input_alone and not (output_is_table and node is output)
        _fill(node, nodes[:i], rng, cardinality, share, bool(can_be_tool) and rng.random() < 0.4)
    return Spec(inputs, nodes, output.name, cardinality)


def _reach(output: Node, nodes: list[Node], inputs: tuple[str, ...]) -> None:
    by_name, seen, todo = {node.name: node for node in nodes}, set(), [output.name]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += by_name[name].parents if name in by_name else ()
    if not seen & set(inputs):
        output.parents = (*output.parents, inputs[0])


def _fill(node: Node, earlier: list[Node], rng, cardinality: dict[str, int], zeros: float, tool: bool) -> None:
    shape = (*(cardinality[parent] for parent in node.parents), node.cardinality)
    if tool:
        node.function = rng.integers(node.cardinality, size=shape[:-1])
        return
    twins = [e for e in earlier if e.policy is not None and e.policy.shape == shape]
    if twins and rng.random() < 0.5:
        node.tie = twins[0].name
        node.policy, node.reference = twins[0].policy, twins[0].reference
        return
    node.policy, node.reference = random_table(rng, shape, zeros), random_table(rng, shape, zeros)


# --- small systems with a name --------------------------------------------------------------------------------------


def table(seed: int, *shape: int, zeros: float = 0.0) -> np.ndarray:
    return random_table(np.random.default_rng(seed), shape, zeros)


def chain(drafts: int = 3, outputs: int = 3, seed: int = 0, moved: bool = True, skip: bool = False) -> CompoundSystem:
    """x (2) -> y -> z, with x -> z when `skip`; the policy differs from the reference when `moved`."""
    above = {"x": 2, "y": drafts} if skip else {"y": drafts}
    shapes = {"y": (2, drafts), "z": (*above.values(), outputs)}
    reference = {name: table(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    policy = (
        {name: table(seed + 10 + i, *shape) for i, (name, shape) in enumerate(shapes.items())} if moved else reference
    )
    y = Categorical("y", {"x": 2}, drafts, policy["y"], reference["y"])
    z = Categorical("z", above, outputs, policy["z"], reference["z"])
    return CompoundSystem([z, y])


def collider(seed: int = 0, moved: bool = True) -> CompoundSystem:
    """x (2) -> y1 (2), x -> y2 (3), (y2, x, y1) -> z (3)."""
    shapes = {"y1": (2, 2), "y2": (2, 3), "z": (3, 2, 2, 3)}
    reference = {name: table(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    policy = (
        {name: table(seed + 10 + i, *shape) for i, (name, shape) in enumerate(shapes.items())} if moved else reference
    )
    return CompoundSystem(
        [
            Categorical("y1", {"x": 2}, 2, policy["y1"], reference["y1"]),
            Categorical("y2", {"x": 2}, 3, policy["y2"], reference["y2"]),
            Categorical("z", {"y2": 3, "x": 2, "y1": 2}, 3, policy["z"], reference["z"]),
        ]
    )


def long_chain(length: int = 50, values: int = 10, seed: int = 0) -> tuple[CompoundSystem, list[np.ndarray]]:
    """x -> v1 -> ... -> v_length and its transition matrices."""
    matrices = [table(seed + i, values, values) for i in range(length)]
    names = ["x", *(f"v{i}" for i in range(1, length + 1))]
    tables = [Categorical(names[i + 1], {names[i]: values}, values, matrices[i]) for i in range(length)]
    return CompoundSystem(tables, output=names[-1]), matrices


# --- sets of intermediates ---------------------------------------------------------------------------------------------


def mixture(system, found, x, z):
    """P_A(z|x) with the set's own weights, repeats dropped as the loss does: (B,)."""
    rows, k = found.log_probs.shape
    trace = {"x": x.repeat_interleave(k), **{n: v.reshape(-1) for n, v in found.values.items()}}
    trace["z"] = torch.full((rows * k,), z)
    with torch.no_grad():
        final = system.log_prob_terms(trace, names=["z"])["z"].reshape(rows, k)
    codes = joint_codes(list(found.values.values()), rows, k)
    weights = losses.repeat_log_weights(codes, "drop", found.log_weights)
    return losses.log_mixture(found.log_probs + final, weights).exp()


def within(found, expected, errors_allowed=5.0):
    """Mean of independent rows within so many standard errors."""
    error = found.std(0) / len(found) ** 0.5
    return bool(((found.mean(0) - expected).abs() <= errors_allowed * error + 1e-12).all())


# --- functions that a saved Tool can name ---------------------------------------------------------------------------


def larger(first: int, second: int) -> int:
    return max(first, second)


def upper(text: str) -> str:
    return text.upper()


class Shift:
    """Its bound method cannot be saved."""

    def __init__(self, by: int):
        self.by = by

    def shift(self, value: int) -> int:
        return value + self.by


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long)
