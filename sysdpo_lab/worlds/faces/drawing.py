"""Drawn pictures whose attributes are known exactly: cartoon faces and small landscapes, 24 x 24 pixels, RGB in [0, 1].

A picture is a smooth function of its attribute levels in [0, 1], a colour, and what no caption speaks of (nuisance).
All shapes are signed distances turned into soft coverage, so a whole batch is drawn at once.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sysdpo_lab import errors

SIZE = 24
COLOURS = ("red", "green", "blue", "yellow", "purple")
BASE_COLOURS = ((1.0, 0.15, 0.15), (0.2, 0.85, 0.3), (0.2, 0.45, 1.0), (1.0, 0.9, 0.1), (0.75, 0.3, 1.0))
SATURATION = 0.7
DARKEST, LIGHTEST = 0.25, 0.97  # of a face's background
NUISANCES = 4

# Where things are in a face, in pixels from its centre at scale 1 (v points down), and how big.
SMALLEST_RADIUS, LARGEST_RADIUS = 6.4, 10.4
MOUTH_V, MOUTH_HALF_WIDTH, MOUTH_BEND = 3.5, 3.1, 2.3
BROW_U, BROW_V, BROW_HALF_LENGTH, BROW_SLOPE = 2.7, -3.0, 1.6, 0.65
EYE_U, EYE_V, CHEEK_U, CHEEK_V = 2.7, -0.6, 4.4, 1.5
HAIRLINE = -0.62  # in radii

# Where things are in a landscape, in pixels (y points down).
HORIZON, TREE_X, SUN_X, CLOUD_X, CLOUD_Y, HOUSE_X = 15.0, 19.5, 4.5, 14.0, 2.6, 10.5


# --- brushes ----------------------------------------------------------------------------------------------------------


def _grid() -> tuple[Float[Tensor, "1 H W"], Float[Tensor, "1 H W"]]:
    """x and y of the pixels' centres."""
    line = torch.arange(SIZE) + 0.5
    return line.expand(1, SIZE, SIZE), line[:, None].expand(1, SIZE, SIZE)


def _cover(distance: Tensor, softness: float = 0.35) -> Tensor:
    """How much of a pixel a shape covers, from the signed distance to its edge (negative = inside)."""
    return torch.sigmoid(-distance / softness)


def _paint(picture: Float[Tensor, "N 3 H W"], cover: Float[Tensor, "N H W"], colour: Float[Tensor, "N 3"]) -> Tensor:
    return picture + cover[:, None] * (colour[:, :, None, None] - picture)


def _mix(low: tuple, high: tuple, share: Float[Tensor, " N"]) -> Float[Tensor, "N 3"]:
    low, high = torch.tensor(low), torch.tensor(high)
    return low + share[:, None] * (high - low)


def tints(colour: Int[Tensor, " N"]) -> Float[Tensor, "N 3"]:
    """The RGB of the named colours at full lightness.

    >>> tints(torch.tensor([0])).tolist()
    [[1.0, 0.40..., 0.40...]]
    """
    return 1 - SATURATION * (1 - torch.tensor(BASE_COLOURS)[colour])


def _column(values: Float[Tensor, " N"]) -> Float[Tensor, "N 1 1"]:
    return values[:, None, None]


# --- faces ------------------------------------------------------------------------------------------------------------


def face_scale(radius: Tensor) -> Tensor:
    """How much eyes, brows, mouth and cheeks grow with the face: half as much as its radius."""
    return 0.5 + 0.5 * radius / 8.4


def draw_faces(
    levels: Float[Tensor, "N 6"], colour: Int[Tensor, " N"], nuisance: Float[Tensor, "N 4"]
) -> Float[Tensor, "N 3 24 24"]:
    """Cartoon faces on a coloured background.

    Args:
        levels: happy (mouth), angry (brows), bright (background), large (radius), blushing (cheeks), old (grey hair),
            each in [0, 1].
        colour: of the background, an index into COLOURS.
        nuisance: place (two numbers), skin and eyes' height, each in [0, 1].

    >>> one = torch.full((1, 6), 0.5)
    >>> draw_faces(one, torch.tensor([2]), torch.full((1, 4), 0.5)).shape
    torch.Size([1, 3, 24, 24])
    """
    happy, angry, bright, large, blushing, old = levels.unbind(1)
    radius = SMALLEST_RADIUS + (LARGEST_RADIUS - SMALLEST_RADIUS) * large
    x, y = _grid()
    x, y = x - _column(SIZE / 2 + 1.6 * (nuisance[:, 0] - 0.5)), y - _column(SIZE / 2 + 1.6 * (nuisance[:, 1] - 0.5))
    picture = (tints(colour) * (DARKEST + (LIGHTEST - DARKEST) * bright)[:, None])[:, :, None, None]
    picture = picture.expand(-1, 3, SIZE, SIZE)
    distance = torch.hypot(x, y) - _column(radius)
    skin = _mix((0.70, 0.50, 0.36), (0.99, 0.86, 0.74), nuisance[:, 2])
    picture = _paint(picture, _cover(distance), skin)
    hair = _cover(distance - 0.6) * _cover(y - HAIRLINE * _column(radius))
    picture = _paint(picture, hair, _mix((0.26, 0.14, 0.07), (0.93, 0.93, 0.95), old))
    scale = _column(face_scale(radius))
    u, v = x / scale, y / scale
    return _features(picture, u, v, happy, angry, blushing, nuisance[:, 3])


