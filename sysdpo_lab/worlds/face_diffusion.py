"""A small diffusion model that draws faces and landscapes from captions, trained here in minutes.

Pictures are cut into patches of 4 x 4 pixels (24 x 24 x 3 -> 6 x 6 x 48) and the network predicts the clean picture.
`python -m sysdpo_lab.worlds.face_models diffusion --out data/faces-diffusion` trains it again from its seed; the
weakened base, which is the one to align, saw captions of which 35 % name random degrees.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sysdpo_lab import checkpoints, errors, progress
from sysdpo_lab.worlds.faces import drawing, language
from sysdpo_lab.worlds.faces.drawing import ATTRIBUTES, COLOURS
from sysdpo_lab.worlds.faces.encoder import WordEncoder
from sysdpo_lab.worlds.faces.language import DEGREES, Caption

if TYPE_CHECKING:
    from diffusers import DDIMScheduler, UNet2DConditionModel

PATCH, CHANNELS, TIMESTEPS = 4, (64, 96), 1000
STEPS, BATCH, LEARNING_RATE, SEED = 3500, 32, 1.5e-3, 0
MISLABELLED = 0.35  # of the weakened base's captions; fixed before any tuning
FACES_SHARE, TWO_NAMED, DROPPED, LEVEL_NOISE = 0.75, 0.7, 0.1, 0.03
EMA_DECAY, MAX_WEIGHT, LATE_SHARE, PLAIN_SHARE = 0.998, 5.0, 2 / 3, 0.25
CHECKPOINT_EVERY = 250


class DiffusionBase(NamedTuple):
    """A diffusion model: network, noise schedule, text encoder, and the patch size that pictures are cut into."""

    unet: "UNet2DConditionModel"
    scheduler: "DDIMScheduler"
    encoder: WordEncoder
    patch: int


# --- pictures and patches ---------------------------------------------------------------------------------------------


def to_latent(pictures: Float[Tensor, "N 3 H W"], patch: int = PATCH) -> Float[Tensor, "N C h w"]:
    """Pictures in [0, 1] as the network's patches in [-1, 1]; exactly undone by `to_pictures`.

    >>> to_latent(torch.zeros(1, 3, 24, 24)).shape
    torch.Size([1, 48, 6, 6])
    """
    return nn.functional.pixel_unshuffle(2 * pictures - 1, patch)


def to_pictures(latent: Float[Tensor, "N C h w"], patch: int = PATCH) -> Float[Tensor, "N 3 H W"]:
    """Patches in [-1, 1] as pictures in [0, 1], cut off at both ends."""
    return (0.5 * nn.functional.pixel_shuffle(latent, patch) + 0.5).clamp(0, 1)


# --- training data ----------------------------------------------------------------------------------------------------


def training_batch(
    n: int, generator: torch.Generator, mislabelled: float = 0.0
) -> tuple[Float[Tensor, "N 3 24 24"], list[Caption]]:
    """n new pictures, each with a caption that names one or two of its attributes.

    Args:
        mislabelled: probability that a caption's degree words are random instead of the picture's own.
    """
    faces = int((torch.rand(n, generator=generator) < FACES_SHARE).sum())
    parts = [
        _family_batch(family, count, generator, mislabelled)
        for family, count in zip(drawing.FAMILIES, (faces, n - faces))
        if count
    ]
    return torch.cat([pictures for pictures, _ in parts]), [caption for _, captions in parts for caption in captions]


def _family_batch(family: str, n: int, generator: torch.Generator, mislabelled: float):
    colour = torch.randint(len(COLOURS), (n,), generator=generator)
    shape = (n, len(ATTRIBUTES[family]))
    degrees = torch.randint(len(DEGREES), shape, generator=generator)
    levels = torch.tensor(list(DEGREES.values()))[degrees] + LEVEL_NOISE * torch.randn(shape, generator=generator)
    pictures = drawing.draw(family, levels.clamp(0, 1), colour, generator)
    wrong = torch.rand(n, generator=generator) < mislabelled
    said = torch.where(wrong[:, None], torch.randint(len(DEGREES), shape, generator=generator), degrees)
    return pictures, _captions(family, said, colour, generator)


def _captions(
    family: str, said: Int[Tensor, "N A"], colour: Int[Tensor, " N"], generator: torch.Generator
) -> list[Caption]:
    """One caption a row, of one or two attributes in random order; held-out combinations are never named."""
    orders = torch.rand(said.shape, generator=generator).argsort(1).tolist()
    counts = (1 + (torch.rand(len(said), generator=generator) < TWO_NAMED).long()).tolist()
    words, captions = list(DEGREES), []
    for order, count, degrees, c in zip(orders, counts, said.tolist(), colour.tolist()):
        pairs = [(ATTRIBUTES[family][a], words[degrees[a]]) for a in order]
        allowed = [pair for pair in pairs if not language.is_heldout(family, *pair, COLOURS[c])]
        # all held out (one landscape in 30 000): one degree off
        allowed = allowed or [(ATTRIBUTES[family][order[0]], words[(degrees[order[0]] + 1) % len(words)])]
        captions.append(Caption(family, tuple(allowed[:count]), COLOURS[c]))
    return captions


# --- model ------------------------------------------------------------------------------------------------------------


def build_scheduler() -> "DDIMScheduler":
    """The cosine schedule with 1000 timesteps; the network predicts the clean picture ("sample")."""
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        num_train_timesteps=TIMESTEPS, beta_schedule="squaredcos_cap_v2", prediction_type="sample",
        timestep_spacing="trailing", clip_sample=True, clip_sample_range=1.0,
    )  # fmt: skip


def build(seed: int = SEED, channels: Sequence[int] = CHANNELS) -> DiffusionBase:
    """A model with random weights; the global random state is left as it was."""
    from diffusers import UNet2DConditionModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = WordEncoder()
        unet = UNet2DConditionModel(
            sample_size=drawing.SIZE // PATCH, in_channels=3 * PATCH**2, out_channels=3 * PATCH**2, layers_per_block=1,
            block_out_channels=tuple(channels), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=encoder.width,
            attention_head_dim=4, norm_num_groups=8,
            # the caption also reaches every layer, as one vector beside the timestep's
            addition_embed_type="text", addition_embed_type_num_heads=4, resnet_time_scale_shift="scale_shift",
        )  # fmt: skip
    return DiffusionBase(unet.float(), build_scheduler(), encoder, PATCH)


# --- training ---------------------------------------------------------------------------------------------------------


def training_timesteps(n: int, last: int, generator: torch.Generator) -> Int[Tensor, " n"]:
    """n timesteps of 0..last - 1: two in three from the noisiest fifth, the others uniform.

    How bright a background is can be seen through noise ten times as strong as the picture: only at the noisiest timesteps
    does a network need the caption, so only there does it learn to heed it.
    """
    uniform = torch.randint(last, (n,), generator=generator)
    late = last - 1 - torch.randint(max(1, last // 5), (n,), generator=generator)
    return torch.where(torch.rand(n, generator=generator) < LATE_SHARE, late, uniform)


@cache
def importance(family: str) -> Float[Tensor, "24 24"]:
    """How much a pixel counts: more where few pixels carry an attribute, as in the mouth; mean about 1.

    The sum over attributes, and the colour, of the square by which the pixel changes with it, each divided by
    (its mean)^(3/2): an attribute that changes little, as the brows do, is not lost beside the background. The best
    prediction, the mean given caption and noisy picture, is the same whatever the weights; it is found sooner.
    """
    count, maps = len(ATTRIBUTES[family]), []
    for a in range(count + 1):
        generator = torch.Generator().manual_seed(a)
        levels, nuisance = (torch.rand(60, n, generator=generator) for n in (count, drawing.NUISANCES))
        colour = torch.arange(60) % len(COLOURS)
        low, high = _with(levels, a, 0.2), _with(levels, a, 0.8)
        other = (colour + 1) % len(COLOURS) if a == count else colour
        change = drawing.DRAW[family](high, other, nuisance) - drawing.DRAW[family](low, colour, nuisance)
        squares = change.square().mean((0, 1))
        maps.append(squares / squares.mean() ** 1.5)
    total = torch.stack(maps).sum(0)
    return PLAIN_SHARE + (1 - PLAIN_SHARE) * total / total.mean()


def _with(levels: Float[Tensor, "N A"], a: int, level: float) -> Float[Tensor, "N A"]:
    return torch.where(torch.arange(levels.shape[1]) == a, torch.tensor(level), levels)


def weighted_error(
    base: DiffusionBase,
    pictures: Float[Tensor, "N 3 H W"],
    texts: Sequence[str],
    pixel_weight: Float[Tensor, "N H W"],
    generator: torch.Generator,
) -> Float[Tensor, ""]:
    """Mean of min(1 / (1 - abar_t), 5) x weighted mean squared error of the predicted clean picture, one timestep a row."""
    clean = to_latent(pictures, base.patch)
    t = training_timesteps(len(clean), base.scheduler.config.num_train_timesteps, generator)
    noise = torch.randn(clean.shape, generator=generator)
    noisy = base.scheduler.add_noise(clean, noise, t)
    predicted = base.unet(noisy, t, encoder_hidden_states=base.encoder(texts)).sample
    weight = (1 / (1 - base.scheduler.alphas_cumprod[t])).clamp(max=MAX_WEIGHT)
    squares = nn.functional.pixel_shuffle((predicted - clean).square(), base.patch).mean(1)
    return (weight * (pixel_weight * squares).mean((1, 2))).mean()


class Trainer:
    """Training state of a base model: weights, their running mean (the model that is used), and the optimiser.

    Args:
        steps: of the whole run.
        mislabelled: see `training_batch`.
        seed: of weights and data; step i draws from a generator of its own, so a resumed run goes on exactly.
    """

    def __init__(self, steps: int = STEPS, batch: int = BATCH, mislabelled: float = 0.0, seed: int = SEED):
        self.base, self.steps, self.batch, self.mislabelled, self.seed = build(seed), steps, batch, mislabelled, seed
        self.modules = nn.ModuleDict({"unet": self.base.unet, "encoder": self.base.encoder})
        self.parameters = dict(self.modules.named_parameters())
        self.mean = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.optimiser = torch.optim.AdamW(
            self.parameters.values(), LEARNING_RATE, betas=(0.9, 0.97), weight_decay=0.01, fused=True
        )
        self.step, self.losses = 0, []

    def learning_rate(self) -> float:
        """At the step that comes next: a short rise, then constant, then a straight fall over the last fifth."""
        rise = (self.step + 1) / min(100, max(1, self.steps // 10))
        fall = (self.steps - self.step) / max(1, self.steps - self.fall_starts)
        return LEARNING_RATE * min(1.0, rise, max(0.02, fall))

    @property
    def fall_starts(self) -> int:
        """The step from which on the learning rate falls."""
        return self.steps - self.steps // 5

    def advance(self) -> float:
        """One optimiser step on new pictures; returns its loss."""
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + self.step)
        pictures, captions = training_batch(self.batch, generator, self.mislabelled)
        dropped = torch.rand(self.batch, generator=generator) < DROPPED
        texts = ["" if gone else str(caption) for gone, caption in zip(dropped.tolist(), captions)]
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate()
        pixel_weight = torch.stack([importance(caption.family) for caption in captions])
        loss = weighted_error(self.base, pictures, texts, pixel_weight, generator)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self._follow()
        self.step += 1
        self.losses.append(loss.item())
        return self.losses[-1]

    @torch.no_grad()
    def _follow(self) -> None:
        decay = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(list(self.mean.values()), [p.detach() for p in self.parameters.values()], 1 - decay)

    def averaged(self) -> DiffusionBase:
        """A model with the mean weights, in evaluation mode."""
        other = build(self.seed)
        modules = nn.ModuleDict({"unet": other.unet, "encoder": other.encoder})
        with torch.no_grad():
            for name, parameter in modules.named_parameters():
                parameter.copy_(self.mean[name])
        modules.eval().requires_grad_(False)
        return other

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    def _settings(self) -> dict:
        return {"batch": self.batch, "mislabelled": self.mislabelled, "seed": self.seed}

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint to go on from."""
        tensors: dict[str, Tensor] = {f"weights.{name}": p.detach() for name, p in self.parameters.items()}
        tensors |= {f"mean.{name}": p for name, p in self.mean.items()}
        for name, p in self.parameters.items():
            tensors |= {f"optimiser.{name}.{key}": value for key, value in self.optimiser.state[p].items()}
        state = {"settings": self._settings(), "steps": self.steps, "losses": self.losses}
        checkpoints.save(folder, checkpoints.Checkpoint(self.step, tensors, state))

    def resume(self, folder: Path | str) -> bool:
        """Go on from the newest checkpoint of a folder; False when there is none.

        Raises:
            CheckpointError: the checkpoint is of a run with other settings, or past the point where this one differs.
        """
        found = checkpoints.newest(folder)
        if found is None:
            return False
        if found.state["settings"] != self._settings():
            raise errors.CheckpointError(f"{folder}: settings {found.state['settings']}, not {self._settings()}")
        if found.state["steps"] != self.steps and found.step > min(self.fall_starts, found.state["steps"] * 4 // 5):
            raise errors.CheckpointError(f"{folder}: its learning rate has begun to fall; train from the start instead")
        self.step, self.losses = found.step, list(found.state["losses"])
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(found.tensors[f"weights.{name}"])
                self.mean[name] = found.tensors[f"mean.{name}"].clone()
                prefix = f"optimiser.{name}."
                stored = {k[len(prefix) :]: v.clone() for k, v in found.tensors.items() if k.startswith(prefix)}
                self.optimiser.state[p] = stored
        return True


def train(
    steps: int = STEPS, batch: int = BATCH, mislabelled: float = 0.0, seed: int = SEED,
    folder: Path | str | None = None, enabled: bool | None = None,
) -> Trainer:  # fmt: skip
    """Train a base model from its seed, or go on where its checkpoints in `folder` end.

    Args:
        folder: for checkpoints every 250 steps; None keeps none.
        enabled: show a bar; None: on a terminal only.
    """
    trainer = Trainer(steps, batch, mislabelled, seed)
    if folder is not None:
        trainer.resume(folder)
    with progress.bar(steps, "diffusion", trainer.step, enabled) as bar:
        while trainer.step < steps:
            loss = trainer.advance()
            bar.update(1, loss=loss)
            if folder is not None and (trainer.step % CHECKPOINT_EVERY == 0 or trainer.step == steps):
                trainer.save(folder)
    return trainer


# --- sampling ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(
    base: DiffusionBase, texts: Sequence[str], generator: torch.Generator, steps: int = 12, guidance: float = 1.0
) -> Float[Tensor, "N 3 24 24"]:
    """Pictures in [0, 1] of the captions, by deterministic DDIM from random noise.

    Args:
        steps: network calls a picture.
        guidance: 1 = none; above 1 the prediction moves away from the one without a caption.
    """
    config = base.unet.config
    x = torch.randn((len(texts), config.in_channels, config.sample_size, config.sample_size), generator=generator)
    states, empty = base.encoder(texts), base.encoder([""] * len(texts)) if guidance != 1 else None
    base.scheduler.set_timesteps(steps)
    for t in base.scheduler.timesteps:
        predicted = base.unet(x, t, encoder_hidden_states=states).sample
        if empty is not None:
            without = base.unet(x, t, encoder_hidden_states=empty).sample
            predicted = without + guidance * (predicted - without)
        x = base.scheduler.step(predicted, t, x).prev_sample
    return to_pictures(x, base.patch)
