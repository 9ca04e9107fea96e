"""Lesson 02: odds of a beta-perfect system, the gap, the beta-perfect system, the fitted beta, circles."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import alignment
from sysdpo_lab.coursework.checks.core import Check, Mistake
from sysdpo_lab.coursework.checks.lesson_00 import draws, table


def differences(values: Float[Tensor, "X Z"]) -> Float[Tensor, "X Z Z"]:
    """[x, i, j] = values[x, i] - values[x, j].

    >>> differences(torch.tensor([[1.0, 3.0]])).tolist()
    [[[0.0, -2.0], [2.0, 0.0]]]
    """
    return values[:, :, None] - values[:, None, :]


def rewards(inputs: int, answers: int, generator: torch.Generator) -> Float[Tensor, "X Z"]:
    """Random rewards, N(0, 1)."""
    return torch.randn(inputs, answers, generator=generator, dtype=torch.float64)


def any_judge(inputs: int, answers: int, generator: torch.Generator) -> Float[Tensor, "X Z Z"]:
    """Random antisymmetric logits: a reward and circles."""
    logits = torch.randn(inputs, answers, answers, generator=generator, dtype=torch.float64)
    return logits - logits.transpose(1, 2)


# --- odds -------------------------------------------------------------------------------------------------------------


def perfect_odds(pref: float, beta: float) -> float:
    """Odds p(z1) : p(z2) of a beta-perfect system: (pref / (1 - pref))^(1 / beta) (E3).

    >>> round(perfect_odds(0.8, 0.5), 6)
    16.0
    """
    return math.exp((math.log(pref) - math.log1p(-pref)) / beta)


check_perfect_odds = Check(
    cases=lambda: [(0.8, 0.5), (0.8, 2.0), (0.3, 0.7), (0.95, 1.5)],
    right=perfect_odds,
    mistakes=[
        Mistake(
            "beta upside down",
            lambda pref, beta: (pref / (1 - pref)) ** beta,
            "beta works the wrong way round: for a given judge a *larger* beta makes the odds smaller",
        ),
        Mistake(
            "beta forgotten",
            lambda pref, beta: pref / (1 - pref),
            "these are the judge's odds; beta is missing",
        ),
        Mistake(
            "odds divided by beta",
            lambda pref, beta: pref / (1 - pref) / beta,
            "the odds are divided by beta; it is their *logarithm* that beta multiplies in the definition",
        ),
        Mistake(
            "log not undone",
            lambda pref, beta: math.log(pref / (1 - pref)) / beta,
            "these are log-odds (nats); undo the logarithm",
        ),
        Mistake(
            "preference instead of odds",
            lambda pref, beta: pref ** (1 / beta),
            "a preference is no odds: 0.8 means 0.8 to 0.2",
        ),
        Mistake(
            "probability instead of odds",
            lambda pref, beta: (lambda odds: odds / (1 + odds))((pref / (1 - pref)) ** (1 / beta)),
            "this is p(z1) of two answers; the odds p(z1) / p(z2) are wanted",
        ),
        Mistake(
            "answers swapped",
            lambda pref, beta: ((1 - pref) / pref) ** (1 / beta),
            "these are the odds of z2 against z1; the judge's favourite must be the likelier one",
        ),
    ],
)


# --- the gap ----------------------------------------------------------------------------------------------------------


def largest_gap(p: Float[Tensor, "X Z"], judge: Float[Tensor, "X Z Z"], beta: float) -> float:
    """max over x, i, j of |L - beta log p_i/p_j| (E3), by the library."""
    return alignment.gap(p, judge, beta)


def _systems_and_judges() -> list[tuple]:
    g = draws(20)
    sizes = ((1, 3, 0.5), (2, 4, 2.0), (3, 3, 0.3), (1, 6, 1.5))
    return [(table(x, z, generator=g), any_judge(x, z, g), beta) for x, z, beta in sizes]


def _rest(p: Tensor, judge: Tensor, beta: float) -> Tensor:
    return judge - beta * differences(p.log())


check_largest_gap = Check(
    cases=_systems_and_judges,
    right=largest_gap,
    mistakes=[
        Mistake(
            "mean instead of largest",
            lambda p, judge, beta: _rest(p, judge, beta).abs().mean(),
            "a mean over the pairs; the gap is the *largest* disagreement",
        ),
        Mistake(
            "sum instead of largest",
            lambda p, judge, beta: _rest(p, judge, beta).abs().sum(),
            "the disagreements are added up; the gap is the largest one",
        ),
        Mistake(
            "beta forgotten",
            lambda p, judge, beta: _rest(p, judge, 1.0).abs().max(),
            "beta is missing: it multiplies the system's log-odds",
        ),
        Mistake(
            "beta on the judge",
            lambda p, judge, beta: (beta * judge - differences(p.log())).abs().max(),
            "beta multiplies the judge here; it belongs to the system's log-odds",
        ),
        Mistake(
            "divided by beta",
            lambda p, judge, beta: _rest(p, judge, 1 / beta).abs().max(),
            "the log-odds are divided by beta; the definition multiplies",
        ),
        Mistake(
            "probabilities instead of logs",
            lambda p, judge, beta: (judge - beta * differences(p)).abs().max(),
            "differences of probabilities; odds are compared through logs",
        ),
        Mistake(
            "i and j swapped",
            lambda p, judge, beta: _rest(p, -judge, beta).abs().max(),
            "i and j are swapped in one of the two: judge[x, i, j] goes with log p_i - log p_j",
        ),
        Mistake(
            "judge in probabilities",
            lambda p, judge, beta: (torch.sigmoid(judge) - torch.sigmoid(beta * differences(p.log()))).abs().max(),
            "this is the gap in probabilities; compare the logits (nats)",
        ),
        Mistake(
            "one number for each input",
            lambda p, judge, beta: _rest(p, judge, beta).abs().amax((1, 2)),
            "one gap for each input; the gap is the largest over inputs too, one number",
        ),
        Mistake(
            "not summarised",
            lambda p, judge, beta: _rest(p, judge, beta).abs(),
            "this is the disagreement of every pair; return the largest",
        ),
    ],
)


# --- the beta-perfect system ------------------------------------------------------------------------------------------


def perfect_system(judge: Float[Tensor, "X Z Z"], beta: float) -> Float[Tensor, "X Z"]:
    """softmax(phi / beta), phi_i = mean_j L_ij (theory S6.3), by the library's split."""
    return torch.softmax(alignment.hodge_split(judge)[0] / beta, -1)


