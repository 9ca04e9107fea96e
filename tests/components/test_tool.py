"""Deterministic components: log-probability 0 for what the function returns, -inf for everything else."""

import math

import pytest
import torch

from sysdpo_lab import CompoundSystem, errors
from sysdpo_lab.components import Completion, Tool
from tests.random_systems import longs


def test_whole_numbers_come_back_as_a_tensor_and_score_zero_or_minus_infinity():
    tool = Tool("t", ["a", "b"], lambda a, b: a * 10 + b)
    parents = {"b": longs(3, 4), "a": longs(1, 2)}  # arguments follow the listed order, not the mapping's
    assert tool.greedy(parents).tolist() == [13, 24] and tool.kind == "deterministic"
    assert tool.log_prob(longs(13, 25), parents).tolist() == [0.0, -math.inf]
    assert tool.log_prob([13, 24], parents).tolist() == [0.0, 0.0]
    assert tool.sample(parents, num_samples=2).tolist() == [[13, 13], [24, 24]]


def test_the_function_sees_plain_values():
    seen = []
    tool = Tool("t", ["a", "b", "c"], lambda *values: seen.append(values) or "done")
    tool.greedy({"a": longs(3), "b": [Completion("a cat", (5, 2))], "c": [None]})
    assert seen == [(3, "a cat", None)] and type(seen[0][0]) is int


@pytest.mark.parametrize(
    ("values", "kind"), [([True, False], torch.Tensor), (["a", "b"], list), ([1, None], list), ([1.5, 2.0], list)]
)
def test_other_values_come_back_as_a_list(values, kind):
    found = Tool("t", ["x"], lambda x: values[x]).greedy({"x": longs(0, 1)})
    assert type(found) is kind and list(found) == values


def test_texts_records_and_none_are_compared_by_value():
    tool = Tool("t", ["x"], lambda x: {"words": x.split()} if x else None)
    assert tool.log_prob([{"words": ["a", "b"]}, None, None], {"x": ["a b", "", "c"]}).tolist() == [0.0, 0.0, -math.inf]
    assert tool.sample({"x": ["a", ""]}, num_samples=2) == [[{"words": ["a"]}] * 2, [None, None]]


def test_a_completion_is_compared_by_its_text():
    assert Tool("t", ["x"], str.upper).log_prob([Completion("A", (7,))], {"x": ["a"]}).tolist() == [0.0]


def test_without_parents_there_is_one_value_for_all_rows():
    tool = Tool("c", [], lambda: 4)
    assert tool.greedy({}).tolist() == [4] and tool.log_prob(longs(4, 4, 5), {}).tolist() == [0.0, 0.0, -math.inf]


def test_an_error_of_the_function_says_which_component_row_and_arguments():
    tool = Tool("t", ["x"], lambda x: 1 // x)
    with pytest.raises(ZeroDivisionError) as caught:
        tool.greedy({"x": longs(1, 0)})
    assert caught.value.__notes__ == ["raised by the function of component 't', row 1, called with [0]"]


def test_bad_input_is_answered_by_name():
    with pytest.raises(errors.GraphError, match="'t': function must be callable, found 3"):
        Tool("t", ["x"], 3)
    tool = Tool("t", ["x"], abs)
    with pytest.raises(errors.BatchMismatchError, match="'t': 3 values for 2 rows"):
        tool.log_prob(longs(0, 1, 1), {"x": longs(0, 1)})
    with pytest.raises(errors.MissingParentError, match="'t' needs a value of 'x'"):
        tool.greedy({})
    for number in (0, -1, 2.5, "2", True):
        with pytest.raises(errors.CardinalityError, match="'t': the cardinality"):
            Tool("t", ["x"], abs, cardinality=number)


def test_a_system_of_tools_over_texts():
    system = CompoundSystem([Tool("y", ["x"], str.split), Tool("z", ["y"], len)])
    trace = system.generate({"x": ["a b", "c", ""]})
    assert trace["y"] == [["a", "b"], ["c"], []] and trace["z"].tolist() == [2, 1, 0]
    assert system.log_prob(trace).tolist() == [0.0] * 3
