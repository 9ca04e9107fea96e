"""The options of a training run, checked; when it ends; and in which order it sees the pairs."""

import datetime
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from sysdpo_lab import errors, optimisation


@dataclass(frozen=True)
class Settings:
    """The options of `training.train`, which says what they mean."""

    steps: int
    batch_size: int
    accumulate: int
    clip: float | None
    warmup: int
    schedule: str
    weight_decay: float
    betas: tuple[float, float]
    optimizer: str
    log_every: int
    checkpoint_every: int | None
    evaluate_every: int | None

    def __post_init__(self):
        whole(1, batch_size=self.batch_size, accumulate=self.accumulate, log_every=self.log_every)
        whole(0, steps=self.steps, warmup=self.warmup)
        for name in ("checkpoint_every", "evaluate_every"):
            if getattr(self, name) is not None:
                whole(1, **{name: getattr(self, name)})
        errors.check_option("schedule", self.schedule, optimisation.SCHEDULES)
        errors.check_option("optimizer", self.optimizer, optimisation.OPTIMIZERS)
        positive(math.ulp(0.0), clip=self.clip if self.clip is not None else 1.0)
        positive(0.0, weight_decay=self.weight_decay)
        if len(self.betas) != 2 or not all(isinstance(b, (int, float)) and 0 <= b < 1 for b in self.betas):
            raise errors.UnknownOptionError(f"betas must be two numbers in [0, 1), found {self.betas!r}")

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due; without `checkpoint_every` ten are spread over the run."""
        return step % (self.checkpoint_every or max(1, self.steps // 10)) == 0

    def compared(self) -> dict[str, Any]:
        """What a resumed run must share with the one that it goes on with."""
        names = ("batch_size", "accumulate", "clip", "warmup", "schedule", "weight_decay", "betas", "optimizer")
        # with a constant rate a longer run begins like a shorter one
        return {name: getattr(self, name) for name in (*names, *(["steps"] if self.schedule != "constant" else []))}


def whole(least: int, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise errors.UnknownOptionError(f"{name} must be a whole number >= {least}, found {value!r}")


def positive(least: float, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
            raise errors.UnknownOptionError(f"{name} must be a number {'>' if least else '>='} 0, found {value!r}")


class Deadline:
    """When `stop_after` is reached."""

    def __init__(self, stop_after: Any):
        wrong = isinstance(stop_after, bool) or not isinstance(stop_after, (int, float, datetime.timedelta, type(None)))
        seconds = stop_after.total_seconds() if isinstance(stop_after, datetime.timedelta) else stop_after
        if wrong or (seconds is not None and not seconds > 0):
            raise errors.UnknownOptionError(f"stop_after must be steps (int > 0) or seconds (float > 0), found {stop_after!r}")
        self.steps = stop_after if isinstance(stop_after, int) else None
        self.end = None if seconds is None or self.steps else time.monotonic() + seconds

    def reached(self, steps: int) -> bool:
        return (self.steps is not None and steps >= self.steps) or (self.end is not None and time.monotonic() >= self.end)


class Order:
    """Row numbers in the order in which they are trained: a new permutation for each epoch."""

    def __init__(self, number: int, generator: torch.Generator):
        self.number, self.generator = number, generator
        self.epoch, self.position, self.permutation = 0, number, torch.arange(number)

    def take(self, number: int) -> list[int]:
        """The next rows; fewer at the end of an epoch, never from two epochs."""
        if self.position >= self.number:
            self.permutation = torch.randperm(self.number, generator=self.generator)
            self.epoch, self.position = self.epoch + 1, 0
        rows = self.permutation[self.position : self.position + number].tolist()
        self.position += len(rows)
        return rows


def streams(generator: torch.Generator | None, number: int) -> tuple[Order, torch.Generator]:
    """Two independent streams from one seed: the order of the pairs, and what objectives draw."""
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    seeds = torch.randint(2**63 - 1, (2,), generator=generator, device=generator.device).tolist()
    order = Order(number, torch.Generator().manual_seed(seeds[0]))
    return order, torch.Generator(device=generator.device).manual_seed(seeds[1])
