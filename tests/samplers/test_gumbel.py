"""Gumbel top-k: sampling without replacement, exact inclusion frequencies, unbiased weights."""

import itertools
import math

import pytest
import torch

from sysdpo_lab import CompoundSystem, errors, exact, losses, samplers
from sysdpo_lab.components import Categorical, Tool
from sysdpo_lab.samplers.gumbel import expand_perturbed, log_inclusion
from tests import random_systems as rs
from tests.random_systems import longs, mixture, within

DRAWS = 20_000


def without_replacement(p, k):
    """{ordered tuple: probability} of k successive draws, each renormalised over what is left."""
    result = {}
    for order in itertools.permutations(range(len(p)), k):
        probability, left = 1.0, 1.0
        for a in order:
            probability, left = probability * p[a] / left, left - p[a]
        result[order] = probability
    return result


def deep():
    """x -> y1 -> y2 -> z: a chain of two hidden components."""
    return CompoundSystem([
        Categorical("y1", {"x": 2}, 2, rs.table(0, 2, 2)),
        Categorical("y2", {"y1": 2, "x": 2}, 2, rs.table(1, 2, 2, 2)),
        Categorical("z", {"y2": 2, "y1": 2}, 3, rs.table(2, 2, 2, 3)),
    ])  # fmt: skip


@pytest.mark.parametrize("make", [rs.chain, deep], ids=["one node", "chain of two"])
def test_ordered_draws_have_the_probabilities_of_drawing_without_replacement(make):
    system, x = make(), torch.zeros(DRAWS, dtype=torch.long)
    found = samplers.gumbel_top_k(system, {"x": x}, 2, generator=torch.Generator().manual_seed(0))
    every = samplers.enumerate_all(system, {"x": longs(0)})
    p = every.log_probs[0].exp().tolist()
    index = {tuple(v[0, a].item() for v in every.values.values()): a for a in range(len(p))}
    rows = zip(*(v.tolist() for v in found.values.values()))
    pairs = [tuple(index[tuple(v[j] for v in row)] for j in range(2)) for row in rows]
    for order, expected in without_replacement(p, 2).items():
        frequency = pairs.count(order) / DRAWS
        assert abs(frequency - expected) < 5 * math.sqrt(expected * (1 - expected) / DRAWS), order


def test_inclusion_frequencies_of_parallel_drafts():
    """The beam of the collider runs over joint values: 2 x 3 of them, k = 3."""
    system, x = rs.collider(), torch.ones(DRAWS, dtype=torch.long)
    found = samplers.gumbel_top_k(system, {"x": x}, 3, generator=torch.Generator().manual_seed(0))
    assert found.distinct.eq(3).all()
    every = samplers.enumerate_all(system, {"x": longs(1)})
    law = without_replacement(every.log_probs[0].exp().tolist(), 3)
    for a in range(6):
        hit = (found.values["y1"] == every.values["y1"][0, a]) & (found.values["y2"] == every.values["y2"][0, a])
        assert within(hit.any(1).double()[:, None], sum(q for order, q in law.items() if a in order))


@pytest.mark.parametrize("make", [rs.chain, rs.collider, deep], ids=["one node", "collider", "chain of two"])
@pytest.mark.parametrize("k", [1, 2])
def test_horvitz_thompson_weights_make_the_mixture_unbiased(make, k):
    system, x = make(), torch.zeros(DRAWS, dtype=torch.long)
    exactly = exact.marginal(system).detach()[0]
    generator = torch.Generator().manual_seed(k)
    weighted = samplers.gumbel_top_k(system, {"x": x}, k, generator=generator, weights="horvitz_thompson")
    plain = samplers.gumbel_top_k(system, {"x": x}, k, generator=generator)
    assert all(within(mixture(system, weighted, x, z)[:, None], exactly[z]) for z in range(3))
    assert not all(within(mixture(system, plain, x, z)[:, None], exactly[z]) for z in range(3))


@pytest.mark.parametrize("weights", ["none", "horvitz_thompson"])
@pytest.mark.parametrize("k", [3, 4, 7])
def test_with_k_at_least_the_number_of_values_everything_is_in_with_weight_one(k, weights):
    system = rs.chain(drafts=3)
    inputs = {"x": longs(0, 1)}
    found = samplers.gumbel_top_k(system, inputs, k, generator=torch.Generator().manual_seed(0), weights=weights)
    assert [sorted(row[:3]) for row in found.values["y"].tolist()] == [[0, 1, 2]] * 2 and found.distinct.tolist() == [
        3,
        3,
    ]
    torch.testing.assert_close(found.log_weights[:, :3], torch.zeros(2, 3).double())
    assert torch.isneginf(found.log_weights[:, 3:]).all() and found.values["y"].shape == (2, k)
    every = samplers.enumerate_all(system, inputs)
    margins = [
        losses.sampling_loss(system, inputs, longs(0, 1), longs(1, 2), s.values, 0.5, log_weights=s.log_weights).margin
        for s in (found, every)
    ]
    torch.testing.assert_close(*margins)


