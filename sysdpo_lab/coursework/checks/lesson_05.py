"""Lesson 05: P_A, posterior weights, the margin on finals, the drafter's gradient, effective numbers, repeats, bottlenecks."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from sysdpo_lab import losses
from sysdpo_lab.coursework.checks.core import Check, Mistake
from sysdpo_lab.coursework.checks.lesson_00 import draws, table

# --- p(z|x) from a few drafts -----------------------------------------------------------------------------------------


def log_p_set(log_p_draft: Float[Tensor, "B K"], log_p_final: Float[Tensor, "B K"]) -> Float[Tensor, " B"]:
    """log P_A(z|x) = log sum_a p(a|x) p(z|x,a) (E7), by the library."""
    return losses.log_mixture(log_p_draft + log_p_final, torch.zeros_like(log_p_draft))


def _sets() -> list[tuple]:
    """Sets of different sizes; the last one is of long texts, whose probabilities are 0 in floating point."""
    g = draws(50)
    cases = []
    for rows, k, nats in ((3, 2, 3.0), (2, 4, 3.0), (4, 3, 2000.0)):
        cases.append(tuple(-nats * torch.rand(rows, k, generator=g, dtype=torch.float64) - nats / 2 for _ in range(2)))
    return cases


check_log_p_set = Check(
    cases=_sets,
    right=log_p_set,
    mistakes=[
        Mistake(
            "underflow",
            lambda d, f: (d + f).exp().sum(-1).log(),
            "right for short texts, but a long text's probability is 0 in floating point: stay with logs (torch.logsumexp)",
        ),
        Mistake(
            "mean of logs",
            lambda d, f: (d + f).mean(-1),
            "a mean of log-probabilities; the drafts are alternatives, so their *probabilities* are added, then the log is taken",
        ),
        Mistake(
            "sum of logs",
            lambda d, f: (d + f).sum(-1),
            "the log-probabilities are added over drafts; that multiplies alternatives. Add probabilities, then take the log",
        ),
        Mistake(
            "draft's probability dropped",
            lambda d, f: torch.logsumexp(f, -1),
            "p(a|x) is missing: an unlikely draft must count less",
        ),
        Mistake(
            "final's probability dropped",
            lambda d, f: torch.logsumexp(d, -1),
            "p(z|x,a) is missing: this is the probability of the drafts alone",
        ),
        Mistake(
            "product of sums",
            lambda d, f: torch.logsumexp(d, -1) + torch.logsumexp(f, -1),
            "a product of two sums; each draft goes with its own final, so multiply first and sum once",
        ),
        Mistake(
            "mean instead of sum",
            lambda d, f: torch.logsumexp(d + f, -1) - math.log(d.shape[-1]),
            "this is a mean over the drafts: p(a|x) weighs them already",
        ),
        Mistake(
            "renormalised drafts",
            lambda d, f: torch.logsumexp(torch.log_softmax(d, -1) + f, -1),
            "the drafts' probabilities are made to sum to 1 within the set; P_A keeps p(a|x) as it is",
        ),
        Mistake(
            "best draft only",
            lambda d, f: (d + f).amax(-1),
            "only the best draft counts here; all of them are summed",
        ),
        Mistake(
            "summed over the batch",
            lambda d, f: torch.logsumexp(d + f, 0),
            "the sum goes over the pairs; it goes over the drafts, the last axis",
        ),
    ],
)


# --- who explains the answer -------------------------------------------------------------------------------------------


def posterior(log_p_draft: Float[Tensor, "B K"], log_p_final: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
    """w_a(z) = p(a|x) p(z|x,a) / P_A(z|x) (theory S3.1), by the library."""
    return losses.posterior_weights(log_p_draft + log_p_final, torch.zeros_like(log_p_draft))


check_posterior = Check(
    cases=_sets,
    right=posterior,
    mistakes=[
        Mistake(
            "prior",
            lambda d, f: torch.softmax(d, -1),
            "these are the drafts' own probabilities; how likely each makes *this* answer is missing (Bayes)",
        ),
        Mistake(
            "likelihood only",
            lambda d, f: torch.softmax(f, -1),
            "p(a|x) is missing: a draft that is hardly ever written explains little",
        ),
        Mistake(
            "not normalised",
            lambda d, f: (d + f).exp(),
            "these are p(a, z|x); divide by their sum over the set",
        ),
        Mistake(
            "log returned",
            lambda d, f: torch.log_softmax(d + f, -1),
            "these are logs of the weights; return the weights",
        ),
        Mistake(
            "normalised over the batch",
            lambda d, f: torch.softmax(d + f, 0),
            "the weights sum to 1 over the pairs; they must over the drafts of each pair",
        ),
        Mistake(
            "only the best draft",
            lambda d, f: torch.nn.functional.one_hot((d + f).argmax(-1), d.shape[-1]).double(),
            "all weight is on the most probable draft; the others have their share",
        ),
        Mistake(
            "softmax of the product of logs",
            lambda d, f: torch.softmax(d * f, -1),
            "log-probabilities are multiplied; probabilities are, so their logs are added",
        ),
        Mistake(
            "underflow",
            lambda d, f: (d + f).exp() / (d + f).exp().sum(-1, keepdim=True),
            "right for short texts, but for long ones it divides 0 by 0: a softmax of log-probabilities cannot",
        ),
    ],
)


# --- the margin ---------------------------------------------------------------------------------------------------------


def set_margin(
    policy_chosen: Float[Tensor, "B K"],
    policy_rejected: Float[Tensor, "B K"],
    reference_chosen: Float[Tensor, "B K"],
    reference_rejected: Float[Tensor, "B K"],
    beta: float,
) -> Float[Tensor, " B"]:
    """beta [log P_A/P_A,ref(z^w) - log P_A/P_A,ref(z^l)] from log p(a, z|x) of each draft (E7)."""
    pc, pr, rc, rr = (
        torch.logsumexp(j, -1) for j in (policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    )
    return beta * ((pc - rc) - (pr - rr))


def _four_sets() -> list[tuple]:
    g = draws(51)
    return [
        (*(-4 * torch.rand(rows, k, generator=g, dtype=torch.float64) for _ in range(4)), beta)
        for rows, k, beta in ((3, 2, 0.5), (2, 4, 2.0))
    ]


def _log_ratio(policy: Tensor, reference: Tensor) -> Float[Tensor, " B"]:
    """What a slip makes of one side: policy's posterior averages the log-ratios, so that KL(w || w_ref) is missing."""
    return (torch.softmax(policy, -1) * (policy - reference)).sum(-1)


