"""Lesson 05's checks against answers as learners write them: loops, autograd, and slips."""

import math

import pytest
import torch

from sysdpo_lab.coursework.checks import lesson_05, message


def said(check, answer):
    return message(check, answer) or "right"


def summed(draft, final, each=lambda d, f: math.exp(d + f), after=math.log):
    return [after(sum(each(d, f) for d, f in zip(*rows))) for rows in zip(draft.tolist(), final.tolist())]


def shifted(draft, final):
    """logsumexp by hand, as a careful learner writes it."""
    joint = draft + final
    top = joint.max(1, keepdim=True).values
    return top[:, 0] + (joint - top).exp().sum(1).log()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (shifted, "right"),
        (lambda d, f: torch.stack([torch.logsumexp(a + b, 0) for a, b in zip(d, f)]), "right"),
        (lambda d, f: torch.logaddexp(shifted(d, f), torch.full((len(d),), -torch.inf)), "right"),
        # in plain Python the long texts raise instead of giving -inf
        (summed, "raised ValueError"),
        (lambda d, f: torch.log(torch.exp(d + f).sum(dim=1)), "a long text's probability is 0"),
        (lambda d, f: torch.mean(d + f, dim=1), "a mean of log-probabilities"),
        (lambda d, f: d.sum(1) + f.sum(1), "multiplies alternatives"),
        (lambda d, f: shifted(torch.zeros_like(d), f), "p(a|x) is missing"),
        (lambda d, f: shifted(d, torch.zeros_like(d)), "p(z|x,a) is missing"),
        (lambda d, f: shifted(d, torch.zeros_like(d)) + shifted(torch.zeros_like(d), f), "a product of two sums"),
        (lambda d, f: shifted(d, f) - math.log(d.size(1)), "a mean over the drafts"),
        (lambda d, f: shifted(d, f) - torch.logsumexp(d, 1), "made to sum to 1 within the set"),
        (lambda d, f: torch.max(d + f, dim=1).values, "only the best draft"),
        (lambda d, f: shifted(d.T, f.T), "the sum goes over the pairs"),
        (lambda d, f: shifted(d, f).sum(), "returned"),
    ],
)
def test_log_p_set(answer, words):
    assert words in said(lesson_05.check_log_p_set, answer)


def bayes(draft, final):
    joint = draft + final
    return torch.exp(joint - shifted(draft, final)[:, None])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (bayes, "right"),
        (lambda d, f: torch.softmax(d + f, dim=1), "right"),
        (lambda d, f: bayes(d, torch.zeros_like(f)), "the drafts' own probabilities"),
        (lambda d, f: bayes(torch.zeros_like(d), f), "hardly ever written"),
        (lambda d, f: bayes(d, f).log(), "returned"),  # -inf where the weight underflows: not the mistake's values
        (lambda d, f: (d + f) - shifted(d, f)[:, None], "these are logs of the weights"),
        (lambda d, f: torch.exp(d) * torch.exp(f), "divide by their sum"),
        (lambda d, f: torch.softmax(d + f, 0), "over the pairs"),
        (lambda d, f: (torch.exp(d) * torch.exp(f)) / (torch.exp(d) * torch.exp(f)).sum(1)[:, None], "0 by 0"),
    ],
)
def test_posterior(answer, words):
    assert words in said(lesson_05.check_posterior, answer)


def margin(pc, pr, rc, rr, beta):
    chosen = torch.log(pc.exp().sum(1) / rc.exp().sum(1))
    rejected = torch.log(pr.exp().sum(1) / rr.exp().sum(1))
    return beta * (chosen - rejected)


def weighed(policy, reference):
    weights = policy.exp() / policy.exp().sum(1, keepdim=True)
    return (weights * policy).sum(1) - (weights * reference).sum(1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (margin, "right"),
        (lambda *case: torch.stack([margin(*(part[i : i + 1] for part in case[:4]), case[4])[0] for i in range(len(case[0]))]),
         "right"),
        (lambda pc, pr, rc, rr, beta: beta * (weighed(pc, rc) - weighed(pr, rr)), "the policy's posterior weighs the reference"),
        (lambda pc, pr, rc, rr, beta: beta * ((pc - rc) - (pr - rr)).mean(1), "a mean of the drafts' log-ratios"),
        (lambda pc, pr, rc, rr, beta: beta * ((pc - rc) - (pr - rr)).sum(1), "the drafts' log-ratios are added"),
        (lambda pc, pr, rc, rr, beta: beta * torch.log((pc - rc).exp().sum(1) / (pr - rr).exp().sum(1)), "no ratio of sums"),
        (lambda pc, pr, rc, rr, beta: margin(pc, pr, pc * 0, pr * 0, beta), "the reference is missing"),
        (lambda *case: margin(*case[:4], 1), "beta is missing"),
        (lambda *case: margin(*case[:4], 1 / case[4]), "divided by beta"),
        (lambda pc, pr, rc, rr, beta: margin(pr, pc, rr, rc, beta), "the sign is flipped"),
        (lambda pc, pr, rc, rr, beta: margin(pc, pr, rr, rc, beta), "the reference's gap is added"),
        (lambda pc, pr, rc, rr, beta: margin(*(j[:, :1] for j in (pc, pr, rc, rr)), beta), "returned"),
        (lambda *case: torch.log1p(torch.exp(-margin(*case))), "these are the losses"),
    ],
)  # fmt: skip
def test_set_margin(answer, words):
    assert words in said(lesson_05.check_set_margin, answer)