def test_structural_zeros_are_never_in_the_set():
    first = Categorical("y1", {"x": 1}, 3, [[0.6, 0.4, 0.0]])
    second = Categorical("y2", {"y1": 3}, 3, [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [1 / 3] * 3])
    system = CompoundSystem([first, second, Categorical("z", {"y2": 3}, 2)])
    found = samplers.gumbel_top_k(
        system, {"x": torch.zeros(50, dtype=torch.long)}, 5, generator=torch.Generator().manual_seed(0)
    )
    real = torch.isfinite(found.log_weights)
    assert real.sum(1).eq(3).all() and found.distinct.eq(3).all() and not torch.isnan(found.log_probs).any()
    members = {*zip(found.values["y1"][real].tolist(), found.values["y2"][real].tolist())}
    assert members == {(0, 0), (1, 1), (1, 2)}


def test_tools_pass_the_beams_through():
    parts = [
        Categorical("y", {"x": 2}, 4, rs.table(0, 2, 4)), Tool("c", [], lambda: 1),
        Tool("t", ["y", "c"], lambda y, c: (y + c) % 4),
        Categorical("w", {"t": 4}, 2, rs.table(1, 4, 2)), Categorical("z", {"w": 2}, 2),
    ]  # fmt: skip
    found = samplers.gumbel_top_k(
        CompoundSystem(parts), {"x": longs(0, 1)}, 3, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(found.values["t"], (found.values["y"] + 1) % 4) and found.values["c"].eq(1).all()
    assert found.distinct.tolist() == [3, 3]


def test_a_system_whose_hidden_components_are_all_deterministic_has_one_assignment():
    system = CompoundSystem([Tool("t", ["x"], lambda x: 1 - x), Categorical("z", {"t": 2, "x": 2}, 2)])
    for weights in ("none", "horvitz_thompson"):
        found = samplers.gumbel_top_k(system, {"x": longs(0, 1)}, 3, weights=weights)
        assert found.values["t"][:, 0].tolist() == [1, 0] and found.distinct.tolist() == [1, 1]
        assert found.log_weights.exp().tolist() == [[1.0, 0.0, 0.0]] * 2


def test_text_inputs_and_lists_are_carried_along():
    system = CompoundSystem([
        Tool("t", ["x"], len), Categorical("y", {"t": 4}, 3), Categorical("z", {"y": 3, "t": 4}, 2)
    ])  # fmt: skip
    found = samplers.gumbel_top_k(system, {"x": ["a", "abc"]}, 2, generator=torch.Generator().manual_seed(0))
    assert found.values["t"].tolist() == [[1, 1], [3, 3]] and found.distinct.tolist() == [2, 2]


def test_expand_perturbed_keeps_the_parents_maximum_and_orders_by_gumbel():
    children = torch.tensor([[[0.2, 0.3], [0.4, 0.1]]]).double().log()
    gumbels = torch.tensor([[1.0, -0.5]]).double()
    beam, child, log_probs, scores = expand_perturbed(children, gumbels, 4, torch.Generator().manual_seed(0))
    assert scores.tolist() == [sorted(scores[0].tolist(), reverse=True)]
    for parent, top in ((0, 1.0), (1, -0.5)):
        assert scores[beam == parent].max().item() == pytest.approx(top)
    torch.testing.assert_close(log_probs, children[0][beam, child])


@pytest.mark.parametrize("p", [1e-12, 1e-5, 0.3, 0.999])
def test_log_inclusion_is_accurate_for_small_probabilities(p):
    """P(Gumbel(log p) > kappa) = 1 - exp(-p e^-kappa)."""
    for kappa in (-3.0, 0.0, 4.0):
        found = log_inclusion(torch.tensor([[math.log(p)]]).double(), torch.tensor([kappa]).double()).item()
        assert found == pytest.approx(math.log(-math.expm1(-p * math.exp(-kappa))), rel=1e-7, abs=1e-12)


def test_unknown_weights_are_named():
    with pytest.raises(errors.UnknownOptionError, match="weights='ht'.*'none', 'horvitz_thompson'"):
        samplers.gumbel_top_k(rs.chain(), {"x": longs(0)}, 2, weights="ht")
