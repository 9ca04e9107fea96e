"""Laws of comparisons: weights by hand, samples that agree with their law, and bad laws by name."""

import math

import pytest
import torch

from sysdpo_lab import CompoundSystem, alignment, errors, exact
from sysdpo_lab.components import Categorical, Tool
from tests import exact_systems as es

SHORT = es.f64([[1, 1]])
JUDGE = es.bradley_terry(es.f64([[0.0, 1.0, 3.0]]))


def test_pairs_of_finals_and_their_weights():
    uniform = exact.final_pairs(JUDGE)
    assert (uniform.first.tolist(), uniform.second.tolist()) == ([0, 0, 1], [1, 2, 2])
    assert uniform.weight[0].tolist() == pytest.approx([1 / 3] * 3)
    assert uniform.preference[0].tolist() == pytest.approx([1 / (1 + math.exp(d)) for d in (1, 3, 2)])
    law = exact.final_pairs(JUDGE, "reference", es.f64([[0.5, 0.3, 0.2]]))
    assert law.weight[0].tolist() == pytest.approx([0.15 / 0.31, 0.10 / 0.31, 0.06 / 0.31])


def test_a_comparison_graph_counts_both_orders():
    graph = torch.zeros(1, 3, 3)
    graph[0, 0, 1], graph[0, 2, 1] = 1, 3
    law = exact.final_pairs(JUDGE, graph)
    assert (law.first.tolist(), law.second.tolist()) == ([0, 1], [1, 2])
    assert law.weight[0].tolist() == [0.25, 0.75]


def test_outputs_that_the_reference_cannot_make_are_never_compared():
    law = exact.final_pairs(JUDGE, "uniform", es.f64([[0.5, 0.0, 0.5]]))
    assert (law.first.tolist(), law.second.tolist()) == ([0], [2])


def test_traces_with_equal_outputs_are_not_compared():
    y = Categorical("y", {"x": 1}, 2, [[0.25, 0.75]])
    system = CompoundSystem([y, Categorical("z", {"y": 2}, 2, [[0.5, 0.5], [1.0, 0.0]])])
    grid = exact.Joint(system)  # y z: 00 .125, 01 .125, 10 .75, 11 impossible
    law = exact.trace_pairs(grid, es.bradley_terry(es.GOOD))
    assert (law.first.tolist(), law.second.tolist()) == ([0, 1], [1, 2])
    assert law.weight[0].tolist() == pytest.approx([1 / 7, 6 / 7])
    uniform = exact.trace_pairs(grid, es.bradley_terry(es.GOOD), "uniform")
    assert uniform.weight[0].tolist() == [0.5, 0.5]


def test_the_floor_is_the_judges_entropy():
    law = exact.final_pairs(JUDGE)
    p = law.preference
    entropy = -(p * p.log() + (1 - p) * (1 - p).log()).mean().item()
    assert law.floor == pytest.approx(entropy, abs=1e-14)
    certain = exact.final_pairs(es.f64([[[0.0, math.inf], [-math.inf, 0.0]]]))
    assert certain.floor == 0.0


def test_losses_are_the_excess_over_the_floor_measured_elsewhere():
    p, start = es.soft(es.seeded(0), 1, 3), es.soft(es.seeded(1), 1, 3)
    law = exact.final_pairs(JUDGE)
    loss = law.losses(p.log() - start.log(), 0.7).sum().item()
    assert loss - law.floor == pytest.approx(alignment.excess_loss(p, JUDGE, 0.7, start), abs=1e-12)


def test_a_sample_agrees_with_its_law_and_a_seed_repeats_it():
    law = exact.final_pairs(JUDGE.repeat(2, 1, 1), "uniform")
    drawn = law.sample(1_000_000, es.seeded(0))
    torch.testing.assert_close(drawn.weight, law.weight, rtol=0, atol=2e-3)
    torch.testing.assert_close(drawn.preference, law.preference, rtol=0, atol=5e-3)
    assert torch.equal(law.sample(100, es.seeded(3)).weight, law.sample(100, es.seeded(3)).weight)
    assert not torch.equal(law.sample(100, es.seeded(3)).weight, law.sample(100, es.seeded(4)).weight)


def test_a_sample_holds_whole_judgements():
    drawn = exact.final_pairs(JUDGE).sample(7, es.seeded(0))
    seen = drawn.weight * 7
    torch.testing.assert_close(seen, seen.round())
    torch.testing.assert_close(drawn.preference * seen, (drawn.preference * seen).round())
    assert seen.sum().item() == pytest.approx(7)


def test_stacked_systems_get_a_sample_each():
    law = exact.final_pairs(JUDGE).repeated(5)
    drawn = law.sample(50, es.seeded(0), systems=5)
    assert drawn.weight.sum(1).tolist() == pytest.approx([1.0] * 5)
    assert len({tuple(row) for row in drawn.weight.tolist()}) > 1


def test_counts_have_the_multinomials_mean_and_spread():
    weights = es.f64([[0.1, 0.0, 0.6, 0.3]]).expand(4000, 4)
    counts = exact.pairs.multinomial_counts(weights, 20, es.seeded(0))
    assert counts[:, 1].sum() == 0 and bool((counts.sum(1) == 20).all())
    torch.testing.assert_close(counts.mean(0), 20 * weights[0], rtol=0, atol=0.15)
    torch.testing.assert_close(counts.var(0), 20 * weights[0] * (1 - weights[0]), rtol=0.08, atol=0)


def test_all_pairs_lists_each_comparison_once():
    x, i, j = exact.all_pairs(2, 3)
    assert list(zip(x.tolist(), i.tolist(), j.tolist())) == [(a, *p) for a in (0, 1) for p in ((0, 1), (0, 2), (1, 2))]


BAD = {
    "unknown law": (errors.UnknownOptionError, "law='refrence' does not exist", lambda: exact.final_pairs(JUDGE, "refrence")),
    "no reference": (errors.UnknownOptionError, "needs p_reference", lambda: exact.final_pairs(JUDGE, "reference")),
    "another shape": (errors.CardinalityError, r"\(1, 2\), expected \(1, 3\)", lambda: exact.final_pairs(JUDGE, SHORT)),
    "negative": (errors.ValueRangeError, "negative number", lambda: exact.final_pairs(JUDGE, es.f64([[1, -1, 1]]))),
    "nothing": (errors.NoMarginError, "nothing to compare", lambda: exact.final_pairs(JUDGE, torch.zeros(1, 3))),
    "no draws": (errors.UnknownOptionError, "whole number >= 1", lambda: exact.final_pairs(JUDGE).sample(0, es.seeded(0))),
    "judge of another size": (
        errors.CardinalityError,
        "expected .X, 2, 2.",
        lambda: exact.trace_pairs(exact.Joint(es.xor_collider()), JUDGE),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_laws_are_answered_by_name(case):
    kind, message, call = BAD[case]
    with pytest.raises(kind, match=message):
        call()


def test_a_deterministic_output_is_compared_through_whole_traces():
    parts = [Categorical(name, {"x": 1}, 2) for name in ("y1", "y2")]
    system = CompoundSystem([*parts, Tool("z", ["y1", "y2"], lambda a, b: int(a == b), cardinality=2)])
    law = exact.trace_pairs(exact.Joint(system), es.bradley_terry(es.GOOD))
    assert law.weight.shape == (1, 4)  # two traces agree, two differ
