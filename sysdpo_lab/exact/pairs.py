"""Laws of comparisons: which pairs a judge sees, how often, and how often the first one wins; exactly or as a sample."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from sysdpo_lab import errors
from sysdpo_lab.alignment import check_preference
from sysdpo_lab.exact.joint import Joint


def all_pairs(inputs: int, outputs: int) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"], Int[Tensor, " P"]]:
    """Every comparison x, i < j as three index vectors.

    >>> all_pairs(1, 3)[1].tolist(), all_pairs(1, 3)[2].tolist()
    ([0, 0, 1], [1, 2, 2])
    """
    i, j = torch.triu_indices(outputs, outputs, offset=1)
    x = torch.arange(inputs).repeat_interleave(len(i))
    return x, i.repeat(inputs), j.repeat(inputs)


def expected_loss(margin: Float[Tensor, "..."], preference: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """p (-log sigmoid(m)) + (1 - p) (-log sigmoid(-m)): DPO's loss of a pair in expectation over the judge, nats.

    Args:
        margin: beta x log-ratio gap of the first over the second.
        preference: probability p that the judge prefers the first.

    >>> round(expected_loss(torch.zeros(1), torch.ones(1)).item(), 4)
    0.6931
    """
    return -logsigmoid(-margin) - preference * margin


def population_loss(margin: Float[Tensor, " P"], preference_logit: Float[Tensor, " P"]) -> Tensor:
    """`expected_loss` for a judge with logit L, mean over pairs.

    >>> round(population_loss(torch.zeros(1), torch.ones(1)).item(), 4)
    0.6931
    """
    return expected_loss(margin, torch.sigmoid(preference_logit)).mean()


def multinomial_counts(
    weights: Float[Tensor, "N C"], number: int, generator: torch.Generator
) -> Float[Tensor, "N C"]:
    """How often each cell comes up in `number` draws a row, by a binomial a cell: the cost does not grow with `number`.

    >>> multinomial_counts(torch.tensor([[1.0, 0.0, 3.0]]).double(), 1000, torch.Generator().manual_seed(0)).sum().item()
    1000.0
    """
    rest = weights.flip(1).cumsum(1).flip(1)
    share = torch.where(rest > 0, weights / torch.where(rest > 0, rest, 1.0), 0.0).clamp(0.0, 1.0)
    left, counts = torch.full((len(weights),), float(number), dtype=torch.float64), []
    for cell in range(weights.shape[1]):
        counts.append(torch.binomial(left, share[:, cell], generator=generator))
        left = left - counts[-1]
    return torch.stack(counts, 1)


@dataclass(frozen=True)
class PairLaw:
    """The pairs that a judge sees, as a distribution or as the counts of a sample.

    Attributes:
        first, second: (P,) what is compared: outputs (Sampling) or joint values (Direct).
        weight: (X, P) how often; all together sum to 1.
        preference: (X, P) how often the first one wins.
    """

    first: Int[Tensor, " P"]
    second: Int[Tensor, " P"]
    weight: Float[Tensor, "X P"]
    preference: Float[Tensor, "X P"]

    def losses(self, log_ratio: Float[Tensor, "X N"], beta: float) -> Float[Tensor, " X"]:
        """Each input's part of the expected DPO loss (nats); their sum is the loss.

        Args:
            log_ratio: log p / p_ref of everything that can be compared, nats.
            beta: > 0.
        """
        margin = beta * (log_ratio[:, self.first] - log_ratio[:, self.second])
        return (self.weight * expected_loss(margin, self.preference)).sum(1)

    @property
    def floor(self) -> float:
        """The smallest possible loss: the judge's own entropy, nats."""
        p = self.preference
        logit = torch.logit(p)
        certain = (p == 0) | (p == 1)
        entropy = torch.where(certain, 0.0, expected_loss(torch.where(certain, 0.0, logit), p))
        return (self.weight * entropy).sum().item()

    def sample(self, number: int, generator: torch.Generator, systems: int = 1) -> "PairLaw":
        """The empirical law of `number` independent judgements: what a finite data set shows.

        Args:
            number: how many, for each system.
            generator: the only source of randomness.
            systems: how many systems are stacked in this law; each gets a data set of its own.
        """
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise errors.UnknownOptionError(f"number must be a whole number >= 1, found {number!r}")
        cells = torch.stack([self.weight * self.preference, self.weight * (1 - self.preference)], -1)
        counts = multinomial_counts(cells.reshape(systems, -1), number, generator).reshape(cells.shape)
        seen = counts.sum(-1)
        return replace(self, weight=seen / number, preference=counts[..., 0] / torch.where(seen > 0, seen, 1.0))

    def repeated(self, copies: int) -> "PairLaw":
        """The same law for `copies` stacked systems; each copy's weights sum to 1."""
        return replace(self, weight=self.weight.repeat(copies, 1), preference=self.preference.repeat(copies, 1))


