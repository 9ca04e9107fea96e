"""The tilted joint and its steps: closed forms against brute force (theory S2.1, S2.2, S7)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sysdpo_lab import CompoundSystem, errors, exact
from sysdpo_lab.components import Categorical
from tests import exact_systems as es
from tests import random_systems as rs

DRAWS = settings(max_examples=40, deadline=None, derandomize=True)


def reward_of(system, seed):
    return torch.randn(*exact.marginal(system).shape, generator=es.seeded(seed), dtype=torch.float64)


@pytest.mark.property
@DRAWS
@given(rs.specs(largest=5), st.integers(0, 10_000), st.sampled_from([0.2, 1.0, 5.0]))
def test_the_tilted_joint_has_the_tilted_marginal_and_the_references_posterior(spec, seed, beta):
    """Theory S2.1: the intermediates move only as far as z forces them to."""
    system = rs.build(spec)
    reward, grid = reward_of(system, seed), exact.Joint(rs.build(spec))
    tilted, start = exact.tilted_joint(system, reward, beta), grid.log_reference.exp()
    by_z = tilted.reshape(grid.inputs, -1, grid.sizes[-1])
    marginal = exact.tilted_marginal(system, reward, beta)
    torch.testing.assert_close(by_z.sum(1), marginal, rtol=0, atol=1e-12)
    start = start.reshape(by_z.shape)
    torch.testing.assert_close(by_z * start.sum(1, keepdim=True), start * marginal[:, None], rtol=0, atol=1e-12)


@pytest.mark.property
@DRAWS
@given(rs.specs(largest=5), st.integers(0, 10_000), st.sampled_from([0.3, 2.0]))
def test_the_steps_multiply_up_to_the_tilted_joint(spec, seed, beta):
    """Theory S2.2: p*(s | x) is the product of the h-transformed steps."""
    system = rs.build(spec, shuffle=seed)
    reward, grid = reward_of(system, seed), exact.Joint(system)
    product = torch.ones(grid.shape, dtype=torch.float64)
    for step in exact.h_transform(system, reward, beta):
        product = product * exact.tables.aligned(step.kernel, (*step.context, step.name), grid.axes)
    expected = exact.tilted_joint(system, reward, beta)
    torch.testing.assert_close(product.reshape(expected.shape), expected, rtol=0, atol=1e-12)


def test_h_is_the_expected_exponential_of_the_reward():
    """By hand: h_1(y) = sum_z p(z|y) e^{r/beta}, h_2 = e^{r/beta}, on the XOR collider 6.750 and 1.639."""
    y1, y2, z = exact.h_transform(es.xor_collider(), es.GOOD, 0.5)
    assert z.log_h.exp()[0].tolist() == pytest.approx([1.0, math.exp(2)])
    agree, differ = 0.1 + 0.9 * math.exp(2), 0.9 + 0.1 * math.exp(2)
    assert y2.log_h.exp()[0].flatten().tolist() == pytest.approx([agree, differ, differ, agree])
    assert (round(agree, 3), round(differ, 3)) == (6.750, 1.639)
    assert (agree / differ) ** 2 == pytest.approx(16.96, abs=5e-3)  # the cross ratio, 1 where the rank is one
    assert y1.log_h.exp()[0].tolist() == pytest.approx([(agree + differ) / 2] * 2)


def test_a_step_sees_only_what_still_matters():
    """In the loop the tilted step of time t depends on x and on the state before it, whatever came earlier."""
    contexts = {step.name: step.context for step in exact.h_transform(es.fixed_loop(tied=False), es.f64([[0, 0.5, 1]]), 0.5)}
    assert contexts == {"y0": ("x",), "y1": ("x", "y0"), "y2": ("x", "y1"), "y3": ("x", "y2")}


def test_a_component_that_nothing_reads_does_not_move():
    aside = Categorical("aside", {"y": 2}, 2, [[0.3, 0.7], [0.6, 0.4]])
    y, z = Categorical("y", {"x": 1}, 2), Categorical("z", {"y": 2}, 2, [[0.9, 0.1], [0.2, 0.8]])
    steps = exact.h_transform(CompoundSystem([y, z, aside], output="z"), es.GOOD, 0.5)
    found = next(step for step in steps if step.name == "aside")
    assert found.context == ("y",) and torch.allclose(found.kernel, aside.probabilities())


def test_steps_of_a_chain_of_50_variables_with_10_values_are_quick():
    system, _ = rs.long_chain(50, 10)
    steps = exact.h_transform(system, reward_of(system, 0), 0.5)
    assert len(steps) == 50 and max(step.kernel.numel() for step in steps) == 1000


@pytest.mark.parametrize("call", [exact.tilted_joint, exact.h_transform])
def test_bad_rewards_and_betas_are_answered_by_name(call):
    system = es.xor_collider()
    with pytest.raises(errors.CardinalityError, match=r"\(2, 2\), expected \(1, 2\)"):
        call(system, torch.zeros(2, 2), 0.5)
    with pytest.raises(errors.NonFiniteError, match="the reward holds NaN"):
        call(system, es.f64([[0.0, math.nan]]), 0.5)
    with pytest.raises(errors.UnknownOptionError, match="beta must be"):
        call(system, es.GOOD, 0.0)


def test_a_beta_too_small_for_h_is_named():
    with pytest.raises(errors.NonFiniteError, match="overflows at beta"):
        exact.h_transform(es.xor_collider(), es.GOOD, 5e-324)
