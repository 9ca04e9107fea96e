"""What a run will cost, from its settings alone."""

from collections.abc import Mapping
from typing import Any

PROMPT_TOKENS = 90  # a restaurants prompt with its chat frame, rounded up


def tokens_per_step(settings: Mapping[str, Any], hidden: int = 1, prompt: int = PROMPT_TOKENS) -> tuple[int, int]:
    """(tokens generated, tokens scored) in one step of SysDPO-Sampling.

    Drafts: k a pair and hidden node. Scores: each draft once, each final k times for winner and loser, all of it twice
    (policy and reference), prompts included.

    Args:
        settings: k, batch, max_new_tokens, and accumulate where a step has several micro-batches.
        hidden: nodes that draft (two-llm: 1, three-llm: 2), each from the input alone.
        prompt: tokens of the input with its chat frame.

    >>> tokens_per_step({"k": 2, "batch": 1, "max_new_tokens": 10})
    (20, 1280)
    """
    k, new = settings["k"], settings["max_new_tokens"]
    pairs = settings["batch"] * settings.get("accumulate", 1)
    drafts = k * hidden * (prompt + new)
    finals = 2 * k * (prompt + (hidden + 1) * new)
    return pairs * k * hidden * new, pairs * 2 * (drafts + finals)


# --- language models at the paper's size ------------------------------------------------------------------------------

QWEN = {"layers": 24, "width": 2048, "inner": 5504, "vocabulary": 151_936}  # Qwen1.5-1.8B; head and embedding apart
ORCA_PROMPT = 250  # tokens of an orca question with its system message: a guess, and an answer has max_new_tokens
KEPT = 146_000  # bytes a token and layer that the backward pass needs: counted on the meta device, see the test
PASS_SECONDS = 0.03  # one decoding step of 24 layers in transformers, whatever the batch: an assumption
FLOPS = 3e14  # of a GPU that promises 9.9e14 in bf16: an assumption


def decoder_parameters(shape: Mapping[str, int] = QWEN) -> int:
    """Weights of a Qwen2 decoder: embedding, head, and in each layer attention (biased q, k, v), three MLP maps, two norms.

    >>> f"{decoder_parameters():,}"
    '1,836,828,672'
    """
    width, inner = shape["width"], shape["inner"]
    layer = 4 * width**2 + 3 * width + 3 * width * inner + 2 * width
    return 2 * shape["vocabulary"] * width + shape["layers"] * layer + width


def lora_parameters(rank: int, shape: Mapping[str, int] = QWEN) -> int:
    """Trained numbers of one adapter on all linear layers but the head: rank x (inputs + outputs) a layer.

    >>> f"{lora_parameters(16):,}"
    '14,991,360'
    """
    width, inner = shape["width"], shape["inner"]
    return rank * shape["layers"] * (4 * 2 * width + 3 * (width + inner))


def language_memory(settings: Mapping[str, Any], nodes: int, shape: Mapping[str, int] = QWEN) -> dict[str, float]:
    """GB of a training step: weights, adapters, and what one micro-batch keeps for its backward pass.

    The reference is the base with adapters off, so there is no second copy. Answers of the data that are longer than
    max_new_tokens need more: activations and logits grow with them.

    Args:
        settings: k, batch (a micro-batch), max_new_tokens, rank, checkpointing.
        nodes: language models in the system.

    Returns:
        "weights" in bf16, "adapters" with gradients and Adam's moments in fp32, "activations" of the policy, "logits":
        those kept in fp32, and three times the largest call's for the backward pass.
    """
    one = {**settings, "accumulate": 1}
    tokens = tokens_per_step(one, nodes - 1, ORCA_PROMPT)[1] / 2  # the reference keeps nothing
    pairs_k = settings["batch"] * settings["k"]
    row = settings["max_new_tokens"] * shape["vocabulary"] * 4 / 1e9
    own = (
        2 * shape["width"] * shape["layers"]
    )  # with checkpointing: the layers' inputs in bf16, and one layer at a time
    call = pairs_k * (ORCA_PROMPT + nodes * settings["max_new_tokens"])
    kept = tokens * own + call * KEPT if settings.get("checkpointing") else tokens * KEPT * shape["layers"]
    return {
        "weights": 2 * decoder_parameters(shape) / 1e9,
        "adapters": 16 * nodes * lora_parameters(settings["rank"], shape) / 1e9,
        "activations": kept / 1e9,
        "logits": (pairs_k * (nodes - 1 + 2) + 3 * pairs_k) * row,
    }


