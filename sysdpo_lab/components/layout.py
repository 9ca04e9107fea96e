"""From the rows of a batch to its images one after another, each with its caption and its noise."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.components.image_space import ImageSpace
from sysdpo_lab.components.tool import plain

Captions = tuple[Hashable, ...]


class Noise(NamedTuple):
    """What one row's n images are noised with: the same for policy, reference and both sides of a pair.

    Attributes:
        timesteps: (n, m) indices 0..T-1, m a picture.
        eps: (n, m, D, h, w) standard normal, in the shape of x0.
    """

    timesteps: Int[Tensor, "n m"]
    eps: Float[Tensor, "n m D h w"]


@dataclass
class Layout:
    """The images of a batch one after another.

    Attributes:
        size: rows of the batch.
        rows, captions, images, noise: of each image; its noise has no axis n any more.
        impossible: rows whose value the component cannot make: another number of images than captions, or no call at all.
    """

    size: int
    rows: list[int] = field(default_factory=list)
    captions: list[Hashable] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    noise: list[Noise] = field(default_factory=list)
    impossible: list[int] = field(default_factory=list)


# --- captions -----------------------------------------------------------------------------------------------------------


def captions_of_row(name: str, row: int, function: Callable | None, values: Sequence[Any]) -> Captions | None:
    """The captions that the parents' values of one row mean; () where they do not parse, None: not called.

    Args:
        name, row: for messages.
        function: of the values; None: the one value is the list of captions, or the one caption.
        values: of the parents, texts for completions.

    >>> captions_of_row("z", 0, str.split, ["red blue"]), captions_of_row("z", 0, None, ["a cat"])
    (('red', 'blue'), ('a cat',))
    """
    if all(value is None for value in values):
        return None
    found = values[0] if function is None else _parsed(name, row, function, values)
    found = () if found is None else tuple(found) if isinstance(found, (list, tuple)) else (found,)
    found = tuple(plain(caption) for caption in found)
    for caption in found:
        if caption is None or not isinstance(caption, Hashable):
            raise errors.CaptionError(f"component {name!r}, row {row}: {caption!r} is no caption; a text is needed")
    return found


def _parsed(name: str, row: int, function: Callable, values: Sequence[Any]) -> Any:
    try:
        return function(*values)
    except ValueError:  # a parser's way to say that this is no list of captions
        return None
    except Exception as error:
        error.add_note(f"raised by the captions function of component {name!r}, row {row}, called with {values!r}")
        raise


# --- images ---------------------------------------------------------------------------------------------------------------


def image_tensor(name: str, row: int, images: Any) -> Float[Tensor, "n C H W"]:
    """The row's images, or a named error when it holds something else."""
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise errors.ImageShapeError(
            f"component {name!r}, row {row}: a sequence of n images is a float tensor (n, C, H, W), found {found}"
        )
    return images


def lay_out(
    name: str, space: ImageSpace, value: Sequence, captions: Sequence[Captions | None], noise: Sequence[Noise | None]
) -> Layout:
    """All images of a batch; rows without a call (None) and rows without images bring none.

    Raises:
        NoiseRequiredError, NonFiniteError, ImageShapeError: naming component and row.
    """
    layout = Layout(len(value))
    for row, images in enumerate(value):
        if images is None:
            continue
        images = image_tensor(name, row, images)
        if captions[row] is None or len(captions[row]) != len(images):
            layout.impossible.append(row)
        elif len(images):
            where = f"component {name!r}, row {row}"
            _check_images(where, images, layout)
            _check_noise(where, images, noise[row], space.x0_shape(tuple(images.shape[1:])))
            layout.rows += [row] * len(images)
            layout.captions += captions[row]
            layout.images += list(images)
            layout.noise += [Noise(t, eps) for t, eps in zip(*noise[row])]
    return layout


def _check_images(where: str, images: Tensor, layout: Layout) -> None:
    if not bool(torch.isfinite(images).all()):
        raise errors.NonFiniteError(f"{where}: an image holds NaN or infinity")
    first = (layout.images or images)[0]
    if first.shape != images[0].shape:
        raise errors.ImageShapeError(
            f"{where}: images of {tuple(images[0].shape)} after some of {tuple(first.shape)}; one batch needs one size"
        )


def _check_noise(where: str, images: Tensor, noise: Noise | None, wanted: tuple[int, int, int]) -> None:
    if noise is None or tuple(noise.eps.shape[2:]) != wanted or len(noise.eps) != len(images):
        found = None if noise is None else tuple(noise.eps.shape)
        raise errors.NoiseRequiredError(
            f"{where}: {len(images)} images of x0 shape {wanted} and noise {found}; draw noise for this very batch"
        )
