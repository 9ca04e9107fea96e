"""Every check of every lesson: the right answer passes, each typical mistake is recognised, and garbage is explained."""

import inspect
from pathlib import Path

import pytest
import torch

from sysdpo_lab.coursework import checks
from sysdpo_lab.coursework.checks import core

FOLDER = Path(checks.__file__).parent
LESSONS = sorted(path.stem for path in FOLDER.glob("lesson_*.py"))
ALL = {
    f"{lesson}.{name}": check
    for lesson in LESSONS
    for name, check in inspect.getmembers(getattr(checks, lesson), lambda value: isinstance(value, checks.Check))
}
MISTAKES = [
    pytest.param(check, mistake, id=f"{n}: {mistake.name}") for n, check in ALL.items() for mistake in check.mistakes
]
EVERY = pytest.mark.parametrize("check", ALL.values(), ids=ALL)


def boom(*arguments):
    return [][3]


def blank(*arguments):
    raise NotImplementedError("your code here")


# --- every check ------------------------------------------------------------------------------------------------------


@EVERY
def test_the_right_answer_passes_and_prints_one_line(check, capsys):
    check(check.right)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{check.name}: correct")


@pytest.mark.parametrize(("check", "mistake"), MISTAKES)
def test_each_mistake_fails_with_its_own_message(check, mistake):
    assert checks.message(check, mistake.answer) == f"{check.name}: {mistake.message}"


@EVERY
def test_a_check_knows_two_mistakes_or_more_with_messages_of_their_own(check):
    assert len(check.mistakes) >= 2
    assert len({mistake.message for mistake in check.mistakes}) == len(check.mistakes)
    assert all(len(mistake.message) > 20 for mistake in check.mistakes)


@EVERY
def test_the_same_inputs_come_each_time_and_the_global_random_state_is_left_alone(check):
    state = torch.get_rng_state()
    first, second = ([core.described(check.right, case) for case in check.cases()] for _ in range(2))
    assert first and torch.equal(torch.get_rng_state(), state)
    if not any(" at 0x" in text or "generator" in text.lower() for text in first):
        assert first == second


@EVERY
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "is None, not a function: define"),
        (3.5, "is 3.5, not a function"),
        (lambda *arguments: None, "returned None: is a `return` missing?"),
        (boom, "raised IndexError: list index out of range"),
        (lambda *arguments: object(), "returned"),
        (lambda *arguments: torch.full((7, 5, 3), torch.nan), "returned"),
        (lambda *arguments: torch.zeros(2, 3, 2, 3, 2), "returned"),
        (lambda *arguments: "hello", "returned"),
        (lambda *, nothing: 0, "raised TypeError: "),
    ],
    ids=["None", "number", "returns None", "raises", "object", "NaN", "shape", "text", "arguments"],
)
def test_garbage_gives_a_readable_message_that_names_the_function(check, answer, words):
    said = checks.message(check, answer)
    assert said is not None and said.startswith(check.name) and words in said
    assert "\n" not in said and len(said) < 800


@EVERY
def test_an_empty_answer_stays_an_empty_answer(check):
    with pytest.raises(NotImplementedError, match="your code here"):
        check(blank)


def test_there_are_four_checks_or_more_for_each_lesson():
    counts = {lesson: sum(name.startswith(lesson) for name in ALL) for lesson in LESSONS}
    assert counts and all(count >= 4 for count in counts.values()), counts


def test_a_lesson_without_checks_is_an_ordinary_missing_attribute():
    with pytest.raises(AttributeError, match="lesson_99"):
        getattr(checks, "lesson_99")  # noqa: B009


# --- the machinery ----------------------------------------------------------------------------------------------------


def total(values, scale):
    return sum(values) * scale


CHECK = checks.Check(
    cases=lambda: [([1.0, 2.0], 2.0), ([3.0, 5.0, 7.0], 0.5)],
    right=total,
    mistakes=[
        checks.Mistake("scale forgotten", lambda values, scale: sum(values), "the result must grow with scale"),
        checks.Mistake("first only", lambda values, scale: values[0] * scale, "all values count, not only the first"),
    ],
)


