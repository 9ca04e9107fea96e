"""A component with finitely many values: one probability table."""

import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sysdpo_lab import errors
from sysdpo_lab.components.base import Batch, Component, fresh_generator


def checked_table(name: str, table, shape: tuple[int, ...]) -> Float[Tensor, "..."]:
    """`table` as a float64 tensor of the given shape, or a named error that says what is wrong with it.

    >>> checked_table("y", [[0.25, 0.75]], (1, 2)).tolist()
    [[0.25, 0.75]]
    """
    if isinstance(table, Tensor):
        table = table.detach()
    try:
        table = torch.as_tensor(table, dtype=torch.float64).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise errors.TableError(f"component {name!r}: the table is no array of numbers of shape {shape}: {error}") from None
    if tuple(table.shape) != shape:
        raise errors.CardinalityError(
            f"component {name!r}: the table has shape {tuple(table.shape)}, its parents and cardinality ask for {shape}"
        )
    if not bool(torch.isfinite(table).all()):
        where = tuple((~torch.isfinite(table)).nonzero()[0].tolist())
        raise errors.NonFiniteError(f"component {name!r}: the table holds {table[where].item()} at {where}")
    if bool((table < 0).any()):
        where = tuple((table < 0).nonzero()[0].tolist())
        raise errors.TableError(f"component {name!r}: the table holds {table[where].item():.6g} < 0 at {where}")
    sums = table.sum(-1)
    wrong = (sums - 1).abs() > 1e-6
    if bool(wrong.any()):
        row = tuple(wrong.nonzero()[0].tolist())
        raise errors.TableError(f"component {name!r}: row {row} of the table sums to {sums[row].item():.6g}, not to 1")
    return table