def final_pairs(
    preference_logits: Float[Tensor, "X Z Z"],
    law: str | Float[Tensor, "..."] = "uniform",
    p_reference: Float[Tensor, "X Z"] | None = None,
    input_law: Float[Tensor, " X"] | None = None,
) -> PairLaw:
    """Comparisons of finals, for SysDPO-Sampling and for DPO.

    Args:
        preference_logits: [x, i, j] = logit pref(i > j | x).
        law: "uniform" (every pair of different outputs equally often), "reference" (two independent draws from
            p_ref(.|x), given that they differ), a tensor (X, Z) in the place of p_ref, or a tensor (X, Z, Z) of weights a
            pair (its two orders are added): a comparison graph.
        p_reference: (X, Z); outputs that it makes impossible are never compared.
        input_law: (X,) p(x), default uniform.

    >>> judge = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]])
    >>> round(final_pairs(judge).floor, 4)
    0.5822
    """
    logits = check_preference(preference_logits)
    inputs, outputs = logits.shape[:2]
    support = torch.ones(inputs, outputs).bool() if p_reference is None else p_reference > 0
    if isinstance(law, str):
        errors.check_option("law", law, ("uniform", "reference"))
        if law == "reference" and p_reference is None:
            raise errors.UnknownOptionError("law='reference' needs p_reference")
        law = support.double() if law == "uniform" else p_reference
    return _pair_law(logits, torch.arange(outputs), torch.as_tensor(law), support, input_law)


def trace_pairs(
    grid: Joint,
    preference_logits: Float[Tensor, "X Z Z"],
    law: str | Float[Tensor, "..."] = "reference",
    input_law: Float[Tensor, " X"] | None = None,
) -> PairLaw:
    """Comparisons of whole traces with different outputs, for SysDPO-Direct.

    Args:
        grid: the joint values.
        preference_logits: [x, i, j] = logit pref(i > j | x) of outputs.
        law: nu: "reference" (two independent draws from p_ref(s|x), given that their outputs differ), "uniform" (uniform
            on the reference's support instead), a tensor (X, S) in the place of nu, or (X, S, S) weights a pair.
        input_law: (X,) p(x), default uniform.
    """
    logits = check_preference(preference_logits, grid.sizes[-1])
    if isinstance(law, str):
        errors.check_option("law", law, ("uniform", "reference"))
        law = grid.support.double() if law == "uniform" else grid.log_reference.exp()
    return _pair_law(logits, grid.answer, torch.as_tensor(law), grid.support, input_law)


def _pair_law(logits: Tensor, answer: Tensor, law: Tensor, support: Tensor, input_law: Tensor | None) -> PairLaw:
    """Pairs first < second with different answers that some input can compare, weighted and normalised for each input."""
    inputs, number = support.shape
    if tuple(law.shape) not in ((inputs, number), (inputs, number, number)):
        raise errors.CardinalityError(
            f"the law of pairs has shape {tuple(law.shape)}, expected {(inputs, number)} or {(inputs, number, number)}"
        )
    if not bool((torch.isfinite(law) & (law >= 0)).all()):
        raise errors.ValueRangeError("the law of pairs holds a negative number, an infinity or NaN")
    first, second = torch.triu_indices(number, number, offset=1)
    apart = answer[first] != answer[second]
    first, second = first[apart], second[apart]
    law = law.double()
    weight = law[:, first] * law[:, second] if law.dim() == 2 else law[:, first, second] + law[:, second, first]
    weight = torch.where(support[:, first] & support[:, second], weight, 0.0)
    total = weight.sum(1, keepdim=True)
    if bool((total == 0).all()):
        raise errors.NoMarginError("no pair of different outputs has a positive weight: there is nothing to compare")
    share = torch.full((inputs,), 1 / inputs).double() if input_law is None else input_law.double()
    weight = weight / torch.where(total > 0, total, 1.0) * share[:, None]
    used = (weight > 0).any(0)
    first, second = first[used], second[used]
    preference = torch.sigmoid(logits[:, answer[first], answer[second]])
    return PairLaw(first, second, weight[:, used], preference)
