"""Token-by-token decoding of any causal language model: each prompt is read once, then one token a row and step.

`Decoder` hides the model's cache. Samplers and searches only see next-token log-probabilities (fp32) of rows that they
extend, repeat, reorder and finish.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from sysdpo_lab import errors
from sysdpo_lab.caches import CachedRows, open_rows, unwrapped

POSITION_TABLES = ("wpe", "embed_positions", "position_embedding", "position_embeddings")
STEPS_BETWEEN_LOOKS = 8  # on an accelerator: asking "is anything left to do?" makes the host wait


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block the model is in evaluation mode and no graph is built; every module's own flag comes back after.

    >>> model = nn.Sequential(nn.Dropout(0.5).eval(), nn.Dropout(0.5))
    >>> with evaluating(model):
    ...     [module.training for module in model]
    [False, False]
    >>> [module.training for module in model]
    [False, True]
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class Decoder:
    """Next-token log-probabilities of rows that grow by one token a step. Use it inside `evaluating(model)`.

    The prompts are read in one forward of B rows; rows for k samples or beams are made from the cache afterwards.
    Finished rows are dropped from the computation (at once on CPU, every few steps on an accelerator).

    Args:
        model: a causal language model, bare or in a peft wrapper.
        input_ids, attention_mask: (B, P) prompts, padded on the left.
        use_cache: False recomputes the prefix each step (slow; for comparison).

    Attributes:
        log_probs: (N, V) fp32 log-softmax of the model's logits after each row; zeros for a finished row.
        cached: whether the model's cache is used. It is not when the model has none, when its cache holds state whose
            rows are unknown, or when the prompts are padded and the model takes no `position_ids`.

    Raises:
        PromptError: wrong shapes, an empty prompt, or padding that is not on the left.
        UnsupportedModelError: a prompt-learning adapter.
    """

    def __init__(
        self,
        model: nn.Module,
        input_ids: Int[Tensor, "B P"],
        attention_mask: Shaped[Tensor, "B P"],
        use_cache: bool = True,
    ):
        check_prompts(input_ids, attention_mask)
        check_adapter(model)
        self._rows = open_rows(model, input_ids, attention_mask, use_cache)
        self.log_probs: Float[Tensor, "N V"] = torch.log_softmax(self._rows.logits, dim=-1)
        self.cached = isinstance(self._rows, CachedRows)
        self._slots = torch.arange(len(input_ids), device=self.device)  # the rows that are computed, in cache order
        self._every = 1 if self.device.type == "cpu" else STEPS_BETWEEN_LOOKS
        self._steps = 0

    @property
    def device(self) -> torch.device:
        return self.log_probs.device

    def advance(
        self,
        tokens: Int[Tensor, " N"],
        parents: Int[Tensor, " N"] | None = None,
        finished: Bool[Tensor, " N"] | None = None,
    ) -> bool:
        """Append one token to each of N rows; False, with nothing computed, when all are known to be finished.

        Args:
            tokens: row j's next token; any id of the vocabulary where finished.
            parents: row j continues row parents[j] of the step before; None: row j itself. N may change.
            finished: rows that need no further log-probabilities. Without `parents` a finished row stays finished.
        """
        before, rows = self._slots, len(self.log_probs)
        self._steps += 1
        if parents is not None:
            self._slots = torch.arange(len(tokens), device=self.device)
        if finished is not None and (parents is not None or self._steps % self._every == 0):
            self._slots = (~finished).nonzero()[:, 0]
        if not len(self._slots):
            return False
        self._select(self._slots if parents is None else parents[self._slots], before, rows)
        fresh = torch.log_softmax(self._rows.step(tokens[self._slots]), dim=-1)
        if len(fresh) < len(tokens):
            fresh = fresh.new_zeros(len(tokens), fresh.shape[1]).index_copy_(0, self._slots, fresh)
        self.log_probs = fresh
        return True

    def _select(self, wanted: Tensor, before: Tensor, rows: int) -> None:
        """Bring the cached rows `before` into the order `wanted`; no work when they are in it."""
        if wanted is before or torch.equal(wanted, before):
            return
        place = torch.zeros(rows, dtype=torch.long, device=self.device)
        place[before] = torch.arange(len(before), device=self.device)
        self._rows.select(place[wanted])


# --- checks -----------------------------------------------------------------------------------------------------------


def check_prompts(input_ids: Tensor, attention_mask: Tensor) -> None:
    """Raise PromptError unless both are (B, P) and each row of the mask is zeros (padding), then at least one 1.

    >>> check_prompts(torch.tensor([[0, 5]]), torch.tensor([[1, 0]]))
    Traceback (most recent call last):
    ...
    sysdpo_lab.errors.PromptError: row 0: the attention mask [1, 0] is not padded on the left: it must be ...
    """
    shape = tuple(input_ids.shape)
    if len(shape) != 2 or 0 in shape or input_ids.is_floating_point():
        raise errors.PromptError(f"input_ids must be integers of shape (B, P), found {input_ids.dtype} {shape}")
    if tuple(attention_mask.shape) != shape:
        raise errors.PromptError(f"input_ids {shape} and the attention mask {tuple(attention_mask.shape)} must agree")
    mask = attention_mask.long()
    good = ((mask == 0) | (mask == 1)).all(-1) & (mask.diff(dim=-1) >= 0).all(-1) & (mask[:, -1] == 1)
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise errors.PromptError(
            f"row {row}: the attention mask {attention_mask[row].tolist()} is not padded on the left: it must be zeros, "
            "then at least one 1 (set tokenizer.padding_side = 'left')"
        )


def check_adapter(model: nn.Module) -> None:
    """Raise UnsupportedModelError for a prompt-learning adapter, which inserts tokens at every forward."""
    configs, active = getattr(model, "peft_config", None), getattr(model, "active_adapter", None)
    config = configs.get(active) if isinstance(configs, dict) and isinstance(active, str) else None
    if getattr(config, "is_prompt_learning", False):
        raise errors.UnsupportedModelError(
            f"adapter {active!r} ({type(config).__name__}) inserts virtual tokens at every forward and cannot be decoded "
            "step by step; use LoRA"
        )


def check_whole(name: str, value: object, least: int) -> int:
    """`value` as an int, or OptionRangeError unless it is a whole number >= least.

    >>> check_whole("max_new_tokens", 0, 1)
    Traceback (most recent call last):
    ...
    sysdpo_lab.errors.OptionRangeError: max_new_tokens=0 must be a whole number >= 1
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise errors.OptionRangeError(f"{name}={value!r} must be a whole number >= {least}")
    return value


