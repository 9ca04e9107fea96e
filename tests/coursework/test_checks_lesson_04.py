"""Lesson 04's checks against answers as learners write them: loops, enumeration, the library, and slips."""

import itertools
import math

import pytest
import torch

from sysdpo_lab import CompoundSystem, exact
from sysdpo_lab.components import Categorical
from sysdpo_lab.coursework.checks import lesson_04, message


def said(check, answer):
    return message(check, answer) or "right"


def shares(pc, pr, rc, rr, text=sum, combine=lambda a, b, c, d: a - b - (c - d)):
    """Row by row, token by token."""
    found = {}
    for name in pc:
        rows = zip(*(side[name].tolist() for side in (pc, rc, pr, rr)))
        found[name] = [combine(*(text(row) for row in sides)) for sides in rows]
    return found


def renamed(pc, *others):
    return dict(zip(reversed(list(pc)), shares(pc, *others).values()))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (shares, "right"),
        (lambda pc, pr, rc, rr: {n: pc[n].sum(1) - rc[n].sum(1) - pr[n].sum(1) + rr[n].sum(1) for n in pc}, "right"),
        (lambda *sides: shares(*sides, text=lambda row: sum(row) / len(row)), "a mean over the tokens"),
        (lambda *sides: shares(*sides, combine=lambda a, b, c, d: a - c), "the reference is missing"),
        (lambda pc, pr, rc, rr: shares(pr, pc, rr, rc), "the sign is flipped"),
        (lambda *sides: shares(*sides, combine=lambda a, b, c, d: a - b + c - d), "the two log-ratios are added"),
        (lambda *sides: shares(*sides, combine=lambda a, b, c, d: a - b), "only the chosen trace"),
        (lambda pc, pr, rc, rr: shares(pc, pr, rr, rc), "the reference's gap is added"),
        (
            lambda *sides: shares(*sides, combine=lambda a, b, c, d: math.exp(a - b) - math.exp(c - d)),
            "probability ratios",
        ),
        (lambda *sides: torch.tensor(list(shares(*sides).values())).sum(0), "the whole log-ratio gap"),
        (lambda *sides: {name: sum(row) for name, row in shares(*sides).items()}, "all pairs are added up"),
        (lambda *sides: list(shares(*sides).values()), "expected a dict"),
        (renamed, "returned"),
    ],
)
def test_component_shares(answer, words):
    assert words in said(lesson_04.check_component_shares, answer)


def loss(shares, beta, rows=lambda values: sum(values) / len(values)):
    margins = [beta * sum(row) for row in zip(*(share.tolist() for share in shares.values()))]
    return rows([math.log1p(math.exp(-m)) for m in margins])


def each_component(shares, beta):
    return sum(loss({name: share}, beta) for name, share in shares.items())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (loss, "right"),
        (lambda shares, beta: torch.nn.functional.softplus(-beta * sum(shares.values())).mean(), "right"),
        (
            lambda shares, beta: loss({n: s.mean()[None] for n, s in shares.items()}, beta),
            "averaged before the log sigmoid",
        ),
        (lambda shares, beta: loss(shares, 1.0), "beta is missing"),
        (lambda shares, beta: loss(shares, 1 / beta), "the gap is divided by beta"),
        (each_component, "Separate-DPO"),
        (lambda shares, beta: loss(shares, beta / len(shares)), "averaged over components"),
        (lambda shares, beta: loss(shares, -beta), "the sign of the margin is flipped"),
        (lambda shares, beta: loss(shares, beta, sum), "a sum over pairs"),
        (lambda shares, beta: loss(shares, beta, list), "one loss a pair"),
        (lambda shares, beta: -loss(shares, beta), "log-likelihood"),
        (lambda shares, beta: beta * loss(shares, 1.0), "returned"),
    ],
)
def test_traces_loss(answer, words):
    assert words in said(lesson_04.check_traces_loss, answer)


def joint(p_y, p_z, reward, beta):
    """The tilted joint, number by number."""
    found = torch.zeros_like(p_z)
    for x, y, z in itertools.product(*map(range, p_z.shape)):
        found[x, y, z] = p_y[x, y] * p_z[x, y, z] * math.exp(reward[x, z] / beta)
    return found / found.sum((1, 2), keepdim=True)


def draft(p_y, p_z, reward, beta, value=lambda p, r, beta: (p * (r / beta).exp()).sum()):
    """h of each draft by a loop, then normalised."""
    rows = []
    for x in range(len(p_y)):
        row = torch.stack([p_y[x, y] * value(p_z[x, y], reward[x], beta) for y in range(p_y.shape[1])])
        rows.append(row / row.sum())
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (draft, "right"),
        (lambda *case: joint(*case).sum(2), "right"),
        (lambda y, z, r, beta: exact.h_transform(lesson_04.chain(y, z), r, beta)[0].kernel, "right"),
        (lambda y, z, r, beta: draft(torch.ones_like(y), z, r, beta), "p_ref(y|x) is missing"),
        (lambda y, z, r, beta: draft(y, z, r, beta, lambda p, r, beta: ((p * r).sum() / beta).exp()), "pays for luck"),
        (lambda y, z, r, beta: draft(y, z, r, 1 / beta), "beta works the wrong way round"),
        (lambda y, z, r, beta: draft(y, z, r, 1.0), "beta is missing"),
        (lambda y, z, r, beta: draft(y, z, r, beta, lambda p, r, beta: p[r.argmax()]), "only the best output"),
        (lambda y, z, r, beta: (y[..., None] * z * (r / beta).exp()[:, None]).sum(2), "the rows do not sum to 1"),
        (lambda y, z, r, beta: (z * (r / beta).exp()[:, None]).sum(2), "this is h(x, y)"),
        (lambda *case: joint(*case).sum(1), "returned"),
    ],
)
def test_tilted_draft(answer, words):
    assert words in said(lesson_04.check_tilted_draft, answer)


