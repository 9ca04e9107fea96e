"""A compound system: a DAG of components whose log-probability is the sum of the components' terms (E1)."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sysdpo_lab import errors
from sysdpo_lab.components.base import Batch, Component, batch_length, fresh_generator, repeat_rows
from sysdpo_lab.components.prompts import is_conversation

Trace = dict[str, Batch]


def topological_order(parents: Mapping[str, Sequence[str]], inputs: Sequence[str]) -> list[str]:
    """The components in an order in which parents come first; among those that are ready, the listed order.

    Raises:
        CycleError: naming the components of one cycle.

    >>> topological_order({"z": ("y", "x"), "y": ("x",)}, ["x"])
    ['y', 'z']
    """
    done, order, left = set(inputs), [], list(parents)
    while left:
        ready = next((name for name in left if all(parent in done for parent in parents[name])), None)
        if ready is None:
            raise errors.CycleError(
                f"the components {_cycle(parents, left)} feed one another in a circle; unroll the loop over time instead"
            )
        done.add(ready)
        order.append(ready)
        left.remove(ready)
    return order


def _cycle(parents: Mapping[str, Sequence[str]], left: Sequence[str]) -> str:
    path, name = [], left[0]
    while name not in path:
        path.append(name)
        name = next(parent for parent in parents[name] if parent in left)
    return " -> ".join(reversed([*path[path.index(name) :], name]))


class CompoundSystem(nn.Module):
    """A DAG of components with given inputs and one judged output.

    log p(s | x) = sum over components i of log p_i(y_i | Pa(y_i))          (E1; arXiv 2502.17721)

    Args:
        components: the nodes, in any order.
        inputs: names of the given variables x.
        output: the component whose value is judged.

    Raises:
        DuplicateComponentError, MissingParentError, UnknownComponentError, CycleError, UnreachableOutputError,
        CardinalityError: the graph is not valid; the message names the component.

    >>> from sysdpo_lab.components import Categorical
    >>> system = CompoundSystem(
    ...     [Categorical("z", {"x": 2, "y": 3}, 2), Categorical("y", {"x": 2}, 3)], inputs=("x",), output="z")
    >>> system.order
    ['y', 'z']
    >>> trace = system.generate({"x": torch.tensor([0, 1])})
    >>> round(system.log_prob(trace).exp()[0].item(), 6)  # 1/3 * 1/2
    0.166667
    """

    def __init__(self, components: Sequence[Component], inputs: Sequence[str] = ("x",), output: str = "z"):
        super().__init__()
        self.inputs = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        self.output = output
        components = list(components)
        self._by_name: dict[str, Component] = {}
        self._check_names(components)
        self.components = nn.ModuleList(components)
        self.order = topological_order({c.name: c.parents for c in components}, self.inputs)
        self._check_output()
        self._tie()
        self.cardinalities = self._check_cardinalities()
        self._frozen: dict[str, list[nn.Parameter]] = {}

    # -- validation ----------------------------------------------------------------------------------------------
    def _check_names(self, components: Sequence[Component]) -> None:
        if not components:
            raise errors.GraphError("a system needs at least one component, found none")
        if not self.inputs:
            raise errors.GraphError("a system needs at least one input, found none")
        if len(set(self.inputs)) != len(self.inputs):
            raise errors.DuplicateComponentError(f"an input is listed twice: {self.inputs}")
        for component in components:
            if not isinstance(component, Component):
                raise errors.GraphError(f"every node must be a Component, found {type(component).__name__}")
            if component.name in self._by_name:
                raise errors.DuplicateComponentError(f"two components are called {component.name!r}; names must differ")
            if component.name in self.inputs:
                raise errors.DuplicateComponentError(f"{component.name!r} is an input and a component; rename one of them")
            self._by_name[component.name] = component
        known = {*self.inputs, *self._by_name}
        for component in components:
            for parent in component.parents:
                if parent not in known:
                    raise errors.MissingParentError(
                        f"component {component.name!r} reads {parent!r}, which is neither an input {self.inputs} "
                        f"nor one of the components {tuple(self._by_name)}"
                    )

    def _check_output(self) -> None:
        if self.output not in self._by_name:
            raise errors.UnknownComponentError(
                f"the output {self.output!r} is not one of the components {tuple(self._by_name)}"
            )
        if not any(name in self.inputs for name in self.ancestors(self.output)):
            raise errors.UnreachableOutputError(
                f"no input of {self.inputs} reaches the output {self.output!r}; its ancestors are "
                f"{sorted(self.ancestors(self.output))}"
            )

    def _tie(self) -> None:
        """Resolve ties by name: the component at the end of a chain of ties owns the table."""
        for component in self.components:
            owner, seen = component, [component.name]
            while isinstance(getattr(owner, "tie", None), str) and owner.tie != owner.name:
                if owner.tie not in self._by_name:
                    raise errors.UnknownComponentError(
                        f"component {owner.name!r} is tied to {owner.tie!r}, which is not one of {tuple(self._by_name)}"
                    )
                owner = self._by_name[owner.tie]
                if owner.name in seen:
                    raise errors.CycleError(f"the ties {' -> '.join([*seen, owner.name])} form a circle; one must own the table")
                if not hasattr(owner, "logits"):
                    raise errors.GraphError(f"component {component.name!r} is tied to {owner.name!r}, which has no table")
                seen.append(owner.name)
            if owner is not component and component.logits is not owner.logits:
                component._adopt(owner)

    def _check_cardinalities(self) -> dict[str, int]:
        """Cardinality of every variable that a table fixes; named error when two tables disagree."""
        found = {c.name: c.cardinality for c in self.components if getattr(c, "cardinality", None)}
        said_by = {name: name for name in found}
        for component in self.components:
            for parent, number in getattr(component, "parent_cardinalities", {}).items():
                if found.setdefault(parent, number) != number:
                    raise errors.CardinalityError(
                        f"component {component.name!r} expects {number} values of {parent!r}, "
                        f"but {said_by[parent]!r} says {found[parent]}"
                    )
                said_by.setdefault(parent, component.name)
        return found

    # -- the graph -----------------------------------------------------------------------------------------------
    def __getitem__(self, name: str) -> Component:
        if name not in self._by_name:
            raise errors.UnknownComponentError(f"no component is called {name!r}; the components are {tuple(self.order)}")
        return self._by_name[name]

    def parents(self, name: str) -> tuple[str, ...]:
        """Names of the variables that a component reads."""
        return self[name].parents

    def ancestors(self, name: str) -> set[str]:
        """All variables that can influence `name`, inputs included."""
        found: set[str] = set()
        todo = list(self[name].parents)
        while todo:
            parent = todo.pop()
            if parent not in found:
                found.add(parent)
                todo += self._by_name[parent].parents if parent in self._by_name else ()
        return found

    @property
    def relevant(self) -> list[str]:
        """The components that can influence the output, itself included, in topological order."""
        ancestors = self.ancestors(self.output)
        return [name for name in self.order if name == self.output or name in ancestors]

    @property
    def hidden(self) -> list[str]:
        """The components that the judge does not see but that influence the output, in topological order."""
        return [name for name in self.relevant if name != self.output]

    def draw(self, ax=None):
        """The DAG as a matplotlib figure (needs the extra `figures`)."""
        from sysdpo_lab import figures

        return figures.draw_graph(self, ax=ax)

    # -- values --------------------------------------------------------------------------------------------------
    def _inputs(self, inputs: Mapping[str, Batch]) -> tuple[Trace, int]:
        unknown = [name for name in inputs if name not in self.inputs and name not in self._by_name]
        if unknown:
            raise errors.UnknownComponentError(f"{unknown[0]!r} is neither an input {self.inputs} nor a component")
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise errors.MissingParentError(f"no value of the input {missing[0]!r} was given; got {sorted(inputs)}")
        given = {name: inputs[name] for name in self.inputs}
        alone = next((name for name, value in given.items() if is_conversation(value)), None)
        if alone is not None:
            raise errors.BatchMismatchError(f"the input {alone!r} is one conversation, not a batch of them; write [messages]")
        lengths = {name: batch_length(value) for name, value in given.items()}
        if len(set(lengths.values())) > 1:
            raise errors.BatchMismatchError(f"the inputs have different numbers of rows: {lengths}")
        return given, next(iter(lengths.values()))

    def parent_values(self, name: str, trace: Mapping[str, Batch]) -> Trace:
        """The values of a component's parents; a named error when the trace lacks one."""
        missing = [parent for parent in self.parents(name) if parent not in trace]
        if missing:
            raise errors.MissingParentError(f"component {name!r} needs a value of {missing[0]!r}; got {sorted(trace)}")
        return {parent: trace[parent] for parent in self.parents(name)}

    def computed(self, name: str, trace: Mapping[str, Batch], rows: int) -> Batch:
        """The greedy value of a component for `rows` rows; one without parents has the same value in each."""
        value = self[name].greedy(self.parent_values(name, trace))
        return value if self.parents(name) or batch_length(value) == rows else repeat_rows(value, rows)

    def _run(self, inputs: Mapping[str, Batch], choose) -> Trace:
        trace, rows = self._inputs(inputs)
        for name in self.order:
            value = choose(self[name], self.parent_values(name, trace))
            if not self[name].parents and rows != batch_length(value):
                value = repeat_rows(value, rows)
            trace[name] = value
        return trace

    @torch.no_grad()
    def sample(self, inputs: Mapping[str, Batch], generator: torch.Generator | None = None) -> Trace:
        """One ancestral draw of every component, parents first; only `generator` is used, global state is untouched.

        Args:
            inputs: {input name: batch of B rows}.
            generator: source of all randomness; None draws a fresh one seeded from entropy.

        Returns:
            trace: {variable: batch of B rows}, inputs included.
        """
        generator = fresh_generator() if generator is None else generator

        def choose(component: Component, parents: Trace) -> Batch:
            if component.parents:
                return component.sample(parents, generator=generator)
            drawn = component.sample(parents, num_samples=max(rows, 2), generator=generator)
            return drawn[0][:rows]  # a root's rows are independent draws

        rows = self._inputs(inputs)[1]
        return self._run(inputs, choose)

    @torch.no_grad()
    def generate(self, inputs: Mapping[str, Batch]) -> Trace:
        """The greedy decode of every component, parents first (tables: the mode given the parents)."""
        return self._run(inputs, lambda component, parents: component.greedy(parents))

    # -- scores --------------------------------------------------------------------------------------------------
    def check_trace(self, trace: Mapping[str, Batch], names: Sequence[str] | None = None) -> int:
        """Number of rows of a trace; named errors for missing variables and unequal lengths."""
        wanted = [*self.inputs, *(self.order if names is None else names)]
        missing = [name for name in wanted if name not in trace]
        if missing:
            raise errors.MissingParentError(f"the trace has no value of {missing[0]!r}; it holds {sorted(trace)}")
        lengths = {name: batch_length(trace[name]) for name in wanted}
        if len(set(lengths.values())) > 1:
            raise errors.BatchMismatchError(f"the variables of the trace have different numbers of rows: {lengths}")
        return next(iter(lengths.values()))

    def log_prob_terms(
        self, trace: Mapping[str, Batch], noise: Mapping[str, Any] | None = None, names: Sequence[str] | None = None
    ) -> dict[str, Float[Tensor, " B"]]:
        """{component: log p_i(y_i | Pa(y_i))} in nats, summed over tokens, each (B,): the terms of E1.

        Args:
            trace: a value of every variable, B rows.
            noise: from `draw_noise`; needed when a component's log-probability is a bound.
            names: the components wanted; default all.

        Raises:
            NoiseRequiredError: a bound component got no noise.  NonFiniteError: a component returned NaN.
        """
        names = self.order if names is None else list(names)
        self.check_trace(trace, names)
        return {name: self._term(name, trace, noise or {}) for name in names}

    def _term(self, name: str, trace: Mapping[str, Batch], noise: Mapping[str, Any]) -> Float[Tensor, " B"]:
        component, parents = self[name], self.parent_values(name, trace)
        if component.kind == "bound":
            if name not in noise:
                raise errors.NoiseRequiredError(
                    f"component {name!r} scores by a bound: pass noise=system.draw_noise(trace, generator=g), "
                    "the same for policy, reference and both sides of a pair"
                )
            term = component.log_prob(trace[name], parents, noise=noise[name])
        else:
            term = component.log_prob(trace[name], parents)
        if bool(torch.isnan(term).any()):
            row = int(torch.isnan(term).nonzero()[0])
            raise errors.NonFiniteError(f"component {name!r}, row {row}: the log-probability is NaN")
        return term

    def log_prob(self, trace: Mapping[str, Batch], noise: Mapping[str, Any] | None = None) -> Float[Tensor, " B"]:
        """log p(s | x) = sum of the components' terms, nats: (B,)."""
        terms = list(self.log_prob_terms(trace, noise).values())
        return torch.stack(_same_dtype(terms)).sum(0)

    def draw_noise(self, trace: Mapping[str, Batch], generator: torch.Generator | None = None) -> dict[str, Any]:
        """Shared noise for the components whose log-probability is a bound; {} when there is none."""
        bound = [name for name in self.order if self[name].kind == "bound"]
        if not bound:
            return {}
        generator = fresh_generator() if generator is None else generator
        return {name: self[name].draw_noise(trace[name], generator=generator) for name in bound}

    @contextlib.contextmanager
    def reference(self) -> Iterator["CompoundSystem"]:
        """Inside the block every component is its frozen start; restored on exit, also on error."""
        with contextlib.ExitStack() as stack:
            for component in self.components:
                stack.enter_context(component.reference())
            yield self

    # -- what is trained -------------------------------------------------------------------------------------------
    def freeze(self, name: str) -> list[str]:
        """Stop training a component; returns the names of all that are frozen by it (shared parameters)."""
        own = {id(parameter) for parameter in self[name].trainable()}
        shared = [c.name for c in self.components if any(id(p) in own for p in c.trainable())]
        if [other for other in shared if other != name]:
            warnings.warn(
                f"{name!r} shares its parameters with {[n for n in shared if n != name]}: all of them are frozen",
                errors.TiedFreezeWarning,
                stacklevel=2,
            )
        for other in shared or [name]:
            if other not in self._frozen:
                self._frozen[other] = [p for p in self[other].trainable() if p.requires_grad]
        for other in shared:
            for parameter in self[other].trainable():
                parameter.requires_grad_(False)
        return shared or [name]

    def unfreeze(self, name: str) -> list[str]:
        """Train a component again; components with shared parameters come back together."""
        own = {id(parameter) for parameter in self[name].trainable()}
        shared = [c.name for c in self.components if any(id(p) in own for p in c.trainable())] or [name]
        for other in shared:
            for parameter in self._frozen.pop(other, []):
                parameter.requires_grad_(True)
        return shared

    def is_frozen(self, name: str) -> bool:
        """Whether nothing of the component is trained."""
        return not any(parameter.requires_grad for parameter in self[name].trainable())

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that training changes; tied ones once."""
        found: dict[int, nn.Parameter] = {}
        for name in self.order:
            for parameter in self[name].trainable():
                if parameter.requires_grad:
                    found.setdefault(id(parameter), parameter)
        return list(found.values())

    # -- files -----------------------------------------------------------------------------------------------------
    def save(self, folder: str | Path) -> Path:
        """Write graph, tables, adapters, card and versions into one folder (see `sysdpo_lab.saving`)."""
        from sysdpo_lab import saving

        return saving.save_system(self, folder)

    @classmethod
    def load(cls, folder: str | Path) -> "CompoundSystem":
        """Read a folder that `save` wrote."""
        from sysdpo_lab import saving

        return saving.load_system(folder)

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, output={self.output!r}, order={self.order}"


def _same_dtype(terms: list[Tensor]) -> list[Tensor]:
    """Terms in the widest dtype among them, on one device: a float64 table beside a float32 language model."""
    dtype = terms[0].dtype
    for term in terms[1:]:
        dtype = torch.promote_types(dtype, term.dtype)
    return [term.to(device=terms[0].device, dtype=dtype) for term in terms]
