"""Graphs: order, names, log-probabilities as sums of terms, sampling, the reference, freezing."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sysdpo_lab import CompoundSystem, errors
from sysdpo_lab.components import Categorical, Component, Tool
from sysdpo_lab.system import topological_order
from tests import random_systems as rs

DRAWS = settings(max_examples=60, deadline=None, derandomize=True)


# --- any graph ------------------------------------------------------------------------------------------------------


@pytest.mark.property
@DRAWS
@given(rs.specs(), st.integers(0, 10_000))
def test_order_is_topological_and_complete(spec, seed):
    system = rs.build(spec, shuffle=seed)
    assert sorted(system.order) == sorted(node.name for node in spec.nodes)
    place = {name: i for i, name in enumerate([*spec.inputs, *system.order])}
    assert all(place[parent] < place[name] for name in system.order for parent in system.parents(name))
    assert system.relevant == [n for n in system.order if n == spec.output or n in system.ancestors(spec.output)]
    assert [*system.hidden, spec.output] == sorted(system.relevant, key=lambda n: n == spec.output)


@pytest.mark.property
@DRAWS
@given(rs.specs(), st.integers(0, 10_000), st.booleans())
def test_log_prob_is_the_sum_of_terms_is_the_product_of_tables(spec, seed, reference):
    system = rs.build(spec, shuffle=seed)
    assignments, product = rs.joint(spec, reference)
    pick = np.random.default_rng(seed).permutation(len(assignments))[:50]
    trace = {name: torch.tensor(assignments[pick, i]) for i, name in enumerate(spec.variables)}
    if reference:
        with system.reference():
            total, terms = system.log_prob(trace), system.log_prob_terms(trace)
    else:
        total, terms = system.log_prob(trace), system.log_prob_terms(trace)
    assert set(terms) == set(system.order) and all(term.shape == (len(pick),) for term in terms.values())
    torch.testing.assert_close(total, sum(terms.values()), rtol=0, atol=1e-12)
    np.testing.assert_allclose(total.detach().exp().numpy(), product[pick], rtol=1e-9, atol=1e-300)
    for node in spec.nodes:
        expected = rs.node_probability(spec, node, assignments[pick], reference)
        np.testing.assert_allclose(terms[node.name].detach().exp().numpy(), expected, rtol=1e-9)


@pytest.mark.property
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rs.specs(), st.integers(0, 10_000))
def test_a_sampled_trace_is_possible_and_a_greedy_one_takes_each_mode(spec, seed):
    system = rs.build(spec)
    generator = torch.Generator().manual_seed(seed)
    inputs = {name: torch.randint(spec.cardinality[name], (20,), generator=generator) for name in spec.inputs}
    assert torch.isfinite(system.log_prob(system.sample(inputs, generator=generator))).all()
    greedy = system.generate(inputs)
    for node in (n for n in spec.nodes if n.policy is not None):
        rows = (
            node.policy[tuple(greedy[parent].numpy() for parent in node.parents)] if node.parents else node.policy[None]
        )
        assert greedy[node.name].tolist() == np.broadcast_to(rows.argmax(-1), 20).tolist()


@pytest.mark.property
@settings(max_examples=6, deadline=None, derandomize=True)
@given(rs.specs(largest=4), st.integers(0, 10_000))
def test_ancestral_frequencies_are_the_joint(spec, seed):
    """20,000 draws at the inputs' first values; each joint value within 5 standard errors."""
    system, draws = rs.build(spec), 20_000
    inputs = {name: torch.zeros(draws, dtype=torch.long) for name in spec.inputs}
    trace = system.sample(inputs, generator=torch.Generator().manual_seed(seed))
    assignments, product = rs.joint(spec)
    here = (assignments[:, : len(spec.inputs)] == 0).all(1)
    sizes = [spec.cardinality[node.name] for node in spec.nodes]
    code = np.ravel_multi_index(tuple(trace[node.name].numpy() for node in spec.nodes), sizes)
    found = np.bincount(code, minlength=int(np.prod(sizes))) / draws
    expected = product[here]
    assert (np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-12).all()


