"""Lesson 07: Separate's loss, the refiner's part of it, recoding, a draft's credit, J of a system, verdicts, sample size."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from sysdpo_lab import exact
from sysdpo_lab.coursework.checks.core import Check, Mistake
from sysdpo_lab.coursework.checks.lesson_00 import draws, table
from sysdpo_lab.coursework.checks.lesson_02 import rewards

# --- one loss a component ---------------------------------------------------------------------------------------------


def separate_loss(log_ratio_gaps: Float[Tensor, "C B"], beta: float) -> Float[Tensor, ""]:
    """Separate-DPO with whole traces (E9): a DPO loss a component, each with its own sigmoid, added; mean over pairs.

    >>> round(separate_loss(torch.zeros(2, 3), 0.5).item(), 4)  # 2 log 2
    1.3863
    """
    return -logsigmoid(beta * log_ratio_gaps).mean(1).sum()


def _gaps() -> list[tuple]:
    g = draws(70)
    return [
        (2 * torch.randn(c, b, generator=g, dtype=torch.float64), beta) for c, b, beta in ((2, 4, 0.5), (3, 5, 2.0))
    ]


check_separate_loss = Check(
    cases=_gaps,
    right=separate_loss,
    mistakes=[
        Mistake(
            "one sigmoid of the sum",
            lambda gaps, beta: -logsigmoid(beta * gaps.sum(0)).mean(),
            "the gaps are added under one sigmoid: that is the joint loss (SysDPO-Direct); Separate has a sigmoid a component",
        ),
        Mistake(
            "mean over components",
            lambda gaps, beta: -logsigmoid(beta * gaps).mean(),
            "this is a mean over components; their losses are added",
        ),
        Mistake(
            "sum over pairs",
            lambda gaps, beta: -logsigmoid(beta * gaps).sum(),
            "the pairs are added up too; take the mean over pairs",
        ),
        Mistake(
            "beta forgotten",
            lambda gaps, beta: -logsigmoid(gaps).mean(1).sum(),
            "beta is missing: a margin is beta times a log-ratio gap",
        ),
        Mistake(
            "log sigmoid of a mean",
            lambda gaps, beta: -logsigmoid(beta * gaps.mean(1)).sum(),
            "the margins are averaged before the log sigmoid; each pair has a loss of its own",
        ),
        Mistake(
            "sign flipped",
            lambda gaps, beta: -logsigmoid(-beta * gaps).mean(1).sum(),
            "the sign under the sigmoid is flipped: a larger gap must mean a smaller loss",
        ),
        Mistake(
            "a component's loss each",
            lambda gaps, beta: -logsigmoid(beta * gaps).mean(1),
            "these are the components' losses; add them up to one number",
        ),
    ],
)

# --- the refiner's part -----------------------------------------------------------------------------------------------


def refiner_loss(
    p_y: Float[Tensor, " Y"],
    p_y_ref: Float[Tensor, " Y"],
    p_z: Float[Tensor, "Y Z"],
    p_z_ref: Float[Tensor, "Y Z"],
    winner: int,
    loser: int,
    beta: float,
) -> Float[Tensor, ""]:
    """Separate-DPO's loss of the output component for one pair of finals (E9): the draft is drawn from the frozen reference,
    the same one for both sides; in expectation over it.

    >>> even = torch.full((2, 2), 0.5).double()
    >>> round(refiner_loss(even[0], even[0], even, even, 0, 1, 0.5).item(), 4)
    0.6931
    """
    return (p_y_ref * _loss_behind_each_draft(p_z, p_z_ref, winner, loser, beta)).sum()


def _margins(p_z: Tensor, p_z_ref: Tensor, winner: int, loser: int, beta: float) -> Float[Tensor, " Y"]:
    ratio = (p_z / p_z_ref).log()
    return beta * (ratio[:, winner] - ratio[:, loser])


def _loss_behind_each_draft(*case) -> Float[Tensor, " Y"]:
    return -logsigmoid(_margins(*case))


def _loss_of_marginals(p_y, p_y_ref, p_z, p_z_ref, winner, loser, beta):
    ratio = (p_y @ p_z / (p_y_ref @ p_z_ref)).log()
    return -logsigmoid(beta * (ratio[winner] - ratio[loser]))


def _pairs_behind_drafts() -> list[tuple]:
    g = draws(71)
    sizes = ((2, 3, 2, 0, 0.5), (4, 4, 1, 3, 2.0))
    return [
        (
            *(table(drafts, generator=g) for _ in range(2)),
            *(table(drafts, answers, generator=g) for _ in range(2)),
            winner,
            loser,
            beta,
        )
        for drafts, answers, winner, loser, beta in sizes
    ]


check_refiner_loss = Check(
    cases=_pairs_behind_drafts,
    right=refiner_loss,
    mistakes=[
        Mistake(
            "drafts of the policy",
            lambda p, q, *rest: (p * _loss_behind_each_draft(*rest)).sum(),
            "the drafts are weighed by the policy; Separate draws them from the frozen reference",
        ),
        Mistake(
            "all drafts alike",
            lambda p, q, *rest: _loss_behind_each_draft(*rest).mean(),
            "all drafts count alike; weigh each by how often the reference draws it",
        ),
        Mistake(
            "drafts not weighed",
            lambda p, q, *rest: _loss_behind_each_draft(*rest).sum(),
            "the losses are added without weights; weigh each draft by how often the reference draws it",
        ),
        Mistake(
            "margin averaged first",
            lambda p, q, *rest: -logsigmoid((q * _margins(*rest)).sum()),
            "the margins are averaged before the log sigmoid; one draft a pair means one loss a draft, and the mean outside",
        ),
        Mistake(
            "loss of the marginals",
            _loss_of_marginals,
            "this compares p(z) summed over drafts, which is SysDPO-Sampling; Separate's refiner is given one draft at a time",
        ),
        Mistake(
            "reference forgotten",
            lambda p, q, pz, qz, *rest: (q * _loss_behind_each_draft(pz, torch.ones_like(qz), *rest)).sum(),
            "the refiner's own reference is missing from the log-ratio",
        ),
        Mistake(
            "beta forgotten",
            lambda p, q, pz, qz, w, lose, beta: (q * _loss_behind_each_draft(pz, qz, w, lose, 1.0)).sum(),
            "beta is missing: a margin is beta times a log-ratio gap",
        ),
        Mistake(
            "winner and loser swapped",
            lambda p, q, pz, qz, w, lose, beta: (q * _loss_behind_each_draft(pz, qz, lose, w, beta)).sum(),
            "winner and loser are swapped",
        ),
    ],
)

# --- recoding ---------------------------------------------------------------------------------------------------------


def recode(
    p_y: Float[Tensor, "X Y"], p_z: Float[Tensor, "X Y Z"], code: Int[Tensor, " Y"]
) -> tuple[Float[Tensor, "X Y"], Float[Tensor, "X Y Z"]]:
    """The same system with its drafts renumbered: the new draft i is the old draft code[i] (theory S2.6)."""
    return p_y[:, code], p_z[:, code]


def _systems_and_codes() -> list[tuple]:
    g = draws(72)
    codes = (torch.tensor([2, 0, 1]), torch.tensor([1, 3, 0, 2]))  # neither is its own inverse
    return [(table(2, len(c), generator=g), table(2, len(c), len(c), generator=g), c) for c in codes]


check_recode = Check(
    cases=_systems_and_codes,
    right=recode,
    mistakes=[
        Mistake(
            "drafter only",
            lambda p, q, code: (p[:, code], q),
            "only the drafter's table is permuted: the refiner now reads other drafts, and it is another system",
        ),
        Mistake(
            "refiner only",
            lambda p, q, code: (p, q[:, code]),
            "only the refiner's table is permuted: it now reads other drafts, and it is another system",
        ),
        Mistake(
            "answers permuted",
            lambda p, q, code: (p[:, code], q[:, :, code]),
            "in the refiner's table the answers are permuted; the drafts are its second axis",
        ),
        Mistake(
            "drafts and answers permuted",
            lambda p, q, code: (p[:, code], q[:, code][:, :, code]),
            "the answers are permuted too; the judge would see other answers",
        ),
        Mistake(
            "inverse code",
            lambda p, q, code: recode(p, q, code.argsort()),
            "both tables agree, but this is the code read backwards: the *new* draft i is the *old* draft code[i]",
        ),
        Mistake(
            "one of the two backwards",
            lambda p, q, code: (p[:, code], q[:, code.argsort()]),
            "the two tables are permuted in opposite directions; the refiner no longer understands the drafter",
        ),
    ],
)

# --- the credit of a draft --------------------------------------------------------------------------------------------


def draft_credit(p_z_ref: Float[Tensor, "Y Z"], reward: Float[Tensor, " Z"], beta: float) -> Float[Tensor, " Y"]:
    """V(y) = beta log E_ref[exp(r(z)/beta) | y] (theory S2.2): what a draft is worth to the whole system.

    >>> [round(v, 4) for v in draft_credit(torch.eye(2).double(), torch.tensor([0.0, 2.0]).double(), 0.5).tolist()]
    [0.0, 2.0]
    """
    return beta * torch.logsumexp(p_z_ref.log() + reward / beta, -1)


def _refiners() -> list[tuple]:
    g = draws(73)
    return [(table(y, z, generator=g), rewards(1, z, g)[0], beta) for y, z, beta in ((3, 3, 0.5), (4, 4, 2.0))]


check_draft_credit = Check(
    cases=_refiners,
    right=draft_credit,
    mistakes=[
        Mistake(
            "expected reward",
            lambda p, r, beta: p @ r,
            "this is the expected reward of the reference's answers; the refiner will be tilted too, so the mean is one of "
            "exp(r/beta)",
        ),
        Mistake(
            "log and beta forgotten",
            lambda p, r, beta: p @ (r / beta).exp(),
            "this is Z(y); a credit is in the reward's unit: take the logarithm, times beta",
        ),
        Mistake(
            "beta in front forgotten",
            lambda p, r, beta: (p @ (r / beta).exp()).log(),
            "beta in front of the logarithm is missing: a credit is in the reward's unit",
        ),
        Mistake(
            "beta forgotten",
            lambda p, r, beta: (p @ r.exp()).log(),
            "beta is missing; your credit is right for beta = 1 only",
        ),
        Mistake(
            "multiplied by beta",
            lambda p, r, beta: (p @ (r * beta).exp()).log() / beta,
            "beta works the wrong way round: a small beta must care for the best answer",
        ),
        Mistake(
            "best answer",
            lambda p, r, beta: r.max().expand(len(p)),
            "this is the best answer's reward, whatever the draft; weigh answers by how likely the draft makes them",
        ),
        Mistake(
            "summed over drafts",
            lambda p, r, beta: beta * torch.logsumexp(p.log() + r / beta, 0),
            "the sum goes over the drafts; for each draft, sum over answers (the last axis)",
        ),
        Mistake(
            "reward of the draft",
            lambda p, r, beta: r,
            "this is the reward that draft number i would get as answer number i: what Separate assumes",
        ),
    ],
)

# --- J of a system ----------------------------------------------------------------------------------------------------


def system_objective(
    p_y: Float[Tensor, " Y"],
    p_z: Float[Tensor, "Y Z"],
    p_y_ref: Float[Tensor, " Y"],
    p_z_ref: Float[Tensor, "Y Z"],
    reward: Float[Tensor, " Z"],
    beta: float,
) -> Float[Tensor, ""]:
    """J = E r(z) - beta KL(p(z) || p_ref(z)): reward and distance of the output's marginal (theory S4.1)."""
    answers, start = p_y @ p_z, p_y_ref @ p_z_ref
    return answers @ reward - beta * exact.kl(answers[None], start[None])[0]


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return exact.kl(p.reshape(1, -1), q.reshape(1, -1))[0]