def _margin(side, scale=lambda beta: beta):
    """A mistake in how one side's log-ratio is computed."""
    return lambda pc, pr, rc, rr, beta: scale(beta) * (side(pc, rc) - side(pr, rr))


def _summed(policy: Tensor, reference: Tensor) -> Float[Tensor, " B"]:
    return torch.logsumexp(policy, -1) - torch.logsumexp(reference, -1)


check_set_margin = Check(
    cases=_four_sets,
    right=set_margin,
    mistakes=[
        Mistake(
            "policy's weights in the reference",
            _margin(_log_ratio),
            "the policy's posterior weighs the reference too; the reference has its own sum over the same drafts",
        ),
        Mistake(
            "mean of log-ratios",
            _margin(lambda p, r: (p - r).mean(-1)),
            "a mean of the drafts' log-ratios; sum probabilities over the set first, then take the ratio",
        ),
        Mistake(
            "sum of log-ratios",
            _margin(lambda p, r: (p - r).sum(-1)),
            "the drafts' log-ratios are added; sum probabilities over the set first, then take the ratio",
        ),
        Mistake(
            "log of the summed ratios",
            _margin(lambda p, r: torch.logsumexp(p - r, -1)),
            "a sum of ratios is no ratio of sums: policy and reference are summed over the set, each by itself",
        ),
        Mistake(
            "reference forgotten",
            lambda pc, pr, rc, rr, beta: beta * (torch.logsumexp(pc, -1) - torch.logsumexp(pr, -1)),
            "the reference is missing: compare with the start",
        ),
        Mistake(
            "beta forgotten",
            _margin(_summed, lambda beta: 1.0),
            "this is the log-ratio gap; beta is missing",
        ),
        Mistake(
            "divided by beta",
            _margin(_summed, lambda beta: 1 / beta),
            "the gap is divided by beta; a larger beta must give a larger margin",
        ),
        Mistake(
            "chosen and rejected swapped",
            _margin(_summed, lambda beta: -beta),
            "the sign is flipped: the margin grows when the chosen answer becomes likelier",
        ),
        Mistake(
            "reference added",
            _margin(lambda p, r: torch.logsumexp(p, -1) + torch.logsumexp(r, -1)),
            "the reference's gap is added; subtract it",
        ),
        Mistake(
            "best draft only",
            _margin(lambda p, r: p.amax(-1) - r.amax(-1)),
            "only the best draft of each side counts; all of them are summed",
        ),
        Mistake(
            "loss returned",
            lambda *case: -logsigmoid(set_margin(*case)),
            "these are the losses; the margins are wanted",
        ),
    ],
)


# --- the drafter's gradient ------------------------------------------------------------------------------------------------


def drafter_gradient(
    posterior_chosen: Float[Tensor, " K"], posterior_rejected: Float[Tensor, " K"], margin: float, beta: float
) -> Float[Tensor, " K"]:
    """d loss / d logits of the drafts in A: -beta sigmoid(-m) (w(z^w) - w(z^l)) (theory S3.1)."""
    wrong = torch.sigmoid(-torch.as_tensor(margin, dtype=torch.float64))
    return -beta * wrong * (posterior_chosen - posterior_rejected)


