"""Lesson 03: the optimum, the implied preference, the regularised reward, margins of texts, the gradient of a pair."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from sysdpo_lab import exact
from sysdpo_lab.coursework.checks.core import Check, Mistake
from sysdpo_lab.coursework.checks.lesson_00 import draws, margin, table
from sysdpo_lab.coursework.checks.lesson_02 import differences, rewards

# --- the optimum ------------------------------------------------------------------------------------------------------


def optimum(p_ref: Float[Tensor, "X Z"], reward: Float[Tensor, "X Z"], beta: float) -> Float[Tensor, "X Z"]:
    """p*(z|x) = p_ref(z|x) exp(r(x,z)/beta) / Z(x) (E4), by the library."""
    return exact.tilt(p_ref, reward, beta)


def _starts_and_rewards() -> list[tuple]:
    g = draws(30)
    sizes = ((1, 3, 0.5), (2, 4, 2.0), (3, 3, 0.8))
    return [(table(x, z, generator=g), rewards(x, z, g), beta) for x, z, beta in sizes]


check_optimum = Check(
    cases=_starts_and_rewards,
    right=optimum,
    mistakes=[
        Mistake(
            "reference forgotten",
            lambda p, r, beta: torch.softmax(r / beta, -1),
            "p_ref is missing: this is the beta-perfect system, which the optimum equals only for a uniform start",
        ),
        Mistake(
            "multiplied by beta",
            lambda p, r, beta: torch.softmax(p.log() + r * beta, -1),
            "beta works the wrong way round: a larger beta must stay closer to the start",
        ),
        Mistake(
            "beta forgotten",
            lambda p, r, beta: torch.softmax(p.log() + r, -1),
            "beta is missing; your optimum is right for beta = 1 only",
        ),
        Mistake(
            "beta on the reference",
            lambda p, r, beta: torch.softmax((p.log() + r) / beta, -1),
            "the start is divided by beta too; only the reward is",
        ),
        Mistake(
            "not normalised",
            lambda p, r, beta: p * (r / beta).exp(),
            "this is the tilted start; divide by its sum, so that each row sums to 1",
        ),
        Mistake(
            "normalised over inputs",
            lambda p, r, beta: torch.softmax(p.log() + r / beta, 0),
            "the normalisation goes over the inputs; each row (one input) must sum to 1",
        ),
        Mistake(
            "normalised over everything",
            lambda p, r, beta: (p * (r / beta).exp()) / (p * (r / beta).exp()).sum(),
            "all inputs together sum to 1; each input has its own Z",
        ),
        Mistake(
            "softmax of probabilities",
            lambda p, r, beta: torch.softmax(p + r / beta, -1),
            "probabilities and rewards are added under the exponential; there p_ref enters as a logarithm",
        ),
        Mistake(
            "sign flipped",
            lambda p, r, beta: torch.softmax(p.log() - r / beta, -1),
            "the reward has the wrong sign: better answers must become likelier",
        ),
        Mistake(
            "log returned",
            lambda p, r, beta: torch.log_softmax(p.log() + r / beta, -1),
            "these are log-probabilities; return probabilities",
        ),
    ],
)


# --- what a system prefers --------------------------------------------------------------------------------------------


def implied_preference(
    p: Float[Tensor, "X Z"], p_ref: Float[Tensor, "X Z"], beta: float
) -> Float[Tensor, "X Z Z"]:
    """sigmoid of the margins beta (log p/p_ref(i) - log p/p_ref(j)) (Rafailov et al. 2023, Eq. 6)."""
    return torch.sigmoid(beta * differences(p.log() - p_ref.log()))


def _two_systems() -> list[tuple]:
    g = draws(31)
    return [
        (table(x, z, generator=g), table(x, z, generator=g), beta) for x, z, beta in ((1, 3, 0.5), (2, 4, 2.0))
    ]


check_implied_preference = Check(
    cases=_two_systems,
    right=implied_preference,
    mistakes=[
        Mistake(
            "reference forgotten",
            lambda p, q, beta: torch.sigmoid(beta * differences(p.log())),
            "the reference is missing: what counts is how far p has moved from p_ref",
        ),
        Mistake(
            "beta forgotten",
            lambda p, q, beta: torch.sigmoid(differences(p.log() - q.log())),
            "beta is missing: the reward is beta times the log-ratio",
        ),
        Mistake(
            "divided by beta",
            lambda p, q, beta: torch.sigmoid(differences(p.log() - q.log()) / beta),
            "the log-ratio is divided by beta; solve E4 for the reward: it is multiplied",
        ),
        Mistake(
            "sigmoid forgotten",
            lambda p, q, beta: beta * differences(p.log() - q.log()),
            "these are the margins; a preference is a probability",
        ),
        Mistake(
            "i and j swapped",
            lambda p, q, beta: torch.sigmoid(-beta * differences(p.log() - q.log())),
            "this is the probability that j is preferred to i",
        ),
        Mistake(
            "ratio instead of its log",
            lambda p, q, beta: torch.sigmoid(beta * differences(p / q)),
            "the log of the ratio p / p_ref is missing",
        ),
        Mistake(
            "reference added",
            lambda p, q, beta: torch.sigmoid(beta * differences(p.log() + q.log())),
            "the reference is added; a log-ratio subtracts it",
        ),
        Mistake(
            "log returned",
            lambda p, q, beta: logsigmoid(beta * differences(p.log() - q.log())),
            "these are logs of the preferences; return probabilities",
        ),
    ],
)


# --- reward minus distance --------------------------------------------------------------------------------------------


def regularised_reward(
    p: Float[Tensor, "X Z"], p_ref: Float[Tensor, "X Z"], reward: Float[Tensor, "X Z"], beta: float
) -> Float[Tensor, " X"]:
    """J(p) = E_p r - beta KL(p || p_ref) of each input, by the library."""
    return exact.expected_reward(p, reward) - beta * exact.kl(p, p_ref)


def _systems_with_rewards() -> list[tuple]:
    g = draws(32)
    sizes = ((1, 3, 0.5), (3, 4, 2.0))
    return [(table(x, z, generator=g), table(x, z, generator=g), rewards(x, z, g), beta) for x, z, beta in sizes]


def _gain(p: Tensor, r: Tensor) -> Tensor:
    return (p * r).sum(-1)


check_regularised_reward = Check(
    cases=_systems_with_rewards,
    right=regularised_reward,
    mistakes=[
        Mistake(
            "distance added",
            lambda p, q, r, beta: _gain(p, r) + beta * exact.kl(p, q),
            "the distance is added; it is a price, so subtract it",
        ),
        Mistake(
            "KL the other way round",
            lambda p, q, r, beta: _gain(p, r) - beta * exact.kl(q, p),
            "the KL is the wrong way round: the answers are drawn from p, so p weighs and stands on top",
        ),
        Mistake(
            "beta forgotten",
            lambda p, q, r, beta: _gain(p, r) - exact.kl(p, q),
            "beta is missing: it is the price of a nat of distance",
        ),
        Mistake(
            "divided by beta",
            lambda p, q, r, beta: _gain(p, r) - exact.kl(p, q) / beta,
            "the distance is divided by beta; a larger beta must make it dearer",
        ),
        Mistake(
            "beta on the reward",
            lambda p, q, r, beta: beta * _gain(p, r) - exact.kl(p, q),
            "beta multiplies the reward; it belongs to the distance",
        ),
        Mistake(
            "reward of the start",
            lambda p, q, r, beta: _gain(q, r) - beta * exact.kl(p, q),
            "the reward is averaged over the start's answers; use those of p",
        ),
        Mistake(
            "distance forgotten",
            lambda p, q, r, beta: _gain(p, r),
            "this is the expected reward; the price of distance is missing",
        ),
        Mistake(
            "answers not weighed",
            lambda p, q, r, beta: (r - beta * (p / q).log()).sum(-1),
            "all answers count alike; weigh each by its probability p",
        ),
        Mistake(
            "KL not weighed",
            lambda p, q, r, beta: _gain(p, r) - beta * (p / q).log().sum(-1),
            "the log-ratios of the KL are added without weights; p weighs them too",
        ),
        Mistake(
            "mean over answers",
            lambda p, q, r, beta: (p * (r - beta * (p / q).log())).mean(-1),
            "a mean over the answers; p weighs them already, so add up",
        ),
        Mistake(
            "one number",
            lambda p, q, r, beta: (_gain(p, r) - beta * exact.kl(p, q)).sum(),
            "the inputs are added up; return one number for each input, shape (X,)",
        ),
    ],
)


# --- texts ------------------------------------------------------------------------------------------------------------

Texts = Sequence[Float[Tensor, " T"]]


def text_margin(
    policy_chosen: Texts, policy_rejected: Texts, reference_chosen: Texts, reference_rejected: Texts, beta: float
) -> Float[Tensor, " B"]:
    """beta x log-ratio gap of texts whose log-probability is the sum of their tokens' (E5)."""
    sides = (policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    return margin(*(_per_text(texts, Tensor.sum) for texts in sides), beta)


def _per_text(texts: Texts, reduce) -> Float[Tensor, " B"]:
    return torch.stack([reduce(text) for text in texts])


def _token_log_probs() -> list[tuple]:
    g = draws(33)
    cases = []
    for lengths, beta in ((((3, 5), (6, 2)), 0.1), (((1, 4, 2), (2, 7, 3)), 2.0)):
        chosen, rejected = (
            [[-3 * torch.rand(n, generator=g, dtype=torch.float64) for n in side] for _ in range(2)] for side in lengths
        )
        cases.append((chosen[0], rejected[0], chosen[1], rejected[1], beta))
    return cases


def _texts(reduce, combine=margin):
    """A mistake in how a text becomes one number, or in how four numbers become a margin."""
    return lambda *case: combine(*(_per_text(texts, reduce) for texts in case[:4]), case[4])


def _common_length(*case) -> Tensor:
    kept = [min(len(a), len(b)) for a, b in zip(case[0], case[1])]
    sides = (torch.stack([text[:n].sum() for text, n in zip(texts, kept)]) for texts in case[:4])
    return margin(*sides, case[4])


check_text_margin = Check(
    cases=_token_log_probs,
    right=text_margin,
    mistakes=[
        Mistake(
            "mean instead of sum",
            _texts(Tensor.mean),
            "a mean over the tokens; a text's probability is the product of its tokens', so its log is a sum",
        ),
        Mistake(
            "reference forgotten",
            _texts(Tensor.sum, lambda pc, pr, rc, rr, beta: beta * (pc - pr)),
            "the reference is missing: compare with the start",
        ),
        Mistake(
            "beta forgotten",
            _texts(Tensor.sum, lambda pc, pr, rc, rr, beta: margin(pc, pr, rc, rr, 1.0)),
            "this is the log-ratio gap; beta is missing",
        ),
        Mistake(
            "divided by beta",
            _texts(Tensor.sum, lambda pc, pr, rc, rr, beta: margin(pc, pr, rc, rr, 1 / beta)),
            "the gap is divided by beta; a larger beta must give a larger margin",
        ),
        Mistake(
            "chosen and rejected swapped",
            _texts(Tensor.sum, lambda pc, pr, rc, rr, beta: margin(pr, pc, rr, rc, beta)),
            "the sign is flipped: the margin grows when the chosen text becomes likelier",
        ),
        Mistake(
            "reference added",
            _texts(Tensor.sum, lambda pc, pr, rc, rr, beta: beta * ((pc - pr) + (rc - rr))),
            "the reference's gap is added; subtract it",
        ),
        Mistake(
            "cut to the shorter text",
            _common_length,
            "texts are cut to the length of the shorter one; all tokens count",
        ),
        Mistake(
            "last token only",
            _texts(lambda text: text[-1]),
            "only the last token is used; all tokens count",
        ),
        Mistake(
            "probabilities added",
            _texts(lambda text: text.exp().sum().log()),
            "the tokens' probabilities are added; they are multiplied, so add their logs",
        ),
        Mistake(
            "mean over the batch",
            lambda *case: _texts(Tensor.sum)(*case).mean(),
            "one number for the batch; return one margin for each pair, shape (B,)",
        ),
    ],
)


# --- the gradient of a pair -------------------------------------------------------------------------------------------


def pair_gradient(
    logits: Float[Tensor, " Z"], reference_logits: Float[Tensor, " Z"], winner: int, loser: int, beta: float
) -> Float[Tensor, " Z"]:
    """d/d logits of -log sigmoid(beta x log-ratio gap), by automatic differentiation."""
    logits = logits.detach().clone().requires_grad_(True)
    log_ratio = torch.log_softmax(logits, -1) - torch.log_softmax(reference_logits, -1)
    loss = -logsigmoid(beta * (log_ratio[winner] - log_ratio[loser]))
    return torch.autograd.grad(loss, logits)[0]


def _comparisons() -> list[tuple]:
    g = draws(34)
    cases = []
    for size, winner, loser, beta in ((3, 0, 2, 0.5), (4, 3, 1, 2.0), (5, 1, 2, 0.3)):
        logits, reference = torch.randn(2, size, generator=g, dtype=torch.float64)
        cases.append((logits, reference, winner, loser, beta))
    return cases


def _pair(weight, direction=lambda w, lose: w - lose, change=lambda a, b: a - b, scale=lambda beta: beta):
    """A mistake in one factor of -beta sigmoid(-m) (e_w - e_l)."""

    def answer(logits, reference, winner, loser, beta):
        moved = change(logits, reference)
        m = beta * (moved[winner] - moved[loser])
        one_hot = torch.eye(len(logits), dtype=logits.dtype)
        return -scale(beta) * weight(m) * direction(one_hot[winner], one_hot[loser])

    return answer


def _wrong(m: Tensor) -> Tensor:
    return torch.sigmoid(-m)


def _with_normaliser(logits, reference, winner, loser, beta):
    one_hot = torch.eye(len(logits), dtype=logits.dtype)
    return _pair(_wrong, lambda w, lose: one_hot[winner] - torch.softmax(logits, -1))(
        logits, reference, winner, loser, beta
    )


check_pair_gradient = Check(
    cases=_comparisons,
    right=pair_gradient,
    mistakes=[
        Mistake(
            "sigmoid of the margin",
            _pair(torch.sigmoid),
            "pairs that are already right get the larger weight: the factor is the probability of choosing *wrongly*",
        ),
        Mistake(
            "sign flipped",
            _pair(lambda m: -_wrong(m)),
            "the sign is flipped: this is the direction in which to move; the gradient of a loss points uphill",
        ),
        Mistake(
            "beta forgotten",
            _pair(_wrong, scale=lambda beta: 1.0),
            "beta is missing in front: the margin contains it, so the chain rule brings it out",
        ),
        Mistake(
            "beta forgotten in the margin",
            lambda logits, reference, winner, loser, beta: beta
            * _pair(_wrong)(logits, reference, winner, loser, 1.0),
            "beta stands in front, but is missing inside the sigmoid's margin",
        ),
        Mistake(
            "reference forgotten",
            _pair(_wrong, change=lambda a, b: a),
            "the margin leaves out the reference",
        ),
        Mistake(
            "loser forgotten",
            _pair(_wrong, lambda w, lose: w),
            "only the winner's logit moves; the loser's goes the other way by as much",
        ),
        Mistake(
            "both the same way",
            _pair(_wrong, lambda w, lose: w + lose),
            "winner and loser move the same way; the gap is winner minus loser",
        ),
        Mistake(
            "winner and loser swapped",
            lambda logits, reference, winner, loser, beta: _pair(_wrong)(logits, reference, loser, winner, beta),
            "winner and loser are swapped",
        ),
        Mistake(
            "no weight",
            _pair(torch.ones_like),
            "each pair pulls with the same force; the derivative of -log sigmoid depends on the margin",
        ),
        Mistake(
            "derivative of the sigmoid",
            _pair(lambda m: torch.sigmoid(m) * torch.sigmoid(-m)),
            "this is the gradient of the sigmoid; the log of it is differentiated",
        ),
        Mistake(
            "softmax gradient",
            _with_normaliser,
            "the loser is replaced by the mean over all answers; in the gap of two answers the normaliser cancels",
        ),
    ],
)
