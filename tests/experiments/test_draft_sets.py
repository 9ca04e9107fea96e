"""Estimators as weights of drafts: against the library's own loss, samplers and training, and against the theory."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from sysdpo_lab import errors, exact, losses, samplers
from sysdpo_lab.experiments import draft_sets
from sysdpo_lab.experiments.draft_sets import ESTIMATORS, RANDOM, Shift, gradients, pair_law, weights
from sysdpo_lab.worlds import draft_laws

COUNT, PAIRS = 3, 12  # systems; ordered pairs of four answers


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def systems():
    return draft_laws.draw("zipf", COUNT, generator())


@pytest.fixture(scope="module")
def shift(systems):
    return Shift.random(systems, 0.7, generator(1))


def moved_case(systems, shift):
    """The library's system with the shifted tables as its policy."""
    case = systems.case()
    with torch.no_grad():
        case.system["y"].logits.copy_(systems.log_y + shift.y)
        case.system["z"].logits.copy_(systems.log_z + shift.z)
    return case


def library(case, values, *, repeats="drop", log_weights=None):
    """losses.sampling_loss of the whole batch of systems: (S,) losses and the gradients of both tables.

    Every ordered pair of answers is a row, weighted by how often the judge prefers its first one.
    """
    count = len(case.reward)
    i, j = (~torch.eye(4).bool()).nonzero().T
    x = torch.arange(count).repeat_interleave(PAIRS)
    i, j = i.repeat(count), j.repeat(count)
    some = None if log_weights is None else log_weights[x]
    out = losses.sampling_loss(
        case.system, {"x": x}, i, j, {"y": values[x]}, case.beta, repeats=repeats, log_weights=some
    )
    preferred = torch.sigmoid(case.preference_logits[x, i, j])
    loss = (-logsigmoid(out.margin) * preferred).reshape(count, PAIRS).sum(1) / (PAIRS / 2)
    tables = [case.system[name].logits for name in ("y", "z")]
    return loss.detach(), *torch.autograd.grad(loss.sum(), tables)


def same(found, expected):
    for ours, theirs in zip((found.loss[0], found.y[0], found.z[0]), expected):
        assert torch.allclose(ours, theirs, atol=1e-13, rtol=1e-10)


# --- parity with the library ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_loss_and_gradient_of_any_weights_are_those_of_the_sampling_loss(systems, shift, estimator):
    policy = shift.policy(systems)
    weight = weights(estimator, policy[0], 3, 1, generator(2))
    everyone = torch.arange(16).expand(COUNT, -1)
    expected = library(moved_case(systems, shift), everyone, log_weights=weight[0].log())
    same(gradients(systems, policy, weight, pair_law(systems)), expected)


@pytest.mark.parametrize("repeats", ["drop", "count"])
def test_sets_of_the_librarys_monte_carlo_give_the_same_loss_with_repeats_dropped_and_counted(systems, shift, repeats):
    case, policy = moved_case(systems, shift), shift.policy(systems)
    found = samplers.monte_carlo(case.system, {"x": torch.arange(COUNT)}, 6, generator=generator(3))
    times = torch.nn.functional.one_hot(found.values["y"], 16).sum(1).double()
    assert times.max() > 1
    weight = times if repeats == "count" else (times > 0).double()
    same(gradients(systems, policy, weight[None], pair_law(systems)), library(case, found.values["y"], repeats=repeats))


def test_importance_weights_are_the_librarys(systems, shift):
    case, policy = moved_case(systems, shift), shift.policy(systems)
    found = samplers.monte_carlo(
        case.system, {"x": torch.arange(COUNT)}, 6, generator=generator(3), weights="importance"
    )
    times = torch.nn.functional.one_hot(found.values["y"], 16).sum(1).double()
    weight = (times / (6 * policy[0]))[None]
    expected = library(case, found.values["y"], log_weights=found.log_weights)
    same(gradients(systems, policy, weight, pair_law(systems)), expected)


