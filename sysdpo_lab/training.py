"""The training loop: one for every objective, every kind of component and every graph.

    history = training.train(system, pairs, training.sampling(0.1, "diverse_beam", 2), steps=100, lr={"draft": 1e-5})

The loop knows nothing of an objective but its `PairLoss`.
"""

import datetime
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sysdpo_lab import checkpoints, errors, optimisation, preferences, progress
from sysdpo_lab.decoding import evaluating
from sysdpo_lab.fingerprints import digest, frozen_parts
from sysdpo_lab.history import History, HistoryFile, plain, read
from sysdpo_lab.losses import PairLoss
from sysdpo_lab.objectives import Objective, cache_reference, direct, sampling, separate
from sysdpo_lab.options import Deadline, Settings, streams, whole
from sysdpo_lab.preferences import Pairs
from sysdpo_lab.summaries import ErrorWatch, check_finite, detached, merged, nothing, summary
from sysdpo_lab.system import CompoundSystem

__all__ = ["History", "Objective", "cache_reference", "direct", "margins", "sampling", "separate", "train"]

PATIENCE = 32  # pairs in a row without a margin, or without diversity, that are no accident
log = logging.getLogger(__name__)


def train(
    system: CompoundSystem,
    pairs: Any,
    objective: Callable[..., PairLoss],
    steps: int = 100,
    lr: float | Mapping[str, float] = 1e-4,
    generator: torch.Generator | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    *,
    batch_size: int = 8,
    accumulate: int = 1,
    clip: float | None = 1.0,
    warmup: int = 0,
    schedule: str = "constant",
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    optimizer: str = "adamw",
    checkpoint_every: int | None = None,
    stop_after: int | float | datetime.timedelta | None = None,
    log_every: int = 1,
    on_step: Callable[[dict], Any] | None = None,
    progress: bool | None = None,
    evaluate: Callable[[CompoundSystem], Mapping[str, Any]] | None = None,
    evaluate_every: int | None = None,
) -> History:
    """Train every component that is not frozen, jointly, on one objective.

    Each step takes `batch_size * accumulate` pairs; each epoch is a new permutation of all pairs, and its last step takes
    what is left. A step's gradient is the mean over the kept pairs of the whole step, however it is cut into micro-batches.

    Args:
        system: trained in place, where its weights are; dropout acts in the modules that are in train mode.
        pairs: `preferences.Pairs`, or what `preferences.as_pairs` understands.
        objective: `direct(beta)`, `sampling(beta, sampler, k)`, `separate(beta)`, or any function
            (system, batch, generator) -> PairLoss.
        steps: optimiser steps in all, those before a resume included.
        lr: peak learning rate: one number, or {component: number}; components that a dict does not name are not trained
            in this run, which the first record says.
        generator: source of the order of the pairs and of all draws, as two streams, so that the order does not depend on
            the objective. None: seed 0. Global random state is left as it was.
        out: folder for history.jsonl and checkpoints/; None keeps nothing.
        resume: go on from the newest valid checkpoint in `out` (from the start when there is none); the result is that of
            a run that was never stopped, bit for bit on a CPU.
        batch_size: pairs in a micro-batch.  accumulate: micro-batches in a step.
        clip: largest L2 norm of all gradients together; None does not clip.
        warmup: steps in which the rate grows as (step + 1) / warmup.
        schedule: afterwards "constant", "linear" or "cosine" towards 0.
        weight_decay, betas, optimizer: of "adamw", "adam", or "sgd" (without momentum).
        checkpoint_every: steps; None: ten times a run. The last two are kept, and one is written at the end.
        stop_after: end early, with a checkpoint: an int is a number of steps made in this call; a float (seconds) or a
            timedelta is a time, looked at after each step.
        log_every: steps between records (the first and the last step always have one).
        on_step: called with each step's record.
        progress: show a bar; None: on a terminal or in a notebook.
        evaluate: called with the system in evaluation mode, without gradients; what it returns is logged. Random state
            and train flags are restored afterwards.
        evaluate_every: steps; None: after the last step.

    Returns:
        `History`, a list of records, `history[-1]["loss"]`, those before a resume included.

    Raises:
        NonFiniteError: a loss, margin or gradient is NaN or infinite: step and component are named, the weights are those
            before the step and the last checkpoint stays.
        NoMarginError: no margin in 32 pairs in a row, or in the whole run; single steps without one are skipped and logged.
        NothingToTrainError, NoUpdateError: nothing would be learned.  ResumeError: `out` holds another run.
        EmptyPairsError, PairKindError, ObjectiveError, UnknownOptionError, UnknownComponentError, CheckpointError.

    Warns:
        NoDiversityWarning, ZeroGradientWarning, HalfPrecisionWarning, BothErrorsRiseWarning, DamagedCheckpointWarning.

    >>> from sysdpo_lab.components import Categorical
    >>> system = CompoundSystem([Categorical("y", {"x": 1}, 2), Categorical("z", {"x": 1, "y": 2}, 2)])
    >>> pairs = [{"x": 0, "chosen": {"y": 0, "z": 1}, "rejected": {"y": 1, "z": 0}}]
    >>> history = train(system, pairs, direct(beta=0.5), steps=5, lr=0.1)
    >>> round(history[0]["loss"], 4), history[-1]["loss"] < 0.6, history[-1]["accuracy"]
    (0.6931, True, 1.0)
    """
    settings = Settings(
        steps, batch_size, accumulate, clip, warmup, schedule, weight_decay, tuple(betas), optimizer, log_every,
        checkpoint_every, evaluate_every,
    )  # fmt: skip
    pairs = _checked(system, pairs, objective)
    groups = optimisation.parameter_groups(system, lr)
    optimisation.check_weights(groups, optimizer, weight_decay)
    deadline = Deadline(stop_after)
    with optimisation.only_these(system, groups) as resting:
        loop = _Loop(system, pairs, objective, settings, groups, resting, generator, None if out is None else Path(out))
        loop.open(resume)
        return loop.run(deadline, on_step, evaluate, progress)


