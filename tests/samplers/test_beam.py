"""Diverse beam search over tables: the k best of the first layer, greedy behind it."""

import pytest
import torch

from sysdpo_lab import CompoundSystem, errors, losses, samplers
from sysdpo_lab.components import Categorical, Component, Tool
from tests import random_systems as rs
from tests.random_systems import longs


@pytest.mark.parametrize("k", [1, 2, 3])
def test_on_a_table_it_is_top_k_best_first(k):
    system = rs.chain(drafts=5)
    found = samplers.diverse_beam(system, {"x": longs(0, 1)}, k)
    best = system["y"].probabilities().topk(k, dim=1)
    assert torch.equal(found.values["y"], best.indices)
    torch.testing.assert_close(found.log_probs.exp(), best.values.detach())


def test_equal_probabilities_take_the_smaller_value_first():
    system = CompoundSystem([Categorical("y", {"x": 1}, 4), Categorical("z", {"y": 4}, 2)])
    assert samplers.diverse_beam(system, {"x": longs(0)}, 3).values["y"].tolist() == [[0, 1, 2]]


def test_a_later_component_is_greedy_in_the_context_of_its_assignment():
    y1, y2 = [[0.2, 0.5, 0.3]], [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]
    parts = [Categorical("y1", {"x": 1}, 3, y1), Categorical("y2", {"y1": 3}, 2, y2), Categorical("z", {"y2": 2}, 2)]
    found = samplers.diverse_beam(CompoundSystem(parts), {"x": longs(0)}, 2)
    assert found.values["y1"].tolist() == [[1, 2]] and found.values["y2"].tolist() == [[1, 0]]
    torch.testing.assert_close(found.log_probs.exp(), torch.tensor([[0.4, 0.18]]).double(), rtol=0, atol=1e-7)


def test_parallel_drafts_advance_together():
    """k joint assignments, not k^m: entry j takes each search's j-th."""
    system = rs.collider()
    found = samplers.diverse_beam(system, {"x": longs(0, 1)}, 2)
    for name in ("y1", "y2"):
        assert torch.equal(found.values[name], system[name].probabilities().topk(2, dim=1).indices)


def test_entries_beyond_the_table_have_no_weight():
    system = rs.chain(drafts=3)
    found = samplers.diverse_beam(system, {"x": longs(0, 1)}, 5)
    assert torch.isfinite(found.log_weights).tolist() == [[True] * 3 + [False] * 2] * 2 and found.distinct.tolist() == [
        3,
        3,
    ]
    inputs, chosen, rejected = {"x": longs(0, 1)}, longs(0, 1), longs(1, 2)
    every = samplers.enumerate_all(system, inputs)
    for repeats in ("drop", "count"):
        some = losses.sampling_loss(
            system, inputs, chosen, rejected, found.values, 0.5, repeats=repeats, log_weights=found.log_weights
        )
        torch.testing.assert_close(
            some.margin, losses.sampling_loss(system, inputs, chosen, rejected, every.values, 0.5).margin
        )


def test_a_short_table_beside_a_long_one_repeats_its_best():
    found = samplers.diverse_beam(rs.collider(), {"x": longs(0)}, 3)  # y1 has 2 values, y2 has 3
    assert found.distinct.tolist() == [3] and found.values["y1"][0, 2] == found.values["y1"][0, 0]
    assert sorted(found.values["y2"][0].tolist()) == [0, 1, 2]


def test_impossible_values_have_no_weight():
    system = CompoundSystem([Categorical("y", {"x": 1}, 3, [[0.0, 0.7, 0.3]]), Categorical("z", {"y": 3}, 2)])
    found = samplers.diverse_beam(system, {"x": longs(0)}, 3)
    assert found.values["y"].tolist() == [[1, 2, 0]] and found.log_weights.exp().tolist() == [[1.0, 1.0, 0.0]]


def test_roots_and_tools():
    parts = [
        Categorical("r", {}, 2, [0.3, 0.7]), Tool("c", [], lambda: 1), Tool("t", ["r"], lambda r: 1 - r),
        Categorical("z", {"t": 2, "x": 2, "c": 2}, 2),
    ]  # fmt: skip
    found = samplers.diverse_beam(CompoundSystem(parts), {"x": longs(0, 1, 0)}, 2)
    assert found.values["r"].tolist() == [[1, 0]] * 3 and found.values["t"].tolist() == [[0, 1]] * 3
    assert found.values["c"].tolist() == [[1, 1]] * 3


class Records(Component):
    """Records the options of its search."""

    def diverse(self, parent_values, k, **options):
        self.options = options
        return [["a", "b"][:k] for _ in parent_values["x"]]

    def log_prob(self, value, parent_values):
        return torch.zeros(len(value))


def test_options_reach_the_component_and_the_penalty_is_20():
    system = CompoundSystem([Records("y", ["x"]), Records("z", ["x", "y"])])
    samplers.diverse_beam(system, {"x": ["p"]}, 2)
    assert system["y"].options == {"diversity_penalty": 20.0}
    samplers.diverse_beam(system, {"x": ["p"]}, 2, diversity_penalty=3.0, max_new_tokens=5)
    assert system["y"].options == {"diversity_penalty": 3.0, "max_new_tokens": 5}


def test_an_option_that_no_search_has_is_named_also_on_tables():
    with pytest.raises(errors.UnknownOptionError, match="'penalty' does not exist; choose one of 'diversity_penalty'"):
        samplers.diverse_beam(rs.chain(), {"x": longs(0)}, 2, penalty=3.0)