def check_number(name: str, value: object, least: float = -float("inf"), above: float = -float("inf")) -> float:
    """`value` as a finite float >= least and > above, or OptionRangeError.

    >>> check_number("temperature", 0.5, above=0.0)
    0.5
    """
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else float("nan")
    if not (least <= number < float("inf") and number > above):
        limits = [f">= {least:g}"] * (least > -float("inf")) + [f"> {above:g}"] * (above > -float("inf"))
        raise errors.OptionRangeError(f"{name}={value!r} must be a finite number {' and '.join(limits)}".rstrip())
    return number


def eos_ids(eos_token_id: int | Sequence[int] | Tensor, vocabulary: int, device=None) -> Int[Tensor, " E"]:
    """The EOS ids as a tensor without repeats, or TokenIdError when there is none or one is outside the vocabulary.

    >>> eos_ids([7, 2, 7], vocabulary=10).tolist()
    [7, 2]
    """
    listed = eos_token_id.tolist() if isinstance(eos_token_id, Tensor) else eos_token_id
    listed = [listed] if isinstance(listed, int) else list(() if listed is None else listed)
    if not listed:
        raise errors.TokenIdError(f"eos_token_id={eos_token_id!r}: at least one id is needed (tokenizer.eos_token_id)")
    wrong = [i for i in listed if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocabulary]
    if wrong:
        raise errors.TokenIdError(f"eos_token_id={eos_token_id!r}: the vocabulary has the ids 0..{vocabulary - 1}")
    return torch.tensor(list(dict.fromkeys(listed)), device=device)