def _checked(system: CompoundSystem, pairs: Any, objective: Any) -> Pairs:
    """The pairs as `Pairs` that suit the objective, or a named error."""
    if objective in (direct, sampling, separate):
        raise errors.UnknownOptionError(f"call the objective first: training.{objective.__name__}(beta=...)")
    if not callable(objective):
        raise errors.UnknownOptionError(
            f"objective={objective!r}: choose training.direct(beta), training.sampling(beta, sampler, k), "
            "training.separate(beta), or a function (system, batch, generator) -> PairLoss"
        )
    pairs = preferences.as_pairs(pairs, system.inputs)
    if not len(pairs):
        raise errors.EmptyPairsError("there are no pairs; were all of them dropped when they were read?")
    if hasattr(objective, "check"):
        objective.check(system, pairs)
    return pairs


# --- one run ------------------------------------------------------------------------------------------------------------------


class _Loop:
    """The state of one run; every public step leaves it such that a checkpoint of it can be resumed."""

    def __init__(self, system, pairs, objective, settings, groups, resting, generator, out):
        self.system, self.pairs, self.objective, self.settings = system, pairs, objective, settings
        self.groups, self.resting, self.out = groups, resting, out
        self.parameters = {name: p for group in groups for name, p in group.parameters.items()}
        self.optimizer = optimisation.make_optimizer(groups, settings.optimizer, settings.betas, settings.weight_decay)
        self.accelerator = _accelerator()
        self.order, self.draws = streams(generator, len(pairs))
        self.history, self.file, self.step, self.seconds = History(), None, 0, 0.0
        self.barren, self.alike = 0, 0  # pairs in a row without a margin, without two different intermediates
        self.kept_any, self.diverse, self.watched = False, False, False
        self.warned: set[type] = set()
        self.errors_watch = ErrorWatch(PATIENCE)
        self.boundary: dict[str, Any] = {}
        self.updating, self.unlogged = False, {}

    # -- start, end and files ----------------------------------------------------------------------------------------
    def open(self, resume: bool) -> None:
        """Start afresh, or from the newest checkpoint."""
        self._objective("reset", self.system)
        if self.out is not None:
            checkpoints.clean(self.out)
            found = checkpoints.newest(self.out) if resume else None
            if not resume and checkpoints.folders(self.out):
                raise errors.ResumeError(
                    f"{self.out} holds a run up to {checkpoints.folders(self.out)[0].name}; pass resume=True to go on with it, "
                    "or choose another folder"
                )
            self.compared = self._compared()
            if found is not None:
                self._restore(found)
            self.file = HistoryFile(self.out, self.history)
        self._mark()

    def run(self, deadline: Deadline, on_step, evaluate, show) -> History:
        """All steps that are left."""
        self._say_what_is_trained()
        first, began = self.step, time.monotonic() - self.seconds
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with progress.bar(self.settings.steps, "training", self.step, show) as bar:
                while self.step < self.settings.steps:
                    record = self._one_step(first, began, evaluate, bar)
                    if on_step is not None:
                        on_step(record)
                    if deadline.reached(self.step - first) and self.step < self.settings.steps:
                        self.history.stopped = "stop_after"
                        break
                    if self.out is not None and self.step < self.settings.steps and self.settings.saves_after(self.step):
                        self._save()
        except KeyboardInterrupt:
            # weights in the middle of an update are no state to go on from; the last checkpoint is
            if self.out is not None and self.step and not self.updating:
                self._log(self.unlogged)
                self._save()
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return self._finish(first)

    def _finish(self, first: int) -> History:
        if self.step > first and not self.kept_any:
            raise errors.NoMarginError(f"none of the pairs in steps {first + 1} to {self.step} had a margin; nothing was learned")
        if self.out is not None and self.step > first:
            self._save()
        if self.alike and not self.diverse and self.history.stopped == "finished":
            self._warn_about_diversity(self.step)
        return self.history

    def _one_step(self, first: int, began: float, evaluate, bar) -> dict:
        started = time.monotonic()
        rows, record = self._update()
        self.seconds = time.monotonic() - began
        record |= {"seconds": self.seconds, "pairs_per_second": len(rows) / max(1e-9, time.monotonic() - started)}
        last = self.step == self.settings.steps
        if evaluate is not None and (last or (self.settings.evaluate_every and self.step % self.settings.evaluate_every == 0)):
            with _undisturbed(self.system):
                record["evaluation"] = dict(evaluate(self.system))
        if self.step == first + 1:
            record |= {"trained": [group.name for group in self.groups], "not_trained": self.resting}
        record = plain(record)
        if last or self.step == first + 1 or self.step % self.settings.log_every == 0:
            self._log(record)
        self.unlogged = {}
        bar.update(1, loss=record["loss"], accuracy=record["accuracy"])
        return record

    def _log(self, record: dict) -> None:
        if record:
            self.history.append(record)
            if self.file is not None:
                self.file.append(record)

    def _say_what_is_trained(self) -> None:
        rates = ", ".join(f"{group.name} (lr {group.lr:g})" for group in self.groups)
        log.info("training %s; not trained: %s", rates, ", ".join(self.resting) or "none")

    # -- one optimiser step --------------------------------------------------------------------------------------------
    def _update(self) -> tuple[list[int], dict]:
        number, settings = self.step + 1, self.settings
        rows = self.order.take(settings.batch_size * settings.accumulate)
        with _own_random_state(self.draws, self.parameters.values()):
            found = self._backward(rows, number)
        kept = int(found.kept.sum())
        factor = optimisation.lr_factor(self.step, settings.steps, settings.warmup, settings.schedule)
        for group, values in zip(self.groups, self.optimizer.param_groups):
            values["lr"] = group.lr * factor
        norms = optimisation.component_norms(self.system, self.groups, number)
        total = optimisation.grad_norm(list(self.parameters.values()))
        if kept:
            self.kept_any, self.barren = True, 0
            self._warn_about(found, total, number)
            self._apply(number, total)
        else:
            self._without_margin(len(rows), number)
        rates = {group.name: group.lr * factor for group in self.groups}
        record = {"step": number, "epoch": self.order.epoch, **summary(found)}
        record |= {"grad_norm": norms, "grad_norm_total": total, "lr": rates}
        self.step, self.unlogged = number, plain(record)
        self._mark()
        self.updating = False
        return rows, record

    def _backward(self, rows: Sequence[int], number: int) -> PairLoss:
        """Gradients of the mean loss over all kept pairs, micro-batch by micro-batch."""
        size = self.settings.batch_size
        micro = [rows[start : start + size] for start in range(0, len(rows), size)]
        parts = []
        for chosen in micro:
            part = self._loss(chosen, number)
            kept = int(part.kept.sum())
            if kept and part.loss.requires_grad:
                # each micro-batch's loss is a mean: as sums they add up to the whole step's, whatever was dropped
                weight = self.accelerator.gradient_accumulation_steps * (kept if len(micro) > 1 else 1)
                self.accelerator.backward(part.loss * weight if weight != 1 else part.loss)
            parts.append(detached(part))
        total = sum(int(part.kept.sum()) for part in parts)
        if total and all(p.grad is None for p in self.parameters.values()):
            raise errors.NothingToTrainError(
                f"step {number}: the loss does not depend on any trainable parameter of {[g.name for g in self.groups]}"
            )
        if len(micro) > 1 and total:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(total)
        return merged(parts)

    def _loss(self, rows: Sequence[int], number: int) -> PairLoss:
        try:
            found = self.objective(self.system, self.pairs.batch(rows), self.draws)
        except errors.NoMarginError as error:
            self.no_margin = error
            return nothing(len(rows))
        except errors.NonFiniteError as error:
            raise errors.NonFiniteError(f"step {number}: {error}") from error
        if not isinstance(found, PairLoss):
            raise errors.ObjectiveError(f"the objective returned a {type(found).__name__}; it must return a losses.PairLoss")
        check_finite(found, number)
        return found

    def _apply(self, number: int, norm: float) -> None:
        if self.settings.clip is not None:
            self.accelerator.clip_grad_norm_(list(self.parameters.values()), self.settings.clip)
        watch, moving = None, [group for group, v in zip(self.groups, self.optimizer.param_groups) if v["lr"] > 0]
        if not self.watched and moving:
            norm = optimisation.grad_norm([p for group in moving for p in group.parameters.values()])
            watch = optimisation.UpdateWatch(moving) if norm > optimisation.NOTICEABLE else None
        self.updating = True
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if watch is not None:
            watch.check(number, norm)
            self.watched = True

    def _without_margin(self, pairs: int, number: int) -> None:
        self.barren += pairs
        if self.barren >= PATIENCE:
            raise errors.NoMarginError(f"step {number}, the last {self.barren} pairs: {self.no_margin}") from self.no_margin

    def _warn_about(self, found: PairLoss, norm: float, number: int) -> None:
        different = None if found.distinct is None else found.distinct[~torch.isnan(found.distinct)]
        if different is not None:
            diverse = bool((different > 1).any())
            self.diverse, self.alike = self.diverse or diverse, 0 if diverse else self.alike + len(different)
            if self.alike >= PATIENCE:
                self._warn_about_diversity(number)
        for name, (winners, losers) in self.errors_watch.risen(found).items():
            self._warn(
                errors.BothErrorsRiseWarning,
                f"step {number}, component {name!r}: over the last {PATIENCE} pairs the denoising error is above the start's for "
                f"winners (by {winners:.1%}) and losers (by {losers:.1%}): the loss falls only because losers get worse faster. "
                "Lower the learning rate, raise beta, or add an anchor on the winners",
            )
        if norm == 0:
            self._warn(errors.ZeroGradientWarning, f"step {number}: every gradient is exactly zero; nothing is learned from it")

    def _warn_about_diversity(self, number: int) -> None:
        hidden = [name for name in self.system.hidden if not self.system.is_frozen(name)]
        if hidden:
            self._warn(
                errors.NoDiversityWarning,
                f"step {number}: none of the last {self.alike} pairs has two different intermediates, so the hidden "
                f"components ({', '.join(hidden)}) get exactly no gradient; use k >= 2, a larger k or a more diverse sampler",
            )

    def _warn(self, kind: type, message: str) -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            warnings.warn(message, kind, stacklevel=6)

    # -- checkpoints -----------------------------------------------------------------------------------------------------
    def _objective(self, method: str, *arguments: Any) -> Any:
        found = getattr(self.objective, method, None)
        return found(*arguments) if callable(found) else None

    def _mark(self) -> None:
        """Remember, after a whole step, everything that the next step changes before it changes the weights."""
        if self.out is None:
            return
        order = self.order
        self.boundary = {
            "step": self.step,
            "permutation": order.permutation,
            "order": order.generator.get_state(),
            "draws": self.draws.get_state(),
            "state": {"epoch": order.epoch, "position": order.position, "objective": self._objective("state_dict") or {}},
        }

    def _save(self) -> None:
        mark = self.boundary
        tensors = {f"weights/{name}": p for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        tensors |= {key: mark[key] for key in ("permutation", "order", "draws")}
        state = {**mark["state"], "settings": self.compared, "seconds": self.seconds}
        self.file.sync()
        checkpoints.save(self.out, checkpoints.Checkpoint(mark["step"], tensors, state))

    def _compared(self) -> dict[str, Any]:
        """Everything that must be the same for a resumed run to be the same run; the seed is in the generators."""
        own = getattr(self.objective, "settings", None)
        if not isinstance(own, Mapping):
            own = {"name": getattr(self.objective, "__qualname__", type(self.objective).__name__)}
        rows = [[pair.inputs, pair.chosen, pair.rejected] for pair in self.pairs]
        return plain({
            **{f"objective's {key}": value for key, value in own.items()},  # an option may be called "lr", too
            **self.settings.compared(),
            "generator's device": self.draws.device.type,
            "lr": {group.name: group.lr for group in self.groups},
            "weights": {name: [str(p.dtype), *p.shape] for name, p in self.parameters.items()},
            "pairs": f"{len(rows)} with digest {digest(rows)}",
            "frozen parts of the system (digest)": frozen_parts(self.system, set(map(id, self.parameters.values()))),
        })  # fmt: skip

    def _restore(self, found: checkpoints.Checkpoint) -> None:
        before = found.state["settings"]
        different = [key for key in {**before, **self.compared} if before.get(key) != self.compared.get(key)]
        if different:
            says = "; ".join(f"{key}: {before.get(key)!r} there, {self.compared.get(key)!r} now" for key in different)
            raise errors.ResumeError(f"{self.out}: the checkpoint after step {found.step} is of another run. {says}")
        if found.step > self.settings.steps:
            raise errors.ResumeError(f"{self.out}: the checkpoint is at step {found.step}, beyond steps={self.settings.steps}")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(found.tensors[f"weights/{name}"])
        self._restore_optimizer(found.tensors)
        self.order.generator.set_state(found.tensors["order"])
        self.draws.set_state(found.tensors["draws"])
        self.order.permutation = found.tensors["permutation"]
        self.order.epoch, self.order.position = found.state["epoch"], found.state["position"]
        self._objective("load_state_dict", found.state["objective"])
        self.step, self.seconds, self.history = found.step, found.state["seconds"], read(self.out, found.step)
        self.kept_any = self.diverse = True  # what is left may be too short to tell

    def _restore_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        content = self.optimizer.state_dict()
        content["state"] = {
            index: {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            for index, prefix in enumerate(f"optimizer/{name}/" for name in self.parameters)
        }
        content["state"] = {index: values for index, values in content["state"].items() if values}
        self.optimizer.load_state_dict(content)


def _accelerator():
    """accelerate's Accelerator for one process; the system is not wrapped, so ties and adapters stay what they are."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    if accelerator.num_processes > 1 or accelerator.scaler is not None:
        raise errors.DistributedError(
            f"found {accelerator.num_processes} processes, mixed precision {accelerator.mixed_precision!r}: the loop trains in "
            "one process, without fp16 gradient scaling; run it without `accelerate launch`, and load models in bfloat16"
        )
    return accelerator


# --- random state and modes -----------------------------------------------------------------------------------------------------


@contextmanager
def _own_random_state(generator: torch.Generator, parameters) -> Iterator[None]:
    """Inside the block torch's global generators are seeded from `generator` (dropout uses them); afterwards as before."""
    devices = sorted({p.device.index or 0 for p in parameters if p.device.type == "cuda"})
    seed = int(torch.randint(2**63 - 1, (1,), generator=generator, device=generator.device))
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


@contextmanager
def _undisturbed(system: CompoundSystem) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards train flags, requires_grad and all random state are as before."""
    training = [(module, module.training) for module in system.modules()]
    needs = [(parameter, parameter.requires_grad) for parameter in system.parameters()]
    numpy = sys.modules.get("numpy")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=devices), evaluating(system):
            yield
    finally:
        random.setstate(python_state)
        if numpy_state is not None:
            numpy.random.set_state(numpy_state)
        for module, flag in training:
            module.training = flag
        for parameter, flag in needs:
            parameter.requires_grad_(flag)


# --- measuring --------------------------------------------------------------------------------------------------------


def margins(
    system: CompoundSystem,
    pairs: Any,
    objective: Callable[..., PairLoss],
    generator: torch.Generator | None = None,
    batch_size: int = 8,
) -> PairLoss:
    """The objective on all pairs, without training: `.accuracy` is the (held-out) preference accuracy of the margin.

    Weights, gradients, train flags, global random state and what the objective has drawn stay as they are.

    Args:
        system, pairs, objective: as in `train`.
        generator: for what the objective draws. None: seed 0, so that two calls give the same numbers.
        batch_size: pairs scored at a time.

    Returns:
        PairLoss over all pairs, in their order, on the CPU; NaN margins where a pair has none.

    >>> from sysdpo_lab.components import Categorical
    >>> system = CompoundSystem([Categorical("z", {"x": 1}, 2)])
    >>> found = margins(system, [{"x": 0, "chosen": {"z": 1}, "rejected": {"z": 0}}], direct(0.1))
    >>> found.margin.tolist(), found.accuracy
    ([0.0], 0.5)
    """
    whole(1, batch_size=batch_size)
    pairs = _checked(system, pairs, objective)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    kept_state = objective.state_dict() if hasattr(objective, "state_dict") else None
    parts = []
    try:
        with _undisturbed(system):
            for start in range(0, len(pairs), batch_size):
                batch = pairs.batch(range(start, min(start + batch_size, len(pairs))))
                try:
                    parts.append(detached(objective(system, batch, generator)))
                except errors.NoMarginError:
                    parts.append(nothing(len(batch)))
    finally:
        if kept_state is not None:
            objective.load_state_dict(kept_state)
    return merged(parts)
