"""DPO, Direct and Sampling: hand-derived values, theorems, finite differences, dropped pairs, named errors."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sysdpo_lab import CompoundSystem, errors, exact, losses, samplers
from sysdpo_lab.components import Categorical, Component, Tool
from tests import random_systems as rs
from tests.random_systems import longs

LOG2 = math.log(2.0)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def zero_gradients(system):
    for parameter in system.parameters():
        parameter.grad = None


def chain_pairs():
    return {"x": longs(0, 1, 1)}, longs(0, 1, 2), longs(2, 0, 1)


def chain_traces():
    x = longs(0, 1, 1, 0)
    return {"x": x, "y": longs(0, 1, 2, 2), "z": longs(1, 2, 0, 0)}, {
        "x": x,
        "y": longs(2, 1, 2, 0),
        "z": longs(0, 0, 1, 0),
    }


# --- formulas -------------------------------------------------------------------------------------------------------


def test_dpo_loss_by_hand_and_without_overflow():
    assert losses.dpo_loss(f64([0.0])).item() == pytest.approx(LOG2, abs=1e-15)
    assert losses.dpo_loss(f64([math.log(4.0)])).item() == pytest.approx(-math.log(0.8), abs=1e-15)
    assert losses.dpo_loss(f64([-1000.0])).item() == 1000.0
    assert losses.dpo_loss(f64([1000.0])).item() == 0.0


def test_dpo_loss_of_a_batch_is_the_mean_of_single_losses():
    margins = f64([-3.0, 0.5, 2.0])
    mean = sum(losses.dpo_loss(m[None]) for m in margins) / 3
    torch.testing.assert_close(losses.dpo_loss(margins), mean)
    assert abs(losses.dpo_loss(margins) - losses.dpo_loss(margins.mean()[None])) > 0.1  # not the log sigmoid of a mean


def test_log_mixture_by_hand_and_its_gradient_with_impossible_entries():
    joint = f64([[0.2, 0.0, 0.3], [0.0, 0.0, 0.0]]).log().requires_grad_()
    weights = f64([[0.0, 0.0, math.log(2.0)], [0.0, 0.0, 0.0]])
    mixture = losses.log_mixture(joint, weights)
    assert mixture.exp().tolist() == pytest.approx([0.8, 0.0])
    mixture[:1].sum().backward()
    assert joint.grad.flatten().tolist() == pytest.approx([0.25, 0.0, 0.75, 0.0, 0.0, 0.0])


def test_posterior_weights_sum_to_one_or_are_zero():
    joint = f64([[0.3, 0.1], [0.0, 0.0]]).log()
    assert losses.posterior_weights(joint, torch.zeros(2, 2)).flatten().tolist() == pytest.approx(
        [0.75, 0.25, 0.0, 0.0]
    )


def test_repeats_put_their_weight_on_the_first():
    codes = torch.tensor([[7, 3, 7, 7], [1, 1, 1, 1]])
    assert losses.repeat_log_weights(codes, "drop").exp().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    np.testing.assert_allclose(losses.repeat_log_weights(codes, "count").exp(), [[3, 1, 0, 0], [4, 0, 0, 0]])
    given_weights = f64([[0.5, 2.0, 0.25, 0.0], [0.0, 3.0, 1.0, 0.0]]).log()
    dropped = losses.repeat_log_weights(codes, "drop", given_weights).exp()
    counted = losses.repeat_log_weights(codes, "count", given_weights).exp()
    np.testing.assert_allclose(dropped, [[0.5, 2, 0, 0], [0, 3, 0, 0]])  # an entry of weight 0 is no part of the set
    np.testing.assert_allclose(counted, [[0.75, 2, 0, 0], [0, 4, 0, 0]])
    assert losses.repeat_log_weights(codes, "count", torch.full((2, 4), -torch.inf)).exp().sum() == 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_first_of_each_is_the_pairwise_comparison(seed, rows, size, as_lists):
    rng = np.random.default_rng(seed)
    columns = [torch.tensor(rng.integers(0, 2, (rows, size))) for _ in range(2)]
    if as_lists:
        columns[1] = [[("a", "b")[v] for v in row] for row in columns[1].tolist()]
    found = losses.first_of_each(columns, rows, size)
    for row, k in itertools.product(range(rows), range(size)):
        same = [j for j in range(k) if all(bool(c[row][j] == c[row][k]) for c in columns)]
        assert bool(found[row, k]) == (not same)


# --- SysDPO-Direct --------------------------------------------------------------------------------------------------


def test_direct_margin_by_hand():
    y = Categorical("y", {"x": 1}, 2, [[0.8, 0.2]], [[0.5, 0.5]])
    z = Categorical("z", {"y": 2}, 2, [[0.6, 0.4], [0.3, 0.7]], [[0.5, 0.5], [0.9, 0.1]])
    system = CompoundSystem([z, y])
    out = losses.direct_loss(
        system, {"x": longs(0), "y": longs(0), "z": longs(1)}, {"x": longs(0), "y": longs(1), "z": longs(0)}, 0.5
    )
    share_y = math.log(0.8 / 0.5) - math.log(0.2 / 0.5)
    share_z = math.log(0.4 / 0.5) - math.log(0.3 / 0.9)
    assert out.shares["y"].item() == pytest.approx(share_y) and out.shares["z"].item() == pytest.approx(share_z)
    assert out.log_ratio_gap.item() == pytest.approx(share_y + share_z)
    assert out.margin.item() == pytest.approx(0.5 * (share_y + share_z))
    assert out.loss.item() == pytest.approx(math.log1p(math.exp(-0.5 * (share_y + share_z))))
    assert out.dropped == 0 and out.kept.tolist() == [True] and out.accuracy == 1.0


def test_direct_loss_is_log_2_at_the_start():
    out = losses.direct_loss(rs.chain(moved=False), *chain_traces(), 0.3)
    assert out.loss.item() == LOG2 and out.margin.tolist() == [0.0] * 4 and out.accuracy == 0.5


def test_shares_sum_to_the_gap_and_margin_is_beta_times_it():
    """P16: what is logged is what the loss uses."""
    out = losses.direct_loss(rs.chain(), *chain_traces(), 0.3)
    torch.testing.assert_close(sum(out.shares.values()), out.log_ratio_gap, rtol=0, atol=1e-12)
    torch.testing.assert_close(out.margin, 0.3 * out.log_ratio_gap, rtol=0, atol=1e-12)
    assert not out.log_ratio_gap.requires_grad and out.margin.requires_grad


@pytest.mark.parametrize("kind", ["direct", "sampling"])
def test_identical_winner_and_loser_give_log_2_and_no_gradient(kind):
    """P21."""
    system = rs.chain()
    trace = chain_traces()[0]
    if kind == "direct":
        out = losses.direct_loss(system, trace, trace, 0.5)
    else:
        sets = samplers.enumerate_all(system, {"x": trace["x"]})
        out = losses.sampling_loss(system, {"x": trace["x"]}, trace["z"], trace["z"], sets.values, 0.5)
    out.loss.backward()
    assert out.loss.item() == LOG2 and out.margin.tolist() == [0.0] * 4
    assert all(not parameter.grad.any() for parameter in system.parameters())


class Given(Component):
    """Log-probabilities by value, different under the reference."""

    def __init__(self, name, parents, policy, reference):
        super().__init__(name, parents)
        self.policy, self.start, self._in_reference = f64(policy), f64(reference), False

    def log_prob(self, value, parent_values):
        return (self.start if self._in_reference else self.policy)[value]

    def reference(self):
        return Switch(self)


class Switch:
    def __init__(self, component):
        self.component = component

    def __enter__(self):
        self.component._in_reference = True

    def __exit__(self, *error):
        self.component._in_reference = False


@pytest.mark.parametrize("kind", ["direct", "sampling"])
def test_the_reference_is_used(kind):
    """P20: adding c to the winner's reference log-probability moves the margin by -beta c, exactly that."""

    def margin(c):
        y = Categorical("y", {"x": 2}, 3, rs.table(0, 2, 3), rs.table(1, 2, 3))
        system = CompoundSystem([y, Given("z", ["x", "y"], [-0.3, -1.5], [-1.0 + c, -0.5])])
        x = {"x": longs(0, 1)}
        if kind == "direct":
            sides = [x | {"y": longs(0, 1), "z": z} for z in (longs(0, 0), longs(1, 1))]
            return losses.direct_loss(system, *sides, 0.25).margin
        return losses.sampling_loss(
            system, x, longs(0, 0), longs(1, 1), {"y": torch.tensor([[0, 1], [2, 0]])}, 0.25
        ).margin

    torch.testing.assert_close(margin(0.0) - margin(0.8), f64([0.2, 0.2]), rtol=0, atol=1e-12)


