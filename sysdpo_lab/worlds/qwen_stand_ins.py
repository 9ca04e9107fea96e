"""A tiny random Qwen2 with Qwen's kind of tokenizer, and a file in Intel/orca_dpo_pairs' schema: a dry run of `--profile paper`.

The models say nothing of sense. What they prove is that every loader, prompt, adapter, judge and checkpoint of the real run
of `two-llm` and `three-llm` works, on a laptop, in seconds, without a download.
"""

import json
from pathlib import Path
from typing import Any

import torch

from sysdpo_lab import atomic, loading
from sysdpo_lab.worlds.tasks import choice

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# ChatML as Qwen1.5's chat models write it: a system message of their own where the conversation has none
CHAT = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant"
    "<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = (("Ġ", "t"), ("Ġ", "a"), ("h", "e"), ("i", "n"), ("r", "e"), ("o", "n"), ("Ġt", "he"), ("in", "g"), ("Ġ", "i"))
SYSTEMS = ("", "You are an AI assistant. Answer shortly.", "You help a child with sums. Think first, then answer.")
WORDS = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b, "times": lambda a, b: a * b}


def write(folder: Path | str, rows: int = 60, seed: int = 0) -> dict[str, str]:
    """Write model, judge and data into subfolders; the settings of `run two-llm --profile paper` that name them."""
    folder = Path(folder)
    for name, own in (("model", seed), ("judge", seed + 1)):
        save_model(folder / name, own)
    write_pairs(folder / "data" / "orca_rlhf.jsonl", rows, torch.Generator().manual_seed(seed))
    return {"model": str(folder / "model"), "dataset": str(folder / "data"), "judge": f"local:{folder / 'judge'}"}


def tokenizer() -> Any:
    """Byte-level BPE without BOS, ChatML, answers that end with "<|im_end|>": Qwen's kind, with nine merges."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    made = Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(MERGES), eos_token=SPECIAL[2],
        pad_token=SPECIAL[0], additional_special_tokens=list(SPECIAL),
    )  # fmt: skip
    made.chat_template = CHAT
    return made


def configuration(vocabulary: int) -> Any:
    """Qwen1.5's architecture (Qwen2 in transformers: biased q, k, v; head and embedding apart), two layers of width 32."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip


def save_model(folder: Path, seed: int) -> None:
    """A random model with its tokenizer; the global random state stays as it was."""
    from transformers import Qwen2ForCausalLM

    words = tokenizer()
    with torch.random.fork_rng(devices=[]), loading.quiet():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(configuration(len(words)))
        model.generation_config.eos_token_id = [words.eos_token_id, words.pad_token_id]
        model.save_pretrained(str(folder))
        words.save_pretrained(str(folder))


def pair(generator: torch.Generator) -> dict[str, str]:
    """A row of the data set's schema: a sum, a right and a wrong answer.

    >>> pair(torch.Generator().manual_seed(0))["question"]
    'What is 46 times 17?'
    """
    a, b = (int(torch.randint(2, 50, (1,), generator=generator)) for _ in range(2))
    word = choice(tuple(WORDS), generator)
    right = WORDS[word](a, b)
    wrong = right + choice((-10, -2, -1, 1, 2, 10), generator)
    return {
        "system": choice(SYSTEMS, generator),
        "question": f"What is {a} {word} {b}?",
        "chosen": f"{a} {word} {b} is {right}.",
        "rejected": choice((f"{a} {word} {b} is {wrong}.", "I cannot say."), generator),
    }


def write_pairs(path: Path, rows: int, generator: torch.Generator) -> None:
    """A JSONL file of different questions."""
    found: dict[str, dict] = {}
    while len(found) < rows:
        row = pair(generator)
        found.setdefault(row["question"], row)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, "".join(json.dumps(row) + "\n" for row in found.values()))
