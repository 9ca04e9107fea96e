"""From captions to what a diffusion network reads: text encoders of transformers, encoders of one's own, and their cache."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sysdpo_lab import errors, scoring


class States(NamedTuple):
    """What N captions become.

    Attributes:
        values: (N, L, E) one vector a position.
        mask: (N, L) 1 where the network may look, or None: everywhere.
    """

    values: Float[Tensor, "N L E"]
    mask: Int[Tensor, "N L"] | None = None


class TextEncoder(nn.Module):
    """A transformers text model as an encoder of captions: its last hidden states, padded to one length.

    Args:
        model: any text model (CLIPTextModel, T5EncoderModel, BertModel, ...); its last_hidden_state is read.
        tokenizer: its tokenizer.
        max_length: positions; longer captions are cut. None: the tokenizer's own limit (CLIP: 77).
        use_mask: whether padding is hidden, from the text model and from the diffusion network. False is Stable
            Diffusion 1.5's way: both see the padding, as in its training.

    Raises:
        TokenizerError: no tokenizer, or one without a limit while max_length is None.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, max_length: int | None = None, use_mask: bool = False):
        super().__init__()
        if not callable(tokenizer):
            raise errors.TokenizerError(f"a text encoder needs a tokenizer, found {tokenizer!r}")
        limit = getattr(tokenizer, "model_max_length", None) if max_length is None else max_length
        if not isinstance(limit, int) or not 1 <= limit < 100_000:  # transformers says "no limit" by 1e30
            raise errors.TokenizerError(
                f"the tokenizer has no length limit (model_max_length={limit!r}); pass max_length=..."
            )
        self.model, self.tokenizer, self.max_length, self.use_mask = model, tokenizer, limit, use_mask

    def forward(self, captions: Sequence[str]) -> States:
        """(N, L, E) states of the captions."""
        read = self.tokenizer(
            list(captions), padding="max_length", max_length=self.max_length, truncation=True, return_tensors="pt"
        )
        device = next(self.model.parameters()).device
        mask = read["attention_mask"].to(device) if self.use_mask else None
        found = self.model(read["input_ids"].to(device), attention_mask=mask)
        return States(found.last_hidden_state, mask)


class CaptionCache:
    """Each caption is encoded once, alone, and kept while the encoder's weights stay as they are.

    Alone, so that a caption's states do not depend on what else was in the batch when it came first.

    Args:
        encoder: called with a list of captions; returns (N, L, E), a pair with a mask (N, L), or `States`.
        limit: captions kept; the one that was not used for longest goes first.
    """

    def __init__(self, encoder: Any, limit: int = 1024):
        self.encoder, self.limit = encoder, limit
        self.kept: OrderedDict[Hashable, States] = OrderedDict()
        self.mark: tuple = ()

    def __call__(self, captions: Sequence[Hashable]) -> States:
        """States of the captions, in their order; shorter ones are padded with zeros that the mask hides."""
        mark = self._mark()
        if mark != self.mark:
            self.kept.clear()
            self.mark = mark
        # what is asked for now must survive until it is stacked, however many captions that are
        rows = {c: self.kept[c] if c in self.kept else self._encoded(c) for c in dict.fromkeys(captions)}
        for caption, states in rows.items():
            self.kept[caption] = states
            self.kept.move_to_end(caption)
        while len(self.kept) > self.limit:
            self.kept.popitem(last=False)
        return stacked([rows[caption] for caption in captions])

    def _mark(self) -> tuple:
        if not isinstance(self.encoder, nn.Module):
            return ()
        tensors = [*self.encoder.parameters(), *self.encoder.buffers()]
        return tuple((id(t), t._version, t.device, t.dtype) for t in tensors)

    @torch.no_grad()
    def _encoded(self, caption: Hashable) -> States:
        with scoring.evaluation_mode(self.encoder) if isinstance(self.encoder, nn.Module) else nullcontext():
            found = self.encoder([caption])
        states = States(found) if isinstance(found, Tensor) else States(*found)
        if states.values.dim() != 3 or len(states.values) != 1:
            raise errors.EncoderError(
                f"the encoder turned one caption into shape {tuple(states.values.shape)}; expected (1, length, width)"
            )
        if not bool(torch.isfinite(states.values).all()):
            raise errors.NonFiniteError(f"the encoder returned NaN or infinity for the caption {caption!r}")
        return States(*(None if part is None else part.detach() for part in states))


def stacked(rows: Sequence[States]) -> States:
    """Rows of (1, L_i, E) as one (N, L, E); a mask only where one is needed.

    >>> stacked([States(torch.ones(1, 1, 2)), States(torch.ones(1, 2, 2))]).mask
    tensor([[1, 0],
            [1, 1]])
    """
    longest = max(row.values.shape[1] for row in rows)
    values = torch.cat([nn.functional.pad(row.values, (0, 0, 0, longest - row.values.shape[1])) for row in rows])
    if all(row.mask is None and row.values.shape[1] == longest for row in rows):
        return States(values)
    masks = [torch.ones(row.values.shape[:2], device=values.device) if row.mask is None else row.mask for row in rows]
    return States(values, torch.cat([nn.functional.pad(mask.long(), (0, longest - mask.shape[1])) for mask in masks]))
