"""Captions: a small grammar with eight degree words, written and read back exactly.

`a very happy face on a blue background`, `an extremely dark and barely wooded landscape with a red house`.
"""

import re
from dataclasses import dataclass

from sysdpo_lab import errors
from sysdpo_lab.worlds.faces.drawing import ATTRIBUTES, COLOURS, FAMILIES

DEGREES = {
    "not": 0.05, "barely": 0.18, "slightly": 0.30, "somewhat": 0.42,
    "fairly": 0.54, "quite": 0.66, "very": 0.80, "extremely": 0.94,
}  # fmt: skip
PLACES = {"face": "on a {} background", "landscape": "with a {} house"}
SEPARATOR = ";"
MAX_NAMED = 2


@dataclass(frozen=True)
class Caption:
    """What one picture should show.

    Args:
        family: "face" or "landscape".
        degrees: (attribute, degree word), one or two, of different attributes.
        colour: of the background or the house.

    >>> str(Caption("face", (("happy", "very"),), "blue"))
    'a very happy face on a blue background'
    """

    family: str
    degrees: tuple[tuple[str, str], ...]
    colour: str

    def __post_init__(self):
        errors.check_option("family", self.family, FAMILIES)
        errors.check_option("colour", self.colour, COLOURS)
        names = [attribute for attribute, _ in self.degrees]
        if not 1 <= len(set(names)) == len(names) <= MAX_NAMED:
            raise errors.UnknownOptionError(f"a caption names one or two different attributes, found {names}")
        for attribute, degree in self.degrees:
            errors.check_option("attribute", attribute, ATTRIBUTES[self.family])
            errors.check_option("degree", degree, tuple(DEGREES))

    def __str__(self) -> str:
        named = " and ".join(f"{degree} {attribute}" for attribute, degree in self.degrees)
        article = "an" if named[0] in "aeiou" else "a"
        return f"{article} {named} {self.family} {PLACES[self.family].format(self.colour)}"

    @property
    def levels(self) -> dict[str, float]:
        """The level in [0, 1] that each named attribute is asked to have."""
        return {attribute: DEGREES[degree] for attribute, degree in self.degrees}


def _pattern(family: str) -> re.Pattern:
    degrees, attributes, colours = "|".join(DEGREES), "|".join(ATTRIBUTES[family]), "|".join(COLOURS)
    phrase = rf"({degrees}) ({attributes})"
    return re.compile(rf"an? {phrase}(?: and {phrase})? {family} {PLACES[family].format(f'({colours})')}\.?")


_PATTERNS = {family: _pattern(family) for family in FAMILIES}


def parse_caption(text: str) -> Caption | None:
    """The caption that a text writes, or None when it is not in the grammar; case and extra spaces do not matter.

    >>> parse_caption("A very happy face on a blue background.")
    Caption(family='face', degrees=(('happy', 'very'),), colour='blue')
    >>> parse_caption("a happy face") is None
    True
    """
    text = " ".join(text.lower().split())
    for family, pattern in _PATTERNS.items():
        if found := pattern.fullmatch(text):
            degree, attribute, second_degree, second, colour = found.groups()
            degrees = ((attribute, degree), *([(second, second_degree)] if second else []))
            return None if attribute == second else Caption(family, degrees, colour)
    return None


def split_captions(answer: object) -> list[str]:
    """The captions of an answer, one a picture, in the grammar or not; an empty answer has none.

    >>> split_captions("a very old face on a red background; a cat")
    ['a very old face on a red background', 'a cat']
    """
    return [part.strip() for part in str(answer).split(SEPARATOR) if part.strip()]


def join_captions(captions: list[Caption] | list[str]) -> str:
    """An answer that `split_captions` takes apart."""
    return f"{SEPARATOR} ".join(map(str, captions))


def parse_answer(answer: object) -> list[Caption] | None:
    """All captions of an answer, or None when one of them is not in the grammar, or there is none."""
    found = [parse_caption(text) for text in split_captions(answer)]
    return found if found and None not in found else None


def words() -> list[str]:
    """Every word of the captions, each once, in a fixed order."""
    places = " ".join(place.format("") for place in PLACES.values()).split()
    attributes = [attribute for family in FAMILIES for attribute in ATTRIBUTES[family]]
    return list(dict.fromkeys(["a", "an", "and", *DEGREES, *attributes, *FAMILIES, *places, *COLOURS]))


def is_heldout(family: str, attribute: str, degree: str, colour: str) -> bool:
    """Whether a combination never occurs in the training captions of the diffusion model: one degree of eight, a colour.

    >>> is_heldout("face", "happy", "very", "blue")
    False
    """
    place = list(DEGREES).index(degree) + 3 * COLOURS.index(colour) + ATTRIBUTES[family].index(attribute)
    return place % len(DEGREES) == 0


def heldout_captions(family: str) -> list[Caption]:
    """The captions with one attribute that the diffusion model is not trained on."""
    return [
        Caption(family, ((attribute, degree),), colour)
        for attribute in ATTRIBUTES[family]
        for degree in DEGREES
        for colour in COLOURS
        if is_heldout(family, attribute, degree, colour)
    ]
