"""A tiny Llama that answers a request with captions: right in form, poor in order, so that it can be improved.

The training text is faulty on purpose. Only some answers are in the asked order, more of them where the prompt says
`<careful>`; a few captions name another attribute or colour, a few answers have too few. `<plain>` is the system's own
prompt; the other styles serve to draw diverse answers for preference data.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from sysdpo_lab import decoding, progress
from sysdpo_lab.worlds import tiny_lm
from sysdpo_lab.worlds.faces import drawing, language, requesting, scoring
from sysdpo_lab.worlds.faces.language import DEGREES, Caption
from sysdpo_lab.worlds.faces.requesting import Request, choice

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN, WRITE = "<pad>", "</s>", "<unk>", "<write>"
STYLES = ("plain", "careful", "creative", "bold")
TEMPLATES = {style: f"<{style}> {{x}} {WRITE}" for style in STYLES}
STEPS, BATCH, LEARNING_RATE, SEED = 1100, 64, 4e-3, 0
MAX_NEW_TOKENS = 72

# Share of training answers in the asked order, whatever the request; chance included.
IN_ORDER = {"plain": 0.45, "careful": 0.97, "creative": 0.25, "bold": 0.55}
SHARES = (0.3, 0.4, 0.12, 0.18)  # of the styles; from <careful> the model learns what an order is
SPREAD = ("plain", "careful")
BOLD_WORDS = ("not", "barely", "fairly", "very", "extremely")
OTHER_ATTRIBUTE, OTHER_COLOUR, WRONG_NUMBER, REPEATS = 0.03, 0.02, 0.005, 0.1


# --- training text ----------------------------------------------------------------------------------------------------


def _happens(probability: float, generator: torch.Generator) -> bool:
    return float(torch.rand((), generator=generator)) < probability


def _column(number: int, style: str, generator: torch.Generator) -> list[str]:
    """Degree words in random order: different ones, except now and then; in some styles never two neighbours."""
    words = list(BOLD_WORDS if style == "bold" else DEGREES)
    if _happens(REPEATS, generator):
        return [choice(words, generator) for _ in range(number)]
    while True:
        places = torch.randperm(len(words), generator=generator)[:number]
        if style not in SPREAD or int(places.sort().values.diff().min()) > 1:
            return [words[int(i)] for i in places]


def _in_order(columns: list[list[str]], directions: Sequence[str]) -> bool:
    levels = torch.tensor([[DEGREES[word] for word in column] for column in columns]).T
    return bool(scoring.order_consistency(scoring.oriented(levels, directions)))


def faulty_answer(request: Request, style: str, generator: torch.Generator) -> str:
    """Captions for a request, in the asked order with the style's probability, and with a few faults.

    >>> faulty_answer(requesting.EXAMPLE, "careful", torch.Generator().manual_seed(3))
    'a ... happy face on a blue background; a ... happy face on a blue background; ...'
    """
    directions = [direction for _, direction in request.asks]
    wanted = _happens(IN_ORDER[style], generator)
    while True:  # rejection: what is in order, or not, is otherwise as it comes
        columns = [_column(request.number, style, generator) for _ in directions]
        if wanted:
            columns = [sorted(c, key=DEGREES.get, reverse=d == "less") for c, d in zip(columns, directions)]
        if _in_order(columns, directions) == wanted:
            break
    captions = requesting.captions_of(request, list(zip(*columns)))
    captions = [_spoiled(caption, generator) for caption in captions]
    if _happens(WRONG_NUMBER, generator):
        captions = captions[:-1]
    return language.join_captions(captions)


def _spoiled(caption: Caption, generator: torch.Generator) -> Caption:
    degrees, colour = list(caption.degrees), caption.colour
    if _happens(OTHER_ATTRIBUTE, generator):
        free = [a for a in drawing.ATTRIBUTES[caption.family] if a not in dict(degrees)]
        place = int(torch.randint(len(degrees), (1,), generator=generator))
        degrees[place] = (choice(free, generator), degrees[place][1])
    if _happens(OTHER_COLOUR, generator):
        colour = choice(drawing.COLOURS, generator)
    return Caption(caption.family, tuple(degrees), colour)


def training_texts(n: int, generator: torch.Generator) -> list[tuple[str, str]]:
    """n (prompt, answer) for requests of the training split; each style as often as in SHARES."""
    texts = []
    while len(texts) < n:
        request = requesting.requests(generator, 1, "train")[0]
        style = STYLES[int(torch.multinomial(torch.tensor(SHARES), 1, generator=generator))]
        prompt = TEMPLATES[style].format(x=requesting.render(request))
        texts.append((prompt, faulty_answer(request, style, generator)))
    return texts


# --- tokenizer and model ----------------------------------------------------------------------------------------------


def vocabulary() -> list[str]:
    """All words of requests and captions, each once, in a fixed order."""
    asks = [(a, d) for names in drawing.ATTRIBUTES.values() for a in names for d in requesting.DIRECTIONS]
    texts = [
        requesting.render(Request(family, ((attribute, direction),), colour, number, wording))
        for family in drawing.FAMILIES
        for attribute, direction in asks
        if attribute in drawing.ATTRIBUTES[family]
        for wording in range(len(requesting.WORDINGS))
        for colour, number in zip(drawing.COLOURS, (3, 4, 3, 4, 3))
    ]
    words = " ".join(texts).replace(",", " , ").split()
    return sorted({*words, *language.words(), language.SEPARATOR})


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """One token a word; adds no BOS (the prompt's markers say where an answer starts)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    markers = [*(f"<{style}>" for style in STYLES), WRITE]
    words = [PAD, EOS, UNKNOWN, *markers, *vocabulary()]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)  # joins words by spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, extra_special_tokens=markers,
        padding_side="left", clean_up_tokenization_spaces=False, model_max_length=256,
    )  # fmt: skip


