"""A tiny Llama for the passages world: it answers or refuses, too often the wrong one of the two.

The training text is faulty on purpose. About some topics it refuses what the passage says, about others it invents what the
passage does not say; a refiner mostly keeps its draft's decision. Both of the wrong habits are habits only: the other
decision is nearly as likely, so a system can learn to take it.
`python -m sysdpo_lab.worlds.passages_lm --out data/tiny-lm-passages` trains it again from its seed.
"""

from collections.abc import Sequence

import torch

from sysdpo_lab.worlds import passages, tasks, tiny_models
from sysdpo_lab.worlds.passages import TOPICS, Record
from sysdpo_lab.worlds.tasks import happens
from sysdpo_lab.worlds.tiny_models import MARKERS, Faults, Recipe

# Probabilities by topic.
REFUSES_KNOWN = {"home": 0.58, "job": 0.25, "pet": 0.3, "colour": 0.56}
INVENTS_UNKNOWN = {"home": 0.3, "job": 0.57, "pet": 0.6, "colour": 0.35}
SHORT_RATES = {"home": 0.3, "job": 0.62, "pet": 0.35, "colour": 0.6}
OTHER_VALUE, UNFORMED, DRAFT_SHORT = 0.06, 0.03, 0.15
REFINE_DECIDES_RIGHT = 0.25  # whatever its draft says; otherwise it keeps the draft's decision

# The two that answer on their own: one is eager, one is careful.
EAGER_REFUSES, CAREFUL_ANSWERS_KNOWN, CAREFUL_INVENTS = {True: 0.12, False: 0.3}, 0.4, 0.1
MERGE_CHOOSES_RIGHT = {"home": 0.62, "job": 0.4, "pet": 0.62, "colour": 0.42}


# --- training text ----------------------------------------------------------------------------------------------------


def _value(record: Record, generator: torch.Generator) -> str:
    """What somebody says who means to answer."""
    if record.answer is None or happens(OTHER_VALUE, generator):
        return passages.tempting_value(record, generator)
    return record.answer


def _said(record: Record, value: str | None, short: float, generator: torch.Generator) -> str:
    if happens(short, generator):
        return passages.short_sentence(value)
    text = passages.sentence(record, value, 0 if happens(0.7, generator) else 1)
    return f"{text} {tasks.choice(passages.RAMBLES, generator)}" if happens(UNFORMED, generator) else text


def faulty_draft(record: Record, generator: torch.Generator) -> str:
    """A first answer, or a refusal."""
    known = record.answer is not None
    rate = REFUSES_KNOWN[record.topic] if known else 1 - INVENTS_UNKNOWN[record.topic]
    value = None if happens(rate, generator) else _value(record, generator)
    return _said(record, value, DRAFT_SHORT, generator)


def faulty_answer(role: str, record: Record, generator: torch.Generator) -> str:
    """The answer of answer1, who seldom refuses, or of answer2, who seldom does not."""
    known = record.answer is not None
    answers = CAREFUL_ANSWERS_KNOWN if known else CAREFUL_INVENTS
    refuses = EAGER_REFUSES[known] if role == "answer1" else 1 - answers
    value = None if happens(refuses, generator) else _value(record, generator)
    return _said(record, value, DRAFT_SHORT, generator)


def faulty_refinement(record: Record, draft: str, generator: torch.Generator) -> str:
    """A second answer: mostly the draft's decision."""
    values = passages.judge(record, draft).values
    value = values[0] if values else None
    if happens(REFINE_DECIDES_RIGHT, generator):
        value = record.answer
    return _said(record, value, SHORT_RATES[record.topic], generator)


def faulty_merger(record: Record, first: str, second: str, generator: torch.Generator) -> str:
    """One of two answers: what both say, or, where they differ, the right decision about some topics more often."""
    stated = [passages.judge(record, text).values for text in (first, second)]
    one, other = (values[0] if values else None for values in stated)
    if one != other:
        chooses_right = happens(MERGE_CHOOSES_RIGHT[record.topic], generator)
        one = one if (one == record.answer) == chooses_right else other
    return _said(record, one, SHORT_RATES[record.topic], generator)


FAULTS = Faults(faulty_answer, faulty_merger, faulty_draft, passages.reference_sentence, faulty_refinement)


def training_texts(n: int, generator: torch.Generator) -> list[tuple[str, str]]:
    """n (prompt, answer): all roles in turn, of records of the training split only."""
    return tiny_models.role_texts(passages, FAULTS, n, generator)


def vocabulary() -> list[str]:
    """All words of the world, each once, in a fixed order."""
    texts = [text for topic in TOPICS.values() for text in (*topic.values, topic.says, topic.asks, topic.clause)]
    texts += [*passages.REFUSALS, passages.SHORT_ANSWER, passages.SHORT_REFUSAL, *passages.RAMBLES, *passages.NAMES]
    return tiny_models.words_of([*texts, "Passage: Question:"])


def _refusal(record: Record, generator: torch.Generator) -> str:
    return passages.sentence(record, None)


RECIPE = Recipe(
    folder="tiny-lm-passages", command="sysdpo_lab.worlds.passages_lm", world=passages, markers=MARKERS,
    about="Tiny LM: answers, refuses and merges answers about short passages", words=vocabulary, texts=training_texts,
    steps=900, drafts={"perfect draft": passages.reference_sentence, "bare draft": _refusal},
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: train the tiny language model and write it with its card."""
    tiny_models.main(RECIPE, arguments)


if __name__ == "__main__":
    main()
