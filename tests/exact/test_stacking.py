"""Stacked systems are the same systems side by side."""

import pytest
import torch

from sysdpo_lab import CompoundSystem, errors, exact
from sysdpo_lab.components import Categorical, Tool
from tests import exact_systems as es
from tests import random_systems as rs


def test_marginals_of_a_stack_are_those_of_its_members():
    systems = [rs.collider(seed=s) for s in range(3)]
    stacked = exact.stack(systems)
    assert stacked.inputs == ("member", "x") and stacked.output == "z"
    for reference in (False, True):
        parts = exact.by_member(exact.marginal(stacked, reference), 3)
        torch.testing.assert_close(parts, torch.stack([exact.marginal(s, reference) for s in systems]))


@pytest.mark.parametrize("variant", [exact.direct, exact.sampling])
def test_training_a_stack_is_training_each_member(variant):
    systems = [rs.chain(seed=s, moved=False) for s in range(3)]
    judges = [es.bradley_terry(es.normal(es.seeded(s), 2, 3)) for s in range(3)]
    stacked = exact.stack(systems)
    exact.train(stacked, variant(stacked, torch.cat(judges), 0.5, systems=3), steps=30)
    for number, (system, judge) in enumerate(zip(systems, judges)):
        exact.train(system, variant(system, judge, 0.5), steps=30)
        for name in ("y", "z"):
            torch.testing.assert_close(stacked[name].logits[number], system[name].logits, rtol=0, atol=1e-9)


def test_a_member_comes_back_to_the_bit():
    systems = [rs.chain(seed=s) for s in range(2)]
    target = rs.chain(seed=7)
    exact.unstack(exact.stack(systems), 1, target)
    assert all(torch.equal(target[name].logits, systems[1][name].logits) for name in ("y", "z"))


def test_ties_tools_and_freezing_survive():
    loops = [es.fixed_loop(tied=True), es.fixed_loop(tied=True)]
    for one in loops:
        one.freeze("y0")
    stacked = exact.stack(loops)
    assert stacked["y1"].logits is stacked["y3"].logits and stacked.is_frozen("y0") and not stacked.is_frozen("y1")
    with_tool = [CompoundSystem([Categorical("y", {"x": 2}, 3), Tool("z", ["y"], abs)]) for _ in range(2)]
    assert exact.marginal(exact.stack(with_tool)).shape == (4, 3)


def test_systems_of_other_graphs_are_refused():
    with pytest.raises(errors.GraphError, match="system 1 has another graph than system 0"):
        exact.stack([rs.chain(), rs.chain(skip=True)])
    with pytest.raises(errors.GraphError, match="system 1"):
        exact.stack([rs.chain(), rs.chain(drafts=4)])
