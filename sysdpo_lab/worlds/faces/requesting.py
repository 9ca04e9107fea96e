"""What users ask for: a row of pictures in which one or two attributes rise or fall from each picture to the next.

A request is written in one of eight wordings and read back exactly. Splits go by content (family, attributes with their
directions, colour, wording), so a held-out request combines familiar words in a way that training never does.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from sysdpo_lab import errors
from sysdpo_lab.worlds.faces.drawing import ATTRIBUTES, COLOURS, FAMILIES
from sysdpo_lab.worlds.faces.language import PLACES, Caption

NUMBERS = {3: "three", 4: "four"}
DIRECTIONS = ("more", "less")
SPLITS = ("train", "validation", "heldout")
PLURALS = {"face": "faces", "landscape": "landscapes"}
COMPARATIVES = {
    "happy": "happier", "angry": "angrier", "bright": "brighter", "large": "larger", "blushing": "more blushing",
    "old": "older", "sunny": "sunnier", "cloudy": "cloudier", "dark": "darker", "wooded": "more wooded",
    "flooded": "more flooded",
}  # fmt: skip
# {many} "three faces", {one} "face", {place} "on a blue background", {change} "happier", {start} and {end} "least happy"
WORDINGS = (
    "{many} {place}, each {change} than the last",
    "draw {many} that get {change}, {place}",
    "a row of {many} {place}, from the {start} to the {end}",
    "{many}, {change} from step to step, {place}",
    "show the same {one} {place} in {number} steps, {change} each time",
    "{many} {place}, please, the {start} first and the {end} last",
    "i want {many} {place} that become {change}",
    "start with the {start} of {many} {place} and end with the {end}",
)
FOUR_SHARE, TWO_SHARE, FACE_SHARE = 0.2, 0.12, 0.7


@dataclass(frozen=True)
class Request:
    """A row of pictures to draw.

    Args:
        family: "face" or "landscape".
        asks: (attribute, "more" or "less"), one or two, of different attributes.
        colour: of the background or the house, the same in all pictures.
        number: of pictures, 3 or 4.
        wording: how it is worded, 0 to 7.

    >>> render(Request("face", (("happy", "more"),), "blue"))
    'three faces on a blue background, each happier than the last'
    """

    family: str
    asks: tuple[tuple[str, str], ...]
    colour: str
    number: int = 3
    wording: int = 0

    def __post_init__(self):
        errors.check_option("family", self.family, FAMILIES)
        errors.check_option("colour", self.colour, COLOURS)
        errors.check_option("number", self.number, tuple(NUMBERS))
        errors.check_option("wording", self.wording, tuple(range(len(WORDINGS))))
        names = self.attributes
        if not 1 <= len(set(names)) == len(names) <= 2:
            raise errors.UnknownOptionError(f"a request asks for one or two different attributes, found {names}")
        for attribute, direction in self.asks:
            errors.check_option("attribute", attribute, ATTRIBUTES[self.family])
            errors.check_option("direction", direction, DIRECTIONS)

    @property
    def attributes(self) -> tuple[str, ...]:
        """The names of the asked attributes."""
        return tuple(attribute for attribute, _ in self.asks)


# --- wording ----------------------------------------------------------------------------------------------------------


def _change(attribute: str, direction: str) -> str:
    return COMPARATIVES[attribute] if direction == "more" else f"less {attribute}"


def _extreme(attribute: str, most: bool) -> str:
    return f"{'most' if most else 'least'} {attribute}"


def render(request: Request) -> str:
    """The user's words.

    >>> render(Request("landscape", (("dark", "less"), ("wooded", "more")), "red", 4, 2))
    'a row of four landscapes with a red house, from the most dark and least wooded to the least dark and most wooded'
    """
    asks = request.asks
    return WORDINGS[request.wording].format(
        many=f"{NUMBERS[request.number]} {PLURALS[request.family]}",
        number=NUMBERS[request.number],
        one=request.family,
        place=PLACES[request.family].format(request.colour),
        change=" and ".join(_change(*ask) for ask in asks),
        start=" and ".join(_extreme(attribute, direction == "less") for attribute, direction in asks),
        end=" and ".join(_extreme(attribute, direction == "more") for attribute, direction in asks),
    )


@cache
def _patterns() -> list[tuple[re.Pattern, str, int]]:
    """A pattern for each wording and family."""
    colours, numbers = "|".join(COLOURS), "|".join(NUMBERS.values())
    found = []
    for wording, text in enumerate(WORDINGS):
        for family in FAMILIES:
            fields = {
                "many": rf"(?P<number>{numbers}) {PLURALS[family]}", "number": rf"(?P<number>{numbers})", "one": family,
                "place": PLACES[family].format(rf"(?P<colour>{colours})"), "change": r"(?P<change>[a-z ]+?)",
                "start": r"(?P<start>[a-z ]+?)", "end": r"(?P<end>[a-z ]+?)",
            }  # fmt: skip
            found.append((re.compile(text.format(**fields)), family, wording))
    return found


@cache
def _meanings(family: str) -> dict[str, tuple[str, str]]:
    """What each wording of a change, or of the end of a row, asks for."""
    asks = [(attribute, direction) for attribute in ATTRIBUTES[family] for direction in DIRECTIONS]
    return {_change(*ask): ask for ask in asks} | {_extreme(a, d == "more"): (a, d) for a, d in asks}


def parse_request(text: str) -> Request:
    """The request that `render` wrote.

    Raises:
        RecordFormatError: the text is none of a request's wordings.

    >>> parse_request("draw three faces that get older and less happy, on a red background").asks
    (('old', 'more'), ('happy', 'less'))
    """
    plain = " ".join(str(text).lower().split()).rstrip(".")
    for pattern, family, wording in _patterns():
        if found := pattern.fullmatch(plain):
            groups = found.groupdict()
            phrases = (groups.get("change") or groups["end"]).split(" and ")
            if all(phrase in _meanings(family) for phrase in phrases):
                asks = tuple(_meanings(family)[phrase] for phrase in phrases)
                number = {word: n for n, word in NUMBERS.items()}[groups["number"]]
                return Request(family, asks, groups["colour"], number, wording)
    raise errors.RecordFormatError(f"not a request: {str(text)[:100]!r}; expected, say, {render(EXAMPLE)!r}")


EXAMPLE = Request("face", (("happy", "more"),), "blue")


# --- drawing requests -------------------------------------------------------------------------------------------------


def split_of(request: Request) -> str:
    """The split of a request, whatever its number of pictures: 70 % train, 10 % validation, 20 % held out."""
    key = f"{request.family} {sorted(request.asks)} {request.colour} {request.wording}"
    bucket = hashlib.sha256(key.encode()).digest()[0] % 10
    return "train" if bucket < 7 else "validation" if bucket == 7 else "heldout"


def requests(
    generator: torch.Generator, n: int, split: str | None = None, family: str | None = None, two: bool | None = None
) -> list[Request]:
    """n different requests.

    Args:
        split: "train", "validation" or "heldout"; None: any.
        family: only this one; None: mostly faces.
        two: True asks for two attributes in each, False for one; None: one in eight.

    >>> [render(r) for r in requests(torch.Generator().manual_seed(0), 2, "train")]
    ['...', '...']
    """
    errors.check_option("split", split, (None, *SPLITS))
    errors.check_option("family", family, (None, *FAMILIES))
    found: dict[Request, None] = {}
    while len(found) < n:
        request = _draw_request(generator, family, two)
        if split is None or split_of(request) == split:
            found.setdefault(request)
    return list(found)


def _draw_request(generator: torch.Generator, family: str | None, two: bool | None) -> Request:
    four, double, face = (
        torch.rand(3, generator=generator) < torch.tensor([FOUR_SHARE, TWO_SHARE, FACE_SHARE])
    ).tolist()
    family = family or ("face" if face else "landscape")
    names = ATTRIBUTES[family]
    order = torch.randperm(len(names), generator=generator)[: 2 if (double if two is None else two) else 1]
    asks = tuple((names[int(a)], choice(DIRECTIONS, generator)) for a in order)
    return Request(family, asks, choice(COLOURS, generator), 4 if four else 3, choice(range(len(WORDINGS)), generator))


def choice(options: Sequence, generator: torch.Generator):
    """One of the options, each equally likely."""
    return options[int(torch.randint(len(options), (1,), generator=generator))]


def captions_of(request: Request, degrees: Sequence[Sequence[str]]) -> list[Caption]:
    """Captions for a request from degree words: one sequence of words a picture, one word an asked attribute.

    >>> print(*captions_of(EXAMPLE, [["not"], ["fairly"], ["extremely"]]), sep="; ")
    a not happy face on a blue background; a fairly happy face on a blue background; an extremely happy face on a blue background
    """
    return [
        Caption(request.family, tuple(zip(request.attributes, words, strict=True)), request.colour) for words in degrees
    ]


ORACLE_DEGREES = {3: ("not", "fairly", "extremely"), 4: ("not", "slightly", "quite", "extremely")}


def oracle_captions(request: Request) -> list[Caption]:
    """The captions that spread a request's attributes evenly in the asked direction: what a perfect writer writes."""
    rising = ORACLE_DEGREES[request.number]
    columns = [rising if direction == "more" else rising[::-1] for _, direction in request.asks]
    return captions_of(request, list(zip(*columns)))
