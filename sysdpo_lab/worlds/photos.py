"""Photographs in the place of drawn faces: requests for rows of pictures, prompts for a chat model, a judge through CLIP.

For Stable Diffusion and a large language model. `Photos` has what `run faces` asks of a world (the module `worlds.faces` is
the other one): requests, render, judge, oracle_captions, join_captions, parse_answer. Pictures travel as latents of the
diffusion model's VAE, a 48th of the pixels' numbers; the judge decodes them. The paper's own requests and attribute
scorer are not available to us.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.worlds.clip_scorer import ClipScorer, Scorer
from sysdpo_lab.worlds.faces import scoring
from sysdpo_lab.worlds.faces.requesting import DIRECTIONS, NUMBERS, choice, split_of
from sysdpo_lab.worlds.faces.scoring import INVALID_SCORE, Verdict

# {family: {attribute: (more, least, most)}}: the comparative, and the two texts that CLIP compares
ATTRIBUTES = {
    "portrait": {
        "happy": ("happier", "a photo of a sad person", "a photo of a happy person"),
        "angry": ("angrier", "a photo of a calm person", "a photo of an angry person"),
        "old": ("older", "a photo of a young person", "a photo of an old person"),
        "bright": ("brighter", "a dark photo", "a bright photo"),
    },
    "landscape": {
        "sunny": ("sunnier", "a photo on an overcast day", "a photo on a sunny day"),
        "foggy": ("foggier", "a photo with clear air", "a photo in thick fog"),
        "snowy": ("snowier", "a photo without snow", "a photo with deep snow"),
        "lush": ("lusher", "a photo of bare ground", "a photo of lush vegetation"),
        "dark": ("darker", "a photo in daylight", "a photo at night"),
        "stormy": ("stormier", "a photo of calm weather", "a photo of a storm"),
    },
}
SUBJECTS = {
    "portrait": ("a woman", "a man", "a child", "a grandmother", "a sailor", "a nurse", "a farmer", "a student"),
    "landscape": (
        "a mountain lake", "a village street", "a forest path", "a harbour", "a desert road", "a city park", "a river bridge",
        "a lighthouse",
    ),
}  # fmt: skip
WORDINGS = (
    "{many} of {subject}, each {change} than the last",
    "draw {many} of {subject} that get {change}",
    "a row of {many} of {subject}, {change} from step to step",
    "show {subject} in {number} steps, {change} each time",
    "i want {many} of {subject} that become {change}",
    "start with the {start} of {many} of {subject} and end with the {end}",
)
TASK = (
    "You write captions for an image generator that draws each picture on its own. Answer the request with exactly one line a "
    "picture: a complete caption, in the order of the pictures, and nothing else. Say in each caption how strong the asked "
    "quality is, and change nothing else."
)
STYLES = {
    "plain": "",
    "careful": " Make sure that the asked quality clearly increases or decreases from line to line as requested.",
    "creative": " Be vivid and unusual in your choice of words.",
    "bold": " Use strong contrasts: the first and the last line should be extremes.",
}
DEGREES = {3: ("not at all", "moderately", "extremely"), 4: ("not at all", "slightly", "very", "extremely")}
TWO_SHARE, FOUR_SHARE = 0.2, 0.3


@dataclass(frozen=True)
class Request:
    """A row of photographs to make.

    Args:
        family: "portrait" or "landscape".
        asks: (attribute, "more" or "less"), one or two, of different attributes.
        colour: the subject, the same in all pictures; named as in the drawn world, whose split is by these fields.
        number: of pictures, 3 or 4.
        wording: 0 to 5.
    """

    family: str
    asks: tuple[tuple[str, str], ...]
    colour: str
    number: int = 3
    wording: int = 0

    @property
    def attributes(self) -> tuple[str, ...]:
        """The names of the asked attributes."""
        return tuple(attribute for attribute, _ in self.asks)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(least, most) text of each asked attribute."""
        return [ATTRIBUTES[self.family][attribute][1:] for attribute in self.attributes]


def render(request: Request) -> str:
    """The user's words.

    >>> render(Request("portrait", (("happy", "more"),), "a man"))
    'three portraits of a man, each happier than the last'
    """
    names = {a: more for a, (more, _, _) in ATTRIBUTES[request.family].items()}
    change = [names[a] if d == "more" else f"less {a}" for a, d in request.asks]
    ends = [(f"least {a}", f"most {a}") if d == "more" else (f"most {a}", f"least {a}") for a, d in request.asks]
    number = NUMBERS[request.number]
    return WORDINGS[request.wording].format(
        many=f"{number} {request.family}s", number=number, subject=request.colour, change=" and ".join(change),
        start=" and ".join(start for start, _ in ends), end=" and ".join(end for _, end in ends),
    )  # fmt: skip


def requests(generator: torch.Generator, n: int, split: str | None = None) -> list[Request]:
    """n different requests of a split ("train", "validation", "heldout"; None: any).

    >>> len(requests(torch.Generator().manual_seed(0), 5, "train"))
    5
    """
    found: dict[Request, None] = {}
    while len(found) < n:
        request = _draw(generator)
        if split is None or split_of(request) == split:
            found.setdefault(request)
    return list(found)


def _draw(generator: torch.Generator) -> Request:
    two, four = (torch.rand(2, generator=generator) < torch.tensor([TWO_SHARE, FOUR_SHARE])).tolist()
    family = choice(tuple(ATTRIBUTES), generator)
    names = list(ATTRIBUTES[family])
    order = torch.randperm(len(names), generator=generator)[: 2 if two else 1].tolist()
    asks = tuple((names[place], choice(DIRECTIONS, generator)) for place in order)
    subject, wording = choice(SUBJECTS[family], generator), choice(range(len(WORDINGS)), generator)
    return Request(family, asks, subject, 4 if four else 3, wording)