FIRST, SECOND = "; the input was values = [1, 2], scale = 2", "; the input was values = [3, 5, 7], scale = 0.5"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda v, s: s * sum(v), None),
        (lambda v, s: torch.tensor(s * sum(v), dtype=torch.float32), None),
        (lambda v, s: 0 + sum(v), "total: the result must grow with scale"),
        # agrees with the mistake in one case only: not that mistake
        (lambda v, s: sum(v) if s == 2 else 0.0, f"total: returned 3, expected 6{FIRST}"),
        (lambda v, s: s * sum(v) if s == 2 else 0.0, f"total: returned 0, expected 7.5{SECOND}"),
        (lambda v, s: [s * sum(v)], f"total: returned shape (1,), expected a single number{FIRST}"),
        (lambda v, s: float("nan"), f"total: returned NaN (nan), expected 6{FIRST}"),
        (lambda v, s: "six", f"total: returned text ('six'), expected a single number{FIRST}"),
        (lambda v, s: {"a": 1}, f"total: returned a dict ({{'a': 1}}), expected a single number{FIRST}"),
        (lambda v, s: 1 / 0, "total(values, scale) raised ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_said_about_an_answer(answer, said):
    assert checks.message(CHECK, answer) == said


def test_an_answer_that_never_ends_is_stopped():
    check = checks.Check(CHECK.cases, total, CHECK.mistakes, seconds=0.2)

    def forever(values, scale):
        while True:
            values.append(scale)
            values.clear()

    said = "total(values, scale) took longer than 0.2 s: does it go through every combination, or never end?"
    assert checks.message(check, forever) == said
    assert checks.message(check, total) is None


def test_an_answer_that_spoils_its_inputs_is_told_so_once_its_values_are_right():
    def greedy(values, scale):
        result = sum(values) * scale
        values.clear()
        return result

    said = "total returns the right values but changes its argument values: work on a copy of it"
    assert checks.message(CHECK, greedy) == said
    assert checks.message(CHECK, lambda values, scale: greedy(values, 1)) == "total: the result must grow with scale"


def test_conditions_beyond_values_are_called_last_and_explained():
    seen = []

    def condition(answer):
        seen.append(answer)
        if answer([1.0], 0.0) == 0.0:
            checks.fail("total: a scale of 0 is not allowed")

    check = checks.Check(CHECK.cases, total, CHECK.mistakes, also=[condition])
    assert checks.message(check, lambda v, s: 0.0) != "total: a scale of 0 is not allowed" and seen == []
    assert checks.message(check, total) == "total: a scale of 0 is not allowed" and seen == [total]
    assert checks.message(check, lambda v, s: total(v, s) if s else 1 / 0).startswith(
        "total(values, scale) raised Zero"
    )


def test_a_view_that_fails_is_the_answers_fault():
    check = checks.Check(
        lambda: [()], right=lambda: "abc", mistakes=CHECK.mistakes, name="word", view=lambda text: text.upper()
    )
    assert checks.message(check, lambda: "ABC") is None
    assert "word() returned 3, which cannot be used: AttributeError: " in checks.message(check, lambda: 3)


def test_a_right_answer_that_fails_is_no_fault_of_the_learner():
    check = checks.Check(lambda: [()], right=boom, mistakes=())
    with pytest.raises(RuntimeError, match="the check itself is broken: boom.* raised IndexError"):
        check(lambda: 1)


def test_a_mistake_that_fails_for_some_inputs_is_recognised_by_the_others():
    # a table read the wrong way round is a shape error for a table that is not square
    check = checks.Check(
        cases=lambda: [(torch.ones(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])), (torch.ones(2), torch.ones(2, 3))],
        right=lambda p, q: p @ q,
        mistakes=[checks.Mistake("transposed", lambda p, q: q @ p, "the table is read the wrong way round")],
        name="mixed",
    )
    assert checks.message(check, lambda p, q: q.mv(p)) == "mixed: the table is read the wrong way round"
    assert checks.message(check, lambda p, q: 2 * q @ p).startswith("mixed: returned [6, 14], expected [4, 6]")
    assert "raised RuntimeError" in checks.message(check, lambda p, q: p.reshape(5))


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ([0.1, 0.2], torch.tensor([0.1, 0.2]), True),
        ((0.1, 0.2), [0.1, 0.2], True),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}, True),
        ({"a": [1, 2]}, {"a": torch.tensor([1, 3])}, False),
        ([torch.zeros(2), torch.zeros(3)], [torch.zeros(2), torch.zeros(3)], True),
        ([torch.zeros(2), torch.zeros(3)], [torch.zeros(2), torch.ones(3)], False),
        (["x", "y"], ["x", "z"], False),
        ({"y1", "x"}, ["x", "y1"], True),
        (torch.tensor([float("-inf")]), torch.tensor([float("-inf")]), True),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (1.0 + 1e-9, 1, True),
        (1.001, 1, False),
        (torch.zeros(1), 0.0, False),
        (True, 1, True),
    ],
)
def test_which_values_count_as_the_same(found, wanted, same):
    assert (core.difference(core.plain(found), core.plain(wanted), 1e-6) is None) == same