def _joint_kl(p_y, p_z, q_y, q_z):
    return _kl(p_y[:, None] * p_z, q_y[:, None] * q_z)


def _two_systems() -> list[tuple]:
    g = draws(74)
    return [
        (
            *(table(*shape, generator=g) for shape in ((y,), (y, z)) * 2),
            rewards(1, z, g)[0],
            beta,
        )
        for y, z, beta in ((2, 3, 0.5), (4, 3, 2.0))
    ]


check_system_objective = Check(
    cases=_two_systems,
    right=system_objective,
    mistakes=[
        Mistake(
            "KL of the joint",
            lambda p, pz, q, qz, r, beta: p @ pz @ r - beta * _joint_kl(p, pz, q, qz),
            "this is the KL of drafts and answers together; nobody is charged for how the drafts move: use the marginals of z",
        ),
        Mistake(
            "beta forgotten",
            lambda p, pz, q, qz, r, beta: p @ pz @ r - _kl(p @ pz, q @ qz),
            "beta is missing: it is the price of a nat of distance",
        ),
        Mistake(
            "KL the other way round",
            lambda p, pz, q, qz, r, beta: p @ pz @ r - beta * _kl(q @ qz, p @ pz),
            "the KL is the wrong way round: the answers are drawn from the policy, so it weighs and stands on top",
        ),
        Mistake(
            "distance added",
            lambda p, pz, q, qz, r, beta: p @ pz @ r + beta * _kl(p @ pz, q @ qz),
            "the distance is added; it is a price, so subtract it",
        ),
        Mistake(
            "refiner's KL only",
            lambda p, pz, q, qz, r, beta: p @ pz @ r - beta * (p * exact.kl(pz, qz)).sum(),
            "this is the refiner's KL given a draft; the answers also move because the drafts do",
        ),
        Mistake(
            "distance forgotten",
            lambda p, pz, q, qz, r, beta: p @ pz @ r,
            "this is the expected reward; the price of distance is missing",
        ),
        Mistake(
            "drafts of the reference",
            lambda p, pz, q, qz, r, beta: q @ pz @ r - beta * _kl(q @ pz, q @ qz),
            "the policy's answers are taken behind the reference's drafts; the policy's drafter writes them",
        ),
    ],
)