def by_autograd(chosen, rejected, m, beta, loss=lambda m: torch.log1p((-m).exp())):
    """The gradient at the point where the posteriors are the given ones, through a tiny model with those weights."""
    shift = torch.zeros_like(chosen, requires_grad=True)
    gap = torch.logsumexp(chosen.log() + shift, 0) - torch.logsumexp(rejected.log() + shift, 0)
    return torch.autograd.grad(loss(m + beta * gap), shift)[0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (by_autograd, "right"),
        (
            lambda w, lose, m, beta: [beta * (b - a) / (1 + math.exp(m)) for a, b in zip(w.tolist(), lose.tolist())],
            "right",
        ),
        (lambda w, lose, m, beta: -by_autograd(w, lose, m, beta), "the sign is flipped"),
        (lambda w, lose, m, beta: by_autograd(w, lose, -m, beta), "already right get the larger weight"),
        (lambda w, lose, m, beta: by_autograd(w, lose, m, beta) / beta, "beta is missing in front"),
        (lambda w, lose, m, beta: by_autograd(w, lose, beta * m, beta), "contains beta already"),
        (lambda w, lose, m, beta: -beta * torch.sigmoid(torch.tensor(-m)) * w, "the loser's posterior is missing"),
        (lambda w, lose, m, beta: by_autograd(w, lose, m, beta, loss=lambda m: -m), "with the same force"),
        (
            lambda w, lose, m, beta: by_autograd(w, lose, m, beta, loss=lambda m: -torch.sigmoid(m)),
            "gradient of the sigmoid",
        ),
        (
            lambda w, lose, m, beta: -beta * torch.sigmoid(torch.tensor(-m)) * (w.log() - lose.log()),
            "a difference of logs",
        ),
        (lambda w, lose, m, beta: by_autograd(w, lose, m, 1.0), "beta is missing in front"),
    ],
)
def test_drafter_gradient(answer, words):
    assert words in said(lesson_05.check_drafter_gradient, answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda w: [1 / sum(value**2 for value in row) for row in w.tolist()], "right"),
        (
            lambda w: [math.exp(-sum(v * math.log(v) for v in row if v)) for row in w.tolist()],
            "exponential of the entropy",
        ),
        (lambda w: [-sum(v * math.log(v) for v in row if v) for row in w.tolist()], "this is an entropy"),
        (lambda w: (w * w).sum(1), "one step is missing"),
        (lambda w: (w != 0).sum(1), "a count of the drafts"),
        (lambda w: w.max(1).values ** -1, "only the largest weight"),
        (lambda w: 1 / (w * w).sum(0), "over the pairs"),
        (lambda w: (1 / w**2).sum(1), "returned"),
    ],
)
def test_effective_number(answer, words):
    assert words in said(lesson_05.check_effective_number, answer)


def over(drafts, p_draft, p_final):
    return sum(p_draft[a].item() * p_final[a].item() for a in drafts)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda a, p, f: over(set(a.tolist()), p, f), "right"),
        (lambda a, p, f: p[torch.unique(a)] @ f[torch.unique(a)], "right"),
        (lambda a, p, f: over(a.tolist(), p, f), "counts twice"),
        (lambda a, p, f: over(a.tolist(), p, f) / len(a), "a mean over the draws"),
        (lambda a, p, f: f[a].sum() / len(a), "the usual Monte-Carlo estimate"),
        (lambda a, p, f: over(set(a.tolist()), torch.ones_like(p), f), "p(a) is missing"),
        (
            lambda a, p, f: over(set(a.tolist()), p, f) / sum(p[i].item() for i in set(a.tolist())),
            "the set's own probability",
        ),
        (lambda a, p, f: p @ f, "drafts that were never drawn"),
        # tensors in a Python set are all different
        (lambda a, p, f: sum(p[i] * f[i] for i in set(a)), "counts twice"),
    ],
)
def test_p_of_draws(answer, words):
    assert words in said(lesson_05.check_p_of_draws, answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda t: (int((torch.linalg.svdvals(t) > 1e-9).sum()), min(len(t), len(t[0]))), "right"),
        (lambda t: [torch.linalg.matrix_rank(t), min(t.shape)], "right"),
        (lambda t: (int(torch.linalg.matrix_rank(t)),) * 2, "the rank need not suffice"),
        (lambda t: (min(t.shape),) * 2, "fewer can suffice"),
        (lambda t: (1, min(t.shape)), "one draft makes all rows equal"),
        (lambda t: (int(torch.linalg.matrix_rank(t)), t.shape[-1]), "so is as many as inputs"),
        (lambda t: (min(t.shape), int(torch.linalg.matrix_rank(t))), "in the wrong order"),
        (lambda t: int(torch.linalg.matrix_rank(t)), "returned"),
    ],
)
def test_drafts_needed(answer, words):
    assert words in said(lesson_05.check_drafts_needed, answer)