def _posteriors() -> list[tuple]:
    g = draws(52)
    cases = [(k, m, beta) for k, m, beta in ((2, 0.7, 0.5), (4, -1.2, 2.0), (3, 0.0, 0.3))]
    return [(table(k, generator=g), table(k, generator=g), m, beta) for k, m, beta in cases]


def _pull(weight=lambda m: 1 / (1 + math.exp(m)), direction=lambda w, lose: w - lose, scale=lambda beta: beta):
    """A mistake in one factor of -beta sigmoid(-m) (w_chosen - w_rejected)."""
    return lambda w, lose, m, beta: -scale(beta) * weight(m) * direction(w, lose)


check_drafter_gradient = Check(
    cases=_posteriors,
    right=drafter_gradient,
    mistakes=[
        Mistake(
            "sign flipped",
            _pull(scale=lambda beta: -beta),
            "the sign is flipped: this is the direction in which to move; the gradient of a loss points uphill",
        ),
        Mistake(
            "sigmoid of the margin",
            _pull(weight=lambda m: 1 / (1 + math.exp(-m))),
            "pairs that are already right get the larger weight: the factor is the probability of choosing *wrongly*",
        ),
        Mistake(
            "beta forgotten",
            _pull(scale=lambda beta: 1.0),
            "beta is missing in front: the margin contains it, so the chain rule brings it out",
        ),
        Mistake(
            "beta twice",
            lambda w, lose, m, beta: _pull()(w, lose, beta * m, beta),
            "the margin contains beta already; do not multiply it in again inside the sigmoid",
        ),
        Mistake(
            "loser forgotten",
            _pull(direction=lambda w, lose: w),
            "the loser's posterior is missing: drafts that explain both answers equally well must not move",
        ),
        Mistake(
            "posteriors added",
            _pull(direction=lambda w, lose: w + lose),
            "the posteriors are added; the gap is winner minus loser",
        ),
        Mistake(
            "no weight",
            _pull(weight=lambda m: 1.0),
            "each pair pulls with the same force; the derivative of -log sigmoid depends on the margin",
        ),
        Mistake(
            "derivative of the sigmoid",
            _pull(weight=lambda m: 1 / (1 + math.exp(m)) / (1 + math.exp(-m))),
            "this is the gradient of the sigmoid; the log of it is differentiated",
        ),
        Mistake(
            "ratio of posteriors",
            _pull(direction=lambda w, lose: w / lose),
            "a ratio of posteriors; the gradient is their difference",
        ),
        Mistake(
            "logs of posteriors",
            _pull(direction=lambda w, lose: w.log() - lose.log()),
            "a difference of logs; the posteriors themselves are subtracted",
        ),
    ],
)


# --- how many drafts count -------------------------------------------------------------------------------------------------


def effective_number(weights: Float[Tensor, "B K"]) -> Float[Tensor, " B"]:
    """1 / sum of squared weights: K when all count alike, 1 when one draft explains everything.

    >>> effective_number(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])).tolist()
    [2.0, 1.0]
    """
    return 1 / weights.pow(2).sum(-1)


