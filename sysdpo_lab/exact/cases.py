"""Case files: a discrete system with its judge in one JSON file (format discrete-compound-system/1)."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.components.categorical import Categorical
from sysdpo_lab.system import CompoundSystem

FORMAT = "discrete-compound-system/1"


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