def language_hours(
    settings: Mapping[str, Any], rows: int, nodes: int, shape: Mapping[str, int] = QWEN
) -> dict[str, float]:
    """Hours a seed on one GPU, from counts and two assumed speeds (`PASS_SECONDS`, `FLOPS`): an estimate, not a measurement.

    Args:
        settings: of the profile.
        rows: trained rows (the start is only measured).
        nodes: language models in the system.

    Returns:
        "drafting": decoding steps of the training's drafts, one after the other; "scoring": operations of the passes
        (2 a weight and token; a backward pass through a frozen base counts one forward, checkpointing one more);
        "evaluation": greedy decoding of every node for the held-out instructions, all rows.
    """
    new, micro = settings["max_new_tokens"], settings["steps"] * settings.get("accumulate", 1)
    tokens = tokens_per_step(settings, nodes - 1, ORCA_PROMPT)[1] / 2
    passes = 3 + bool(settings.get("checkpointing"))  # policy forward and backward, reference forward
    matrices = decoder_parameters(shape) - shape["vocabulary"] * shape["width"]  # the embedding is looked up
    batches = -(-settings["heldout"] // settings["eval_batch"])
    seconds = {
        "drafting": rows * micro * (nodes - 1) * new * PASS_SECONDS,
        "scoring": rows * settings["steps"] * tokens * passes * 2 * matrices / FLOPS,
        "evaluation": (rows + 1) * batches * nodes * new * PASS_SECONDS,
    }
    return {name: value / 3600 for name, value in seconds.items()}


# --- faces at the paper's size ----------------------------------------------------------------------------------------

PARAMETERS = {
    "language model": 8.03e9,
    "U-Net": 0.86e9,
    "text encoder": 0.123e9,
    "VAE": 0.084e9,
    "CLIP scorer": 0.428e9,
}
FP32 = ("VAE", "CLIP scorer")  # the others are read in half precision
LORA = {
    "language model": 2.62e6,
    "U-Net": 0.2e6,
}  # a rank: Llama-3-8B's linear layers, Stable Diffusion 1.5's attention
PICTURES, LATENT = 3.3, 4 * 64 * 64  # pictures a sequence on average, numbers in a latent


def faces_memory(rank: int) -> dict[str, float]:
    """GB for weights, adapters with their gradients and Adam's moments (fp32); activations come on top.

    The reference is the base with adapters off, so there is no second copy.

    >>> round(faces_memory(16)["language model"], 1)
    16.1
    """
    weights = {name: count * (4 if name in FP32 else 2) / 1e9 for name, count in PARAMETERS.items()}
    return {**weights, "adapters": 16 * rank * sum(LORA.values()) / 1e9}


def faces_work(settings: Mapping[str, Any]) -> dict[str, float]:
    """How many pictures a seed draws and how often the U-Net runs: counts, not minutes, since no machine is known.

    Returns:
        "pictures" drawn for data, "network calls to draw them" (two with guidance), "latents (GB)" as stored in half
        precision, "network calls of a training step" (policy and reference, winner and loser).
    """
    sides = [
        settings[f"requests_{r}"] * len(settings[f"styles_{r}"].split(",")) * settings[f"draws_{r}"] for r in (1, 2)
    ]
    pictures = PICTURES * sum(sides)
    guided = 2 if settings["guidance"] != 1 else 1
    return {
        "pictures": pictures,
        "network calls to draw them": pictures * settings["ddim_steps"] * guided,
        "latents (GB)": pictures * LATENT * 2 / 1e9,
        "network calls of a training step": settings["batch"] * 2 * 2 * PICTURES * settings["timesteps"],
    }
