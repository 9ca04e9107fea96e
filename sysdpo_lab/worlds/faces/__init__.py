"""The faces world: requests for rows of pictures, captions, drawn pictures, and a judge that measures their pixels.

x (a user's request) -> captions (a text) -> images (a row of 24 x 24 pictures). `drawing` makes pictures with known
attributes, `language` writes and reads captions, `requesting` what users ask, `measuring` finds the attributes in pixels,
`scoring` judges a whole answer. The landscapes go through the same code, so that nothing is tuned to faces.
"""

from sysdpo_lab.worlds.faces.drawing import ATTRIBUTES, COLOURS, FAMILIES, SIZE, draw
from sysdpo_lab.worlds.faces.language import (
    DEGREES,
    Caption,
    heldout_captions,
    join_captions,
    parse_answer,
    parse_caption,
    split_captions,
)
from sysdpo_lab.worlds.faces.measuring import accuracy, correlation, measure, measured_colour
from sysdpo_lab.worlds.faces.requesting import (
    SPLITS,
    Request,
    captions_of,
    oracle_captions,
    parse_request,
    render,
    requests,
    split_of,
)
from sysdpo_lab.worlds.faces.scoring import (
    Verdict,
    attribute_scores,
    caption_order,
    faithfulness,
    judge,
    order_consistency,
    oriented,
    preference_score,
    validity,
)

__all__ = [
    "ATTRIBUTES", "COLOURS", "DEGREES", "FAMILIES", "SIZE", "SPLITS", "Caption", "Request", "Verdict", "accuracy",
    "attribute_scores", "caption_order", "captions_of", "correlation", "draw", "faithfulness", "heldout_captions",
    "join_captions", "judge", "measure", "measured_colour", "oracle_captions", "order_consistency", "oriented",
    "parse_answer", "parse_caption", "parse_request", "preference_score", "render", "requests", "split_captions",
    "split_of", "validity",
]  # fmt: skip
