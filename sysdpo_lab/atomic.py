"""Files and folders that are either the old or the new version, never half of one, also when the process is killed."""

import ctypes
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


def write_bytes(path: Path | str, data: bytes) -> Path:
    """Replace the file at `path` by `data` in one step; the folder is made when missing.

    The new content is written and synced beside the target first, so a kill leaves the old file (and at worst a hidden
    `.NAME.*.tmp`).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bytes(f"{folder}/sub/a.bin", b"123").read_bytes()
    b'123'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return path


def write_text(path: Path | str, text: str) -> Path:
    """`write_bytes` of the text in UTF-8, with the line ends as given."""
    return write_bytes(path, text.encode())


def write_json(path: Path | str, value: object) -> Path:
    """`write_text` of readable JSON.

    Raises:
        ValueError: the value holds a NaN or an infinity, which JSON does not have; the old file stays.
    """
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def folder(path: Path | str) -> Iterator[Path]:
    """Fill the yielded folder; at the end of the block it takes the place of the one at `path`.

    When the block raises, the old folder stays and the new one is removed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with folder(f"{parent}/run") as new:
    ...         _ = (new / "a.txt").write_text("1")
    ...     sorted(p.name for p in Path(parent, "run").iterdir())
    ['a.txt']
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    temporary = _beside(path)
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        _swap_in(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _sync_folder(path.parent)


def recover(path: Path | str) -> None:
    """Put the old folder back if a kill came between the two renames of `folder` (only where there is no exchange)."""
    path, old = Path(path), _old(Path(path))
    if old.exists() and path.exists():
        shutil.rmtree(old)
    elif old.exists():
        os.rename(old, path)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _swap_in(new: Path, path: Path) -> None:
    if not path.exists():
        os.rename(new, path)
    elif not _exchange(new, path):
        os.rename(path, _old(path))
        os.rename(new, path)
        shutil.rmtree(_old(path))


def _exchange(first: Path, second: Path) -> bool:
    # a folder that is not empty cannot be replaced by rename; Linux can exchange two in one step
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
