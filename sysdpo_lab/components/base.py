"""What every node of a compound system can do: draw a value, score a value, step back to its frozen start."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from sysdpo_lab import errors

Batch = Any  # LongTensor (B,), or a list of B strings, Completions, images or objects
KINDS = ("exact", "bound", "deterministic")


def batch_length(batch: Batch) -> int:
    """Number of rows of a batch.

    Raises:
        BatchMismatchError: a single value instead of a batch; a text would pass for a batch of letters.

    >>> batch_length(torch.tensor([3, 1, 2])), batch_length(["a", "b"])
    (3, 2)
    """
    if isinstance(batch, Tensor) and batch.dim():
        return int(batch.shape[0])
    if isinstance(batch, (str, bytes, Tensor, Mapping)) or not hasattr(batch, "__len__"):
        raise errors.BatchMismatchError(
            f"a batch of B rows is needed, found the single value {str(batch)[:60]!r}; for one row write [value]"
        )
    return len(batch)


def repeat_rows(batch: Batch, times: int) -> Batch:
    """Each row `times` times in a row: B rows become B * times.

    >>> repeat_rows(["a", "b"], 2)
    ['a', 'a', 'b', 'b']
    """
    if isinstance(batch, Tensor):
        return batch.repeat_interleave(times, dim=0)
    return [row for row in batch for _ in range(times)]


def take_rows(batch: Batch, rows: Sequence[int] | Tensor) -> Batch:
    """The rows with the given indices, in that order.

    >>> take_rows(torch.tensor([5, 6, 7]), [2, 0])
    tensor([7, 5])
    """
    if isinstance(batch, Tensor):
        return batch[torch.as_tensor(rows, device=batch.device)]
    return [batch[int(i)] for i in rows]


def flatten_rows(batch: Batch) -> Batch:
    """(B, k), or B lists of k, to B * k rows.

    >>> flatten_rows([["a", "b"], ["c", "d"]])
    ['a', 'b', 'c', 'd']
    """
    if isinstance(batch, Tensor):
        return batch.reshape(-1, *batch.shape[2:])
    return [value for row in batch for value in row]


def group_rows(batch: Batch, size: int) -> Batch:
    """B * size rows to (B, size), or B lists of `size`: the inverse of `flatten_rows`.

    >>> group_rows(["a", "b", "c", "d"], 2)
    [['a', 'b'], ['c', 'd']]
    """
    if isinstance(batch, Tensor):
        return batch.reshape(-1, size, *batch.shape[1:])
    return [list(batch[i : i + size]) for i in range(0, len(batch), size)]


def concatenate(first: Batch, second: Batch) -> Batch:
    """The rows of `first`, then those of `second`.

    >>> concatenate(torch.tensor([1]), torch.tensor([2]))
    tensor([1, 2])
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.cat([first, second])
    return [*first, *second]


def same_value(left: Any, right: Any) -> bool:
    """Whether two values of one variable are the same (language models: by token ids, see `Completion`).

    >>> same_value(2, torch.tensor(2)), same_value("a", "b")
    (True, False)
    """
    if hasattr(left, "shape") or hasattr(right, "shape"):  # tensors and arrays, also beside a plain number
        try:
            left, right = torch.as_tensor(left), torch.as_tensor(right)
        except (TypeError, ValueError, RuntimeError):
            return False
        return left.shape == right.shape and bool((left == right).all())
    return bool(left == right)


def joint_codes(columns: Sequence[Batch], rows: int, size: int) -> Int[Tensor, "B K"]:
    """Whole numbers that are equal within a row exactly where the joint values of all columns are.

    Args:
        columns: each (B, k), or B lists of k.

    >>> joint_codes([torch.tensor([[4, 4, 7]]), [["a", "b", "a"]]], 1, 3)
    tensor([[0, 1, 2]])
    """
    codes = torch.zeros(rows, size, dtype=torch.long)
    for column in columns:
        own = _tensor_codes(column, rows, size) if isinstance(column, Tensor) else _list_codes(column, rows, size)
        codes = torch.unique(codes * (int(own.max()) + 1 if own.numel() else 1) + own, return_inverse=True)[1]
    return codes


def _tensor_codes(column: Tensor, rows: int, size: int) -> Int[Tensor, "B K"]:
    flat = column.detach().reshape(rows * size, -1).cpu()
    if flat.shape[1] == 1:
        return torch.unique(flat[:, 0], return_inverse=True)[1].reshape(rows, size)
    return torch.unique(flat, dim=0, return_inverse=True)[1].reshape(rows, size)


def _list_codes(column: Sequence[Sequence[Any]], rows: int, size: int) -> Int[Tensor, "B K"]:
    codes = torch.zeros(rows, size, dtype=torch.long)
    for row, values in enumerate(column):
        quick = {} if all(isinstance(v, Hashable) and not hasattr(v, "shape") for v in values) else None
        for k, value in enumerate(values):
            if quick is not None:
                codes[row, k] = quick.setdefault(value, k)
            else:
                codes[row, k] = next(j for j in range(k + 1) if j == k or same_value(values[j], value))
    return codes