def test_horvitz_thompson_weights_follow_the_librarys_law(systems, shift):
    # both are random: compare the mean weight of each draft, and the mean of its square, over many sets
    case, policy = moved_case(systems, shift), shift.policy(systems)
    many = 4000
    x = torch.zeros(many, dtype=torch.long)
    found = samplers.gumbel_top_k(case.system, {"x": x}, 3, generator=generator(4), weights="horvitz_thompson")
    theirs = torch.zeros(many, 16).double().scatter_(1, found.values["y"], found.log_weights.exp())
    ours = weights("gumbel-ht", policy[0], 3, many, generator(5))[:, 0]
    for power in (1, 2):
        a, b = ours.clamp(max=20) ** power, theirs.clamp(max=20) ** power  # rare large weights have no useful variance
        noise = ((a.var(0) + b.var(0)) / many).sqrt()
        assert bool(((a.mean(0) - b.mean(0)).abs() < 4 * noise).all())


def test_dbs_takes_the_drafts_of_the_librarys_diverse_beam(systems, shift):
    case, policy = moved_case(systems, shift), shift.policy(systems)
    for k in (1, 2, 5, 16):
        found = samplers.diverse_beam(case.system, {"x": torch.arange(COUNT)}, k)
        expected = torch.zeros(COUNT, 16).double().scatter_(1, found.values["y"], 1.0)
        assert torch.equal(weights("dbs", policy[0], k, 7, generator())[0], expected)


def test_every_draft_gives_the_population_loss(systems, shift):
    case = moved_case(systems, shift)
    objective = exact.sampling(case.system, case.preference_logits, case.beta, systems=COUNT)
    found = gradients(systems, shift.policy(systems), torch.ones(1, COUNT, 16), pair_law(systems))
    tables = [case.system[name].logits for name in ("y", "z")]
    same(found, (objective.losses().detach(), *torch.autograd.grad(objective(), tables)))


def test_training_with_every_draft_is_the_librarys_training(systems):
    case = systems.case()
    exact.train(case.system, exact.sampling(case.system, case.preference_logits, 0.5, systems=COUNT), steps=30, lr=0.05)
    found = draft_sets.train(systems, "exact", 16, 30, 1, generator())
    assert torch.allclose(found.marginal(systems), exact.marginal(case.system).detach(), atol=1e-9)


# --- which drafts -----------------------------------------------------------------------------------------------------------


def test_monte_carlo_draws_k_and_its_three_kinds_see_the_same_draws(systems):
    p_y = systems.log_y.exp()
    count, drop, importance = (weights(e, p_y, 5, 4, generator(6)) for e in ("mc-count", "mc", "mc-importance"))
    assert count.shape == (4, COUNT, 16) and torch.equal(count.sum(-1), torch.full((4, COUNT), 5.0).double())
    assert torch.equal(drop, (count > 0).double())
    assert torch.allclose(importance * 5 * p_y, count)
    assert len({tuple(row) for row in count[:, 0].tolist()}) > 1


@pytest.mark.parametrize("estimator", ["mc-importance", "gumbel-ht"])
def test_weighted_sets_are_unbiased_for_every_draft(estimator):
    p_y = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).double()
    found = weights(estimator, p_y, 2, 40000, generator(7))[:, 0]
    assert bool(((found.mean(0) - 1).abs() < 4 * found.std(0) / 200).all())


def test_gumbel_includes_two_of_three_with_the_probabilities_of_drawing_without_replacement():
    p = [0.5, 0.3, 0.2]
    found = weights("gumbel", torch.tensor([p]).double(), 2, 40000, generator(8))[:, 0]
    assert torch.equal(found.sum(-1), torch.full((40000,), 2.0).double())
    for i in range(3):
        by_hand = p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i)
        assert found[:, i].mean().item() == pytest.approx(by_hand, abs=0.01)


