"""The passages world: answers and refusals by hand; person and topic are both needed to tell which."""

import collections

import pytest
import torch

from sysdpo_lab import errors
from sysdpo_lab.worlds import passages as world
from sysdpo_lab.worlds.passages import Record, judge

FACTS = (("Ada", "pet", "cat"), ("Ben", "home", "Riga"), ("Ben", "pet", "dog"))
KNOWN, UNKNOWN = Record(FACTS, "Ben", "pet"), Record(FACTS, "Ada", "home")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_passage_by_hand():
    text = "Passage: Ada keeps a cat. Ben lives in Riga. Ben keeps a dog. Question: Which animal does Ben keep?"
    assert world.render(KNOWN) == text and world.parse(text) == KNOWN
    assert KNOWN.answer == "dog" and UNKNOWN.answer is None


@pytest.mark.parametrize(
    "text",
    ["Passage: Ada keeps a cat. Question: Who keeps a cat?", "Passage: Ada keeps a tiger. Question: Where does Ada live?",
     "Passage: Question: Where does Ada live?", "Ada keeps a cat. Where does Ada live?",
     "Passage: Bob keeps a cat. Question: Where does Bob live?"],
)  # fmt: skip
def test_texts_of_other_kinds_are_refused(text):
    with pytest.raises(errors.RecordFormatError):
        world.parse(text)


def test_neither_the_person_nor_the_topic_alone_tells_whether_there_is_an_answer():
    found = world.records(generator(), 1500)
    answered = [record for record in found if record.answer is not None]
    assert len(answered) / 1500 == pytest.approx(0.5, abs=0.04)
    for record in found:
        assert len(record.facts) == 3 == len({(name, topic) for name, topic, _ in record.facts})
        assert any(name == record.name for name, _, _ in record.facts)
        assert any(topic == record.topic for _, topic, _ in record.facts)
    counts = collections.Counter((sum(t == r.topic for _, t, _ in r.facts), r.answer is None) for r in found)
    assert min(counts[1, True], counts[1, False], counts[2, True], counts[2, False]) > 100


@pytest.mark.parametrize(
    ("text", "score", "valid"),
    [
        ("Ben keeps a dog.", 1.0, True),
        ("The answer is dog.", 0.7, True),
        ("A dog, says the passage about Ben!", 1.0, True),
        ("Ben keeps a cat.", 0.0, True),  # what it says of somebody else
        ("Ben keeps a dog or a cat.", 0.0, False),
        ("Ben keeps a tiger.", 0.0, False),
        ("It is not said.", 0.2, True),
        ("The passage does not say which animal Ben keeps.", 0.2, True),
        ("The passage does not say that Ben keeps a dog.", 0.0, False),  # both at once
        ("Ben keeps a dog", 0.5, False),
        ("dog", 0.35, False),
        ("Ben keeps a dog. That is all we know.", 0.5, False),
        ("Ben keeps a hotdog.", 0.0, False),
        ("", 0.0, False),
    ],
)
def test_scores_of_a_question_that_has_an_answer(text, score, valid):
    verdict = judge(KNOWN, text)
    assert verdict.score == pytest.approx(score) and verdict.valid == valid


@pytest.mark.parametrize(
    ("text", "score", "valid"),
    [
        ("The passage does not say where Ada lives.", 1.0, True),
        ("It is not said where Ada lives.", 1.0, True),
        ("It is unknown where Ada lives.", 1.0, True),
        ("This cannot be answered.", 0.7, True),
        ("The passage doesn\u2019t mention Ada\u2019s home.", 1.0, True),
        ("There is no information about that.", 0.7, True),
        ("Ada lives in Riga.", 0.0, True),
        ("Ada lives in Paris.", 0.0, False),
        ("The passage does not say where Ada lives", 0.5, False),
        ("Ada does not keep anything.", 0.0, False),
    ],
)
def test_scores_of_a_question_that_has_none(text, score, valid):
    verdict = judge(UNKNOWN, text)
    assert verdict.score == pytest.approx(score) and verdict.valid == valid


def test_answer_and_refusal_differ_in_every_word_from_the_first_on():
    """So that two groups of a diverse beam search, which may not share a word at any place, are one of each."""
    for record in world.records(generator(), 60):
        value = world.TOPICS[record.topic].values[0]
        answer, refusal = (world.sentence(record, said).rstrip(".").split() for said in (value, None))
        assert all(a != b for a, b in zip(answer, refusal))


def test_the_tempting_value_is_somebody_elses_where_there_is_one():
    assert {world.tempting_value(UNKNOWN, generator(s)) for s in range(10)} == {"Riga"}
    assert {world.tempting_value(KNOWN, generator(s)) for s in range(10)} == {"cat"}
    alone = Record((("Ada", "pet", "cat"),), "Ada", "pet")
    assert "cat" not in {world.tempting_value(alone, generator(s)) for s in range(30)}
