"""Every joint assignment, once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from sysdpo_lab import CompoundSystem, errors, exact, samplers
from sysdpo_lab.components import Categorical, Tool
from tests import random_systems as rs
from tests.random_systems import longs


def test_the_collider_has_six_assignments_in_row_major_order():
    found = samplers.enumerate_all(rs.collider(), {"x": longs(1, 0)})
    assert found.values["y1"].tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    assert found.values["y2"].tolist() == [[0, 1, 2, 0, 1, 2]] * 2
    assert found.distinct.tolist() == [6, 6] and not found.log_weights.any()
    torch.testing.assert_close(found.log_probs.exp().sum(1), torch.ones(2).double())


@pytest.mark.property
@settings(max_examples=40, deadline=None, derandomize=True)
@given(rs.specs())
def test_the_mixture_over_all_assignments_is_the_marginal(spec):
    system = rs.build(spec)
    sizes = [spec.cardinality[name] for name in spec.inputs]
    grid = np.indices(sizes).reshape(len(sizes), -1)
    inputs = {name: torch.tensor(grid[i]) for i, name in enumerate(spec.inputs)}
    found = samplers.enumerate_all(system, inputs)
    torch.testing.assert_close(found.log_probs.exp().sum(1), torch.ones(grid.shape[1]).double())
    size, rows = found.log_probs.shape[1], grid.shape[1]
    trace = {name: value.repeat_interleave(size) for name, value in inputs.items()}
    trace |= {name: value.reshape(-1) for name, value in found.values.items()}
    total = torch.zeros(rows, spec.cardinality[spec.output], dtype=torch.float64)
    for z in range(total.shape[1]):
        trace[spec.output] = torch.full((rows * size,), z)
        term = system.log_prob_terms(trace, names=[spec.output])[spec.output].reshape(rows, size)
        total[:, z] = (found.log_probs + term.detach()).exp().sum(1)
    torch.testing.assert_close(total, exact.marginal(system).detach(), rtol=0, atol=1e-12)


def test_deterministic_components_follow_their_parents():
    parts = [Categorical("y", {"x": 2}, 3), Tool("t", ["y"], lambda y: y % 2), Categorical("z", {"t": 2}, 2)]
    found = samplers.enumerate_all(CompoundSystem(parts), {"x": longs(0)})
    assert found.values["y"].tolist() == [[0, 1, 2]] and found.values["t"].tolist() == [[0, 1, 0]]


def test_k_is_checked_and_the_limit_holds():
    system = rs.collider()
    assert samplers.enumerate_all(system, {"x": longs(0)}, 6).distinct.tolist() == [6]
    with pytest.raises(errors.UnknownOptionError, match=r"k=2.*\['y1', 'y2'\] have 6 joint assignments"):
        samplers.enumerate_all(system, {"x": longs(0)}, 2)
    with pytest.raises(errors.UnsupportedSamplerError, match="6 joint assignments.*limit=5"):
        samplers.enumerate_all(system, {"x": longs(0)}, limit=5)
