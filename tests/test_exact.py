"""Marginals against brute force, the closed-form optimum, and case files."""

import copy
import json
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sysdpo_lab import CompoundSystem, alignment, errors, exact
from sysdpo_lab.components import Categorical, Component, Tool
from tests import random_systems as rs

DRAWS = settings(max_examples=80, deadline=None, derandomize=True)


# --- marginals ------------------------------------------------------------------------------------------------------


@pytest.mark.property
@DRAWS
@given(rs.specs(), st.integers(0, 10_000), st.booleans())
def test_marginal_is_the_sum_over_all_joint_values(spec, seed, reference):
    found = exact.marginal(rs.build(spec, shuffle=seed), reference=reference)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.detach().numpy(), rs.marginal(spec, reference), rtol=0, atol=1e-12)


@pytest.mark.property
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rs.specs(largest=5, output_is_table=True), st.integers(0, 10_000))
def test_gradient_of_the_marginal_is_the_score_function_identity(spec, seed):
    """d p(z|x) / d logits[row, v] = sum over s of p(s, z|x) * (count of (row, v) in s - p(v|row) * count of row in s)."""
    system = rs.build(spec)
    weights = torch.tensor(np.random.default_rng(seed).normal(size=rs.marginal(spec).shape))
    (exact.marginal(system) * weights).sum().backward()
    assignments, product = rs.joint(spec)
    sizes = [spec.cardinality[name] for name in spec.inputs]
    x = np.ravel_multi_index(tuple(assignments[:, : len(sizes)].T), sizes)
    mass = product * weights.numpy()[x, assignments[:, spec.variables.index(spec.output)]]
    expected = {}
    for node in (n for n in spec.nodes if n.policy is not None):
        index = tuple(assignments[:, spec.variables.index(name)] for name in (*node.parents, node.name))
        counted = np.zeros(node.policy.shape)
        np.add.at(counted, index, mass)
        owner = node.tie or node.name
        expected[owner] = expected.get(owner, 0) + counted - node.policy * counted.sum(-1, keepdims=True)
    for name, gradient in expected.items():
        found = system[name].logits.grad
        found = torch.zeros_like(system[name].logits) if found is None else found
        np.testing.assert_allclose(found.numpy(), gradient, rtol=0, atol=1e-12)


def test_a_chain_of_50_variables_with_10_values_is_exact_and_quick():
    """10^50 joint values; the answer is a product of 50 matrices."""
    system, matrices = rs.long_chain(50, 10)
    start = time.perf_counter()
    found = exact.marginal(system)
    found.sum().backward()
    assert time.perf_counter() - start < 5
    np.testing.assert_allclose(found.detach().numpy(), np.linalg.multi_dot(matrices), rtol=0, atol=1e-12)


def test_a_wide_graph_of_40_parallel_drafts_is_quick():
    """x -> y_i for 40 drafts, folded by a running XOR: 2^40 joint values."""
    drafts = [Categorical(f"y{i}", {"x": 2}, 2, rs.table(i, 2, 2)) for i in range(40)]
    parts = [Tool("t0", ["y0"], lambda y: y, cardinality=2)]
    parts += [Tool(f"t{i}", [f"t{i - 1}", f"y{i}"], lambda a, b: a ^ b, cardinality=2) for i in range(1, 40)]
    found = exact.marginal(CompoundSystem([*drafts, *parts], output="t39"))
    bias = np.prod([1 - 2 * rs.table(i, 2, 2)[:, 1] for i in range(40)], axis=0)  # E (-1)^parity multiplies
    np.testing.assert_allclose(found.detach().numpy()[:, 1], (1 - bias) / 2, rtol=0, atol=1e-12)


def test_several_inputs_run_over_their_joint_values_the_first_slowest():
    z = Categorical("z", {"w": 3, "x": 2}, 2, rs.table(0, 3, 2, 2))
    found = exact.marginal(CompoundSystem([z], inputs=("x", "w")))
    table = torch.tensor(rs.table(0, 3, 2, 2))
    torch.testing.assert_close(found.detach(), table.permute(1, 0, 2).reshape(6, 2))


def test_an_input_that_only_a_dead_end_reads_keeps_its_axis():
    parts = [Categorical("z", {"x": 2}, 2, rs.table(0, 2, 2)), Categorical("aside", {"w": 3}, 2)]
    found = exact.marginal(CompoundSystem(parts, inputs=("x", "w")))
    torch.testing.assert_close(found.detach(), torch.tensor(rs.table(0, 2, 2)).repeat_interleave(3, 0))


