"""The population objectives against the library's own losses, pair by pair; Separate-DPO against a loop."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from sysdpo_lab import CompoundSystem, errors, exact, losses, samplers
from sysdpo_lab.components import Categorical, Tool
from tests import exact_systems as es
from tests import random_systems as rs

BETA = 0.7


def judge_of(system, seed=0):
    return es.bradley_terry(es.normal(es.seeded(seed), *exact.marginal(system).shape))


def gradients(system, loss):
    return torch.autograd.grad(loss, system.trainable_parameters(), allow_unused=True)


@pytest.mark.parity
@pytest.mark.parametrize("system", [rs.chain(), rs.chain(skip=True, seed=3), rs.collider()], ids=["chain", "skip", "collider"])
def test_sampling_is_the_mean_of_the_librarys_loss_over_all_comparisons(system):
    logits = judge_of(system)
    x, i, j = exact.all_pairs(*logits.shape[:2])
    sets = samplers.enumerate_all(system, {"x": x})
    margin = losses.sampling_loss(system, {"x": x}, i, j, sets.values, BETA).margin
    expected = exact.population_loss(margin, logits[x, i, j])
    found = exact.sampling(system, logits, BETA)()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    for one, other in zip(gradients(system, found), gradients(system, expected)):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@pytest.mark.parity
@pytest.mark.parametrize("law", ["reference", "uniform"])
def test_direct_is_the_weighted_mean_of_the_librarys_loss_over_all_pairs_of_traces(law):
    system = rs.collider()
    logits, grid = judge_of(system), exact.Joint(system)
    expected = 0.0
    for x in range(2):
        pairs = [p for p in itertools.combinations(range(grid.states), 2) if grid.answer[p[0]] != grid.answer[p[1]]]
        first, second = torch.tensor(pairs).T
        sides = [{"x": torch.full((len(s),), x), **{n: grid.value(n)[s] for n in grid.names}} for s in (first, second)]
        margin = losses.direct_loss(system, *sides, BETA).margin
        nu = grid.log_reference.exp()[x] if law == "reference" else torch.ones(grid.states).double()
        weight = nu[first] * nu[second] / (nu[first] * nu[second]).sum()
        p = torch.sigmoid(logits[x, grid.answer[first], grid.answer[second]])
        expected = expected - (weight * (p * logsigmoid(margin) + (1 - p) * logsigmoid(-margin))).sum() / 2
    found = exact.direct(system, logits, BETA, law)()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    for one, other in zip(gradients(system, found), gradients(system, expected)):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_separate_draws_the_refiners_draft_from_the_reference():
    """By a loop over inputs, drafts and pairs."""
    system = rs.chain(skip=True, seed=5)
    logits = judge_of(system)
    y, z = ([system[n].probabilities(flag).detach() for flag in (False, True)] for n in ("y", "z"))
    total = 0.0
    for x in range(2):
        for i, j in itertools.combinations(range(3), 2):
            p = torch.sigmoid(logits[x, i, j]).item()

            def expected(gap, p=p):
                return -(p * math.log(1 / (1 + math.exp(-BETA * gap))) + (1 - p) * math.log(1 / (1 + math.exp(BETA * gap))))

            total += expected((y[0][x, i] / y[1][x, i]).log().item() - (y[0][x, j] / y[1][x, j]).log().item()) / 6
            for a in range(3):
                ratio = (z[0][x, a] / z[1][x, a]).log()
                total += y[1][x, a].item() * expected((ratio[i] - ratio[j]).item()) / 6
    assert exact.separate(system, logits, BETA, ["y"])().item() == pytest.approx(total, abs=1e-12)


def test_separate_gives_the_middle_of_a_chain_its_parents_from_the_reference():
    """x -> a -> b -> z, answers b and z only: a gets no gradient, b's parent a is weighed by the reference."""
    g = es.seeded(0)
    parts = [Categorical("a", {"x": 1}, 2, es.soft(g, 1, 2), reference=[[0.9, 0.1]])]
    parts += [Categorical(n, {p: s}, 3, es.soft(g, s, 3), es.soft(g, s, 3)) for n, p, s in (("b", "a", 2), ("z", "b", 3))]
    system = CompoundSystem(parts)
    logits = judge_of(system)
    b = [system["b"].probabilities(flag).detach() for flag in (False, True)]
    law = exact.final_pairs(logits)
    own = sum(w * law.losses((b[0] / b[1]).log()[a : a + 1], BETA).sum() for a, w in enumerate((0.9, 0.1)))
    start = exact.joint_marginal(system, ["b"], reference=True)[0]
    z = [system["z"].probabilities(flag).detach() for flag in (False, True)]
    last = sum(w * law.losses((z[0] / z[1]).log()[v : v + 1], BETA).sum() for v, w in enumerate(start))
    loss = exact.separate(system, logits, BETA, ["b"])()
    torch.testing.assert_close(loss.detach(), own + last, rtol=0, atol=1e-12)
    assert torch.autograd.grad(loss, system["a"].logits, allow_unused=True) == (None,)


