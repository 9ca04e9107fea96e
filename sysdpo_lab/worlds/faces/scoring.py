"""Scores of an answer to a request: do the pictures, and the captions, rise in the asked order?

Order consistency and preference score follow the idea of the paper's evaluation; its own formulas for the two are not
available to us, so these definitions are ours. A row that does not parse, or has the wrong number of pictures, stays in
every mean: order consistency 0, preference score -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.worlds.faces import language, measuring
from sysdpo_lab.worlds.faces.drawing import ATTRIBUTES
from sysdpo_lab.worlds.faces.requesting import Request

INVALID_SCORE = -1.0


# --- rows of numbers --------------------------------------------------------------------------------------------------


def order_consistency(scores: Float[Tensor, "n A"]) -> float:
    """1 when every column strictly rises from the first to the last row, else 0.

    >>> order_consistency(torch.tensor([[0.1], [0.5], [0.9]])), order_consistency(torch.tensor([[0.1], [0.1], [0.9]]))
    (1.0, 0.0)
    """
    return float(bool((scores.diff(dim=0) > 0).all()))


def preference_score(scores: Float[Tensor, "n A"]) -> float:
    """(a_n - a_1) - mean over the n rows of |a_i - the straight line from a_1 to a_n at i|; mean over columns.

    It is 1 for an even rise from 0 to 1, 0 for equal pictures, -1 for an even fall.

    >>> round(preference_score(torch.tensor([[0.0], [0.8], [1.0]])), 3)  # 1 - (0 + 0.3 + 0) / 3
    0.9
    """
    line = torch.linspace(0, 1, len(scores), dtype=scores.dtype)[:, None]
    straight = scores[:1] + line * (scores[-1:] - scores[:1])
    return float((scores[-1] - scores[0] - (scores - straight).abs().mean(0)).mean())


def oriented(values: Float[Tensor, "n A"], directions: Sequence[str]) -> Float[Tensor, "n A"]:
    """Levels so that the asked direction increases: 1 - a where "less" is asked."""
    less = torch.tensor([direction == "less" for direction in directions])
    return torch.where(less, 1 - values, values)


def attribute_scores(request: Request, pictures: Float[Tensor, "n 3 24 24"]) -> Float[Tensor, "n A"]:
    """The asked attributes measured from the pixels, oriented so that the asked direction increases."""
    names = ATTRIBUTES[request.family]
    columns = [names.index(attribute) for attribute in request.attributes]
    measured = measuring.measure(pictures, request.family)[:, columns]
    return oriented(measured, [direction for _, direction in request.asks])


# --- captions ---------------------------------------------------------------------------------------------------------


def validity(request: Request, answer: object) -> float:
    """1 when the answer is as many captions of the grammar as the request has pictures, else 0."""
    captions = language.parse_answer(answer)
    return float(captions is not None and len(captions) == request.number)


def caption_order(request: Request, answer: object) -> float:
    """1 when the captions' degree words strictly rise in the asked direction for every asked attribute, else 0."""
    if not validity(request, answer):
        return 0.0
    rows = [caption.levels for caption in language.parse_answer(answer)]
    if any(attribute not in row for row in rows for attribute in request.attributes):
        return 0.0
    levels = torch.tensor([[row[attribute] for attribute in request.attributes] for row in rows])
    return order_consistency(oriented(levels, [direction for _, direction in request.asks]))


def faithfulness(request: Request, answer: object) -> float:
    """Share of captions with the asked family, colour and attributes, no other; too many or too few captions count.

    >>> faithfulness(Request("face", (("old", "more"),), "red"), "a very old face on a red background; a cat")
    0.333...
    """
    texts = language.split_captions(answer)
    found = [language.parse_caption(text) for text in texts]
    right = sum(
        c is not None
        and (c.family, c.colour) == (request.family, request.colour)
        and set(c.levels) == set(request.attributes)
        for c in found
    )
    return min(right, request.number) / max(len(texts), request.number)


# --- the judge of a whole answer --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What the judge says about one answer to a request.

    Args:
        preference_score: in [-1, 1]; what preferences are made of.
        order_consistency: 1 when the measured attributes strictly rise in the asked order.
        caption_order, faithfulness, validity: of the captions alone.
        colour: share of pictures that show the asked colour.
    """

    preference_score: float
    order_consistency: float
    caption_order: float
    faithfulness: float
    validity: float
    colour: float


def judge(request: Request, answer: object, pictures: Float[Tensor, "n 3 24 24"] | None) -> Verdict:
    """Score one answer: captions as text, pictures as RGB in [0, 1] (None or of another number when it has no row).

    >>> from sysdpo_lab.worlds.faces.requesting import EXAMPLE
    >>> judge(EXAMPLE, "three cats", None)
    Verdict(preference_score=-1.0, order_consistency=0.0, caption_order=0.0, faithfulness=0.0, validity=0.0, colour=0.0)
    """
    valid = validity(request, answer)
    texts = caption_order(request, answer), faithfulness(request, answer), valid
    if not valid or pictures is None or len(pictures) != request.number:
        return Verdict(INVALID_SCORE, 0.0, *texts, 0.0)
    scores = attribute_scores(request, pictures)
    if not scores.isfinite().all():
        raise errors.NonFiniteError(f"the pictures for {request} hold a NaN or an infinity")
    found = measuring.measured_colour(pictures, request.family)
    wanted = language.COLOURS.index(request.colour)
    return Verdict(preference_score(scores), order_consistency(scores), *texts, float((found == wanted).float().mean()))
