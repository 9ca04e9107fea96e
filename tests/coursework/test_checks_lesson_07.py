"""Lesson 07's checks against answers as learners write them: loops, counting, and slips."""

import math

import pytest
import torch

from sysdpo_lab.coursework.checks import lesson_07, message


def said(check, answer):
    return message(check, answer) or "right"


def soft(margin):
    return math.log1p(math.exp(-margin))


def separate(gaps, beta):
    return sum(sum(soft(beta * gap) for gap in row) / len(row) for row in gaps.tolist())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (separate, "right"),
        (lambda gaps, beta: sum(torch.nn.functional.softplus(-beta * row).mean() for row in gaps), "right"),
        (lambda gaps, beta: separate(gaps.sum(0, keepdim=True), beta), "added under one sigmoid"),
        (lambda gaps, beta: separate(gaps, beta) / len(gaps), "a mean over components"),
        (lambda gaps, beta: separate(gaps, 1.0), "beta is missing"),
        (lambda gaps, beta: separate(-gaps, beta), "the sign under the sigmoid is flipped"),
        (lambda gaps, beta: separate(gaps, beta) * gaps.shape[1], "the pairs are added up too"),
        (lambda gaps, beta: sum(soft(beta * row.mean().item()) for row in gaps), "averaged before the log sigmoid"),
        (lambda gaps, beta: torch.tensor([separate(row[None], beta) for row in gaps]), "add them up to one number"),
    ],
)
def test_separate_loss(answer, words):
    assert words in said(lesson_07.check_separate_loss, answer)


def refiner(p_y, p_y_ref, p_z, p_z_ref, winner, loser, beta, weights=None):
    total = 0.0
    for y, weight in enumerate(p_y_ref if weights is None else weights):
        gap = math.log(p_z[y, winner] / p_z_ref[y, winner]) - math.log(p_z[y, loser] / p_z_ref[y, loser])
        total += weight * soft(beta * gap)
    return total


def pooled(p_y, p_y_ref, p_z, p_z_ref, winner, loser, beta):
    """The joint loss by mistake: one number a side, summed over drafts."""
    side = {z: math.log((p_y @ p_z[:, z]) / (p_y_ref @ p_z_ref[:, z])) for z in (winner, loser)}
    return soft(beta * (side[winner] - side[loser]))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refiner, "right"),
        (lambda p, *rest: refiner(p, *rest, weights=p), "weighed by the policy"),
        (lambda p, q, *rest: refiner(p, q, *rest, weights=[1 / len(q)] * len(q)), "all drafts count alike"),
        (lambda p, q, *rest: refiner(p, q, *rest, weights=[1] * len(q)), "added without weights"),
        (lambda p, q, a, b, w, lose, beta: refiner(p, q, a, b, lose, w, beta), "winner and loser are swapped"),
        (lambda p, q, a, b, w, lose, beta: refiner(p, q, a, b, w, lose, 1.0), "beta is missing"),
        (
            lambda p, q, a, b, w, lose, beta: refiner(p, q, a, torch.ones_like(b), w, lose, beta),
            "own reference is missing",
        ),
        (pooled, "which is SysDPO-Sampling"),
    ],
)
def test_refiner_loss(answer, words):
    assert words in said(lesson_07.check_refiner_loss, answer)


def recoded(p_y, p_z, code):
    order = code.tolist()
    return torch.stack([p_y[:, old] for old in order], 1), torch.stack([p_z[:, old] for old in order], 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (recoded, "right"),
        (lambda p, q, code: list(recoded(p, q, code)), "right"),
        (lambda p, q, code: (recoded(p, q, code)[0], q), "only the drafter's table is permuted"),
        (lambda p, q, code: (p, recoded(p, q, code)[1]), "only the refiner's table is permuted"),
        (lambda p, q, code: (p[:, code], q[..., code]), "the answers are permuted"),
        (lambda p, q, code: recoded(p, q, torch.argsort(code)), "the code read backwards"),
        (lambda p, q, code: (p[:, code], q[:, torch.argsort(code)]), "in opposite directions"),
        (lambda p, q, code: recoded(p, q, code)[0], "returned"),
    ],
)
def test_recode(answer, words):
    assert words in said(lesson_07.check_recode, answer)