# --- verdicts ---------------------------------------------------------------------------------------------------------


def judged_win_rate(first_when_first: Bool[Tensor, " B"], first_when_second: Bool[Tensor, " B"]) -> float:
    """Win rate of a system whose answers a judge saw in both orders (E10): disagreement is a tie and counts one half.

    Args:
        first_when_first: whether the judge chose the first answer, the system's being shown first.
        first_when_second: the same, the system's being shown second.
    """
    wins = first_when_first.double() + (~first_when_second).double()
    return (wins / 2).mean().item()


def _verdicts() -> list[tuple]:
    g = draws(75)
    chances = ((0.7, 0.5, 40), (0.8, 0.6, 25))  # the judge likes what comes first: the orders disagree often
    return [(torch.rand(n, generator=g) < a, torch.rand(n, generator=g) < b) for a, b, n in chances]


check_judged_win_rate = Check(
    cases=_verdicts,
    right=judged_win_rate,
    mistakes=[
        Mistake(
            "ties count nothing",
            lambda a, b: (a & ~b).double().mean().item(),
            "ties count as losses; a tie counts one half",
        ),
        Mistake(
            "ties count as wins",
            lambda a, b: (a | ~b).double().mean().item(),
            "ties count as wins; a tie counts one half",
        ),
        Mistake(
            "ties left out",
            lambda a, b: ((a & ~b).sum() / ((a & ~b).sum() + (~a & b).sum())).item(),
            "ties are left out of the denominator; they stay in it, and count one half",
        ),
        Mistake(
            "second order not turned round",
            lambda a, b: ((a.double() + b.double()) / 2).mean().item(),
            "in the second order the system's answer stands second: there it wins when the judge did *not* choose the first",
        ),
        Mistake(
            "one order only",
            lambda a, b: a.double().mean().item(),
            "only the first order is used; a judge who likes what comes first would flatter the system",
        ),
        Mistake(
            "other order only",
            lambda a, b: (~b).double().mean().item(),
            "only the second order is used",
        ),
        Mistake(
            "opponent's rate",
            lambda a, b: 1 - judged_win_rate(a, b),
            "this is the opponent's win rate",
        ),
    ],
)