def test_a_tool_without_cardinality_counts_its_own_values():
    parts = [Categorical("y", {"x": 2}, 3, rs.table(1, 2, 3)), Tool("z", ["y"], lambda y: y % 2)]
    y = torch.tensor(rs.table(1, 2, 3))
    expected = torch.stack([y[:, 0] + y[:, 2], y[:, 1]], 1)
    torch.testing.assert_close(exact.marginal(CompoundSystem(parts)).detach(), expected)


def test_a_chain_of_30_tools_with_two_parents_each_is_quick():
    """Asking each tool for its parents' values anew would double the work at every step."""
    parts = [Categorical("y", {"x": 2}, 2), Tool("t0", ["y"], abs), Tool("t1", ["y"], abs)]
    parts += [Tool(f"t{i}", [f"t{i - 1}", f"t{i - 2}"], lambda a, b: a ^ b) for i in range(2, 30)]
    start = time.perf_counter()
    exact.marginal(CompoundSystem(parts, output="t29"))
    assert time.perf_counter() - start < 2


class Wordy(Component):
    """No table."""

    def greedy(self, parent_values):
        return ["a"] * len(parent_values["x"])


NO_TABLE = {
    "no finite table": (
        errors.UnsupportedSamplerError,
        "'y' .Wordy. has no finite table",
        lambda: [Wordy("y", ["x"]), Categorical("z", {"y": 2, "x": 2}, 2)],
    ),
    "unread input": (errors.CardinalityError, "'x' is unknown", lambda: [Tool("z", ["x"], abs)]),
    "tool returns text": (
        errors.CardinalityError,
        "'z' returns 'b' .str.",
        lambda: [Categorical("y", {"x": 2}, 2), Tool("z", ["y"], lambda y: "ab"[y] if y else 0)],
    ),
    "tool returns too much": (
        errors.ValueRangeError,
        r"'t' returns 3 for \(3,\), outside 0..2",
        lambda: [Categorical("y", {"x": 2}, 4), Tool("t", ["y"], abs), Categorical("z", {"t": 3}, 2)],
    ),
    "tool returns a negative": (
        errors.ValueRangeError,
        "'z' returns -1",
        lambda: [Categorical("y", {"x": 2}, 2), Tool("z", ["y"], lambda y: y - 1)],
    ),
}


@pytest.mark.parametrize("case", NO_TABLE)
def test_systems_without_exact_sums_are_answered_by_name(case):
    kind, message, make = NO_TABLE[case]
    with pytest.raises(kind, match=message):
        exact.marginal(CompoundSystem(make()))


# --- the optimum ----------------------------------------------------------------------------------------------------


def xor_collider(edge=False):
    """Two fair drafts; z is good with probability 0.9 if they agree, 0.1 if not (theory S2.2)."""
    z = [[[0.1, 0.9], [0.9, 0.1]], [[0.9, 0.1], [0.1, 0.9]]]
    return CompoundSystem(
        [Categorical("y1", {"x": 1}, 2), Categorical("y2", {"x": 1}, 2), Categorical("z", {"y1": 2, "y2": 2}, 2, z)]
    )


def test_xor_collider_has_target_08808():
    system = xor_collider()
    target = exact.tilted_marginal(system, [[0.0, 1.0]], 0.5)
    assert target[0, 1].item() == pytest.approx(0.8808, abs=5e-5)
    assert target[0, 1].item() == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-15)
    z_of = torch.tensor([[0.1, 0.9], [0.9, 0.1]]).double() @ torch.tensor([1.0, math.exp(2)]).double()
    assert z_of.tolist() == pytest.approx([6.750, 1.639], abs=1e-3)


def test_tilted_marginal_starts_from_the_reference_and_has_no_gradient():
    system, reward = rs.chain(), torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.5, 0.0]])
    target = exact.tilted_marginal(system, reward, 0.7)
    weights = exact.marginal(system, reference=True).detach() * torch.exp(reward.double() / 0.7)
    torch.testing.assert_close(target, weights / weights.sum(1, keepdim=True))
    assert not target.requires_grad
    preference = reward.double()[:, :, None] - reward.double()[:, None, :]
    assert alignment.gap(target, preference, 0.7, p_reference=exact.marginal(system, reference=True)) < 1e-12


def test_tilt_keeps_structural_zeros_and_survives_a_tiny_beta():
    p = torch.tensor([[0.5, 0.5, 0.0]]).double()
    assert exact.tilt(p, [[0.0, 1.0, 9.0]], 1.0)[0, 2] == 0
    assert exact.tilt(p, [[0.0, 1.0, 9.0]], 5e-324).tolist() == [[0.0, 1.0, 0.0]]
    torch.testing.assert_close(exact.tilt(p, [[0.0, 1.0, 9.0]], 1e300), p)


