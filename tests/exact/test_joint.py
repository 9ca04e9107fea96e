"""The grid of all joint values against plain numpy indexing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sysdpo_lab import CompoundSystem, errors, exact
from sysdpo_lab.components import Categorical
from tests import random_systems as rs

DRAWS = settings(max_examples=40, deadline=None, derandomize=True)


def on_grid(spec, grid, product):
    """The oracle's numbers in the grid's order: (X, S)."""
    assignments = rs.all_assignments(spec)
    sizes = [spec.cardinality[name] for name in spec.inputs]
    x = np.ravel_multi_index(tuple(assignments[:, : len(sizes)].T), sizes)
    column = {name: assignments[:, i] for i, name in enumerate(spec.variables)}
    s = np.ravel_multi_index(tuple(column[name] for name in grid.names), grid.sizes)
    table = np.zeros((grid.inputs, grid.states))
    table[x, s] = product
    return table


@pytest.mark.property
@DRAWS
@given(rs.specs(largest=5), st.integers(0, 10_000), st.booleans())
def test_the_grid_holds_the_product_of_all_tables(spec, seed, reference):
    grid = exact.Joint(rs.build(spec, shuffle=seed))
    expected = on_grid(spec, grid, rs.joint(spec, reference)[1])
    found = grid.log_prob(reference)
    np.testing.assert_allclose(found.exp().detach().numpy(), expected, rtol=0, atol=1e-12)
    finals = grid.log_finals(found).exp()
    np.testing.assert_allclose(finals.detach().numpy(), rs.marginal(spec, reference), rtol=0, atol=1e-12)
    possible = on_grid(spec, grid, rs.joint(spec, True)[1]) > 0
    assert grid.names[-1] == spec.output and np.array_equal(grid.support.numpy(), possible)


@pytest.mark.property
@DRAWS
@given(rs.specs(largest=4, tools=False), st.integers(0, 10_000))
def test_its_finals_have_the_gradient_of_the_eliminated_marginal(spec, seed):
    """Also where the tables hold structural zeros and outputs are impossible."""
    weights = torch.tensor(np.random.default_rng(seed).normal(size=rs.marginal(spec).shape))
    gradients = []
    for way in (exact.marginal, lambda s: (lambda g: g.log_finals(g.log_prob()).exp())(exact.Joint(s))):
        system = rs.build(spec)
        (way(system) * weights).sum().backward()
        gradients.append([p.grad if p.grad is not None else torch.zeros_like(p) for p in system.trainable_parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_values_and_numbers_of_joint_values_agree():
    grid = exact.Joint(rs.collider())
    assert grid.names == ("y1", "y2", "z") and grid.sizes == (2, 3, 3) and grid.states == 18
    for s in (0, 7, 17):
        values = {name: int(grid.value(name)[s]) for name in grid.names}
        assert grid.index(**values) == s and int(grid.answer[s]) == values["z"]


def test_terms_of_some_components_add_up():
    system = rs.collider()
    grid = exact.Joint(system)
    parts = grid.log_prob(names=["y1"]) + grid.log_prob(names=["z", "y2"])
    torch.testing.assert_close(parts, grid.log_prob())


def test_the_reference_is_computed_once_and_the_policy_each_time():
    system = rs.chain()
    grid = exact.Joint(system)
    before = grid.log_prob().detach()
    assert grid.log_reference is grid.log_reference
    with torch.no_grad():
        system["y"].logits[0, 0] += 1
    assert not torch.equal(grid.log_prob().detach(), before)


def test_too_many_joint_values_are_refused_by_name():
    parts = [Categorical(f"y{i}", {"x": 2}, 10) for i in range(7)] + [Categorical("z", {"y0": 10}, 2)]
    with pytest.raises(errors.StateSpaceError, match="2 inputs x 20000000 joint values.*kl_joint need no enumeration"):
        exact.Joint(CompoundSystem(parts))
