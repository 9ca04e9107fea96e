"""Between images as people see them and what a diffusion network reads: value range, patches, and a VAE's latents."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sysdpo_lab import errors


class ImageSpace(nn.Module):
    """An invertible map (up to the VAE's loss) from images (N, C, H, W) to the network's x0.

    images --value_range--> [-1, 1] --VAE mean, shifted and scaled--> latents --pixel_unshuffle--> x0

    Args:
        name: the component's, for messages.
        vae: a diffusers AutoencoderKL, or None: pixel space. Its latents are (mean - shift_factor) x scaling_factor.
        scaling_factor: None: the VAE's own (0.18215 for Stable Diffusion 1.5), which gives latents of a spread of about 1.
        patch: p cuts the picture into p x p patches, (C, H, W) -> (C p^2, H/p, W/p): a smaller, faster network.
        value_range: (low, high) of the images; they are mapped to [-1, 1] and what is drawn is cut off at both ends. None:
            the images are in the network's own numbers, and nothing is cut off.

    Raises:
        OptionRangeError.
    """

    def __init__(
        self,
        name: str,
        vae: nn.Module | None = None,
        scaling_factor: float | None = None,
        patch: int = 1,
        value_range: tuple[float, float] | None = None,
    ):
        super().__init__()
        if isinstance(patch, bool) or not isinstance(patch, int) or patch < 1:
            raise errors.OptionRangeError(f"component {name!r}: patch={patch!r} must be a whole number >= 1")
        if value_range is not None and not value_range[0] < value_range[1]:
            raise errors.OptionRangeError(
                f"component {name!r}: value_range={value_range!r} must be (low, high) with low < high"
            )
        self.name, self.patch = name, patch
        self.value_range = None if value_range is None else tuple(map(float, value_range))
        self.vae = None if vae is None else vae.requires_grad_(False).eval()
        config: Any = getattr(vae, "config", None)
        self.scaling_factor = scaling_factor if scaling_factor is not None else getattr(config, "scaling_factor", 1.0)
        self.shift_factor = getattr(config, "shift_factor", None) or 0.0

    @property
    def reduction(self) -> int:
        """How many pixels one position of x0 is wide."""
        depth = 1 if self.vae is None else 2 ** (len(self.vae.config.block_out_channels) - 1)
        return depth * self.patch

    def x0_shape(self, image: tuple[int, int, int]) -> tuple[int, int, int]:
        """(C, H, W) of x0 for an image's (C, H, W)."""
        channels = image[0] if self.vae is None else self.vae.config.latent_channels
        if image[1] % self.reduction or image[2] % self.reduction:
            raise errors.ImageShapeError(
                f"component {self.name!r}: images of {image[1]} x {image[2]} pixels cannot be cut into pieces of {self.reduction}"
            )
        return (channels * self.patch**2, image[1] // self.reduction, image[2] // self.reduction)

    def image_shape(self, x0: tuple[int, int, int]) -> tuple[int, int, int]:
        """The inverse of `x0_shape`."""
        channels = x0[0] // self.patch**2 if self.vae is None else self.vae.config.out_channels
        return (channels, x0[1] * self.reduction, x0[2] * self.reduction)

    @torch.no_grad()
    def to_x0(self, images: Float[Tensor, "N C H W"]) -> Float[Tensor, "N D h w"]:
        """What the network is trained to restore."""
        if self.value_range is not None:
            low, high = self.value_range
            images = (images - low) * (2 / (high - low)) - 1
        if self.vae is not None:
            images = self._encoded(images)
        return nn.functional.pixel_unshuffle(images, self.patch) if self.patch > 1 else images

    @torch.no_grad()
    def to_images(self, x0: Float[Tensor, "N D h w"]) -> Float[Tensor, "N C H W"]:
        """Images, in `value_range` where there is one."""
        images = nn.functional.pixel_shuffle(x0, self.patch) if self.patch > 1 else x0
        if self.vae is not None:
            latents = (images / self.scaling_factor + self.shift_factor).to(self.vae.dtype)
            images = self._finite(self.vae.decode(latents).sample, "decoding").to(x0.dtype)
        if self.value_range is not None:
            low, high = self.value_range
            images = ((images + 1) * ((high - low) / 2) + low).clamp(low, high)
        return images

    def _encoded(self, images: Tensor) -> Tensor:
        # the mean, not a draw: both sides of a pair and policy and reference must see one and the same x0
        mean = self.vae.encode(images.to(self.vae.dtype)).latent_dist.mean
        return (self._finite(mean, "encoding").to(images.dtype) - self.shift_factor) * self.scaling_factor

    def _finite(self, values: Tensor, doing: str) -> Tensor:
        if not bool(torch.isfinite(values).all()):
            dtype = str(self.vae.dtype).removeprefix("torch.")
            raise errors.NonFiniteError(
                f"component {self.name!r}: the VAE gave NaN or infinity while {doing} in {dtype}; "
                "load the VAE in float32 (some overflow in float16), or use one that was repaired for float16"
            )
        return values