# --- captions ---------------------------------------------------------------------------------------------------------


def plain(x: str) -> list[dict[str, str]]:
    """The system's own prompt, on which all training is conditioned.

    >>> [message["role"] for message in plain("three portraits of a man, each happier than the last")]
    ['system', 'user']
    """
    return _chat(x, "plain")


def careful(x: str) -> list[dict[str, str]]:
    """The prompt that asks for the order once more."""
    return _chat(x, "careful")


def creative(x: str) -> list[dict[str, str]]:
    """The prompt that asks for unusual words."""
    return _chat(x, "creative")


def bold(x: str) -> list[dict[str, str]]:
    """The prompt that asks for extremes."""
    return _chat(x, "bold")


def _chat(x: str, style: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": TASK + STYLES[style]}, {"role": "user", "content": x}]


TEMPLATES = {"plain": plain, "careful": careful, "creative": creative, "bold": bold}


def parse_answer(answer: object) -> list[str] | None:
    """The captions of an answer, one a line, without numbers or bullets; None where there is none.

    >>> parse_answer("1. A man, not happy.\\n2) A happy man.\\n\\n- A very happy man.")
    ['A man, not happy.', 'A happy man.', 'A very happy man.']
    """
    lines = [re.sub(r"^\s*(?:\d+\s*[.):]|[-*•])\s*", "", line).strip() for line in str(answer).splitlines()]
    found = [line.strip('"') for line in lines if line]
    return found or None


def join_captions(captions: Sequence[str]) -> str:
    """An answer that `parse_answer` takes apart."""
    return "\n".join(captions)


def oracle_captions(request: Request) -> list[str]:
    """Plain captions that say the asked degrees in the asked order.

    >>> oracle_captions(Request("portrait", (("happy", "less"),), "a man"))[0]
    'a portrait photo of a man, extremely happy'
    """
    rising = DEGREES[request.number]
    kind = "a portrait photo of" if request.family == "portrait" else "a landscape photo of"
    columns = [[f"{word} {a}" for word in (rising if d == "more" else rising[::-1])] for a, d in request.asks]
    return [f"{kind} {request.colour}, {' and '.join(words)}" for words in zip(*columns)]


# --- the world --------------------------------------------------------------------------------------------------------


class Photos:
    """The world of a run: requests, prompts and a judge.

    Args:
        scorer: levels of attributes in pictures, see `clip_scorer`.
        decode: latents (n, C, h, w) -> pictures (n, 3, H, W) in [0, 1]; None: the values are pictures already.
    """

    requests, render, parse_answer = staticmethod(requests), staticmethod(render), staticmethod(parse_answer)
    join_captions, oracle_captions = staticmethod(join_captions), staticmethod(oracle_captions)
    TEMPLATES = TEMPLATES

    def __init__(self, scorer: Scorer, decode: Callable[[Tensor], Tensor] | None = None):
        self.scorer, self.decode = scorer, decode or (lambda values: values)

    def pictures(self, values: Float[Tensor, "n C h w"]) -> Float[Tensor, "n 3 H W"]:
        """What people see of an answer's values."""
        return self.decode(values).clamp(0, 1)

    def judge(self, request: Request, answer: object, values: Float[Tensor, "n C h w"] | None) -> Verdict:
        """Score one answer; a row that does not parse, or of another number, has -1 and 0 (E10).

        `faithfulness` is the share of captions that name the subject; `caption_order` is the order of the same scorer's
        levels of the captions' texts (0 for a scorer that reads pictures only); `colour` has no meaning here and is 1.
        """
        captions = parse_answer(answer) or []
        subject = request.colour.split()[-1]
        named = sum(subject in caption.lower() for caption in captions)
        faithful = min(named, request.number) / max(len(captions), request.number)
        if len(captions) != request.number or values is None or len(values) != request.number:
            return Verdict(INVALID_SCORE, 0.0, 0.0, faithful, 0.0, 0.0)
        directions = [direction for _, direction in request.asks]
        levels = scoring.oriented(self._checked(self.scorer(self.pictures(values), request.pairs), request), directions)
        score, order = scoring.preference_score(levels), scoring.order_consistency(levels)
        return Verdict(score, order, self._caption_order(request, captions, directions), faithful, 1.0, 1.0)

    def _caption_order(self, request: Request, captions: list[str], directions: list[str]) -> float:
        if not isinstance(self.scorer, ClipScorer):
            return 0.0
        return scoring.order_consistency(scoring.oriented(self.scorer.of_texts(captions, request.pairs), directions))

    def _checked(self, levels: Any, request: Request) -> Float[Tensor, "n A"]:
        wanted = (request.number, len(request.pairs))
        if not isinstance(levels, Tensor) or tuple(levels.shape) != wanted or not bool(torch.isfinite(levels).all()):
            found = tuple(levels.shape) if isinstance(levels, Tensor) else type(levels).__name__
            raise errors.NonFiniteError(
                f"the attribute scorer must return finite levels of shape {wanted}, found {found}"
            )
        return levels.float()


def size_of_space() -> int:
    """How many different requests there are.

    >>> size_of_space() > 10_000
    True
    """
    total = 0
    for family, attributes in ATTRIBUTES.items():
        a = len(attributes)
        total += len(SUBJECTS[family]) * len(WORDINGS) * len(NUMBERS) * (2 * a + 4 * a * (a - 1))
    return total
