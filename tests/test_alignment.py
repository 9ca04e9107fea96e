"""Gaps, fitted beta and cycles: hand-derived values and every combination of zeros."""

import itertools
import math

import pytest
import torch

from sysdpo_lab import alignment, errors, exact, losses


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def bradley_terry(reward):
    return reward[:, :, None] - reward[:, None, :]


def rock_paper_scissors(odds=4.0):
    return math.log(odds) * f64([[[0, 1, -1], [-1, 0, 1], [1, -1, 0]]])


LAWS = [f64([support]) / sum(support) for support in itertools.product((0, 1), repeat=3) if sum(support)]


# --- gap ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p_reference", [None, *LAWS], ids=str)
@pytest.mark.parametrize("p", LAWS, ids=str)
def test_gap_for_every_combination_of_zeros(p, p_reference):
    """inf where exactly one of p, p_ref is 0; outputs impossible under both are skipped; never NaN."""
    reward, beta = f64([[0.3, -1.0, 2.0]]), 0.7
    found = alignment.gap(p, bradley_terry(reward), beta, p_reference=p_reference)
    other = torch.ones_like(p) if p_reference is None else p_reference
    one_sided = [(a == 0) != (b == 0) for a, b in zip(p[0].tolist(), other[0].tolist())]
    both = [i for i in range(3) if p[0, i] > 0 and other[0, i] > 0]
    if any(one_sided):
        expected = math.inf
    else:
        values = [
            abs(
                (reward[0, i] - reward[0, j])
                - beta * (math.log(p[0, i] / other[0, i]) - math.log(p[0, j] / other[0, j]))
            )
            for i, j in itertools.permutations(both, 2)
        ]
        expected = float(max(values, default=0.0))
    assert not math.isnan(found) and found == pytest.approx(expected, abs=1e-12)


def test_gap_looks_at_every_input():
    """A zero in the second row counts although the first is perfect."""
    reward = f64([[0.0, 1.0], [0.0, 1.0]])
    p = torch.softmax(reward / 0.5, 1)
    assert alignment.gap(p, bradley_terry(reward), 0.5) < 1e-12
    p[1] = f64([1.0, 0.0])
    assert alignment.gap(p, bradley_terry(reward), 0.5) == math.inf


@pytest.mark.parametrize("p", [[1.0, 0.0], [0.5, 0.5]])
def test_gap_of_a_certain_judge_is_infinite_not_nan(p):
    logits = f64([[[0.0, math.inf], [-math.inf, 0.0]]])
    assert alignment.gap(f64([p]), logits, 1.0) == math.inf


def test_gap_of_a_single_output_is_zero():
    assert alignment.gap(f64([[1.0]]), f64([[[0.0]]]), 1.0) == 0.0


@pytest.mark.parametrize(("beta", "ratio"), [(0.1, 1048576), (0.5, 16), (1, 4), (2, 2), (10, 1.1487)])
def test_at_preference_08_the_ratio_is_the_beta_th_root_of_4(beta, ratio):
    """Theory S1.3."""
    reward = f64([[math.log(4.0), 0.0]])
    p = exact.tilt(f64([[0.5, 0.5]]), reward, beta)
    assert (p[0, 0] / p[0, 1]).item() == pytest.approx(ratio, rel=1e-4)
    assert alignment.gap(p, bradley_terry(reward), beta) < 1e-9


def test_the_optimum_of_dpo_is_perfect_iff_the_reference_is_uniform():
    """Theory S1.2: gap(p*) = beta max |log p_ref(i)/p_ref(j)|, adjusted gap 0."""
    reward, reference, beta = f64([[0.0, 1.0, 2.0]]), f64([[0.6, 0.3, 0.1]]), 0.5
    p = exact.tilt(reference, reward, beta)
    assert alignment.gap(p, bradley_terry(reward), beta) == pytest.approx(beta * math.log(6))
    assert alignment.gap(p, bradley_terry(reward), beta, p_reference=reference) < 1e-12
    assert alignment.gap(exact.tilt(torch.ones(1, 3).double() / 3, reward, beta), bradley_terry(reward), beta) < 1e-12


