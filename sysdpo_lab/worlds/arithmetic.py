"""The arithmetic world: a word problem of two steps -> one short sentence, with an exact judge, pairs and prompts.

A draft is a plan ("3 x 4 = 12, 12 - 5 = 7"), not an answer: a good plan makes the right answer likely, and nobody
compares plans. `python -m sysdpo_lab.worlds.arithmetic --out data/arithmetic` writes the stored pairs again, byte for byte.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sysdpo_lab import errors
from sysdpo_lab.preferences import Pairs
from sysdpo_lab.worlds import tasks
from sysdpo_lab.worlds.tasks import choice

NAMES = ("Ada", "Ben", "Carla", "Dev", "Ella", "Finn", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
BOXES = ("bags", "boxes", "jars")
SIGNS = {"x": lambda a, b: a * b, "+": lambda a, b: a + b, "-": lambda a, b: a - b}
# {kind: (its story, the signs of its two steps)}
KINDS = {
    "packed-less": ("{name} has {a} {box} of {b} {thing} and gives {c} {thing} away.", ("x", "-")),
    "packed-more": ("{name} has {a} {box} of {b} {thing} and finds {c} more.", ("x", "+")),
    "more-less": ("{name} has {a} {thing}, buys {b} more and gives {c} {thing} away.", ("+", "-")),
    "less-more": ("{name} has {a} {thing}, gives {b} away and finds {c} more.", ("-", "+")),
}
QUESTION = "How many {thing} does {name} have now?"
SMALLEST, LARGEST = 2, 30  # no step of a problem leaves them
MIN_WORDS, MAX_WORDS = 3, 12
RIGHT_NUMBER, RIGHT_NAME, RIGHT_THING = 0.6, 0.2, 0.2
FORM_PENALTY = 0.5
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
        "draft": "Problem: {x}\nWrite down the two calculations, like this: 2 x 3 = 6, 6 + 1 = 7",
        "refine": "Problem: {x}\nCalculation: {draft}\nAnswer the question in one short sentence with the name and the number.",
        "answer1": "Problem: {x}\nWrite down the calculation.",
        "answer2": "Problem: {x}\nThink step by step, then give the number.",
        "answer2-seeing": "Problem: {x}\nAnother solution: {answer1}\nThink step by step, then give the number.",
        "merge": "Problem: {x}\nSolution 1: {answer1}\nSolution 2: {answer2}\n"
        "Answer the question in one short sentence with the name and the number.",
    },
}


# --- records ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One problem.

    >>> Record("packed-less", "Ada", "pens", 3, 4, 5, "boxes").answer
    7
    """

    kind: str
    name: str
    thing: str
    a: int
    b: int
    c: int
    box: str | None = None

    def __post_init__(self):
        errors.check_option("kind", self.kind, tuple(KINDS))
        known = self.name in NAMES and self.thing in THINGS and (self.box in BOXES) == self.kind.startswith("packed")
        if not known or not all(SMALLEST <= number <= LARGEST for number in (self.middle, self.answer)):
            raise errors.RecordFormatError(
                f"no problem of this world: {self}; its steps stay within {SMALLEST} and {LARGEST}"
            )

    @property
    def middle(self) -> int:
        """What the first step gives."""
        return SIGNS[KINDS[self.kind][1][0]](self.a, self.b)

    @property
    def answer(self) -> int:
        """What the second step gives: the right number."""
        return SIGNS[KINDS[self.kind][1][1]](self.middle, self.c)


def render(record: Record) -> str:
    """The input text x of a record.

    >>> render(Record("less-more", "Ada", "pens", 9, 4, 5))
    'Ada has 9 pens, gives 4 away and finds 5 more. How many pens does Ada have now?'
    """
    return f"{KINDS[record.kind][0]} {QUESTION}".format(**vars(record))


def _pattern(story: str) -> re.Pattern:
    places = {"name": r"(?P<name>\w+)", "thing": r"(?P<thing>\w+)", "box": r"(?P<box>\w+)"}
    places |= {letter: rf"(?P<{letter}>\d+)" for letter in "abc"}
    text = re.escape(story).replace(r"\ ", " ")
    for place, pattern in places.items():
        first, *others = text.split(rf"\{{{place}\}}")
        text = first + "".join((f"(?P={place})" if number else pattern) + part for number, part in enumerate(others))
    return re.compile(text)


_PATTERNS = {kind: _pattern(f"{story} {QUESTION}") for kind, (story, _) in KINDS.items()}


