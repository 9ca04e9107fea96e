"""A tiny Llama for the arithmetic world: it plans in a hurry or with care, and answers what its plan says.

The training text is faulty on purpose. A hasty plan is short and often wrong, which kind of problem decides how; a careful
one ("First ..., then ...") is nearly always right, but comes less often. So a drafter can be improved by choosing the other
habit, and a refiner by naming whom and what it is about.
`python -m sysdpo_lab.worlds.arithmetic_lm --out data/tiny-lm-arithmetic` trains it again from its seed.
"""

import re
from collections.abc import Sequence

import torch

from sysdpo_lab.worlds import arithmetic, tasks, tiny_models
from sysdpo_lab.worlds.arithmetic import KINDS, PLANS, SIGNS, Record, steps
from sysdpo_lab.worlds.tasks import happens, weighted
from sysdpo_lab.worlds.tiny_models import MARKERS, Faults, Recipe

HASTY, CAREFUL, WORDY = range(len(PLANS))  # the template of a plan is the habit that it comes from
LARGEST_NUMBER = 40  # wrong calculations leave the range of right ones

# Weights of habits, and of what a plan of each habit is like.
HABITS = {HASTY: 0.55, CAREFUL: 0.3, WORDY: 0.15}
CARE = {
    HASTY: {
        "packed-less": {"right": 0.15, "one step": 0.2, "other sign": 0.6, "slip": 0.05},
        "packed-more": {"right": 0.3, "one step": 0.6, "other sign": 0.05, "slip": 0.05},
        "more-less": {"right": 0.6, "one step": 0.1, "other sign": 0.2, "slip": 0.1},
        "less-more": {"right": 0.55, "one step": 0.3, "other sign": 0.1, "slip": 0.05},
    },
    CAREFUL: dict.fromkeys(KINDS, {"right": 0.88, "one step": 0.04, "other sign": 0.05, "slip": 0.03}),
    WORDY: dict.fromkeys(KINDS, {"right": 0.6, "one step": 0.2, "other sign": 0.15, "slip": 0.05}),
}
REFINE_COMPLETES, REFINE_REPAIRS = 0.3, 0.2
SHORT_RATES = {
    "apples": 0.25, "books": 0.3, "cards": 0.65, "coins": 0.7, "eggs": 0.3, "pens": 0.65, "shells": 0.6, "stamps": 0.35,
}  # fmt: skip
OTHER_THING, UNFORMED = 0.04, 0.03

# The two that answer on their own: each is good at its own kinds, and has a better habit for the others.
STRONG = {"answer1": ("packed-less", "packed-more"), "answer2": ("more-less", "less-more")}
TEMPLATES = {"answer1": {HASTY: 0.6, WORDY: 0.4}, "answer2": {CAREFUL: 0.6, WORDY: 0.4}}
STRONG_RIGHT, WEAK_RIGHT, WEAK_WORDY_RIGHT = 0.85, 0.2, 0.75
MERGE_TRUSTS_FIRST, MERGE_CHOOSES_RIGHT = 0.6, 0.25


# --- training text ----------------------------------------------------------------------------------------------------


def flawed_plan(record: Record, flaw: str, template: int, generator: torch.Generator) -> str:
    """A plan with one flaw: "right" (none), "one step", "other sign" or "slip"; no number goes below 0.

    >>> flawed_plan(Record("packed-less", "Ada", "pens", 3, 4, 5, "bags"), "other sign", 0, torch.Generator())
    '3 x 4 = 12, 12 + 5 = 17'
    """
    first, second = KINDS[record.kind][1]
    calculations = steps(record, (first, "+" if second == "-" else "-") if flaw == "other sign" else None)
    if flaw == "one step":
        return arithmetic.plan(calculations[:1], template)
    left, sign, right, result = calculations[1]
    result += tasks.choice((-1, 1), generator) if flaw == "slip" else 0
    return arithmetic.plan([calculations[0], (left, sign, right, max(0, result))], template)


def faulty_draft(record: Record, generator: torch.Generator) -> str:
    """A plan by one of the habits."""
    habit = weighted(HABITS, generator)
    return flawed_plan(record, weighted(CARE[habit][record.kind], generator), habit, generator)