def test_listed_order_breaks_ties_in_the_topological_order():
    assert topological_order({"c": ("x",), "a": ("x",), "b": ("a", "c")}, ["x"]) == ["c", "a", "b"]
    assert topological_order({"b": ("a", "c"), "a": ("x",), "c": ("x",)}, ["x"]) == ["a", "c", "b"]


def test_a_graph_of_300_components_is_ordered_at_once():
    names = [f"v{i}" for i in range(300)]
    tables = [Categorical(name, {above: 2}, 2) for above, name in zip(["x", *names], names)]
    assert CompoundSystem(tables[::-1], output="v299").order == names


# --- bad graphs -----------------------------------------------------------------------------------------------------


def y(name="y", **parents):
    return Categorical(name, parents or {"x": 2}, 2)


BAD_GRAPHS = {
    "cycle": (
        errors.CycleError,
        "y1 -> y2 -> y1|y2 -> y1 -> y2",
        lambda: [y("y1", y2=2), y("y2", y1=2), y("z", x=2, y1=2)],
    ),
    "reads itself": (errors.CycleError, "z -> z", lambda: [y("z", x=2, z=2)]),
    "two of one name": (errors.DuplicateComponentError, "'y'", lambda: [y("y"), y("y"), y("z", y=2)]),
    "named as the input": (errors.DuplicateComponentError, "'x' is an input", lambda: [y("x", z=2), y("z", x=2)]),
    "missing parent": (errors.MissingParentError, "'z' reads 'nowhere'", lambda: [y("z", x=2, nowhere=2)]),
    "no such output": (errors.UnknownComponentError, "output 'z'", lambda: [y("y")]),
    "output without input": (errors.UnreachableOutputError, "'z'", lambda: [y("y"), Categorical("z", {}, 2)]),
    "output behind a root": (
        errors.UnreachableOutputError,
        "'z'",
        lambda: [Categorical("r", {}, 2), y("z", r=2), y("y")],
    ),
    "no component": (errors.GraphError, "at least one component", lambda: []),
    "not a component": (errors.GraphError, "found str", lambda: ["z"]),
    "a module but no component": (errors.GraphError, "found Linear", lambda: [torch.nn.Linear(1, 1)]),
    "cardinalities disagree": (
        errors.CardinalityError,
        "'z' expects 3 values of 'y'.*'y' says 2",
        lambda: [y(), y("z", y=3)],
    ),
    "two readers disagree": (
        errors.CardinalityError,
        "'z' expects 3 values of 'x'.*'y' says 2",
        lambda: [y(), y("z", x=3, y=2)],
    ),
    "tool and table disagree": (
        errors.CardinalityError,
        "'z' expects 3 values of 't'",
        lambda: [Tool("t", ["x"], abs, cardinality=2), y("z", t=3, x=2)],
    ),
    "tied to nobody": (
        errors.UnknownComponentError,
        "'y' is tied to 'nobody'",
        lambda: [Categorical("y", {"x": 2}, 2, tie="nobody"), y("z", y=2)],
    ),
    "tied in a circle": (
        errors.CycleError,
        "ties y -> z -> y",
        lambda: [Categorical("y", {"x": 2}, 2, tie="z"), Categorical("z", {"y": 2}, 2, tie="y")],
    ),
    "tied to another shape": (
        errors.CardinalityError,
        r"'z' is tied to 'y'.*\(2, 2\).*\(2, 3\)",
        lambda: [y("y"), Categorical("z", {"y": 2}, 3, tie="y")],
    ),
    "tied to a tool": (
        errors.GraphError,
        "'z' is tied to 't'",
        lambda: [Tool("t", ["x"], abs), Categorical("z", {"t": 2, "x": 2}, 3, tie="t")],
    ),
}


@pytest.mark.parametrize("case", BAD_GRAPHS)
def test_bad_graphs_are_answered_by_name(case):
    kind, message, make = BAD_GRAPHS[case]
    with pytest.raises(kind, match=message):
        CompoundSystem(make())