# --- fit_beta -------------------------------------------------------------------------------------------------------


def test_fit_beta_recovers_beta_of_an_aligned_system():
    """Theory S6.1, pooled over inputs."""
    reward = f64([[0.0, 1.0, 2.5], [1.0, -1.0, 0.3]])
    for beta in (0.1, 0.5, 2.0):
        found, rms = alignment.fit_beta(torch.softmax(reward / beta, 1), bradley_terry(reward))
        assert found == pytest.approx(beta, rel=1e-12) and rms < 1e-12


def test_fit_beta_with_a_non_uniform_reference():
    """Theory S6.2: r = (0, 1, 2), beta 0.5, p_ref = (.6, .3, .1)."""
    reward, reference = f64([[0.0, 1.0, 2.0]]), f64([[0.6, 0.3, 0.1]])
    beta_hat, rms = alignment.fit_beta(exact.tilt(reference, reward, 0.5), bradley_terry(reward))
    assert beta_hat == pytest.approx(0.8956, abs=5e-5) and rms == pytest.approx(0.149, abs=5e-4)
    assert alignment.fit_beta(reference, bradley_terry(reward))[0] == pytest.approx(-1.097, abs=5e-4)


def test_fit_beta_by_hand():
    """L = (1, 2, 1), D = (1, 1, 0) log 2 over the pairs 01, 02, 12: beta = 3 log 2 / (2 log^2 2)."""
    p, reward = f64([[0.5, 0.25, 0.25]]), f64([[2.0, 1.0, 0.0]])
    beta, rms = alignment.fit_beta(p, bradley_terry(reward))
    assert beta == pytest.approx(1.5 / math.log(2))
    assert rms == pytest.approx(math.sqrt((0.25 + 0.25 + 1.0) / 3))


def test_fit_beta_leaves_impossible_outputs_out_and_never_divides_by_zero():
    reward = f64([[0.0, 1.0, 2.0]])
    p = torch.softmax(f64([[0.0, 1.0, -math.inf]]) / 0.5, 1)
    assert alignment.fit_beta(p, bradley_terry(reward)) == pytest.approx((0.5, 0.0))
    assert alignment.fit_beta(torch.ones(1, 3) / 3, bradley_terry(reward)) == pytest.approx((0.0, math.sqrt(2)))
    assert all(map(math.isnan, alignment.fit_beta(f64([[1.0, 0.0, 0.0]]), bradley_terry(reward))))


def test_log_p_ref_as_second_regressor_gives_beta_and_its_negative():
    """Theory S6.2: exactly (beta, -beta) for the optimum of DPO, at any reference."""
    g = torch.Generator().manual_seed(0)
    for beta in (0.1, 0.5, 2.0):
        reward, start = torch.randn(3, 4, generator=g).double(), torch.softmax(torch.randn(3, 4, generator=g).double(), 1)
        found = alignment.fit_beta(exact.tilt(start, reward, beta), bradley_terry(reward), start)
        assert found == pytest.approx((beta, -beta, 0.0), abs=1e-12)


def test_the_untrained_reference_has_no_share_of_its_own():
    """p = p_ref leaves only the sum of the two coefficients fixed; the smallest pair is half each."""
    reward, start = f64([[0.0, 1.0, 2.0]]), f64([[0.6, 0.3, 0.1]])
    alone = alignment.fit_beta(start, bradley_terry(reward))
    assert alignment.fit_beta(start, bradley_terry(reward), start) == pytest.approx((alone[0] / 2, alone[0] / 2, alone[1]))


