"""The judge: attribute levels measured from the pixels by classical means, without any learned network.

Each attribute has its own instrument (the bend of the mouth is a weighted regression of height on squared distance, the
radius comes from how far the skin reaches, ...). The readings are turned into levels by one quadratic least-squares
calibration on drawn pictures, some of them noisy or blurred; `accuracy` says how far off it is.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.worlds.faces import drawing
from sysdpo_lab.worlds.faces.drawing import ATTRIBUTES, COLOURS, SIZE

CALIBRATION_PICTURES, CALIBRATION_SEED, RIDGE = 6000, 20, 1e-3
BLUR = ((1.0, 2.0, 1.0), (2.0, 4.0, 2.0), (1.0, 2.0, 1.0))

Pictures = Float[Tensor, "N 3 24 24"]
Plane = Float[Tensor, "N 24 24"]


# --- tools ------------------------------------------------------------------------------------------------------------


def _grid() -> tuple[Tensor, Tensor]:
    line = torch.arange(SIZE) + 0.5
    return line.expand(1, SIZE, SIZE), line[:, None].expand(1, SIZE, SIZE)


def _within(values: Tensor, low, high, softness: float = 0.25) -> Tensor:
    """1 inside [low, high], 0 outside, soft at both ends."""
    return torch.sigmoid((values - low) / softness) * torch.sigmoid((high - values) / softness)


def _average(pictures: Pictures, weight: Plane) -> Float[Tensor, "N 3"]:
    weight = weight.expand(len(pictures), SIZE, SIZE)
    return (pictures * weight[:, None]).sum((2, 3)) / weight.sum((1, 2))[:, None].clamp(min=1e-3)


def _share(value: Tensor, start: Tensor, end: Tensor, dim: int = 1) -> Tensor:
    """Where a colour lies between two others: 0 at `start`, 1 at `end`."""
    way = end - start
    return ((value - start) * way).sum(dim) / (way * way).sum(dim).clamp(min=1e-4)


def _moment(weight: Plane, value: Plane) -> Float[Tensor, " N"]:
    return (weight * value).sum((1, 2)) / weight.sum((1, 2)).clamp(min=1e-3)


def _slope(weight: Plane, x: Plane, y: Plane) -> Float[Tensor, " N"]:
    """Weighted least-squares slope of y on x."""
    across = x - _moment(weight, x)[:, None, None]
    spread = (weight * across * across).sum((1, 2))
    return (weight * across * y).sum((1, 2)) / spread.clamp(min=1e-2)


def _row(*colour: float) -> Float[Tensor, "1 3"]:
    return torch.tensor([colour])


# --- instruments: faces -----------------------------------------------------------------------------------------------


def _background(pictures: Pictures) -> Float[Tensor, "N 3"]:
    """Median colour of the corners, where no face reaches."""
    x, y = _grid()
    corners = (torch.hypot(x - SIZE / 2, y - SIZE / 2) > 13)[0]
    return pictures[:, :, corners].median(2).values


def _place(pictures: Pictures, background: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centre and radius of the face, from how far its skin reaches to the left, the right and below."""
    x, y = _grid()
    skin = _average(pictures, _within(x, 10.5, 13.5) * _within(y, 12, 14))
    reach = (_share(pictures, background[:, :, None, None], skin[:, :, None, None])).clamp(0, 1)
    middle = torch.hypot(x - SIZE / 2, y - SIZE / 2) < 5.6
    reach = torch.where(middle.expand_as(reach), torch.ones_like(reach), reach)
    radius = reach[:, 10:14].sum((1, 2)) / 8
    band = _within(y, 9, 18).expand_as(reach) * reach
    centre_x = _moment(band, x.expand_as(reach))
    bottom = SIZE / 2 + reach[:, 12:, 9:15].sum((1, 2)) / 6
    return centre_x, bottom - radius, radius


def face_readings(pictures: Pictures) -> Float[Tensor, "N 12"]:
    """Raw readings of the instruments for faces, before calibration."""
    background = _background(pictures)
    centre_x, centre_y, radius = _place(pictures, background)
    x, y = _grid()
    dx, dy = x - centre_x[:, None, None], y - centre_y[:, None, None]
    scale = drawing.face_scale(radius)[:, None, None]
    u, v = dx / scale, dy / scale
    inside = torch.sigmoid((radius[:, None, None] - 0.8 - torch.hypot(dx, dy)) / 0.25)
    skin = _average(pictures, _within(u.abs(), -1, 1.4) * _within(v, 0.2, 1.6))
    mouth = _mouth(pictures, u, v, inside, skin)
    brows = _brows(pictures, u, v, inside, skin, radius[:, None, None] / scale)
    cheeks = _within(torch.hypot(u.abs() - drawing.CHEEK_U, v - drawing.CHEEK_V), -1, 1.1) * inside
    blush = _share(_average(pictures, cheeks), skin, _row(0.93, 0.22, 0.28))
    hair_window = _within(-torch.hypot(dx, dy), -radius[:, None, None], 0.0)
    hair_window = hair_window * _within(-dy, 0.45 - drawing.HAIRLINE * radius[:, None, None], 99)
    hair = _average(pictures, hair_window)
    old = _share(hair, _row(0.26, 0.14, 0.07), _row(0.93, 0.93, 0.95))
    tint = drawing.tints(_nearest_tint(background))
    bright = (background * tint).sum(1) / (tint * tint).sum(1)
    return torch.stack(
        [*mouth, *brows, bright, radius, centre_y, blush, skin[:, 0], skin[:, 1], old, hair[:, 0] - hair[:, 2]], 1
    )


