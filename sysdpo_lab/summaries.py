"""Batches of pairs in numbers: several `PairLoss` as one, and what is logged of it."""

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.losses import PairLoss


def check_finite(found: PairLoss, step: int) -> None:
    """NonFiniteError, naming step and component, for a loss or margin that is NaN or infinite."""
    kept = found.kept
    margin = found.margin.detach()[kept]
    if bool(torch.isfinite(margin).all()) and bool(torch.isfinite(found.loss.detach()).all()):
        return
    bad = [name for name, share in found.shares.items() if not bool(torch.isfinite(share[kept.to(share.device)]).all())]
    where = f"component {bad[0]!r}" if bad else "the loss"
    largest = margin.abs().max().item() if len(margin) else math.nan
    raise errors.NonFiniteError(
        f"step {step}, {where}: loss {found.loss.item()}, largest margin {largest}; no weight was changed"
    )


def nothing(rows: int) -> PairLoss:
    """Stands for a micro-batch in which no pair has a margin."""
    missing = torch.full((rows,), torch.nan, dtype=torch.float64)
    return PairLoss(torch.tensor(torch.nan, dtype=torch.float64), missing, missing.clone(), {}, rows)


def detached(found: PairLoss) -> PairLoss:
    """The numbers alone, on the CPU: nothing keeps the graph alive."""

    def free(value: Any) -> Any:
        return value.detach().cpu() if isinstance(value, Tensor) else value

    tensors = {f.name: free(getattr(found, f.name)) for f in dataclasses.fields(found)}
    tensors |= {name: {key: free(v) for key, v in tensors[name].items()} for name in ("shares", "extras")}
    return dataclasses.replace(found, **tensors)


def merged(parts: Sequence[PairLoss]) -> PairLoss:
    """Several batches as one: rows are joined, and the loss is the mean over all kept pairs.

    >>> one = PairLoss(torch.tensor(1.0), torch.zeros(1), torch.zeros(1))
    >>> two = PairLoss(torch.tensor(4.0), torch.zeros(2), torch.zeros(2))
    >>> merged([one, two]).loss
    tensor(3., dtype=torch.float64)
    """
    kept = torch.tensor([float(part.kept.sum()) for part in parts], dtype=torch.float64)
    # 0 x NaN is NaN: a part without a kept pair takes no part in the mean
    sums = [part.loss.double() * weight for part, weight in zip(parts, kept) if weight]
    loss = sum(sums) / kept.sum() if sums else torch.tensor(torch.nan, dtype=torch.float64)
    names = dict.fromkeys(name for part in parts for name in part.shares)
    extras = dict.fromkeys(name for part in parts for name in part.extras)
    return PairLoss(
        loss,
        torch.cat([part.margin for part in parts]),
        torch.cat([part.log_ratio_gap for part in parts]),
        {name: _joined([part.shares.get(name) for part in parts], parts) for name in names},
        sum(part.dropped for part in parts),
        _joined([part.effective for part in parts], parts),
        _joined([part.distinct for part in parts], parts),
        {name: _joined([part.extras.get(name) for part in parts], parts) for name in extras},
    )


def _joined(values: Sequence[Any], parts: Sequence[PairLoss]) -> Any:
    """Rows joined, NaN where a part has none; a text is taken from the first part that has one."""
    given = [value for value in values if value is not None]
    if not given or not isinstance(given[0], Tensor):
        return given[0] if given else None
    return torch.cat([torch.full((len(p.margin),), torch.nan) if v is None else v for v, p in zip(values, parts)])


def summary(found: PairLoss) -> dict[str, Any]:
    """What is logged of a batch: means over its kept pairs; None becomes of a number that does not exist.

    >>> summary(PairLoss(torch.tensor(0.5), torch.tensor([1.0, 3.0]), torch.tensor([2.0, 6.0])))["log_ratio_gap"]
    4.0
    """
    record = {
        "loss": found.loss.item(),
        "margin": _mean(found.margin),
        "accuracy": found.accuracy,
        "log_ratio_gap": _mean(found.log_ratio_gap),
        "shares": {name: _mean(share) for name, share in found.shares.items()},
        "pairs": len(found.margin),
        "dropped": found.dropped,
    }
    more = {"effective": found.effective, "distinct": found.distinct, **found.extras}
    return record | {name: _mean(v) if isinstance(v, Tensor) else v for name, v in more.items() if v is not None}


def _mean(values: Tensor) -> float:
    values = values.detach().double()
    return values[~torch.isnan(values)].mean().item()


class ErrorWatch:
    """Sees whether a diffusion component gets worse on winners and losers alike while the loss falls.

    Args:
        patience: pairs in a row whose means are compared.
        share: rise above the start's error, as a share of it, that is not noise.

    >>> watch = ErrorWatch(patience=1)
    >>> numbers = {"z_error_chosen": 1.2, "z_error_rejected": 1.5, "z_error_chosen_start": 1.0, "z_error_rejected_start": 1.0}
    >>> watch.risen(PairLoss(*[torch.zeros(1)] * 3, extras={name: torch.tensor([n]) for name, n in numbers.items()}))
    {'z': (0.2..., 0.5)}
    """

    SIDES = ("chosen", "rejected", "chosen_start", "rejected_start")

    def __init__(self, patience: int, share: float = 0.01):
        self.patience, self.share = patience, share
        self.recent: dict[str, deque] = {}

    def risen(self, found: PairLoss) -> dict[str, tuple[float, float]]:
        """{component: rise of the winners' and of the losers' error, as shares of the start's} where both have risen."""
        worse = {}
        for key in (key for key in found.extras if key.endswith("_error_chosen")):
            name = key.removesuffix("_error_chosen")
            columns = torch.stack([found.extras[f"{name}_error_{side}"].double() for side in self.SIDES], 1)
            rows = self.recent.setdefault(name, deque(maxlen=self.patience))
            rows.extend(row for row in columns.tolist() if not any(map(math.isnan, row)))
            rises = self._rises(rows)
            if rises is not None and min(rises) > self.share:
                worse[name] = rises
        return worse

    def _rises(self, rows: deque) -> tuple[float, float] | None:
        if len(rows) < self.patience:
            return None
        chosen, rejected, chosen_start, rejected_start = (sum(column) for column in zip(*rows))
        if not chosen_start or not rejected_start:
            return None
        return chosen / chosen_start - 1, rejected / rejected_start - 1