def parse(text: str) -> Record:
    """The record that `render` wrote.

    Raises:
        RecordFormatError: the text is none of the world's problems.

    >>> parse("Ada has 3 boxes of 4 pens and finds 5 more. How many pens does Ada have now?").answer
    17
    """
    for kind, pattern in _PATTERNS.items():
        match = pattern.fullmatch(text.strip())
        if match:
            found = match.groupdict()
            return Record(kind, **{key: int(v) if key in "abc" else v for key, v in found.items()})
    raise errors.RecordFormatError(f"not a problem: {text[:80]!r}; expected a text that `render` writes")


def split_of(record: Record) -> str:
    """The split that a record belongs to: by a hash of its text, 70 % train, 10 % validation, 20 % held out."""
    return tasks.split_of_text(render(record))


def records(generator: torch.Generator, n: int, split: str | None = None) -> list[Record]:
    """n different problems of one split or of all.

    >>> [r.kind for r in records(torch.Generator().manual_seed(0), 3, "train")]
    ['packed-less', 'less-more', 'packed-more']
    """
    return tasks.different_records(_draw_record, split_of, generator, n, split)


def _draw_record(generator: torch.Generator) -> Record:
    kind = choice(list(KINDS), generator)
    packed = kind.startswith("packed")
    while True:
        a = int(torch.randint(2, 6 if packed else 16, (1,), generator=generator))
        b, c = (int(torch.randint(2, high, (1,), generator=generator)) for high in (6 if packed else 10, 10))
        things = choice(NAMES, generator), choice(THINGS, generator)
        try:
            return Record(kind, *things, a, b, c, choice(BOXES, generator) if packed else None)
        except errors.RecordFormatError:
            continue


# --- plans and answers --------------------------------------------------------------------------------------------------

PLANS = ("{0}, {1}", "First {0}, then {1}", "We need {0} and so {1}")
HALF_PLANS = ("{0}", "First {0}", "We need {0}")
ANSWERS = ("{name} has {number} {thing}.", "Now {name} has {number} {thing}.", "There are {number} {thing} for {name}.")
SHORT = "The answer is {number}."


def steps(record: Record, signs: Sequence[str] | None = None) -> list[tuple[int, str, int, int]]:
    """The two calculations (left, sign, right, result), with other signs if given.

    >>> steps(Record("packed-less", "Ada", "pens", 3, 4, 5, "boxes"))
    [(3, 'x', 4, 12), (12, '-', 5, 7)]
    """
    first, second = signs or KINDS[record.kind][1]
    middle = SIGNS[first](record.a, record.b)
    return [(record.a, first, record.b, middle), (middle, second, record.c, SIGNS[second](middle, record.c))]


def plan(calculations: Sequence[tuple[int, str, int, int]], template: int = 0) -> str:
    """Two calculations as a text, by template 0 to 2; or the first of them alone.

    >>> plan([(3, "x", 4, 12), (12, "-", 5, 7)], 1)
    'First 3 x 4 = 12, then 12 - 5 = 7'
    """
    said = ["{} {} {} = {}".format(*step) for step in calculations]
    return (PLANS if len(said) > 1 else HALF_PLANS)[template].format(*said)


def reference_plan(record: Record, generator: torch.Generator) -> str:
    """A right plan, by a random template."""
    return plan(steps(record), choice(range(len(PLANS)), generator))


def sentence(record: Record, number: int | None = None, template: int = 0) -> str:
    """An answer sentence, by template 0 to 2, with the right number or another.

    >>> sentence(Record("less-more", "Ada", "pens", 9, 4, 5))
    'Ada has 10 pens.'
    """
    number = record.answer if number is None else number
    return ANSWERS[template].format(name=record.name, thing=record.thing, number=number)


def reference_sentence(record: Record, generator: torch.Generator) -> str:
    """A perfect answer, by a random template."""
    return sentence(record, template=choice(range(len(ANSWERS)), generator))


# --- faults -------------------------------------------------------------------------------------------------------------

FAULTS = ("one step", "other sign", "slip", "no name", "other thing", "ramble", "truncate")
RAMBLES = ("It is easy to see.", "That is a nice number.")


def wrong_number(record: Record, kind: str, generator: torch.Generator) -> int:
    """What a wrong calculation gives: "one step" stops after the first, "other sign" adds for takes, "slip" is off by one."""
    if kind == "one step":
        return record.middle
    if kind == "other sign":
        first, second = KINDS[record.kind][1]
        return max(0, steps(record, (first, "+" if second == "-" else "-"))[1][3])
    return record.answer + choice((-1, 1), generator)


