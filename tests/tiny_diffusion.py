"""Tiny diffusion models, built offline in milliseconds; one whose likelihood is known exactly."""

import functools
import re

import torch
from torch import nn

from sysdpo_lab.components import Diffusion

WIDTH, LENGTH = 8, 3


class Words(nn.Module):
    """Captions to (N, 3, 8): one vector a letter of the caption, zeros behind it."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.width, self.calls = width, 0
        generator = torch.Generator().manual_seed(5)
        self.vectors = nn.Parameter(torch.randn(128, width, generator=generator))

    def config(self) -> dict:
        return {"width": self.width}

    def forward(self, captions):
        self.calls += 1
        rows = [[ord(letter) for letter in str(caption)[:LENGTH]] for caption in captions]
        ids = torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows])
        return self.vectors[ids]


class Denoiser(nn.Module):
    """The best denoiser of N(mean, spread^2) data: x0_hat = E[x0 | x_t], said in any of the three ways."""

    def __init__(self, abar, mean: float, spread: float, prediction: str = "epsilon"):
        super().__init__()
        self.mean, self.log_spread = (nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in (mean, spread))
        with torch.no_grad():
            self.log_spread.log_()
        self.abar, self.prediction = abar, prediction

    def forward(self, x_t, t):
        abar = self.abar[t].reshape(-1, *[1] * (x_t.dim() - 1))
        alpha, sigma, variance = abar.sqrt(), (1 - abar).sqrt(), (2 * self.log_spread).exp()
        x0 = self.mean + alpha * variance / (abar * variance + 1 - abar) * (x_t - alpha * self.mean)
        eps = (x_t - alpha * x0) / sigma
        return {"epsilon": eps, "sample": x0, "v_prediction": alpha * eps - sigma * x0}[self.prediction]


@functools.cache
def _weights(seed: int, channels: int) -> dict:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _network(channels).state_dict()


def _network(channels: int):
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=4, in_channels=channels, out_channels=channels, layers_per_block=1, block_out_channels=(8, 16),
        norm_num_groups=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=WIDTH, attention_head_dim=4,
    )  # fmt: skip


def unet(seed: int = 0, channels: int = 3, dtype: torch.dtype = torch.float32):
    """A random UNet2DConditionModel on 4 x 4 positions; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        made = _network(channels)
    made.load_state_dict(_weights(seed, channels))
    return (made if dtype == torch.float32 else made.to(dtype)).eval()


def scheduler(prediction: str = "epsilon", kind: str = "DDIMScheduler", steps: int = 50, **options):
    """A scheduler of diffusers with few timesteps."""
    import diffusers

    options = {"num_train_timesteps": steps, "beta_schedule": "linear", "beta_end": 0.2, **options}
    if kind == "PNDMScheduler":
        options |= {"skip_prk_steps": True}
    elif kind.startswith("DD"):
        options = {"clip_sample": False, **options}
    return getattr(diffusers, kind)(prediction_type=prediction, **options)


def component(name="images", parents=("y",), prediction="epsilon", **options) -> Diffusion:
    """A diffusion component on a tiny network; captions come from the parent `y`."""
    network = options.pop("unet", None) or unet()
    options = {"weight": 20.0, "steps": 3, **options}
    return Diffusion(
        name, parents, network, options.pop("scheduler", None) or scheduler(prediction), Words(), **options
    )


def split(answer: str) -> list[str]:
    """The captions of an answer "a|b|c"; an answer of other letters than a..h does not parse."""
    if not re.fullmatch(r"[a-h]+(\|[a-h]+)*", answer.strip()):
        raise ValueError(answer)
    return answer.strip().split("|")


def images(n: int, seed: int, shape=(3, 4, 4), dtype=torch.float32) -> torch.Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def clip_tokenizer():
    """A CLIP tokenizer with eight pieces."""
    from transformers import CLIPTokenizer

    pieces = ["<|startoftext|>", "<|endoftext|>", "a</w>", "c", "a", "t</w>", "ca", "cat</w>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=[("c", "a"), ("ca", "t</w>")], model_max_length=6)


def save_pipeline(folder, kind: str = "DDIMScheduler", prediction: str = "epsilon"):
    """A random pipeline of Stable Diffusion's classes in its layout; images are 8 x 8, latents 4 x 4 x 4."""
    from diffusers import AutoencoderKL, StableDiffusionPipeline
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        vae = AutoencoderKL(
            block_out_channels=(4, 8), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=2, sample_size=8,
            up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, scaling_factor=0.25,
        )  # fmt: skip
        text = CLIPTextModel(
            CLIPTextConfig(vocab_size=8, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                           max_position_embeddings=6, bos_token_id=0, eos_token_id=1)
        )  # fmt: skip
    schedule = scheduler(prediction, kind, steps_offset=1)
    pipeline = StableDiffusionPipeline(
        vae, text, clip_tokenizer(), unet(channels=4), schedule, None, None, requires_safety_checker=False
    )
    pipeline.save_pretrained(str(folder), safe_serialization=True)
    return folder
