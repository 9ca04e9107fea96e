"""Exact discrete systems: marginals by variable elimination, the closed-form optimum, and the case files."""

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import opt_einsum
import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.components.categorical import Categorical
from sysdpo_lab.components.tool import Tool
from sysdpo_lab.system import CompoundSystem

FORMAT = "discrete-compound-system/1"


# --- tables of any discrete component -------------------------------------------------------------------------------------


def cardinality(system: CompoundSystem, name: str) -> int:
    """Number of values of a variable of a discrete system.

    Raises:
        CardinalityError: nothing in the graph says how many values it has.
    """
    known = [name] if name in system.inputs else [n for n in system.order if n == name or n in system.ancestors(name)]
    return _size(_sizes(system, known), name)


def _sizes(system: CompoundSystem, names: Iterable[str]) -> dict[str, int]:
    """Cardinalities as far as they are known; `names` in topological order, so that each Tool is called once."""
    sizes = dict(system.cardinalities)
    for name in names:
        if name not in sizes and name in system.order and isinstance(system[name], Tool):
            sizes[name] = max(_tool_values(system[name], sizes).values()) + 1
    return sizes


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
    sizes = _sizes(system, system.order[: system.order.index(name) + 1]) if sizes is None else sizes
    shape = [_size(sizes, variable) for variable in (*component.parents, name)]
    table = torch.zeros(shape, dtype=torch.float64)
    for parents, value in _tool_values(component, sizes).items():
        if value >= shape[-1]:
            raise errors.ValueRangeError(f"component {name!r} returns {value} for {parents}, outside 0..{shape[-1] - 1}")
        table[(*parents, value)] = 1.0
    return table


# --- marginals ------------------------------------------------------------------------------------------------------------


def marginal(system: CompoundSystem, reference: bool = False) -> Float[Tensor, "X Z"]:
    """p(z | x) = sum over hidden values of prod_i p_i, by variable elimination (E1); differentiable, float64.

    The contraction order comes from opt_einsum, so the cost grows with the graph's width, not with the number of variables.

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
    names = [*system.inputs, *system.relevant]
    axis = {name: number for number, name in enumerate(names)}
    operands: list[Any] = []
    sizes = _sizes(system, system.relevant)
    for name in system.relevant:
        operands += [probability_table(system, name, reference, sizes), [axis[v] for v in (*system.parents(name), name)]]
    used = {variable for name in system.relevant for variable in system.parents(name)}
    for name in system.inputs:  # an input that nothing reads still has its axis in the result
        if name not in used:
            operands += [torch.ones(_size(sizes, name), dtype=torch.float64), [axis[name]]]
    result = opt_einsum.contract(*operands, [axis[n] for n in (*system.inputs, system.output)], optimize="auto")
    return result.reshape(-1, result.shape[-1])


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


# --- case files -----------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A discrete system with its judge: `system`, `beta`, `reward` (X, Z) float64, and the file's other keys in `extra`."""

    system: CompoundSystem
    beta: float
    reward: Float[Tensor, "X Z"]
    name: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def preference_logits(self) -> Float[Tensor, "X Z Z"]:
        """[x, i, j] = logit pref(i > j | x) = r(x, i) - r(x, j) (E2)."""
        return self.reward[:, :, None] - self.reward[:, None, :]