class Categorical(Component):
    """p(y | parents) as a table: softmax of `logits` over the last axis, float64.

    Args:
        name: the variable's name.
        parents: {parent name: its cardinality}, in the order of the table's axes.
        cardinality: number of values of this variable.
        probabilities: the start, shape (*parents' cardinalities, cardinality), rows sum to 1 (to 1e-6, then renormalised);
            default uniform. A 0 is a structural zero: its logit is -inf and stays so.
        reference: the frozen start, same shape; default the given probabilities.
        tie: another Categorical, or the name of one in the same system, whose table (and reference) this one shares.

    Raises:
        CardinalityError, TableError, NonFiniteError: a table of another shape, not normalised, negative or not finite.

    >>> y = Categorical("y", parents={"x": 2}, cardinality=2, probabilities=[[0.5, 0.5], [0.1, 0.9]])
    >>> round(y.log_prob(torch.tensor([1]), {"x": torch.tensor([1])}).exp().item(), 6)
    0.9
    """

    kind = "exact"

    def __init__(
        self,
        name: str,
        parents: Mapping[str, int] | None = None,
        cardinality: int = 2,
        probabilities=None,
        reference=None,
        tie: "Categorical | str | None" = None,
    ):
        if parents is not None and not isinstance(parents, Mapping):
            raise errors.CardinalityError(
                f"component {name!r}: parents must map each name to its number of values, such as {{'x': 3}}; found {parents!r}"
            )
        parents = dict(parents or {})
        super().__init__(name, tuple(parents))
        for variable, number in {**parents, name: cardinality}.items():
            if isinstance(number, bool) or not isinstance(number, numbers.Integral) or number < 1:
                raise errors.CardinalityError(
                    f"component {name!r}: the cardinality of {variable!r} must be a positive whole number, found {number!r}"
                )
        self.parent_cardinalities = {parent: int(number) for parent, number in parents.items()}
        self.cardinality, self.tie = int(cardinality), None
        if isinstance(tie, Categorical):
            self._adopt(tie)
            return
        shape = (*parents.values(), cardinality)
        if probabilities is None:
            probabilities = torch.full(shape, 1.0 / cardinality, dtype=torch.float64)
        table = checked_table(name, probabilities, shape)
        start = table if reference is None else checked_table(name, reference, shape)
        self.logits = nn.Parameter(table.log())
        self.register_buffer("reference_logits", start.log())
        self.tie = tie

    def _adopt(self, other: "Categorical") -> None:
        """Share the table of `other`: one parameter, counted and trained once."""
        shape = (*self.parent_cardinalities.values(), self.cardinality)
        if tuple(other.logits.shape) != shape:
            raise errors.CardinalityError(
                f"component {self.name!r} is tied to {other.name!r}, whose table has shape {tuple(other.logits.shape)}; "
                f"its own shape is {shape}"
            )
        self.logits, self.tie = other.logits, other.name
        self.register_buffer("reference_logits", other.reference_logits)

    # -- tables -----------------------------------------------------------------------------------------------------
    def log_table(self, reference: bool | None = None) -> Float[Tensor, "..."]:
        """log p over all values, nats, shape (*parents, cardinality); differentiable for the policy."""
        reference = self.is_reference if reference is None else reference
        return torch.log_softmax(self.reference_logits if reference else self.logits, dim=-1)

    def probabilities(self, reference: bool | None = None) -> Float[Tensor, "..."]:
        """The table itself, rows sum to 1."""
        reference = self.is_reference if reference is None else reference
        return torch.softmax(self.reference_logits if reference else self.logits, dim=-1)

    def _index(self, variable: str, value: Batch, cardinality: int) -> Int[Tensor, " B"]:
        try:
            value = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise errors.ValueRangeError(
                f"component {self.name!r}: values of {variable!r} must be integers 0..{cardinality - 1}, found {value!r}"
            ) from None
        if value.dim() != 1:
            raise errors.BatchMismatchError(
                f"component {self.name!r}: values of {variable!r} have shape {tuple(value.shape)}, expected (B,)"
            )
        if value.dtype.is_floating_point or value.dtype == torch.bool:
            raise errors.ValueRangeError(
                f"component {self.name!r}: values of {variable!r} must be integers 0..{cardinality - 1}, found {value.dtype}"
            )
        outside = (value < 0) | (value >= cardinality)
        if bool(outside.any()):
            row = int(outside.nonzero()[0])
            raise errors.ValueRangeError(
                f"component {self.name!r}, row {row}: {variable} = {int(value[row])} lies outside 0..{cardinality - 1}"
            )
        return value.long().to(self.logits.device)

    def _rows(self, parent_values: Mapping[str, Batch]) -> Float[Tensor, "B V"]:
        """log p(. | parents) of each row."""
        self.check_parents(parent_values)
        index = [self._index(p, parent_values[p], n) for p, n in self.parent_cardinalities.items()]
        table = self.log_table()
        return table[tuple(index)] if index else table[None]

    # -- the component's interface ----------------------------------------------------------------------------------
    def log_prob(self, value: Batch, parent_values: Mapping[str, Batch]) -> Float[Tensor, " B"]:
        """log p(value | parents), nats; -inf at a structural zero."""
        rows = self._rows(parent_values)
        value = self._index(self.name, value, self.cardinality)
        if not self.parents:
            rows = rows.expand(value.shape[0], -1)
        if value.shape != rows.shape[:1]:
            raise errors.BatchMismatchError(
                f"component {self.name!r}: {tuple(value.shape)} values for {rows.shape[0]} rows of parents"
            )
        return rows.gather(1, value[:, None])[:, 0]

    @torch.no_grad()
    def sample(self, parent_values, num_samples: int = 1, generator=None) -> Int[Tensor, "..."]:
        generator = fresh_generator() if generator is None else generator
        rows = self._rows(parent_values).exp()
        drawn = torch.multinomial(rows, num_samples, replacement=True, generator=generator)
        return drawn[:, 0] if num_samples == 1 else drawn

    @torch.no_grad()
    def greedy(self, parent_values) -> Int[Tensor, " B"]:
        return self._rows(parent_values).argmax(-1)

    @torch.no_grad()
    def diverse(self, parent_values, k: int, **options) -> Int[Tensor, "B K"]:
        """The k most likely values, best first (ties: the smaller value); values beyond the table repeat the best."""
        order = self._rows(parent_values).argsort(dim=-1, descending=True, stable=True)
        possible = min(k, self.cardinality)
        return torch.cat([order[:, :possible], order[:, :1].expand(-1, k - possible)], dim=1)

    @torch.no_grad()
    def perturbed_top_k(self, parent_values, log_probs, gumbels, k, generator):
        from sysdpo_lab.samplers.gumbel import expand_perturbed  # here, since samplers import components

        generator = fresh_generator() if generator is None else generator
        batch, beams = log_probs.shape
        rows = self._rows(parent_values)
        children = log_probs[..., None] + rows.expand(batch * beams, -1).reshape(batch, beams, -1)
        return expand_perturbed(children, gumbels, k, generator)

    @contextmanager
    def reference(self) -> Iterator[None]:
        before = self.is_reference
        self._in_reference = True
        try:
            yield
        finally:
            self._in_reference = before

    # -- files ------------------------------------------------------------------------------------------------------
    def config(self) -> dict:
        """What `from_config` needs beside the table."""
        return {
            "name": self.name,
            "parents": dict(self.parent_cardinalities),
            "cardinality": self.cardinality,
            "tie": self.tie,
        }

    def save(self, folder) -> None:
        """Logits and reference as table.safetensors (a tied table is written by each that shares it)."""
        from sysdpo_lab import saving

        saving.save_tensors(folder / "table.safetensors", {"logits": self.logits, "reference": self.reference_logits})

    @classmethod
    def from_config(cls, config: dict, folder, shared: dict) -> "Categorical":
        """Rebuild the component; logits are restored to the bit."""
        from sysdpo_lab import saving

        tensors = saving.load_tensors(folder / "table.safetensors")
        component = cls(config["name"], config["parents"], config["cardinality"], tie=config["tie"])
        for name, target in (("logits", component.logits), ("reference", component.reference_logits)):
            if name not in tensors or tensors[name].shape != target.shape:
                raise errors.SaveFormatError(f"{folder / 'table.safetensors'}: {name!r} is missing or of another shape")
            with torch.no_grad():
                target.copy_(tensors[name])
        return component