def _weights() -> list[tuple]:
    g = draws(53)
    with_zeros = torch.tensor([[0.7, 0.3, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    return [(table(3, 4, generator=g),), (with_zeros,)]


check_effective_number = Check(
    cases=_weights,
    right=effective_number,
    mistakes=[
        Mistake(
            "exponential of the entropy",
            lambda w: (-torch.special.xlogy(w, w).sum(-1)).exp(),
            "this is the exponential of the entropy, another effective number; here it is 1 over the sum of squares",
        ),
        Mistake(
            "entropy",
            lambda w: -torch.special.xlogy(w, w).sum(-1),
            "this is an entropy (nats); a number of drafts is wanted, 1 over the sum of squares",
        ),
        Mistake(
            "sum of squares",
            lambda w: w.pow(2).sum(-1),
            "one step is missing: the sum of squares is small when many drafts count",
        ),
        Mistake(
            "square of the sum",
            lambda w: 1 / w.sum(-1).pow(2),
            "the square of the sum is always 1; square each weight, then add",
        ),
        Mistake(
            "count of weights above zero",
            lambda w: (w > 0).sum(-1),
            "a count of the drafts that explain anything at all; one that explains next to nothing must count next to nothing",
        ),
        Mistake(
            "one over the largest weight",
            lambda w: 1 / w.amax(-1),
            "only the largest weight is used; all of them count",
        ),
        Mistake(
            "over the batch",
            lambda w: 1 / w.pow(2).sum(0),
            "the sum goes over the pairs; it goes over the drafts, the last axis",
        ),
    ],
)


# --- drafts that were drawn twice -------------------------------------------------------------------------------------------


def p_of_draws(drafts: Int[Tensor, " K"], p_draft: Float[Tensor, " Y"], p_final: Float[Tensor, " Y"]) -> float:
    """P_A(z) when A is the *set* of the drawn drafts: each distinct one once, weighed by p(a).

    Args:
        drafts: what was drawn, repeats possible.
        p_draft: p(y).
        p_final: p(z | y) of the answer in question.

    >>> p_of_draws(torch.tensor([1, 1]), torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.4]))
    0.20000000298023224
    """
    distinct = sorted(set(drafts.tolist()))
    return sum((p_draft[a] * p_final[a]).item() for a in distinct)


def _draws_with_repeats() -> list[tuple]:
    g = draws(54)
    cases = []
    for drawn in ([1, 1, 3], [0, 2, 2, 2, 0], [4, 4]):
        cases.append((torch.tensor(drawn), table(5, generator=g), torch.rand(5, generator=g, dtype=torch.float64)))
    return cases


check_p_of_draws = Check(
    cases=_draws_with_repeats,
    right=p_of_draws,
    mistakes=[
        Mistake(
            "repeats counted",
            lambda a, p, f: (p[a] * f[a]).sum(),
            "a draft that was drawn twice counts twice, although p(a) weighs it already: A is a set",
        ),
        Mistake(
            "mean over draws",
            lambda a, p, f: (p[a] * f[a]).mean(),
            "a mean over the draws; P_A is a sum over the distinct drafts, weighed by p(a)",
        ),
        Mistake(
            "plain Monte Carlo",
            lambda a, p, f: f[a].mean(),
            "this is the usual Monte-Carlo estimate of p(z), which has no p(a) in it; P_A sums p(a) p(z|a) over the set",
        ),
        Mistake(
            "p(a) dropped",
            lambda a, p, f: f[a.unique()].sum(),
            "p(a) is missing: each draft counts by its own probability",
        ),
        Mistake(
            "mean over distinct drafts",
            lambda a, p, f: (p[a.unique()] * f[a.unique()]).mean(),
            "a mean over the distinct drafts; P_A is their sum",
        ),
        Mistake(
            "renormalised",
            lambda a, p, f: (p[a.unique()] * f[a.unique()]).sum() / p[a.unique()].sum(),
            "divided by the set's own probability; P_A keeps p(a) as it is",
        ),
        Mistake(
            "all drafts",
            lambda a, p, f: (p * f).sum(),
            "this is the exact p(z), over drafts that were never drawn too",
        ),
    ],
)


# --- how many drafts a table needs -------------------------------------------------------------------------------------------


def drafts_needed(target: Float[Tensor, "X Z"]) -> tuple[int, int]:
    """(fewer than this never suffice, this many always do) for a chain x -> y -> z whose refiner does not see x.

    p(z|x) = sum_y p(y|x) p(z|y) is a product of two nonnegative matrices with |Y| in the middle: at least its rank, and at
    most the smaller side (theory S2.3).
    """
    return int(torch.linalg.matrix_rank(target)), min(target.shape)


def _targets() -> list[tuple]:
    g = draws(55)
    thin = table(4, 2, generator=g) @ table(2, 5, generator=g)
    nested = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]], dtype=torch.float64) / 2
    wide, tall = table(3, 5, generator=g), table(5, 2, generator=g)
    return [(thin,), (nested,), (wide,), (tall,), (table(1, 4, generator=g).expand(4, -1).clone(),)]


def _rank(target: Tensor) -> int:
    return int(torch.linalg.matrix_rank(target))


check_drafts_needed = Check(
    cases=_targets,
    right=drafts_needed,
    mistakes=[
        Mistake(
            "rank as both",
            lambda t: (_rank(t), _rank(t)),
            "the rank need not suffice: the two factors must be nonnegative (the nested squares have rank 3 and need 4)",
        ),
        Mistake(
            "larger side",
            lambda t: (_rank(t), max(t.shape)),
            "more than enough: a draft may copy the input, *or* the answer, whichever has fewer values",
        ),
        Mistake(
            "smaller side as both",
            lambda t: (min(t.shape), min(t.shape)),
            "fewer can suffice: rows that are mixtures of a few laws need only as many drafts",
        ),
        Mistake(
            "one is the least",
            lambda t: (1, min(t.shape)),
            "one draft makes all rows equal; a product with |Y| in the middle has at most rank |Y|",
        ),
        Mistake(
            "number of answers",
            lambda t: (_rank(t), t.shape[1]),
            "as many as answers is enough, but so is as many as inputs: take the smaller",
        ),
        Mistake(
            "the other way round",
            lambda t: (min(t.shape), _rank(t)),
            "the two numbers are in the wrong order: first what is needed at least, then what is always enough",
        ),
    ],
)