def _consistent_judges() -> list[tuple]:
    g = draws(21)
    return [(differences(rewards(x, z, g)), beta) for x, z, beta in ((1, 3, 0.5), (2, 4, 2.0), (3, 2, 1.5))]


check_perfect_system = Check(
    cases=_consistent_judges,
    right=perfect_system,
    mistakes=[
        Mistake(
            "multiplied by beta",
            lambda judge, beta: torch.softmax(judge.mean(2) * beta, -1),
            "beta works the wrong way round: a larger beta must give a flatter system",
        ),
        Mistake(
            "beta forgotten",
            lambda judge, beta: torch.softmax(judge.mean(2), -1),
            "beta is missing; your system is right for beta = 1 only",
        ),
        Mistake(
            "wrong axis",
            lambda judge, beta: torch.softmax(judge.mean(1) / beta, -1),
            "the mean goes over the wrong answers: judge[x, i, j] is how far i is ahead of j, so average over j",
        ),
        Mistake(
            "sum instead of mean",
            lambda judge, beta: torch.softmax(judge.sum(2) / beta, -1),
            "a sum over the other answers; differences of the numbers you find must be the judge's logits, not a "
            "multiple of them",
        ),
        Mistake(
            "mean over the others",
            lambda judge, beta: torch.softmax(judge.sum(2) / (judge.shape[2] - 1) / beta, -1),
            "the mean leaves out the answer itself (j = i, where the logit is 0): divide by the number of all answers",
        ),
        Mistake(
            "mean of preferences",
            lambda judge, beta: torch.softmax(torch.sigmoid(judge).mean(2) / beta, -1),
            "preferences are averaged; average the logits",
        ),
        Mistake(
            "win shares",
            lambda judge, beta: torch.sigmoid(judge).mean(2) / torch.sigmoid(judge).mean(2).sum(1, keepdim=True),
            "these are shares of wins; a softmax of logits is needed",
        ),
        Mistake(
            "not normalised",
            lambda judge, beta: torch.exp(judge.mean(2) / beta),
            "each row must sum to 1",
        ),
        Mistake(
            "normalised over inputs",
            lambda judge, beta: torch.softmax(judge.mean(2) / beta, 0),
            "the softmax goes over the inputs; each row (one input) must sum to 1",
        ),
        Mistake(
            "logits returned",
            lambda judge, beta: judge.mean(2) / beta,
            "these are logits of the system; return probabilities",
        ),
    ],
)


# --- the fitted beta --------------------------------------------------------------------------------------------------


def fitted_beta(p: Float[Tensor, "X Z"], judge: Float[Tensor, "X Z Z"]) -> float:
    """Least-squares slope of L on log-odds, without intercept (theory S6.1), by the library."""
    return alignment.fit_beta(p, judge)[0]


def _fits() -> list[tuple]:
    return [case[:2] for case in _systems_and_judges()]


def _upper(values: Tensor) -> Tensor:
    i, j = torch.triu_indices(values.shape[1], values.shape[1], offset=1)
    return values[:, i, j]


