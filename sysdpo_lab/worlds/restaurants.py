"""The restaurants world: a record of slots -> one sentence, with an exact judge, preference pairs and prompts.

The task follows the idea of the E2E NLG challenge (Novikova, Dusek and Rieser, 2017); values, templates and judge are
our own. `python -m sysdpo_lab.worlds.restaurants --out data/restaurants` writes the stored pairs again, byte for byte.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sysdpo_lab import errors
from sysdpo_lab.preferences import Pair, Pairs
from sysdpo_lab.worlds import tasks
from sysdpo_lab.worlds.tasks import choice

NAMES = (
    "Copper Kettle", "French Horn", "Golden Fig", "Green Lantern", "Old Mill", "Olive Branch",
    "Paper Moon", "Red Barn", "Salt Cellar", "Silver Spoon", "Thai Orchid", "Wild Thyme",
)  # fmt: skip
VALUES = {
    "name": NAMES,
    "food": ("French", "Indian", "Italian", "Japanese", "Mexican", "Thai"),
    "price": ("cheap", "moderate", "expensive"),
    "area": ("city centre", "harbour", "old town", "suburbs"),
    "rating": ("one star", "three stars", "five stars"),
    "family": ("yes", "no"),
    "near": ("library", "market", "museum", "station", "theatre"),
}
SLOTS = tuple(VALUES)
SPLITS = tasks.SPLITS
MIN_SLOTS, MAX_SLOTS = 3, 6
MIN_WORDS, MAX_WORDS = 4, 35
FORM_PENALTY = 0.5

# Prompts of the two-LLM system x -> draft -> refine; {x} and {draft} are the parents' values.
CHAT_DRAFT = "Write one short sentence that mentions every fact and nothing else.\nFacts: {x}"
CHAT_REFINE = (
    "Facts: {x}\nDraft: {draft}\nRewrite the draft as one short sentence that mentions every fact and nothing else. "
    "Answer with the sentence only."
)
TINY_DRAFT = "<draft> {x} <write>"
TINY_REFINE = "<refine> {x} <sep> {draft} <write>"
# ... and of the three-LLM system; answer2-seeing is answer2 where it sees answer1.
_CHAT_REST = "Write one short sentence about it that mentions every fact and nothing else.\nFacts: {x}"
PROMPTS = {
    "tiny": {
        "draft": TINY_DRAFT,
        "refine": TINY_REFINE,
        "answer1": "<answer1> {x} <write>",
        "answer2": "<answer2> {x} <write>",
        "answer2-seeing": "<answer2> {x} <sep> {answer1} <write>",
        "merge": "<merge> {x} <sep> {answer1} <sep> {answer2} <write>",
    },
    "chat": {
        "draft": CHAT_DRAFT,
        "refine": CHAT_REFINE,
        "answer1": f"Begin with the food and the price. {_CHAT_REST}",
        "answer2": f"Begin with the place. {_CHAT_REST}",
        "answer2-seeing": f"Begin with the place. {_CHAT_REST}\nAnother sentence: {{answer1}}",
        "merge": "Facts: {x}\nSentence 1: {answer1}\nSentence 2: {answer2}\nMerge them into one short sentence that "
        "mentions every fact and nothing else. Answer with the sentence only.",
    },
}


# --- records ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What is to be said about one restaurant; None = nothing.

    >>> Record("Old Mill", food="Thai", rating="five stars").slots
    {'name': 'Old Mill', 'food': 'Thai', 'rating': 'five stars'}
    """

    name: str
    food: str | None = None
    price: str | None = None
    area: str | None = None
    rating: str | None = None
    family: str | None = None
    near: str | None = None

    def __post_init__(self):
        for slot, value in self.slots.items():
            if value not in VALUES[slot]:
                raise errors.RecordFormatError(f"{slot}={value!r} does not exist; choose one of {VALUES[slot]}")

    @property
    def slots(self) -> dict[str, str]:
        """The slots that have a value, in the world's order; the name always has one."""
        return {slot: getattr(self, slot) for slot in SLOTS if slot == "name" or getattr(self, slot) is not None}


def render(record: Record) -> str:
    """The input text x of a record.

    >>> render(Record("Old Mill", food="Thai", family="no"))
    'name: Old Mill | food: Thai | family: no'
    """
    return " | ".join(f"{slot}: {value}" for slot, value in record.slots.items())


