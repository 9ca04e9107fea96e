"""Token-by-token decoding of any causal language model: each prompt is read once, then one token a row and step.

`Decoder` hides the model's cache. The searches and samplers only see next-token log-probabilities (fp32) of rows that
they extend, duplicate, reorder and finish.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sysdpo_lab import errors

CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # newest first: transformers warns about the older ones
POSITION_TABLES = ("wpe", "embed_positions", "position_embedding", "position_embeddings")
STEPS_BETWEEN_LOOKS = 8  # on an accelerator: asking "is anything left to do?" makes the host wait


# --- the model ----------------------------------------------------------------------------------------------------------


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


def unwrapped(model: nn.Module) -> nn.Module:
    """The language model inside peft, compile and data-parallel wrappers: the one whose `forward` names its arguments."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        elif isinstance(getattr(model, "module", None), nn.Module) and not hasattr(model, "config"):
            model = model.module
        else:
            return model


class _Forward:
    """One call of the model that passes exactly the arguments which its `forward` names."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.accepted = set(inspect.signature(unwrapped(model).forward).parameters)
        self.cache_name = next((name for name in CACHE_NAMES if name in self.accepted), None)
        self.device = next(model.parameters()).device

    @property
    def handles_padding(self) -> bool:
        """Whether positions and mask can be given, so that pad columns change nothing."""
        return {"attention_mask", "position_ids"} <= self.accepted

    def __call__(self, input_ids, attention_mask=None, position_ids=None, cache=None, use_cache=True):
        """Logits after the last column in fp32 (R, V), and the output for whoever wants its cache."""
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache, "logits_to_keep": 1}
        given = {name: value for name, value in given.items() if name in self.accepted and value is not None}
        if cache is not None:
            given[self.cache_name] = cache
        output = self.model(input_ids=input_ids, **given)
        return output.logits[:, -1].float(), output


# --- rows of a cache ----------------------------------------------------------------------------------------------------


class _UnknownCache(Exception):
    """The cache holds something whose rows are not known."""


def _cache_tensors(holder, seen: set[int]) -> Iterator[tuple[object, object, Tensor]]:
    """Every tensor that can be reached from a cache, with the container and key that hold it."""
    if id(holder) in seen or isinstance(holder, (type, nn.Module)) or hasattr(holder, "model_type"):
        return
    seen.add(id(holder))
    if isinstance(holder, MutableMapping):
        items = list(holder.items())
    elif isinstance(holder, (list, tuple)):
        items = list(enumerate(holder))
    else:
        items = list(getattr(holder, "__dict__", {}).items())
    for key, value in items:
        if not isinstance(value, Tensor):
            yield from _cache_tensors(value, seen)
        elif isinstance(holder, tuple):
            raise _UnknownCache("a tensor in a tuple cannot be replaced")
        elif value.dim() and value.numel():
            yield holder, key, value


def _check_cache(cache, rows: int) -> None:
    """Raise _UnknownCache unless the cache holds tensors, all with one entry a row along their first axis."""
    shapes = [tuple(tensor.shape) for _, _, tensor in _cache_tensors(cache, set())]
    if not shapes or any(shape[0] != rows for shape in shapes):
        raise _UnknownCache(f"{rows} rows, but tensors of shapes {sorted(set(shapes))}")


def select_cache_rows(cache, index: Int[Tensor, " R"]) -> None:
    """Replace every tensor of a cache by the rows `index`, in place; rows may repeat.

    It finds the tensors itself (keys, values, convolution and recurrent states, whatever a model adds), since the
    reordering methods of some caches leave part of their state behind (transformers#46612).

    >>> cache = {"keys": [torch.tensor([[1.0], [2.0]])]}
    >>> select_cache_rows(cache, torch.tensor([1, 1, 0]))
    >>> cache["keys"][0].flatten().tolist()
    [2.0, 2.0, 1.0]
    """
    chosen: dict[int, Tensor] = {}
    for holder, key, tensor in list(_cache_tensors(cache, set())):
        if id(tensor) not in chosen:  # one tensor held twice stays one tensor
            chosen[id(tensor)] = tensor.index_select(0, index.to(tensor.device))
        if isinstance(holder, (MutableMapping, list)):
            holder[key] = chosen[id(tensor)]
        else:
            setattr(holder, key, chosen[id(tensor)])


class _CachedRows:
    """Rows whose past lies in the model's own cache, of whatever kind the model makes."""

    def __init__(self, forward: _Forward, input_ids: Tensor, attention_mask: Tensor):
        self.forward, self.mask = forward, attention_mask
        positions = (attention_mask.cumsum(-1) - 1).clamp_min(0)
        self.next_position = positions[:, -1:] + 1
        self.logits, output = forward(input_ids, attention_mask, positions)
        self.cache = getattr(output, forward.cache_name, None)
        if self.cache is None:
            raise _UnknownCache("the model returned no cache")
        _check_cache(self.cache, len(input_ids))

    def step(self, tokens: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        logits, output = self.forward(tokens[:, None], self.mask, self.next_position, self.cache)
        self.cache, self.next_position = getattr(output, self.forward.cache_name), self.next_position + 1
        return logits

    def select(self, index: Tensor) -> None:
        select_cache_rows(self.cache, index)
        self.mask, self.next_position = self.mask[index], self.next_position[index]


class _RecomputedRows:
    """Rows without a cache: the whole prefix is read again each step, rows of equal length together and unpadded."""

    def __init__(self, forward: _Forward, input_ids: Tensor, attention_mask: Tensor):
        self.forward, self.ids, self.lengths = forward, input_ids, attention_mask.sum(-1)
        self.logits = self._read()

    def _read(self) -> Tensor:
        logits = {}
        for length in self.lengths.unique().tolist():
            rows = (self.lengths == length).nonzero()[:, 0]
            last, _ = self.forward(self.ids[rows, self.ids.shape[1] - length :], use_cache=False)
            logits.update(zip(rows.tolist(), last))
        return torch.stack([logits[row] for row in range(len(self.ids))])

    def step(self, tokens: Tensor) -> Tensor:
        self.ids, self.lengths = torch.cat([self.ids, tokens[:, None]], dim=1), self.lengths + 1
        return self._read()

    def select(self, index: Tensor) -> None:
        self.ids, self.lengths = self.ids[index], self.lengths[index]


def _open_rows(forward: _Forward, input_ids: Tensor, attention_mask: Tensor, use_cache: bool):
    """Cached rows where the model allows it, recomputed rows otherwise."""
    padded = not bool(attention_mask.all())
    if use_cache and forward.cache_name and "use_cache" in forward.accepted and (forward.handles_padding or not padded):
        try:
            return _CachedRows(forward, input_ids, attention_mask)
        except _UnknownCache:
            pass
    return _RecomputedRows(forward, input_ids, attention_mask)


# --- the decoder --------------------------------------------------------------------------------------------------------


class Decoder:
    """Next-token log-probabilities of rows that grow by one token a step. Use it inside `evaluating(model)`.

    The prompts are read in one forward of B rows; duplicates for k samples or beams are made from the cache afterwards.
    Rows that are finished are dropped from the computation (at once on CPU, every few steps on an accelerator).

    Args:
        model: a causal language model, bare or in a peft wrapper.
        input_ids, attention_mask: (B, P) prompts, padded on the left.
        use_cache: False recomputes the prefix each step (slow; for comparison).

    Attributes:
        log_probs: (N, V) fp32 log-softmax of the model's logits for each row; zeros for a finished row.
        cached: whether the model's cache is used. It is not when the model has none, when its cache holds state whose
            rows are unknown, or when the prompts are padded and the model takes no `position_ids`.

    Raises:
        PromptError: wrong shapes, an empty prompt, or padding that is not on the left.
        UnsupportedModelError: a prompt-learning adapter.
    """

    def __init__(self, model: nn.Module, input_ids: Int[Tensor, "B P"], attention_mask: Int[Tensor, "B P"],
                 use_cache: bool = True):
        check_prompts(input_ids, attention_mask)
        _check_adapter(model)
        forward = _Forward(model)
        device = forward.device
        self._rows = _open_rows(forward, input_ids.to(device), attention_mask.to(device).long(), use_cache)
        self.log_probs: Float[Tensor, "N V"] = torch.log_softmax(self._rows.logits, dim=-1)
        self.cached = isinstance(self._rows, _CachedRows)
        self._slots = torch.arange(len(input_ids), device=device)  # which rows are computed, in the order of the cache
        self._every = 1 if device.type == "cpu" else STEPS_BETWEEN_LOOKS
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
        """Append one token to each of N rows; False, with nothing computed, when every row is known to be finished.

        Args:
            tokens: row j's next token; any id of the vocabulary where finished.
            parents: row j continues row parents[j] of the step before; None: row j itself. The number of rows may change.
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
        self.log_probs = fresh
        if len(fresh) < len(tokens):
            self.log_probs = fresh.new_zeros(len(tokens), fresh.shape[1]).index_copy_(0, self._slots, fresh)
        return True

    def _select(self, wanted: Tensor, before: Tensor, rows: int) -> None:
        """Bring the cache's rows `before` into the order `wanted`; no work when they already are."""
        if wanted is before or torch.equal(wanted, before):
            return
        place = torch.zeros(rows, dtype=torch.long, device=self.device)
        place[before] = torch.arange(len(before), device=self.device)
        self._rows.select(place[wanted])


# --- checks -------------------------------------------------------------------------------------------------------------


def check_prompts(input_ids: Tensor, attention_mask: Tensor) -> None:
    """Raise PromptError unless both are (B, P), the mask is 0/1 and each row is zeros (padding), then at least one 1.

    >>> check_prompts(torch.tensor([[0, 5]]), torch.tensor([[1, 0]]))
    Traceback (most recent call last):
    ...
    sysdpo_lab.errors.PromptError: row 0: the attention mask [1, 0] is not padded on the left; ...
    """
    if input_ids.dim() != 2 or 0 in input_ids.shape or input_ids.is_floating_point():
        raise errors.PromptError(f"input_ids must be integers of shape (B, P), found {input_ids.dtype} {tuple(input_ids.shape)}")
    if attention_mask.shape != input_ids.shape:
        raise errors.PromptError(
            f"the attention mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}; they must agree"
        )
    mask = attention_mask.long()
    good = ((mask == 0) | (mask == 1)).all(-1) & (mask.diff(dim=-1) >= 0).all(-1) & (mask[:, -1] == 1)
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise errors.PromptError(
            f"row {row}: the attention mask {attention_mask[row].tolist()} is not padded on the left; it must be zeros, "
            "then at least one 1 (set tokenizer.padding_side = 'left')"
        )


def _check_adapter(model: nn.Module) -> None:
    configs = getattr(model, "peft_config", None)
    active = getattr(model, "active_adapter", None)
    config = configs.get(active) if isinstance(configs, dict) and isinstance(active, str) else None
    if getattr(config, "is_prompt_learning", False):
        raise errors.UnsupportedModelError(
            f"adapter {active!r} is a prompt-learning adapter ({type(config).__name__}): it inserts virtual tokens at every "
            "forward and cannot be decoded step by step; use LoRA"
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


def eos_ids(eos_token_id: int | Sequence[int] | Tensor, vocabulary: int, device=None) -> Int[Tensor, " E"]:
    """The EOS ids as a tensor, repeats removed, or TokenIdError when there is none or one is outside the vocabulary.

    >>> eos_ids([7, 2, 7], vocabulary=10).tolist()
    [7, 2]
    """
    listed = eos_token_id.tolist() if isinstance(eos_token_id, Tensor) else eos_token_id
    listed = [listed] if isinstance(listed, int) else list(listed or ())
    wrong = [i for i in listed if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocabulary]
    if wrong or not listed:
        raise errors.TokenIdError(
            f"eos_token_id={eos_token_id!r}: " + (f"{wrong[0]!r} is no id of the vocabulary 0..{vocabulary - 1}" if wrong else
            "at least one id is needed (usually tokenizer.eos_token_id)")
        )
    return torch.tensor(list(dict.fromkeys(listed)), device=device)


def check_pad(pad_token_id: object) -> int:
    """The pad id, which only fills the results and is never shown to the model, so any whole number will do."""
    if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, int):
        raise errors.TokenIdError(f"pad_token_id={pad_token_id!r} must be a whole number (often tokenizer.pad_token_id)")
    return pad_token_id


def check_context(model: nn.Module, attention_mask: Tensor, max_new_tokens: int) -> None:
    """Raise ContextLengthError when a model with a table of positions has too few rows in it (rotary models have none)."""
    base = unwrapped(model)
    limit = getattr(getattr(base, "config", None), "max_position_embeddings", None)
    tables = (name for name, module in base.named_modules() if isinstance(module, nn.Embedding))
    if not limit or not any(name.rpartition(".")[2] in POSITION_TABLES for name in tables):
        return
    row = int(attention_mask.sum(-1).argmax())
    needed = int(attention_mask[row].sum()) + max_new_tokens - 1  # the last token is never read
    if needed > limit:
        raise errors.ContextLengthError(
            f"row {row}: a prompt of {int(attention_mask[row].sum())} tokens and max_new_tokens={max_new_tokens} need {needed} "
            f"positions, the model has {limit}; shorten the prompt or lower max_new_tokens"
        )


# --- sampling and greedy decoding ---------------------------------------------------------------------------------------


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
    attention_mask: Int[Tensor, "B P"],
    *,
    num_samples: int = 1,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int],
    pad_token_id: int,
    temperature: float = 1.0,
    generator: torch.Generator | None,
) -> Continuations:
    """Ancestral samples: y_t ~ softmax(logits / temperature), the whole vocabulary, until an EOS or max_new_tokens.

    One uniform number a row and step from `generator` is turned into a token by inverting the cumulative probabilities
    in float64, so the draws do not depend on the device, on other rows' lengths or on the global random state.

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
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 < temperature < float("inf"):
        raise errors.OptionRangeError(f"temperature={temperature!r} must be positive and finite; greedy_tokens takes the mode")
    device = "cpu" if generator is None else generator.device
    shape = (max_new_tokens, len(input_ids) * num_samples)
    uniform = torch.rand(shape, dtype=torch.float64, device=device, generator=generator)

    def draw(log_probs, step):
        return invert_cumulative(log_probs, uniform[step], temperature)

    return _continue(model, input_ids, attention_mask, num_samples, max_new_tokens, eos_token_id, pad_token_id, draw)


def greedy_tokens(
    model: nn.Module,
    input_ids: Int[Tensor, "B P"],
    attention_mask: Int[Tensor, "B P"],
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
    scaled = float64(log_probs) / temperature
    cumulative = torch.softmax(scaled, dim=-1).cumsum(-1)
    total = cumulative[:, -1:]
    target = uniform.to(scaled)[:, None] * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))  # rounding must not run past the end
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(log_probs.shape[1] - 1).to(log_probs.device)


def float64(values: Tensor) -> Tensor:
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


def check_finite(log_probs: Float[Tensor, " N"]) -> None:
    """Raise NonFiniteError when the model gave NaN for a row that was decoded."""
    if bool(torch.isnan(log_probs).any()):
        row = int(torch.isnan(log_probs).nonzero()[0, 0])
        raise errors.NonFiniteError(
            f"decoding: the model's log-probabilities of continuation {row} are NaN; its weights or logits are not finite "
            "(half precision often overflows: try bfloat16 or float32)"
        )