@pytest.mark.parametrize(("inputs", "kind"), [((), errors.GraphError), (("x", "x"), errors.DuplicateComponentError)])
def test_bad_inputs_are_answered_by_name(inputs, kind):
    with pytest.raises(kind):
        CompoundSystem([y("z")], inputs=inputs)


def test_components_may_come_from_any_iterable_and_the_input_may_be_a_string():
    assert CompoundSystem((component for component in [y("z", y=2), y()]), inputs="x").order == ["y", "z"]


def test_an_unknown_name_lists_the_known_ones():
    system = rs.chain()
    for ask in (lambda: system["why"], lambda: system.parents("why"), lambda: system.freeze("why")):
        with pytest.raises(errors.UnknownComponentError, match=r"'why'.*'y', 'z'"):
            ask()


# --- bad values -----------------------------------------------------------------------------------------------------

X = rs.longs(0, 1)
BAD_TRACES = {
    "lacks a component": (errors.MissingParentError, "'z'", {"x": X, "y": X}),
    "lacks the input": (errors.MissingParentError, "'x'", {"y": X, "z": X}),
    "rows differ": (errors.BatchMismatchError, "'y': 3", {"x": X, "y": rs.longs(0, 1, 1), "z": X}),
    "value too large": (
        errors.ValueRangeError,
        "'z', row 1: z = 3 lies outside 0..2",
        {"x": X, "y": X, "z": rs.longs(0, 3)},
    ),
    "value negative": (errors.ValueRangeError, "'y', row 0: y = -1", {"x": X, "y": rs.longs(-1, 0), "z": X}),
    "input too large": (
        errors.ValueRangeError,
        "'y', row 1: x = 2 lies outside 0..1",
        {"x": rs.longs(0, 2), "y": X, "z": X},
    ),
    "not a whole number": (errors.ValueRangeError, "integers 0..2", {"x": X, "y": X, "z": torch.tensor([0.0, 1.0])}),
    "NaN": (errors.ValueRangeError, "integers 0..2", {"x": X, "y": X, "z": torch.tensor([0.0, torch.nan])}),
    "None": (errors.ValueRangeError, "'z'.*None", {"x": X, "y": X, "z": [0, None]}),
    "text": (errors.ValueRangeError, "'z'.*'a'", {"x": X, "y": X, "z": ["a", "b"]}),
    "two columns": (
        errors.BatchMismatchError,
        r"'z'.*\(2, 2\)",
        {"x": X, "y": X, "z": torch.zeros(2, 2, dtype=torch.long)},
    ),
}


@pytest.mark.parametrize("case", BAD_TRACES)
def test_bad_traces_are_answered_by_name(case):
    kind, message, trace = BAD_TRACES[case]
    with pytest.raises(kind, match=message):
        rs.chain().log_prob(trace)


@pytest.mark.parametrize("walk", ["sample", "generate"])
def test_bad_inputs_of_a_walk_are_answered_by_name(walk):
    go = getattr(rs.chain(), walk)
    with pytest.raises(errors.MissingParentError, match="no value of the input 'x'"):
        go({})
    with pytest.raises(errors.UnknownComponentError, match="'u'"):
        go({"x": X, "u": X})
    with pytest.raises(errors.ValueRangeError, match="x = 7"):
        go({"x": rs.longs(0, 7)})
    with pytest.raises(errors.BatchMismatchError, match="single value 'ab'"):
        go({"x": "ab"})
    with pytest.raises(errors.BatchMismatchError, match=r"'x' is one conversation.*write \[messages\]"):
        go({"x": [{"role": "system", "content": "be"}, {"role": "user", "content": "q"}]})
    two = CompoundSystem([Categorical("z", {"x": 2, "w": 2}, 2)], inputs=("x", "w"))
    with pytest.raises(errors.BatchMismatchError, match="'x': 2, 'w': 3"):
        getattr(two, walk)({"x": X, "w": rs.longs(0, 1, 0)})


def test_a_nan_term_names_component_and_row():
    system = rs.chain()
    with torch.no_grad():
        system["y"].logits[1] = torch.nan
    with pytest.raises(errors.NonFiniteError, match="'y', row 1"):
        system.log_prob({"x": X, "y": X, "z": X})


