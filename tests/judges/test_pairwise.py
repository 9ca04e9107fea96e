"""A language model as judge: both orders, ties, the store, the budget, what does not parse."""

import pytest

from sysdpo_lab import errors, judges
from sysdpo_lab.judges.pairwise import judged_pairs

INPUTS, FIRST, SECOND = ["q1", "q2", "q3"], ["good", "bad", "good"], ["bad", "good", "good"]


class Scripted:
    """A chat model whose reply is a function of the user's message; counts what it was asked."""

    def __init__(self, reply, name="scripted"):
        self.reply, self.name, self.asked = reply, name, 0

    def replies(self, conversations):
        for index in reversed(range(len(conversations))):  # any order is allowed
            self.asked += 1
            yield index, self.reply(conversations[index][-1]["content"])


def fair(content: str) -> str:
    """Prefers the answer "good"."""
    first, second = (content.split(f"Answer {side}:\n")[1].split("\n")[0] for side in "AB")
    return "[[C]]" if first == second else "[[A]]" if first == "good" else "[[B]]"


def test_a_fair_model_is_read_in_both_orders():
    model = Scripted(fair)
    judge = judges.PairwiseJudge(model)
    assert judge.compare(INPUTS, FIRST, SECOND) == [1.0, 0.0, 0.5]
    assert model.asked == 4  # two a pair; equal answers are not asked about
    assert judge.counts.disagreed == judge.counts.malformed == 0


@pytest.mark.parametrize("letter", "AB")
def test_a_model_that_always_names_one_place_gives_exactly_one_half(letter):
    judge = judges.PairwiseJudge(Scripted(lambda content: f"[[{letter}]]"))
    assert judge.compare(INPUTS * 10, FIRST * 10, SECOND * 10) == [0.5] * 30
    assert judge.counts.disagreed == 20


def test_one_tie_and_one_preference_is_a_tie():
    judge = judges.PairwiseJudge(Scripted(lambda content: "[[A]]" if "Answer A:\ngood" in content else "[[C]]"))
    assert judge.compare(["q"], ["good"], ["bad"]) == [0.5]
    assert judge.counts.disagreed == 1


def test_malformed_replies_are_counted_and_make_a_tie():
    judge = judges.PairwiseJudge(Scripted(lambda content: "I like both" if "Answer A:\ngood" in content else "[[B]]"))
    assert judge.compare(["q1", "q2"], ["good", "good"], ["bad", "worse"]) == [0.5, 0.5]
    assert judge.counts.malformed == 2 and judge.counts.disagreed == 0 and judge.report()["compared"] == 2


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("[[A]]", "A"), ("Verdict: [[B]].", "B"), ("[[ C ]]", "C"), ("[[A]] ... so [[A]]", "A"), (" B.", "B"), ("**A**", "A"),
        ("(C)", "C"), ("", None), ("A is better than B", None), ("[[A]] no, [[B]]", None), ("[[D]]", None), ("a", None),
        ("ABC", None), ("[[AB]]", None),
    ],
)  # fmt: skip
def test_verdicts_are_read_strictly(reply, verdict):
    assert judges.read_verdict(reply) == verdict


def test_what_was_asked_once_is_not_asked_again(tmp_path):
    first, again = Scripted(fair), Scripted(fair)
    one = judges.PairwiseJudge(first, tmp_path / "replies.jsonl")
    values = one.compare(INPUTS, FIRST, SECOND)
    two = judges.PairwiseJudge(again, tmp_path / "replies.jsonl")
    assert two.compare(INPUTS, FIRST, SECOND) == values
    assert again.asked == 0 and two.counts.stored == 4 and one.counts.asked == 4


def test_another_model_does_not_get_the_replies_of_the_first(tmp_path):
    judges.PairwiseJudge(Scripted(fair), tmp_path / "r").compare(INPUTS, FIRST, SECOND)
    other = Scripted(lambda content: "[[C]]", name="another")
    assert judges.PairwiseJudge(other, tmp_path / "r").compare(["q1"], ["good"], ["bad"]) == [0.5]
    assert other.asked == 2


def test_a_repeated_question_is_asked_once():
    model = Scripted(fair)
    assert judges.PairwiseJudge(model).compare(["q1", "q1"], ["good"] * 2, ["bad"] * 2) == [1.0, 1.0]
    assert model.asked == 2


def test_the_budget_stops_and_a_larger_one_goes_on(tmp_path):
    small = judges.PairwiseJudge(Scripted(fair), tmp_path / "r", budget=3)
    with pytest.raises(errors.JudgeBudgetError, match="4 new questions, 3 left of the budget of 3"):
        small.compare(INPUTS, FIRST, SECOND)
    model = Scripted(fair)
    assert judges.PairwiseJudge(model, tmp_path / "r", budget=1).compare(INPUTS, FIRST, SECOND) == [1.0, 0.0, 0.5]
    assert model.asked == 1


def test_a_budget_counts_over_calls():
    judge = judges.PairwiseJudge(Scripted(fair), budget=4)
    judge.compare(INPUTS, FIRST, SECOND)
    judge.compare(INPUTS, FIRST, SECOND)  # all stored
    with pytest.raises(errors.JudgeBudgetError):
        judge.compare(["q9"], ["good"], ["bad"])


def test_replies_that_came_before_a_failure_are_kept(tmp_path):
    def failing(content):
        if "q1" in content:
            raise errors.JudgeUnavailableError("gone")
        return fair(content)

    judge = judges.PairwiseJudge(Scripted(failing), tmp_path / "r")
    with pytest.raises(errors.JudgeUnavailableError):
        judge.compare(INPUTS, FIRST, SECOND)
    model = Scripted(fair)
    assert judges.PairwiseJudge(model, tmp_path / "r").compare(INPUTS, FIRST, SECOND) == [1.0, 0.0, 0.5]
    assert model.asked == 2  # the two about q2 were kept


@pytest.mark.parametrize("budget", [-1, 1.5, True])
def test_a_budget_is_a_whole_number(budget):
    with pytest.raises(errors.UnknownOptionError, match="budget"):
        judges.PairwiseJudge(Scripted(fair), budget=budget)


def test_braces_in_an_answer_are_only_text():
    seen = []
    judges.PairwiseJudge(Scripted(lambda content: seen.append(content) or "[[A]]")).compare(
        ["{x}"], ["{first}"], ["{0}"]
    )
    assert "Request:\n{x}\n" in seen[0] and "{first}" in seen[0]


def test_a_conversation_is_shown_as_text():
    seen = []
    conversation = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    judges.PairwiseJudge(Scripted(lambda content: seen.append(content) or "[[A]]")).compare(
        [conversation], ["a"], ["b"]
    )
    assert "System: Be kind." in seen[0] and "{'role'" not in seen[0]


def test_pairs_from_a_judge_leave_ties_out():
    pairs, ties = judged_pairs(judges.PairwiseJudge(Scripted(fair)), INPUTS, FIRST, SECOND)
    assert [(p.chosen, p.rejected) for p in pairs] == [("good", "bad"), ("good", "bad")] and ties == 1