def parse(text: str) -> Record:
    """The record that `render` wrote.

    Raises:
        RecordFormatError: unknown slot or value, or no name.

    >>> parse("name: Old Mill | food: Thai")
    Record(name='Old Mill', food='Thai', price=None, area=None, rating=None, family=None, near=None)
    """
    slots = dict(part.split(": ", 1) if ": " in part else (part, "") for part in text.strip().split(" | "))
    unknown = [slot for slot in slots if slot not in SLOTS]
    if unknown or "name" not in slots:
        raise errors.RecordFormatError(
            f"not a record: {text[:80]!r}; expected 'name: ... | slot: value', slots {SLOTS}"
        )
    return Record(**slots)


def split_of(record: Record) -> str:
    """The split that a record belongs to: by a hash of what it says, 70 % train, 10 % validation, 20 % held out."""
    return tasks.split_of_text(render(record))


def records(generator: torch.Generator, n: int, split: str | None = None) -> list[Record]:
    """n different records with 3 to 6 slots, of one split or of all.

    >>> [len(r.slots) for r in records(torch.Generator().manual_seed(0), 4, "train")]
    [3, 6, 6, 3]
    """
    return tasks.different_records(_draw_record, split_of, generator, n, split)


def _draw_record(generator: torch.Generator) -> Record:
    count = int(torch.randint(MIN_SLOTS, MAX_SLOTS + 1, (1,), generator=generator))
    order = torch.randperm(len(SLOTS) - 1, generator=generator)[: count - 1]
    slots = ["name", *(SLOTS[1 + int(i)] for i in order)]
    return Record(**{slot: choice(VALUES[slot], generator) for slot in slots})


def replace(record: Record, **slots: str | None) -> Record:
    """The record with some slots set, or unset by None."""
    return Record(**{slot: value for slot, value in {**record.slots, **slots}.items() if value is not None})


# --- sentences --------------------------------------------------------------------------------------------------------

_ADJECTIVES = {"cheap": "cheap", "moderate": "moderately priced", "expensive": "expensive"}


def _kind(record: Record) -> str:
    """'an expensive Thai restaurant'"""
    words = [_ADJECTIVES.get(record.price, ""), record.food or "", "restaurant"]
    phrase = " ".join(filter(None, words))
    return f"{'an' if phrase[0] in 'aeiouAEIOU' else 'a'} {phrase}"


def _place(record: Record) -> str:
    """'in the harbour near the museum'"""
    parts = [f"in the {record.area}" if record.area else "", f"near the {record.near}" if record.near else ""]
    return " ".join(filter(None, parts))


def _family(record: Record) -> str:
    return {"yes": "family friendly", "no": "not family friendly", None: ""}[record.family]


def _listed(parts: list[str]) -> str:
    """'a, b and c'"""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _serves(record: Record) -> list[str]:
    food = " ".join(filter(None, [_ADJECTIVES.get(record.price, ""), record.food or ""]))
    clauses = [f"serves {food} food" if food else "is a restaurant"]
    clauses += [f"has {record.rating}"] if record.rating else []
    return clauses + ([f"is {_family(record)}"] if record.family else [])


def _sentence_is(record: Record) -> str:
    tail = [f"with {record.rating}" if record.rating else "", f"that is {_family(record)}" if record.family else ""]
    return " ".join(filter(None, [record.name, "is", _kind(record), _place(record), *tail])) + "."


def _sentence_serves(record: Record) -> str:
    place = _place(record)
    clauses = _serves(record) + ([f"lies {place}"] if place else [])
    return f"{record.name} {_listed(clauses)}."


def _sentence_place_first(record: Record) -> str:
    place = _place(record)
    lead = f"{place[0].upper()}{place[1:]}, {record.name}" if place else record.name
    return f"{lead} {_listed(_serves(record))}."


def _sentence_there_is(record: Record) -> str:
    tail = [f"it has {record.rating}" if record.rating else "", f"it is {_family(record)}" if record.family else ""]
    head = " ".join(filter(None, ["There is", _kind(record), "named", record.name, _place(record)]))
    return ", and ".join([head, *filter(None, tail)]) + "."


TEMPLATES = (_sentence_is, _sentence_serves, _sentence_place_first, _sentence_there_is)


