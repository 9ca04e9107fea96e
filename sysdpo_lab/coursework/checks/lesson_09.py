"""Lesson 09: memory of LoRA and of full training, cost of a step, sample sizes, CLIP zero-shot levels, equivalent weights."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab.coursework.checks.core import Check, Mistake
from sysdpo_lab.coursework.checks.lesson_00 import draws
from sysdpo_lab.worlds import clip_scorer

# --- memory -----------------------------------------------------------------------------------------------------------


def training_memory(base: float, trained: float, weight_bytes: int, reference_copy: bool) -> float:
    """Bytes before activations: base weights, trained numbers with gradient and Adam's two moments in fp32, a reference copy.

    Args:
        base: parameters of the model.
        trained: parameters that are trained (kept in fp32 beside the base).
        weight_bytes: of one weight of the base.
        reference_copy: whether the reference is a second copy of the base.
    """
    return base * weight_bytes * (2 if reference_copy else 1) + trained * 4 * 4


check_training_memory = Check(
    cases=lambda: [(8e9, 42e6, 2, False), (8e9, 8e9, 2, True), (0.86e9, 3e6, 4, True), (0.86e9, 0.86e9, 2, False)],
    right=training_memory,
    mistakes=[
        Mistake(
            "moments forgotten",
            lambda base, trained, w, copy: base * w * (1 + copy) + trained * 8,
            "Adam keeps two moments for each trained number; they are missing",
        ),
        Mistake(
            "gradient forgotten",
            lambda base, trained, w, copy: base * w * (1 + copy) + trained * 12,
            "12 bytes a trained number: its gradient, or one of Adam's two moments, is missing",
        ),
        Mistake(
            "trained in half precision",
            lambda base, trained, w, copy: base * w * (1 + copy) + trained * 4 * w,
            "the trained numbers, their gradients and moments are kept in fp32 (4 bytes) whatever the base has",
        ),
        Mistake(
            "reference always",
            lambda base, trained, w, copy: base * w * 2 + trained * 16,
            "a reference copy is counted where there is none: with LoRA the reference is the base with the adapter off",
        ),
        Mistake(
            "reference never",
            lambda base, trained, w, copy: base * w + trained * 16,
            "the reference copy is missing where there is one",
        ),
        Mistake(
            "reference of the trained part",
            lambda base, trained, w, copy: base * w + trained * w * copy + trained * 16,
            "the reference is a copy of the whole base, not of the trained part",
        ),
        Mistake(
            "everything trained",
            lambda base, trained, w, copy: base * w * (1 + copy) + base * 16,
            "gradients and moments are counted for the whole base; only the trained part has them",
        ),
        Mistake(
            "in GB",
            lambda base, trained, w, copy: training_memory(base, trained, w, copy) / 1e9,
            "these are GB; return bytes",
        ),
    ],
)


# --- cost of a step ---------------------------------------------------------------------------------------------------


def step_cost(batch: int, tokens: int, images: int, timesteps: int) -> dict[str, int]:
    """What one step of SysDPO-Direct on LLM + diffusion computes, in forward passes (a backward pass counts two).

    Args:
        batch: pairs.
        tokens: of a prompt with its captions.
        images: of a sequence.
        timesteps: drawn an image.

    Returns:
        "tokens" and "network calls": policy forward and backward (3) and reference forward (1), for both sides.
    """
    return {"tokens": batch * 2 * 4 * tokens, "network calls": batch * 2 * 4 * images * timesteps}


def _cost(sides=2, passes=4, image_passes=None, with_timesteps=True, with_images=True):
    def answer(batch, tokens, images, timesteps):
        calls = batch * sides * (image_passes or passes)
        calls *= (images if with_images else 1) * (timesteps if with_timesteps else 1)
        return {"tokens": batch * sides * passes * tokens, "network calls": calls}

    return answer


check_step_cost = Check(
    cases=lambda: [(16, 300, 3, 1), (8, 120, 4, 2), (1, 50, 3, 4)],
    right=step_cost,
    mistakes=[
        Mistake("reference forgotten", _cost(passes=3), "the reference's forward pass is missing"),
        Mistake(
            "backward forgotten",
            _cost(passes=2),
            "half of it is missing: a pair has two sides, and the policy has a backward pass, which counts as two forward passes",
        ),
        Mistake(
            "reference trained",
            _cost(passes=6),
            "the reference has a backward pass here; it is frozen and needs only a forward pass",
        ),
        Mistake(
            "images' reference forgotten",
            _cost(image_passes=3),
            "the images have fewer passes than the tokens; both models have a policy and a reference",
        ),
        Mistake("timesteps forgotten", _cost(with_timesteps=False), "each image is noised at several timesteps"),
        Mistake("images forgotten", _cost(with_images=False), "a sequence has several images"),
    ],
)


# --- how many sequences -----------------------------------------------------------------------------------------------


def sample_size(p1: float, p2: float, z_level: float = 1.96, z_power: float = 0.8416) -> int:
    """Sequences an arm so that a difference of two rates is found: ceil((z_a + z_b)^2 (p1 q1 + p2 q2) / (p1 - p2)^2).

    Args:
        p1, p2: the true rates.
        z_level: of the two-sided level, 1.96 for 5 %.
        z_power: of the chance to find it, 0.8416 for 80 %.
    """
    spread = p1 * (1 - p1) + p2 * (1 - p2)
    return math.ceil((z_level + z_power) ** 2 * spread / (p1 - p2) ** 2)


def _size(p1, p2, z_level, z_power, spread=None, power=2, z=None):
    spread = p1 * (1 - p1) + p2 * (1 - p2) if spread is None else spread
    return math.ceil(((z_level + z_power) ** 2 if z is None else z) * spread / abs(p1 - p2) ** power)


check_sample_size = Check(
    cases=lambda: [(0.65, 0.73, 1.96, 0.8416), (0.32, 0.65, 1.96, 0.8416), (0.32, 0.38, 2.576, 1.2816)],
    right=sample_size,
    mistakes=[
        Mistake(
            "difference not squared",
            lambda a, b, z, y: _size(a, b, z, y, power=1),
            "the difference is not squared: half the difference needs four times the sequences",
        ),
        Mistake(
            "one variance",
            lambda a, b, z, y: _size(a, b, z, y, spread=a * (1 - a)),
            "both arms are noisy: add the variances of both rates",
        ),
        Mistake(
            "power forgotten",
            lambda a, b, z, y: _size(a, b, z, y, z=z**2),
            "this finds the difference only half of the time: z_power is missing",
        ),
        Mistake(
            "squares added",
            lambda a, b, z, y: _size(a, b, z, y, z=z**2 + y**2),
            "add the two z first, then square the sum",
        ),
        Mistake(
            "standard deviations",
            lambda a, b, z, y: _size(a, b, z, y, spread=math.sqrt(a * (1 - a)) + math.sqrt(b * (1 - b))),
            "variances add up, standard deviations do not",
        ),
        Mistake(
            "p instead of p q",
            lambda a, b, z, y: _size(a, b, z, y, spread=a + b),
            "the variance of a rate is p (1 - p)",
        ),
        Mistake(
            "both arms together",
            lambda a, b, z, y: 2 * _size(a, b, z, y),
            "these are the sequences of both arms together; return those of one arm",
        ),
        Mistake(
            "rounded down",
            lambda a, b, z, y: _size(a, b, z, y) - 1,
            "round up: a part of a sequence does not exist, and one fewer is not enough",
        ),
    ],
)


# --- CLIP zero-shot ---------------------------------------------------------------------------------------------------


def clip_level(
    pictures: Float[Tensor, "N E"], low: Float[Tensor, " E"], high: Float[Tensor, " E"], scale: float
) -> Float[Tensor, " N"]:
    """Probability of the high text, softmax over the two texts of scale x cosine; by the library."""
    return clip_scorer.zero_shot(pictures, low[None], high[None], scale)[:, 0].double()


def _embeddings() -> list[tuple]:
    g, cases = draws(95), []
    for n, width, scale in ((3, 4, 2.0), (4, 6, 5.0)):
        cases.append((*(torch.randn(shape, generator=g) for shape in ((n, width), (width,), (width,))), scale))
    return cases


def _cosines(pictures, text):
    return torch.nn.functional.cosine_similarity(pictures, text[None], dim=1)


check_clip_level = Check(
    cases=_embeddings,
    right=clip_level,
    tolerance=1e-5,
    mistakes=[
        Mistake(
            "not normalised",
            lambda x, low, high, scale: torch.sigmoid(scale * (x @ (high - low))),
            "the embeddings are not normalised; CLIP compares directions, not lengths",
        ),
        Mistake(
            "texts not normalised",
            lambda x, low, high, scale: torch.sigmoid(scale * (torch.nn.functional.normalize(x, dim=1) @ (high - low))),
            "only the pictures are normalised; a long text embedding would win every time",
        ),
        Mistake(
            "low and high swapped",
            lambda x, low, high, scale: clip_level(x, high, low, scale),
            "this is the probability of the low text",
        ),
        Mistake(
            "scale forgotten",
            lambda x, low, high, scale: clip_level(x, low, high, 1.0),
            "the scale is missing: cosines of CLIP differ by hundredths, so every level would be one half",
        ),
        Mistake(
            "divided by the scale",
            lambda x, low, high, scale: clip_level(x, low, high, 1 / scale),
            "the cosines are divided by the scale; it multiplies them",
        ),
        Mistake(
            "high text alone",
            lambda x, low, high, scale: torch.sigmoid(scale * _cosines(x, high)),
            "only the high text is read; a level needs something to compare with",
        ),
        Mistake(
            "softmax over pictures",
            lambda x, low, high, scale: torch.softmax(scale * _cosines(x, high), 0),
            "the softmax runs over the pictures; it runs over the two texts of each picture",
        ),
        Mistake(
            "cosine itself",
            lambda x, low, high, scale: _cosines(x, high) - _cosines(x, low),
            "this is a difference of cosines; a level is a probability",
        ),
    ],
)


# --- equivalent weights -----------------------------------------------------------------------------------------------


def equivalent_weight(public_beta: float, half: bool, beta: float) -> float:
    """The W for which beta x W equals a public Diffusion-DPO code's factor: public_beta, or half of it."""
    return public_beta * (0.5 if half else 1.0) / beta


check_equivalent_weight = Check(
    cases=lambda: [(5000.0, True, 0.1), (2500.0, False, 0.1), (2000.0, True, 0.5)],
    right=equivalent_weight,
    mistakes=[
        Mistake(
            "half forgotten",
            lambda b, half, beta: b / beta,
            "one of the two conventions has a factor 1/2 in front of its beta",
        ),
        Mistake(
            "half always",
            lambda b, half, beta: 0.5 * b / beta,
            "the factor 1/2 belongs to one of the two conventions only",
        ),
        Mistake(
            "beta multiplied",
            lambda b, half, beta: b * (0.5 if half else 1.0) * beta,
            "multiply your W by beta: does the public factor come out?",
        ),
        Mistake(
            "beta forgotten",
            lambda b, half, beta: b * (0.5 if half else 1.0),
            "the loss multiplies W by beta once more; divide it out here",
        ),
        Mistake(
            "half upside down",
            lambda b, half, beta: b * (2.0 if half else 1.0) / beta,
            "the half is turned into a double",
        ),
    ],
)