def test_kl_to_the_reference_falls_as_beta_rises():
    p, reward = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.0, 1.0, 2.0]]).double()
    found = [exact.tilt(p, reward, beta) for beta in (0.1, 0.3, 1.0, 3.0, 10.0)]
    kl = [(q * (q / p).log()).nansum().item() for q in found]
    assert kl == sorted(kl, reverse=True) and kl[-1] < 0.01 < kl[0]


@pytest.mark.parametrize(("reward", "kind", "message"), [
    ([[0.0, 1.0]], errors.CardinalityError, r"\(1, 2\), p_ref \(2, 3\)"),
    ([[0.0, math.nan, 1.0]] * 2, errors.NonFiniteError, "NaN"),
    ([[0.0, math.inf, 1.0]] * 2, errors.NonFiniteError, "infinity"),
])  # fmt: skip
def test_bad_rewards_are_answered_by_name(reward, kind, message):
    with pytest.raises(kind, match=message):
        exact.tilted_marginal(rs.chain(), reward, 1.0)


# --- case files -----------------------------------------------------------------------------------------------------


def spec():
    """A small file with the required keys only."""
    return {
        "format": "discrete-compound-system/1",
        "input": {"name": "x", "card": 2},
        "components": [
            {"name": "z", "parents": ["y", "x"], "card": 2, "policy": [[[0.5, 0.5], [0.9, 0.1]]] * 3},
            {"name": "y", "parents": ["x"], "card": 3, "policy": [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]},
        ],
        "terminal": "z",
        "beta": 0.25,
        "reward": {"table": [[0.0, 1.0], [1.0, 0.0]]},
    }


def load(tmp_path, content):
    path = tmp_path / "case.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return exact.load_case(path)


def test_required_keys_are_enough_and_components_may_stand_in_any_order(tmp_path):
    case = load(tmp_path, spec())
    assert case.system.order == ["y", "z"] and case.beta == 0.25 and case.reward.dtype == torch.float64
    assert case.system.parents("z") == ("y", "x") and case.name == "" and case.extra == {}
    torch.testing.assert_close(exact.marginal(case.system), exact.marginal(case.system, reference=True))
    assert torch.isneginf(case.system["y"].logits[1, 1:]).all()
    torch.testing.assert_close(case.preference_logits[0], torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double())


def test_other_keys_are_kept_in_extra_and_a_bare_reward_is_a_table(tmp_path):
    content = spec() | {"name": "mine", "note": 3, "reward": [[0, 1], [1, 0]]}
    case = load(tmp_path, content)
    assert case.name == "mine" and case.extra == {"note": 3} and case.reward.tolist() == [[0, 1], [1, 0]]


def test_reference_alone_is_the_policy_too(tmp_path):
    content = spec()
    for component in content["components"]:
        component["reference"] = component.pop("policy")
    torch.testing.assert_close(
        exact.marginal(load(tmp_path, content).system), exact.marginal(load(tmp_path, spec()).system)
    )


def test_tied_components_share_one_table(tmp_path):
    """Six variables in a chain with one kernel three times."""
    kernel, names = rs.table(2, 2, 2).tolist(), ["a", "b", "c", "d", "z"]
    components = [
        {"name": name, "parents": [above], "card": 2, "policy": kernel if name in "bcd" else rs.table(3, 2, 2).tolist()}
        for above, name in zip(["x", *names], names)
    ]
    content = spec() | {"components": components[::-1], "tied": [["b", "c", "d"]]}
    system = load(tmp_path, content).system
    assert system["b"].logits is system["c"].logits is system["d"].logits and len(system.trainable_parameters()) == 3
    ends, middle = rs.table(3, 2, 2), np.linalg.matrix_power(rs.table(2, 2, 2), 3)
    np.testing.assert_allclose(exact.marginal(system).detach().numpy(), ends @ middle @ ends, atol=1e-12)
    content["tied"] = [["b", "nobody"]]
    with pytest.raises(errors.UnknownComponentError, match="case.json: 'tied' names 'nobody'"):
        load(tmp_path, content)
    content["tied"] = [["a", "b"]]
    with pytest.raises(errors.CaseFormatError, match="'b' is tied to 'a', but its policy differs"):
        load(tmp_path, content)


def changed(path, value):
    """spec() with one entry replaced, or removed where value is None."""
    content = copy.deepcopy(spec())
    *way, last = path
    place = content
    for step in way:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return content