def test_fit_beta_with_a_reference_leaves_out_what_either_cannot_make():
    reward, start = f64([[0.0, 1.0, 2.0]]), f64([[0.5, 0.5, 0.0]])
    found = alignment.fit_beta(torch.ones(1, 3) / 3, bradley_terry(reward), start)
    assert found == pytest.approx((0.0, 0.0, 1.0))
    assert all(map(math.isnan, alignment.fit_beta(f64([[1.0, 0.0, 0.0]]), bradley_terry(reward), start)))
    with pytest.raises(errors.CardinalityError, match="p_reference has shape"):
        alignment.fit_beta(start, bradley_terry(reward), f64([[0.5, 0.5]]))


# --- probability gap ------------------------------------------------------------------------------------------------


def test_probability_gap_by_hand():
    """Odds of p at beta 0.5: sqrt(p_i / p_j); the judge says sigmoid(L)."""
    p, reward = f64([[0.64, 0.32, 0.04]]), f64([[0.0, 1.0, 2.0]])
    expected = max(
        abs(1 / (1 + math.exp(reward[0, j] - reward[0, i])) - 1 / (1 + math.sqrt(p[0, j] / p[0, i])))
        for i, j in itertools.permutations(range(3), 2)
    )
    assert alignment.probability_gap(p, bradley_terry(reward), 0.5) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("p_reference", [None, *LAWS], ids=str)
@pytest.mark.parametrize("p", LAWS, ids=str)
def test_probability_gap_is_a_number_between_0_and_1_for_every_combination_of_zeros(p, p_reference):
    found = alignment.probability_gap(p, bradley_terry(f64([[0.3, -1.0, 2.0]])), 0.7, p_reference)
    assert 0 <= found <= 1
    both = [i for i in range(3) if p[0, i] > 0 or p_reference is None or p_reference[0, i] > 0]
    if len(both) == 1:
        assert found == 0


def test_the_optimum_of_dpo_has_no_adjusted_probability_gap():
    reward, start = f64([[0.0, 1.0, 2.0]]), f64([[0.6, 0.3, 0.1]])
    p = exact.tilt(start, reward, 0.5)
    assert alignment.probability_gap(p, bradley_terry(reward), 0.5, start) < 1e-14
    assert alignment.probability_gap(p, bradley_terry(reward), 0.5) > 0.1


# --- cycles ---------------------------------------------------------------------------------------------------------


def test_rock_paper_scissors():
    """Theory S6.4: residual log 4, the uniform policy, beta_hat 0, excess loss 0.1927."""
    logits, uniform = rock_paper_scissors(), torch.ones(1, 3).double() / 3
    assert alignment.cycle_residual(logits) == pytest.approx(math.log(4), abs=1e-12)
    assert alignment.fit_beta(uniform, logits) == pytest.approx((0.0, math.log(4)))
    assert alignment.gap(uniform, logits, 0.5) == pytest.approx(math.log(4))
    best_judge = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    excess = losses.dpo_loss(torch.zeros(1).double()).item() - best_judge
    assert excess == pytest.approx(0.1927, abs=5e-5)


def test_a_reward_has_no_cycle_and_a_cycle_on_top_is_found():
    """Theory S6.4, mixed: r = (0, .5, 1, 1.5) plus 0.9 on a 3-cycle has rms 0.636."""
    reward = bradley_terry(f64([[0.0, 0.5, 1.0, 1.5], [3.0, 1.0, -1.0, 0.0]]))
    assert alignment.cycle_residual(reward) < 1e-12
    cyclic = torch.zeros(1, 4, 4).double()
    for i, j in ((0, 1), (1, 2), (2, 0)):
        cyclic[0, i, j], cyclic[0, j, i] = 0.9, -0.9
    assert alignment.cycle_residual(reward[:1] + cyclic) == pytest.approx(0.636, abs=5e-4)


def test_the_rms_gap_of_every_system_is_at_least_the_cycle():
    """Theory S6.3, at 50 random systems."""
    generator = torch.Generator().manual_seed(0)
    cyclic = rock_paper_scissors(2.0) + bradley_terry(f64([[0.0, 1.0, 2.0]]))
    floor = alignment.cycle_residual(cyclic)
    for _ in range(50):
        p = torch.softmax(torch.randn(1, 3, generator=generator, dtype=torch.float64), 1)
        assert alignment.fit_beta(p, cyclic)[1] >= floor - 1e-12