def load_case(path: str | Path) -> Case:
    """Read a discrete-compound-system/1 file: needs format, input, components, terminal, beta, reward; the rest is optional.

    The optional key "tied", e.g. [["y1", "y2"]], makes components share one table (that of the first name).

    Raises:
        CaseFormatError: the file is missing, is no JSON, or lacks a key; the message names file and key.
        Errors of Categorical and CompoundSystem for faulty tables and graphs.
    """
    path = Path(path)
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise errors.CaseFormatError(f"{path}: there is no such file, or it cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise errors.CaseFormatError(f"{path}: not a JSON file: {error}") from None
    return case_from_spec(spec, str(path))


def case_from_spec(spec: dict[str, Any], source: str = "case") -> Case:
    """A case from the parsed content of a file; `source` names it in errors."""
    if not isinstance(spec, dict) or spec.get("format") != FORMAT:
        found = spec.get("format") if isinstance(spec, dict) else type(spec).__name__
        raise errors.CaseFormatError(f"{source}: format is {found!r}, expected {FORMAT!r}")
    for key in ("input", "components", "terminal", "beta", "reward"):
        if key not in spec:
            raise errors.CaseFormatError(f"{source}: the key {key!r} is missing")
    try:
        system, reward = _system(spec, source), _reward(spec, source)
        beta = errors.check_beta(spec["beta"])
    except errors.SysDPOError as error:
        message = str(error) if str(error).startswith(source) else f"{source}: {error}"
        raise type(error)(message) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.CaseFormatError(f"{source}: a key is missing or a value has the wrong type: {error!r}") from error
    known = {"format", "input", "components", "terminal", "beta", "reward", "name"}
    extra = {key: value for key, value in spec.items() if key not in known}
    return Case(system, beta, reward, spec.get("name", ""), extra)


def _reward(spec: dict, source: str) -> Float[Tensor, "X Z"]:
    block = spec["reward"] if isinstance(spec["reward"], dict) else {"table": spec["reward"]}
    x, z = spec["input"]["name"], spec["terminal"]
    if list(block.get("axes", [x, z])) != [x, z]:
        raise errors.CaseFormatError(f"{source}: the reward's axes are {block['axes']}, expected {[x, z]}")
    try:
        reward = torch.tensor(block["table"], dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise errors.CaseFormatError(f"{source}: the reward is no rectangular table of numbers: {error}") from None
    expected = (spec["input"]["card"], next(c["card"] for c in spec["components"] if c["name"] == z))
    if tuple(reward.shape) != expected:
        raise errors.CaseFormatError(f"{source}: reward has shape {tuple(reward.shape)}, expected {expected}")
    if not bool(torch.isfinite(reward).all()):
        raise errors.NonFiniteError(f"{source}: the reward holds NaN or an infinity")
    return reward


def _system(spec: dict, source: str) -> CompoundSystem:
    for number, component in enumerate(spec["components"]):
        for key in ("name", "parents", "card"):
            if key not in component:
                raise errors.CaseFormatError(f"{source}: component {component.get('name', number)!r} lacks the key {key!r}")
    for key in ("name", "card"):
        if key not in spec["input"]:
            raise errors.CaseFormatError(f"{source}: the input lacks the key {key!r}")
    names = [spec["input"]["name"], *(component["name"] for component in spec["components"])]
    for name in names:
        if names.count(name) > 1:
            raise errors.DuplicateComponentError(f"{source}: {name!r} is the name of two variables")
    cards = {spec["input"]["name"]: spec["input"]["card"], **{c["name"]: c["card"] for c in spec["components"]}}
    tables = _tables(spec, cards, source)
    return CompoundSystem(tables, inputs=(spec["input"]["name"],), output=spec["terminal"])


def _owners(spec: dict, source: str) -> dict[str, str]:
    """{component: the one whose table it shares}, from the key "tied"."""
    by_name = {component["name"]: component for component in spec["components"]}
    owner = {}
    for group in spec.get("tied", []):
        for name in group:
            if name not in by_name:
                raise errors.UnknownComponentError(f"{source}: 'tied' names {name!r}; the components are {list(by_name)}")
            for kind in ("policy", "reference"):
                own, first = by_name[name].get(kind), by_name[group[0]].get(kind)
                if own is not None and own != first:
                    raise errors.CaseFormatError(f"{source}: {name!r} is tied to {group[0]!r}, but its {kind} differs")
        owner |= {name: group[0] for name in group[1:]}
    return owner


def _tables(spec: dict, cards: dict[str, int], source: str) -> list[Categorical]:
    owner = _owners(spec, source)
    built = []
    for component in spec["components"]:
        unknown = [parent for parent in component["parents"] if parent not in cards]
        if unknown:
            raise errors.MissingParentError(
                f"{source}: component {component['name']!r} reads {unknown[0]!r}, which the file does not define"
            )
        axes = [*component["parents"], component["name"]]
        if list(component.get("axes", axes)) != axes:
            raise errors.CaseFormatError(f"{source}: the axes of {component['name']!r} are {component['axes']}, expected {axes}")
        policy = component.get("policy", component.get("reference"))
        if policy is None:
            raise errors.CaseFormatError(f"{source}: component {component['name']!r} has neither 'policy' nor 'reference'")
        parents = {parent: cards[parent] for parent in component["parents"]}
        tie = owner.get(component["name"])
        reference = component.get("reference")
        built.append(Categorical(component["name"], parents, component["card"], policy, reference, tie=tie))
    return built