# --- training ---------------------------------------------------------------------------------------------------------


def train(
    steps: int = STEPS, batch: int = BATCH, seed: int = SEED, enabled: bool | None = None
) -> tuple["LlamaForCausalLM", "PreTrainedTokenizerFast", list[float]]:
    """Train the caption writer on generated text; the same seed and number of threads give the same weights.

    Args:
        steps: optimiser steps, each on `batch` new texts; the learning rate rises, stays, and falls over the last half.
        enabled: show a bar; None: on a terminal only.

    Returns:
        the model in evaluation mode, its tokenizer, and the loss of each step (nats a token of the answers).
    """
    generator, tokenizer = torch.Generator().manual_seed(seed), build_tokenizer()
    model = tiny_lm.build_model(len(tokenizer), seed)
    optimiser = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    losses = []
    with progress.bar(steps, "caption LM", enabled=enabled) as bar:
        for step in range(steps):
            rise, fall = (step + 1) / min(50, max(1, steps // 10)), 2 * (1 - step / steps)
            for group in optimiser.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, rise, max(0.02, fall))
            loss = tiny_lm.answer_loss(model, tokenizer, training_texts(batch, generator))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            losses.append(loss.item())
            bar.update(1, loss=losses[-1])
    return model.eval(), tokenizer, losses


# --- measurement ------------------------------------------------------------------------------------------------------


def write_captions(
    model: nn.Module, tokenizer, requests: Sequence[Request], generator: torch.Generator | None, style: str = "plain"
) -> list[str]:
    """One answer a request: sampled at temperature 1, or greedy without a generator."""
    prompts = [TEMPLATES[style].format(x=requesting.render(request)) for request in requests]
    return complete(model, tokenizer, prompts, generator, MAX_NEW_TOKENS)


def complete(
    model: nn.Module, tokenizer, prompts: Sequence[str], generator: torch.Generator | None, longest: int
) -> list[str]:
    """One answer of at most `longest` tokens a prompt: sampled at temperature 1, or greedy without a generator."""
    encoded = tokenizer(list(prompts), add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    inputs = encoded["input_ids"], encoded["attention_mask"]
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    options = {"max_new_tokens": longest, "eos_token_id": eos, "pad_token_id": eos if pad is None else pad}
    if generator is None:
        found = decoding.greedy_tokens(model, *inputs, **options)
    else:
        found = decoding.sample_tokens(model, *inputs, generator=generator, **options)
    return tokenizer.batch_decode(found.token_ids[:, 0], skip_special_tokens=True)


def measure(
    model: nn.Module, tokenizer, requests: Sequence[Request], generator: torch.Generator, samples: int = 2
) -> dict[str, dict[str, float]]:
    """For each style: the share of answers that are valid and in order, and the mean faithfulness, sampled at temperature 1."""
    result = {}
    for style in STYLES:
        asked = [request for request in requests for _ in range(samples)]
        answers = write_captions(model, tokenizer, asked, generator, style)
        rows = {
            "validity": scoring.validity,
            "caption_order": scoring.caption_order,
            "faithfulness": scoring.faithfulness,
        }
        result[style] = {name: sum(map(f, asked, answers)) / len(asked) for name, f in rows.items()}
    return result