def credit(p, reward, beta):
    return [beta * math.log(sum(a * math.exp(r / beta) for a, r in zip(row, reward.tolist()))) for row in p.tolist()]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (credit, "right"),
        (lambda p, r, beta: (p * r).sum(1), "the expected reward of the reference's answers"),
        (lambda p, r, beta: credit(p, r, 1.0), "beta is missing; your credit"),
        (lambda p, r, beta: torch.tensor(credit(p, r, beta)) / beta, "beta in front"),
        (lambda p, r, beta: credit(p, r, 1 / beta), "beta works the wrong way round"),
        (lambda p, r, beta: credit(p.T, r, beta), "returned"),
        (lambda p, r, beta: r.clone(), "what Separate assumes"),
        (lambda p, r, beta: (p * (r / beta).exp()).sum(1), "this is Z(y)"),
    ],
)
def test_draft_credit(answer, words):
    assert words in said(lesson_07.check_draft_credit, answer)


def objective(p_y, p_z, q_y, q_z, reward, beta):
    answers, start = (
        [sum(a * row[z] for a, row in zip(y, t)) for z in range(len(reward))] for y, t in ((p_y, p_z), (q_y, q_z))
    )
    gain = sum(p * r for p, r in zip(answers, reward))
    return gain - beta * sum(p * math.log(p / q) for p, q in zip(answers, start))


def joint_price(p_y, p_z, q_y, q_z, reward, beta):
    drafts = (p_y * (p_y / q_y).log()).sum()
    given = (p_y[:, None] * p_z * (p_z / q_z).log()).sum()
    return p_y @ p_z @ reward - beta * (drafts + given)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (objective, "right"),
        (joint_price, "the KL of drafts and answers together"),
        (lambda *case: objective(*case[:5], 1.0), "beta is missing"),
        (lambda *case: objective(*case[:5], -case[5]), "the distance is added"),
        (lambda *case: objective(*case[:5], 0.0), "the price of distance is missing"),
        (lambda p, pz, q, qz, r, beta: objective(q, pz, q, qz, r, beta), "behind the reference's drafts"),
        (
            lambda p, pz, q, qz, r, beta: p @ pz @ r - beta * (q @ qz * (q @ qz / (p @ pz)).log()).sum(),
            "the KL is the wrong way round",
        ),
    ],
)
def test_system_objective(answer, words):
    assert words in said(lesson_07.check_system_objective, answer)


def judged(first, second, tie=0.5, turn=True):
    score = 0.0
    for a, b in zip(first.tolist(), second.tolist()):
        wins = int(a) + int(not b if turn else b)
        score += {0: 0.0, 1: tie, 2: 1.0}[wins]
    return score / len(first)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (judged, "right"),
        (lambda a, b: judged(a, b, tie=0.0), "ties count as losses"),
        (lambda a, b: judged(a, b, tie=1.0), "ties count as wins"),
        (lambda a, b: judged(a, b, turn=False), "there it wins when the judge did *not* choose the first"),
        (lambda a, b: sum(a.tolist()) / len(a), "only the first order is used"),
        (lambda a, b: 1 - sum(b.tolist()) / len(b), "only the second order is used"),
        (lambda a, b: 1 - judged(a, b), "the opponent's win rate"),
        (
            lambda a, b: ((a & ~b).sum() / (a != b).sum()).item(),
            "left out of the denominator",
        ),
    ],
)
def test_judged_win_rate(answer, words):
    assert words in said(lesson_07.check_judged_win_rate, answer)


def searched(p, q, factor=1.96, arms=(True, True)):
    """By trying n = 1, 2, 3 ..."""
    spread = arms[0] * p * (1 - p) + arms[1] * q * (1 - q)
    n = 1
    while abs(p - q) < factor * math.sqrt(spread / n):
        n += 1
    return n


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (searched, "right"),
        (lambda p, q: searched(p, q, arms=(True, False)), "only the first rate's variance"),
        (lambda p, q: searched(p, q, arms=(False, True)), "only the second rate's variance"),
        (lambda p, q: searched(p, q, factor=1.0), "the factor 1.96 is missing"),
        (lambda p, q: searched(p, q, factor=math.sqrt(1.96)), "1.96 is not squared"),
        (lambda p, q: searched(p, q) - 1, "rounded down"),
        (lambda p, q: 3.8416 * (p - p * p + q - q * q) / (p - q) ** 2, "no fractions"),
        (lambda p, q: 100, "returned 100"),
    ],
)
def test_instructions_needed(answer, words):
    assert words in said(lesson_07.check_instructions_needed, answer)
