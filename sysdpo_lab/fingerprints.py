"""Digests that say whether two values, or the frozen parts of two systems, are the same; equal across processes."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sysdpo_lab.components.completion import Completion

SAMPLED = 4096  # numbers read of a large tensor: enough to tell two models apart, quick for a large one


def digest(value: Any) -> str:
    """A short digest of a value; containers, tensors and completions by content, a whole number as the tensor that holds it.

    >>> digest({"x": 2}) == digest({"x": torch.tensor(2)})
    True
    >>> digest("2") == digest(2)
    False
    """
    found = hashlib.sha256()
    for part in _parts(value):
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:24]


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_floating_point():
        value = value.item()
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        yield tensor_bytes(value)
    elif isinstance(value, Completion):
        yield f"completion {value.token_ids} {value.truncated}".encode()
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"list {len(value)}".encode()
        for item in value:
            yield from _parts(item)
    else:  # an object's address says nothing about what it is
        yield re.sub(r" at 0x[0-9a-fA-F]+", "", f"{type(value).__name__} {value!r}").encode()


def tensor_bytes(tensor: Tensor) -> bytes:
    """The tensor's numbers as bytes, whatever its dtype and device.

    >>> len(tensor_bytes(torch.zeros(2, 3)))
    24
    """
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def frozen_parts(system: nn.Module, trained: set[int]) -> str:
    """Digest of everything in the system that training leaves alone: frozen weights, references, buffers.

    Of a large tensor only some numbers are read.

    Args:
        trained: ids of the parameters that training changes.
    """
    parts = {}
    for name, tensor in {**dict(system.named_parameters()), **_saved_buffers(system)}.items():
        if id(tensor) not in trained:
            parts[name] = (str(tensor.dtype), tuple(tensor.shape), _sample(tensor))
    return digest(parts)


def _saved_buffers(system: nn.Module) -> dict[str, Tensor]:
    saved = system.state_dict(keep_vars=True).keys()
    return {name: tensor for name, tensor in system.named_buffers() if name in saved}


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLED))]
