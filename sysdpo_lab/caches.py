"""Rows of text under a causal language model's own cache: read prompts once, append tokens, pick and repeat rows."""

import inspect
from collections.abc import Iterator, MutableMapping

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # newest first: transformers warns about the older ones


def unwrapped(model: nn.Module) -> nn.Module:
    """The language model inside peft, compile and data-parallel wrappers, whose `forward` names its arguments.

    >>> layer = nn.Linear(1, 1)
    >>> unwrapped(nn.DataParallel(layer)) is layer
    True
    """
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        elif isinstance(getattr(model, "module", None), nn.Module) and not hasattr(model, "config"):
            model = model.module
        else:
            return model


class Forward:
    """One call of the model that passes exactly the arguments which its `forward` names."""

    def __init__(self, model: nn.Module):
        self.model = model
        parameters = inspect.signature(unwrapped(model).forward).parameters
        self.accepted = set(parameters)
        self.cache_name = next((name for name in CACHE_NAMES if name in self.accepted), None)
        if self.cache_name and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            self.accepted.add("use_cache")  # some models hand it on without naming it
        self.device = next(model.parameters()).device

    @property
    def handles_padding(self) -> bool:
        """Whether positions and mask can be given, so that pad columns change nothing."""
        return {"attention_mask", "position_ids"} <= self.accepted

    @property
    def has_cache(self) -> bool:
        return self.cache_name is not None and "use_cache" in self.accepted

    def __call__(self, input_ids: Int[Tensor, "R L"], cache=None, **wanted) -> tuple[Float[Tensor, "R V"], object]:
        """Logits after the last column in fp32, and the cache (None where the model returns none)."""
        given = {name: value for name, value in {**wanted, "logits_to_keep": 1}.items() if name in self.accepted}
        if cache is not None:
            given[self.cache_name] = cache
        output = self.model(input_ids=input_ids, **given)
        return output.logits[:, -1].float(), self.cache_name and getattr(output, self.cache_name, None)


# --- rows of a cache --------------------------------------------------------------------------------------------------


class UnknownCacheError(Exception):
    """The cache holds something whose rows are not known; caught here, the prefix is then recomputed."""


def cache_tensors(holder, seen: set[int] | None = None) -> Iterator[tuple[object, object, Tensor]]:
    """Every tensor that can be reached from a cache, with the container and the key that hold it.

    >>> [(key, tensor.tolist()) for _, key, tensor in cache_tensors({"keys": [torch.tensor([5])], "length": 1})]
    [(0, [5])]
    """
    seen = set() if seen is None else seen
    if id(holder) in seen or isinstance(holder, (type, nn.Module)) or hasattr(holder, "model_type"):
        return
    seen.add(id(holder))
    for key, value in _items(holder):
        if not isinstance(value, Tensor):
            yield from cache_tensors(value, seen)
        elif isinstance(holder, tuple):
            raise UnknownCacheError("a tensor in a tuple cannot be replaced")
        elif value.dim() > 1 or value.numel() > (value.dim() == 0):  # neither a number nor an empty placeholder
            yield holder, key, value


def _items(holder) -> list[tuple[object, object]]:
    if isinstance(holder, MutableMapping):
        return list(holder.items())
    if isinstance(holder, (list, tuple)):
        return list(enumerate(holder))
    return list(getattr(holder, "__dict__", {}).items())


def check_cache(cache, rows: int) -> None:
    """Raise UnknownCacheError unless the cache holds tensors, all with one entry a row along their first axis.

    >>> check_cache([torch.zeros(2, 3), torch.zeros(3, 2)], rows=2)
    Traceback (most recent call last):
    ...
    sysdpo_lab.caches.UnknownCacheError: 2 rows, but tensors of shapes [(2, 3), (3, 2)]
    """
    shapes = sorted({tuple(tensor.shape) for _, _, tensor in cache_tensors(cache)})
    if not shapes or any(shape[0] != rows for shape in shapes):
        raise UnknownCacheError(f"{rows} rows, but tensors of shapes {shapes}")


def check_padding(cache) -> None:
    """Raise UnknownCacheError for a cache that a model brings itself: its states may count pad columns as text.

    Found by comparison with unpadded forwards: transformers' shared caches are safe, MiniMax's and DeepSeek-V4's are not.
    """
    kinds = {type(part) for part in (cache, *getattr(cache, "layers", ()))}
    strange = sorted(kind.__name__ for kind in kinds if kind.__module__ != "transformers.cache_utils")
    if strange:
        raise UnknownCacheError(f"padded prompts and a cache of the model's own: {strange}")


