"""A table of examples: for the same question the k intermediates by two samplers side by side, near-duplicates marked."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from sysdpo_lab import diversity, errors
from sysdpo_lab.experiments.arms import drawn_sets
from sysdpo_lab.system import CompoundSystem

NAMES = {"diverse_beam": "DBS", "monte_carlo": "MC", "gumbel_top_k": "Gumbel top-k"}


@dataclass(frozen=True)
class Example:
    """One question and the intermediates of each sampler.

    Args:
        x: the question.
        texts: {sampler: its k texts}.
        repeats: {sampler: for each text the number of the first earlier one that it nearly repeats, or None}.
    """

    x: str
    texts: dict[str, list[str]]
    repeats: dict[str, list[int | None]]


def example(x: str, texts: Mapping[str, Sequence[str]], threshold: float = 0.5) -> Example:
    """Mark the near-duplicates of each sampler's texts.

    Args:
        threshold: symmetric BLEU from which on a text counts as a near-duplicate; smaller marks more.

    >>> example("x", {"MC": ["a cheap thai place", "a cheap thai place .", "go home"]}).repeats
    {'MC': [None, 0, None]}
    """
    texts = {name: list(own) for name, own in texts.items()}
    return Example(x, texts, {name: diversity.near_duplicates(own, threshold) for name, own in texts.items()})


def draw(
    system: CompoundSystem,
    inputs: Sequence[str],
    k: int,
    settings: Mapping[str, Any],
    samplers: Sequence[str] = ("diverse_beam", "monte_carlo"),
    component: str | None = None,
    seed: int = 0,
    threshold: float = 0.5,
) -> list[Example]:
    """Draw the sets of every sampler for every question, from the system as it is now.

    Args:
        system: of language models.
        inputs: the questions.
        k: intermediates a sampler.
        settings: of a run: diversity_penalty, eval_batch.
        samplers: names of `sysdpo_lab.samplers`; keys of `NAMES`.
        component: whose texts are shown; default: the first hidden one.
        seed: of the random samplers.
        threshold: see `example`.

    Raises:
        UnknownOptionError: an unknown sampler or component.
    """
    component = system.hidden[0] if component is None else component
    errors.check_option("component", component, tuple(system.hidden))
    found: dict[str, list] = {}
    for name in samplers:
        errors.check_option("sampler", name, tuple(NAMES))
        mine = {**settings, "sampler": name, "k": k, "weights": "none"}
        found[NAMES[name]] = [
            [value.text for value in drawn[component]] for drawn in drawn_sets(system, inputs, mine, seed)
        ]
    return [example(x, {name: sets[row] for name, sets in found.items()}, threshold) for row, x in enumerate(inputs)]


def share_of_repeats(examples: Sequence[Example]) -> dict[str, float]:
    """Of each sampler: the share of texts after the first that nearly repeat an earlier one of their set, 0 to 1.

    >>> share_of_repeats([example("x", {"MC": ["a b c d", "a b c d", "e"], "DBS": ["a", "b", "c"]})])
    {'MC': 0.5, 'DBS': 0.0}
    """
    marks = {name: [mark for one in examples for mark in one.repeats[name][1:]] for name in examples[0].texts}
    return {name: sum(mark is not None for mark in found) / max(1, len(found)) for name, found in marks.items()}


# --- for people ---------------------------------------------------------------------------------------------------------


def marked(example: Example, sampler: str) -> list[str]:
    """The texts of one sampler, numbered from 1, each near-duplicate with the number of what it repeats.

    >>> marked(example("x", {"MC": ["a b c d", "a b c d"]}), "MC")
    ['1. a b c d', '2. (like 1) a b c d']
    """
    pairs = zip(example.texts[sampler], example.repeats[sampler])
    return [
        f"{number}. {'' if like is None else f'(like {like + 1}) '}{text}"
        for number, (text, like) in enumerate(pairs, start=1)
    ]


def as_text(examples: Sequence[Example], width: int = 58) -> str:
    """The table as plain text, one column a sampler.

    >>> print(as_text([example("who?", {"DBS": ["me"], "MC": ["you"]})], width=8))
    who?
      DBS      | MC
      1. me    | 1. you
    """
    lines = []
    for one in examples:
        lines += [one.x, _row(one.texts, width)]
        for texts in zip(*(marked(one, name) for name in one.texts)):
            columns = [textwrap.wrap(text, width) or [""] for text in texts]
            height = max(map(len, columns))
            lines += [
                _row([column[at] if at < len(column) else "" for column in columns], width) for at in range(height)
            ]
        lines.append("")
    return "\n".join(lines).rstrip()


def _row(cells: Any, width: int) -> str:
    return ("  " + " | ".join(f"{cell:{width}}" for cell in cells)).rstrip()


def as_html(examples: Sequence[Example]) -> str:
    """The table as HTML for a page or a notebook; near-duplicates are marked in words and in italics."""
    names = list(examples[0].texts)
    head = "".join(f"<th>{escape(name)}</th>" for name in ("question", *names))
    body = []
    for one in examples:
        cells = [f"<td>{escape(one.x)}</td>"]
        for name in names:
            items = (
                f"<em>{escape(text)}</em>" if like is not None else escape(text)
                for text, like in zip(marked(one, name), one.repeats[name])
            )
            cells.append(f"<td>{'<br>'.join(items)}</td>")
        body.append(f"<tr style='vertical-align: top; text-align: left'>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
