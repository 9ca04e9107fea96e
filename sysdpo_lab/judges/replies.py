"""Replies of a judge on disk, one JSON line each: what was asked once is not asked, or paid for, again."""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from sysdpo_lab import errors


def key_of(model: str, messages: Sequence[Mapping[str, str]]) -> str:
    """What a question is found by: SHA-256 over the model's name with its settings, and the messages.

    >>> key_of("a", [{"role": "user", "content": "?"}]) == key_of("b", [{"role": "user", "content": "?"}])
    False
    """
    return hashlib.sha256(json.dumps([model, list(map(dict, messages))], sort_keys=True).encode()).hexdigest()


class ReplyStore:
    """Replies by key, in memory and, with a path, in a JSONL file that only ever grows.

    A line that a stopped run left half-written is skipped with a warning; all other replies stay. Several processes may
    append to one file: a line is written at once.

    Args:
        path: the file; None keeps replies in memory only.

    Raises:
        ReplyStoreError: the path is a folder or cannot be written.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = None if path is None else Path(path)
        self.replies: dict[str, str] = {}
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._read()
            except OSError as error:
                raise errors.ReplyStoreError(
                    f"{self.path}: cannot be used as a store of replies ({error.strerror})"
                ) from error

    def _read(self) -> None:
        if not self.path.exists():
            return
        damaged = []
        content = self.path.read_bytes()
        for number, line in enumerate(content.splitlines(), 1):
            try:
                row = json.loads(line)
                self.replies[row["key"]] = row["reply"]
            except (ValueError, KeyError, TypeError):
                damaged.append(number)
        if content and not content.endswith(b"\n"):
            self._append(b"\n")  # so that the next line does not join a half-written one
        if damaged:
            warnings.warn(
                f"{self.path}: {len(damaged)} unreadable lines were skipped (first: line {damaged[0]}); they are asked again",
                errors.DamagedReplyWarning, stacklevel=3,
            )  # fmt: skip

    def __contains__(self, key: str) -> bool:
        return key in self.replies

    def __getitem__(self, key: str) -> str:
        return self.replies[key]

    def __len__(self) -> int:
        return len(self.replies)

    def add(self, key: str, reply: str, model: str = "") -> None:
        """Keep a reply; it is on disk when this returns."""
        self.replies[key] = reply
        if self.path is not None:
            self._append((json.dumps({"key": key, "model": model, "reply": reply}, ensure_ascii=False) + "\n").encode())

    def _append(self, line: bytes) -> None:
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)
            os.fsync(handle)
        finally:
            os.close(handle)
