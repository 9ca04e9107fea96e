"""Judges by a score: exact, rule, similarity."""

from types import SimpleNamespace

import pytest
import torch

from sysdpo_lab import errors, judges
from sysdpo_lab.components.completion import Completion


class Letters:
    """An encoder whose vectors are letter counts: cosines can be worked out by hand."""

    def encode(self, texts):
        counts = torch.tensor([[text.count(letter) for letter in "abc"] for text in texts], dtype=torch.float32)
        return torch.nn.functional.normalize(counts, dim=-1)


def test_the_exact_judge_gives_1_half_and_0():
    judge = judges.exact(lambda x, answer: len(answer))
    assert judge.compare(["x"] * 3, ["aa", "a", "b"], ["a", "aa", "c"]) == [1.0, 0.0, 0.5]


def test_completions_are_judged_by_their_text():
    judge = judges.exact(lambda x, answer: float(answer == "yes"))
    assert judge.compare(["x"], [Completion("yes", (1, 2), False)], ["no"]) == [1.0]


def test_swapping_the_sides_turns_a_value_around():
    judge = judges.rule({"short": lambda x, a: len(a) < 3, "starts with x": lambda x, a: a.startswith(x)})
    inputs, first, second = ["a", "b", "c"], ["a", "bbbb", "z"], ["aaaa", "q", "zz"]
    forth, back = judge.compare(inputs, first, second), judge.compare(inputs, second, first)
    assert forth == [1.0, 0.5, 0.5] and [1 - v for v in forth] == back


def test_a_rule_judge_without_rules_is_refused():
    with pytest.raises(errors.UnknownOptionError, match="at least one rule"):
        judges.rule({})


def test_a_score_that_is_nan_is_an_error_not_a_tie():
    judge = judges.exact(lambda x, answer: float("nan"))
    with pytest.raises(errors.NonFiniteError):
        judge.compare(["x"], ["a"], ["b"])


def test_the_two_sides_need_as_many_answers_as_there_are_inputs():
    judge = judges.exact(lambda x, answer: 0.0)
    with pytest.raises(errors.BatchMismatchError, match="2 inputs, 1 first and 2 second"):
        judge.compare(["x", "y"], ["a"], ["a", "b"])


def test_similarity_is_the_cosine_with_the_reference():
    judge = judges.similarity(Letters(), {"q": "aab"}.__getitem__, tie=0.0)
    # cosines with (2, 1, 0)/sqrt 5: "a" 2/sqrt 5 = 0.894, "ab" 3/sqrt 10 = 0.949, "c" 0
    assert judge.compare(["q", "q", "q"], ["ab", "c", "a"], ["a", "a", "a"]) == [1.0, 0.0, 0.5]
    assert judges.similarity(Letters(), {"q": "aab"}.__getitem__, tie=0.06).compare(["q"], ["ab"], ["a"]) == [0.5]


def test_an_empty_answer_is_less_similar_than_any_other():
    judge = judges.similarity(Letters(), lambda x: "a")
    assert judge.compare(["q", "q"], ["  ", ""], ["c", ""]) == [0.0, 0.5]


def test_a_score_judge_takes_objects_with_a_text():
    judge = judges.exact(lambda x, answer: len(answer))
    assert judge.compare(["x"], [SimpleNamespace(text="ab")], ["a"]) == [1.0]