# --- how many instructions --------------------------------------------------------------------------------------------


def instructions_needed(rate: float, other: float) -> int:
    """Smallest n, an arm, at which two unpaired win rates lie 1.96 standard errors of their difference apart.

    n = 1.96^2 (p (1 - p) + q (1 - q)) / (p - q)^2, rounded up.

    >>> instructions_needed(0.5, 0.4)
    189
    """
    return math.ceil(1.96**2 * _variances(rate, other) / (rate - other) ** 2)


def _variances(p: float, q: float) -> float:
    return p * (1 - p) + q * (1 - q)


check_instructions_needed = Check(
    cases=lambda: [(0.181, 0.198), (0.66, 0.685), (0.3, 0.2), (0.574, 0.664)],
    right=instructions_needed,
    mistakes=[
        Mistake(
            "one arm's variance",
            lambda p, q: math.ceil(1.96**2 * p * (1 - p) / (p - q) ** 2),
            "only the first rate's variance is used; both are uncertain, and the variances add",
        ),
        Mistake(
            "the other arm's variance",
            lambda p, q: math.ceil(1.96**2 * q * (1 - q) / (p - q) ** 2),
            "only the second rate's variance is used; both are uncertain, and the variances add",
        ),
        Mistake(
            "1.96 not squared",
            lambda p, q: math.ceil(1.96 * _variances(p, q) / (p - q) ** 2),
            "1.96 is not squared: the standard error falls with the root of n",
        ),
        Mistake(
            "1.96 forgotten",
            lambda p, q: math.ceil(_variances(p, q) / (p - q) ** 2),
            "the factor 1.96 is missing: at this n the rates lie one standard error apart",
        ),
        Mistake(
            "difference not squared",
            lambda p, q: math.ceil(1.96**2 * _variances(p, q) / abs(p - q)),
            "the difference is not squared: half the difference needs four times the instructions",
        ),
        Mistake(
            "standard errors added",
            lambda p, q: math.ceil(((1.96 * (math.sqrt(p * (1 - p)) + math.sqrt(q * (1 - q)))) / (p - q)) ** 2),
            "the two standard errors are added; of independent rates the *variances* add",
        ),
        Mistake(
            "standard deviation for variance",
            lambda p, q: math.ceil(1.96**2 * math.sqrt(_variances(p, q)) / (p - q) ** 2),
            "a standard deviation stands where the variance p (1 - p) + q (1 - q) belongs",
        ),
        Mistake(
            "both arms counted",
            lambda p, q: math.ceil(2 * 1.96**2 * _variances(p, q) / (p - q) ** 2),
            "this is both arms together; the question is for one",
        ),
        Mistake(
            "rounded down",
            lambda p, q: math.floor(1.96**2 * _variances(p, q) / (p - q) ** 2),
            "rounded down, the bar is just missed; round up",
        ),
        Mistake(
            "not rounded",
            lambda p, q: 1.96**2 * _variances(p, q) / (p - q) ** 2,
            "there are no fractions of an instruction; round up",
        ),
    ],
)
