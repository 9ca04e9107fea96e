"""Lesson 03's checks against answers as learners write them: loops, autograd, and slips."""

import math

import pytest
import torch

from sysdpo_lab.coursework.checks import lesson_03, message


def said(check, answer):
    return message(check, answer) or "right"


def optimum(p_ref, reward, beta, tilt=lambda p, r, beta: p * math.exp(r / beta)):
    rows = []
    for start, values in zip(p_ref.tolist(), reward.tolist()):
        row = [tilt(p, r, beta) for p, r in zip(start, values)]
        rows.append([value / sum(row) for value in row])
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (optimum, "right"),
        (lambda p, r, beta: p * (r / beta).exp() / (p * (r / beta).exp()).sum(1, keepdim=True), "right"),
        (lambda p, r, beta: optimum(p, r, 1 / beta), "beta works the wrong way round"),
        (lambda p, r, beta: optimum(torch.ones_like(p), r, beta), "p_ref is missing"),
        (lambda p, r, beta: optimum(p, r, 1.0), "beta is missing"),
        (lambda p, r, beta: optimum(p, -r, beta), "the reward has the wrong sign"),
        (lambda p, r, beta: optimum(p, r, beta, lambda p, r, beta: (p * math.exp(r)) ** (1 / beta)), "divided by beta too"),
        (lambda p, r, beta: optimum(p, r, beta).log(), "these are log-probabilities"),
        (lambda p, r, beta: p + r / beta, "returned"),
    ],
)
def test_optimum(answer, words):
    assert words in said(lesson_03.check_optimum, answer)


def preference(p, p_ref, beta):
    powers = (p / p_ref) ** beta
    return powers[:, :, None] / (powers[:, :, None] + powers[:, None, :])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (preference, "right"),
        (lambda p, q, beta: preference(p, torch.ones_like(q), beta), "the reference is missing"),
        (lambda p, q, beta: preference(p, q, 1.0), "beta is missing"),
        (lambda p, q, beta: preference(p, q, 1 / beta), "the log-ratio is divided by beta"),
        (lambda p, q, beta: 1 - preference(p, q, beta), "that j is preferred to i"),
        (lambda p, q, beta: torch.logit(preference(p, q, beta)), "these are the margins"),
        (lambda p, q, beta: preference(p, 1 / q, beta), "the reference is added"),
    ],
)
def test_implied_preference(answer, words):
    assert words in said(lesson_03.check_implied_preference, answer)


def regularised(p, p_ref, reward, beta, outer=None):
    outer = p if outer is None else outer
    return (p * reward).sum(1) - beta * torch.nn.functional.kl_div(p_ref.log(), outer, reduction="none").sum(1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (regularised, "right"),
        (lambda p, q, r, beta: torch.stack([regularised(*rows, beta) for rows in zip(p[None], q[None], r[None])])[0], "right"),
        (lambda p, q, r, beta: (p * r).sum(1) - beta * (q * (q / p).log()).sum(1), "the KL is the wrong way round"),
        (lambda p, q, r, beta: regularised(p, q, r, -beta), "the distance is added"),
        (lambda p, q, r, beta: regularised(p, q, r, 1), "beta is missing"),
        (lambda p, q, r, beta: regularised(p, q, beta * r, 1), "beta multiplies the reward"),
        (lambda p, q, r, beta: regularised(p, q, r, 0), "the price of distance is missing"),
        (lambda p, q, r, beta: regularised(p, q, r, beta).mean(), "returned"),
    ],
)
def test_regularised_reward(answer, words):
    assert words in said(lesson_03.check_regularised_reward, answer)


def text_margin(pc, pr, rc, rr, beta, reduce=sum):
    pairs = zip(*([[reduce(text.tolist()) for text in texts] for texts in (pc, pr, rc, rr)]))
    return [beta * (a - b - c + d) for a, b, c, d in pairs]


def padded(texts):
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (text_margin, "right"),
        (
            lambda pc, pr, rc, rr, beta: beta * (padded(pc) - padded(rc)).sum(1) - beta * (padded(pr) - padded(rr)).sum(1),
            "right",
        ),
        (lambda *case: text_margin(*case, reduce=lambda text: sum(text) / len(text)), "a mean over the tokens"),
        (lambda *case: text_margin(*case, reduce=lambda text: text[-1]), "only the last token"),
        (lambda *case: text_margin(*case[:4], 1.0), "beta is missing"),
        (lambda pc, pr, rc, rr, beta: text_margin(pr, pc, rr, rc, beta), "the sign is flipped"),
        (lambda pc, pr, rc, rr, beta: text_margin(pc, pr, rr, rc, beta), "the reference's gap is added"),
        # padding counted as tokens: neither the sum nor the mean
        (lambda *case: beta_times_mean_of_padded(*case), "returned"),
    ],
)
def test_text_margin(answer, words):
    assert words in said(lesson_03.check_text_margin, answer)


def beta_times_mean_of_padded(pc, pr, rc, rr, beta):
    return beta * ((padded(pc) - padded(rc)).mean(1) - (padded(pr) - padded(rr)).mean(1))


def gradient(logits, reference, winner, loser, beta, inner=None, loss=lambda m: torch.log1p((-m).exp())):
    """Central differences of the loss."""
    inner = beta if inner is None else inner
    found = []
    for step in 1e-5 * torch.eye(len(logits), dtype=logits.dtype):
        up, down = (logits + step - reference, logits - step - reference)
        found.append((loss(inner * (up[winner] - up[loser])) - loss(inner * (down[winner] - down[loser]))) / 2e-5)
    return torch.stack(found)


def only_winner(logits, reference, winner, loser, beta):
    result = gradient(logits, reference, winner, loser, beta)
    result[loser] = 0
    return result


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (gradient, "right"),
        (lambda a, b, w, lose, beta: -gradient(a, b, w, lose, beta), "the sign is flipped"),
        (lambda a, b, w, lose, beta: gradient(a, b, lose, w, beta), "winner and loser are swapped"),
        (lambda a, b, w, lose, beta: gradient(a, 0 * b, w, lose, beta), "leaves out the reference"),
        (lambda a, b, w, lose, beta: gradient(a, b, w, lose, beta) / beta, "beta is missing in front"),
        (lambda a, b, w, lose, beta: beta * gradient(a, b, w, lose, 1.0), "missing inside the sigmoid's margin"),
        (lambda a, b, w, lose, beta: gradient(a, b, w, lose, beta, loss=lambda m: -m), "with the same force"),
        (lambda a, b, w, lose, beta: gradient(a, b, w, lose, beta, loss=lambda m: -torch.sigmoid(m)), "gradient of the sigmoid"),
        (only_winner, "only the winner's logit moves"),
        (lambda a, b, w, lose, beta: gradient(a, b, w, lose, 1.0), "returned"),
    ],
)
def test_pair_gradient(answer, words):
    assert words in said(lesson_03.check_pair_gradient, answer)
