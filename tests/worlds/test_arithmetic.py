"""The arithmetic world: its problems by hand, a judge that wants the right number first, plans and their faults."""

import pytest
import torch

from sysdpo_lab import errors
from sysdpo_lab.worlds import arithmetic as world
from sysdpo_lab.worlds.arithmetic import Record, judge

PENS = Record("packed-less", "Ada", "pens", 3, 4, 5, "boxes")
COINS = Record("less-more", "Ben", "coins", 9, 4, 5)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("record", "text", "middle", "answer"),
    [
        (PENS, "Ada has 3 boxes of 4 pens and gives 5 pens away. How many pens does Ada have now?", 12, 7),
        (Record("packed-more", "Ada", "pens", 3, 4, 5, "jars"),
         "Ada has 3 jars of 4 pens and finds 5 more. How many pens does Ada have now?", 12, 17),
        (Record("more-less", "Ben", "coins", 9, 4, 5),
         "Ben has 9 coins, buys 4 more and gives 5 coins away. How many coins does Ben have now?", 13, 8),
        (COINS, "Ben has 9 coins, gives 4 away and finds 5 more. How many coins does Ben have now?", 5, 10),
    ],
)  # fmt: skip
def test_each_kind_of_problem_by_hand(record, text, middle, answer):
    assert world.render(record) == text and world.parse(text) == record
    assert (record.middle, record.answer) == (middle, answer)


def test_all_kinds_occur_and_no_step_leaves_the_range():
    found = world.records(generator(), 400)
    assert {record.kind for record in found} == set(world.KINDS)
    numbers = {number for record in found for number in (record.middle, record.answer)}
    assert min(numbers) >= 2 and max(numbers) <= 30


@pytest.mark.parametrize(
    "fields",
    [("packed-less", "Ada", "pens", 2, 2, 9, "bags"), ("packed-less", "Ada", "pens", 3, 4, 5),
     ("more-less", "Bob", "pens", 3, 4, 5), ("more-less", "Ada", "cats", 3, 4, 5), ("more-less", "Ada", "pens", 3, 4, 5, "bags")],
)  # fmt: skip
def test_problems_outside_the_world_are_refused(fields):
    with pytest.raises(errors.RecordFormatError, match="no problem of this world"):
        Record(*fields)


def test_names_that_differ_within_one_text_are_refused():
    with pytest.raises(errors.RecordFormatError):
        world.parse("Ben has 9 coins, gives 4 away and finds 5 more. How many coins does Ada have now?")


@pytest.mark.parametrize(
    ("text", "score", "valid"),
    [
        ("Ada has 7 pens.", 1.0, True),
        ("ADA HAS SEVEN PENS!", 1.0, True),
        ("There are 7 pens for Ada.", 1.0, True),
        ("Ada has 7.", 0.8, True),
        ("There are 7 pens.", 0.8, True),
        ("The answer is 7.", 0.6, True),
        ("Ada has 8 pens.", 0.0, True),  # well said, and wrong
        ("Ada has 17 pens.", 0.0, True),  # no digit of another number counts
        ("Ada has -7 pens.", 0.0, True),
        ("Ada has 7.5 pens.", 0.0, False),
        ("Ada has 7 pens", 0.5, False),
        ("Ada has 12 pens, then 7 pens.", 0.5, False),  # two numbers: the last one counts, the form does not
        ("Ada has 7 pens and 12 coins.", 0.0, False),
        ("7", 0.3, False),
        ("Ada has 7 pens. It is easy to see.", 0.5, False),
        ("3 x 4 = 12, 12 - 5 = 7", 0.3, False),  # a right plan is not yet an answer
        ("Adam has 7 pens.", 0.8, True),  # another person
        ("", 0.0, False),
    ],
)
def test_scores_derived_by_hand(text, score, valid):
    verdict = judge(PENS, text)
    assert verdict.score == pytest.approx(score) and verdict.valid == valid


def test_numbers_are_read_as_digits_and_words_and_never_as_parts_of_others():
    assert world.stated_numbers("Twelve of 30; 7th, x7, 1.5, 2,5 and nine-teen") == (12, 30, 2, 5, 9)
    assert world.stated_numbers("It is 7.") == (7,) and world.stated_numbers("-3 and 4-1") == (-3, 4, 1)


def test_plans_by_hand():
    calculations = world.steps(PENS)
    assert [world.plan(calculations, template) for template in range(3)] == [
        "3 x 4 = 12, 12 - 5 = 7",
        "First 3 x 4 = 12, then 12 - 5 = 7",
        "We need 3 x 4 = 12 and so 12 - 5 = 7",
    ]
    assert [world.plan(calculations[:1], template) for template in range(3)] == [
        "3 x 4 = 12", "First 3 x 4 = 12", "We need 3 x 4 = 12",
    ]  # fmt: skip
    assert world.steps(COINS) == [(9, "-", 4, 5), (5, "+", 5, 10)]


def test_each_wrong_number_by_hand():
    assert world.wrong_number(PENS, "one step", generator()) == 12
    assert world.wrong_number(PENS, "other sign", generator()) == 17
    assert {world.wrong_number(PENS, "slip", generator(seed)) for seed in range(20)} == {6, 8}
    assert (
        world.wrong_number(Record("less-more", "Ada", "pens", 6, 4, 9), "other sign", generator()) == 0
    )  # never below