def select_cache_rows(cache, index: Int[Tensor, " R"]) -> None:
    """Replace every tensor of a cache by its rows `index`, in place; rows may repeat.

    It finds the tensors itself (keys, values, convolution and recurrent states, whatever a model adds), since the
    reordering methods of some caches leave part of their state behind (transformers#46612).

    >>> cache = {"keys": [torch.tensor([[1.0], [2.0]])]}
    >>> select_cache_rows(cache, torch.tensor([1, 1, 0]))
    >>> cache["keys"][0].flatten().tolist()
    [2.0, 2.0, 1.0]
    """
    chosen: dict[int, Tensor] = {}
    for holder, key, tensor in list(cache_tensors(cache)):
        if id(tensor) not in chosen:  # one tensor held twice stays one tensor
            chosen[id(tensor)] = tensor.index_select(0, index.to(tensor.device))
        if isinstance(holder, (MutableMapping, list)):
            holder[key] = chosen[id(tensor)]
        else:
            setattr(holder, key, chosen[id(tensor)])


# --- growing rows -----------------------------------------------------------------------------------------------------


class CachedRows:
    """Rows whose past lies in the model's own cache, of whatever kind the model makes.

    Positions are counted by the attention mask, so pad columns on the left change nothing.
    """

    def __init__(self, forward: Forward, input_ids: Int[Tensor, "B P"], attention_mask: Shaped[Tensor, "B P"]):
        self.forward, self.mask = forward, attention_mask
        positions = (attention_mask.cumsum(-1) - 1).clamp_min(0)
        self.next_position = positions[:, -1:] + 1
        self.logits, self.cache = self._read(input_ids, positions, None)
        check_cache(self.cache, len(input_ids))
        if not bool(attention_mask.all()):
            check_padding(self.cache)

    def _read(self, input_ids: Tensor, positions: Tensor, cache):
        given = {"attention_mask": self.mask, "position_ids": positions, "use_cache": True}
        if not self.forward.handles_padding:  # its rows are unpadded; Mamba would multiply a step's state by the long mask
            del given["attention_mask"]
        return self.forward(input_ids, cache, **given)

    def step(self, tokens: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """Append one token a row; the logits after it."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        logits, self.cache = self._read(tokens[:, None], self.next_position, self.cache)
        self.next_position = self.next_position + 1
        return logits

    def select(self, index: Int[Tensor, " R"]) -> None:
        """Keep, repeat or reorder rows."""
        select_cache_rows(self.cache, index)
        self.mask, self.next_position = self.mask[index], self.next_position[index]


class RecomputedRows:
    """Rows without a cache: the whole prefix is read again each step, rows of equal length together and unpadded."""

    def __init__(self, forward: Forward, input_ids: Int[Tensor, "B P"], attention_mask: Shaped[Tensor, "B P"]):
        self.forward, self.ids, self.lengths = forward, input_ids, attention_mask.sum(-1)
        self.logits = self._read()

    def _read(self) -> Float[Tensor, "R V"]:
        order, logits = [], []
        for length in self.lengths.unique().tolist():
            rows = (self.lengths == length).nonzero()[:, 0]
            order.append(rows)
            logits.append(self.forward(self.ids[rows, self.ids.shape[1] - length :], use_cache=False)[0])
        return torch.cat(logits)[torch.cat(order).argsort()]

    def step(self, tokens: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """Append one token a row; the logits after it."""
        self.ids, self.lengths = torch.cat([self.ids, tokens[:, None]], dim=1), self.lengths + 1
        return self._read()

    def select(self, index: Int[Tensor, " R"]) -> None:
        """Keep, repeat or reorder rows."""
        self.ids, self.lengths = self.ids[index], self.lengths[index]


def open_rows(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, use_cache: bool = True):
    """Cached rows where the model allows it, recomputed rows otherwise; the prompts have been read on return."""
    forward = Forward(model)
    input_ids, attention_mask = input_ids.to(forward.device), attention_mask.to(forward.device).long()
    if use_cache and forward.has_cache and (forward.handles_padding or bool(attention_mask.all())):
        try:
            return CachedRows(forward, input_ids, attention_mask)
        except UnknownCacheError:
            pass
    return RecomputedRows(forward, input_ids, attention_mask)