@pytest.mark.parametrize("path", [
    ["format"], ["input"], ["components"], ["terminal"], ["beta"], ["reward"], ["input", "name"], ["input", "card"],
    ["components", 0, "name"], ["components", 1, "parents"], ["components", 0, "card"], ["components", 1, "policy"],
    ["reward", "table"],
], ids=str)  # fmt: skip
def test_each_missing_key_is_named_with_its_file(tmp_path, path):
    with pytest.raises(errors.CaseFormatError, match=rf"case.json: .*{path[-1]}"):
        load(tmp_path, changed(path, None))


BAD_CASES = {
    "another format": (["format"], "discrete-compound-system/2", errors.CaseFormatError, "system/2"),
    "reward too small": (["reward", "table"], [[0.0, 1.0]], errors.CaseFormatError, r"\(1, 2\), expected \(2, 2\)"),
    "reward ragged": (["reward", "table"], [[0.0, 1.0], [1.0]], errors.CaseFormatError, "rectangular"),
    "reward of text": (["reward", "table"], [["a", "b"]] * 2, errors.CaseFormatError, "reward"),
    "reward NaN": (["reward", "table"], [[0.0, math.nan]] * 2, errors.NonFiniteError, "reward"),
    "reward transposed": (["reward", "axes"], ["z", "x"], errors.CaseFormatError, r"axes are \['z', 'x'\]"),
    "axes swapped": (["components", 0, "axes"], ["x", "y", "z"], errors.CaseFormatError, "axes of 'z'"),
    "row does not sum to 1": (["components", 1, "policy"], [[0.2, 0.3, 0.6]] * 2, errors.TableError, r"'y': row \(0,\).*1.1"),
    "negative": (["components", 1, "policy"], [[1.2, -0.2, 0.0]] * 2, errors.TableError, "'y'.*-0.2"),
    "NaN in a table": (["components", 1, "policy"], [[math.nan, 0.5, 0.5]] * 2, errors.NonFiniteError, "'y'.*nan"),
    "ragged table": (["components", 1, "policy"], [[0.5, 0.5, 0.0], [1.0]], errors.TableError, "'y'"),
    "table of text": (["components", 1, "policy"], [["a", "b", "c"]] * 2, errors.TableError, "'y'"),
    "wrong cardinality": (["components", 1, "card"], 4, errors.CardinalityError, r"\(2, 4\)|\(4, 2, 2\)"),
    "cardinality 0": (["components", 1, "card"], 0, errors.CardinalityError, "'y'"),
    "cardinality a word": (["input", "card"], "two", errors.CardinalityError, "'x'.*'two'"),
    "bad reference": (["components", 1, "reference"], [[0.2, 0.3, 0.6]] * 2, errors.TableError, "'y'"),
    "missing parent": (["components", 1, "parents"], ["nowhere"], errors.MissingParentError, "'y' reads 'nowhere'"),
    "cycle": (["components", 1], {"name": "y", "parents": ["z"], "card": 3, "policy": [[1, 0, 0]] * 2}, errors.CycleError, "->"),
    "duplicate": (["components", 1, "name"], "z", errors.DuplicateComponentError, "'z'"),
    "named as the input": (["components", 1, "name"], "x", errors.DuplicateComponentError, "'x'"),
    "unknown terminal": (["terminal"], "q", errors.UnknownComponentError, "'q'"),
    "no components": (["components"], [], errors.GraphError, "component"),
    "components no list": (["components"], 7, errors.CaseFormatError, "wrong type"),
    "input a word": (["input"], "x", errors.CaseFormatError, "lacks the key"),
    "beta 0": (["beta"], 0, errors.UnknownOptionError, "beta"),
    "beta negative": (["beta"], -0.5, errors.UnknownOptionError, "beta"),
    "beta NaN": (["beta"], math.nan, errors.UnknownOptionError, "beta"),
    "beta a word": (["beta"], "half", errors.UnknownOptionError, "beta"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CASES)
def test_bad_case_files_are_answered_by_name_with_their_file(tmp_path, case):
    path, value, kind, message = BAD_CASES[case]
    with pytest.raises(kind, match=rf"case.json: .*({message})"):
        load(tmp_path, changed(path, value))


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", '"text"'])
def test_broken_json_names_the_file(tmp_path, content):
    with pytest.raises(errors.CaseFormatError, match=r"case.json: (not a JSON file|format is)"):
        load(tmp_path, content)


def test_a_missing_file_a_folder_and_bytes_are_named(tmp_path):
    with pytest.raises(errors.CaseFormatError, match=r"nowhere.json: .*no such file"):
        exact.load_case(tmp_path / "nowhere.json")
    with pytest.raises(errors.CaseFormatError):
        exact.load_case(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(errors.CaseFormatError, match=r"bytes.json: not a JSON file"):
        exact.load_case(tmp_path / "bytes.json")
