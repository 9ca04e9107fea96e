"""Monte Carlo: frequencies are p(a|x); importance weights are unbiased."""

import pytest
import torch

from sysdpo_lab import CompoundSystem, errors, exact, samplers
from sysdpo_lab.components import Categorical, Tool
from tests import random_systems as rs
from tests.random_systems import longs, mixture, within

DRAWS = 20_000


@pytest.mark.parametrize("make", [rs.chain, rs.collider], ids=["chain", "collider"])
def test_frequencies_of_joint_assignments_are_p(make):
    system, x = make(), torch.ones(DRAWS // 4, dtype=torch.long)
    found = samplers.monte_carlo(system, {"x": x}, 4, generator=torch.Generator().manual_seed(0))
    every = samplers.enumerate_all(system, {"x": longs(1)})
    names = system.hidden
    for a in range(every.log_probs.shape[1]):
        hit = torch.stack([found.values[n] == every.values[n][0, a] for n in names]).all(0).double()
        assert within(hit.reshape(-1, 1), every.log_probs[0, a].exp())


def test_a_later_component_is_drawn_in_the_context_of_its_own_draft():
    """x -> y -> w -> z with w a copy of y."""
    copy = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    system = CompoundSystem(
        [Categorical("y", {"x": 1}, 3), Categorical("w", {"y": 3}, 3, copy), Categorical("z", {"w": 3}, 2)]
    )
    found = samplers.monte_carlo(
        system, {"x": torch.zeros(30, dtype=torch.long)}, 4, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(found.values["y"], found.values["w"]) and len(found.values["y"].unique()) == 3


def test_roots_are_drawn_anew_for_every_row_and_root_tools_are_computed():
    parts = [Categorical("r", {}, 4), Tool("c", [], lambda: 1), Categorical("z", {"r": 4, "c": 2, "x": 1}, 2)]
    system = CompoundSystem(parts)
    found = samplers.monte_carlo(
        system, {"x": torch.zeros(400, dtype=torch.long)}, 2, generator=torch.Generator().manual_seed(0)
    )
    assert found.values["c"].eq(1).all() and found.values["c"].shape == (400, 2)
    counts = torch.bincount(found.values["r"].reshape(-1), minlength=4)
    assert int(counts.min()) > 130 and (found.values["r"][:, 0] != found.values["r"][:, 1]).double().mean() > 0.6
    assert samplers.monte_carlo(system, {"x": longs(0)}, 1, generator=torch.Generator().manual_seed(0)).values[
        "r"
    ].shape == (1, 1)


@pytest.mark.parametrize("make", [rs.chain, rs.collider], ids=["chain", "collider"])
@pytest.mark.parametrize("k", [1, 3])
def test_importance_weights_make_the_mixture_unbiased(make, k):
    system, x = make(), torch.zeros(DRAWS, dtype=torch.long)
    exactly = exact.marginal(system).detach()[0]
    generator = torch.Generator().manual_seed(k)
    weighted = samplers.monte_carlo(system, {"x": x}, k, generator=generator, weights="importance")
    plain = samplers.monte_carlo(system, {"x": x}, k, generator=generator)
    assert all(within(mixture(system, weighted, x, z)[:, None], exactly[z]) for z in range(3))
    assert not all(within(mixture(system, plain, x, z)[:, None], exactly[z]) for z in range(3))  # theory S3.4: biased


def test_importance_weights_by_hand():
    """m_a / (k p(a)), on the first of the repeats."""
    system = CompoundSystem([Categorical("y", {"x": 1}, 2, [[0.25, 0.75]]), Categorical("z", {"y": 2}, 2)])
    found = samplers.monte_carlo(
        system, {"x": torch.zeros(50, dtype=torch.long)}, 3, torch.Generator().manual_seed(0), weights="importance"
    )
    p = torch.tensor([0.25, 0.75]).double()
    for values, weights in zip(found.values["y"].tolist(), found.log_weights.exp().tolist()):
        for j, (value, weight) in enumerate(zip(values, weights)):
            expected = values.count(value) / (3 * p[value]) if value not in values[:j] else 0.0
            assert weight == pytest.approx(float(expected))


def test_unknown_weights_are_named():
    with pytest.raises(errors.UnknownOptionError, match="weights='imp'.*'none', 'importance'"):
        samplers.monte_carlo(rs.chain(), {"x": longs(0)}, 2, weights="imp")
