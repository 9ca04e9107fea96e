"""Diverse (group) beam search: groups that take turns, each pushed away from the tokens that earlier groups just chose.

Vijayakumar et al. 2016 (arXiv 1610.02424) with the Hamming term, as transformers had it until release 4.56.2.
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
    check_number,
    check_pad,
    check_prompts,
    check_whole,
    eos_ids,
    evaluating,
    float64,
)

UNUSED = -1e9  # start score of a group's beams after the first: they hold the same empty prefix


@dataclass(frozen=True)
class DiverseBeams:
    """The hypotheses of a diverse beam search: B prompts, n = num_groups * beams_per_group each.

    Attributes:
        token_ids: (B, n, T) the continuation only, first EOS kept, then the pad id.
        log_probs: (B, n) the model's own log-probability, fp32 nats, summed, EOS included, no penalty.
        scores: (B, n) penalised sum / length^length_penalty; never a log-probability once a penalty was paid.
        lengths: (B, n) number of tokens including the EOS.
        groups: (B, n) the group that found it.
    """

    token_ids: Int[Tensor, "B n T"]
    log_probs: Float[Tensor, "B n"]
    scores: Float[Tensor, "B n"]
    lengths: Int[Tensor, "B n"]
    groups: Int[Tensor, "B n"]


@dataclass(frozen=True)
class _Rules:
    """The options of a search, checked."""

    beams: int
    penalty: float
    longest: int
    shortest: int
    eos: Int[Tensor, " E"]
    length_penalty: float
    early_stopping: bool | str

    def score(self, total: Float[Tensor, "..."], length: int) -> Float[Tensor, "..."]:
        """total / length^length_penalty in float64."""
        return float64(total) / length**self.length_penalty

    def attainable(self, best: Float[Tensor, " B"], length: int) -> Float[Tensor, " B"]:
        """The best score that a group is believed able to reach from its best candidate."""
        longest = self.early_stopping == "never" and self.length_penalty > 0
        return self.score(best, self.longest if longest else length)


def diverse_beam_search(
    model: nn.Module,
    input_ids: Int[Tensor, "B P"],
    attention_mask: Shaped[Tensor, "B P"],
    *,
    num_groups: int,
    beams_per_group: int = 1,
    diversity_penalty: float,
    max_new_tokens: int,
    min_new_tokens: int = 0,
    eos_token_id: int | Sequence[int],
    pad_token_id: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    finished_groups: str = "ignore",
) -> DiverseBeams:
    """Diverse beam search: at each step group g extends its beams by log p(token) - penalty * c_g(token).

    c_g(token) counts how often earlier groups chose the token at this step for the same prompt. With one beam a group
    these are num_groups coupled greedy decoders. Each prompt is read once; the cache is reordered only when beams are.

    Args:
        model: a causal language model in any dtype and mode, bare or in a peft wrapper; its flags are put back.
        input_ids, attention_mask: (B, P) prompts, padded on the left.
        num_groups, beams_per_group: G groups of m beams; each group returns its own m best hypotheses.
        diversity_penalty: >= 0 nats a repeat; larger pushes later groups further from earlier ones (paper: 20).
            Ending is never penalised: a group that ends reports its best other token at that step.
        max_new_tokens, min_new_tokens: no EOS is allowed among the first min_new_tokens tokens.
        eos_token_id: id or ids that end a hypothesis.
        pad_token_id: fills token_ids after the end.
        length_penalty: exponent of the length in `scores`; larger favours long hypotheses (scores are negative).
        early_stopping: when a group with m hypotheses is done. True: at once. False: when no candidate scores better
            at its present length. "never": when none could, were it to grow to max_new_tokens.
        finished_groups: "ignore": a done group counts for nothing, the result does not depend on the pad id, order by
            group, then score. "pad": a done group is counted as choosing the pad id at every further step, as
            transformers 4.56.2 did; order by score over all groups.

    Raises:
        UnknownOptionError: finished_groups or early_stopping.  OptionRangeError: a number out of range.
        PromptError, TokenIdError, ContextLengthError, NonFiniteError, UnsupportedModelError.
    """
    errors.check_option("finished_groups", finished_groups, ("ignore", "pad"))
    errors.check_option("early_stopping", early_stopping, (False, True, "never"))
    check_whole("num_groups", num_groups, 1)
    check_whole("beams_per_group", beams_per_group, 1)
    check_whole("max_new_tokens", max_new_tokens, 1)
    check_whole("min_new_tokens", min_new_tokens, 0)
    if min_new_tokens > max_new_tokens:
        raise errors.OptionRangeError(f"min_new_tokens={min_new_tokens} is more than max_new_tokens={max_new_tokens}")
    check_number("diversity_penalty", diversity_penalty, least=0.0)
    check_number("length_penalty", length_penalty)
    check_pad(pad_token_id)
    check_prompts(input_ids, attention_mask)
    check_context(model, attention_mask, max_new_tokens)
    with evaluating(model):
        decoder = Decoder(model, input_ids, attention_mask)
        vocabulary = decoder.log_probs.shape[1]
        eos = eos_ids(eos_token_id, vocabulary, decoder.device)
        _check_vocabulary(vocabulary, len(eos), pad_token_id, finished_groups)
        rules = _Rules(
            beams_per_group, diversity_penalty, max_new_tokens, min_new_tokens, eos, length_penalty, early_stopping
        )
        groups = [_Group(rules, len(input_ids), decoder.device) for _ in range(num_groups)]
        length = _search(decoder, groups, rules, pad_token_id if finished_groups == "pad" else None)
    for group in groups:
        group.close(length)
    return _collect(groups, pad_token_id, by_score=finished_groups == "pad")


def _check_vocabulary(vocabulary: int, ends: int, pad: int, finished_groups: str) -> None:
    if vocabulary < 1 + ends:
        raise errors.TokenIdError(f"every one of the {vocabulary} ids of the vocabulary is an EOS; nothing can be said")
    if finished_groups == "pad" and not 0 <= pad < vocabulary:
        raise errors.TokenIdError(
            f"pad_token_id={pad}: finished_groups='pad' penalises it, so it must be one of 0..{vocabulary - 1}"
        )


def _search(decoder: Decoder, groups: list["_Group"], rules: _Rules, counted_pad: int | None) -> int:
    """Let the groups grow until all are done or have max_new_tokens tokens; the number of steps."""
    batch, beams = len(decoder.log_probs), rules.beams
    copies = len(groups) * beams
    rows = torch.arange(batch, device=decoder.device).repeat_interleave(copies)
    log_probs = decoder.log_probs[rows]
    offsets = torch.arange(batch * len(groups), device=decoder.device).repeat_interleave(beams) * beams
    for step in range(rules.longest):
        by_group = log_probs.reshape(batch, len(groups), beams, -1)
        _take_turns(by_group, groups, rules, step, counted_pad)
        tokens = torch.stack([group.last for group in groups], dim=1).flatten()
        done = torch.stack([group.done for group in groups], dim=1).flatten().repeat_interleave(beams)
        parents = None
        if step == 0:
            parents = rows
        elif beams > 1:
            parents = offsets + torch.stack([group.parents for group in groups], dim=1).flatten()
        if step + 1 == rules.longest or not decoder.advance(tokens, parents, done):
            break
        log_probs = decoder.log_probs
    return step + 1


def _take_turns(by_group: Tensor, groups: list["_Group"], rules: _Rules, step: int, counted_pad: int | None) -> None:
    """One step of all groups in order; `counts` (B, V) is how often each token was chosen by the groups so far."""
    counts = None
    for index, group in enumerate(groups):
        was_done = group.done
        log_probs = by_group[:, index]
        group.extend(log_probs, None if counts is None else rules.penalty * counts, step)
        if index + 1 == len(groups):
            return
        counts = torch.zeros_like(log_probs[:, 0]) if counts is None else counts
        chosen, weight = group.last, (~was_done).to(counts.dtype)[:, None].expand(-1, rules.beams)
        if counted_pad is not None:
            chosen, weight = torch.where(was_done[:, None], counted_pad, chosen), torch.ones_like(weight)
        counts.scatter_add_(1, chosen, weight)


class _Group:
    """One group of m beams for each of B prompts, and the m best hypotheses that it has finished."""

    def __init__(self, rules: _Rules, batch: int, device: torch.device):
        shape = (batch, rules.beams)
        self.rules = rules
        self.totals: Float[Tensor, "B m"] = torch.full(shape, UNUSED, device=device)  # penalised sums of open beams
        self.totals[:, 0] = 0.0
        self.own: Float[Tensor, "B m"] = torch.zeros(shape, device=device)  # the model's log-probabilities
        self.tokens: Int[Tensor, "B m T"] = torch.zeros((*shape, rules.longest), dtype=torch.long, device=device)
        self.last: Int[Tensor, "B m"] = self.tokens[:, :, 0]
        self.parents: Int[Tensor, "B m"] = torch.arange(rules.beams, device=device).expand(shape)
        self.done: Bool[Tensor, " B"] = torch.zeros(batch, dtype=torch.bool, device=device)
        nothing = torch.full_like(self.totals, -torch.inf)  # an unused place: no token, probability 0
        self.kept = (rules.score(nothing, 1), nothing, self.tokens, torch.zeros_like(self.last))

    def extend(self, log_probs: Float[Tensor, "B m V"], penalties: Float[Tensor, "B V"] | None, step: int) -> None:
        """Choose the next m beams, store what ended, and see whether the group is done."""
        totals, own, parents, tokens = self._candidates(log_probs, penalties, step)
        ends = torch.isin(tokens, self.rules.eos)
        m = self.rules.beams
        finishing = ends[:, :m] & (totals[:, :m] > -torch.inf) & ~self.done[:, None]  # an EOS below rank m is dropped
        grown = self._grown(parents[:, :m], tokens[:, :m], step)
        self._store(finishing, totals[:, :m], own[:, :m], grown, step + 1)
        best = totals[:, 0]
        going = torch.sort(ends.byte(), dim=1, stable=True).indices[:, :m]  # the m best that do not end, in rank order
        self.totals, self.own = totals.gather(1, going), own.gather(1, going)
        self.last, self.parents = tokens.gather(1, going), parents.gather(1, going)
        self.tokens = self._grown(self.parents, self.last, step)
        self.done = self.done | self._is_done(best, step + 1)
        self.parents = torch.where(self.done[:, None], torch.arange(m, device=self.done.device), self.parents)

    def _candidates(self, log_probs: Tensor, penalties: Tensor | None, step: int):
        """The max(2, 1 + number of EOS ids) * m best extensions: penalised sum, own log-prob, parent beam, token."""
        scores = log_probs if penalties is None else log_probs - penalties[:, None]
        if step < self.rules.shortest:
            scores = scores.index_fill(2, self.rules.eos, -torch.inf)
        scores = (scores + self.totals[:, :, None]).flatten(1)
        number = max(2, 1 + len(self.rules.eos)) * self.rules.beams
        totals, index = scores.topk(number, dim=1)
        parents, tokens = index // log_probs.shape[2], index % log_probs.shape[2]
        own = self.own.gather(1, parents) + log_probs.flatten(1).gather(1, index)
        return totals, own, parents, tokens

    def _grown(self, parents: Tensor, tokens: Tensor, step: int) -> Int[Tensor, "B m T"]:
        grown = self.tokens.gather(1, parents[:, :, None].expand_as(self.tokens))
        grown[:, :, step] = tokens
        return grown

    def _store(self, which: Bool[Tensor, "B m"], totals: Tensor, own: Tensor, tokens: Tensor, length: int) -> None:
        """Keep the m best of the stored hypotheses and of those given; among equals the older stays."""
        scores = self.rules.score(totals, length).masked_fill(~which, -torch.inf)
        new = (scores, own, tokens, torch.full_like(tokens[:, :, 0], length))
        both = [torch.cat([old, fresh], dim=1) for old, fresh in zip(self.kept, new)]
        order = torch.sort(both[0], dim=1, descending=True, stable=True).indices[:, : self.rules.beams]
        wide = order[:, :, None].expand(-1, -1, tokens.shape[2])
        self.kept = tuple(part.gather(1, wide if part.dim() == 3 else order) for part in both)

    def _is_done(self, best: Float[Tensor, " B"], length: int) -> Bool[Tensor, " B"]:
        worst = self.kept[0][:, -1]
        full = worst > -torch.inf
        return full if self.rules.early_stopping is True else full & (worst >= self.rules.attainable(best, length))

    def close(self, length: int) -> None:
        """The open beams of a group that is not done count as hypotheses too."""
        which = (~self.done)[:, None].expand_as(self.totals)
        self._store(which, self.totals, self.own, self.tokens, length)


def _collect(groups: list[_Group], pad: int, by_score: bool) -> DiverseBeams:
    """All groups' hypotheses side by side, ordered by group or, best first, by score."""
    scores, own, tokens, lengths = (torch.cat(parts, dim=1) for parts in zip(*(group.kept for group in groups)))
    number = torch.arange(len(groups), device=own.device).repeat_interleave(groups[0].rules.beams).expand(own.shape)
    if by_score:
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices
        scores, own, lengths, number = (part.gather(1, order) for part in (scores, own, lengths, number))
        tokens = tokens.gather(1, order[:, :, None].expand_as(tokens))
    check_finite(own)
    tokens = tokens[:, :, : int(lengths.max())]
    after = torch.arange(tokens.shape[2], device=own.device) >= lengths[:, :, None]
    return DiverseBeams(tokens.masked_fill(after, pad), own, scores.float(), lengths, number.clone())