def test_separate_on_traces_adds_one_sigmoid_a_component():
    system = rs.chain(skip=True)
    logits, grid = judge_of(system), exact.Joint(system)
    law = exact.trace_pairs(grid, logits)
    parts = [law.losses(grid.log_prob(names=[n]) - grid.log_prob(True, [n]), BETA).sum() for n in ("y", "z")]
    torch.testing.assert_close(exact.separate_traces(system, logits, BETA)(), sum(parts))
    one = CompoundSystem([Categorical("z", {"x": 2}, 3, rs.table(0, 2, 3), rs.table(1, 2, 3))])
    torch.testing.assert_close(exact.separate_traces(one, judge_of(one), BETA)(), exact.direct(one, judge_of(one), BETA)())


@pytest.mark.parametrize("variant", ["direct", "sampling"])
def test_each_loss_starts_at_log_two_whatever_the_pairs(variant):
    system = rs.chain(moved=False)
    for law in ("reference", "uniform"):
        assert getattr(exact, variant)(system, judge_of(system), BETA, law)().item() == pytest.approx(math.log(2), abs=1e-12)


def test_stacked_losses_are_the_sum_of_the_members():
    systems = [rs.chain(seed=s) for s in (0, 1, 2)]
    judges = [judge_of(s, seed) for seed, s in enumerate(systems)]
    for variant in (exact.direct, exact.sampling):
        alone = [variant(s, judge, BETA)() for s, judge in zip(systems, judges)]
        together = variant(exact.stack(systems), torch.cat(judges), BETA, systems=3)
        torch.testing.assert_close(together(), sum(alone))
        torch.testing.assert_close(exact.by_member(together.losses(), 3).sum(1), torch.stack(alone))


def test_structural_zeros_and_tools_have_finite_losses_and_gradients():
    y = Categorical("y", {"x": 1}, 3, [[0.5, 0.5, 0.0]])
    z = Categorical("z", {"t": 2}, 3, [[0.5, 0.5, 0.0], [0.2, 0.8, 0.0]])
    system = CompoundSystem([y, Tool("t", ["y"], lambda v: v % 2, cardinality=2), z])
    logits = es.bradley_terry(es.f64([[0.0, 1.0, 2.0]]))
    for variant in (exact.direct, exact.sampling):
        loss = variant(system, logits, BETA)
        before = loss().item()
        exact.train(system, loss, 50)
        assert math.isfinite(loss().item()) and loss().item() < before
        assert torch.isneginf(system["y"].logits[0, 2]) and not torch.isnan(system["z"].logits).any()


def test_a_policy_that_lost_what_is_compared_is_named():
    gone = Categorical("z", {"x": 1}, 2, [[1.0, 0.0]], reference=[[0.5, 0.5]])
    with pytest.raises(errors.NoMarginError, match="input 0: the policy cannot make {'z': 1}, which the reference can"):
        exact.direct(CompoundSystem([gone]), es.bradley_terry(es.GOOD), BETA)
    with pytest.raises(errors.NoMarginError, match="cannot make {'z': 1}"):
        exact.sampling(CompoundSystem([gone]), es.bradley_terry(es.GOOD), BETA)
    system = rs.chain()
    loss = exact.direct(system, judge_of(system), BETA)
    with torch.no_grad():
        system["y"].logits[0, 0] = -math.inf
    with pytest.raises(errors.NonFiniteError, match="step 0: the loss is"):
        exact.train(system, loss, 1)


def test_a_draft_of_another_size_cannot_be_an_answer():
    system = rs.chain(drafts=4)
    with pytest.raises(errors.CardinalityError, match="'y' cannot stand for an answer"):
        exact.separate(system, judge_of(system), BETA, ["y"])


@pytest.mark.parametrize("variant", [exact.direct, exact.sampling])
def test_beta_must_be_positive(variant):
    with pytest.raises(errors.UnknownOptionError, match="beta must be"):
        variant(rs.chain(), judge_of(rs.chain()), -1.0)
