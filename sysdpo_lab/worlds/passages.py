"""The passages world: answer a question from a short passage, or say that the passage does not say it; an exact judge.

Answer or refuse is the paper's own example of what two different intermediates buy. Here the two openings differ in every
word, so diverse beam search finds one of each. `python -m sysdpo_lab.worlds.passages --out data/passages` writes the
stored pairs again, byte for byte.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sysdpo_lab import errors
from sysdpo_lab.preferences import Pairs
from sysdpo_lab.worlds import tasks
from sysdpo_lab.worlds.tasks import choice

NAMES = ("Ada", "Ben", "Carla", "Dev", "Ella", "Finn", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam")


class Topic(NamedTuple):
    """One thing that can be said about a person: values, the sentence, the question, the refusal's clause."""

    values: tuple[str, ...]
    says: str
    asks: str
    clause: str


TOPICS = {
    "home": Topic(
        ("Bergen", "Lagos", "Lima", "Osaka", "Quebec", "Riga"),
        "{name} lives in {value}.", "Where does {name} live?", "where {name} lives",
    ),
    "job": Topic(
        ("baker", "doctor", "farmer", "painter", "pilot", "teacher"),
        "{name} works as a {value}.", "What does {name} work as?", "what {name} works as",
    ),
    "pet": Topic(
        ("cat", "dog", "goat", "horse", "parrot", "rabbit"),
        "{name} keeps a {value}.", "Which animal does {name} keep?", "which animal {name} keeps",
    ),
    "colour": Topic(
        ("blue", "green", "orange", "purple", "white", "yellow"),
        "{name} likes the colour {value}.", "Which colour does {name} like?", "which colour {name} likes",
    ),
}  # fmt: skip
FACTS = 3  # sentences of a passage
MIN_WORDS, MAX_WORDS = 3, 14
RIGHT, RIGHT_NAME, NEEDLESS_REFUSAL = 0.7, 0.3, 0.2
FORM_PENALTY = 0.5
ANSWERABLE = 0.5  # share of the questions that their passage answers
STORED = {"train": 600, "validation": 200, "heldout": 300}

PROMPTS = {
    "tiny": {
        "draft": "<draft> {x} <write>",
        "refine": "<refine> {x} <sep> {draft} <write>",
        "answer1": "<answer1> {x} <write>",
        "answer2": "<answer2> {x} <write>",
        "answer2-seeing": "<answer2> {x} <sep> {answer1} <write>",
        "merge": "<merge> {x} <sep> {answer1} <sep> {answer2} <write>",
    },
    "chat": {
        "draft": "{x}\nAnswer in one short sentence, or say that the passage does not say it.",
        "refine": "{x}\nFirst answer: {draft}\nCheck it against the passage. Answer in one short sentence with the person's "
        "name, or say that the passage does not say it.",
        "answer1": "{x}\nAnswer in one short sentence.",
        "answer2": "{x}\nAnswer in one short sentence only if the passage says it; otherwise say that it does not say it.",
        "answer2-seeing": "{x}\nAnother answer: {answer1}\nAnswer in one short sentence only if the passage says it; otherwise "
        "say that it does not say it.",
        "merge": "{x}\nAnswer 1: {answer1}\nAnswer 2: {answer2}\nChoose what the passage says. Answer in one short sentence "
        "with the person's name, or say that the passage does not say it.",
    },
}