def finite_difference(system, loss, step=1e-5):
    """Central differences of a loss in every finite logit."""
    result = {}
    for name, parameter in system.named_parameters():
        gradient = torch.zeros_like(parameter)
        for index in itertools.product(*map(range, parameter.shape)):
            if torch.isfinite(parameter[index]):
                values = []
                for sign in (1, -1):
                    with torch.no_grad():
                        parameter[index] += sign * step
                        values.append(loss().item())
                        parameter[index] -= sign * step
                gradient[index] = (values[0] - values[1]) / (2 * step)
        result[name] = gradient
    return result


def with_zeros(seed=3):
    """A collider whose policy and reference have structural zeros, some of them on one side only."""
    shapes = {"y1": (2, 2), "y2": (2, 3), "z": (2, 3, 4)}
    policy = {name: rs.table(seed + i, *shape, zeros=0.25) for i, (name, shape) in enumerate(shapes.items())}
    reference = {name: rs.table(seed + 9 + i, *shape, zeros=0.25) for i, (name, shape) in enumerate(shapes.items())}
    return CompoundSystem(
        [
            Categorical("y1", {"x": 2}, 2, policy["y1"], reference["y1"]),
            Categorical("y2", {"x": 2}, 3, policy["y2"], reference["y2"]),
            Categorical("z", {"y1": 2, "y2": 3}, 4, policy["z"], reference["z"]),
        ]
    )


def all_traces(system):
    names = [*system.inputs, *system.order]
    grid = torch.tensor(list(itertools.product(*(range(system.cardinalities[name]) for name in names))))
    return {name: grid[:, i] for i, name in enumerate(names)}


def tied():
    kernel, start = rs.table(5, 3, 3), rs.table(6, 3, 3)
    return CompoundSystem(
        [
            Categorical("y1", {"x": 3}, 3, kernel, start),
            Categorical("y2", {"y1": 3}, 3, tie="y1"),
            Categorical("z", {"y2": 3}, 2, rs.table(7, 3, 2), rs.table(8, 3, 2)),
        ]
    )


SYSTEMS = {"chain": rs.chain, "collider": rs.collider, "zeros": with_zeros, "tied": tied}


