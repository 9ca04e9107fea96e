"""Texts to word vectors: the small text encoder that the diffusion model of this world is trained with."""

import re
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sysdpo_lab import errors
from sysdpo_lab.worlds.faces import language

PAD, UNKNOWN = "<pad>", "<unk>"


class WordEncoder(nn.Module):
    """One vector a word: (N texts) -> (N, length, width).

    A vector is the sum of a word's and a place's, both learned, and after a degree word d of level l(d)

        vector(w) = word(w) + place(i) + 2 (l(d) - 1/2) slope(w),

    so that the vector of `happy` says how happy, on one straight line from `not` to `extremely`. With one free vector for
    each pair of words instead, the network hardly heeded degrees after the same training: each pair had to be learned alone.

    The empty text is `length` times the padding vector: what the diffusion model saw where a caption was dropped, so
    it serves as the unconditional input of classifier-free guidance.

    Args:
        vocabulary: the words; default: those of the captions' grammar.
        width: of a vector.
        length: words read; longer texts are cut.

    >>> encoder = WordEncoder()
    >>> encoder(["a very happy face on a blue background", ""]).shape
    torch.Size([2, 12, 96])
    """

    def __init__(self, vocabulary: Sequence[str] | None = None, width: int = 96, length: int = 12):
        super().__init__()
        self.vocabulary = [PAD, UNKNOWN, *(language.words() if vocabulary is None else vocabulary)]
        if len(set(self.vocabulary)) != len(self.vocabulary):
            raise errors.UnknownOptionError("a word occurs twice in the encoder's vocabulary")
        self.width, self.length = width, length
        self.index = {word: i for i, word in enumerate(self.vocabulary)}
        self.words = nn.Embedding(len(self.vocabulary), width)
        self.slopes = nn.Embedding(len(self.vocabulary), width)
        self.places = nn.Parameter(0.3 * torch.randn(length, width))
        nn.init.normal_(self.slopes.weight, std=1.5)

    def config(self) -> dict:
        """The arguments that build it again."""
        return {"vocabulary": self.vocabulary[2:], "width": self.width, "length": self.length}

    def token_ids(self, texts: Sequence[str]) -> Int[Tensor, "N L"]:
        """Word numbers, padded on the right.

        >>> WordEncoder(["a", "face"], length=4).token_ids(["A face.", "a cat"]).tolist()
        [[2, 3, 0, 0], [2, 1, 0, 0]]
        """
        rows = [re.findall(r"\w+", str(text).lower())[: self.length] for text in texts]
        ids = [[self.index.get(word, 1) for word in row] + [0] * (self.length - len(row)) for row in rows]
        return torch.tensor(ids, dtype=torch.long, device=self.places.device).reshape(len(texts), self.length)

    def degrees(self, ids: Int[Tensor, "N L"]) -> Float[Tensor, "N L"]:
        """2 (level - 1/2) of the degree word in front of each word; 0 where there is none."""
        levels = [2 * language.DEGREES[word] - 1 if word in language.DEGREES else 0.0 for word in self.vocabulary]
        found = torch.tensor(levels, dtype=self.places.dtype, device=ids.device)[ids]
        return nn.functional.pad(found, (1, 0))[:, :-1]

    def forward(self, texts: Sequence[str]) -> Float[Tensor, "N L C"]:
        """The vectors of the texts."""
        ids = self.token_ids(texts)
        return self.words(ids) + self.places + self.degrees(ids)[..., None] * self.slopes(ids)