def test_a_single_output_has_no_cycle():
    assert alignment.cycle_residual(f64([[[0.0]]])) == 0.0


MIXED = bradley_terry(f64([[0.0, 0.5, 1.0, 1.5]]))
for _i, _j in ((0, 1), (1, 2), (2, 0)):
    MIXED[0, _i, _j] += 0.9
    MIXED[0, _j, _i] -= 0.9


def random_preference(seed, size=5):
    upper = torch.randn(2, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).triu(1)
    return upper - upper.transpose(1, 2)


def test_the_hodge_split_is_orthogonal_and_adds_up():
    """Theory S6.3: C is orthogonal to every gradient, so its rows sum to 0."""
    for seed in range(10):
        logits = random_preference(seed)
        phi, cycle = alignment.hodge_split(logits)
        torch.testing.assert_close(bradley_terry(phi) + cycle, logits)
        assert cycle.sum(2).abs().max() < 1e-12 and phi.sum(1).abs().max() < 1e-12
    assert alignment.hodge_split(bradley_terry(f64([[0.0, 1.0, 5.0]])))[0].tolist()[0] == pytest.approx([-2.0, -1.0, 3.0])


def test_a_preference_without_cycles_is_met_by_its_potential_at_every_beta():
    """Theory S6.3."""
    logits = bradley_terry(torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).double())
    phi = alignment.hodge_split(logits)[0]
    for beta in (0.1, 1.0, 7.0):
        assert alignment.gap(torch.softmax(phi / beta, 1), logits, beta) < 1e-12


def test_best_gap_is_the_largest_mean_of_a_cycle():
    """Against all simple cycles, listed one by one."""
    for seed in range(10):
        logits = random_preference(seed)
        means = [
            torch.stack([logits[:, c[i], c[(i + 1) % n]] for i in range(n)]).mean(0)
            for n in range(2, 6)
            for c in itertools.permutations(range(5), n)
        ]
        expected = torch.stack(means).amax(0).clamp(min=0)
        assert alignment.best_gap(logits)[0] == pytest.approx(expected.max().item(), abs=1e-12)


def test_best_gap_is_reached_by_its_potential_and_by_nothing_better():
    for seed in range(5):
        logits = random_preference(seed)
        value, phi = alignment.best_gap(logits)
        assert alignment.gap(torch.softmax(phi / 0.5, 1), logits, 0.5) == pytest.approx(value, abs=1e-12)
        start = torch.softmax(torch.randn(2, 5, generator=torch.Generator().manual_seed(seed)).double(), 1)
        tilted = exact.tilt(start, phi, 0.5)
        assert alignment.gap(tilted, logits, 0.5, start) == pytest.approx(value, abs=1e-12)
        g = torch.Generator().manual_seed(seed)
        for _ in range(50):
            other = torch.softmax((phi + 0.3 * torch.randn(2, 5, generator=g)) / 0.5, 1)
            assert alignment.gap(other, logits, 0.5) >= value - 1e-12


def test_a_mixed_preference():
    """Theory S6.4: rms(C) 0.636, best max-gap 0.9; DPO's solution has rms 0.647 and max-gap 1.097, another projection."""
    assert alignment.cycle_residual(MIXED) == pytest.approx(0.636, abs=5e-4)
    value, phi = alignment.best_gap(MIXED)
    assert value == pytest.approx(0.9, abs=1e-12)
    dpo = alignment.logistic_potential(MIXED)
    rest = MIXED - bradley_terry(dpo)
    i, j = torch.triu_indices(4, 4, 1)
    assert rest[0, i, j].pow(2).mean().sqrt().item() == pytest.approx(0.647, abs=5e-4)
    assert alignment.gap(torch.softmax(dpo / 0.5, 1), MIXED, 0.5) == pytest.approx(1.097, abs=5e-4)
    assert (dpo - alignment.hodge_split(MIXED)[0]).abs().max() > 0.01