def test_dbs_takes_the_best_paraphrase_of_each_meaning_before_any_second_one():
    p_y = draft_laws.draft_law("meanings")[None]
    meaning = draft_laws.meaning_of("meanings")

    def taken(k):
        return weights("dbs", p_y, k, 1, generator(), meaning)[0, 0].nonzero().flatten().tolist()

    assert taken(2) == [0, 4] and taken(4) == [0, 4, 8, 12]
    assert taken(5) == [0, 1, 4, 8, 12]  # then the second of the likeliest meaning
    assert taken(16) == list(range(16))
    assert weights("dbs", p_y, 2, 1, generator())[0, 0].nonzero().flatten().tolist() == [
        0,
        1,
    ]  # without meanings: top-k


def test_all_sixteen_drawn_without_replacement_are_exact(systems):
    for estimator in ("gumbel", "gumbel-ht", "dbs"):
        assert bool((weights(estimator, systems.log_y.exp(), 16, 2, generator()) == 1).all())


def test_unknown_estimators_and_sizes_are_named(systems):
    p_y = systems.log_y.exp()
    with pytest.raises(errors.UnknownOptionError, match="estimator='beam'.*'dbs', 'mc'"):
        weights("beam", p_y, 2, 1, generator())
    with pytest.raises(errors.UnknownOptionError, match="k must be a whole number >= 1"):
        weights("mc", p_y, 0, 1, generator())
    with pytest.raises(errors.UnknownOptionError, match="k=17: there are only 16 drafts"):
        weights("mc", p_y, 17, 1, generator())


# --- theory -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_at_the_reference_the_loss_is_log_2_whatever_the_set(systems, estimator):
    start = Shift.none(systems).policy(systems)
    found = gradients(systems, start, weights(estimator, start[0], 2, 3, generator()), pair_law(systems))
    assert torch.allclose(found.loss, torch.full_like(found.loss, 2.0).log())
    assert found.z.abs().max() > 1e-3  # the gradient is what tells sets apart


@pytest.mark.parametrize("estimator", [*RANDOM, "dbs"])
def test_one_draft_teaches_psi1_nothing_at_any_policy(systems, shift, estimator):
    policy = shift.policy(systems)
    found = gradients(systems, policy, weights(estimator, policy[0], 1, 4, generator()), pair_law(systems))
    assert found.y.abs().max() < 1e-16 and found.z.abs().max() > 1e-3
    learned = draft_sets.train(systems, estimator, 1, 20, 2, generator())
    assert learned.y.abs().max() == 0.0 and learned.z.abs().max() > 0.1


def test_a_shared_refiner_has_one_shift_for_all_drafts_and_its_gradient_is_their_sum(systems):
    u = torch.zeros(COUNT, 1, 4, dtype=torch.float64).requires_grad_(True)
    log_y, log_z = systems.log_y + 0.3, torch.log_softmax(systems.log_z + u, -1)
    ratio = torch.logsumexp(log_y[..., None] + log_z, 1) - torch.logsumexp(log_y[..., None] + systems.log_z, 1)
    (expected,) = torch.autograd.grad(pair_law(systems).losses(ratio, 0.5).sum(), u)
    start = Shift.none(systems, shared=True)
    found = gradients(systems, start.policy(systems), torch.ones(1, COUNT, 16), pair_law(systems))
    assert torch.allclose(found.z[0].sum(1, keepdim=True), expected)
    learned = draft_sets.train(systems, "mc", 2, 10, 1, generator(), shared=True)
    assert learned.z.shape == (COUNT, 1, 4) and learned.z.abs().max() > 0.1


def test_training_psi1_alone_leaves_the_refiner(systems):
    learned = draft_sets.train(systems, "mc", 4, 10, 1, generator(), only_y=True)
    assert learned.z.abs().max() == 0.0 and learned.y.abs().max() > 0.1


def test_training_is_repeatable_and_touches_no_global_state(systems):
    before = torch.get_rng_state()
    one, again = (draft_sets.train(systems, "gumbel-ht", 2, 10, 2, generator(3)) for _ in range(2))
    assert torch.equal(one.z, again.z) and torch.equal(one.y, again.y)
    assert torch.equal(torch.get_rng_state(), before)