def check_pad(pad_token_id: object) -> int:
    """The pad id; it only fills the results and is never shown to the model, so any whole number will do."""
    if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, int):
        raise errors.TokenIdError(f"pad_token_id={pad_token_id!r} must be a whole number (tokenizer.pad_token_id)")
    return pad_token_id


def check_context(model: nn.Module, attention_mask: Shaped[Tensor, "B P"], max_new_tokens: int) -> None:
    """Raise ContextLengthError when a model with a table of positions lacks rows in it (rotary models have no table)."""
    base = unwrapped(model)
    limit = getattr(getattr(base, "config", None), "max_position_embeddings", None)
    tables = (name for name, module in base.named_modules() if isinstance(module, nn.Embedding))
    if not limit or not any(name.rpartition(".")[2] in POSITION_TABLES for name in tables):
        return
    row = int(attention_mask.sum(-1).argmax())
    prompt = int(attention_mask[row].sum())
    needed = prompt + max_new_tokens - 1  # the last token is never read
    if needed > limit:
        raise errors.ContextLengthError(
            f"row {row}: {prompt} prompt tokens and max_new_tokens={max_new_tokens} need {needed} positions, the model "
            f"has {limit}; shorten the prompt or lower max_new_tokens"
        )


def check_finite(log_probs: Float[Tensor, "..."]) -> None:
    """Raise NonFiniteError when the model gave NaN for a row that was decoded."""
    bad = torch.isnan(log_probs.flatten())
    if bool(bad.any()):
        raise errors.NonFiniteError(
            f"decoding: the model's log-probability of continuation {int(bad.nonzero()[0, 0])} is NaN; its logits are "
            "not finite (half precision often overflows: try bfloat16 or float32)"
        )


# --- sampling and greedy decoding -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Continuations:
    """k continuations of each of B prompts.

    Attributes:
        token_ids: (B, k, T) the continuation only, first EOS kept, then the pad id.
        lengths: (B, k) number of tokens including the EOS.
        log_probs: (B, k) the model's own log-probability of these tokens, fp32 nats, summed, EOS included.
        ended: (B, k) whether an EOS closed it; False: cut at max_new_tokens.
    """

    token_ids: Int[Tensor, "B K T"]
    lengths: Int[Tensor, "B K"]
    log_probs: Float[Tensor, "B K"]
    ended: Bool[Tensor, "B K"]


def sample_tokens(
    model: nn.Module,
    input_ids: Int[Tensor, "B P"],
    attention_mask: Shaped[Tensor, "B P"],
    *,
    num_samples: int = 1,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int],
    pad_token_id: int,
    temperature: float = 1.0,
    generator: torch.Generator | None,
) -> Continuations:
    """Ancestral samples: y_t ~ softmax(logits / temperature) over the whole vocabulary, until an EOS or max_new_tokens.

    One uniform number a row and step from `generator` becomes a token by inverting the cumulative probabilities in
    float64, so the draws depend neither on the device nor on when other rows end, nor on the global random state.

    Args:
        model: a causal language model in any dtype and mode, bare or in a peft wrapper; its flags are put back.
        input_ids, attention_mask: (B, P) prompts, padded on the left.
        num_samples: k samples a prompt; each prompt is read once.
        max_new_tokens: longest continuation.
        eos_token_id: id or ids that end a continuation.
        pad_token_id: fills token_ids after the end; no influence on what is drawn.
        temperature: > 0; smaller is closer to greedy. `log_probs` stay those of temperature 1.
        generator: the only source of randomness (None: torch's global one).

    Raises:
        PromptError, TokenIdError, OptionRangeError, ContextLengthError, NonFiniteError, UnsupportedModelError.
    """
    check_whole("num_samples", num_samples, 1)
    check_whole("max_new_tokens", max_new_tokens, 1)
    check_number("temperature", temperature, above=0.0)
    device = "cpu" if generator is None else generator.device
    shape = (max_new_tokens, len(input_ids) * num_samples)
    uniform = torch.rand(shape, dtype=torch.float64, device=device, generator=generator)

    def draw(log_probs: Tensor, step: int) -> Tensor:
        return invert_cumulative(log_probs, uniform[step], temperature)

    return _continue(model, input_ids, attention_mask, num_samples, max_new_tokens, eos_token_id, pad_token_id, draw)


