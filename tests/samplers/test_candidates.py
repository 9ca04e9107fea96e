"""What samplers share: set sizes, weights, distinct values, and equality of joint values."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sysdpo_lab import CompoundSystem, errors, losses, samplers
from sysdpo_lab.components import Categorical, Completion, Component
from sysdpo_lab.components.base import joint_codes
from sysdpo_lab.samplers.candidates import hidden_log_prob, multiplicity
from tests import random_systems as rs
from tests.random_systems import longs

ALL = {
    "enumerate_all": samplers.enumerate_all,
    "monte_carlo": samplers.monte_carlo,
    "diverse_beam": samplers.diverse_beam,
    "gumbel_top_k": samplers.gumbel_top_k,
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 6))
def test_multiplicity_is_the_pairwise_count(seed, rows, size):
    rng = np.random.default_rng(seed)
    a, b = (torch.tensor(rng.integers(0, 2, (rows, size))) for _ in range(2))
    found = multiplicity({"a": a, "b": b}, rows, size)
    same = (a[:, :, None] == a[:, None]) & (b[:, :, None] == b[:, None])
    assert torch.equal(found, same.sum(-1))


def test_equality_of_joint_values_covers_every_kind_of_batch():
    """Tables, texts, completions (by ids), images, records that cannot be hashed."""
    ids, other = (1, 2), (1, 3)
    columns = {
        "table": torch.tensor([[0, 1, 0]]),
        "text": [["a", "b", "a"]],
        "completion": [[Completion("a", ids), Completion("a", other), Completion("A", ids)]],
        "images": torch.stack([torch.zeros(2, 3), torch.eye(2, 3), torch.zeros(2, 3)])[None],
        "list of images": [[torch.zeros(2), torch.ones(2), torch.zeros(2)]],
        "shapes": [[torch.zeros(2), torch.zeros(3), torch.zeros(2)]],
        "records": [[{"a": 1}, {"a": 2}, {"a": 1}]],
        "arrays": [[np.zeros(2), np.ones(2), np.zeros(2)]],
        "mixed": [[None, "a", None]],
    }
    for name, column in columns.items():
        codes = joint_codes([column], 1, 3)[0].tolist()
        assert codes[0] == codes[2] != codes[1], name
    assert len(set(joint_codes(list(columns.values())[:2] + [[["p", "q", "r"]]], 1, 3)[0].tolist())) == 3


def test_large_sets_are_compared_quickly():
    columns = [torch.randint(10, (64, 4096), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    start = time.perf_counter()
    first = losses.first_of_each(columns, 64, 4096)
    times = multiplicity(dict(enumerate(columns)), 64, 4096)
    assert time.perf_counter() - start < 3
    assert int(first[0].sum()) == len(set(zip(*(c[0].tolist() for c in columns))))
    assert (times * first).sum(1).tolist() == [4096] * 64


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("k", [0, -1, 1.5, "2", True, None])
def test_k_must_be_a_whole_number_of_at_least_one(name, k):
    if name == "enumerate_all" and k is None:
        return
    with pytest.raises(errors.UnknownOptionError, match="k must be a whole number >= 1|k=|joint assignments"):
        ALL[name](rs.chain(), {"x": longs(0)}, k)


@pytest.mark.parametrize("name", ["monte_carlo", "diverse_beam", "gumbel_top_k"])
@pytest.mark.parametrize("make", [rs.chain, rs.collider], ids=["chain", "collider"])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_shapes_log_probs_and_distinct_values_agree_with_the_system(name, make, k):
    system, inputs = make(), {"x": longs(0, 1, 1)}
    found = ALL[name](system, inputs, k, generator=torch.Generator().manual_seed(0))
    assert set(found.values) == set(system.hidden) and all(v.shape == (3, k) for v in found.values.values())
    assert found.log_probs.shape == found.log_weights.shape == (3, k) and found.log_probs.dtype == torch.float64
    real = torch.isfinite(found.log_weights)
    expected = hidden_log_prob(system, inputs, found.values, k)
    torch.testing.assert_close(found.log_probs[real], expected[real])
    joint = list(zip(*(v.tolist() for v in found.values.values())))
    for row, values in enumerate(joint):
        members = {entry for entry, ok in zip(zip(*values), real[row].tolist()) if ok}
        assert int(found.distinct[row]) == len(members)
    assert not found.log_probs.requires_grad


@pytest.mark.parametrize("name", ALL)
def test_without_hidden_components_the_set_holds_one_empty_assignment(name):
    system = CompoundSystem([Categorical("z", {"x": 2}, 3, rs.table(0, 2, 3), rs.table(1, 2, 3))])
    options = {} if name == "enumerate_all" else {"k": 4}
    found = ALL[name](system, {"x": longs(0, 1)}, **options)
    assert found.values == {} and found.log_probs.tolist() == [[0.0], [0.0]] and found.distinct.tolist() == [1, 1]
    out = losses.sampling_loss(
        system, {"x": longs(0, 1)}, longs(0, 1), longs(1, 2), found.values, 0.5, log_weights=found.log_weights
    )
    assert out.dropped == 0


@pytest.mark.parametrize("name", ["monte_carlo", "gumbel_top_k"])
def test_only_the_generator_is_used(name):
    system, inputs = rs.collider(), {"x": torch.zeros(20, dtype=torch.long)}
    state = torch.get_rng_state()
    first, again, other = (
        ALL[name](system, inputs, 3, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    free, free_again = (ALL[name](system, inputs, 3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first.values[n], again.values[n]) for n in first.values)
    assert any(not torch.equal(first.values[n], other.values[n]) for n in first.values)
    assert any(not torch.equal(free.values[n], free_again.values[n]) for n in free.values)


@pytest.mark.parametrize("name", ["diverse_beam", "enumerate_all"])
def test_nothing_is_random(name):
    call = [rs.collider(), {"x": longs(0, 1)}] + ([3] if name == "diverse_beam" else [])
    first, again = ALL[name](*call), ALL[name](*call, generator=torch.Generator().manual_seed(5))
    assert all(torch.equal(first.values[n], again.values[n]) for n in first.values)


@pytest.mark.parametrize("name", ALL)
def test_samplers_follow_the_current_policy_without_gradients(name):
    """P52: the set is drawn from the policy, not from the reference, and builds no graph."""
    system = CompoundSystem([
        Categorical("y", {"x": 1}, 3, [[1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0]]), Categorical("z", {"y": 3}, 2)
    ])  # fmt: skip
    options = {} if name == "enumerate_all" else {"k": 2}
    found = ALL[name](system, {"x": longs(0)}, **options)
    real = torch.isfinite(found.log_probs) & torch.isfinite(found.log_weights)
    assert set(found.values["y"][real].tolist()) == {0} and not found.log_weights.requires_grad


class Wordy(Component):
    """Can be sampled, nothing else."""

    def sample(self, parent_values, num_samples=1, generator=None):
        rows = len(parent_values["x"])
        return ["a"] * rows if num_samples == 1 else [["a"] * num_samples] * rows

    def log_prob(self, value, parent_values):
        return torch.zeros(len(value))


@pytest.mark.parametrize("name", ["enumerate_all", "diverse_beam", "gumbel_top_k"])
def test_a_component_that_a_sampler_cannot_use_is_named(name):
    system = CompoundSystem([Wordy("y", ["x"]), Wordy("z", ["x", "y"])])
    options = {} if name == "enumerate_all" else {"k": 2}
    with pytest.raises(errors.UnsupportedSamplerError, match="'y' .Wordy."):
        ALL[name](system, {"x": ["p", "q"]}, **options)


def test_components_with_texts_are_sampled_as_lists():
    system = CompoundSystem([Wordy("y", ["x"]), Wordy("w", ["x", "y"]), Wordy("z", ["x", "w"])])
    found = samplers.monte_carlo(system, {"x": ["p", "q"]}, 3, generator=torch.Generator().manual_seed(0))
    assert found.values == {"y": [["a"] * 3] * 2, "w": [["a"] * 3] * 2} and found.distinct.tolist() == [1, 1]
    one = samplers.monte_carlo(system, {"x": ["p", "q"]}, 1, generator=torch.Generator().manual_seed(0))
    assert one.values["y"] == [["a"], ["a"]]


@pytest.mark.parametrize("name", ALL)
def test_bad_inputs_are_answered_by_name(name):
    options = {} if name == "enumerate_all" else {"k": 2}
    with pytest.raises(errors.MissingParentError, match="'x'"):
        ALL[name](rs.chain(), {}, **options)
    with pytest.raises(errors.ValueRangeError, match="x = 4"):
        ALL[name](rs.chain(), {"x": longs(0, 4)}, **options)
