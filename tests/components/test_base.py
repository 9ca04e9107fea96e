"""Batches of every kind: rows are counted, repeated, taken, grouped and compared."""

import numpy as np
import pytest
import torch

from sysdpo_lab import errors
from sysdpo_lab.components import Completion, Component, base

BATCHES = {
    "table": torch.tensor([5, 6, 7]),
    "images": torch.arange(24.0).reshape(3, 2, 4),
    "texts": ["a", "b", "c"],
    "records": [{"a": 1}, {"a": 2}, None],
}


def rows(batch):
    return [row.tolist() if isinstance(row, torch.Tensor) else row for row in batch]


@pytest.mark.parametrize("kind", BATCHES)
def test_rows(kind):
    batch = BATCHES[kind]
    a, b, c = rows(batch)
    assert base.batch_length(batch) == 3
    assert rows(base.repeat_rows(batch, 2)) == [a, a, b, b, c, c]
    assert rows(base.take_rows(batch, [2, 0, 2])) == [c, a, c]
    assert rows(base.take_rows(batch, torch.tensor([1]))) == [b]
    assert rows(base.concatenate(batch, batch)) == [a, b, c, a, b, c]
    grouped = base.group_rows(base.repeat_rows(batch, 2), 2)
    assert len(grouped) == 3 and rows(base.flatten_rows(grouped)) == [a, a, b, b, c, c]
    assert rows(base.concatenate(batch, list(batch))) == [a, b, c, a, b, c]


@pytest.mark.parametrize("single", ["abc", b"abc", 3, None, torch.tensor(1), {"x": [1]}])
def test_a_single_value_is_no_batch(single):
    """A text would pass for a batch of its letters."""
    with pytest.raises(errors.BatchMismatchError, match=r"single value.*write \[value\]"):
        base.batch_length(single)


@pytest.mark.parametrize(("left", "right", "same"), [
    (1, 1, True), (1, torch.tensor(1), True), (torch.tensor(1), 2, False), ("a", "a", True), (None, None, True), (None, 0, False),
    (torch.zeros(2), torch.zeros(2), True), (torch.zeros(2), torch.zeros(3), False), (torch.zeros(2), "a", False),
    (np.zeros(2), np.zeros(2), True), (np.zeros(2), np.ones(2), False), (np.zeros(2), None, False), ({"a": 1}, {"a": 1}, True),
    (Completion("a b", (1, 2)), Completion("a  b", (1, 2)), True), (Completion("a", (1,)), Completion("a", (2,)), False),
])  # fmt: skip
def test_equality(left, right, same):
    assert base.same_value(left, right) is same and base.same_value(right, left) is same


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_is_a_string_with_something_in_it(name):
    with pytest.raises(errors.GraphError, match="non-empty string"):
        Component(name, ["x"])


def test_parents_are_listed_once_and_may_be_one_string():
    with pytest.raises(errors.GraphError, match=r"'y' lists a parent twice: \('x', 'x'\)"):
        Component("y", ["x", "x"])
    assert Component("y", "xyz").parents == ("xyz",)


def test_parent_values_are_checked_by_name():
    component = Component("y", ["x", "w"])
    assert component.check_parents({"x": ["a"], "w": torch.tensor([0]), "other": [1, 2]}) == 1
    with pytest.raises(errors.MissingParentError, match="'y' needs a value of 'w'"):
        component.check_parents({"x": ["a"]})
    with pytest.raises(errors.BatchMismatchError, match="'y': parents.*'x': 1, 'w': 2"):
        component.check_parents({"x": ["a"], "w": ["b", "c"]})


@pytest.mark.parametrize("call", [
    lambda c: c.diverse({}, 2), lambda c: c.perturbed_top_k({}, torch.zeros(1, 1), torch.zeros(1, 1), 2, None)
])  # fmt: skip
def test_searches_that_a_component_does_not_have_name_it(call):
    with pytest.raises(errors.UnsupportedSamplerError, match="'y' .Component."):
        call(Component("y", ["x"]))


def test_a_fresh_generator_leaves_the_global_one_alone():
    state = torch.get_rng_state()
    first, second = base.fresh_generator(), base.fresh_generator()
    assert first.initial_seed() != second.initial_seed() and torch.equal(torch.get_rng_state(), state)