def greedy_tokens(
    model: nn.Module,
    input_ids: Int[Tensor, "B P"],
    attention_mask: Shaped[Tensor, "B P"],
    *,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int],
    pad_token_id: int,
) -> Continuations:
    """The most likely token at each step (the smallest id among equals): k = 1. Arguments as in `sample_tokens`."""
    check_whole("max_new_tokens", max_new_tokens, 1)
    return _continue(model, input_ids, attention_mask, 1, max_new_tokens, eos_token_id, pad_token_id, _mode)


def _mode(log_probs: Tensor, step: int) -> Tensor:
    return log_probs.argmax(-1)


def invert_cumulative(
    log_probs: Float[Tensor, "N V"], uniform: Float[Tensor, " N"], temperature: float = 1.0
) -> Int[Tensor, " N"]:
    """The token in whose stretch of the cumulative probabilities (of p^(1/temperature), normalised) `uniform` falls.

    >>> log_probs = torch.tensor([[0.25, 0.0, 0.75]]).log().expand(3, 3)
    >>> invert_cumulative(log_probs, torch.tensor([0.0, 0.249, 0.25])).tolist()
    [0, 0, 2]
    """
    cumulative = torch.softmax(float64(log_probs) / temperature, dim=-1).cumsum(-1)
    total = cumulative[:, -1:]
    target = uniform.to(total)[:, None] * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))  # rounding must not pass the end
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return found.clamp_max(log_probs.shape[1] - 1).to(log_probs.device)


def float64(values: Tensor) -> Float[Tensor, "..."]:
    """`values` in float64, on the CPU where the device has no such type (Apple's)."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _continue(model, input_ids, attention_mask, copies: int, longest: int, eos_token_id, pad_token_id, choose: Callable):
    """`copies` continuations of each prompt; `choose(log_probs, step)` names each row's next token."""
    pad = check_pad(pad_token_id)
    check_prompts(input_ids, attention_mask)
    check_context(model, attention_mask, longest)
    with evaluating(model):
        decoder = Decoder(model, input_ids, attention_mask)
        eos = eos_ids(eos_token_id, decoder.log_probs.shape[1], decoder.device)
        parents = torch.arange(len(input_ids), device=decoder.device).repeat_interleave(copies)
        log_probs = decoder.log_probs[parents]
        tokens = torch.full((len(parents), longest), pad, device=decoder.device)
        total = log_probs.new_zeros(len(parents))
        ended = torch.zeros(len(parents), dtype=torch.bool, device=decoder.device)
        lengths = torch.zeros(len(parents), dtype=torch.long, device=decoder.device)
        for step in range(longest):
            token = choose(log_probs, step)
            tokens[:, step] = torch.where(ended, pad, token)
            total += torch.where(ended, 0.0, log_probs.gather(1, token[:, None])[:, 0])
            lengths += ~ended
            ended = ended | torch.isin(token, eos)
            if step + 1 == longest or not decoder.advance(token, None if step else parents, ended):
                break
            log_probs = decoder.log_probs
    check_finite(total)
    rows = (len(input_ids), copies)
    kept = tokens[:, : int(lengths.max())]
    return Continuations(kept.reshape(*rows, -1), lengths.reshape(rows), total.reshape(rows), ended.reshape(rows))
