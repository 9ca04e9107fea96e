"""Drawing images: the reverse process of a diffusers scheduler, one random stream an image."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def draw_seeds(number: int, generator: torch.Generator) -> list[int]:
    """One seed an image.

    >>> draw_seeds(2, torch.Generator().manual_seed(0)) == draw_seeds(2, torch.Generator().manual_seed(0))
    True
    """
    return torch.randint(2**62, (number,), generator=generator, device=generator.device).tolist()


def reverse_process(
    predict: Callable[[Float[Tensor, "N D h w"], Tensor], Float[Tensor, "N D h w"]],
    scheduler: Any,
    seeds: Sequence[int],
    shape: tuple[int, int, int],
    steps: int,
    eta: float = 0.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "N D h w"]:
    """x0 of N images from pure noise, all in one batch.

    An image is the same whatever else is drawn with it, up to the rounding of batched arithmetic: its start and all its
    later noise come from its own seed.

    Args:
        predict: (x_t, t) -> the network's output, guidance included.
        scheduler: of diffusers; it is not changed.
        seeds: one an image.
        shape: of one x0.
        steps: network calls; more is slower and closer to the reverse process.
        eta: of DDIM: 0 is deterministic after the start, 1 as random as DDPM; other schedulers do not read it.
    """
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(steps, device=device)
    streams = [torch.Generator().manual_seed(seed) for seed in seeds]
    x = torch.stack([torch.randn(shape, generator=stream) for stream in streams]).to(device, dtype)
    x = x * scheduler.init_noise_sigma
    known = inspect.signature(scheduler.step).parameters
    options = {name: value for name, value in (("eta", eta), ("generator", streams)) if name in known}
    for t in scheduler.timesteps:
        output = predict(scheduler.scale_model_input(x, t), t)
        x = scheduler.step(output, t, x, **options).prev_sample.to(dtype)
    return x
