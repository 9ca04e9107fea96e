"""Checkpoints of a training run: tensors in safetensors, the rest in JSON, each folder whole or not there at all."""

import hashlib
import json
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sysdpo_lab import atomic, errors
from sysdpo_lab.components.completion import Completion

FOLDER, TENSORS, STATE = "checkpoints", "tensors.safetensors", "state.json"
FORMAT = "sysdpo-lab-checkpoint/1"


@dataclass
class Checkpoint:
    """Everything that a run needs to go on as if it had never stopped.

    Attributes:
        step: number of optimiser steps made.
        tensors: {name: tensor}: trainable weights, the optimiser's state, generator states, the order of the pairs.
        state: what JSON can hold, and tensors and completions inside it (see `encode`).
    """

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any] = field(default_factory=dict)


# --- values that JSON cannot hold -----------------------------------------------------------------------------------------


def encode(value: Any, tensors: dict[str, Tensor], place: str = "state") -> Any:
    """The value as JSON holds it; tensors go to `tensors`, and a reference stays.

    Raises:
        CheckpointError: an object of another kind.

    >>> encode({"a": (1, float("-inf")), "b": Completion("hi", (5, 2))}, {})
    {'a': [1, {'$float': '-inf'}], 'b': {'$completion': ['hi', [5, 2], False]}}
    """
    if isinstance(value, Tensor):
        key = f"{place}.{len(tensors)}"
        tensors[key] = value.detach()
        return {"$tensor": key}
    if isinstance(value, Completion):
        return {"$completion": [value.text, list(value.token_ids), value.truncated]}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and not key.startswith("$") for key in value):
            raise errors.CheckpointError(f"{place}: a checkpoint holds dicts with names as keys only, found {list(value)[:3]}")
        return {key: encode(item, tensors, place) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item, tensors, place) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise errors.CheckpointError(
        f"{place}: a checkpoint cannot hold a {type(value).__name__}; run without out=, or without a fixed set"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode` (tuples come back as lists)."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$float" in value:
        return float(value["$float"])
    if "$completion" in value:
        text, ids, truncated = value["$completion"]
        return Completion(text, tuple(ids), truncated)
    return {key: decode(item, tensors) for key, item in value.items()}


# --- folders ----------------------------------------------------------------------------------------------------------------


def folder_of(out: Path | str, step: int) -> Path:
    """Where the checkpoint after `step` steps lies.

    >>> folder_of("run", 10).as_posix()
    'run/checkpoints/step-000010'
    """
    return Path(out) / FOLDER / f"step-{step:06d}"


def folders(out: Path | str) -> list[Path]:
    """The checkpoints of a run, newest first, valid or not."""
    found = Path(out).joinpath(FOLDER).glob("step-*")
    return sorted((path for path in found if path.is_dir() and _step(path) is not None), key=_step, reverse=True)


def _step(path: Path) -> int | None:
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else None


def save(out: Path | str, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Write a checkpoint beside the others and rename it into place; then remove all but the newest `keep`.

    A kill at any moment leaves every earlier checkpoint that was kept, and never half of the new one.
    """
    from safetensors.torch import save_file

    target = folder_of(out, checkpoint.step)
    tensors = dict(checkpoint.tensors)
    state = encode(checkpoint.state, tensors)
    with atomic.folder(target) as new:
        save_file({name: _own_copy(tensor) for name, tensor in tensors.items()}, new / TENSORS)
        content = {"format": FORMAT, "step": checkpoint.step, "sha256": _sha256(new / TENSORS), "state": state}
        (new / STATE).write_text(json.dumps(content, ensure_ascii=False, allow_nan=False), encoding="utf-8")
    for old in folders(out)[keep:]:
        _remove(old)
    return target


def _own_copy(tensor: Tensor) -> Tensor:
    # safetensors refuses tensors that share memory
    return tensor.detach().to("cpu", copy=True).contiguous()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    # renamed first: a kill in the middle must not leave something that looks like a checkpoint
    doomed = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clean(out: Path | str) -> None:
    """Remove what a kill left half-written; put back what it left half-exchanged."""
    parent = Path(out) / FOLDER
    for old in parent.glob(".step-*.old"):
        atomic.recover(parent / old.name.removeprefix(".").removesuffix(".old"))
    for path in parent.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def load(folder: Path | str) -> Checkpoint:
    """Read and verify one checkpoint.

    Raises:
        CheckpointError: a file is missing, damaged or of another format.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise errors.CheckpointError(f"{folder}: format {content['format']!r}, expected {FORMAT!r}")
        if _sha256(folder / TENSORS) != content["sha256"]:
            raise errors.CheckpointError(f"{folder / TENSORS} is not the file that was written: its SHA-256 differs")
        tensors = load_file(folder / TENSORS)
        return Checkpoint(content["step"], tensors, decode(content["state"], tensors))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, errors.CheckpointError):
            raise
        raise errors.CheckpointError(f"{folder}: {type(error).__name__}: {error}") from error


def newest(out: Path | str) -> Checkpoint | None:
    """The newest checkpoint that is whole; a damaged one is passed over with a warning. None where there is none.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    found = folders(out)
    for folder in found:
        try:
            return load(folder)
        except errors.CheckpointError as error:
            warnings.warn(f"{error}; looking for an older checkpoint", errors.DamagedCheckpointWarning, stacklevel=2)
    if found:
        raise errors.CheckpointError(f"{Path(out) / FOLDER}: all {len(found)} checkpoints are damaged; start in another folder")
    return None


# --- generators ---------------------------------------------------------------------------------------------------------------


def generator_from(state: Tensor, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that goes on from a stored state.

    >>> one = torch.Generator().manual_seed(3)
    >>> other = generator_from(one.get_state())
    >>> bool(torch.rand(1, generator=one) == torch.rand(1, generator=other))
    True
    """
    generator = torch.Generator(device=device)
    generator.set_state(state.to(torch.uint8).cpu())
    return generator