@pytest.mark.parametrize("name", SYSTEMS)
def test_gradient_of_direct_is_the_finite_difference(name):
    """P18, in float64."""
    system = SYSTEMS[name]()
    traces = all_traces(system)
    rng = np.random.default_rng(0)
    rows = len(traces["x"])
    first = torch.tensor(rng.integers(rows, size=12))
    second = torch.tensor([rng.choice(np.flatnonzero(traces["x"].numpy() == x)) for x in traces["x"][first].numpy()])
    sides = [{n: v[index] for n, v in traces.items()} for index in (first, second)]

    def loss():
        return losses.direct_loss(system, *sides, 0.4).loss

    loss().backward()
    for parameter, expected in finite_difference(system, loss).items():
        found = dict(system.named_parameters())[parameter].grad
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("how", ["all", "few, dropped", "few, counted", "weighted"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_gradient_of_sampling_is_the_finite_difference(name, how):
    """P18, in float64; the set and its weights are held fixed."""
    system = SYSTEMS[name]()
    generator = torch.Generator().manual_seed(1)
    inputs = {"x": longs(0, 1, 1, 0)}
    if how == "all":
        found, options = samplers.enumerate_all(system, inputs), {}
    else:
        found = samplers.monte_carlo(system, inputs, 5, generator=generator)
        options = {"repeats": "count"} if how == "few, counted" else {}
        if how == "weighted":
            options["log_weights"] = torch.randn(4, 5, generator=generator, dtype=torch.float64)

    def loss():
        return losses.sampling_loss(
            system, inputs, longs(0, 1, 0, 0), longs(1, 0, 1, 1), found.values, 0.4, **options
        ).loss

    loss().backward()
    for parameter, expected in finite_difference(system, loss).items():
        gradient = dict(system.named_parameters())[parameter].grad
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-8)


# --- structural zeros in Direct -------------------------------------------------------------------------------------

HALF, SURE = [[0.5, 0.5]], [[1.0, 0.0]]


@pytest.mark.parametrize(("policy", "reference", "dropped"), [
    (HALF, HALF, 0), (SURE, HALF, 1), (HALF, SURE, 1), (SURE, SURE, 1),
], ids=["none", "policy", "reference", "both"])  # fmt: skip
@pytest.mark.parametrize("side", ["chosen", "rejected"])
@pytest.mark.parametrize("where", ["hidden", "output"])
def test_direct_drops_impossible_pairs_and_keeps_gradients_finite(policy, reference, dropped, side, where):
    free = Categorical("y" if where == "output" else "z", {"x": 1}, 2, [[0.3, 0.7]])
    zero = Categorical("z" if where == "output" else "y", {"x": 1}, 2, policy, reference)
    system = CompoundSystem([free, zero])
    x, ok, other = (
        {"x": longs(0, 0)},
        {free.name: longs(0, 1), zero.name: longs(0, 0)},
        {free.name: longs(1, 0), zero.name: longs(0, 1)},
    )
    chosen, rejected = (other, ok) if side == "chosen" else (ok, other)
    out = losses.direct_loss(system, x | chosen, x | rejected, 1.0)
    assert out.dropped == dropped and out.kept.tolist() == [True, not dropped]
    assert torch.isnan(out.margin).tolist() == torch.isnan(out.log_ratio_gap).tolist() == [False, bool(dropped)]
    assert all(torch.isnan(share).tolist() == [False, bool(dropped)] for share in out.shares.values())
    out.loss.backward()
    assert torch.isfinite(out.loss) and all(torch.isfinite(p.grad).all() for p in system.parameters())
    alone = losses.direct_loss(
        system, {n: v[:1] for n, v in (x | chosen).items()}, {n: v[:1] for n, v in (x | rejected).items()}, 1.0
    )
    assert out.margin[0] == alone.margin[0]
    if dropped:
        assert out.loss == alone.loss
        with pytest.raises(errors.NoMarginError, match="none of the 1 pairs"):
            losses.direct_loss(
                system, {n: v[1:] for n, v in (x | chosen).items()}, {n: v[1:] for n, v in (x | rejected).items()}, 1.0
            )


def test_adam_never_makes_a_structural_zero_finite_or_nan():
    system = with_zeros()
    zeros = {name: torch.isneginf(p.detach()) for name, p in system.named_parameters()}
    assert any(z.any() for z in zeros.values())
    optimiser = torch.optim.AdamW(system.parameters(), lr=0.1, weight_decay=0.1)
    inputs = {"x": longs(0, 1, 0, 1)}
    sets = samplers.enumerate_all(system, inputs)
    for _ in range(5):
        optimiser.zero_grad()
        losses.sampling_loss(system, inputs, longs(0, 1, 2, 3), longs(1, 2, 3, 0), sets.values, 0.5).loss.backward()
        optimiser.step()
    for name, parameter in system.named_parameters():
        assert torch.equal(torch.isneginf(parameter), zeros[name]) and not torch.isnan(parameter).any()


# --- SysDPO-Sampling: values ----------------------------------------------------------------------------------------


def two_drafts():
    y = Categorical("y", {"x": 1}, 2, [[0.8, 0.2]], [[0.5, 0.5]])
    z = Categorical("z", {"y": 2}, 2, [[0.6, 0.4], [0.3, 0.7]], [[0.5, 0.5], [0.9, 0.1]])
    return CompoundSystem([y, z])


def test_sampling_by_hand():
    """p(z=0) = .54, p_ref(z=0) = .7: margin, shares, the entry "posterior", effective number."""
    out = losses.sampling_loss(two_drafts(), {"x": longs(0)}, longs(0), longs(1), {"y": torch.tensor([[0, 1]])}, 0.5)
    gap = math.log(0.54 / 0.7) - math.log(0.46 / 0.3)
    assert out.log_ratio_gap.item() == pytest.approx(gap) and out.margin.item() == pytest.approx(0.5 * gap)
    w, w_ref = (
        {0: [0.48 / 0.54, 0.06 / 0.54], 1: [0.32 / 0.46, 0.14 / 0.46]},
        {0: [0.25 / 0.7, 0.45 / 0.7], 1: [0.25 / 0.3, 0.05 / 0.3]},
    )
    ratio_y = [math.log(0.8 / 0.5), math.log(0.2 / 0.5)]
    ratio_z = {0: [math.log(0.6 / 0.5), math.log(0.3 / 0.9)], 1: [math.log(0.4 / 0.5), math.log(0.7 / 0.1)]}
    share_y = sum((w[0][a] - w[1][a]) * ratio_y[a] for a in (0, 1))
    share_z = sum(w[0][a] * ratio_z[0][a] - w[1][a] * ratio_z[1][a] for a in (0, 1))
    kl = {z: sum(w[z][a] * math.log(w[z][a] / w_ref[z][a]) for a in (0, 1)) for z in (0, 1)}
    assert out.shares["y"].item() == pytest.approx(share_y) and out.shares["z"].item() == pytest.approx(share_z)
    assert out.shares["posterior"].item() == pytest.approx(kl[1] - kl[0])
    assert share_y + share_z + kl[1] - kl[0] == pytest.approx(gap)
    effective = [1 / sum(v * v for v in w[z]) for z in (0, 1)]
    assert out.effective.item() == pytest.approx(sum(effective) / 2)


def test_repeats_drop_and_count_by_hand():
    """A = {0, 0, 1}: dropped, P_A(z=0) = .54; counted, it is 2 x .48 + .06."""
    call = [two_drafts(), {"x": longs(0)}, longs(0), longs(1), {"y": torch.tensor([[0, 0, 1]])}, 1.0]
    assert losses.sampling_loss(*call).margin.item() == pytest.approx(math.log(0.54 / 0.7) - math.log(0.46 / 0.3))
    counted = math.log(1.02 / 0.95) - math.log(0.78 / 0.55)
    assert losses.sampling_loss(*call, repeats="count").margin.item() == pytest.approx(counted)


def test_log_weights_multiply_all_four_uses():
    """Weights (3, 1/2): P_A = 3 p(0, z) + p(1, z) / 2, the same for both sides and for the reference."""
    out = losses.sampling_loss(
        two_drafts(),
        {"x": longs(0)},
        longs(0),
        longs(1),
        {"y": torch.tensor([[0, 1]])},
        1.0,
        log_weights=f64([[3.0, 0.5]]).log(),
    )
    expected = math.log((3 * 0.48 + 0.03) / (3 * 0.25 + 0.225)) - math.log((3 * 0.32 + 0.07) / (3 * 0.25 + 0.025))
    assert out.margin.item() == pytest.approx(expected)
    torch.testing.assert_close(sum(out.shares.values()), out.log_ratio_gap)
    minus_infinity = losses.sampling_loss(
        two_drafts(),
        {"x": longs(0)},
        longs(0),
        longs(1),
        {"y": torch.tensor([[0, 1]])},
        1.0,
        log_weights=f64([[0.0, -math.inf]]),
    )
    alone = losses.sampling_loss(two_drafts(), {"x": longs(0)}, longs(0), longs(1), {"y": torch.tensor([[0]])}, 1.0)
    assert minus_infinity.margin.item() == pytest.approx(alone.margin.item())


def test_a_common_factor_of_the_weights_cancels():
    call = [rs.chain(), *chain_pairs(), {"y": torch.tensor([[0, 1], [2, 0], [1, 1]])}, 0.5]
    shifted = losses.sampling_loss(*call, log_weights=torch.full((3, 2), 1.7))
    torch.testing.assert_close(shifted.margin, losses.sampling_loss(*call).margin)


def sets_of(kind, system, inputs):
    generator = torch.Generator().manual_seed(5)
    return {
        "all": lambda: samplers.enumerate_all(system, inputs),
        "monte carlo": lambda: samplers.monte_carlo(system, inputs, 3, generator=generator),
        "importance": lambda: samplers.monte_carlo(system, inputs, 3, generator=generator, weights="importance"),
        "diverse": lambda: samplers.diverse_beam(system, inputs, 2),
        "gumbel": lambda: samplers.gumbel_top_k(system, inputs, 2, generator=generator),
        "horvitz-thompson": lambda: samplers.gumbel_top_k(
            system, inputs, 2, generator=generator, weights="horvitz_thompson"
        ),
        "one": lambda: samplers.monte_carlo(system, inputs, 1, generator=generator),
    }[kind]()


SETS = ["all", "monte carlo", "importance", "diverse", "gumbel", "horvitz-thompson", "one"]


@pytest.mark.parametrize("repeats", ["drop", "count"])
@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("make", [rs.chain, rs.collider], ids=["chain", "collider"])
def test_at_the_start_the_loss_is_log_2_for_every_set(make, kind, repeats):
    """Theory S3.3."""
    system = make(moved=False)
    inputs, chosen, rejected = chain_pairs()
    found = sets_of(kind, system, inputs)
    out = losses.sampling_loss(
        system, inputs, chosen, rejected, found.values, 0.7, repeats=repeats, log_weights=found.log_weights
    )
    assert out.loss.item() == LOG2 and out.margin.tolist() == [0.0] * 3 and out.dropped == 0


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("make", [rs.chain, rs.collider, with_zeros], ids=["chain", "collider", "zeros"])
def test_shares_of_sampling_sum_to_the_gap(make, kind):
    system = make()
    inputs, chosen, rejected = chain_pairs()
    found = sets_of(kind, system, inputs)
    out = losses.sampling_loss(system, inputs, chosen, rejected, found.values, 0.7, log_weights=found.log_weights)
    assert set(out.shares) == {*system.order, "posterior"}
    torch.testing.assert_close(sum(out.shares.values()), out.log_ratio_gap, equal_nan=True, rtol=0, atol=1e-12)
    torch.testing.assert_close(out.margin.detach(), 0.7 * out.log_ratio_gap, equal_nan=True, rtol=0, atol=1e-12)
    effective = out.effective[out.kept]
    assert bool(((effective >= 1 - 1e-12) & (effective <= found.distinct[out.kept] + 1e-12)).all())


# --- the k = 1 theorem (theory S3.2) --------------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", ["drop", "count"])
@pytest.mark.parametrize("multiplicity", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_one_distinct_intermediate_gives_the_draft_exactly_no_gradient(seed, multiplicity, repeats):
    inputs, chosen, rejected = chain_pairs()
    for system, one in (
        (rs.chain(seed=seed), {"y": longs(0, 2, 1)}),
        (rs.collider(seed=seed), {"y1": longs(0, 1, 0), "y2": longs(2, 0, 1)}),
    ):
        sets = {name: value[:, None].repeat(1, multiplicity) for name, value in one.items()}
        losses.sampling_loss(system, inputs, chosen, rejected, sets, 0.5, repeats=repeats).loss.backward()
        assert all(not system[name].logits.grad.any() for name in one)
        assert system["z"].logits.grad.abs().max() > 1e-3


def test_two_distinct_intermediates_do_give_it_one():
    """The mutant of the theorem: the test above fails on anything that lets psi_1 learn."""
    system = rs.chain()
    losses.sampling_loss(system, *chain_pairs(), {"y": torch.tensor([[0, 1], [2, 0], [1, 0]])}, 0.5).loss.backward()
    assert system["y"].logits.grad.abs().max() > 1e-3


def test_paraphrases_give_the_draft_no_gradient_either():
    """Theory S3.2: p(z|x,a) the same for all a in A."""
    z = [[0.2, 0.8], [0.2, 0.8], [0.6, 0.4]]
    system = CompoundSystem(
        [Categorical("y", {"x": 2}, 3, rs.table(1, 2, 3)), Categorical("z", {"y": 3}, 2, z, [[0.5, 0.5]] * 3)]
    )
    losses.sampling_loss(
        system, {"x": longs(0)}, longs(0), longs(1), {"y": torch.tensor([[0, 1]])}, 0.5
    ).loss.backward()
    assert system["y"].logits.grad.abs().max() < 1e-16


def test_gradient_on_the_draft_is_a_difference_of_posterior_averages():
    """Theory S3.1."""
    system = two_drafts()
    out = losses.sampling_loss(system, {"x": longs(0)}, longs(0), longs(1), {"y": torch.tensor([[0, 1]])}, 0.5)
    out.loss.backward()
    scale = -0.5 * torch.sigmoid(-out.margin.detach()).item()
    difference = 0.48 / 0.54 - 0.32 / 0.46  # weight of draft 0 in the winner's posterior minus the loser's
    assert system["y"].logits.grad[0].tolist() == pytest.approx([scale * difference, -scale * difference])


# --- all intermediates: Sampling is DPO on the marginal -------------------------------------------------------------


@pytest.mark.property
@settings(max_examples=60, deadline=None, derandomize=True)
@given(rs.specs(output_is_table=True), st.integers(0, 10_000))
def test_with_all_intermediates_sampling_is_dpo_on_the_marginal(spec, seed):
    system, twin = rs.build(spec), rs.build(spec)
    policy, reference = rs.marginal(spec), rs.marginal(spec, reference=True)
    rng, rows = np.random.default_rng(seed), 6
    x = rng.integers(len(policy), size=rows)
    sizes = [spec.cardinality[name] for name in spec.inputs]
    inputs = {name: torch.tensor(v) for name, v in zip(spec.inputs, np.unravel_index(x, sizes))}
    chosen, rejected = (rng.integers(policy.shape[1], size=rows) for _ in range(2))
    possible = np.all([table[x, z] > 0 for table in (policy, reference) for z in (chosen, rejected)], axis=0)
    found = samplers.enumerate_all(system, inputs)
    call = [system, inputs, torch.tensor(chosen), torch.tensor(rejected), found.values, 0.3]
    if not possible.any():
        with pytest.raises(errors.NoMarginError):
            losses.sampling_loss(*call)
        return
    out = losses.sampling_loss(*call)
    assert out.kept.tolist() == possible.tolist() and out.dropped == rows - possible.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(policy) - np.log(reference)
        margin = 0.3 * (ratio[x, chosen] - ratio[x, rejected])[possible]
    np.testing.assert_allclose(out.margin.detach().numpy()[possible], margin, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(out.loss.item(), np.logaddexp(0, -margin).mean(), rtol=1e-9)
    torch.testing.assert_close(sum(out.shares.values()), out.log_ratio_gap, equal_nan=True, rtol=0, atol=1e-9)
    out.loss.backward()
    p = exact.marginal(twin)[torch.tensor(x[possible])]
    p_ref = exact.marginal(twin, reference=True).detach()[torch.tensor(x[possible])]
    index = torch.arange(possible.sum()), torch.tensor(chosen[possible]), torch.tensor(rejected[possible])
    gap = (p[index[:2]] / p_ref[index[:2]]).log() - (p[index[::2]] / p_ref[index[::2]]).log()
    losses.dpo_loss(0.3 * gap).backward()
    for (name, parameter), other in zip(system.named_parameters(), twin.parameters()):
        expected = torch.zeros_like(parameter) if other.grad is None else other.grad
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9, msg=name)


def test_recoding_an_intermediate_changes_nothing():
    """Theory S2.6."""
    y, z = rs.table(0, 2, 3), rs.table(1, 3, 3)
    y_ref, z_ref, new = rs.table(2, 2, 3), rs.table(3, 3, 3), [2, 0, 1]
    plain = CompoundSystem([Categorical("y", {"x": 2}, 3, y, y_ref), Categorical("z", {"y": 3}, 3, z, z_ref)])
    coded = CompoundSystem(
        [Categorical("y", {"x": 2}, 3, y[:, new], y_ref[:, new]), Categorical("z", {"y": 3}, 3, z[new], z_ref[new])]
    )
    for system in (plain, coded):
        system.sets = samplers.enumerate_all(system, {"x": longs(0, 1, 1)}).values
    found = [losses.sampling_loss(system, *chain_pairs(), system.sets, 0.5).margin for system in (plain, coded)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-14)


# --- structural zeros in Sampling -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "reference", "dropped"), [
    ([1.0, 0.0], [0.5, 0.5], 1), ([0.5, 0.5], [1.0, 0.0], 1), ([1.0, 0.0], [1.0, 0.0], 1), ([0.5, 0.5], [0.5, 0.5], 0),
], ids=["policy", "reference", "both", "none"])  # fmt: skip
@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_sampling_drops_pairs_that_no_intermediate_can_produce(policy, reference, dropped, side):
    z = Categorical("z", {"y": 2}, 2, [policy] * 2, [reference] * 2)
    system = CompoundSystem([Categorical("y", {"x": 1}, 2, [[0.3, 0.7]]), z])
    inputs, sets = {"x": longs(0, 0)}, {"y": torch.tensor([[0, 1], [0, 1]])}
    first, second = longs(0, 0), longs(0, 1)
    pair = (second, first) if side == "chosen" else (first, second)
    out = losses.sampling_loss(system, inputs, *pair, sets, 1.0)
    assert out.dropped == dropped and out.kept.tolist() == [True, not dropped]
    assert torch.isnan(out.effective).tolist() == [False, bool(dropped)]
    assert all(torch.isnan(share).tolist() == [False, bool(dropped)] for share in out.shares.values())
    out.loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in system.parameters())
    if dropped:
        with pytest.raises(errors.NoMarginError, match="more diverse"):
            losses.sampling_loss(system, {"x": longs(0)}, pair[0][1:], pair[1][1:], {"y": sets["y"][1:]}, 1.0)


