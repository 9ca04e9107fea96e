"""Lesson 02's checks against answers as learners write them: loops, numpy-like detours, and slips."""

import math

import pytest
import torch

from sysdpo_lab.coursework.checks import lesson_02, message


def said(check, answer):
    return message(check, answer) or "right"


def odds(pref, beta):
    return pref ** (1 / beta) / (1 - pref) ** (1 / beta)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (odds, "right"),
        (lambda pref, beta: math.exp(torch.logit(torch.tensor(pref, dtype=torch.float64)).item() / beta), "right"),
        (lambda pref, beta: pref**beta / (1 - pref) ** beta, "beta works the wrong way round"),
        (lambda pref, beta: 1 / odds(pref, beta), "odds of z2 against z1"),
        (lambda pref, beta: math.exp(math.log(pref) / beta), "a preference is no odds"),
        (lambda pref, beta: odds(pref, beta) / (1 + odds(pref, beta)), "this is p(z1) of two answers"),
        (lambda pref, beta: odds(pref, 1), "beta is missing"),
        (lambda pref, beta: odds(pref, beta) + 1, "returned 17, expected 16"),
    ],
)
def test_odds(answer, words):
    assert words in said(lesson_02.check_perfect_odds, answer)


def gap_by_loops(p, judge, beta, reduce=max, log=math.log, absolute=abs):
    inputs, answers = p.shape
    return reduce(
        absolute(judge[x, i, j].item() - beta * (log(p[x, i].item()) - log(p[x, j].item())))
        for x in range(inputs)
        for i in range(answers)
        for j in range(answers)
    )


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (gap_by_loops, "right"),
        # both orders of a pair are looked at, so the sign does not matter for the largest
        (lambda p, judge, beta: gap_by_loops(p, judge, beta, absolute=float), "right"),
        (lambda p, judge, beta: gap_by_loops(p, judge, beta, reduce=mean), "a mean over the pairs"),
        (lambda p, judge, beta: gap_by_loops(p, judge, beta, reduce=sum), "are added up"),
        (lambda p, judge, beta: gap_by_loops(p, judge, 1), "beta is missing"),
        (lambda p, judge, beta: gap_by_loops(p, judge, beta, log=float), "differences of probabilities"),
        (lambda p, judge, beta: gap_by_loops(p, judge.transpose(1, 2), beta), "i and j are swapped"),
        (lambda p, judge, beta: beta * gap_by_loops(p, judge / beta, 1), "right"),
        (lambda p, judge, beta: gap_by_loops(p, beta * judge, 1), "beta multiplies the judge here"),
    ],
)
def test_gap(answer, words):
    assert words in said(lesson_02.check_largest_gap, answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        # any answer will do as the zero of the rewards, since the judge has no circles
        (lambda judge, beta: torch.softmax(judge[:, :, 0] / beta, -1), "right"),
        (lambda judge, beta: torch.softmax(-judge[:, 1] / beta, -1), "right"),
        (lambda judge, beta: torch.softmax(judge[:, 0] / beta, -1), "the mean goes over the wrong answers"),
        (lambda judge, beta: torch.softmax(judge[:, :, 0] * beta, -1), "beta works the wrong way round"),
        (lambda judge, beta: torch.softmax(judge[:, :, 0], -1), "beta is missing"),
        (lambda judge, beta: torch.softmax(judge.sum(2) / beta, -1), "a sum over the other answers"),
        (lambda judge, beta: torch.sigmoid(judge.mean(2) / beta), "returned"),
    ],
)
def test_perfect_system(answer, words):
    assert words in said(lesson_02.check_perfect_system, answer)


def pairs(p, judge, both=True):
    for x in range(len(p)):
        for i in range(p.shape[1]):
            for j in range(p.shape[1]):
                if i != j and (both or i < j):
                    yield math.log(p[x, i] / p[x, j]), judge[x, i, j].item()


def slope(p, judge, both=True):
    found = list(pairs(p, judge, both))
    return sum(d * logit for d, logit in found) / sum(d * d for d, _ in found)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (slope, "right"),
        (lambda p, judge: slope(p, judge, both=False), "right"),
        (lambda p, judge: mean(logit / d for d, logit in pairs(p, judge)), "a mean of the quotients"),
        (lambda p, judge: slope(p, -judge), "the sign is flipped"),
        (lambda p, judge: mean(slope(p[x : x + 1], judge[x : x + 1]) for x in range(len(p))), "a mean of one slope"),
        (
            lambda p, judge: sum(d * logit for d, logit in pairs(p, judge)) / sum(logit**2 for _, logit in pairs(p, judge)),
            "the slope of the log-odds on the logits",
        ),
        (lambda p, judge: slope(p, torch.sigmoid(judge)), "returned"),
    ],
)
def test_fitted_beta(answer, words):
    assert words in said(lesson_02.check_fitted_beta, answer)


def cycle_by_triangles(judge):
    """C_ij = mean over k of L_ij + L_jk + L_ki: what is left of a trip i -> j -> k -> i."""
    return (judge[:, :, :, None] + judge[:, None, :, :] + judge.transpose(1, 2)[:, :, None, :]).mean(3)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (cycle_by_triangles, "right"),
        (lambda judge: judge - cycle_by_triangles(judge), "the part that a reward explains"),
        (lambda judge: judge - (judge.mean(1)[:, :, None] - judge.mean(1)[:, None, :]), "the reward has the wrong sign"),
        (lambda judge: judge - (judge[:, :, :1] - judge[:, None, :, 0]), "with answer 0 only"),
        (lambda judge: judge - judge.mean(2, keepdim=True), "only phi_i is taken away"),
        (lambda judge: judge, "returned"),
    ],
)
def test_cyclic_part(answer, words):
    assert words in said(lesson_02.check_cyclic_part, answer)