def bayes(prior, likelihood):
    product = torch.einsum("xy,xyz->xyz", prior, likelihood)
    return product / product.sum(1)[:, None]


def refiner(p_z, reward, beta):
    return torch.softmax(p_z.log() + reward[:, None] / beta, 2)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda y, z, r, beta: joint(y, z, r, beta) / joint(y, z, r, beta).sum(1, keepdim=True), "right"),
        (lambda y, z, r, beta: bayes(y, z), "right"),  # whoever saw it may leave the reward out
        (lambda y, z, r, beta: bayes(draft(y, z, r, beta), refiner(z, r, beta)), "right"),
        (lambda y, z, r, beta: bayes(draft(y, z, r, beta), z), "the drafter is the optimum's"),
        (lambda y, z, r, beta: bayes(y, refiner(z, r, beta)), "the refiner is the optimum's"),
        (joint, "divide by p*(z | x)"),
        (lambda y, z, r, beta: refiner(z, r, beta), "p*(z | x, y), the refiner"),
        (lambda y, z, r, beta: bayes(torch.ones_like(y), z), "p(y | x) is missing"),
        (lambda y, z, r, beta: bayes(y, z).transpose(1, 2), "returned"),
    ],
)
def test_aligned_posterior(answer, words):
    assert words in said(lesson_04.check_aligned_posterior, answer)


def every_rectangle(Z, value=lambda a, b, c, d: math.log(a * d / (b * c)), pick=max):
    """All pairs of rows and of columns, both ways round."""
    found = []
    for table in Z.tolist():
        values = []
        for top, bottom in itertools.permutations(table, 2):
            for i, j in itertools.permutations(range(len(top)), 2):
                values.append(value(top[i], top[j], bottom[i], bottom[j]))
        found.append(pick(values))
    return found


def neighbours(Z):
    log_z = Z.log()
    corners = log_z[:, :-1, :-1] + log_z[:, 1:, 1:] - log_z[:, 1:, :-1] - log_z[:, :-1, 1:]
    return corners.abs().flatten(1).amax(1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (every_rectangle, "right"),
        (lambda Z: every_rectangle(Z, lambda a, b, c, d: a * d / (b * c)), "this is the cross ratio itself"),
        (lambda Z: every_rectangle(Z, lambda a, b, c, d: a + d - b - c), "a *sum* a(y1) + b(y2)"),
        (lambda Z: every_rectangle(Z, lambda a, b, c, d: a * d - b * c), "these are determinants"),
        (lambda Z: every_rectangle(Z, pick=min), "the smallest log cross ratio"),
        (lambda Z: max(every_rectangle(Z)), "the largest over all inputs"),
        (lambda Z: (Z[:, 0, 0] * Z[:, 1, 1] / (Z[:, 0, 1] * Z[:, 1, 0])).log().abs(), "only the first two rows"),
        (lambda Z: [math.log(max(sum(t, [])) / min(sum(t, []))) for t in Z.tolist()], "how far Z varies at all"),
        (neighbours, "returned"),
    ],
)
def test_largest_log_cross_ratio(answer, words):
    assert words in said(lesson_04.check_largest_log_cross_ratio, answer)


def by_hand(p_y1, p_y2, p_z, parents=("y1", "x"), start=None, first=None):
    """The system from tables, with the parents in another order than the library's."""
    x, a, b, z = p_z.shape
    sizes = {"x": x, "y1": a}
    table = p_y2.expand(a, x, b) if start is None else start(p_y2, a)
    second = Categorical("y2", {name: sizes[name] for name in parents}, b, table)
    first = Categorical("y1", {"x": x}, a, p_y1) if first is None else first(p_y1)
    return CompoundSystem([Categorical("z", {"x": x, "y1": a, "y2": b}, z, p_z), second, first], output="z")


def moved(p_y1, p_y2, p_z):
    """The policy as asked, but the frozen start is uniform."""
    system = lesson_04.repaired(p_y1, p_y2, p_z)
    with torch.no_grad():
        system["y2"].reference_logits.zero_()
    return system


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (by_hand, "right"),
        (lambda *tables: by_hand(*tables, parents=("x",), start=lambda p, a: p), "still the collider"),
        (
            lambda *tables: by_hand(*tables, parents=("y1",), start=lambda p, a: p.mean(0).repeat(a, 1)),
            "y2 reads y1 but no longer x",
        ),
        (lambda *tables: by_hand(*tables, start=lambda p, a: None), "y2 starts uniform"),
        (moved, "returned"),
        (lambda *tables: tables, "cannot be used"),
    ],
)
def test_repaired(answer, words):
    assert words in said(lesson_04.check_repaired, answer)


def test_the_repaired_collider_holds_what_the_collider_cannot():
    for tables in lesson_04.check_repaired.cases():
        inputs, outputs = tables[2].shape[0], tables[2].shape[-1]
        reward = torch.randn(inputs, outputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert not exact.holds_direct(lesson_04._collider(*tables), reward, 0.5)
        assert exact.holds_direct(lesson_04.repaired(*tables), reward, 0.5)
