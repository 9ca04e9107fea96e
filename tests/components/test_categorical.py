"""Tables: values, gradients, sampling, and what is wrong with a bad one."""

import math

import numpy as np
import pytest
import torch

from sysdpo_lab import errors
from sysdpo_lab.components import Categorical
from tests import random_systems as rs
from tests.random_systems import longs


def test_axes_are_the_parents_in_order_then_the_variable():
    table = rs.table(0, 2, 3, 4)
    component = Categorical("y", {"a": 2, "b": 3}, 4, table)
    found = component.log_prob(longs(3, 0), {"b": longs(2, 1), "a": longs(1, 0)})
    torch.testing.assert_close(found.detach().exp(), torch.tensor([table[1, 2, 3], table[0, 1, 0]]))
    assert component.logits.shape == (2, 3, 4) and component.logits.dtype == found.dtype == torch.float64


def test_default_is_uniform_and_the_reference_is_the_start():
    component = Categorical("y", {"x": 2}, 4)
    torch.testing.assert_close(component.probabilities(), torch.full((2, 4), 0.25).double())
    own = Categorical("y", {"x": 2}, 2, [[0.1, 0.9]] * 2, [[0.5, 0.5]] * 2)
    torch.testing.assert_close(own.probabilities(reference=True)[0], torch.tensor([0.5, 0.5]).double())
    with own.reference():
        assert own.is_reference and own.probabilities()[0, 0].item() == pytest.approx(0.5)
        assert own.probabilities(reference=False)[0, 0].item() == pytest.approx(0.1)
    assert not own.is_reference