def perturb(record: Record, generator: torch.Generator, kind: str | None = None) -> str:
    """An answer with one fault.

    >>> perturb(Record("packed-less", "Ada", "pens", 3, 4, 5, "jars"), torch.Generator().manual_seed(2), "one step")
    'Ada has 12 pens.'
    """
    errors.check_option("kind", kind, (None, *FAULTS))
    kind = kind or choice(FAULTS, generator)
    text = reference_sentence(record, generator)
    if kind == "no name":
        return SHORT.format(number=record.answer)
    if kind == "other thing":
        return text.replace(record.thing, choice([t for t in THINGS if t != record.thing], generator))
    if kind == "ramble":
        return f"{text} {choice(RAMBLES, generator)}"
    if kind == "truncate":
        return text.rstrip(".")
    return sentence(record, wrong_number(record, kind, generator), choice(range(len(ANSWERS)), generator))


# --- the judge ----------------------------------------------------------------------------------------------------------

_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What the judge found in an answer.

    Args:
        numbers: all numbers that the answer states, in order.
        named: whether it names the person, and the things.
        words: length of the answer.
        valid: one ended sentence of 3 to 12 words with exactly one number.
        score: in [0, 1]; see `judge`.
    """

    numbers: tuple[int, ...]
    named: tuple[bool, bool]
    words: int
    valid: bool
    score: float


def judge(record: Record, text: Any) -> Verdict:
    """Compare an answer with its problem: exact.

    score = (0.6 [the last number is right] + 0.2 [the right person is named] + 0.2 [the right things are named]) x form,
    form = 1 for one ended sentence of 3 to 12 words with exactly one number, otherwise 1/2. Without the right number
    nothing counts: a wrong answer has score 0 however well it is said. Further words gain nothing.

    >>> record = Record("packed-less", "Ada", "pens", 3, 4, 5, "boxes")
    >>> [judge(record, text).score for text in ("Ada has 7 pens.", "The answer is seven.", "Ada has 8 pens.")]
    [1.0, 0.6, 0.0]
    """
    text = str(text)
    numbers = stated_numbers(text)
    named = tuple(_mentions(text, word) for word in (record.name, record.thing))
    valid = tasks.is_one_sentence(text, MIN_WORDS, MAX_WORDS) and len(numbers) == 1
    right = numbers[-1:] == (record.answer,)
    score = RIGHT_NUMBER + RIGHT_NAME * named[0] + RIGHT_THING * named[1] if right else 0.0
    return Verdict(numbers, named, len(text.split()), valid, round(score * (1.0 if valid else FORM_PENALTY), 6))


def stated_numbers(text: str) -> tuple[int, ...]:
    """Every number of a text, as digits or as words up to twenty.

    >>> stated_numbers("Twelve less 5 is 7; not 7.5 or -3")
    (12, 5, 7, -3)
    """
    tokens = re.findall(r"(?<![\w.])-?\d+(?![.\d]*\.?\d|\w)|[a-z]+", text.lower())
    return tuple(_WORDS.index(t) if t in _WORDS else int(t) for t in tokens if t in _WORDS or not t.isalpha())


def _mentions(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){word}(?!\w)", text, re.IGNORECASE) is not None


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

    return tasks.preference_pairs(f"arithmetic, {split}", found, render, candidates, _score, generator)


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
    """The stored preference pairs of a split, from `data/arithmetic`; each of another record."""
    return tasks.stored_pairs("arithmetic", split, folder)


def load_tiny(roles: Sequence[str] = ()) -> tuple[Any, Any]:
    """Model and tokenizer of the tiny profile; one model has all roles."""
    from sysdpo_lab.worlds import arithmetic_lm, tiny_models

    return tiny_models.load(arithmetic_lm.RECIPE)


_CARD = """# Arithmetic: preference pairs of answers to word problems

* Origin: generated by `python -m sysdpo_lab.worlds.arithmetic --out data/arithmetic --seed {seed}`; nothing copied.
* Licence: Apache-2.0, like the code.
* Format: JSONL in TRL's schema: prompt (the problem), chosen, rejected; further columns score_chosen, score_rejected and
  score_gap (the exact judge's, in [0, 1]) and kind ("perturbed": a reference against a faulty answer; "diverse": the best
  against the worst of four candidates).
* Splits: by a hash of the problem's text, so no problem is in two of them.
* Chosen answers are not all perfect; the rejected one is always worse.
* Limits: English, four kinds of story, two steps, numbers from 2 to 30; the judge knows digits and words up to twenty.

| file | pairs | SHA-256 |
|---|---|---|
{table}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: write the stored data."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", default="data/arithmetic", help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tasks.write_data(options.out, options.seed, STORED, preference_pairs, _CARD)
    print(f"{options.out}: " + ", ".join(f"{n} {split} pairs" for split, n in STORED.items()))


if __name__ == "__main__":
    main()