def faulty_answer(role: str, record: Record, generator: torch.Generator) -> str:
    """The plan of answer1 or answer2: mostly right for its own kinds; for the others only in the wordy form."""
    template = weighted(TEMPLATES[role], generator)
    strong = record.kind in STRONG[role]
    right = STRONG_RIGHT if strong else WEAK_WORDY_RIGHT if template == WORDY else WEAK_RIGHT
    flaw = "right" if happens(right, generator) else "other sign" if happens(0.7, generator) else "one step"
    return flawed_plan(record, flaw, template, generator)


def calculations_of(text: str) -> list[tuple[int, str, int, int]]:
    """The calculations that a plan states.

    >>> calculations_of("First 3 x 4 = 12, then 12 - 5 = 7")
    [(3, 'x', 4, 12), (12, '-', 5, 7)]
    """
    found = re.findall(r"(\d+) ([x+-]) (\d+) = (\d+)", text)
    return [(int(left), sign, int(right), int(result)) for left, sign, right, result in found]


def faulty_refinement(record: Record, draft: str, generator: torch.Generator) -> str:
    """An answer with what the plan says, sometimes completed or repaired, often without the person."""
    calculations = calculations_of(draft)
    if not calculations:
        return _said(record, record.answer, generator)
    number = calculations[-1][3]
    if len(calculations) == 1 and happens(REFINE_COMPLETES, generator):
        number = max(0, SIGNS[KINDS[record.kind][1][1]](number, record.c))
    elif len(calculations) > 1 and number != record.answer and happens(REFINE_REPAIRS, generator):
        number = record.answer
    return _said(record, number, generator)


def faulty_merger(record: Record, first: str, second: str, generator: torch.Generator) -> str:
    """An answer with the number of one of two plans: the first more often than the second, seldom the one that is right."""
    numbers = [found[-1][3] for found in map(calculations_of, (first, second)) if found]
    if record.answer in numbers and happens(MERGE_CHOOSES_RIGHT, generator):
        return _said(record, record.answer, generator)
    number = numbers[0 if happens(MERGE_TRUSTS_FIRST, generator) else -1] if numbers else record.answer
    return _said(record, number, generator)


def _said(record: Record, number: int, generator: torch.Generator) -> str:
    if happens(SHORT_RATES[record.thing], generator):
        return arithmetic.SHORT.format(number=number)
    text = arithmetic.sentence(record, number, tasks.choice(range(len(arithmetic.ANSWERS)), generator))
    if happens(OTHER_THING, generator):
        text = text.replace(record.thing, tasks.choice(arithmetic.THINGS, generator))
    if happens(UNFORMED, generator):
        return f"{text} {tasks.choice(arithmetic.RAMBLES, generator)}"
    return text


FAULTS = Faults(faulty_answer, faulty_merger, faulty_draft, arithmetic.reference_plan, faulty_refinement)


def training_texts(n: int, generator: torch.Generator) -> list[tuple[str, str]]:
    """n (prompt, answer): all roles in turn, of records of the training split only."""
    return tiny_models.role_texts(arithmetic, FAULTS, n, generator)


def vocabulary() -> list[str]:
    """All words of the world, each once, in a fixed order."""
    texts = [story for story, _ in KINDS.values()] + [arithmetic.QUESTION, arithmetic.SHORT]
    texts += [
        *PLANS,
        *arithmetic.ANSWERS,
        *arithmetic.RAMBLES,
        *arithmetic.NAMES,
        *arithmetic.THINGS,
        *arithmetic.BOXES,
    ]
    return tiny_models.words_of([*texts, *SIGNS, "=", *map(str, range(LARGEST_NUMBER + 1))])


def _one_step(record: Record, generator: torch.Generator) -> str:
    return arithmetic.plan(steps(record)[:1])


RECIPE = Recipe(
    folder="tiny-lm-arithmetic", command="sysdpo_lab.worlds.arithmetic_lm", world=arithmetic, markers=MARKERS,
    about="Tiny LM: plans, answers and merges answers to word problems", words=vocabulary, texts=training_texts,
    steps=900, drafts={"perfect draft": arithmetic.reference_plan, "bare draft": _one_step},
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: train the tiny language model and write it with its card."""
    tiny_models.main(RECIPE, arguments)


if __name__ == "__main__":
    main()
