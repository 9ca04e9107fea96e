"""What a graph can hold: the verdict, its reasons and repairs, against the factorisation defect of the tilted joint."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sysdpo_lab import CompoundSystem, errors, exact
from sysdpo_lab.components import Categorical, Tool
from tests import exact_systems as es
from tests import random_systems as rs

BETA = 0.5


def defect(system, reward, beta=BETA):
    return exact.factorisation_defect(system, exact.tilted_joint(system, reward, beta))


def normal_reward(system, seed=0):
    return es.normal(es.seeded(seed), *exact.marginal(system).shape)


# --- projection -----------------------------------------------------------------------------------------------------


@pytest.mark.property
@settings(max_examples=30, deadline=None, derandomize=True)
@given(rs.specs(largest=4), st.integers(0, 10_000))
def test_projecting_a_system_onto_its_own_graph_changes_nothing(spec, seed):
    """Also with structural zeros, Tools and rows that are never reached."""
    system = rs.build(spec, shuffle=seed)
    joint = exact.Joint(system).log_prob().exp().detach()
    assert exact.factorisation_defect(system, joint) < 1e-12


def test_the_projection_is_nearer_than_its_neighbours():
    """It minimises the mean over x of KL(joint || system): every move away from it costs."""
    system, reward = es.random_chain(es.seeded(1), skip=False), normal_reward(es.random_chain(es.seeded(1)))
    joint = exact.tilted_joint(system, reward, BETA)
    best = exact.project(system, joint)

    def distance(candidate):
        return exact.kl(joint, exact.Joint(candidate).log_prob().exp().detach()).mean().item()

    for seed in range(20):
        moved = es.twin(best)
        for parameter in moved.trainable_parameters():
            with torch.no_grad():
                parameter += 0.05 * es.normal(es.seeded(seed), *parameter.shape)
        assert distance(moved) > distance(best) + 1e-6


def test_inputs_that_a_component_does_not_read_are_averaged_by_their_law():
    """By hand: p(z | y) = sum_x p(x) p(y, z | x) / sum_x p(x) p(y | x), with p(x) = (.9, .1)."""
    system = es.random_chain(es.seeded(4), skip=False, inputs=2, values=2)
    joint = es.soft(es.seeded(5), 2, 4)
    law = es.f64([0.9, 0.1])
    cells = (law[:, None] * joint).sum(0).reshape(2, 2)
    found = exact.conditionals(exact.Joint(system), joint, law)
    torch.testing.assert_close(found["z"], cells / cells.sum(1, keepdim=True))
    torch.testing.assert_close(found["y"], joint.reshape(2, 2, 2).sum(2))


def test_tied_tables_are_pooled_and_rows_never_reached_keep_the_reference():
    system = es.fixed_loop(tied=True)
    joint = exact.tilted_joint(system, es.f64([[0, 0.5, 1]]), BETA)
    tables = exact.conditionals(exact.Joint(system), joint)
    assert torch.equal(tables["y1"], tables["y2"]) and torch.allclose(tables["y1"].sum(-1), torch.ones(1, 3).double())
    lonely = es.one_input_chain([1.0, 0.0], [[0.5, 0.5], [0.1, 0.9]])
    found = exact.project(lonely, exact.tilted_joint(lonely, es.GOOD, BETA))
    assert found["z"].probabilities()[0, 1].tolist() == pytest.approx([0.1, 0.9])


# --- the verdict ----------------------------------------------------------------------------------------------------


@pytest.mark.property
@settings(max_examples=150, deadline=None, derandomize=True)
@given(rs.specs(largest=5), st.integers(0, 10_000))
def test_the_verdict_agrees_with_the_defect(spec, seed):
    """Two ways to one answer: local conditions on the steps, and the joint against its product. Ties are taken off."""
    for node in spec.nodes:
        node.tie = None
    system = rs.build(spec, shuffle=seed)
    reward = normal_reward(system, seed)
    verdict = exact.holds_direct(system, reward, 0.7)
    assert verdict.holds == (max(verdict.deviations.values()) <= 1e-9)
    if verdict:
        assert defect(system, reward, 0.7) < 1e-9
    elif max(verdict.deviations.values()) > 1e-4:
        assert defect(system, reward, 0.7) > 1e-9


@pytest.mark.property
@settings(max_examples=60, deadline=None, derandomize=True)
@given(rs.specs(largest=5, tools=False, zeros=False), st.integers(0, 10_000))
def test_the_suggested_edges_repair_the_graph(spec, seed):
    for node in spec.nodes:
        node.tie = None
    system = rs.build(spec)
    reward = normal_reward(system, seed)
    verdict = exact.holds_direct(system, reward, BETA)
    for parent, child in verdict.edges:
        system = exact.with_edge(system, parent, child)
    assert exact.holds_direct(system, reward, BETA).holds and defect(system, reward) < 1e-9


def test_collider_needs_an_edge_between_its_drafts():
    """Theory S2.2 and Surprise C."""
    system = es.xor_collider()
    verdict = exact.holds_direct(system, es.GOOD, BETA)
    assert not verdict and verdict.edges == (("y1", "y2"),) and verdict.deviations["z"] < 1e-12
    assert "component 'y2': its step in the optimum depends on 'y1', which it does not read" in verdict.reasons[0]
    assert "add the edge y1 -> y2" in verdict.reasons[0] and len(verdict.reasons) == 1
    assert exact.holds_direct(exact.with_edge(system, "y1", "y2"), es.GOOD, BETA)


def test_blind_refiner_needs_the_input_unless_the_judge_does_not():
    """Theory S2.2: r = a(x) + b(z), or y a code of x, is held without x -> z; a generic r is not."""
    system = es.random_chain(es.seeded(0), skip=False)
    generic, g = normal_reward(system), es.seeded(3)
    verdict = exact.holds_direct(system, generic, BETA)
    assert verdict.edges == (("x", "z"),) and defect(system, generic) > 0.01
    additive = es.normal(g, 3, 1) + es.normal(g, 1, 3)
    assert exact.holds_direct(system, additive, BETA) and defect(system, additive) < 1e-12
    code = CompoundSystem([Categorical("y", {"x": 3}, 3, torch.eye(3)), Categorical("z", {"y": 3}, 3, es.soft(g, 3, 3))])
    assert exact.holds_direct(code, generic, BETA) and defect(code, generic) < 1e-12


def test_colliders_that_need_no_edge():
    """Theory S2.2, sufficient: z ignores its drafts; z reads one only; z = (f(y1), g(y2)) with r = r1 + r2."""
    g = es.seeded(2)
    drafts = [Categorical(name, {"x": 2}, 2, es.soft(g, 2, 2)) for name in ("y1", "y2")]
    deaf = es.soft(g, 2, 1, 1, 3).expand(2, 2, 2, 3)
    half = es.soft(g, 2, 2, 1, 3).expand(2, 2, 2, 3)
    reward = es.normal(g, 2, 3)
    for table in (deaf, half):
        system = CompoundSystem([*drafts, Categorical("z", {"x": 2, "y1": 2, "y2": 2}, 3, table)])
        assert exact.holds_direct(system, reward, BETA) and defect(system, reward) < 1e-12
    pair = Tool("z", ["y1", "y2"], lambda a, b: 2 * a + b, cardinality=4)
    parts, total = es.normal(g, 2, 2, 2), None
    total = (parts[0][:, :, None] + parts[1][:, None, :]).reshape(2, 4)
    for beta in (0.1, 0.5, 3.0):
        system = CompoundSystem([*drafts, pair])
        assert exact.holds_direct(system, total, beta) and defect(system, total, beta) < 1e-12
    crossed = total * es.f64([[1, 1, 1, -1]])
    assert not exact.holds_direct(CompoundSystem([*drafts, pair]), crossed, BETA)


def test_a_shared_kernel_is_refused_and_an_untied_one_is_not():
    """Theory S7.3 and S7.4."""
    reward = es.f64([[0, 0.5, 1]])
    verdict = exact.holds_direct(es.fixed_loop(tied=True), reward, BETA)
    assert not verdict and verdict.edges == ()
    assert "components 'y1', 'y2', 'y3' share one table but need different steps" in verdict.reasons[0]
    assert "step counter" in verdict.reasons[0] and len(verdict.reasons) == 1
    assert exact.holds_direct(es.fixed_loop(tied=False), reward, BETA)
    assert exact.holds_direct(es.fixed_loop(tied=True), es.f64([[1, 1, 1]]), BETA)  # a constant reward: h = 1


def test_a_frozen_component_that_would_have_to_move_is_named():
    system = es.one_input_chain([0.5, 0.5], [[0.9, 0.1], [0.2, 0.8]])
    assert exact.holds_direct(system, es.GOOD, BETA)
    system.freeze("y")
    verdict = exact.holds_direct(system, es.GOOD, BETA)
    assert not verdict and "component 'y' is frozen, but the optimum needs it to move" in verdict.reasons[0]
    deaf = es.one_input_chain([0.5, 0.5], [[0.9, 0.1], [0.9, 0.1]])
    deaf.freeze("y")
    assert exact.holds_direct(deaf, es.GOOD, BETA)


def test_unreachable_contexts_do_not_count():
    """x = 1 never makes y = 0, so the step of z at y = 0 has to serve one input only."""
    y = Categorical("y", {"x": 2}, 2, [[1.0, 0.0], [0.0, 1.0]])
    system = CompoundSystem([y, Categorical("z", {"y": 2}, 2)])
    assert exact.holds_direct(system, es.f64([[0, 1], [2, -1]]), BETA)


# --- editing --------------------------------------------------------------------------------------------------------


def test_a_new_edge_changes_no_probability_and_keeps_other_ties():
    system = rs.chain()
    wider = exact.with_edge(system, "x", "z")
    assert wider.parents("z") == ("y", "x") and system.parents("z") == ("y",)
    for reference in (False, True):
        torch.testing.assert_close(exact.marginal(wider, reference), exact.marginal(system, reference))
    loop = exact.with_edge(es.fixed_loop(tied=True), "y0", "y3")
    assert loop["y1"].logits is loop["y2"].logits and loop["y3"].logits is not loop["y1"].logits
    owner = exact.with_edge(loop_of_two_inputs(), "x", "y1")
    assert owner["y2"].logits is owner["y3"].logits and owner["y1"].logits is not owner["y2"].logits


def loop_of_two_inputs():
    return es.loop([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]], es.KERNEL, tied=True, sees_x=False)


def test_edges_that_cannot_be_are_answered_by_name():
    with pytest.raises(errors.CycleError, match="circle"):
        exact.with_edge(rs.chain(), "z", "y")
    tool = CompoundSystem([Categorical("y", {"x": 2}, 2), Tool("z", ["y"], abs, cardinality=2)])
    with pytest.raises(errors.UnsupportedSamplerError, match="'z' .Tool. is no table"):
        exact.with_edge(tool, "x", "z")


def test_tables_are_put_into_a_copy():
    system = rs.chain()
    before = system["z"].logits.detach().clone()
    moved = exact.with_tables(system, {"z": torch.full((3, 3), 1 / 3)})
    assert torch.equal(system["z"].logits, before)
    assert torch.allclose(moved["z"].probabilities(), torch.full((3, 3), 1 / 3).double())
    assert torch.equal(moved["z"].reference_logits, system["z"].reference_logits)