def _darkness(channel: Plane, skin: Float[Tensor, " N"]) -> Plane:
    return (1 - channel / skin[:, None, None].clamp(min=0.05) - 0.08).clamp(0, 1)


def _mouth(pictures, u, v, inside, skin) -> tuple[Tensor, Tensor]:
    # the red channel, in which blushing cheeks are not dark
    weight = _darkness(pictures[:, 0], skin[:, 0]) * _within(u.abs(), -1, 4.0) * _within(v, 1.5, 6.0) * inside
    square = (u / drawing.MOUTH_HALF_WIDTH) ** 2
    return _slope(weight, square, v), _moment(weight, v)


def _brows(pictures, u, v, inside, skin, edge) -> tuple[Tensor, Tensor]:
    weight = _darkness(pictures.mean(1), skin.mean(1)) * _within(u.abs(), 0.7, 4.7) * inside
    weight = weight * _within(v, (drawing.HAIRLINE * edge + 0.25).clamp(min=-4.7), -1.65, 0.15)
    return _slope(weight, u.abs(), v), _moment(weight, v)


# --- instruments: landscapes ------------------------------------------------------------------------------------------


def landscape_readings(pictures: Pictures) -> Float[Tensor, "N 9"]:
    """Raw readings of the instruments for landscapes, before calibration."""
    x, y = _grid()
    red, green, blue = pictures.unbind(1)
    sky = _average(pictures, _within(x, 9, 15) * _within(y, 5, 8))
    dark = _share(sky, _row(0.62, 0.84, 1.0), _row(0.08, 0.10, 0.25))
    yellow = (torch.minimum(red, green) - blue - 0.08).clamp(0, 1) * _within(x, -1, 7.8) * _within(y, -1, 14.4)
    white = (pictures.min(1).values - sky[:, :1, None]) / (0.96 - sky[:, :1, None]).clamp(min=0.1)
    cloud = (white.clamp(0, 1) * _within(y, -1, 5) * _within(x, 4, 25)).sum((1, 2))
    leaves = (green - torch.maximum(red, blue)).clamp(0, 0.24) * _within(x, 14, 25) * _within(y, 5, 14.6)
    tree = leaves.sum((1, 2))
    water = ((blue - red + 0.3) / 0.92).clamp(0, 1) * _within(y, 15.9, 25)
    sun_y, sun = _moment(yellow, y.expand_as(yellow)), yellow.sum((1, 2))
    tree_y = _moment(leaves + 1e-4, y.expand_as(leaves))
    return torch.stack(
        [sun_y, sun, cloud, dark, tree, tree.clamp(min=0).sqrt(), tree_y, water.sum((1, 2)), sky[:, 0]], 1
    )


READINGS: dict[str, Callable[[Pictures], Float[Tensor, "N K"]]] = {
    "face": face_readings,
    "landscape": landscape_readings,
}


# --- calibration ------------------------------------------------------------------------------------------------------


def disturbed(pictures: Pictures, generator: torch.Generator, noise: float = 0.0, blur: float = 0.0) -> Pictures:
    """Pictures with Gaussian pixel noise and a share of 3 x 3 blur, cut off at 0 and 1."""
    kernel = (torch.tensor(BLUR) / 16).expand(3, 1, 3, 3)
    padded = torch.nn.functional.pad(pictures, (1, 1, 1, 1), mode="replicate")
    blurred = torch.nn.functional.conv2d(padded, kernel, groups=3)
    mixed = pictures + blur * (blurred - pictures)
    return (mixed + noise * torch.randn(pictures.shape, generator=generator)).clamp(0, 1)


def random_pictures(
    family: str, n: int, generator: torch.Generator
) -> tuple[Pictures, Float[Tensor, "N A"], Int[Tensor, " N"]]:
    """n drawn pictures with uniform levels; returns pictures, levels and colours."""
    levels = torch.rand(n, len(ATTRIBUTES[family]), generator=generator)
    colour = torch.randint(len(COLOURS), (n,), generator=generator)
    return drawing.draw(family, levels, colour, generator), levels, colour