def _with_intercept(p: Tensor, judge: Tensor) -> Tensor:
    D, L = _upper(differences(p.log())), _upper(judge)
    D, L = D - D.mean(), L - L.mean()
    return (L * D).sum() / (D * D).sum()


def _slope(D: Tensor, L: Tensor) -> Tensor:
    return (L * D).sum() / (D * D).sum()


check_fitted_beta = Check(
    cases=_fits,
    right=fitted_beta,
    mistakes=[
        Mistake(
            "axes swapped",
            lambda p, judge: _slope(judge, differences(p.log())),
            "this is the slope of the log-odds on the logits; D stands on the horizontal axis, L = beta D",
        ),
        Mistake(
            "inverse of the swapped slope",
            lambda p, judge: 1 / _slope(judge, differences(p.log())),
            "this minimises errors in D, not in L: the sum of squares of D belongs below",
        ),
        Mistake(
            "mean of quotients",
            lambda p, judge: (_upper(judge) / _upper(differences(p.log()))).mean(),
            "a mean of the quotients L / D; pairs with small D would decide everything: weigh by D",
        ),
        Mistake(
            "quotient of sums",
            lambda p, judge: _upper(judge).sum() / _upper(differences(p.log())).sum(),
            "a quotient of sums; pairs of opposite sign cancel in it. Multiply by D before you sum",
        ),
        Mistake(
            "with an intercept",
            _with_intercept,
            "the line has an intercept; it must go through the origin (each pair and its mirror image lie on it)",
        ),
        Mistake(
            "probabilities instead of logs",
            lambda p, judge: _slope(differences(p), judge),
            "differences of probabilities on the horizontal axis; take logs first",
        ),
        Mistake(
            "not divided",
            lambda p, judge: (judge * differences(p.log())).sum(),
            "the sum of L D alone grows with the number of pairs; divide by the sum of D squared",
        ),
        Mistake(
            "sign flipped",
            lambda p, judge: -_slope(differences(p.log()), judge),
            "the sign is flipped: judge[x, i, j] goes with log p_i - log p_j",
        ),
        Mistake(
            "averaged over inputs",
            lambda p, judge: torch.stack([_slope(d, rows) for d, rows in zip(differences(p.log()), judge)]).mean(),
            "a mean of one slope for each input; fit one line to the pairs of all inputs",
        ),
        Mistake(
            "one number for each input",
            lambda p, judge: torch.stack([_slope(d, rows) for d, rows in zip(differences(p.log()), judge)]),
            "one slope for each input; fit one line to the pairs of all inputs",
        ),
    ],
)


# --- circles ----------------------------------------------------------------------------------------------------------


def cyclic_part(judge: Float[Tensor, "X Z Z"]) -> Float[Tensor, "X Z Z"]:
    """C = L - grad phi (theory S6.3), by the library."""
    return alignment.hodge_split(judge)[1]


def _judges_with_circles() -> list[tuple]:
    g = draws(22)
    rock = math.log(4) * torch.tensor([[[0, 1, -1], [-1, 0, 1], [1, -1, 0]]], dtype=torch.float64)
    return [(any_judge(2, 4, g),), (any_judge(1, 5, g),), (rock + differences(rewards(1, 3, g)),)]


check_cyclic_part = Check(
    cases=_judges_with_circles,
    right=cyclic_part,
    mistakes=[
        Mistake(
            "the other part",
            lambda judge: differences(judge.mean(2)),
            "this is the part that a reward explains; C is what is left of the logits",
        ),
        Mistake(
            "wrong axis",
            lambda judge: judge - differences(judge.mean(1)),
            "the reward has the wrong sign: average judge[x, i, j] over j, the second answer",
        ),
        Mistake(
            "sum instead of mean",
            lambda judge: judge - differences(judge.sum(2)),
            "the reward is too large: a mean over the answers, not a sum",
        ),
        Mistake(
            "mean over the others",
            lambda judge: judge - differences(judge.sum(2) / (judge.shape[2] - 1)),
            "the mean leaves out the answer itself (j = i): divide by the number of all answers",
        ),
        Mistake(
            "reward of the first answer only",
            lambda judge: judge - judge.mean(2)[:, :, None],
            "only phi_i is taken away; what a reward explains is the difference phi_i - phi_j",
        ),
        Mistake(
            "compared with answer 0",
            lambda judge: judge - differences(judge[:, :, 0]),
            "the reward is read off the comparisons with answer 0 only; with circles these disagree with the others: average",
        ),
        Mistake(
            "its size",
            lambda judge: _upper(judge - differences(judge.mean(2))).pow(2).mean().sqrt(),
            "this is the rms of C; return C itself, shape (X, Z, Z)",
        ),
    ],
)
