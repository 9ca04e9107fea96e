"""A deterministic component: a function of its parents."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.components.base import Batch, Component, batch_length, repeat_rows, same_value


def plain(value: Any) -> Any:
    """What the function sees: a table's value as int, a language model's completion as its text.

    >>> plain(torch.tensor(3)), plain("a")
    (3, 'a')
    """
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    return getattr(value, "text", value)


class Tool(Component):
    """y = function(parents), called once a row: log-probability 0 where y is what the function returns, else -inf (E1).

    Args:
        name: the variable's name.
        parents: names, in the order of the function's arguments.
        function: called with one value a parent (int for tables, str for language models, None for a module that was
            not called); must return the same value every time. Whole numbers come back as a LongTensor, the rest as a list.
        cardinality: number of values, for exact sums over tables; default: the largest returned value + 1.

    >>> vote = Tool("z", ["y1", "y2"], lambda y1, y2: y1 ^ y2)
    >>> vote.greedy({"y1": torch.tensor([0, 1]), "y2": torch.tensor([1, 1])})
    tensor([1, 0])
    """

    kind = "deterministic"

    def __init__(self, name: str, parents: Sequence[str], function: Callable, cardinality: int | None = None):
        super().__init__(name, parents)
        if not callable(function):
            raise errors.GraphError(f"component {name!r}: function must be callable, found {function!r}")
        if cardinality is not None and (isinstance(cardinality, bool) or not isinstance(cardinality, int) or cardinality < 1):
            raise errors.CardinalityError(
                f"component {name!r}: the cardinality must be None or a positive whole number, found {cardinality!r}"
            )
        self.function, self.cardinality = function, cardinality

    def _values(self, parent_values: Mapping[str, Batch]) -> list:
        rows = self.check_parents(parent_values)
        columns = [parent_values[parent] for parent in self.parents]
        return [self._value(row, [plain(column[row]) for column in columns]) for row in range(rows)]

    def _value(self, row: int, arguments: list) -> Any:
        try:
            return plain(self.function(*arguments))
        except Exception as error:
            error.add_note(f"raised by the function of component {self.name!r}, row {row}, called with {arguments!r}")
            raise

    def greedy(self, parent_values: Mapping[str, Batch]) -> Batch:
        values = self._values(parent_values)
        if values and all(isinstance(value, int) for value in values):
            return torch.tensor([int(value) for value in values])
        return values

    def sample(self, parent_values, num_samples: int = 1, generator=None) -> Batch:
        values = self.greedy(parent_values)
        if num_samples == 1:
            return values
        if isinstance(values, Tensor):
            return values[:, None].repeat(1, num_samples)
        return [[value] * num_samples for value in values]

    def log_prob(self, value: Batch, parent_values: Mapping[str, Batch]) -> Float[Tensor, " B"]:
        found = self._values(parent_values)
        if not self.parents:
            found = repeat_rows(found, batch_length(value))
        if batch_length(value) != len(found):
            raise errors.BatchMismatchError(
                f"component {self.name!r}: {batch_length(value)} values for {len(found)} rows of parents"
            )
        agrees = [same_value(plain(given), returned) for given, returned in zip(value, found)]
        zero = torch.zeros(len(agrees), dtype=torch.float64)
        return zero.masked_fill(~torch.tensor(agrees, dtype=torch.bool), -torch.inf)

    def perturbed_top_k(self, parent_values, log_probs, gumbels, k, generator):
        """A function adds nothing to a beam's score: the beams pass through, best first."""
        from sysdpo_lab.components.base import group_rows

        beams = log_probs.shape[1]
        order = gumbels.argsort(dim=1, descending=True, stable=True)[:, :k]
        values = self.greedy(parent_values)
        if not self.parents:
            values = repeat_rows(values, log_probs.numel())
        values = group_rows(values, beams)
        if isinstance(values, Tensor):
            values = values.gather(1, order)
        else:
            values = [[row[int(i)] for i in index] for row, index in zip(values, order)]
        return order, values, log_probs.gather(1, order), gumbels.gather(1, order)

    # -- files ------------------------------------------------------------------------------------------------------
    def config(self) -> dict:
        """The function by its importable name."""
        from sysdpo_lab import saving

        try:
            function = saving.function_path(self.function)
        except errors.SaveFormatError as error:
            raise errors.SaveFormatError(f"component {self.name!r}: {error}") from None
        return {
            "name": self.name,
            "parents": list(self.parents),
            "function": function,
            "cardinality": self.cardinality,
        }

    def save(self, folder) -> None:
        """Nothing beside the graph."""

    @classmethod
    def from_config(cls, config: dict, folder, shared: dict) -> "Tool":
        """Rebuild the component by importing its function."""
        from sysdpo_lab import saving

        return cls(config["name"], config["parents"], saving.function_at(config["function"]), config["cardinality"])
