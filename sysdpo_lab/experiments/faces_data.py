"""Preference data of whole sequences for `run faces`: drawn from a system, judged from the pixels, paired with margins.

One user's request gives several answers: caption texts drawn under different prompting styles, each painted several
times. Two answers to one request become a pair when their scores differ by at least `min_gap`; closer ones are ties.
What is trained is always conditioned on the plain prompt, whatever style an answer was drawn under.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from sysdpo_lab import atomic, errors
from sysdpo_lab.components import CausalLM
from sysdpo_lab.components.base import Batch
from sysdpo_lab.components.completion import Completion
from sysdpo_lab.preferences import Pair, Pairs
from sysdpo_lab.system import CompoundSystem
from sysdpo_lab.worlds import faces
from sysdpo_lab.worlds.faces import Request, Verdict

BINS = 10  # of the score histogram, over [-1.5, 1]
LOWEST, HIGHEST = -1.5, 1.0


@dataclass(frozen=True)
class Answer:
    """One answer to a request: captions and the pictures that were painted of them.

    Args:
        x: the request's words.
        style: prompting style under which the captions were drawn.
        captions: as generated.
        images: (n, 3, 24, 24), 8 bits a colour; n = 0 where the captions do not parse.
        verdict: the judge's.
        score: what preferences are made of, see `score`.
    """

    x: str
    style: str
    captions: Completion
    images: UInt8[Tensor, "n 3 H W"]
    verdict: Verdict
    score: float

    @property
    def usable(self) -> bool:
        """Whether it can stand in a pair: both sides need the asked number of pictures, to share noise."""
        return self.verdict.validity == 1.0 and not self.captions.truncated


@dataclass(frozen=True)
class Candidates:
    """All pairs of usable answers to one request that are no ties, as (winner, loser) places in the list of answers."""

    same: list[tuple[int, int]]
    different: list[tuple[int, int]]
    ties: int


def score(verdict: Verdict, penalty: float) -> float:
    """Preference score - penalty x share of pictures in a wrong colour: all of it is seen in the pictures.

    Args:
        penalty: larger punishes pictures in another colour than the asked one more.

    >>> score(Verdict(0.5, 1.0, 1.0, 1.0, 1.0, colour=0.5), penalty=0.5)
    0.25
    """
    return verdict.preference_score - penalty * (1 - verdict.colour)


def packed(values: Float[Tensor, "n C H W"]) -> Tensor:
    """What is stored of a row of images: pictures as 8 bits a colour, latents (not 3 channels) in half precision."""
    return to_bytes(values) if values.shape[1] == 3 else values.half()


def unpacked(values: Tensor) -> Float[Tensor, "n C H W"]:
    """The inverse of `packed`, up to its rounding."""
    return to_colours(values) if values.dtype == torch.uint8 else values.float()


def to_bytes(pictures: Float[Tensor, "n 3 H W"]) -> UInt8[Tensor, "n 3 H W"]:
    """Colours in [0, 1] as 8 bits."""
    return (pictures.clamp(0, 1) * 255).round().to(torch.uint8)


def to_colours(pictures: UInt8[Tensor, "n 3 H W"]) -> Float[Tensor, "n 3 H W"]:
    """The inverse of `to_bytes`, to 1/255.

    >>> to_colours(to_bytes(torch.full((1, 3, 1, 1), 0.2)))[0, 0, 0, 0]
    tensor(0.2000)
    """
    return pictures.float() / 255


# --- drawing ----------------------------------------------------------------------------------------------------------


@contextmanager
def prompted(component: CausalLM, template: Any) -> Iterator[None]:
    """Inside the block the language model is asked with another template."""
    before, component.template = component.template, template
    try:
        yield
    finally:
        component.template = before


def paint(system: CompoundSystem, captions: Batch, generator: torch.Generator, draws: int = 1) -> list[list[Tensor]]:
    """`draws` rows of pictures for each text of captions: the same generator, the same starting noise."""
    values = system["images"].sample({"captions": captions}, num_samples=draws, generator=generator)
    return [[row] for row in values] if draws == 1 else [list(rows) for rows in values]


def draw_answers(
    system: CompoundSystem,
    requests: Sequence[Request],
    templates: Mapping[str, Any],
    styles: Sequence[str],
    draws: int,
    penalty: float,
    generator: torch.Generator,
    batch: int = 64,
    world: Any = faces,
) -> list[Answer]:
    """Answers of a system to requests, request by request.

    Args:
        templates: {style: template}.
        styles: one text of captions is drawn under each; a style may stand more than once.
        draws: rows of pictures a text; two or more give pairs with the same captions.
        penalty: see `score`.
        batch: requests at a time.
        world: renders requests and judges answers.
    """
    found: list[list[Answer]] = [[] for _ in requests]
    words = [world.render(request) for request in requests]
    for style in styles:
        for start in range(0, len(requests), batch):
            part = range(start, min(start + batch, len(requests)))
            with prompted(system["captions"], templates[style]):
                texts = system["captions"].sample({"x": [words[i] for i in part]}, generator=generator)
            for i, text, rows in zip(part, texts, paint(system, texts, generator, draws)):
                found[i] += [_judged(world, requests[i], words[i], style, text, row, penalty) for row in rows]
    return [answer for answers in found for answer in answers]


def _judged(world: Any, request: Request, x: str, style: str, text: Completion, row: Tensor, penalty: float) -> Answer:
    images = packed(row)
    verdict = world.judge(request, text.text, unpacked(images))  # of what is stored
    return Answer(x, style, text, images, verdict, score(verdict, penalty))


# --- pairs ------------------------------------------------------------------------------------------------------------


def candidates(answers: Sequence[Answer], min_gap: float) -> Candidates:
    """Which pairs of answers, to the same request, can be had.

    Args:
        min_gap: answers whose scores differ by less are a tie; a larger gap gives fewer and clearer pairs.
    """
    same, different, ties = [], [], 0
    places: dict[str, list[int]] = {}
    for place, answer in enumerate(answers):
        if answer.usable:
            places.setdefault(answer.x, []).append(place)
    for i, j in (pair for mine in places.values() for pair in combinations(mine, 2)):
        gap = answers[i].score - answers[j].score
        if abs(gap) < max(min_gap, 1e-9):
            ties += 1
            continue
        alike = answers[i].captions.text == answers[j].captions.text
        (same if alike else different).append((i, j) if gap > 0 else (j, i))
    return Candidates(same, different, ties)


def choose(found: Candidates, number: int, share: float, generator: torch.Generator) -> list[tuple[int, int]]:
    """At most `number` of the pairs, at random, in random order.

    Args:
        share: of pairs with the same captions, in [0, 1]; where there are too few of one kind, fewer pairs are taken in
            all, so that the share is kept.

    >>> found = Candidates(same=[(0, 1)], different=[(0, 2), (1, 2), (0, 3)], ties=0)
    >>> len(choose(found, 10, 0.5, torch.Generator().manual_seed(0)))
    2
    """
    limits = [number]
    limits += [int(len(found.same) / share + 1e-9)] if share > 0 else []
    limits += [int(len(found.different) / (1 - share) + 1e-9)] if share < 1 else []
    total = min(limits)
    alike = round(share * total)
    picked = _some(found.same, alike, generator) + _some(found.different, total - alike, generator)
    return _some(picked, len(picked), generator)


def _some(pairs: Sequence, number: int, generator: torch.Generator) -> list:
    order = torch.randperm(len(pairs), generator=generator)[:number].tolist()
    return [pairs[place] for place in order]


def as_pairs(answers: Sequence[Answer], chosen: Iterable[tuple[int, int]], source: str = "") -> Pairs:
    """Pairs of whole traces, as SysDPO-Direct takes them (E6).

    Raises:
        EmptyPairsError: there are none.
    """
    colours: dict[int, Tensor] = {}

    def trace(place: int) -> dict[str, Any]:
        answer = answers[place]
        images = colours.setdefault(place, unpacked(answer.images))
        return {"x": answer.x, "captions": answer.captions, "images": images}

    rows = [
        Pair({"x": answers[best].x}, trace(best), trace(worst), {"gap": answers[best].score - answers[worst].score})
        for best, worst in chosen
    ]
    if not rows:
        raise errors.EmptyPairsError(
            f"{source or 'preference data'}: no two answers to one request differ by min_gap; lower min_gap, or draw more"
        )
    return Pairs(rows, source)


# --- files ------------------------------------------------------------------------------------------------------------


def save_answers(folder: Path, answers: Sequence[Answer]) -> None:
    """Write the answers: texts and verdicts as answers.jsonl, pictures as pictures.safetensors (written last)."""
    from safetensors.torch import save

    lines = [
        {
            "x": a.x, "style": a.style, "captions": a.captions.text, "token_ids": list(a.captions.token_ids),
            "truncated": a.captions.truncated, "pictures": len(a.images), "score": a.score, **asdict(a.verdict),
        }
        for a in answers
    ]  # fmt: skip
    atomic.write_text(folder / "answers.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    pictures = torch.cat([a.images for a in answers if len(a.images)]).contiguous()
    atomic.write_bytes(folder / "pictures.safetensors", save({"pictures": pictures}))


def load_answers(folder: Path) -> list[Answer]:
    """Read what `save_answers` wrote."""
    from safetensors.torch import load_file

    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    pictures = load_file(folder / "pictures.safetensors")["pictures"]
    answers, start = [], 0
    for line in lines:
        images = pictures[start : start + line["pictures"]]
        start += line["pictures"]
        completion = Completion(line["captions"], tuple(line["token_ids"]), line["truncated"])
        verdict = Verdict(**{name: line[name] for name in Verdict.__dataclass_fields__})
        answers.append(Answer(line["x"], line["style"], completion, images, verdict, line["score"]))
    return answers


# --- card -------------------------------------------------------------------------------------------------------------


def statistics(answers: Sequence[Answer], found: Candidates, chosen: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Counts and shares of preference data, for its card."""
    sides = [(answers[best], answers[worst]) for best, worst in chosen]
    gaps = [best.score - worst.score for best, worst in sides]
    alike = sum(best.captions.text == worst.captions.text for best, worst in sides)
    scores = torch.tensor([answer.score for answer in answers])
    styles = dict.fromkeys(answer.style for answer in answers)
    return {
        "requests": len({answer.x for answer in answers}),
        "answers": len(answers),
        "usable": sum(answer.usable for answer in answers),
        "ties": found.ties,
        "possible pairs, same captions": len(found.same),
        "possible pairs, different captions": len(found.different),
        "pairs": len(chosen),
        "pairs with the same captions": alike,
        "mean score gap": sum(gaps) / max(1, len(gaps)),
        "histogram": torch.histc(scores, BINS, LOWEST, HIGHEST).long().tolist(),
        "styles": {style: _style_means([a for a in answers if a.style == style]) for style in styles},
    }


