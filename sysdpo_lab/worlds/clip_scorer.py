"""Attributes of photographs by CLIP without any training (Radford et al. 2021): which of two texts does a picture fit better?

The level of an attribute is softmax over the pair ("a photo of a sad person", "a photo of a happy person") of the scaled
cosines, that is sigmoid(scale x (cos with the high text - cos with the low text)). A regressor of one's own can stand in
for it: any function (pictures, pairs) -> levels.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sysdpo_lab import errors, loading

HUB_ID = "openai/clip-vit-large-patch14"
MEAN, SPREAD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of CLIP's own training
Pairs = Sequence[tuple[str, str]]
Scorer = Callable[[Float[Tensor, "N 3 H W"], Pairs], Float[Tensor, "N A"]]


def zero_shot(
    states: Float[Tensor, "N E"], low: Float[Tensor, "A E"], high: Float[Tensor, "A E"], scale: float
) -> Float[Tensor, "N A"]:
    """Level of each attribute in [0, 1] from embeddings of any length.

    Args:
        states: of pictures (or of texts, to score a caption in the same way).
        low, high: of the two texts of each attribute.
        scale: CLIP's logit scale (100 in its published models); larger pushes levels to 0 and 1.

    >>> x = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]])
    >>> zero_shot(x, low=torch.tensor([[1.0, 0.0]]), high=torch.tensor([[0.0, 5.0]]), scale=1.0)[:, 0]
    tensor([0.2689, 0.7311, 0.5000])
    """
    states, low, high = (nn.functional.normalize(part.float(), dim=-1) for part in (states, low, high))
    return torch.sigmoid(scale * (states @ (high - low).T))


class ClipScorer:
    """A transformers CLIPModel as a scorer of pictures and of captions.

    Args:
        model: the CLIPModel, on the device where it is to run.
        tokenizer: its tokenizer.
        batch: pictures at a time.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, batch: int = 64):
        self.model, self.tokenizer, self.batch = model.requires_grad_(False).eval(), tokenizer, batch
        self._texts: dict[tuple[str, ...], Tensor] = {}

    @property
    def scale(self) -> float:
        """CLIP's logit scale."""
        return self.model.logit_scale.exp().item()

    def __call__(self, pictures: Float[Tensor, "N 3 H W"], pairs: Pairs) -> Float[Tensor, "N A"]:
        """Levels of the attributes in pictures with colours in [0, 1]; `pairs` holds (low text, high text)."""
        states = [self._pictures(part) for part in pictures.split(self.batch)]
        return self._levels(torch.cat(states), pairs)

    def of_texts(self, texts: Sequence[str], pairs: Pairs) -> Float[Tensor, "N A"]:
        """The same levels read from captions: what a text says, on the scale on which pictures are judged."""
        return self._levels(self._encoded(tuple(texts)), pairs)

    def _levels(self, states: Tensor, pairs: Pairs) -> Float[Tensor, "N A"]:
        low, high = (self._kept(tuple(pair[side] for pair in pairs)) for side in (0, 1))
        return zero_shot(states, low, high, self.scale).cpu()

    @torch.no_grad()
    def _pictures(self, pictures: Tensor) -> Float[Tensor, "N E"]:
        size = self.model.config.vision_config.image_size
        weight = next(self.model.parameters())
        small = nn.functional.interpolate(pictures.float(), (size, size), mode="bicubic", antialias=True).clamp(0, 1)
        middle, spread = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, SPREAD))
        pixels = ((small.cpu() - middle) / spread).to(weight.device, weight.dtype)
        seen = self.model.vision_model(pixel_values=pixels).pooler_output
        return self.model.visual_projection(seen)

    def _kept(self, texts: tuple[str, ...]) -> Tensor:
        if texts not in self._texts:
            self._texts[texts] = self._encoded(texts)
        return self._texts[texts]

    @torch.no_grad()
    def _encoded(self, texts: tuple[str, ...]) -> Float[Tensor, "N E"]:
        limit = self.model.config.text_config.max_position_embeddings
        read = self.tokenizer(list(texts), padding=True, truncation=True, max_length=limit, return_tensors="pt")
        device = next(self.model.parameters()).device
        found = self.model.text_model(read["input_ids"].to(device), attention_mask=read["attention_mask"].to(device))
        return self.model.text_projection(found.pooler_output)


def load_scorer(source: str | Path = HUB_ID, device: str = "cpu", revision: str | None = None) -> Scorer:
    """A scorer by name.

    Args:
        source: a hub id or folder of a CLIP model, or `module:function` of a regressor of one's own: called with pictures
            (N, 3, H, W) in [0, 1] and the (low, high) texts of A attributes, it returns levels (N, A) in [0, 1].

    Raises:
        MissingModelError: no CLIP model under that name.
    """
    from transformers import AutoTokenizer, CLIPModel

    if re.fullmatch(r"[\w.]+:[\w.]+", str(source)):
        from sysdpo_lab import saving

        return saving.function_at(str(source))
    try:
        with loading.quiet():
            tokenizer = AutoTokenizer.from_pretrained(str(source), revision=revision, trust_remote_code=False)
            model = CLIPModel.from_pretrained(str(source), revision=revision, use_safetensors=True)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise errors.MissingModelError(
            f"no CLIP model was found under {str(source)!r} ({first}); name a folder or a hub id such as {HUB_ID!r} (needs a "
            "network), or MODULE:FUNCTION of a regressor of your own"
        ) from error
    return ClipScorer(model.float().to(device), tokenizer)
