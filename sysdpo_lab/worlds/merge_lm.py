"""A tiny Llama for restaurants with three models: answer1 tells of food and price, answer2 of the place, merge joins them.

The training text is faulty on purpose: each answerer leaves out most of what the other one is good at, and the merger loses
some of what the second one says. `python -m sysdpo_lab.worlds.merge_lm --out data/tiny-lm-merge` trains it again.
"""

from collections.abc import Sequence

import torch

from sysdpo_lab.worlds import restaurants, tiny_lm, tiny_models
from sysdpo_lab.worlds.restaurants import VALUES, Record
from sysdpo_lab.worlds.tasks import choice, happens
from sysdpo_lab.worlds.tiny_models import THREE, Faults, Recipe

MARKERS = ("<answer1>", "<answer2>", "<merge>", "<sep>", "<write>")
ROLES = ("answer1", "merge", "answer2", "merge", "answer2-seeing")

# Probabilities by slot.
OMITS = {
    "answer1": {"food": 0.15, "price": 0.35, "rating": 0.45, "area": 0.7, "near": 0.75, "family": 0.7},
    "answer2": {"food": 0.65, "price": 0.75, "rating": 0.7, "area": 0.25, "near": 0.35, "family": 0.45},
}
MERGE_LOSES = {
    "food": 0.2,
    "price": 0.4,
    "rating": 0.55,
    "area": 0.3,
    "near": 0.56,
    "family": 0.55,
}  # of the second answer
MERGE_ADDS, MERGE_REPAIRS, CHANGES, UNFORMED = 0.12, 0.4, 0.05, 0.03


def faulty_answer(role: str, record: Record, generator: torch.Generator) -> str:
    """The sentence of answer1 or answer2: its own slots mostly, a value wrong now and then."""
    said = {"name": record.name}
    for slot, value in list(record.slots.items())[1:]:
        if not happens(OMITS[role][slot], generator):
            others = [other for other in VALUES[slot] if other != value]
            said[slot] = choice(others, generator) if happens(CHANGES, generator) else value
    described = Record(**said)
    text = restaurants.reference_sentence(described, generator)
    return restaurants.perturb(described, text, generator, "truncate").text if happens(UNFORMED, generator) else text


def faulty_merger(record: Record, first: str, second: str, generator: torch.Generator) -> str:
    """What the first answer states, and part of what only the second one does, in the first one's template."""
    one, two = (_stated(text) for text in (first, second))
    said = {slot: value for slot, value in one.items() if slot != "name"}
    for slot, value in two.items():
        if slot != "name" and slot not in said and not happens(MERGE_LOSES[slot], generator):
            said[slot] = value
    for slot in said:
        if said[slot] != record.slots.get(slot) and happens(MERGE_REPAIRS, generator):
            said[slot] = record.slots.get(slot)
    for slot, value in list(record.slots.items())[1:]:
        if slot not in one | two and happens(MERGE_ADDS, generator):
            said[slot] = value
    described = Record(record.name, **{slot: value for slot, value in said.items() if value})
    return restaurants.sentence(described, restaurants.template_of(Record(**{"name": record.name, **one}), first))


def _stated(text: str) -> dict[str, str]:
    """{slot: the first value stated}, the world's own values only."""
    found: dict[str, str] = {}
    for slot, value in restaurants.stated(text):
        if value in VALUES[slot]:
            found.setdefault(slot, value)
    return found


FAULTS = Faults(faulty_answer, faulty_merger)


def training_texts(n: int, generator: torch.Generator) -> list[tuple[str, str]]:
    """n (prompt, answer): all roles in turn, of records of the training split only."""
    return tiny_models.role_texts(restaurants, FAULTS, n, generator, ROLES)


RECIPE = Recipe(
    folder="tiny-lm-merge", command="sysdpo_lab.worlds.merge_lm", world=restaurants, markers=MARKERS,
    about="Tiny LM: answers and merges restaurant sentences", words=tiny_lm.vocabulary, texts=training_texts, steps=700,
    chains=(THREE,),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: train the tiny language model and write it with its card."""
    tiny_models.main(RECIPE, arguments)


if __name__ == "__main__":
    main()
