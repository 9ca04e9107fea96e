"""Objectives: what a batch of pairs costs. Each is a callable (system, batch, generator) -> PairLoss for the training loop.

SysDPO-Direct (E6), SysDPO-Sampling (E7) and the baseline Separate-DPO (E9).
"""

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sysdpo_lab import errors, losses, samplers
from sysdpo_lab.components.base import Batch, batch_length, take_rows
from sysdpo_lab.components.completion import Completion
from sysdpo_lab.decoding import evaluating
from sysdpo_lab.fingerprints import digest
from sysdpo_lab.losses import PairLoss
from sysdpo_lab.preferences import PairBatch, Pairs, collate
from sysdpo_lab.samplers import beam
from sysdpo_lab.samplers.candidates import check_size

if TYPE_CHECKING:
    from sysdpo_lab.system import CompoundSystem

SAMPLERS = {
    "diverse_beam": samplers.diverse_beam,
    "monte_carlo": samplers.monte_carlo,
    "gumbel_top_k": samplers.gumbel_top_k,
    "enumerate_all": samplers.enumerate_all,
}


class Objective:
    """Base of the objectives; a plain function (system, batch, generator) -> PairLoss does for the loop, too.

    Args:
        beta: > 0, the KL weight; larger keeps the optimum closer to the reference.
    """

    name = "objective"

    def __init__(self, beta: float):
        self.beta = errors.check_beta(beta)
        self.at_start = False  # whether the policy is known to be the frozen start (see `cache_reference`)
        self.prepared: dict[str, dict[str, Any]] = {}  # what was drawn then, and for which system
        self.prepared_for: Callable[[], Any] = lambda: None

    def __call__(self, system: "CompoundSystem", batch: PairBatch, generator: torch.Generator | None = None) -> PairLoss:
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        return {"name": self.name, "beta": self.beta}

    def check(self, system: "CompoundSystem", pairs: Pairs) -> None:
        """Named error when the pairs, or the system, do not fit; called before the first step."""

    def reset(self, system: "CompoundSystem") -> None:
        """Forget what was drawn, but not what `cache_reference` drew for this system; called when a run starts."""

    def scored(self, system: "CompoundSystem", batch: PairBatch, generator: torch.Generator | None) -> list[tuple[dict, list]]:
        """What the reference is asked for: [(trace, components scored on it)]; draws what is to be kept."""
        raise errors.UnknownOptionError(f"{self!r} asks for other values in each step, so its reference cannot be cached")

    def _prepared(self, system: "CompoundSystem") -> dict[str, dict[str, Any]]:
        return dict(self.prepared) if self.prepared_for() is system else {}

    def _start(self, system: "CompoundSystem"):
        """The context in which values of the frozen start are drawn."""
        return nullcontext() if self.at_start else system.reference()

    def state_dict(self) -> dict[str, Any]:
        """What was drawn and must be kept: values that a checkpoint can hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.settings.items() if k != 'name')})"


# --- direct -----------------------------------------------------------------------------------------------------------------


class _Direct(Objective):
    name = "direct"

    def check(self, system, pairs):
        if not pairs.is_trace:
            raise errors.PairKindError(
                f"direct needs pairs of whole traces (a value of each of {tuple(system.order)}), but these pairs hold finals "
                "only; use training.sampling, or training.separate"
            )

    def __call__(self, system, batch, generator=None):
        return losses.direct_loss(system, batch.chosen, batch.rejected, self.beta, generator=generator)

    def scored(self, system, batch, generator):
        return [(side, system.order) for side in (batch.chosen, batch.rejected)]


def direct(beta: float) -> Objective:
    """SysDPO-Direct (E6): DPO on whole traces; the log-ratio of a trace is the sum over components.

    Args:
        beta: > 0; larger keeps the optimum closer to the reference.

    >>> direct(0.5)
    direct(beta=0.5)
    """
    return _Direct(beta)


# --- sampling ---------------------------------------------------------------------------------------------------------------


class _Sampling(Objective):
    name = "sampling"

    def __init__(self, beta, sampler, k, repeats, fixed, from_traces, options):
        super().__init__(beta)
        errors.check_option("repeats", repeats, ("drop", "count"))
        self.sampler_name, self.sampler = _resolve(sampler)
        _check_options(self.sampler_name, self.sampler, options)
        if self.sampler_name != "enumerate_all" and self.sampler_name in SAMPLERS:
            check_size(k)
        self.k, self.repeats, self.fixed, self.from_traces, self.options = k, repeats, fixed, from_traces, options
        self.sets: dict[str, dict[str, Any]] = {}

    @property
    def settings(self):
        own = {"sampler": self.sampler_name, "k": self.k, "repeats": self.repeats, "fixed": self.fixed}
        return {**super().settings, **own, **{name: self.options[name] for name in sorted(self.options)}}

    def check(self, system, pairs):
        if pairs.is_trace and not self.from_traces:
            raise errors.PairKindError(
                "sampling needs pairs of finals, but these pairs are whole traces; use training.direct, or "
                "training.sampling(..., from_traces=True), which reads the outputs and draws its own intermediates"
            )

    def reset(self, system):
        self.sets = self._prepared(system)

    def state_dict(self):
        return {"sets": dict(self.sets)}

    def load_state_dict(self, state):
        self.sets = dict(state["sets"])

    def __call__(self, system, batch, generator=None):
        chosen, rejected = (side[system.output] if batch.is_trace else side for side in (batch.chosen, batch.rejected))
        values, log_weights, distinct = self._intermediates(system, batch.inputs, generator)
        found = losses.sampling_loss(
            system, batch.inputs, chosen, rejected, values, self.beta,
            repeats=self.repeats, log_weights=log_weights, generator=generator,
        )  # fmt: skip
        texts = _distinct_texts(values, len(batch))
        return dataclasses.replace(found, distinct=distinct, extras={} if texts is None else {"distinct_texts": texts})

    def _intermediates(self, system, inputs, generator) -> tuple[dict[str, Batch], Tensor, Tensor]:
        """One set A(x) a row: values {name: (B, k)}, log-weights (B, k), number of different ones (B,)."""
        if not self.fixed:
            drawn = self._draw(system, inputs, generator)
            return drawn.values, drawn.log_weights, drawn.distinct
        rows = batch_length(next(iter(inputs.values())))
        keys = [digest({name: batch[row] for name, batch in inputs.items()}) for row in range(rows)]
        new = {key: row for row, key in reversed(list(enumerate(keys))) if key not in self.sets}
        if new:
            wanted = dict(sorted(new.items(), key=lambda item: item[1]))
            chosen = {name: take_rows(batch, list(wanted.values())) for name, batch in inputs.items()}
            with self._start(system):
                drawn = self._draw(system, chosen, generator)
            self.sets |= {key: _entry(drawn, row) for row, key in enumerate(wanted)}
            self.prepared = dict(self.sets) if self.at_start else self.prepared
        return _gather([self.sets[key] for key in keys])

    def scored(self, system, batch, generator):
        if not self.fixed:
            return super().scored(system, batch, generator)
        values, log_weights, _ = self._intermediates(system, batch.inputs, generator)
        sides = (side[system.output] if batch.is_trace else side for side in (batch.chosen, batch.rejected))
        rows, size = log_weights.shape
        trace = losses._assignments(system, batch.inputs, values, rows, size)
        return [(trace, system.hidden), (losses._with_both_finals(system, trace, *sides, size), [system.output])]

    def _draw(self, system, inputs, generator):
        # dropout would make the policy that draws another one than the policy that is trained
        with evaluating(system):
            return self.sampler(system, inputs, self.k, generator=generator, **self.options)


def _resolve(sampler: str | Callable) -> tuple[str, Callable]:
    if isinstance(sampler, str):
        errors.check_option("sampler", sampler, tuple(SAMPLERS))
        return sampler, SAMPLERS[sampler]
    if not callable(sampler):
        raise errors.UnknownOptionError(f"sampler={sampler!r}: choose one of {', '.join(SAMPLERS)}, or a function")
    known = {function: name for name, function in SAMPLERS.items()}
    return known.get(sampler, getattr(sampler, "__qualname__", type(sampler).__name__)), sampler


def _check_options(name: str, sampler: Callable, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(sampler).parameters.values()
    allowed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        if name not in SAMPLERS:
            return
        allowed = list(beam.OPTIONS)
    for option in options:
        if option not in allowed:
            raise errors.UnknownOptionError(f"{name} has no option {option!r}; it has {', '.join(allowed) or 'none'}")


def _entry(drawn: samplers.Candidates, row: int) -> dict[str, Any]:
    """One row of the candidates in plain Python, as a checkpoint holds it."""
    rows = {name: batch[row] for name, batch in drawn.values.items()}
    values = {name: value.tolist() if isinstance(value, Tensor) else list(value) for name, value in rows.items()}
    return {"values": values, "log_weights": drawn.log_weights[row].tolist(), "distinct": int(drawn.distinct[row])}


def _gather(entries: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Batch], Tensor, Tensor]:
    values = {name: [entry["values"][name] for entry in entries] for name in entries[0]["values"]}
    whole = {name: all(type(v) is int for row in rows for v in row) for name, rows in values.items()}
    batches = {name: torch.tensor(rows) if whole[name] else rows for name, rows in values.items()}
    log_weights = torch.tensor([entry["log_weights"] for entry in entries], dtype=torch.float64)
    return batches, log_weights, torch.tensor([entry["distinct"] for entry in entries])


def _distinct_texts(values: Mapping[str, Batch], rows: int) -> Tensor | None:
    """How many different joint texts a row has; None where no intermediate is a text."""
    columns = [batch for batch in values.values() if not isinstance(batch, Tensor)]
    columns = [batch for batch in columns if batch and any(isinstance(v, (str, Completion)) for row in batch for v in row)]
    if not columns:
        return None
    return torch.tensor([len({tuple(str(v) for v in joint) for joint in zip(*(c[row] for c in columns))}) for row in range(rows)])


def sampling(
    beta: float,
    sampler: str | Callable = "diverse_beam",
    k: int | None = None,
    repeats: str = "drop",
    fixed: bool = False,
    *,
    from_traces: bool = False,
    **options: Any,
) -> Objective:
    """SysDPO-Sampling (E7): preferences on finals only, with k intermediates drawn from the current policy in each step.

    The set A(x) is drawn in evaluation mode without gradients, once a pair, and serves winner, loser, policy and
    reference. The sampler's log-weights are always passed to the loss.

    Args:
        beta: > 0; larger keeps the optimum closer to the reference.
        sampler: a function of `samplers`, or its name: "diverse_beam", "monte_carlo", "gumbel_top_k", "enumerate_all"; or a
            function of your own, called with (system, inputs, k, generator=..., **options), that returns Candidates.
        k: number of joint assignments a pair; with k = 1 the hidden components get no gradient. None for enumerate_all.
        repeats: "drop", or "count" (inconsistent as k grows).
        fixed: draw A(x) once for each different input, from the frozen start, and keep it; cached reference
            log-probabilities can then be used. The sets go into the checkpoints.
        from_traces: accept whole traces and use their outputs only.
        options: of the sampler (diversity_penalty, weights, ...).

    Raises:
        UnknownOptionError: a sampler, option or value that does not exist.

    >>> sampling(0.1, "monte_carlo", 2, weights="importance")
    sampling(beta=0.1, sampler='monte_carlo', k=2, repeats='drop', fixed=False, weights='importance')
    """
    return _Sampling(beta, sampler, k, repeats, bool(fixed), bool(from_traces), options)


# --- separate ---------------------------------------------------------------------------------------------------------------


class _Separate(Objective):
    name = "separate"

    def __init__(self, beta):
        super().__init__(beta)
        self.parents: dict[str, dict[str, Any]] = {}

    def check(self, system, pairs):
        if not pairs.is_trace and system[system.output].kind == "deterministic":
            raise errors.PairKindError(
                f"the output {system.output!r} is deterministic, so pairs of finals train nothing separately; "
                "separate needs pairs of whole traces here"
            )

    def reset(self, system):
        self.parents = self._prepared(system)

    def state_dict(self):
        return {"parents": dict(self.parents)}

    def load_state_dict(self, state):
        self.parents = dict(state["parents"])

    def __call__(self, system, batch, generator=None):
        names, winners = trained_separately(system, batch.is_trace), {}
        if batch.is_trace:
            gaps, kept, errors_seen = self._trace_gaps(system, batch, names, generator, winners)
        else:
            gaps, kept, errors_seen = self._final_gaps(system, batch, names, generator)
        rest = [name for name in system.order if name not in names]
        extras = {"separate": ", ".join(names), "left_out": ", ".join(rest), **errors_seen}
        return dataclasses.replace(_added(gaps, self.beta, kept), extras=extras, winners=winners)

    def scored(self, system, batch, generator):
        names = trained_separately(system, batch.is_trace)
        if batch.is_trace:
            return [(side, names) for side in (batch.chosen, batch.rejected)]
        parents = self._drawn_parents(system, batch, generator)
        return [({**parents, name: side}, [name]) for name in names for side in (batch.chosen, batch.rejected)]

    def _trace_gaps(self, system, batch, names, generator, winners):
        gaps, kept = losses.component_gaps(system, batch.chosen, batch.rejected, names, generator=generator, winners=winners)
        return gaps, kept, losses.bound_errors(system, batch.chosen, batch.rejected, names) if gaps else {}

    def _final_gaps(self, system, batch, names, generator):
        """Each named component as if it gave the final answer, its parents drawn from the frozen start."""
        parents = self._drawn_parents(system, batch, generator)
        gaps, kept, seen = {}, None, {}
        for name in names:
            chosen, rejected = {**parents, name: batch.chosen}, {**parents, name: batch.rejected}
            found, possible = losses.component_gaps(system, chosen, rejected, [name], generator=generator)
            gaps |= found
            seen |= losses.bound_errors(system, chosen, rejected, [name]) if found else {}
            kept = possible if kept is None else kept & possible.to(kept.device)
        return gaps, kept, seen

    def _drawn_parents(self, system, batch, generator) -> dict[str, Batch]:
        keys = [_pair_key(batch, row) for row in range(len(batch))]
        new = [row for row, key in enumerate(keys) if key not in self.parents]
        if new and system.hidden:
            inputs = {name: take_rows(value, new) for name, value in batch.inputs.items()}
            with evaluating(system), self._start(system):
                drawn = samplers.monte_carlo(system, inputs, 1, generator=generator).values
            for place, row in enumerate(new):
                self.parents[keys[row]] = {name: _plain(value[place][0]) for name, value in drawn.items()}
            self.prepared = dict(self.parents) if self.at_start else self.prepared
        hidden = {name: collate([self.parents[key][name] for key in keys]) for name in system.hidden}
        return {**batch.inputs, **hidden}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def _pair_key(batch: PairBatch, row: int) -> str:
    inputs = {name: value[row] for name, value in batch.inputs.items()}
    return digest([batch.rows[row], inputs, batch.chosen[row], batch.rejected[row]])  # held-out pairs have rows of their own


def trained_separately(system: "CompoundSystem", whole_traces: bool) -> list[str]:
    """The components that Separate-DPO trains (E9); frozen and deterministic ones never.

    With whole traces all others; with finals the output, and each component whose values are of the final's type: the
    same class and, for tables, the same cardinality. A system without anything trainable is measured as if it had.
    """
    names = [name for name in system.order if system[name].kind != "deterministic"]
    if not whole_traces:
        names = [name for name in names if _same_type(system[name], system[system.output])]
    return [name for name in names if not system.is_frozen(name)] or names


def _same_type(component, output) -> bool:
    cardinalities = [getattr(each, "cardinality", None) for each in (component, output)]
    return type(component) is type(output) and cardinalities[0] == cardinalities[1]


def _added(gaps: Mapping[str, Tensor], beta: float, kept: Tensor) -> PairLoss:
    """One DPO loss a component, each with its own sigmoid, added; the margin is the sum of the components' margins."""
    if not bool(kept.any()) or not gaps:
        return losses._pair_loss(torch.zeros(len(kept)), beta, torch.zeros_like(kept), {})  # raises NoMarginError
    shares = {name: torch.where(kept, gap.detach(), torch.nan) for name, gap in gaps.items()}
    total = losses._pair_loss(sum(gaps.values()), beta, kept, shares)
    loss = sum(losses.dpo_loss(beta * gap[kept]) for gap in gaps.values())
    return dataclasses.replace(total, loss=loss)