@cache
def _calibration(family: str) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and spread of the readings, and the weights of their quadratic terms; fitted once a process (one second)."""
    generator = torch.Generator().manual_seed(CALIBRATION_SEED)
    pictures, levels, _ = random_pictures(family, CALIBRATION_PICTURES, generator)
    third = CALIBRATION_PICTURES // 3
    pictures = torch.cat([
        pictures[:third],
        disturbed(pictures[third : 2 * third], generator, 0.05, 0.3),
        disturbed(pictures[2 * third :], generator, 0.02, 0.7),
    ])  # fmt: skip
    readings = READINGS[family](pictures).double()
    middle, spread = readings.mean(0), readings.std(0)
    terms = _terms((readings - middle) / spread)
    penalty = RIDGE * len(terms) * torch.eye(terms.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(terms.T @ terms + penalty, terms.T @ levels.double())
    return middle, spread, weights


def _terms(readings: Float[Tensor, "N K"]) -> Float[Tensor, "N M"]:
    """1, the readings (cut off at 3 standard deviations), their products and cubes."""
    r = readings.clamp(-3, 3)
    i, j = torch.triu_indices(r.shape[1], r.shape[1])
    return torch.cat([torch.ones_like(r[:, :1]), r, r[:, i] * r[:, j], r**3], 1)


# --- the judge --------------------------------------------------------------------------------------------------------


def measure(pictures: Pictures, family: str) -> Float[Tensor, "N A"]:
    """The attribute levels in [0, 1] that pictures show, in the order of ATTRIBUTES[family].

    Args:
        pictures: RGB in [0, 1].

    >>> generator = torch.Generator().manual_seed(0)
    >>> pictures, levels, _ = random_pictures("face", 50, generator)
    >>> bool((measure(pictures, "face") - levels).abs().mean() < 0.03)
    True
    """
    errors.check_option("family", family, drawing.FAMILIES)
    if not len(pictures):
        return torch.zeros(0, len(ATTRIBUTES[family]))
    middle, spread, weights = _calibration(family)
    readings = READINGS[family](pictures.detach().float().clamp(0, 1)).double()
    return (_terms((readings - middle) / spread) @ weights).clamp(0, 1).float()


def measured_colour(pictures: Pictures, family: str) -> Int[Tensor, " N"]:
    """Which of COLOURS the background of faces, or the house of landscapes, has: the nearest direction from grey."""
    errors.check_option("family", family, drawing.FAMILIES)
    x, y = _grid()
    house = _within(x, 9.3, 11.7) * _within(y, 12, 15)
    found = _background(pictures) if family == "face" else _average(pictures, house)
    return _nearest_tint(found)


def _nearest_tint(found: Float[Tensor, "N 3"]) -> Int[Tensor, " N"]:
    tints = drawing.tints(torch.arange(len(COLOURS)))
    found, tints = (colour / colour.norm(dim=1, keepdim=True).clamp(min=1e-3) for colour in (found, tints))
    return (found @ tints.T).argmax(1)


def accuracy(
    family: str, n: int = 2000, noise: float = 0.0, blur: float = 0.0, seed: int = 1
) -> dict[str, dict[str, float]]:
    """The judge's mean absolute error and correlation for each attribute on n new pictures.

    >>> accuracy("landscape", n=200)["flooded"]["correlation"] > 0.99
    True
    """
    generator = torch.Generator().manual_seed(seed)
    pictures, levels, colour = random_pictures(family, n, generator)
    pictures = disturbed(pictures, generator, noise, blur)
    found = measure(pictures, family)
    result = {
        attribute: {
            "mae": float((found[:, a] - levels[:, a]).abs().mean()),
            "correlation": correlation(found[:, a], levels[:, a]),
        }
        for a, attribute in enumerate(ATTRIBUTES[family])
    }
    right = float((measured_colour(pictures, family) == colour).float().mean())
    return result | {"colour": {"accuracy": right}}


def fitted(
    pictures: Pictures, family: str, steps: int = 200, learning_rate: float = 0.08
) -> tuple[Float[Tensor, "N A"], Float[Tensor, " N"]]:
    """A second opinion, independent of the readings: the levels whose drawing comes nearest to each picture.

    Slow, and caught now and then in a poor fit: for checking the judge on pictures whose true levels nobody knows.

    Args:
        steps: of gradient descent on levels and nuisance, from the middle of their range.

    Returns:
        levels in [0, 1], and the root mean square difference that is left.
    """
    colour = measured_colour(pictures, family)
    count = len(ATTRIBUTES[family])
    # not quite the middle, where some distances are exactly 0 and have no gradient
    free = torch.full((len(pictures), count + drawing.NUISANCES), 0.1, requires_grad=True)
    optimiser = torch.optim.Adam([free], learning_rate, betas=(0.9, 0.95))
    for _ in range(steps):
        levels, nuisance = torch.sigmoid(free).split([count, drawing.NUISANCES], 1)
        left = (drawing.DRAW[family](levels, colour, nuisance) - pictures).square().mean((1, 2, 3))
        optimiser.zero_grad()
        left.sum().backward()
        optimiser.step()
    return torch.sigmoid(free[:, :count]).detach(), left.detach().sqrt()


def correlation(a: Sequence[float] | Tensor, b: Sequence[float] | Tensor) -> float:
    """Pearson's; 0 when one of the two does not vary.

    >>> round(correlation([0.0, 1.0, 2.0], [0.0, 1.0, 0.5]), 3)
    0.5
    """
    a, b = (torch.as_tensor(values, dtype=torch.float64) for values in (a, b))
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 1e-12 else 0.0
