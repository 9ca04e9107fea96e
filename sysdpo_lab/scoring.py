"""Log-probabilities of tokens: the one place where a language model's logits become numbers of E1.

Layout of a batch of N rows: prompts padded on the left, completions on the right, so that every completion starts in
the same column and only completion positions reach the model's head.
"""

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sysdpo_lab.components import adapters

Ids = Sequence[int]


# --- numbers ------------------------------------------------------------------------------------------------------------


def token_log_probs(logits: Float[Tensor, "N T V"], token_ids: Int[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """log softmax(logits)[token], nats; computed in float32 at least, whatever the dtype of the logits.

    >>> token_log_probs(torch.zeros(1, 1, 4, dtype=torch.bfloat16), torch.tensor([[2]]))
    tensor([[-1.3863]])
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    chosen = logits.gather(-1, token_ids[..., None])[..., 0]
    return chosen - torch.logsumexp(logits, dim=-1)


def summed(log_probs: Float[Tensor, "N T"], counted: Bool[Tensor, "N T"]) -> Float[Tensor, " N"]:
    """Sum (never the mean) over the counted tokens of a row, nats; what stands at the other positions has no effect.

    >>> summed(torch.tensor([[-1.0, -2.0, torch.nan]]), torch.tensor([[True, True, False]]))
    tensor([-3.])
    """
    return torch.where(counted, log_probs, 0.0).sum(-1)


# --- layout -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """N prompts with their completions as tensors.

    Attributes:
        input_ids, attention_mask, position_ids: (N, P + C - 1) what the model reads: the last completion column predicts
            nothing and is left out. Positions count the row's own tokens.
        targets: (N, C) the completions' ids.
        counted: (N, C) which of them exist.
    """

    input_ids: Int[Tensor, "N L"]
    attention_mask: Int[Tensor, "N L"]
    position_ids: Int[Tensor, "N L"]
    targets: Int[Tensor, "N C"]
    counted: Bool[Tensor, "N C"]


def left_padded(rows: Sequence[Ids], pad: int, width: int | None = None) -> tuple[Int[Tensor, "N P"], Int[Tensor, "N P"]]:
    """Ids and attention mask, padded on the left to the longest row (or to `width`).

    >>> left_padded([(7, 8), (9,)], pad=0)
    (tensor([[7, 8], [0, 9]]), tensor([[1, 1], [0, 1]]))
    """
    width = max(map(len, rows)) if width is None else width
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def rounded_up(width: int, multiple: int | None) -> int:
    """The next multiple: few different shapes mean few slow first calls.

    >>> rounded_up(33, 16), rounded_up(33, None)
    (48, 33)
    """
    return width if not multiple else -(-width // multiple) * multiple


def pack(prompts: Sequence[Ids], completions: Sequence[Ids], pad: int, pad_to_multiple: int | None = None) -> Packed:
    """Lay out N prompts and completions, none of them empty.

    Args:
        prompts, completions: N rows of token ids each.
        pad: any id of the vocabulary; the result of scoring does not depend on it.
        pad_to_multiple: widths of both parts are rounded up to multiples of it.

    >>> pack([(5, 6), (7,)], [(8,), (9, 3)], pad=0).input_ids
    tensor([[5, 6, 8], [0, 7, 9]])
    """
    before, before_mask = left_padded(prompts, pad, rounded_up(max(map(len, prompts)), pad_to_multiple))
    width = rounded_up(max(map(len, completions)), pad_to_multiple)
    targets = torch.tensor([[*row] + [pad] * (width - len(row)) for row in completions])
    counted = torch.arange(width) < torch.tensor([[len(row)] for row in completions])
    mask = torch.cat([before_mask, counted[:, :-1].long()], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return Packed(torch.cat([before, targets[:, :-1]], dim=1), mask, positions, targets, counted)


# --- the model ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _parameters(forward) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    return argument in _parameters(type(model).forward)


@contextmanager
def contiguous_head(model: nn.Module) -> Iterator[None]:
    """Inside the block the model's head sees contiguous input.

    A model that keeps only some positions hands its head a view. For a frozen head torch then multiplies row by row and
    copies the whole head once a row: seconds and gigabytes for a large vocabulary, with equal results.
    """
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(), *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def completion_logits(model: nn.Module, packed: Packed) -> Float[Tensor, "N C V"]:
    """The logits that predict the completions; earlier positions never reach the head where the model allows that."""
    device = model.get_input_embeddings().weight.device
    width = packed.targets.shape[1]
    options = {"logits_to_keep": width} if accepts(model, "logits_to_keep") else {}
    if accepts(model, "position_ids"):
        options["position_ids"] = packed.position_ids.to(device)
    if accepts(model, "use_cache"):
        options["use_cache"] = False
    with contiguous_head(model):
        output = model(input_ids=packed.input_ids.to(device), attention_mask=packed.attention_mask.to(device), **options)
    return output.logits[:, -width:]


def sequence_log_probs(
    model: nn.Module,
    prompts: Sequence[Ids],
    completions: Sequence[Ids],
    pad: int,
    pad_to_multiple: int | None = None,
) -> Float[Tensor, " N"]:
    """log p(completion | prompt) = sum over its tokens, nats, float32 (float64 for a float64 model); differentiable.

    Args:
        model: a transformers causal language model, adapters (if any) already chosen.
        prompts, completions: N rows of token ids, none empty; completions with their EOS when they have one.
        pad: any id of the vocabulary.
        pad_to_multiple: see `pack`; not for models with recurrent states, whose rows are read unpadded, by prompt length.
    """
    lengths = [len(prompt) for prompt in prompts]
    groups = [range(len(prompts))]
    if getattr(model, "_is_stateful", False):  # such a model's states may count pad columns as text
        groups = [[row for row, own in enumerate(lengths) if own == length] for length in dict.fromkeys(lengths)]
        pad_to_multiple = None
    parts = []
    for rows in groups:
        packed = pack([prompts[row] for row in rows], [completions[row] for row in rows], pad, pad_to_multiple)
        parts.append(_packed_log_probs(model, packed))
    order = torch.tensor([row for rows in groups for row in rows], device=parts[0].device)
    return torch.cat(parts)[order.argsort()]


def _packed_log_probs(model: nn.Module, packed: Packed) -> Float[Tensor, " N"]:
    with without_dropout(model):
        logits = completion_logits(model, packed)
    log_probs = token_log_probs(logits, packed.targets.to(logits.device))
    return summed(log_probs, packed.counted.to(logits.device))


# --- evaluation mode with gradients ---------------------------------------------------------------------------------------


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside the block no module is in training mode; every module's own flag comes back on exit, also on error.

    >>> model = nn.Sequential(nn.Dropout(0.5).eval(), nn.Dropout(0.5))
    >>> with evaluation_mode(model):
    ...     [module.training for module in model]
    [False, False]
    >>> [module.training for module in model]
    [False, True]
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """`evaluation_mode` in which gradient checkpointing, where the model has it enabled, still works.

    transformers checkpoints a layer only in training mode. Here the layers are checkpointed in evaluation mode, and the
    recomputation in the backward pass runs in evaluation mode under the adapter that was active in the forward pass.
    """
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) and _is_layer(m)]
    with evaluation_mode(model):
        before = [layer.__dict__.get("forward") for layer in layers]
        for layer in layers if torch.is_grad_enabled() else ():
            layer.forward = functools.partial(_checkpointed, layer, layer.forward)
        try:
            yield
        finally:
            for layer, own in zip(layers, before):
                layer.__dict__.pop("forward", None)
                if own is not None:
                    layer.forward = own


def _is_layer(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def _checkpointed(layer: nn.Module, forward, *args, **kwargs):
    from torch.utils.checkpoint import checkpoint

    state = adapters.AdapterState.of(layer)

    @contextmanager
    def as_in_forward():
        with evaluation_mode(layer), state.restored():
            yield

    def contexts():
        return evaluation_mode(layer), as_in_forward()

    run = functools.partial(forward, **kwargs)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
