"""A word-level tokenizer and a tiny Llama that draft and refine restaurant sentences, badly enough to be improved.

The training text is faulty on purpose. Drafts leave slots out (some often, some seldom) and sometimes state a wrong value;
refinements say what their draft says, add some of what is missing and repair some of what is wrong. So a good draft helps,
and both nodes of the system draft -> refine have something to learn.
`python -m sysdpo_lab.worlds.tiny_lm --out data/tiny-lm` trains it again from its seed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sysdpo_lab.worlds import restaurants, tiny_models
from sysdpo_lab.worlds.restaurants import TINY_DRAFT, TINY_REFINE, VALUES, Record
from sysdpo_lab.worlds.tasks import happens
from sysdpo_lab.worlds.tiny_models import TWO, Recipe

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MARKERS = ("<draft>", "<refine>", "<sep>", "<write>")
answer_loss, build_model = tiny_models.answer_loss, tiny_models.build_model

# How the training text is spoiled: probabilities, by slot or for a whole text.
DRAFT_OMITS = {"food": 0.25, "price": 0.4, "area": 0.45, "rating": 0.6, "family": 0.65, "near": 0.55}
REFINE_ADDS = {"food": 0.4, "price": 0.3, "area": 0.35, "rating": 0.25, "family": 0.2, "near": 0.25}
DRAFT_CHANGES, DRAFT_INVENTS, DRAFT_UNFORMED = 0.06, 0.15, 0.05
REFINE_REPAIRS, REFINE_OMITS, REFINE_UNFORMED = 0.4, 0.04, 0.03


# --- training text ----------------------------------------------------------------------------------------------------


def _other_value(slot: str, value: str | None, generator: torch.Generator) -> str:
    return restaurants.choice([other for other in VALUES[slot] if other != value], generator)


def _unformed(record: Record, text: str, probability: float, generator: torch.Generator) -> str:
    if not happens(probability, generator):
        return text
    kind = "ramble" if happens(0.6, generator) else "truncate"
    return restaurants.perturb(record, text, generator, kind).text


def faulty_draft(record: Record, generator: torch.Generator) -> str:
    """A first answer: some slots left out, some values wrong, now and then one slot too many.

    >>> faulty_draft(Record("Old Mill", food="Thai", near="museum"), torch.Generator().manual_seed(1))
    'There is a Thai restaurant named Old Mill.'
    """
    said = {"name": record.name}
    for slot, value in list(record.slots.items())[1:]:
        if not happens(DRAFT_OMITS[slot], generator):
            said[slot] = _other_value(slot, value, generator) if happens(DRAFT_CHANGES, generator) else value
    free = [slot for slot in VALUES if slot not in record.slots]
    if free and happens(DRAFT_INVENTS, generator):
        slot = restaurants.choice(free, generator)
        said[slot] = _other_value(slot, None, generator)
    described = Record(**said)
    return _unformed(described, restaurants.reference_sentence(described, generator), DRAFT_UNFORMED, generator)


def faulty_refinement(record: Record, draft: str, generator: torch.Generator) -> str:
    """A second answer: what the draft states, in its template, with some of its gaps filled and faults repaired."""
    said: dict[str, str | None] = {}
    for slot, value in restaurants.stated(draft):
        said.setdefault(slot, value if value in VALUES[slot] else None)
    said = {"name": record.name} | {slot: value for slot, value in said.items() if slot != "name" and value}
    template = restaurants.template_of(Record(**said), draft)
    for slot in list(said)[1:]:
        right = record.slots.get(slot)
        if said[slot] != right and happens(REFINE_REPAIRS, generator):
            said[slot] = right
        elif happens(REFINE_OMITS, generator):
            said[slot] = None
    for slot, value in list(record.slots.items())[1:]:
        if slot not in said and happens(REFINE_ADDS[slot], generator):
            said[slot] = value
    described = Record(**{slot: value for slot, value in said.items() if value})
    return _unformed(described, restaurants.sentence(described, template), REFINE_UNFORMED, generator)


def training_texts(n: int, generator: torch.Generator) -> list[tuple[str, str]]:
    """n (prompt, answer): drafts and refinements in turn, of records of the training split only."""
    texts = []
    for number, record in enumerate(restaurants.records(generator, n, "train")):
        x, draft = restaurants.render(record), faulty_draft(record, generator)
        if number % 2 == 0:
            texts.append((TINY_DRAFT.format(x=x), draft))
        else:
            # half of the drafts are perfect, so that the refiner meets the drafts that alignment leads to
            draft = draft if number % 4 == 1 else restaurants.reference_sentence(record, generator)
            texts.append((TINY_REFINE.format(x=x, draft=draft), faulty_refinement(record, draft, generator)))
    return texts


# --- tokenizer and model ----------------------------------------------------------------------------------------------


def vocabulary() -> list[str]:
    """All words of the world, each once, in a fixed order."""
    full = Record(**{slot: values[0] for slot, values in VALUES.items()})
    described = [restaurants.replace(full, **{slot: value}) for slot, values in VALUES.items() for value in values]
    described += [Record(full.name, **{slot: value}) for slot in list(VALUES)[1:] for value in VALUES[slot]]
    described += [Record(full.name), Record(full.name, area=full.area, near=full.near)]
    texts = [restaurants.render(record) for record in described]
    texts += [restaurants.sentence(r, template) for r in described for template in range(len(restaurants.TEMPLATES))]
    words = " ".join([*texts, *restaurants.RAMBLES]).replace(".", " . ").replace(",", " , ").replace(":", " : ").split()
    return sorted(set(words))


def _bare_draft(record: Record, generator: torch.Generator) -> str:
    return restaurants.sentence(Record(record.name))


RECIPE = Recipe(
    folder="tiny-lm", command="sysdpo_lab.worlds.tiny_lm", world=restaurants, markers=MARKERS, words=vocabulary,
    about="Tiny LM: drafts and refines restaurant sentences", texts=training_texts, steps=400, chains=(TWO,),
    drafts={"perfect draft": restaurants.reference_sentence, "bare draft": _bare_draft},
)  # fmt: skip


def load_tiny_lm(folder: Path | str | None = None) -> tuple["LlamaForCausalLM", "PreTrainedTokenizerFast"]:
    """The shipped tiny model that drafts and refines, and its tokenizer; see `tiny_models.load`."""
    return tiny_models.load(RECIPE, folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: train the tiny language model and write it with its card."""
    tiny_models.main(RECIPE, arguments)


if __name__ == "__main__":
    main()