def test_gradient_is_one_minus_p():
    component = Categorical("y", {"x": 2}, 3, [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    component.log_prob(longs(1), {"x": longs(0)}).sum().backward()
    assert component.logits.grad[0].tolist() == pytest.approx([-0.2, 0.7, -0.5]) and not component.logits.grad[1].any()


def test_structural_zeros_are_minus_infinity_with_a_finite_gradient():
    component = Categorical("y", {"x": 1}, 3, [[0.5, 0.5, 0.0]])
    found = component.log_prob(longs(0, 2), {"x": longs(0, 0)})
    assert found[1] == -math.inf and component.logits[0, 2] == -math.inf
    found[0].backward()
    assert component.logits.grad[0].tolist() == pytest.approx([0.5, -0.5, 0.0])


def test_rows_a_little_off_one_are_normalised():
    component = Categorical("y", {"x": 1}, 2, [[0.3, 0.7 + 5e-7]])
    assert component.probabilities().sum().item() == pytest.approx(1, abs=1e-15)


def test_a_table_may_be_a_tensor_with_a_graph_an_array_or_whole_numbers():
    start = torch.tensor([[0.5, 0.5]], requires_grad=True)
    component = Categorical("y", {"x": 1}, 2, start)
    assert component.logits.is_leaf and start.data_ptr() != component.logits.data_ptr()
    assert Categorical("y", {"x": np.int64(1)}, np.int32(2), np.array([[0.5, 0.5]])).cardinality == 2
    assert Categorical("y", {"x": 1}, 2, [[1, 0]]).probabilities().tolist() == [[1.0, 0.0]]


def test_no_parents_means_one_row():
    component = Categorical("y", {}, 2, [0.25, 0.75])
    assert component.log_prob(longs(1, 0, 1), {}).exp().tolist() == pytest.approx([0.75, 0.25, 0.75])
    assert component.greedy({}).tolist() == [1] and component.diverse({}, 2).tolist() == [[1, 0]]
    assert component.sample({}, num_samples=5, generator=torch.Generator().manual_seed(0)).shape == (1, 5)


def test_samples_have_the_tables_frequencies_and_never_a_zero():
    component, x = Categorical("y", {"x": 2}, 3, [[0.2, 0.8, 0.0], [0.0, 0.0, 1.0]]), longs(0, 1)
    drawn = component.sample({"x": x}, num_samples=20_000, generator=torch.Generator().manual_seed(0))
    assert drawn.shape == (2, 20_000) and drawn[1].eq(2).all() and drawn[0].max() == 1
    assert abs(drawn[0].double().mean().item() - 0.8) < 5 * math.sqrt(0.16 / 20_000)
    assert component.sample({"x": x}).shape == (2,)


TABLES = {
    "wrong shape": ([[0.5, 0.5]], errors.CardinalityError, r"'y'.*\(1, 2\).*\(2, 3\)"),
    "does not sum to 1": (
        [[0.2, 0.3, 0.5], [0.2, 0.3, 0.6]],
        errors.TableError,
        r"'y': row \(1,\) of the table sums to 1.1",
    ),
    "negative": ([[0.2, 0.3, 0.5], [-0.2, 0.7, 0.5]], errors.TableError, r"'y'.*-0.2 < 0 at \(1, 0\)"),
    "NaN": ([[0.2, 0.3, 0.5], [0.2, math.nan, 0.5]], errors.NonFiniteError, r"'y'.*nan at \(1, 1\)"),
    "infinite": ([[0.2, 0.3, math.inf]] * 2, errors.NonFiniteError, r"'y'.*inf at \(0, 2\)"),
    "ragged": ([[0.5, 0.5], [1.0]], errors.TableError, r"'y'.*\(2, 3\)"),
    "words": ([["a", "b", "c"]] * 2, errors.TableError, "'y'"),
    "None inside": ([[None, 0.5, 0.5]] * 2, errors.TableError, "'y'"),
    "logits, not probabilities": ([[-1.0, -1.0, -1.0]] * 2, errors.TableError, "'y'.*-1 < 0"),
}


@pytest.mark.parametrize("argument", ["probabilities", "reference"])
@pytest.mark.parametrize("case", TABLES)
def test_bad_tables_are_answered_by_name(case, argument):
    table, kind, message = TABLES[case]
    with pytest.raises(kind, match=message):
        Categorical("y", {"x": 2}, 3, **{argument: table})


@pytest.mark.parametrize("number", [0, -1, 2.0, "2", None, True])
def test_bad_cardinalities_are_answered_by_name(number):
    with pytest.raises(errors.CardinalityError, match="'y': the cardinality of 'y' must be a positive whole number"):
        Categorical("y", {"x": 2}, number)
    with pytest.raises(errors.CardinalityError, match="'y': the cardinality of 'x'"):
        Categorical("y", {"x": number}, 2)


@pytest.mark.parametrize("parents", [["x"], ("x", "w"), "x", 3])
def test_parents_without_cardinalities_are_answered_by_name(parents):
    with pytest.raises(errors.CardinalityError, match="'y': parents must map each name"):
        Categorical("y", parents, 2)


def test_values_and_parents_of_different_lengths_are_answered_by_name():
    component = Categorical("y", {"x": 2, "w": 2}, 2)
    with pytest.raises(errors.BatchMismatchError, match=r"'y': \(3,\) values for 2 rows"):
        component.log_prob(longs(0, 1, 0), {"x": longs(0, 1), "w": longs(0, 1)})
    with pytest.raises(errors.BatchMismatchError, match="'y': parents have different numbers of rows"):
        component.log_prob(longs(0, 1), {"x": longs(0, 1), "w": longs(0)})
    with pytest.raises(errors.MissingParentError, match="'y' needs a value of 'w'"):
        component.sample({"x": longs(0, 1)})


def test_a_tie_to_an_object_shares_table_and_reference():
    owner = Categorical("a", {"x": 2}, 2, rs.table(0, 2, 2), rs.table(1, 2, 2))
    twin = Categorical("b", {"a": 2}, 2, tie=owner)
    assert (
        twin.logits is owner.logits and torch.equal(twin.reference_logits, owner.reference_logits) and twin.tie == "a"
    )
    with pytest.raises(errors.CardinalityError, match="'c' is tied to 'a'"):
        Categorical("c", {"a": 3}, 2, tie=owner)
