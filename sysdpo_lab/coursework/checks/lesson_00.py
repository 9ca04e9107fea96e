"""Lesson 00: the probability of an answer, the margin of a pair, the loss, the win rate."""

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import CompoundSystem, exact, losses
from sysdpo_lab.components import Categorical
from sysdpo_lab.coursework.checks.core import Check, Mistake


def draws(seed: int) -> torch.Generator:
    """The generator of one check's inputs."""
    return torch.Generator().manual_seed(seed)


def table(*shape: int, generator: torch.Generator) -> Tensor:
    """Random float64 probabilities; each row (the last axis) sums to 1."""
    return torch.softmax(torch.randn(*shape, generator=generator, dtype=torch.float64), -1)


# --- the probability of an answer -------------------------------------------------------------------------------------


def answer_probabilities(p_draft: Float[Tensor, " Y"], p_refine: Float[Tensor, "Y Z"]) -> Float[Tensor, " Z"]:
    """p(z) = sum over drafts y of p(y) p(z | y), by the library."""
    drafts, answers = p_refine.shape
    draft = Categorical("draft", {"x": 1}, drafts, p_draft[None])
    return exact.marginal(CompoundSystem([draft, Categorical("z", {"draft": drafts}, answers, p_refine)]))[0]


def _draft_and_refiner() -> list[tuple]:
    g = draws(0)
    return [(table(y, generator=g), table(y, z, generator=g)) for y, z in ((3, 3), (2, 2), (4, 3))]


check_answer_probabilities = Check(
    cases=_draft_and_refiner,
    right=answer_probabilities,
    mistakes=[
        Mistake(
            "p(draft) dropped",
            lambda p, q: q.sum(0),
            "every draft counts fully, as if it were certain; how likely is each one?",
        ),
        Mistake(
            "mean instead of sum",
            lambda p, q: (p[:, None] * q).mean(0),
            "this is a mean over the drafts; the probabilities p(y) already weigh them, so add up",
        ),
        Mistake(
            "drafts equally likely",
            lambda p, q: q.mean(0),
            "all drafts have the same weight here; weigh each by its own probability",
        ),
        Mistake(
            "only the likeliest draft",
            lambda p, q: q[p.argmax()],
            "only the likeliest draft is used; the other drafts lead to answers too",
        ),
        Mistake(
            "not summed",
            lambda p, q: p[:, None] * q,
            "this is p(y, z), one number for each draft and answer; nobody sees the draft, so it must be summed out",
        ),
        Mistake(
            "summed over the answers",
            lambda p, q: (p[:, None] * q).sum(1),
            "the sum goes over the wrong axis: rows of p_refine are drafts, columns are answers",
        ),
        Mistake(
            "table transposed",
            lambda p, q: q @ p,
            "the table is read the wrong way round: p_refine[y, z] has the draft first",
        ),
        Mistake(
            "log of the answer",
            lambda p, q: (p @ q).log(),
            "these are log-probabilities; return probabilities that sum to 1",
        ),
    ],
)


# --- the margin of a pair ---------------------------------------------------------------------------------------------


def margin(
    policy_chosen: Float[Tensor, " B"],
    policy_rejected: Float[Tensor, " B"],
    reference_chosen: Float[Tensor, " B"],
    reference_rejected: Float[Tensor, " B"],
    beta: float,
) -> Float[Tensor, " B"]:
    """beta x [(log-ratio of the chosen) - (log-ratio of the rejected)] (E5)."""
    return beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))


def _log_probs() -> list[tuple]:
    g = draws(1)
    return [
        (*(-5 * torch.rand(4, size, generator=g, dtype=torch.float64)), beta) for size, beta in ((5, 0.1), (3, 2.0))
    ]


check_margin = Check(
    cases=_log_probs,
    right=margin,
    mistakes=[
        Mistake(
            "reference forgotten",
            lambda pc, pr, rc, rr, beta: beta * (pc - pr),
            "the reference is missing: how much more does the policy favour the chosen answer *than at the start*?",
        ),
        Mistake(
            "beta forgotten",
            lambda pc, pr, rc, rr, beta: (pc - pr) - (rc - rr),
            "this is the log-ratio gap; beta is missing",
        ),
        Mistake(
            "divided by beta",
            lambda pc, pr, rc, rr, beta: ((pc - pr) - (rc - rr)) / beta,
            "the gap is divided by beta; a larger beta must give a larger margin",
        ),
        Mistake(
            "chosen and rejected swapped",
            lambda pc, pr, rc, rr, beta: -beta * ((pc - pr) - (rc - rr)),
            "the sign is flipped: the margin grows when the *chosen* answer becomes likelier",
        ),
        Mistake(
            "reference added",
            lambda pc, pr, rc, rr, beta: beta * ((pc - pr) + (rc - rr)),
            "the reference's gap is added; a comparison with the start subtracts it",
        ),
        Mistake(
            "rejected answer forgotten",
            lambda pc, pr, rc, rr, beta: beta * (pc - rc),
            "only the chosen answer is used; a margin compares it with the rejected one",
        ),
        Mistake(
            "beta on the policy only",
            lambda pc, pr, rc, rr, beta: beta * (pc - pr) - (rc - rr),
            "beta multiplies the policy's part only; put brackets around the whole gap",
        ),
        Mistake(
            "probabilities instead of logs",
            lambda pc, pr, rc, rr, beta: beta * ((pc.exp() - pr.exp()) - (rc.exp() - rr.exp())),
            "the inputs are log-probabilities already, and the margin is made of logs: no exp",
        ),
        Mistake(
            "one number for the batch",
            lambda pc, pr, rc, rr, beta: (beta * ((pc - pr) - (rc - rr))).mean(),
            "one margin for each pair is wanted, shape (B,); the mean comes later, in the loss",
        ),
        Mistake(
            "summed over the batch",
            lambda pc, pr, rc, rr, beta: (beta * ((pc - pr) - (rc - rr))).sum(),
            "the pairs are added up; return one margin for each pair, shape (B,)",
        ),
    ],
)


