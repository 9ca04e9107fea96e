"""Training on tables: what moves, what a step costs, and that minima are minima."""

import time

import pytest
import torch

from sysdpo_lab import CompoundSystem, errors, exact
from sysdpo_lab.components import Categorical
from tests import exact_systems as es
from tests import random_systems as rs

JUDGE = es.bradley_terry(es.f64([[0.0, 1.0, 2.0], [1.0, -1.0, 0.0]]))


def snapshot(system):
    return {name: system[name].logits.detach().clone() for name in system.order}


@pytest.mark.parametrize(("only", "moved"), [(None, {"y", "z"}), ("y", {"y"}), (["z"], {"z"})])
def test_only_the_named_components_move(only, moved):
    system = rs.chain()
    before = snapshot(system)
    exact.train(system, exact.sampling(system, JUDGE, 0.5), steps=3, only=only)
    assert {name for name, logits in snapshot(system).items() if not torch.equal(logits, before[name])} == moved


def test_frozen_components_stay_also_in_a_search_over_starts():
    system = rs.chain(moved=False)
    before = snapshot(system)
    system.freeze("z")
    exact.train(system, exact.direct(system, JUDGE, 0.5), steps=3)
    exact.minimise(system, exact.direct(system, JUDGE, 0.5), 3, es.seeded(0), steps=20)
    assert torch.equal(system["z"].logits, before["z"]) and not torch.equal(system["y"].logits, before["y"])
    with pytest.raises(errors.NothingToTrainError, match=r"no table of \['z'\] can be trained"):
        exact.train(system, exact.direct(system, JUDGE, 0.5), only="z")


def test_tied_tables_move_as_one():
    system = es.fixed_loop(tied=True)
    exact.train(system, exact.sampling(system, es.bradley_terry(es.f64([[0, 0.5, 1]])), 0.5), steps=5)
    assert system["y1"].logits is system["y3"].logits and len(system.trainable_parameters()) == 2
    assert not torch.equal(system["y1"].probabilities(), system["y1"].probabilities(True))


def test_the_loss_is_reported_before_each_step_and_watchers_are_called():
    system, seen = rs.chain(moved=False), []
    objective = exact.sampling(system, JUDGE, 0.5)
    losses = exact.train(system, objective, steps=4, watch=lambda step: seen.append((step, objective().item())))
    assert [step for step, _ in seen] == [0, 1, 2, 3, 4] and losses == pytest.approx([loss for _, loss in seen[:4]])
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses[-1] < losses[0]


def test_gradient_descent_takes_the_gradient_itself():
    system = rs.chain()
    objective = exact.sampling(system, JUDGE, 0.5)
    expected = system["y"].logits.detach() - 0.3 * torch.autograd.grad(objective(), system["y"].logits)[0]
    exact.train(system, objective, steps=1, lr=0.3, method="gradient")
    torch.testing.assert_close(system["y"].logits.detach(), expected)
    with pytest.raises(errors.UnknownOptionError, match="method='newton'"):
        exact.train(system, objective, method="newton")


def test_any_function_can_be_an_objective():
    system = rs.chain()
    exact.train(system, lambda: -exact.marginal(system)[:, 0].log().sum(), steps=200)
    assert bool((exact.marginal(system)[:, 0] > 0.9).all())


@pytest.mark.parametrize("variant", [exact.direct, exact.sampling])
def test_a_step_on_a_small_system_takes_about_a_millisecond(variant):
    """The bar is generous: a step takes 0.6 ms on a quiet core."""
    system = rs.collider(moved=False)
    objective = variant(system, JUDGE, 0.5)
    exact.train(system, objective, steps=20)
    start = time.perf_counter()
    exact.train(system, objective, steps=200)
    assert time.perf_counter() - start < 2


def test_descend_ends_where_the_gradient_vanishes():
    system = es.random_collider(es.seeded(0), inputs=2)
    objective = exact.direct(system, JUDGE, 0.5)
    value = exact.descend(system, objective)
    gradients = torch.autograd.grad(objective(), system.trainable_parameters())
    assert max(g.abs().max().item() for g in gradients) < 1e-8 and value == pytest.approx(objective().item(), abs=1e-15)
    assert objective.excess > 1e-5  # no product reaches the tilt


def test_descend_keeps_structural_zeros():
    y = Categorical("y", {"x": 2}, 3, [[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]])
    system = CompoundSystem([y, Categorical("z", {"x": 2, "y": 3}, 3, rs.table(1, 2, 3, 3, zeros=0.3))])
    zeros = {name: torch.isneginf(system[name].logits) for name in system.order}
    objective = exact.sampling(system, JUDGE, 0.5)
    exact.descend(system, objective)
    for name in system.order:
        assert torch.equal(torch.isneginf(system[name].logits), zeros[name]) and not torch.isnan(system[name].logits).any()
    assert objective.excess < 1e-9


def test_many_starts_find_what_one_does_not():
    """In a uniform blind chain all drafts are alike and stay so: y never moves, and one start ends in the best single row."""
    system = es.blind_chain(2, 3, 3)
    objective = exact.sampling(system, JUDGE, 0.5)
    (stuck,) = exact.minimise(system, objective, 1, steps=300).tolist()
    assert torch.allclose(system["y"].probabilities(), torch.full((2, 3), 1 / 3).double())
    system = es.blind_chain(2, 3, 3)
    objective = exact.sampling(system, JUDGE, 0.5)
    reached = exact.minimise(system, objective, 6, es.seeded(0), steps=300)
    assert reached.shape == (6,) and reached[0].item() == pytest.approx(stuck) and reached.min() < stuck - 0.01
    assert objective().item() <= reached.min().item() + 1e-12 and objective.excess < 1e-9


def test_random_starts_need_a_generator_and_repeat_with_it():
    system = es.blind_chain(2, 2, 3)
    objective = exact.sampling(system, JUDGE, 0.5)
    with pytest.raises(errors.UnknownOptionError, match="need generator"):
        exact.minimise(system, objective, 2)
    runs = []
    for _ in range(2):
        copy = es.twin(system)
        runs.append(exact.minimise(copy, exact.sampling(copy, JUDGE, 0.5), 3, es.seeded(5), steps=20))
    assert torch.equal(*runs)


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    system = es.blind_chain(2, 2, 3)
    objective = exact.sampling(system, JUDGE, 0.5).sampled(50, es.seeded(1))
    exact.minimise(system, objective, 3, es.seeded(0), steps=5)
    assert torch.equal(torch.get_rng_state(), before)