# --- records ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """A passage of facts (name, topic, value) and a question (name, topic).

    >>> facts = (("Ada", "home", "Riga"), ("Ben", "pet", "dog"), ("Ben", "home", "Lima"))
    >>> Record(facts, "Ben", "home").answer, Record(facts, "Ada", "pet").answer
    ('Lima', None)
    """

    facts: tuple[tuple[str, str, str], ...]
    name: str
    topic: str

    def __post_init__(self):
        asked = [(self.name, self.topic), *((name, topic) for name, topic, _ in self.facts)]
        known = all(name in NAMES and topic in TOPICS for name, topic in asked)
        if not known or not all(value in TOPICS[topic].values for _, topic, value in self.facts):
            raise errors.RecordFormatError(f"no passage of this world: {self}")

    @property
    def answer(self) -> str | None:
        """The value asked for; None when the passage does not say it."""
        return next((value for name, topic, value in self.facts if (name, topic) == (self.name, self.topic)), None)


def render(record: Record) -> str:
    """The input text x of a record.

    >>> render(Record((("Ada", "home", "Riga"), ("Ben", "pet", "dog")), "Ada", "pet"))
    'Passage: Ada lives in Riga. Ben keeps a dog. Question: Which animal does Ada keep?'
    """
    said = [TOPICS[topic].says.format(name=name, value=value) for name, topic, value in record.facts]
    return f"Passage: {' '.join(said)} Question: {TOPICS[record.topic].asks.format(name=record.name)}"


def _pattern(text: str) -> re.Pattern:
    return re.compile(re.escape(text).replace(r"\{name\}", r"(?P<name>\w+)").replace(r"\{value\}", r"(?P<value>\w+)"))


_FACTS = {topic: _pattern(entry.says) for topic, entry in TOPICS.items()}
_QUESTIONS = {topic: _pattern(entry.asks) for topic, entry in TOPICS.items()}


def parse(text: str) -> Record:
    """The record that `render` wrote.

    Raises:
        RecordFormatError: the text is none of the world's passages.

    >>> parse("Passage: Ada keeps a cat. Question: Where does Ada live?")
    Record(facts=(('Ada', 'pet', 'cat'),), name='Ada', topic='home')
    """
    match = re.fullmatch(r"Passage: (.+\.) Question: (.+\?)", text.strip())
    facts = [_read(sentence, _FACTS) for sentence in re.findall(r"[^.]+\.", match[1])] if match else [None]
    question = _read(match[2], _QUESTIONS) if match else None
    if None in facts or question is None:
        raise errors.RecordFormatError(f"not a passage: {text[:80]!r}; expected a text that `render` writes")
    return Record(
        tuple((found["name"], topic, found["value"]) for topic, found in facts), question[1]["name"], question[0]
    )


def _read(text: str, patterns: dict[str, re.Pattern]) -> tuple[str, dict[str, str]] | None:
    matches = ((topic, pattern.fullmatch(text.strip())) for topic, pattern in patterns.items())
    return next(((topic, match.groupdict()) for topic, match in matches if match), None)


def split_of(record: Record) -> str:
    """The split that a record belongs to: by a hash of its text, 70 % train, 10 % validation, 20 % held out."""
    return tasks.split_of_text(render(record))


def records(generator: torch.Generator, n: int, split: str | None = None) -> list[Record]:
    """n different passages with their questions, of one split or of all; about half of them can be answered.

    >>> [r.answer for r in records(torch.Generator().manual_seed(0), 4, "train")]
    ['rabbit', None, 'white', 'Lagos']
    """
    return tasks.different_records(_draw_record, split_of, generator, n, split)


def _draw_record(generator: torch.Generator) -> Record:
    """Other people and other topics stand by, so that only person and topic together tell whether there is an answer."""
    person, other, third = _shuffled(NAMES, generator)[:3]
    topic, second = _shuffled(tuple(TOPICS), generator)[:2]
    if tasks.happens(ANSWERABLE, generator):
        rest = [(person, second), (other, topic), (other, second), (third, topic), (third, second)]
        pairs = [(person, topic), *_shuffled(rest, generator)[: FACTS - 1]]
    else:
        pairs = [(person, second), (other, topic), choice([(other, second), (third, topic), (third, second)], generator)]
    pairs = _shuffled(pairs, generator)
    return Record(tuple((name, about, choice(TOPICS[about].values, generator)) for name, about in pairs), person, topic)


def _shuffled(options: Sequence, generator: torch.Generator) -> list:
    return [options[int(i)] for i in torch.randperm(len(options), generator=generator)]


# --- answers ------------------------------------------------------------------------------------------------------------

SHORT_ANSWER, SHORT_REFUSAL = "The answer is {value}.", "It is not said."
REFUSALS = ("The passage does not say {clause}.", "It is not said {clause}.")


def sentence(record: Record, value: str | None, template: int = 0) -> str:
    """The answer that states a value, or refuses (None) by template 0 or 1.

    >>> record = Record((("Ada", "home", "Riga"),), "Ada", "pet")
    >>> sentence(record, "cat"), sentence(record, None)
    ('Ada keeps a cat.', 'The passage does not say which animal Ada keeps.')
    """
    topic = TOPICS[record.topic]
    if value is None:
        return REFUSALS[template].format(clause=topic.clause.format(name=record.name))
    return topic.says.format(name=record.name, value=value)


def short_sentence(value: str | None) -> str:
    """The same in short, without the person: worth less."""
    return SHORT_REFUSAL if value is None else SHORT_ANSWER.format(value=value)


def reference_sentence(record: Record, generator: torch.Generator) -> str:
    """A perfect answer; a refusal by a random template."""
    return sentence(record, record.answer, choice(range(len(REFUSALS)), generator))


# --- faults -------------------------------------------------------------------------------------------------------------

FAULTS = ("refuse or invent", "other value", "no name", "ramble", "truncate")
RAMBLES = ("That is all we know.", "It is easy to find.")


def tempting_value(record: Record, generator: torch.Generator) -> str:
    """A wrong value: what the passage says of somebody else, or else any other."""
    others = [value for name, topic, value in record.facts if topic == record.topic and name != record.name]
    free = [value for value in TOPICS[record.topic].values if value != record.answer]
    return choice([value for value in others if value != record.answer] or free, generator)


def perturb(record: Record, generator: torch.Generator, kind: str | None = None) -> str:
    """An answer with one fault.

    >>> record = Record((("Ada", "pet", "cat"), ("Ben", "pet", "dog")), "Ada", "pet")
    >>> perturb(record, torch.Generator().manual_seed(0), "other value")
    'Ada keeps a dog.'
    """
    errors.check_option("kind", kind, (None, *FAULTS))
    kind = kind or choice(FAULTS, generator)
    text = reference_sentence(record, generator)
    if kind == "no name":
        return short_sentence(record.answer)
    if kind == "ramble":
        return f"{text} {choice(RAMBLES, generator)}"
    if kind == "truncate":
        return text.rstrip(".")
    if kind == "refuse or invent" and record.answer is not None:
        return sentence(record, None, choice(range(len(REFUSALS)), generator))
    return sentence(record, tempting_value(record, generator))


# --- the judge ----------------------------------------------------------------------------------------------------------

_REFUSING = re.compile(
    r"\b(?:(?:not|never|doesn't|isn't|cannot|can't|no)\b[^.]*\b(?:say|said|mention|mentioned|state|stated|tell|told|answer|"
    r"answered|know|known|information|given)|unknown|unclear)\b"
)


@dataclass(frozen=True)
class Verdict:
    """What the judge found in an answer.

    Args:
        values: the asked topic's values that the answer states.
        refuses: whether it says that the passage does not say it.
        named: whether it names the person asked about.
        words: length of the answer.
        valid: one ended sentence of 3 to 14 words that either states one value or refuses.
        score: in [0, 1]; see `judge`.
    """

    values: tuple[str, ...]
    refuses: bool
    named: bool
    words: int
    valid: bool
    score: float


def judge(record: Record, text: Any) -> Verdict:
    """Compare an answer with its passage: exact.

    Right (the one value asked for, or a refusal where the passage does not say it): 0.7, and 0.3 more if it names the
    person. A refusal of a question that can be answered: 0.2. A wrong or invented value, two values, a value beside a
    refusal, or neither: 0. Half of it unless the answer is one ended sentence of 3 to 14 words. Further words gain nothing.

    >>> record = Record((("Ada", "pet", "cat"), ("Ben", "home", "Riga")), "Ada", "pet")
    >>> texts = ("Ada keeps a cat.", "The answer is cat.", "It is not said.", "Ada keeps a dog.")
    >>> [judge(record, text).score for text in texts]
    [1.0, 0.7, 0.2, 0.0]
    """
    text = str(text)
    lowered = re.sub(r"\s+", " ", text.lower().replace("\u2019", "'"))
    values = tuple(v for v in TOPICS[record.topic].values if re.search(rf"(?<!\w){v.lower()}(?!\w)", lowered))
    refuses = _REFUSING.search(lowered) is not None
    named = re.search(rf"(?<!\w){record.name.lower()}(?!\w)", lowered) is not None
    formed = tasks.is_one_sentence(text, MIN_WORDS, MAX_WORDS)
    decided = refuses + len(values) == 1
    right = decided and (refuses if record.answer is None else values == (record.answer,))
    score = RIGHT + RIGHT_NAME * named if right else NEEDLESS_REFUSAL * (decided and refuses)
    score = round(score * (1.0 if formed else FORM_PENALTY), 6)
    return Verdict(values, refuses, named, len(text.split()), formed and decided, score)


def compare(record: Record, a: Any, b: Any) -> float:
    """1 when answer a scores higher than b, 0 when lower, 1/2 on a tie."""
    return tasks.compared(judge(record, a).score, judge(record, b).score)


# --- preference pairs ---------------------------------------------------------------------------------------------------


def preference_pairs(n: int, generator: torch.Generator, split: str = "train") -> Pairs:
    """n written pairs, one a record, by turns of two kinds; `meta` holds the scores, their gap and the kind.

    "perturbed": a reference, or in one case of four an answer with a fault, against a faulty answer;
    "diverse": the best against the worst of four candidates, each with a fault in three cases of four.

    >>> preference_pairs(1, torch.Generator().manual_seed(0))[0].meta["score_gap"] > 0
    True
    """
    found = records(generator, n, split)

    def candidates(record: Record, kind: str) -> list[str]:
        rates = (0.25, 1.0) if kind == "perturbed" else (0.75,) * 4
        return [_candidate(record, rate, generator) for rate in rates]

    return tasks.preference_pairs(f"passages, {split}", found, render, candidates, _score, generator)


def _candidate(record: Record, fault: float, generator: torch.Generator) -> str:
    return perturb(record, generator) if tasks.happens(fault, generator) else reference_sentence(record, generator)


def _score(x: str, answer: Any) -> float:
    return judge(parse(x), answer).score


def pairs_from_candidates(
    inputs: Sequence[str], candidates: Sequence[Sequence[Any]], generator: torch.Generator, min_gap: float = 0.0
) -> tuple[Pairs, int]:
    """On-policy pairs, best against worst, and how many records gave none; see `tasks.pairs_from_candidates`."""
    return tasks.pairs_from_candidates(_score, inputs, candidates, generator, min_gap)


# --- stored data --------------------------------------------------------------------------------------------------------


def stored_pairs(split: str, folder: Path | str | None = None) -> Pairs:
    """The stored preference pairs of a split, from `data/passages`; each of another record."""
    return tasks.stored_pairs("passages", split, folder)


def load_tiny(roles: Sequence[str] = ()) -> tuple[Any, Any]:
    """Model and tokenizer of the tiny profile; one model has all roles."""
    from sysdpo_lab.worlds import passages_lm, tiny_models

    return tiny_models.load(passages_lm.RECIPE)


_CARD = """# Passages: preference pairs of answers and refusals

* Origin: generated by `python -m sysdpo_lab.worlds.passages --out data/passages --seed {seed}`; nothing copied.
* Licence: Apache-2.0, like the code.
* Format: JSONL in TRL's schema: prompt (passage and question), chosen, rejected; further columns score_chosen,
  score_rejected and score_gap (the exact judge's, in [0, 1]) and kind ("perturbed": a reference against a faulty answer;
  "diverse": the best against the worst of four candidates).
* Splits: by a hash of passage and question, so none is in two of them.
* About half of the questions cannot be answered from their passage, though it speaks of the person and of the topic.
* Chosen answers are not all perfect; the rejected one is always worse.
* Limits: English, three sentences a passage, four topics of six values; refusals are known by the words in the code.

| file | pairs | SHA-256 |
|---|---|---|
{table}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: write the stored data."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", default="data/passages", help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tasks.write_data(options.out, options.seed, STORED, preference_pairs, _CARD)
    print(f"{options.out}: " + ", ".join(f"{n} {split} pairs" for split, n in STORED.items()))


if __name__ == "__main__":
    main()
