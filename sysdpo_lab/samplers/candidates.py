"""What every sampler returns: a set of k joint assignments of the hidden components for each row."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.components.base import Batch, flatten_rows, joint_codes, repeat_rows
from sysdpo_lab.losses import first_of_each


@dataclass
class Candidates:
    """The set A(x) of E7, one row an input.

    Attributes:
        values: {hidden component: (B, k), or B lists of k}; entry j of every component is joint assignment j.
        log_probs: (B, k) log p(a | x) under the policy that drew them, nats, summed over hidden components.
        log_weights: (B, k) for the sampling loss; 0 = plain, -inf = not part of the set.
        distinct: (B,) number of different joint assignments among those with a finite weight.
    """

    values: dict[str, Batch]
    log_probs: Float[Tensor, "B K"]
    log_weights: Float[Tensor, "B K"]
    distinct: Int[Tensor, " B"]


def check_size(k: int) -> int:
    """k as a positive whole number, or a named error."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise errors.UnknownOptionError(f"k must be a whole number >= 1, found {k!r}")
    return k


def hidden_log_prob(system, inputs: Mapping[str, Batch], values: Mapping[str, Batch], k: int) -> Float[Tensor, "B K"]:
    """log p(a | x) = sum over hidden components, nats: (B, k)."""
    rows = system._inputs(inputs)[1]
    if not system.hidden:
        return torch.zeros(rows, k, dtype=torch.float64)
    trace = {name: repeat_rows(inputs[name], k) for name in system.inputs}
    trace |= {name: flatten_rows(value) for name, value in values.items()}
    noise = {}
    with torch.no_grad():
        terms = system.log_prob_terms(trace, noise, names=system.hidden)
    return sum(term.double().cpu() for term in terms.values()).reshape(rows, k)


def candidates(system, inputs, values, k: int, log_probs=None, log_weights=None) -> Candidates:
    """Put the pieces together; `log_probs` are computed when they are not known yet."""
    rows = system._inputs(inputs)[1]
    if log_probs is None:
        log_probs = hidden_log_prob(system, inputs, values, k)
    if log_weights is None:
        log_weights = torch.zeros(rows, k, dtype=torch.float64)
    first = first_of_each([values[name] for name in system.hidden], rows, k) if values else torch.ones(rows, k).bool()
    distinct = (first & torch.isfinite(log_weights)).sum(-1)
    return Candidates(values, log_probs, log_weights, distinct)


def multiplicity(values: Mapping[str, Batch], rows: int, k: int) -> Int[Tensor, "B K"]:
    """How often each entry's joint value occurs in its row.

    >>> multiplicity({"y": torch.tensor([[1, 2, 1]])}, 1, 3)
    tensor([[2, 1, 2]])
    """
    codes = joint_codes(list(values.values()), rows, k)
    codes = codes + torch.arange(rows)[:, None] * (codes.max() + 1)  # one row's values are no repeats of another's
    _, inverse, counts = torch.unique(codes, return_inverse=True, return_counts=True)
    return counts[inverse]
