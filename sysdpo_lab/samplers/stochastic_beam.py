"""Stochastic beam search: k token sequences without replacement from a causal language model.

Kool, van Hoof and Welling 2019 (arXiv 1903.06059): every sequence's log-probability gets Gumbel noise, drawn top-down so
that only the k best branches are ever visited; the k largest perturbed log-probabilities are a sample without replacement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from sysdpo_lab import errors
from sysdpo_lab.decoding import (
    Decoder,
    check_context,
    check_finite,
    check_pad,
    check_prompts,
    check_whole,
    eos_ids,
    evaluating,
    float64,
)


@dataclass(frozen=True)
class StochasticBeams:
    """The k best sequences a batch row by perturbed log-probability, best first.

    Attributes:
        parents: (B, k) which of the row's m prompts a sequence continues.
        token_ids: (B, k, T) the continuation only, first EOS kept, then the pad id.
        lengths: (B, k) number of tokens including the EOS; 0 for a missing entry.
        log_probs: (B, k) float64 nats: what came in for the prompt plus the continuation's own; -inf: missing entry.
        gumbels: (B, k) float64 perturbed log-probability; -inf: missing entry.
    """

    parents: Int[Tensor, "B K"]
    token_ids: Int[Tensor, "B K T"]
    lengths: Int[Tensor, "B K"]
    log_probs: Float[Tensor, "B K"]
    gumbels: Float[Tensor, "B K"]


def log1mexp(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """log(1 - e^x) for x <= 0 without cancellation (Maechler 2012): two forms that meet at x = -log 2.

    >>> [round(v, 6) for v in log1mexp(torch.tensor([-1e-20, 0.0, -torch.inf], dtype=torch.float64)).tolist()]
    [-46.051702, -inf, -0.0]
    """
    near = x > -0.6931471805599453
    return torch.where(near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def gumbel_with_maximum(
    phi: Float[Tensor, "... n"], target_max: Float[Tensor, "..."], generator: torch.Generator | None
) -> Float[Tensor, "... n"]:
    """Independent Gumbel(phi_i), conditioned on their maximum being `target_max`, along the last axis.

    Drawn unconditionally (G_i, maximum Z), then moved (Kool et al. 2019, appendix B.3, which never exponentiates a large
    number): v_i = T - G_i + log(1 - e^(G_i - Z)), result_i = T - max(0, v_i) - log(1 + e^(-|v_i|)).

    Args:
        phi: log-probabilities, nats; -inf (impossible) stays -inf.
        target_max: T; -inf makes the whole row -inf.
        generator: source of the noise, on any device (None: torch's global one).

    Returns:
        float64 unless phi's device has none, same shape as phi; the largest entry of a row is T.

    >>> phi = torch.tensor([0.5, 0.0, 0.5]).log()
    >>> drawn = gumbel_with_maximum(phi, torch.tensor(1.5), torch.Generator().manual_seed(0))
    >>> drawn.max().item(), drawn[1].item()
    (1.5, -inf)
    """
    possible = (phi > -torch.inf) & (target_max > -torch.inf)[..., None]
    start = torch.where(possible, float64(phi), 0.0)
    target = torch.where(target_max > -torch.inf, float64(target_max), 0.0)[..., None]
    device = "cpu" if generator is None else generator.device
    noise = torch.empty(phi.shape, dtype=torch.float64, device=device).exponential_(generator=generator)
    drawn = start - noise.clamp_min_(torch.finfo(torch.float64).tiny).log_().to(start.device)
    largest = torch.where(possible, drawn, -torch.inf).amax(-1, keepdim=True)
    largest = torch.where(largest > -torch.inf, largest, 0.0)
    moved = target - drawn + log1mexp(torch.where(possible, drawn - largest, -1.0))
    result = target - moved.clamp_min(0) - torch.log1p(torch.exp(-moved.abs()))
    return torch.where(possible, result, -torch.inf)


def stochastic_beam_tokens(
    model: nn.Module,
    input_ids: Int[Tensor, "Bm P"],
    attention_mask: Shaped[Tensor, "Bm P"],
    *,
    k: int,
    log_probs: Float[Tensor, "B m"],
    gumbels: Float[Tensor, "B m"],
    max_new_tokens: int,
    eos_token_id: int | Sequence[int],
    pad_token_id: int,
    generator: torch.Generator | None,
) -> StochasticBeams:
    """Continue a stochastic beam by whole token sequences: from m prompts a batch row to the k best sequences.

    A sequence ends at its first EOS or is cut at max_new_tokens; both count as complete, so that the sequences of a
    prompt have probabilities that sum to 1 and the k returned are drawn from them without replacement.

    Args:
        model: a causal language model in any dtype and mode, bare or in a peft wrapper; its flags are put back.
        input_ids, attention_mask: (B * m, P) prompts padded on the left, the m prompts of a row next to each other.
        k: sequences a row.
        log_probs: (B, m) log-probability of each prompt's beam so far, nats (a first node: 0).
        gumbels: (B, m) its perturbed log-probability; the maximum over all its continuations will be this number. For a
            first node draw it from Gumbel(0) when inclusion probabilities are wanted; the set drawn is the same for 0.
        max_new_tokens, eos_token_id, pad_token_id: as in `sample_tokens`.
        generator: the only source of randomness (None: torch's global one).

    Returns:
        StochasticBeams; entries beyond the number of possible sequences have log_probs = gumbels = -inf.

    Raises:
        BatchMismatchError: log_probs or gumbels do not fit the prompts; NaN in one of them is a NonFiniteError.
        PromptError, TokenIdError, OptionRangeError, ContextLengthError, UnsupportedModelError.
    """
    check_whole("k", k, 1)
    check_whole("max_new_tokens", max_new_tokens, 1)
    pad = check_pad(pad_token_id)
    check_prompts(input_ids, attention_mask)
    check_context(model, attention_mask, max_new_tokens)
    _check_beams(log_probs, gumbels, len(input_ids))
    with evaluating(model):
        decoder = Decoder(model, input_ids, attention_mask)
        eos = eos_ids(eos_token_id, decoder.log_probs.shape[1], decoder.device)
        beam = _Beam.start(log_probs, gumbels, max_new_tokens, pad, decoder.device)
        for step in range(max_new_tokens):
            rows = decoder.log_probs.reshape(*beam.log_probs.shape, -1)
            beam, came_from, tokens = beam.grown(rows, k, step, eos, generator)
            last = step + 1 == max_new_tokens
            if last or not decoder.advance(tokens.flatten(), came_from.flatten(), beam.complete.flatten()):
                break
    check_finite(beam.log_probs)
    return beam.result(k, pad)


def _check_beams(log_probs: Tensor, gumbels: Tensor, prompts: int) -> None:
    shape = tuple(log_probs.shape)
    if len(shape) != 2 or tuple(gumbels.shape) != shape or shape[0] * shape[1] != prompts:
        raise errors.BatchMismatchError(
            f"{prompts} prompts need log_probs and gumbels of one shape (B, m) with B * m = {prompts}; "
            f"found {shape} and {tuple(gumbels.shape)}"
        )
    for name, value in (("log_probs", log_probs), ("gumbels", gumbels)):
        if bool((torch.isnan(value) | (value == torch.inf)).any()):
            raise errors.NonFiniteError(f"{name} of the beams holds NaN or +inf; -inf marks an impossible beam")


@dataclass(frozen=True)
class _Beam:
    """w nodes a row; a complete node is a whole sequence (or impossible) and only waits."""

    origin: Int[Tensor, "B w"]
    tokens: Int[Tensor, "B w T"]
    lengths: Int[Tensor, "B w"]
    log_probs: Float[Tensor, "B w"]
    gumbels: Float[Tensor, "B w"]
    complete: Bool[Tensor, "B w"]

    @classmethod
    def start(cls, log_probs: Tensor, gumbels: Tensor, longest: int, pad: int, device: torch.device) -> "_Beam":
        """The m prompts; one that is impossible in either number is impossible in both."""
        log_probs, gumbels = log_probs.detach().to(device), gumbels.detach().to(device)
        impossible = (log_probs == -torch.inf) | (gumbels == -torch.inf)
        phi, perturbed = (float64(part).masked_fill(impossible, -torch.inf) for part in (log_probs, gumbels))
        origin = torch.arange(phi.shape[1], device=device).expand(phi.shape)
        tokens = torch.full((*phi.shape, longest), pad, device=device)
        return cls(origin, tokens, torch.zeros_like(origin), phi, perturbed, impossible)

    def grown(self, rows: Float[Tensor, "B w V"], k: int, step: int, eos: Tensor, generator):
        """The k best of all children and complete nodes, each one's flat parent row (B, w') and last token (B, w')."""
        batch, width, vocabulary = rows.shape
        children = self.log_probs[..., None] + float64(rows)
        children = children.masked_fill(self.complete[..., None], -torch.inf)
        perturbed = gumbel_with_maximum(children, self.gumbels, generator)
        waiting = [part.masked_fill(~self.complete, -torch.inf) for part in (self.log_probs, self.gumbels)]
        all_phi, all_gumbels = (torch.cat([a.flatten(1), b], 1) for a, b in zip((children, perturbed), waiting))
        gumbels, index = all_gumbels.topk(min(k, all_gumbels.shape[1]), dim=1)
        fresh = index < width * vocabulary
        node = torch.where(fresh, index // vocabulary, index - width * vocabulary)
        token = torch.where(fresh, index % vocabulary, 0)
        beam = self._take(node, all_phi.gather(1, index), gumbels)
        tokens = beam.tokens.clone()
        tokens[:, :, step] = torch.where(fresh, token, tokens[:, :, step])
        possible = gumbels > -torch.inf
        complete = ~fresh | ~possible | torch.isin(token, eos)
        beam = _Beam(beam.origin, tokens, beam.lengths + fresh, beam.log_probs, gumbels, complete)
        offset = torch.arange(batch, device=rows.device)[:, None] * width
        return beam, node + offset, token

    def _take(self, node: Int[Tensor, "B v"], log_probs: Tensor, gumbels: Tensor) -> "_Beam":
        tokens = self.tokens.gather(1, node[:, :, None].expand(-1, -1, self.tokens.shape[2]))
        origin, lengths, complete = (part.gather(1, node) for part in (self.origin, self.lengths, self.complete))
        return _Beam(origin, tokens, lengths, log_probs, gumbels, complete)

    def result(self, k: int, pad: int) -> StochasticBeams:
        """k entries a row; impossible ones are emptied, missing ones filled in."""
        missing = k - self.gumbels.shape[1]
        gone = self.gumbels == -torch.inf
        parts = (self.origin, self.lengths.masked_fill(gone, 0), self.log_probs.masked_fill(gone, -torch.inf), self.gumbels)
        fill = (0, 0, -torch.inf, -torch.inf)
        origin, lengths, phi, gumbels = (
            nn.functional.pad(part, (0, missing), value=value) for part, value in zip(parts, fill)
        )
        tokens = nn.functional.pad(self.tokens.masked_fill(gone[..., None], pad), (0, 0, 0, missing), value=pad)
        return StochasticBeams(origin, tokens[:, :, : max(1, int(lengths.max()))], lengths, phi, gumbels)