# --- DPO's own projection ---------------------------------------------------------------------------------------------


def test_the_logistic_potential_minimises_the_loss():
    """Its gradient is 0: at each output the judge's and the system's win rates over all others agree."""
    for seed in range(5):
        logits = 2 * random_preference(seed)
        phi = alignment.logistic_potential(logits)
        margin = bradley_terry(phi)
        torch.testing.assert_close(torch.sigmoid(logits).sum(2), torch.sigmoid(margin).sum(2), rtol=0, atol=1e-12)
    reward = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(bradley_terry(alignment.logistic_potential(bradley_terry(reward))), bradley_terry(reward))


def test_a_connected_comparison_graph_is_enough_and_two_islands_are_not():
    """Theory S1.4: on a path 0-1-2-3 Bradley-Terry fixes everything; islands keep an offset that nobody compared."""
    reward = f64([[0.0, 2.0, -1.0, 1.5]])
    path, islands = torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
    path[0, [0, 1, 2], [1, 2, 3]] = 1
    islands[0, [0, 2], [1, 3]] = 1
    for graph, whole in ((path, True), (islands, False)):
        phi = alignment.logistic_potential(bradley_terry(reward), graph)
        p = torch.softmax(phi / 0.5, 1)
        assert alignment.excess_loss(p, bradley_terry(reward), 0.5, weights=graph) < 1e-12
        assert (alignment.gap(p, bradley_terry(reward), 0.5) < 1e-9) == whole
    assert phi[0].tolist() == pytest.approx([-1.0, 1.0, -1.25, 1.25])


def test_a_certain_looking_judge_does_not_break_newton():
    logits = bradley_terry(f64([[0.0, 25.0, -25.0]]))
    torch.testing.assert_close(bradley_terry(alignment.logistic_potential(logits)), logits, rtol=0, atol=1e-3)


# --- excess loss --------------------------------------------------------------------------------------------------------


def test_excess_loss_is_the_mean_kl_between_the_judge_and_the_odds():
    p, reward = f64([[0.2, 0.3, 0.5]]), f64([[0.0, 1.0, -1.0]])
    expected = 0.0
    for i, j in ((0, 1), (0, 2), (1, 2)):
        a = 1 / (1 + math.exp(reward[0, j] - reward[0, i]))
        b = p[0, i].item() ** 0.7 / (p[0, i].item() ** 0.7 + p[0, j].item() ** 0.7)
        expected += (a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))) / 3
    assert alignment.excess_loss(p, bradley_terry(reward), 0.7) == pytest.approx(expected, abs=1e-14)


def test_excess_loss_of_the_optimum_is_zero_and_of_rock_paper_scissors_is_not():
    reward, start = f64([[0.0, 1.0, 2.0]]), f64([[0.6, 0.3, 0.1]])
    assert alignment.excess_loss(exact.tilt(start, reward, 0.5), bradley_terry(reward), 0.5, start) < 1e-15
    uniform = torch.ones(1, 3) / 3
    assert alignment.excess_loss(uniform, rock_paper_scissors(), 0.5) == pytest.approx(0.1927, abs=5e-5)
    assert alignment.logistic_potential(rock_paper_scissors()).abs().max() < 1e-12  # DPO returns the uniform policy


def test_excess_loss_is_infinite_where_a_compared_output_is_impossible():
    reward, sure = f64([[0.0, 1.0, 2.0]]), f64([[0.5, 0.5, 0.0]])
    assert alignment.excess_loss(sure, bradley_terry(reward), 0.5) == math.inf
    only = torch.zeros(1, 3, 3)
    only[0, 0, 1] = 1
    assert alignment.excess_loss(sure, bradley_terry(reward), 0.5, weights=only) < math.inf
    assert alignment.excess_loss(sure, bradley_terry(reward), 0.5, p_reference=sure) < math.inf
    certain = f64([[[0.0, math.inf], [-math.inf, 0.0]]])
    assert alignment.excess_loss(f64([[0.5, 0.5]]), certain, 0.5) == pytest.approx(math.log(2))