def separate(beta: float) -> Objective:
    """Separate-DPO, the baseline (E9): one DPO loss a component, added, each with its own sigmoid.

    Whole traces: each component on its own log-ratio gap. Finals only, as in the paper: a component whose output has the
    final's type is trained on (x, z^w, z^l), the output component on (z^w, z^l) given parents that are drawn once a pair
    from the frozen start and kept. The other components stay as they are; each record says which.

    Args:
        beta: > 0; larger keeps every component closer to its reference.

    >>> separate(0.1)
    separate(beta=0.1)
    """
    return _Separate(beta)


# --- references that are known beforehand -------------------------------------------------------------------------------------


def cache_reference(
    system: "CompoundSystem",
    pairs: Pairs,
    objective: Objective,
    generator: torch.Generator | None = None,
    batch_size: int = 8,
) -> int:
    """Score once, before training, all that the objective will ask of components made with reference="cached".

    Intermediates that the objective keeps (a fixed set, Separate's parents) are drawn here, from the present weights,
    which must be the start's; each component says so when they are not.

    Args:
        system, pairs, objective: as for `train`; sampling needs fixed=True.
        generator: for what is drawn. None: seed 0. After a restart the same seed gives the same sets.
        batch_size: pairs at a time.

    Returns:
        number of log-probabilities that are kept.

    Raises:
        UnknownOptionError: the objective draws anew in each step, or no component has a cached reference.
    """
    cached = [name for name in system.order if getattr(system[name], "strategy", None) == "cached"]
    if not cached:
        raise errors.UnknownOptionError("no component was made with reference='cached'; there is nothing to store")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    objective.check(system, pairs)
    kept = dict.fromkeys(cached, 0)
    objective.at_start, objective.prepared, objective.prepared_for = True, {}, weakref.ref(system)
    objective.reset(system)
    try:
        with evaluating(system):
            for start in range(0, len(pairs), batch_size):
                batch = pairs.batch(range(start, min(start + batch_size, len(pairs))))
                for trace, names in objective.scored(system, batch, generator):
                    for name in (name for name in names if name in kept):
                        kept[name] = system[name].cache_reference(trace[name], system.parent_values(name, trace))
    finally:
        objective.at_start = False
    return sum(kept.values())