def _style_means(answers: Sequence[Answer]) -> dict[str, float]:
    names = ("validity", "caption_order", "faithfulness", "order_consistency", "preference_score")
    means = {name: sum(getattr(a.verdict, name) for a in answers) / len(answers) for name in names}
    return {"answers": len(answers), **means}


def card(numbers: Mapping[str, Any], title: str, settings: Mapping[str, Any]) -> str:
    """What a set of preference data is, for people (Markdown)."""
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {value}" for name, value in settings.items()]
    counts = {name: value for name, value in numbers.items() if name not in ("histogram", "styles")}
    lines += [
        f"- {name}: {value:.3f}" if isinstance(value, float) else f"- {name}: {value}" for name, value in counts.items()
    ]
    lines += ["- Licence: Apache-2.0, like the code.", "", "Answers by prompting style:", ""]
    heads = list(next(iter(numbers["styles"].values())))
    lines += [f"| style | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for style, row in numbers["styles"].items():
        lines.append(
            f"| {style} | " + " | ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()) + " |"
        )
    lines += ["", "Scores of all answers (preference score less the colour penalty):", ""]
    width = (HIGHEST - LOWEST) / BINS
    largest = max(1, *numbers["histogram"])
    for place, count in enumerate(numbers["histogram"]):
        low = LOWEST + place * width
        lines.append(f"    {low:+.2f} to {low + width:+.2f}  {count:6d}  {'#' * round(40 * count / largest)}")
    return "\n".join(lines) + "\n"
