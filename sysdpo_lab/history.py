"""What a training run logged: one record a step, in memory and in a JSONL file."""

import json
import math
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from sysdpo_lab import atomic, errors

FILE = "history.jsonl"


class History(list):
    """The records of a run, oldest first; each is a dict, `history[-1]["loss"]`.

    Keys of a record:
        step: number of the optimiser step, from 1; the other numbers are those of the weights before it.
        epoch: pass over the pairs, from 1.   pairs: pairs in the step.   dropped: those without a margin.
        loss: nats, mean over the kept pairs; log 2 at the start (separate: log 2 a trained component).
        margin: mean of beta x log-ratio gap.   log_ratio_gap: mean, nats.   accuracy: share of positive margins.
        shares: {component, "posterior": mean part of the gap, nats}.
        NAME_error_chosen, ..._rejected: a diffusion component's denoising error; with _start: the frozen start's.
        effective: mean of 1 / sum of squared posterior weights.   distinct: mean number of different intermediates.
        grad_norm: {component: L2 norm before clipping}, grad_norm_total: over all parameters, tied ones once.
        lr: {component: learning rate of this step}.   seconds, pairs_per_second: wall clock.
        trained, not_trained: components, in the first record of a call.   evaluation: what `evaluate` returned.
    A number that does not exist in a step (the loss when no pair was kept) is None.

    Attributes:
        stopped: "finished", or why the run ended early ("stop_after").

    >>> history = History([{"step": 1, "loss": 0.7, "lr": {"y": 0.1}}, {"step": 2, "loss": 0.6, "lr": {"y": 0.2}}])
    >>> history.column("loss"), history.column("lr", "y")
    ([0.7, 0.6], [0.1, 0.2])
    """

    stopped = "finished"

    def column(self, *path: str) -> list:
        """One number of every record, None where a record has none; more names go into nested records.

        Raises:
            UnknownOptionError: no record has it.
        """
        found = [_walk(record, path) for record in self]
        if self and all(value is None for value in found) and not any(_has(record, path) for record in self):
            keys = sorted({key for record in self for key in (_walk(record, path[:-1]) or {})})
            raise errors.UnknownOptionError(f"no record has {' / '.join(map(repr, path))}; there are {', '.join(keys)}")
        return found


def _walk(record: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        record = record.get(name) if isinstance(record, dict) else None
    return record


def _has(record: dict, path: tuple[str, ...]) -> bool:
    return path[-1] in (_walk(record, path[:-1]) or {}) if path else False


def plain(value: Any) -> Any:
    """Numbers, texts and containers of them as JSON has them; NaN and infinities become None.

    >>> plain({"a": float("nan"), "b": (1, 2.5)})
    {'a': None, 'b': [1, 2.5]}
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu().tolist()
    elif hasattr(value, "item") and not isinstance(value, (str, bytes)):  # numpy's numbers
        value = value.item()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


class HistoryFile:
    """`history.jsonl` in a run's folder: one line a record, appended as the run goes.

    Args:
        out: the run's folder.
        history: the records that the file starts with; the file is replaced by them.
    """

    def __init__(self, out: Path, history: History):
        self.path = out / FILE
        atomic.write_text(self.path, "".join(map(_line, history)))

    def append(self, record: dict) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_line(record))

    def sync(self) -> None:
        """Everything that was appended is on the disk, not only with the operating system."""
        with open(self.path, "a", encoding="utf-8") as file:
            os.fsync(file.fileno())


def _line(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def read(out: Path | str, until: int | None = None) -> History:
    """The records in a run's folder, up to step `until`; a last line that a kill cut off is left out.

    Raises:
        CheckpointError: a line that is not the last is broken.
    """
    path = Path(out) / FILE
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n") if path.exists() else []
    history = History()
    for number, line in enumerate(lines if lines != [""] else [], start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise errors.CheckpointError(f"{path}, line {number}: not JSON ({error}); remove the line") from None
        if until is None or record["step"] <= until:
            history.append(record)
    return history
