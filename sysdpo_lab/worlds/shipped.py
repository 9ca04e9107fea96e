"""Folders of trained weights: written with their hashes, and checked against them before they are loaded."""

from pathlib import Path

import torch
from torch import nn

from sysdpo_lab import atomic, errors, paths

WEIGHTS, HASHES = "model.safetensors", "SHA256SUMS"


def write_hashes(folder: Path) -> None:
    """List the SHA-256 of every file below the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != HASHES)
    lines = [f"{paths.file_sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    atomic.write_text(folder / HASHES, "".join(lines))


def check_hashes(folder: Path, title: str, command: str) -> None:
    """Each listed file is there and is the one that was listed.

    Args:
        title, command: what the weights are and how to make them again, for the message.

    Raises:
        MissingWeightsError: a file is not there.
        WeightsHashError: a file is another one, or the list names no weights.
    """
    again = f"{command} makes it again"
    if not (folder / HASHES).is_file():
        raise errors.MissingWeightsError(f"{title}: {folder / HASHES} is missing; {again}")
    rows = [
        line.split(maxsplit=1) for line in (folder / HASHES).read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    if not any(name.endswith(".safetensors") for _, name in rows):
        raise errors.WeightsHashError(f"{title}: {folder / HASHES} lists no weights; {again}")
    for expected, name in rows:
        if not (folder / name).is_file():
            raise errors.MissingWeightsError(f"{title}: {folder / name} is missing; {again}")
        found = paths.file_sha256(folder / name)
        if found != expected:
            raise errors.WeightsHashError(
                f"{title}: {folder / name} has SHA-256 {found[:16]}..., {HASHES} says {expected[:16]}...; {again}"
            )


def save_weights(module: nn.Module, path: Path, skip: tuple[str, ...] = ()) -> None:
    """Write a module's weights in half precision, without the names in `skip`."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().half().contiguous() for name, t in module.state_dict().items() if name not in skip}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def load_weights(module: nn.Module, path: Path, skip: tuple[str, ...] = ()) -> None:
    """Read what `save_weights` wrote into a module of full precision.

    Raises:
        WeightsHashError: the names are others than the module's.
    """
    from safetensors.torch import load_file

    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    missing, unexpected = module.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - set(skip):
        raise errors.WeightsHashError(f"{path} does not fit its config: {unexpected or missing}")


def half_rounded(module: nn.Module) -> nn.Module:
    """The module with the weights that it will have after it was saved and loaded; what is measured is what is shipped."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.half().float())
    return module
