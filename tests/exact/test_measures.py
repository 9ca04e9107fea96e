"""Posteriors, divergences, rewards and win rates against sums over all joint values."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sysdpo_lab import CompoundSystem, errors, exact, losses, samplers
from sysdpo_lab.components import Categorical
from tests import exact_systems as es
from tests import random_systems as rs

DRAWS = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.mark.property
@DRAWS
@given(rs.specs(largest=5), st.booleans())
def test_the_posterior_is_the_joint_divided_by_the_marginal(spec, reference):
    system = rs.build(spec)
    found = exact.posterior(system, reference=reference).detach()
    joint = exact.joint_marginal(system, [*system.hidden, system.output], reference).detach()
    total = exact.marginal(system, reference).detach()
    total = total.reshape(total.shape[0], *[1] * len(system.hidden), -1)
    torch.testing.assert_close(found * total, joint, rtol=0, atol=1e-12)
    assert not torch.isnan(found).any()


def test_the_posterior_holds_the_weights_of_the_sampling_loss():
    """With every intermediate in A, w_a(z) = p(a | x, z) (theory S3.1)."""
    system = rs.chain()
    x, z = torch.tensor([0, 1]), torch.tensor([2, 0])
    sets = samplers.enumerate_all(system, {"x": x})
    trace = {"x": x.repeat_interleave(3), "y": sets.values["y"].flatten(), "z": z.repeat_interleave(3)}
    weights = losses.posterior_weights(system.log_prob(trace).reshape(2, 3), torch.zeros(2, 3))
    torch.testing.assert_close(exact.posterior(system, ["y"])[x, :, z], weights)


@pytest.mark.property
@DRAWS
@given(rs.specs(largest=5, zeros=False))
def test_kl_of_the_joint_is_the_sum_over_all_joint_values(spec):
    system = rs.build(spec)
    grid = exact.Joint(system)
    expected = exact.kl(grid.log_prob().exp().detach(), grid.log_reference.exp())
    found = exact.kl_joint(system)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert bool((found >= exact.kl_marginal(system) - 1e-12).all())  # data processing


def test_kl_counts_what_is_met_and_is_infinite_where_the_reference_is_zero():
    half, sure = es.f64([[0.5, 0.5]]), es.f64([[1.0, 0.0]])
    assert exact.kl(sure, half).item() == pytest.approx(math.log(2)) and exact.kl(half, sure).item() == math.inf
    never = Categorical("z", {"y": 2}, 2, [[0.5, 0.5], [0.5, 0.5]], reference=[[0.5, 0.5], [1.0, 0.0]])
    system = CompoundSystem([Categorical("y", {"x": 1}, 2, [[1.0, 0.0]], reference=[[0.5, 0.5]]), never])
    assert exact.kl_joint(system).item() == pytest.approx(math.log(2))  # z's row y = 1 is never met


def test_kl_of_a_chain_of_50_variables_with_10_values_is_quick():
    system, _ = rs.long_chain(50, 10)
    with torch.no_grad():
        system["v1"].logits += es.normal(es.seeded(0), 10, 10)
    table, start = (system["v1"].probabilities(flag).detach() for flag in (False, True))
    torch.testing.assert_close(exact.kl_joint(system), exact.kl(table, start))


def test_win_rates_by_hand():
    """System (.25, .75) against (.5, .5), the judge at 0.8 for the second: .5 * (.25 + .75) + .5 (.25 * .2 + .75 * .8)."""
    judge = math.log(4) * es.f64([[[0, -1], [1, 0]]])
    system, other = es.f64([[0.25, 0.75]]), es.f64([[0.5, 0.5]])
    by_hand = 0.5 * 0.5 + 0.5 * (0.25 * 0.2 + 0.75 * 0.8)
    assert exact.win_rate(system, other, judge).item() == pytest.approx(by_hand)
    assert exact.win_rate(system, system, judge).item() == pytest.approx(0.5)
    assert exact.expected_reward(system, es.f64([[2.0, -2.0]])).item() == pytest.approx(-1.0)


def test_greedy_decoding_takes_each_components_mode_not_the_marginals():
    """y = 0 is likelier and then says z = 0, though z = 1 is likelier over all."""
    y, z = Categorical("y", {"x": 1}, 2, [[0.6, 0.4]]), Categorical("z", {"y": 2}, 2, [[0.55, 0.45], [0.0, 1.0]])
    system = CompoundSystem([y, z])
    assert exact.decoded(system, "sampled")[0].argmax() == 1
    assert exact.decoded(system, "greedy").tolist() == [[1.0, 0.0]]
    with torch.no_grad():
        system["y"].logits.copy_(es.f64([[0.0, 1.0]]))
    assert exact.decoded(system, "greedy").tolist() == [[0.0, 1.0]]
    assert exact.decoded(system, "greedy", reference=True).tolist() == [[1.0, 0.0]]
    with pytest.raises(errors.UnknownOptionError, match="decoding='beam' does not exist"):
        exact.decoded(system, "beam")


def test_greedy_decoding_covers_all_inputs_in_the_order_of_the_marginal():
    z = Categorical("z", {"w": 3, "x": 2}, 3, rs.table(0, 3, 2, 3))
    system = CompoundSystem([z], inputs=("x", "w"))
    assert exact.decoded(system, "greedy").argmax(1).tolist() == exact.marginal(system).argmax(1).tolist()