def test_an_intermediate_that_one_side_alone_can_use_counts_for_that_side():
    """Draft 1 is impossible under the reference, draft 0 makes z = 1 impossible under the policy: P(1) comes from draft 1."""
    y = Categorical("y", {"x": 1}, 2, [[0.5, 0.5]], [[1.0, 0.0]])
    z = Categorical("z", {"y": 2}, 2, [[1.0, 0.0], [0.2, 0.8]], [[0.6, 0.4], [0.5, 0.5]])
    system = CompoundSystem([y, z])
    out = losses.sampling_loss(system, {"x": longs(0)}, longs(1), longs(0), {"y": torch.tensor([[0, 1]])}, 1.0)
    assert out.margin.item() == pytest.approx(math.log(0.4 / 0.4) - math.log(0.6 / 0.6), abs=1e-12)
    torch.testing.assert_close(sum(out.shares.values()), out.log_ratio_gap)
    out.loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in system.parameters())


# --- frozen components, Tools, odd graphs ---------------------------------------------------------------------------


def test_a_frozen_draft_gets_no_gradient_but_still_weighs_the_sum():
    inputs, chosen, rejected = chain_pairs()
    free, frozen = rs.chain(), rs.chain()
    frozen.freeze("y")
    sets = samplers.enumerate_all(free, inputs).values
    margins = [losses.sampling_loss(s, inputs, chosen, rejected, sets, 0.5).margin for s in (free, frozen)]
    assert torch.equal(*margins)
    losses.dpo_loss(margins[0]).backward(), losses.dpo_loss(margins[1]).backward()
    assert frozen["y"].logits.grad is None and torch.equal(frozen["z"].logits.grad, free["z"].logits.grad)
    unweighted = CompoundSystem([Categorical("y", {"x": 2}, 3), frozen["z"]])  # p(a|x) left out: the same for all a
    assert not torch.allclose(losses.sampling_loss(unweighted, inputs, chosen, rejected, sets, 0.5).margin, margins[0])