class Bound(Component):
    """Its score is its noise."""

    kind = "bound"

    def greedy(self, parent_values):
        return list(parent_values["x"])

    def log_prob(self, value, parent_values, noise=None):
        return noise

    def draw_noise(self, value, generator=None):
        return torch.rand(len(value), generator=generator)


def test_a_bound_without_noise_raises_and_draw_noise_is_empty_without_bounds():
    system = CompoundSystem([Bound("z", ["x"])])
    trace = {"x": X, "z": X}
    with pytest.raises(errors.NoiseRequiredError, match="'z'.*draw_noise"):
        system.log_prob(trace)
    noise = system.draw_noise(trace, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(system.log_prob(trace, noise), noise["z"])
    assert rs.chain().draw_noise({}) == {}


# --- sampling -------------------------------------------------------------------------------------------------------


def test_only_the_generator_is_used():
    system, x = rs.collider(), torch.zeros(50, dtype=torch.long)
    state = torch.get_rng_state()
    first = system.sample({"x": x}, generator=torch.Generator().manual_seed(3))
    again = system.sample({"x": x}, generator=torch.Generator().manual_seed(3))
    other = system.sample({"x": x}, generator=torch.Generator().manual_seed(4))
    free, free_again = system.sample({"x": x}), system.sample({"x": x})
    system.generate({"x": x})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert any(not torch.equal(free[name], free_again[name]) for name in free)


def test_a_component_alone_leaves_the_global_state_untouched():
    component, state = Categorical("y", {"x": 2}, 3), torch.get_rng_state()
    component.sample({"x": X}), component.sample({"x": X}, num_samples=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_a_component_without_parents_are_independent_draws():
    root = Categorical("r", {}, 2)
    system = CompoundSystem([root, Categorical("z", {"r": 2, "x": 2}, 2)])
    trace = system.sample({"x": torch.zeros(200, dtype=torch.long)}, generator=torch.Generator().manual_seed(0))
    assert trace["r"].shape == (200,) and 60 < int(trace["r"].sum()) < 140
    assert system.sample({"x": rs.longs(0)})["r"].shape == (1,)


def test_a_tool_without_parents_has_its_value_in_every_row():
    system = CompoundSystem([Tool("c", [], lambda: 1), Categorical("z", {"c": 2, "x": 2}, 2)])
    for trace in (system.sample({"x": X}), system.generate({"x": X})):
        assert trace["c"].tolist() == [1, 1]
        assert torch.isfinite(system.log_prob(trace)).all()


def test_generate_takes_the_mode_given_the_parents():
    y1 = Categorical("y", {"x": 2}, 2, [[0.9, 0.1], [0.2, 0.8]])
    z = Categorical("z", {"y": 2}, 3, [[0.1, 0.7, 0.2], [0.5, 0.1, 0.4]])
    trace = CompoundSystem([z, y1]).generate({"x": X})
    assert trace["y"].tolist() == [0, 1] and trace["z"].tolist() == [1, 0]


# --- the reference --------------------------------------------------------------------------------------------------


def test_reference_is_the_start_nests_and_ends_on_error():
    system = rs.chain()
    trace = {"x": X, "y": rs.longs(2, 0), "z": rs.longs(1, 1)}
    policy = system.log_prob(trace)
    with system.reference() as inside:
        assert inside is system
        start = system.log_prob(trace)
        with system.reference():
            assert torch.equal(system.log_prob(trace), start)
        assert torch.equal(system.log_prob(trace), start)
        with system["y"].reference():
            pass
        assert torch.equal(system.log_prob(trace), start)
    assert torch.equal(system.log_prob(trace), policy) and not torch.equal(start, policy)
    with pytest.raises(RuntimeError, match="inside"), system.reference():
        raise RuntimeError("inside")
    assert torch.equal(system.log_prob(trace), policy)


def test_reference_of_one_component_leaves_the_others():
    system = rs.chain()
    trace = {"x": X, "y": X, "z": X}
    terms = system.log_prob_terms(trace)
    with system["y"].reference():
        mixed = system.log_prob_terms(trace)
    assert torch.equal(mixed["z"], terms["z"]) and not torch.equal(mixed["y"], terms["y"])


def test_training_does_not_move_the_reference():
    system = rs.chain(moved=False)
    trace = {"x": X, "y": X, "z": X}
    with system.reference():
        before = system.log_prob(trace)
    with torch.no_grad():
        for parameter in system.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    with system.reference():
        assert torch.equal(system.log_prob(trace), before)


# --- what is trained ------------------------------------------------------------------------------------------------


def tied_chain():
    """x -> y1 -> y2 -> z with one kernel for y1 and y2."""
    kernel = rs.table(5, 3, 3)
    y1 = Categorical("y1", {"x": 3}, 3, kernel)
    return CompoundSystem([Categorical("y2", {"y1": 3}, 3, tie="y1"), y1, Categorical("z", {"y2": 3}, 2)])


def test_tied_tables_are_one_parameter():
    system = tied_chain()
    assert system["y1"].logits is system["y2"].logits and len(system.trainable_parameters()) == 2
    assert len(list(system.parameters())) == 2
    trace = {"x": rs.longs(0), "y1": rs.longs(1), "y2": rs.longs(2), "z": rs.longs(0)}
    system.log_prob(trace).sum().backward()
    p = system["y1"].probabilities().detach()
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[0] = torch.eye(3)[1] - p[0]  # y1 = 1 given x = 0
    expected[1] = torch.eye(3)[2] - p[1]  # y2 = 2 given y1 = 1
    torch.testing.assert_close(system["y2"].logits.grad, expected)


@pytest.mark.parametrize("how", ["object", "name", "chain of names"])
def test_every_way_to_tie_gives_the_same_system(how):
    kernel = rs.table(5, 2, 2)
    a = Categorical("a", {"x": 2}, 2, kernel)
    b = Categorical("b", {"a": 2}, 2, tie=a if how == "object" else "a")
    z = Categorical("z", {"b": 2}, 2, tie="b" if how == "chain of names" else "a")
    for listed in itertools.permutations([a, b, z]):
        system = CompoundSystem(listed)
        assert system["a"].logits is system["b"].logits is system["z"].logits
        assert len(system.trainable_parameters()) == 1
        torch.testing.assert_close(system["z"].probabilities(reference=True), torch.tensor(kernel))
    assert "reference_logits" in dict(b.named_buffers())  # so that .to(device) moves it


def test_freezing_one_of_two_tied_freezes_both_and_says_so():
    system = tied_chain()
    with pytest.warns(errors.TiedFreezeWarning, match=r"'y1'.*\['y2'\]"):
        assert sorted(system.freeze("y1")) == ["y1", "y2"]
    assert system.is_frozen("y1") and system.is_frozen("y2") and not system.is_frozen("z")
    assert [id(p) for p in system.trainable_parameters()] == [id(system["z"].logits)]
    assert sorted(system.unfreeze("y2")) == ["y1", "y2"]
    assert not system.is_frozen("y1") and len(system.trainable_parameters()) == 2


def test_freezing_an_untied_component_warns_nobody_and_twice_is_once():
    system = rs.chain()
    assert system.freeze("y") == ["y"] and system.freeze("y") == ["y"]
    assert [id(p) for p in system.trainable_parameters()] == [id(system["z"].logits)]
    system.unfreeze("y")
    assert len(system.trainable_parameters()) == 2 and system["y"].logits.requires_grad


def test_unfreezing_does_not_start_what_never_trained():
    system = rs.chain()
    system["y"].logits.requires_grad_(False)
    system.freeze("y"), system.unfreeze("y")
    assert not system["y"].logits.requires_grad


def test_a_tool_can_be_frozen_and_has_nothing_to_train():
    system = CompoundSystem([Tool("t", ["x"], abs), Categorical("z", {"t": 2, "x": 2}, 2)])
    assert system.freeze("t") == ["t"] and system.is_frozen("t") and len(system.trainable_parameters()) == 1