# --- bad input ------------------------------------------------------------------------------------------------------

P, L = f64([[0.4, 0.6]]), f64([[[0.0, 1.0], [-1.0, 0.0]]])
BAD = {
    "NaN in p": (
        errors.NonFiniteError,
        r"p_z holds NaN at \(0, 1\)",
        lambda: alignment.gap(f64([[1.0, math.nan]]), L, 1.0),
    ),
    "p not normalised": (errors.TableError, "p_z: row 0.*sum 1.2", lambda: alignment.gap(P * 1.2, L, 1.0)),
    "p negative": (errors.TableError, "smallest -0.5", lambda: alignment.gap(f64([[1.5, -0.5]]), L, 1.0)),
    "p of one axis": (errors.CardinalityError, r"p_z has shape \(2,\)", lambda: alignment.gap(P[0], L, 1.0)),
    "reference of another shape": (
        errors.CardinalityError,
        "p_reference has shape",
        lambda: alignment.gap(P, L, 1.0, p_reference=f64([[0.2, 0.3, 0.5]])),
    ),
    "reference not normalised": (errors.TableError, "p_reference", lambda: alignment.gap(P, L, 1.0, p_reference=2 * P)),
    "logits of another size": (
        errors.CardinalityError,
        r"\(1, 3, 3\), expected \(X, 2, 2\)",
        lambda: alignment.gap(P, torch.zeros(1, 3, 3), 1),
    ),
    "logits of more inputs": (
        errors.CardinalityError,
        "2 inputs, p_z has 1",
        lambda: alignment.gap(P, L.repeat(2, 1, 1), 1.0),
    ),
    "NaN in logits": (errors.NonFiniteError, r"NaN at \(0, 0, 0\)", lambda: alignment.gap(P, L * math.nan, 1.0)),
    "not antisymmetric": (
        errors.ValueRangeError,
        r"\[0, 0, 1\] = 1 and \[0, 1, 0\] = 1",
        lambda: alignment.gap(P, L.abs(), 1.0),
    ),
    "probabilities instead of logits": (
        errors.ValueRangeError,
        "pref",
        lambda: alignment.cycle_residual(torch.sigmoid(L)),
    ),
    "both sides certain": (
        errors.ValueRangeError,
        "inf",
        lambda: alignment.fit_beta(P, f64([[[0, math.inf], [math.inf, 0]]])),
    ),
    "one side certain": (
        errors.ValueRangeError,
        "inf",
        lambda: alignment.gap(P, f64([[[0, math.inf], [-3.0, 0]]]), 1.0),
    ),
    "best gap of a certain judge": (
        errors.NonFiniteError,
        "infinity",
        lambda: alignment.best_gap(f64([[[0, math.inf], [-math.inf, 0]]])),
    ),
    "cycles of a certain judge": (
        errors.NonFiniteError,
        "infinity",
        lambda: alignment.cycle_residual(f64([[[0, math.inf], [-math.inf, 0]]])),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_answered_by_name(case):
    kind, message, call = BAD[case]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("beta", [0, -1.0, math.nan, math.inf, True, "0.1", None])
def test_beta_must_be_positive_and_finite(beta):
    for call in (lambda: alignment.gap(P, L, beta), lambda: exact.tilt(P, torch.zeros(1, 2), beta)):
        with pytest.raises(errors.UnknownOptionError, match="beta must be a positive finite number"):
            call()


def test_float32_preferences_near_certainty_are_accepted():
    pref = torch.tensor([[[0.5, 0.9999], [0.0001, 0.5]]])
    logits = torch.log(pref) - torch.log1p(-pref)
    assert alignment.gap(torch.tensor([[0.9999, 0.0001]]), logits, 1.0) < 1e-2