def test_a_component_frozen_at_its_start_has_no_share_in_direct():
    system = rs.chain(moved=False)
    with torch.no_grad():
        system["z"].logits.copy_(f64(rs.table(3, 3, 3)).log())
    system.freeze("y")
    out = losses.direct_loss(system, *chain_traces(), 0.5)
    out.loss.backward()
    assert not out.shares["y"].any() and system["y"].logits.grad is None and system["z"].logits.grad.any()


def test_all_frozen_gives_a_loss_without_gradient():
    system = rs.chain()
    system.freeze("y"), system.freeze("z")
    out = losses.direct_loss(system, *chain_traces(), 0.5)
    assert not out.loss.requires_grad and torch.isfinite(out.loss)


def with_tool():
    """x -> y -> t -> z with t = y // 2."""
    y = Categorical("y", {"x": 2}, 4, rs.table(0, 2, 4), rs.table(1, 2, 4))
    z = Categorical("z", {"t": 2, "x": 2}, 3, rs.table(2, 2, 2, 3), rs.table(3, 2, 2, 3))
    return CompoundSystem([z, Tool("t", ["y"], lambda y: y // 2), y])


def test_deterministic_intermediates_may_be_left_out():
    system = with_tool()
    inputs, chosen, rejected = chain_pairs()
    y = torch.tensor([[0, 3], [2, 1], [1, 0]])
    without = losses.sampling_loss(system, inputs, chosen, rejected, {"y": y}, 0.5)
    given = losses.sampling_loss(system, inputs, chosen, rejected, {"y": y, "t": y // 2}, 0.5)
    assert torch.equal(without.margin, given.margin)
    assert not given.shares["t"].any() and "t" not in without.shares
    wrong = losses.sampling_loss(
        system, inputs, chosen, rejected, {"y": y, "t": torch.tensor([[1, 1], [1, 0], [0, 0]])}, 0.5
    )
    alone = losses.sampling_loss(system, inputs, chosen, rejected, {"y": torch.tensor([[3, 3], [2, 1], [1, 0]])}, 0.5)
    torch.testing.assert_close(wrong.margin, alone.margin)  # an assignment that the function contradicts has weight 0


def test_hidden_components_that_are_all_deterministic_need_no_set():
    system = CompoundSystem(
        [
            Tool("t", ["x"], lambda x: 1 - x),
            Categorical("z", {"t": 2, "x": 2}, 3, rs.table(2, 2, 2, 3), rs.table(3, 2, 2, 3)),
        ]
    )
    out = losses.sampling_loss(system, *chain_pairs(), {}, 0.5)
    x, t, winner, loser = longs(0, 1, 1), longs(1, 0, 0), *chain_pairs()[1:]
    ratio = f64(rs.table(2, 2, 2, 3)).log() - f64(rs.table(3, 2, 2, 3)).log()
    torch.testing.assert_close(out.log_ratio_gap, ratio[t, x, winner] - ratio[t, x, loser])


def test_a_root_tool_is_computed_for_every_row():
    parts = [
        Tool("c", [], lambda: 1),
        Categorical("y", {"x": 2, "c": 2}, 2),
        Categorical("z", {"c": 2, "y": 2}, 3, rs.table(2, 2, 2, 3), rs.table(3, 2, 2, 3)),
    ]
    system = CompoundSystem(parts)
    inputs, chosen, rejected = chain_pairs()
    found = samplers.enumerate_all(system, inputs)
    assert found.values["c"].tolist() == [[1, 1]] * 3
    left_out = losses.sampling_loss(system, inputs, chosen, rejected, {"y": found.values["y"]}, 0.5)
    given = losses.sampling_loss(system, inputs, chosen, rejected, found.values, 0.5)
    torch.testing.assert_close(left_out.margin, given.margin)


def test_without_hidden_components_sampling_is_plain_dpo():
    z = Categorical("z", {"x": 2}, 3, rs.table(0, 2, 3), rs.table(1, 2, 3))
    system = CompoundSystem([z])
    inputs, chosen, rejected = chain_pairs()
    out = losses.sampling_loss(system, inputs, chosen, rejected, {}, 0.5)
    direct = losses.direct_loss(system, inputs | {"z": chosen}, inputs | {"z": rejected}, 0.5)
    torch.testing.assert_close(out.margin, direct.margin)
    torch.testing.assert_close(out.effective, torch.ones(3).double())


def with_a_side_branch(below_the_output):
    """x -> y -> z, and w that nothing reads: a child of y, or of z."""
    parts = [
        Categorical("y", {"x": 2}, 2, rs.table(0, 2, 2), rs.table(1, 2, 2)),
        Categorical("z", {"y": 2}, 3, rs.table(2, 2, 3), rs.table(3, 2, 3)),
    ]
    above = {"z": 3} if below_the_output else {"y": 2}
    shape = (*above.values(), 2)
    return CompoundSystem([*parts, Categorical("w", above, 2, rs.table(4, *shape), rs.table(5, *shape))])


@pytest.mark.parametrize("below", [False, True], ids=["beside", "below"])
def test_a_component_that_the_output_does_not_see_counts_only_where_it_is_given(below):
    """P_A sums p(a, z|x) over the listed a; summing w out in full leaves the marginal."""
    system, inputs = with_a_side_branch(below), {"x": longs(0, 1)}
    chosen, rejected = longs(0, 2), longs(1, 1)
    plain = losses.sampling_loss(system, inputs, chosen, rejected, {"y": torch.tensor([[0, 1]] * 2)}, 0.5)
    full = {"y": torch.tensor([[0, 0, 1, 1]] * 2), "w": torch.tensor([[0, 1, 0, 1]] * 2)}
    torch.testing.assert_close(losses.sampling_loss(system, inputs, chosen, rejected, full, 0.5).margin, plain.margin)
    part = {"y": torch.tensor([[0, 1]] * 2), "w": torch.tensor([[0, 1]] * 2)}
    found = losses.sampling_loss(system, inputs, chosen, rejected, part, 1.0).margin

    def log_sum(x, z, reference):
        with torch.no_grad():
            trace = {"x": longs(x, x), "y": longs(0, 1), "z": longs(z, z), "w": longs(0, 1)}
            if not reference:
                return system.log_prob(trace).logsumexp(0)
            with system.reference():
                return system.log_prob(trace).logsumexp(0)

    expected = [
        log_sum(x, w, False) - log_sum(x, w, True) - log_sum(x, loser, False) + log_sum(x, loser, True)
        for x, w, loser in zip([0, 1], chosen.tolist(), rejected.tolist())
    ]
    torch.testing.assert_close(found.detach(), torch.stack(expected))
    assert "w" not in plain.shares


def test_several_inputs_and_lists_of_values():
    z = Categorical("z", {"y": 3, "w": 2}, 3, rs.table(0, 3, 2, 3), rs.table(1, 3, 2, 3))
    system = CompoundSystem([Categorical("y", {"x": 2}, 3, rs.table(2, 2, 3)), z], inputs=("x", "w"))
    tensors = {"x": longs(0, 1), "w": longs(1, 1)}
    lists = {name: value.tolist() for name, value in tensors.items()}
    sets = torch.tensor([[0, 2], [1, 0]])
    first = losses.sampling_loss(system, tensors, longs(0, 1), longs(1, 2), {"y": sets}, 0.5)
    second = losses.sampling_loss(system, lists, [0, 1], [1, 2], {"y": sets.tolist()}, 0.5)
    assert torch.equal(first.margin, second.margin)


# --- bounds: shared noise -------------------------------------------------------------------------------------------


class Noisy(Component):
    """Score = value * noise; records the noise that it was given."""

    kind = "bound"

    def __init__(self):
        super().__init__("z", ["x"])
        self.seen = []

    def log_prob(self, value, parent_values, noise=None):
        self.seen.append(noise)
        return torch.stack([v.sum() for v in value]) * noise

    def draw_noise(self, value, generator=None):
        return torch.rand(len(value), generator=generator)

    def repeat_noise(self, noise):
        return torch.cat([noise, noise])


def test_one_noise_draw_serves_both_sides_policy_and_reference():
    """P38."""
    component = Noisy()
    system = CompoundSystem([component])
    images = [torch.ones(2, 1), torch.ones(2, 1), torch.ones(2, 1)]
    sides = [{"x": longs(0, 1, 0), "z": images}, {"x": longs(0, 1, 0), "z": [2 * image for image in images]}]
    state = torch.get_rng_state()
    losses.direct_loss(system, *sides, 0.5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)
    policy, reference = component.seen
    assert torch.equal(policy, reference) and torch.equal(policy[:3], policy[3:]) and len(set(policy[:3].tolist())) == 3


def test_pairs_with_different_numbers_of_images_are_dropped_and_counted():
    system = CompoundSystem([Noisy()])
    chosen = {"x": longs(0, 1), "z": [torch.ones(2, 1), torch.ones(2, 1)]}
    rejected = {"x": longs(0, 1), "z": [torch.ones(2, 1), torch.ones(3, 1)]}
    out = losses.direct_loss(system, chosen, rejected, 0.5)
    assert out.dropped == 1 and out.kept.tolist() == [True, False]
    with pytest.raises(errors.NoMarginError):
        losses.direct_loss(system, *({n: v[1:] for n, v in side.items()} for side in (chosen, rejected)), 0.5)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0, 0.0, -0.1, math.nan, math.inf, True, "0.1", None])
def test_beta_must_be_positive_and_finite(beta):
    system, sets = rs.chain(), {"y": torch.tensor([[0, 1]] * 3)}
    for call in (
        lambda: losses.direct_loss(system, *chain_traces(), beta),
        lambda: losses.sampling_loss(system, *chain_pairs(), sets, beta),
    ):
        with pytest.raises(errors.UnknownOptionError, match=f"beta must be a positive finite number, found {beta!r}"):
            call()


def test_numpy_numbers_are_betas():
    for beta in (np.float32(0.5), np.float64(0.5), 1, np.int64(1)):
        assert torch.isfinite(losses.direct_loss(rs.chain(), *chain_traces(), beta).loss)


X3 = {"x": longs(0, 1, 1)}
BAD_SETS = {
    "unknown repeats": (errors.UnknownOptionError, "repeats='dorp'.*'drop', 'count'", {"repeats": "dorp"}),
    "hidden one missing": (errors.MissingParentError, "hidden component 'y'", {"intermediates": {}}),
    "unknown intermediate": (errors.UnknownComponentError, "'q'", {"intermediates": {"q": torch.zeros(3, 2).long()}}),
    "output as intermediate": (
        errors.UnknownComponentError, "'z'", {"intermediates": {"y": torch.zeros(3, 2).long(), "z": torch.zeros(3, 2).long()}}
    ),
    "too few sets": (errors.BatchMismatchError, "'y': 2", {"intermediates": {"y": torch.zeros(2, 2).long()}}),
    "empty sets": (errors.BatchMismatchError, "k >= 1", {"intermediates": {"y": torch.zeros(3, 0).long()}}),
    "no axis k": (errors.BatchMismatchError, r"'y' have shape \(3,\)", {"intermediates": {"y": torch.zeros(3).long()}}),
    "texts for sets": (errors.BatchMismatchError, "single value 'ab'", {"intermediates": {"y": ["ab", "cd", "ef"]}}),
    "no winner": (errors.EmptyCompletionError, "row 1: chosen holds no answer", {"chosen": [0, None, 2]}),
    "no loser": (errors.EmptyCompletionError, "row 2: rejected holds no answer", {"rejected": [0, 1, None]}),
    "ragged sets": (errors.BatchMismatchError, "same number k", {"intermediates": {"y": [[0, 1], [0], [1, 2]]}}),
    "value out of range": (errors.ValueRangeError, "'y', row 3: y = 3", {"intermediates": {"y": [[0, 1], [0, 3], [1, 1]]}}),
    "winner out of range": (errors.ValueRangeError, "'z'.*z = 3", {"chosen": longs(0, 3, 1)}),
    "loser out of range": (errors.ValueRangeError, "'z'.*z = -1", {"rejected": longs(0, -1, 1)}),
    "winners too few": (errors.BatchMismatchError, "'chosen': 2, 'rejected': 3", {"chosen": longs(0, 1)}),
    "inputs too many": (errors.BatchMismatchError, "'x': 4", {"inputs": {"x": longs(0, 1, 1, 0)}}),
    "no pairs": (
        errors.BatchMismatchError, "no pairs",
        {"inputs": {"x": longs()}, "chosen": longs(), "rejected": longs(), "intermediates": {"y": torch.zeros(0, 2).long()}},
    ),
    "weights of another shape": (errors.BatchMismatchError, r"\(3, 3\), expected \(3, 2\)", {"log_weights": torch.zeros(3, 3)}),
    "weights NaN": (errors.NonFiniteError, "log_weights", {"log_weights": torch.full((3, 2), math.nan)}),
    "weights infinite": (errors.NonFiniteError, "log_weights", {"log_weights": torch.full((3, 2), math.inf)}),
    "nothing left": (errors.NoMarginError, "none of the 3 pairs", {"log_weights": torch.full((3, 2), -math.inf)}),
    "input missing": (errors.MissingParentError, "'x'", {"inputs": {}}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SETS)
def test_bad_sets_are_answered_by_name(case):
    kind, message, change = BAD_SETS[case]
    call = {
        "inputs": X3,
        "chosen": longs(0, 1, 2),
        "rejected": longs(2, 0, 1),
        "intermediates": {"y": torch.tensor([[0, 1]] * 3)},
    }
    with pytest.raises(kind, match=message):
        losses.sampling_loss(rs.chain(), beta=0.5, **call | change)


def test_sampling_refuses_bounds_and_deterministic_outputs_and_names_direct():
    x = {"x": longs(0, 1)}
    with pytest.raises(errors.UnsupportedSamplerError, match="'z' scores by a bound.*direct_loss"):
        losses.sampling_loss(CompoundSystem([Noisy()]), x, longs(0, 1), longs(1, 0), {}, 0.5)
    vote = CompoundSystem([Categorical("y", {"x": 2}, 2), Tool("z", ["y"], abs)])
    with pytest.raises(errors.UnknownOptionError, match="'z' is deterministic.*direct_loss"):
        losses.sampling_loss(vote, x, longs(0, 1), longs(1, 0), {"y": torch.zeros(2, 2).long()}, 0.5)


def test_direct_trains_a_system_with_a_deterministic_output():
    vote = CompoundSystem([Categorical("y", {"x": 2}, 2), Tool("z", ["y"], abs)])
    chosen, rejected = ({"x": longs(0, 1), "y": y, "z": y} for y in (longs(0, 1), longs(1, 0)))
    losses.direct_loss(vote, chosen, rejected, 0.5).loss.backward()
    assert vote["y"].logits.grad.abs().max() > 0.01


BAD_TRACES = {
    "inputs differ": (errors.InputMismatchError, "row 2.*'x'.*1.*0", lambda c, r: r.update(x=longs(0, 1, 0, 0))),
    "component missing": (errors.MissingParentError, "'z'", lambda c, r: c.pop("z")),
    "loser shorter": (
        errors.BatchMismatchError,
        "4 chosen traces but 3",
        lambda c, r: r.update({n: v[:3] for n, v in r.items()}),
    ),
    "no pairs": (
        errors.BatchMismatchError,
        "no pairs",
        lambda c, r: [s.update({n: v[:0] for n, v in s.items()}) for s in (c, r)],
    ),
    "value out of range": (errors.ValueRangeError, "'y', row 1: y = 5", lambda c, r: c.update(y=longs(0, 5, 1, 1))),
}


@pytest.mark.parametrize("case", BAD_TRACES)
def test_bad_traces_are_answered_by_name(case):
    kind, message, change = BAD_TRACES[case]
    chosen, rejected = chain_traces()
    change(chosen, rejected)
    with pytest.raises(kind, match=message):
        losses.direct_loss(rs.chain(), chosen, rejected, 0.5)


def test_text_inputs_that_differ_within_a_pair_are_named():
    system = CompoundSystem([Tool("z", ["x"], str)])
    with pytest.raises(errors.InputMismatchError, match="row 1.*'b' and 'c'"):
        losses.direct_loss(system, {"x": ["a", "b"], "z": ["a", "b"]}, {"x": ["a", "c"], "z": ["a", "c"]}, 0.5)