# --- the loss ---------------------------------------------------------------------------------------------------------


def preference_loss(margins: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """-log sigmoid(margin), mean over pairs (E5), by the library."""
    return losses.dpo_loss(margins)


def _margins() -> list[tuple]:
    g = draws(2)
    small = [(2 * torch.randn(size, generator=g, dtype=torch.float64),) for size in (6, 3)]
    return [*small, (torch.tensor([-1000.0, 2.0, 1000.0], dtype=torch.float64),)]


check_preference_loss = Check(
    cases=_margins,
    right=preference_loss,
    mistakes=[
        Mistake(
            "log sigmoid of a mean",
            lambda m: -torch.nn.functional.logsigmoid(m.mean()),
            "the margins are averaged first; take the loss of each pair, then the mean (log sigmoid is no straight line)",
        ),
        Mistake(
            "sign flipped",
            lambda m: torch.nn.functional.logsigmoid(m).mean(),
            "the minus is missing: a loss is positive, and small when margins are large",
        ),
        Mistake(
            "chosen and rejected swapped",
            lambda m: -torch.nn.functional.logsigmoid(-m).mean(),
            "the loss grows with the margin; training would then prefer the rejected answers",
        ),
        Mistake(
            "sum instead of mean",
            lambda m: -torch.nn.functional.logsigmoid(m).sum(),
            "the pairs' losses are added up; take the mean, or a larger batch means larger steps",
        ),
        Mistake(
            "not averaged",
            lambda m: -torch.nn.functional.logsigmoid(m),
            "one loss for each pair; training needs one number, their mean",
        ),
        Mistake(
            "log forgotten",
            lambda m: -torch.sigmoid(m).mean(),
            "the log is missing: this is minus the mean probability of the readers' choices",
        ),
        Mistake(
            "log of the mean probability",
            lambda m: -torch.sigmoid(m).mean().log(),
            "the log comes after the mean; take the log for each pair, then the mean",
        ),
        Mistake(
            "overflow",
            lambda m: -torch.sigmoid(m).log().mean(),
            "right for small margins, infinite for a margin of -1000: sigmoid is 0 there before the log sees it; torch has a "
            "function for both steps at once",
        ),
        Mistake(
            "sigmoid forgotten",
            lambda m: -m.mean(),
            "this is minus the mean margin; without the sigmoid there is no end to how large margins are pushed",
        ),
    ],
)


# --- the win rate -----------------------------------------------------------------------------------------------------


def win_rate(p_after: Float[Tensor, " Z"], p_before: Float[Tensor, " Z"], reward: Float[Tensor, " Z"]) -> float:
    """sum over i, j of p_after(i) p_before(j) sigmoid(r_i - r_j), one pair of answers at a time."""
    pairs = [(i, j) for i in range(len(reward)) for j in range(len(reward))]
    return sum(float(p_after[i] * p_before[j] * torch.sigmoid(reward[i] - reward[j])) for i, j in pairs)


def _preference(reward: Tensor) -> Tensor:
    return torch.sigmoid(reward[:, None] - reward[None, :])


def _two_systems() -> list[tuple]:
    g = draws(3)
    return [
        (table(n, generator=g), table(n, generator=g), 2 * torch.randn(n, generator=g, dtype=torch.float64))
        for n in (3, 4)
    ]


check_win_rate = Check(
    cases=_two_systems,
    right=win_rate,
    mistakes=[
        Mistake(
            "before and after swapped",
            lambda a, b, r: b @ _preference(r) @ a,
            "this is how often the *start* wins; the rewards' difference has the wrong sign, or the systems are swapped",
        ),
        Mistake(
            "sigmoid of the mean rewards",
            lambda a, b, r: torch.sigmoid(a @ r - b @ r),
            "the sigmoid of the mean rewards; readers compare two single answers: average the sigmoids",
        ),
        Mistake(
            "no ties",
            lambda a, b, r: a @ (_preference(r) * (1 - torch.eye(len(r), dtype=r.dtype))) @ b,
            "pairs of equal answers are left out; both systems often give the same answer, and that counts one half",
        ),
        Mistake(
            "the same answer from both",
            lambda a, b, r: (a * b * torch.sigmoid(r)).sum(),
            "only pairs with i = j are summed; the two systems answer independently: all pairs (i, j)",
        ),
        Mistake(
            "hard preferences",
            lambda a, b, r: a @ ((r[:, None] > r[None]).double() + torch.eye(len(r), dtype=r.dtype) / 2) @ b,
            "the better answer always wins here; readers prefer it only with probability sigmoid(r_i - r_j)",
        ),
        Mistake(
            "start forgotten",
            lambda a, b, r: a @ _preference(r).mean(1),
            "each answer of the start has the same weight; weigh it by p_before",
        ),
        Mistake(
            "mean over pairs",
            lambda a, b, r: (a[:, None] * b[None, :] * _preference(r)).mean(),
            "a mean over the pairs (i, j); the probabilities already weigh them, so add up",
        ),
    ],
)