def fresh_generator() -> torch.Generator:
    """A generator seeded from the operating system's entropy; the global generator stays untouched."""
    import secrets

    return torch.Generator().manual_seed(secrets.randbits(63))


class Component(nn.Module):
    """One node of the DAG: p_i(y_i | Pa(y_i)), one factor of E1.

    A subclass sets `kind` and fills in `sample`, `log_prob` and `reference`:

    * "exact": `log_prob` is the log-probability itself, in nats, summed over tokens;
    * "bound": `log_prob` is a bound that is comparable only under the same noise (diffusion);
    * "deterministic": a function of the parents; log-probability 0 where the value is the function's, else -inf.

    Args:
        name: the variable's name; unique in a system.
        parents: names of the variables that it reads, in the order of the template or the table's axes.

    Raises:
        GraphError: the name is no non-empty string, or a parent is listed twice.
    """

    kind = "exact"

    def __init__(self, name: str, parents: Sequence[str]):
        super().__init__()
        if not isinstance(name, str) or not name:
            raise errors.GraphError(f"a component's name must be a non-empty string, found {name!r}")
        parents = (parents,) if isinstance(parents, str) else tuple(parents)
        if len(set(parents)) != len(parents):
            raise errors.GraphError(f"component {name!r} lists a parent twice: {parents}")
        self.name, self.parents = name, parents

    # -- what a subclass provides -----------------------------------------------------------------------------------
    def sample(self, parent_values: Mapping[str, Batch], num_samples: int = 1, generator=None) -> Batch:
        """Draw from p(. | parents): (B,), or with num_samples = k > 1 (B, k) / B lists of k."""
        raise NotImplementedError

    def greedy(self, parent_values: Mapping[str, Batch]) -> Batch:
        """The mode (tables), or the greedy decode (language models): (B,)."""
        raise NotImplementedError

    def log_prob(self, value: Batch, parent_values: Mapping[str, Batch]) -> Tensor:
        """log p(value | parents) in nats, summed over tokens: (B,)."""
        raise NotImplementedError

    def draw_noise(self, value: Batch, generator: torch.Generator | None = None) -> Any:
        """Kind "bound" only: what `log_prob(value, parent_values, noise=...)` needs, row by row."""
        raise NotImplementedError

    def repeat_noise(self, noise: Any) -> Any:
        """Kind "bound" only: the noise of B rows for 2 B rows, B winners and then B losers, so that a pair shares it."""
        raise NotImplementedError

    def identities(self, value: Batch) -> Batch:
        """What is equal for two rows exactly where their values are the same: (B,) / B hashable values.

        The values themselves; a language model's are what it scores, so that a text and its completion are one.
        """
        return value

    def diverse(self, parent_values: Mapping[str, Batch], k: int, **options) -> Batch:
        """k different, likely values a row, best first: (B, k) / B lists of k (tables: top-k; language models: DBS)."""
        raise errors.UnsupportedSamplerError(f"component {self.name!r} ({type(self).__name__}) has no diverse search")

    def perturbed_top_k(
        self, parent_values: Mapping[str, Batch], log_probs: Tensor, gumbels: Tensor, k: int, generator
    ) -> tuple[Tensor, Batch, Tensor, Tensor]:
        """One node of stochastic beam search: m beams a row in, the k best by perturbed log-probability out.

        Args:
            parent_values: B * m rows, the m beams of a row next to each other.
            log_probs: (B, m) log-probability of each beam so far, nats.
            gumbels: (B, m) perturbed log-probability of each beam so far.

        Returns:
            parent beam (B, k), values (B, k), log_probs (B, k), gumbels (B, k); missing entries are -inf.
        """
        raise errors.UnsupportedSamplerError(f"component {self.name!r} ({type(self).__name__}) has no perturbed search")

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside the block the component is its frozen start; left again also when an error is raised."""
        yield

    # -- shared -----------------------------------------------------------------------------------------------------
    @property
    def is_reference(self) -> bool:
        """Whether the component is inside a `reference()` block."""
        return getattr(self, "_in_reference", False)

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that this component owns and that training may change."""
        return list(self.parameters())

    def check_parents(self, parent_values: Mapping[str, Batch]) -> int:
        """Number of rows of the parents' values; named errors when one is missing or the lengths differ."""
        missing = [parent for parent in self.parents if parent not in parent_values]
        if missing:
            raise errors.MissingParentError(
                f"component {self.name!r} needs a value of {missing[0]!r}; got values of {sorted(parent_values)}"
            )
        lengths = {parent: batch_length(parent_values[parent]) for parent in self.parents}
        if len(set(lengths.values())) > 1:
            raise errors.BatchMismatchError(f"component {self.name!r}: parents have different numbers of rows: {lengths}")
        return next(iter(lengths.values()), 1)

    def extra_repr(self) -> str:
        return f"{self.name!r}, parents={self.parents}, kind={self.kind!r}"