def sentence(record: Record, template: int = 0) -> str:
    """A sentence that says what the record says, by template 0 to 3.

    >>> record = Record("Old Mill", food="Thai", price="cheap", area="harbour", rating="one star", family="no")
    >>> for template in range(4):
    ...     print(sentence(record, template))
    Old Mill is a cheap Thai restaurant in the harbour with one star that is not family friendly.
    Old Mill serves cheap Thai food, has one star, is not family friendly and lies in the harbour.
    In the harbour, Old Mill serves cheap Thai food, has one star and is not family friendly.
    There is a cheap Thai restaurant named Old Mill in the harbour, and it has one star, and it is not family friendly.
    """
    return TEMPLATES[template](record)


def reference_sentence(record: Record, generator: torch.Generator) -> str:
    """A perfect answer: `sentence` by a random template."""
    return sentence(record, choice(range(len(TEMPLATES)), generator))


# --- faults -----------------------------------------------------------------------------------------------------------


class Perturbed(NamedTuple):
    """A faulty answer: its text, what is wrong with it, and the record that it now describes."""

    text: str
    kind: str
    record: Record


FAULTS = ("drop", "change", "invent", "ramble", "truncate")
RAMBLES = ("It is a nice place and people like it.", "You should go there, and you should go there soon.")


def perturb(record: Record, text: str, generator: torch.Generator, kind: str | None = None) -> Perturbed:
    """A worse answer than `text`, in the same words where possible.

    Args:
        record: what `text` describes.
        kind: "drop" a slot, "change" a value, "invent" a slot, "ramble" on, or "truncate"; default: drawn.

    >>> record = Record("Old Mill", food="Thai", near="museum")
    >>> perturb(record, sentence(record), torch.Generator().manual_seed(0), "drop").text
    'Old Mill is a restaurant near the museum.'
    """
    errors.check_option("kind", kind, (None, *FAULTS))
    kind = kind or choice(FAULTS, generator)
    if kind == "ramble":
        return Perturbed(f"{text} {choice((text, *RAMBLES), generator)}", kind, record)
    if kind == "truncate":
        return Perturbed(_truncate(text, generator), kind, record)
    edited = _edit(record, kind, generator)
    return Perturbed(sentence(edited, template_of(record, text)), kind, edited)


def _edit(record: Record, kind: str, generator: torch.Generator) -> Record:
    given = [slot for slot in record.slots if slot != "name"]
    free = [slot for slot in SLOTS if slot not in record.slots]
    if kind == "invent" and free:
        slot = choice(free, generator)
        return replace(record, **{slot: choice(VALUES[slot], generator)})
    if not given:  # a bare name can only be changed
        return replace(record, name=choice([n for n in NAMES if n != record.name], generator))
    slot = choice(given, generator)
    others = [value for value in VALUES[slot] if value != record.slots[slot]]
    return replace(record, **{slot: None if kind == "drop" else choice(others, generator)})


def template_of(record: Record, text: str) -> int:
    """The template that wrote the text about this record; 0 when none did."""
    matches = (i for i in range(len(TEMPLATES)) if sentence(record, i) == text)
    return next(matches, 0)


def _truncate(text: str, generator: torch.Generator) -> str:
    words = text.split()
    keep = int(torch.randint(2, max(3, len(words) - 1), (1,), generator=generator))
    return " ".join(words[:keep]).rstrip(".,")


# --- the judge --------------------------------------------------------------------------------------------------------