def _features(picture, u, v, happy, angry, blushing, eyes) -> Float[Tensor, "N 3 H W"]:
    """Cheeks, eyes, brows and mouth, in the face's own coordinates."""
    dark, red = torch.tensor([[0.10, 0.07, 0.06]]), torch.tensor([[0.93, 0.22, 0.28]])
    cheeks = torch.hypot(u.abs() - CHEEK_U, v - CHEEK_V) - 1.35
    picture = _paint(picture, _cover(cheeks, 0.45) * _column(0.9 * blushing), red)
    eye = torch.hypot(u.abs() - EYE_U, v - EYE_V - _column(0.5 * (eyes - 0.5))) - 0.75
    picture = _paint(picture, _cover(eye), dark)
    along = (u.abs() - BROW_U).clamp(-BROW_HALF_LENGTH, BROW_HALF_LENGTH)
    brow = torch.hypot(u.abs() - BROW_U - along, v - BROW_V + _column(BROW_SLOPE * (2 * angry - 1)) * along) - 0.5
    picture = _paint(picture, _cover(brow), dark)
    along = u.clamp(-MOUTH_HALF_WIDTH, MOUTH_HALF_WIDTH)
    bend = _column(MOUTH_BEND * (2 * happy - 1))
    mouth = torch.hypot(u - along, v - MOUTH_V - bend * (0.45 - (along / MOUTH_HALF_WIDTH) ** 2)) - 0.55
    return _paint(picture, _cover(mouth), torch.tensor([[0.45, 0.05, 0.08]]))


# --- landscapes -------------------------------------------------------------------------------------------------------


def draw_landscapes(
    levels: Float[Tensor, "N 5"], colour: Int[Tensor, " N"], nuisance: Float[Tensor, "N 4"]
) -> Float[Tensor, "N 3 24 24"]:
    """Landscapes with a coloured house.

    Args:
        levels: sunny (height of the sun), cloudy (size of the cloud), dark (sky), wooded (size of the tree), flooded
            (level of the water), each in [0, 1].
        colour: of the house, an index into COLOURS.
        nuisance: sideways shifts of the sun, of house and cloud, of the tree, and the hue of the ground, in [0, 1].
    """
    sunny, cloudy, dark, wooded, flooded = levels.unbind(1)
    x, y = _grid()
    shift = 1.6 * (nuisance - 0.5)
    picture = _mix((0.62, 0.84, 1.0), (0.08, 0.10, 0.25), dark)[:, :, None, None].expand(-1, 3, SIZE, SIZE)
    sun = torch.hypot(x - _column(SUN_X + shift[:, 0]), y - _column(13.5 - 10.5 * sunny)) - 2.1
    picture = _paint(picture, _cover(sun), torch.tensor([[1.0, 0.82, 0.15]]))
    half = _column(0.6 + 5.4 * cloudy)
    across = x - _column(CLOUD_X + shift[:, 1])
    cloud = torch.hypot((across.abs() - half).clamp(min=0), y - CLOUD_Y) - 1.5
    picture = _paint(picture, _cover(cloud), torch.tensor([[0.96, 0.96, 0.98]]))
    ground = _mix((0.52, 0.62, 0.25), (0.72, 0.66, 0.36), nuisance[:, 3])
    picture = _paint(picture, _cover(HORIZON - y + 0 * picture[:, 0]), ground)
    picture = _house(picture, x - _column(HOUSE_X + shift[:, 1]), y, tints(colour))
    picture = _tree(picture, x - _column(TREE_X + shift[:, 2]), y, _column(wooded))
    water = _cover(_column(23.6 - 6.8 * flooded) - y)
    return _paint(picture, water, torch.tensor([[0.10, 0.38, 0.72]]))


def _house(picture, x, y, colour) -> Float[Tensor, "N 3 H W"]:
    wall = torch.maximum(x.abs() - 2.3, (y - 13.4).abs() - 2.2)
    roof = torch.maximum(x.abs() - 1.1 * (y - 8.0), y - 11.4)
    picture = _paint(picture, _cover(wall), colour)
    return _paint(picture, _cover(roof + 0 * x), torch.tensor([[0.35, 0.22, 0.20]]))


def _tree(picture, x, y, wooded) -> Float[Tensor, "N 3 H W"]:
    crown = 0.9 + 2.6 * wooded  # radius
    trunk = torch.maximum(x.abs() - 0.6, (y - 14.6).abs() - 1.4)
    picture = _paint(picture, _cover(trunk), torch.tensor([[0.36, 0.24, 0.14]]))
    leaves = torch.hypot(x, y - (13.4 - crown)) - crown
    return _paint(picture, _cover(leaves), torch.tensor([[0.05, 0.40, 0.16]]))


# --- by name ----------------------------------------------------------------------------------------------------------

ATTRIBUTES = {
    "face": ("happy", "angry", "bright", "large", "blushing", "old"),
    "landscape": ("sunny", "cloudy", "dark", "wooded", "flooded"),
}
DRAW = {"face": draw_faces, "landscape": draw_landscapes}
FAMILIES = tuple(ATTRIBUTES)


def draw(
    family: str, levels: Float[Tensor, "N A"], colour: Int[Tensor, " N"], generator: torch.Generator
) -> Float[Tensor, "N 3 24 24"]:
    """Pictures of one family with random nuisance.

    >>> draw("landscape", torch.rand(2, 5), torch.tensor([0, 1]), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 24, 24])
    """
    errors.check_option("family", family, FAMILIES)
    return DRAW[family](levels, colour, torch.rand(len(levels), NUISANCES, generator=generator))