# Further wordings that count as a value; the value itself always counts. All in lower case, without hyphens.
_YES = (
    "family friendly", "child friendly", "kid friendly", "kids friendly", "friendly to families",
    "suitable for families", "good for families", "great for families", "perfect for families",
    "welcomes families", "families are welcome", "welcomes children", "children are welcome", "kids are welcome",
)  # fmt: skip
_NEGATIONS = ("not", "isn't", "is not", "not a", "not an", "isn't a", "not very", "not particularly", "non")
_WORDINGS = {
    ("price", "cheap"): ("low prices", "low priced", "low price", "inexpensive", "affordable", "not expensive"),
    ("price", "moderate"): ("moderately priced", "mid priced", "mid range", "medium priced", "average prices"),
    ("price", "expensive"): ("high prices", "high priced", "high price", "pricey", "costly", "not cheap"),
    ("area", "city centre"): ("city center", "centre of the city", "center of the city", "town centre", "downtown"),
    ("area", "harbour"): ("harbor",),
    ("area", "suburbs"): ("suburb", "suburban"),
    ("rating", "one star"): ("1 star", "one out of five", "1 out of 5", "1/5"),
    ("rating", "three stars"): ("three star", "3 stars", "3 star", "three out of five", "3 out of 5", "3/5"),
    ("rating", "five stars"): ("five star", "5 stars", "5 star", "five out of five", "5 out of 5", "5/5"),
    ("family", "yes"): _YES,
    ("family", "no"): (
        *(f"{negation} {form}" for negation in _NEGATIONS for form in _YES),
        "adults only", "adult only", "no children", "no kids", "no families",
    ),
    ("near", "theatre"): ("theater",),
}  # fmt: skip
# Values that no record has: always invented.
_FOREIGN = {
    "food": ("american", "british", "chinese", "english", "greek", "irish", "korean", "mediterranean",
             "spanish", "turkish", "vegan", "vegetarian", "vietnamese"),
    "rating": ("two stars", "two star", "2 stars", "2 star", "four stars", "four star", "4 stars", "4 star"),
    "area": ("riverside", "countryside", "seaside", "hillside"),
    "near": ("airport", "beach", "bridge", "church", "park", "river", "school", "university"),
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What the judge found in an answer.

    Args:
        present, missing: slots of the record that the answer does and does not state.
        invented: (slot, value) stated though the record does not say so.
        words: length of the answer.
        valid: one ended sentence of 4 to 35 words that states the name.
        score: in [0, 1]; see `judge`.
    """

    present: tuple[str, ...]
    missing: tuple[str, ...]
    invented: tuple[tuple[str, str], ...]
    words: int
    valid: bool
    score: float


def judge(record: Record, text: Any) -> Verdict:
    """Compare an answer with its record: exact, by accepted wordings, whatever the case and the hyphens.

    score = max(0, (slots present - values invented) / slots of the record) x form,
    form = 1 for one ended sentence of 4 to 35 words, otherwise 1/2. It is 1 only for a perfect answer. At each place
    the longest wording counts ("Thai Orchid" names a restaurant, no food; "not family friendly" is no "family friendly").

    >>> record = Record("Thai Orchid", price="cheap", near="museum")
    >>> judge(record, "Thai Orchid is a cheap Italian place.")
    Verdict(present=('name', 'price'), missing=('near',), invented=(('food', 'Italian'),), words=7, valid=True,
            score=0.333...)
    """
    text = str(text)
    found, slots = stated(text), record.slots
    present = tuple(slot for slot in slots if (slot, slots[slot]) in found)
    missing = tuple(slot for slot in slots if slot not in present)
    invented = tuple((slot, value) for slot, value in found if slots.get(slot) != value)
    formed = is_one_sentence(text)
    score = max(0.0, (len(present) - len(invented)) / len(slots)) * (1.0 if formed else FORM_PENALTY)
    return Verdict(present, missing, invented, len(text.split()), formed and "name" in present, score)


def stated(text: str) -> tuple[tuple[str, str], ...]:
    """The (slot, value) that a text states, each once, in order of appearance.

    >>> stated("The Thai Orchid: low-priced, not family-friendly")
    (('name', 'Thai Orchid'), ('price', 'cheap'), ('family', 'no'))
    """
    pattern, meaning = _wordings()
    return tuple(dict.fromkeys(meaning[match.group()] for match in pattern.finditer(_normalised(text))))


def is_one_sentence(text: str) -> bool:
    """Whether the text is one ended sentence of 4 to 35 words.

    >>> is_one_sentence("Old Mill is cheap."), is_one_sentence("Old Mill is cheap. Go!"), is_one_sentence("Old Mill is")
    (True, False, False)
    """
    return tasks.is_one_sentence(text, MIN_WORDS, MAX_WORDS)


def compare(record: Record, a: Any, b: Any) -> float:
    """1 when answer a scores higher than b, 0 when lower, 1/2 on a tie.

    >>> compare(Record("Old Mill", food="Thai"), "Old Mill is a Thai restaurant.", "Old Mill is a restaurant.")
    1.0
    """
    return tasks.compared(judge(record, a).score, judge(record, b).score)


def _normalised(text: str) -> str:
    text = text.lower().replace("\u2019", "'")
    return re.sub(r"[\s\-\u2010-\u2015_]+", " ", text)


@cache
def _wordings() -> tuple[re.Pattern, dict[str, tuple[str, str]]]:
    """One pattern of all wordings, longest first, and what each stands for."""
    meaning = {form: (slot, value) for (slot, value), forms in _WORDINGS.items() for form in forms}
    meaning |= {value.lower(): (slot, value) for slot, values in VALUES.items() for value in values if slot != "family"}
    meaning |= {form: (slot, form) for slot, forms in _FOREIGN.items() for form in forms}
    longest_first = sorted(meaning, key=len, reverse=True)
    return re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, longest_first)) + r")(?!\w)"), meaning


# --- preference pairs -------------------------------------------------------------------------------------------------


def preference_pairs(n: int, generator: torch.Generator, split: str = "train") -> Pairs:
    """n pairs of written answers, one a record: a good one (at most one fault) against a worse one (one or two faults).

    `meta` holds score_chosen, score_rejected, score_gap and kind (the rejected answer's faults).

    >>> preference_pairs(1, torch.Generator().manual_seed(0))[0].meta["score_chosen"]
    1.0
    """
    return Pairs([_draw_pair(record, generator) for record in records(generator, n, split)], f"restaurants, {split}")


def _draw_pair(record: Record, generator: torch.Generator) -> Pair:
    while True:
        chosen, _ = _with_faults(record, choice((0, 0, 1), generator), generator)
        rejected, kind = _with_faults(record, choice((1, 2), generator), generator)
        high, low = judge(record, chosen).score, judge(record, rejected).score
        if high > low:
            return Pair({"x": render(record)}, chosen, rejected, tasks.score_columns(high, low) | {"kind": kind})


def _with_faults(record: Record, faults: int, generator: torch.Generator) -> tuple[str, str]:
    answer = Perturbed(reference_sentence(record, generator), "", record)
    kinds = []
    for _ in range(faults):
        answer = perturb(answer.record, answer.text, generator)
        kinds.append(answer.kind)
    return answer.text, "+".join(kinds)


def pairs_from_candidates(
    inputs: Sequence[str], candidates: Sequence[Sequence[Any]], generator: torch.Generator, min_gap: float = 0.0
) -> tuple[Pairs, int]:
    """On-policy pairs, best against worst, and how many records gave none; see `tasks.pairs_from_candidates`."""
    return tasks.pairs_from_candidates(_score, inputs, candidates, generator, min_gap)


def _score(x: str, answer: Any) -> float:
    return judge(parse(x), answer).score


# --- stored data ------------------------------------------------------------------------------------------------------

STORED = {"train": 600, "validation": 200, "heldout": 300}


def stored_pairs(split: str, folder: Path | str | None = None) -> Pairs:
    """The stored preference pairs of a split, from `data/restaurants`; each of another record."""
    return tasks.stored_pairs("restaurants", split, folder)


def write_data(folder: Path | str, seed: int = 0) -> None:
    """Write the stored pairs and their card; the same seed gives the same bytes."""
    tasks.write_data(folder, seed, STORED, preference_pairs, _CARD)


_CARD = """# Restaurants: preference pairs of one-sentence descriptions

* Origin: generated by `python -m sysdpo_lab.worlds.restaurants --out data/restaurants --seed {seed}`; nothing copied.
* Idea: the E2E NLG challenge (Novikova, Dusek and Rieser, 2017); values, templates and judge are our own.
* Licence: Apache-2.0, like the code.
* Format: JSONL in TRL's schema: prompt (the record), chosen, rejected; further columns score_chosen, score_rejected and
  score_gap (the exact judge's, in [0, 1]) and kind (the rejected answer's faults).
* Splits: by a hash of the record's content, so no record is in two of them; every word of the others occurs in train.
* Chosen answers are not all perfect: about one in four has a fault, and its rejected answer is worse still.
* Limits: English, small vocabulary, four sentence templates; the judge knows only the wordings listed in the code.

| file | pairs | SHA-256 |
|---|---|---|
{table}
"""


def load_tiny(roles: Sequence[str] = ("draft", "refine")) -> tuple[Any, Any]:
    """Model and tokenizer of the tiny profile for some roles: one model drafts and refines, another answers and merges."""
    from sysdpo_lab.worlds import merge_lm, tiny_lm, tiny_models

    return tiny_models.load(merge_lm.RECIPE if "merge" in roles else tiny_lm.RECIPE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: write the stored data."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", default="data/restaurants", help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    write_data(options.out, options.seed)
    print(f"{options.out}: " + ", ".join(f"{n} {split} pairs" for split, n in STORED.items()))


if __name__ == "__main__":
    main()
