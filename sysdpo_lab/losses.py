"""DPO's loss and its two system-level forms: SysDPO-Direct (E6) and SysDPO-Sampling (E7).

The formulas are pure functions of log-probabilities; the two functions that take a system only ask it for the terms.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from sysdpo_lab import errors
from sysdpo_lab.components.base import (
    Batch,
    batch_length,
    concatenate,
    flatten_rows,
    fresh_generator,
    group_rows,
    joint_codes,
    repeat_rows,
    same_value,
    take_rows,
)

if TYPE_CHECKING:
    from sysdpo_lab.system import CompoundSystem

POSTERIOR = "posterior"


@dataclass
class PairLoss:
    """What a preference loss says about a batch of pairs.

    Attributes:
        loss: scalar, mean over the pairs that have a margin; differentiable.
        margin: (B,) beta x log-ratio gap; NaN where a pair was dropped; differentiable.
        log_ratio_gap: (B,) winner's log-ratio minus loser's, nats.
        shares: {component: (B,)} each component's part of the gap, detached; they sum to `log_ratio_gap`
            (Sampling adds the entry "posterior", see `sampling_shares`).
        dropped: number of pairs without a margin.
        effective: (B,) effective number of intermediates 1 / sum of squared posterior weights, mean of both sides
            (Sampling only).
        distinct: (B,) number of different intermediates each pair had (Sampling only).
        extras: whatever else an objective wants in the log: {name: (B,) numbers, or a text}.
        winners: {component: (B,)} log p of the winners' values, nats (a bound under the pair's noise), 0 where a pair was
            dropped; differentiable (Direct and Separate on traces only).
    """

    loss: Tensor
    margin: Float[Tensor, " B"]
    log_ratio_gap: Float[Tensor, " B"]
    shares: dict[str, Float[Tensor, " B"]] = field(default_factory=dict)
    dropped: int = 0
    effective: Float[Tensor, " B"] | None = None
    distinct: Int[Tensor, " B"] | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    winners: dict[str, Float[Tensor, " B"]] = field(default_factory=dict)

    @property
    def kept(self) -> Bool[Tensor, " B"]:
        """Which pairs have a margin."""
        return ~torch.isnan(self.margin.detach())

    @property
    def accuracy(self) -> float:
        """Share of the kept pairs whose margin is positive; a margin of 0 counts one half."""
        margin = self.margin.detach()[self.kept]
        return ((margin > 0).double() + 0.5 * (margin == 0).double()).mean().item() if len(margin) else float("nan")


# --- formulas -----------------------------------------------------------------------------------------------------------


def dpo_loss(margin: Float[Tensor, " B"]) -> Tensor:
    """-log sigmoid(margin), mean over pairs (E5; Rafailov et al. 2023, Eq. 7): never the log sigmoid of a mean.

    Args:
        margin: (B,) beta x log-ratio gap. A larger beta at the same gap is a larger margin.

    >>> round(dpo_loss(torch.zeros(3)).item(), 4)
    0.6931
    """
    return -logsigmoid(margin).mean()


def log_mixture(joint: Float[Tensor, "B K"], log_weights: Float[Tensor, "B K"]) -> Float[Tensor, " B"]:
    """log P_A = log sum_a exp(log_weight_a + log p(a, z | x)), nats (E7); -inf where no a can produce z.

    >>> log_mixture(torch.tensor([[0.25, 0.25]]).log(), torch.zeros(1, 2)).exp()
    tensor([0.5000])
    """
    total = joint + log_weights
    possible = torch.isfinite(total).any(-1)
    # an all -inf row has a NaN gradient in logsumexp: take it out first
    safe = torch.where(possible[:, None], total, torch.zeros_like(total))
    return torch.where(possible, torch.logsumexp(safe, -1), torch.full_like(safe[:, 0], -torch.inf))


def posterior_weights(joint: Float[Tensor, "B K"], log_weights: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
    """w_a(z) = exp(log_weight_a) p(a, z | x) / P_A(z | x): how much each intermediate explains z, rows sum to 1.

    >>> posterior_weights(torch.tensor([[0.3, 0.1]]).log(), torch.zeros(1, 2))
    tensor([[0.7500, 0.2500]])
    """
    mixture = log_mixture(joint, log_weights)
    weights = (joint + log_weights - torch.where(torch.isfinite(mixture), mixture, 0.0)[:, None]).exp()
    return weights


def repeat_log_weights(
    codes: Int[Tensor, "B K"], repeats: str, log_weights: Float[Tensor, "B K"] | None = None
) -> Float[Tensor, "B K"]:
    """Log-weights for a set with repeats, all on the first of each value and -inf on its repeats.

    "drop" keeps the weight of the first; "count" adds up those of all repeats. Putting the sum on one entry, not a share
    on each, keeps psi_1's gradient exactly 0 when only one value is left, whatever its multiplicity.

    Args:
        codes: (B, K), equal within a row where the joint values are (`joint_codes`).
        repeats: "drop" or "count".
        log_weights: (B, K) to start from, default 0; entries with -inf are no part of the set.

    >>> repeat_log_weights(torch.tensor([[5, 5]]), "drop"), repeat_log_weights(torch.tensor([[5, 5]]), "count").exp()
    (tensor([[0., -inf]], dtype=torch.float64), tensor([[2., 0.]], dtype=torch.float64))
    """
    errors.check_option("repeats", repeats, ("drop", "count"))
    weights = torch.zeros(codes.shape, dtype=torch.float64) if log_weights is None else log_weights
    outside = weights == -torch.inf
    alone = codes.max() + 1 + torch.arange(codes.shape[1])
    codes = torch.where(outside, alone, codes)
    if repeats == "count":
        largest = weights.amax(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).min)
        total = torch.zeros(len(codes), int(codes.max()) + 1, dtype=weights.dtype)
        total = total.scatter_add(1, codes, (weights - largest).exp())
        weights = total.gather(1, codes).log() + largest
    return weights.masked_fill(outside | ~_first_of(codes), -torch.inf)


def _first_of(codes: Int[Tensor, "B K"]) -> Bool[Tensor, "B K"]:
    order = codes.argsort(dim=1, stable=True)
    ordered = codes.gather(1, order)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(new).scatter(1, order, new)


def sampling_shares(
    policy: Mapping[str, Float[Tensor, "B K"]],
    reference: Mapping[str, Float[Tensor, "B K"]],
    log_weights: Float[Tensor, "B K"],
) -> dict[str, Float[Tensor, " B"]]:
    """Parts of log P_A(z) - log P_A,ref(z) for one side, nats.

    With w, w_ref the posteriors within A:  log P_A/P_A,ref = sum_i sum_a w_a [log p_i - log p_i,ref] - KL(w || w_ref);
    entry i is component i's part, "posterior" is -KL(w || w_ref) (always <= 0).

    Args:
        policy, reference: each component's (B, K) log-probabilities of the K assignments with this side's z.
        log_weights: (B, K).
    """
    joint, joint_ref = sum(policy.values()), sum(reference.values())
    weights, weights_ref = posterior_weights(joint, log_weights), posterior_weights(joint_ref, log_weights)
    used = weights > 0
    shared = used & (weights_ref > 0)
    shares = {name: _weighted(weights, policy[name] - reference[name], shared) for name in policy}
    ratio = torch.where(shared, weights, 1.0).log() - torch.where(shared, weights_ref, 1.0).log()
    # an a that only the policy can use has an infinite log-ratio and an infinite KL term; their sum is the finite rest
    gap = log_mixture(joint, log_weights) - log_mixture(joint_ref, log_weights)
    only_policy = _weighted(weights, gap[:, None].expand_as(weights), used & ~shared)
    shares[POSTERIOR] = only_policy - _weighted(weights, ratio, shared)
    return shares


def _weighted(weights: Tensor, values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, weights * torch.where(where, values, 0.0), 0.0).sum(-1)


# --- shared helpers -----------------------------------------------------------------------------------------------------


def _pair_loss(
    gap: Tensor, beta: float, kept: Tensor, shares: dict, effective: Tensor | None = None, same: Tensor | None = None
) -> PairLoss:
    """Loss over the kept pairs; the others get a NaN margin and are counted; pairs of the `same` two have gap 0."""
    if not bool(kept.any()):
        raise errors.NoMarginError(
            f"none of the {len(kept)} pairs has a margin: every winner or loser has probability 0; "
            "check the data, or use a larger or more diverse set of intermediates"
        )
    if same is not None:  # what cancels in exact arithmetic would leave 1e-18 in the gradient
        gap = torch.where(same.to(gap.device), torch.zeros_like(gap), gap)
    bad = kept & ~torch.isfinite(gap.detach())
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise errors.NonFiniteError(f"row {row}: the log-ratio gap is {gap[row].item()}; look at its components' terms")
    margin = beta * torch.where(kept, gap, torch.full_like(gap, torch.nan))
    return PairLoss(dpo_loss(margin[kept]), margin, torch.where(kept, gap, torch.nan).detach(), shares, int((~kept).sum()),
                    effective)


def _same_rows(left: Batch, right: Batch) -> Bool[Tensor, " B"]:
    if isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape == right.shape:
        return (left == right).reshape(len(left), -1).all(1).cpu()
    return torch.tensor([same_value(a, b) for a, b in zip(left, right)], dtype=torch.bool)


def _terms(system: "CompoundSystem", trace: Mapping[str, Batch], names: list[str], noise: Mapping[str, Any]):
    """Policy and reference terms of one trace; a component with nothing to train is scored without a graph."""
    policy = {}
    for name in names:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not system.is_frozen(name)):
            policy.update(system.log_prob_terms(trace, noise, names=[name]))
    with torch.no_grad(), system.reference():
        reference = system.log_prob_terms(trace, noise, names=names)
    return policy, reference


def _wide(terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All terms in float64 on one device: sums of a float64 table and a float32 model lose nothing."""
    device = next(iter(terms.values())).device
    return {name: term.to(device=device, dtype=torch.float64) for name, term in terms.items()}


# --- SysDPO-Direct ------------------------------------------------------------------------------------------------------


def direct_loss(
    system: "CompoundSystem",
    chosen: Mapping[str, Batch],
    rejected: Mapping[str, Batch],
    beta: float,
    *,
    generator: torch.Generator | None = None,
) -> PairLoss:
    """SysDPO-Direct (E6): DPO on whole traces, intermediates in the data.

    margin = beta [log p/p_ref(s^w | x) - log p/p_ref(s^l | x)], each log-ratio the sum over components.

    Args:
        system: the compound system; frozen components are scored but get no gradient.
        chosen, rejected: traces with a value of every variable, B rows, the same inputs row by row.
        beta: > 0; larger keeps the optimum closer to the reference.
        generator: for the noise of bound components; one draw a pair serves both sides, policy and reference. Sides with
            different numbers (or sizes) of images cannot share noise: such pairs are dropped and counted.

    Raises:
        InputMismatchError: inputs differ within a pair.  NoMarginError: no pair has a margin.
        NonFiniteError, BatchMismatchError, MissingParentError, UnknownOptionError.

    >>> from sysdpo_lab import CompoundSystem
    >>> from sysdpo_lab.components import Categorical
    >>> system = CompoundSystem([Categorical("z", {"x": 1}, 2)], inputs=("x",), output="z")
    >>> x = torch.zeros(1, dtype=torch.long)
    >>> out = direct_loss(system, {"x": x, "z": x}, {"x": x, "z": x + 1}, beta=0.1)
    >>> round(out.loss.item(), 4), out.margin.item()
    (0.6931, 0.0)
    """
    beta = errors.check_beta(beta)
    winners: dict[str, Tensor] = {}
    gaps, kept = component_gaps(system, chosen, rejected, generator=generator, winners=winners)
    if not gaps:
        return _pair_loss(torch.zeros(len(kept)), beta, kept, {})
    shares = {n: torch.where(kept, g.detach(), torch.nan) for n, g in gaps.items()}
    same = torch.stack([_same_rows(chosen[name], rejected[name]) for name in system.order]).all(0)
    found = _pair_loss(sum(gaps.values()), beta, kept, shares, same=same)
    found.extras |= bound_errors(system, chosen, rejected)
    found.winners |= winners
    return found


def component_gaps(
    system: "CompoundSystem",
    chosen: Mapping[str, Batch],
    rejected: Mapping[str, Batch],
    names: list[str] | None = None,
    *,
    generator: torch.Generator | None = None,
    winners: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Float[Tensor, " B"]], Bool[Tensor, " B"]]:
    """Each component's log-ratio of the chosen trace minus that of the rejected one, nats, differentiable.

    Args:
        system, chosen, rejected, generator: as in `direct_loss`.
        names: the components wanted, default all; the traces need a value of these and of their parents.
        winners: takes the chosen values' own log p, as `PairLoss.winners`.

    Returns:
        {component: (B,)}, 0 where the pair has no margin, and (B,) which pairs have one; {} when none can be scored.
    """
    names = system.order if names is None else names
    rows = _check_pair(system, chosen, rejected, names)
    aligned = _same_shape(system, chosen, rejected, rows, names)
    pick = aligned.nonzero()[:, 0].tolist()
    if not pick:
        return {}, aligned
    used = dict.fromkeys([*system.inputs, *names, *(parent for name in names for parent in system.parents(name))])
    both = {n: concatenate(take_rows(chosen[n], pick), take_rows(rejected[n], pick)) for n in used}
    noise = _pair_noise(system, both, len(pick), generator, names)
    policy, reference = (_wide(terms) for terms in _terms(system, both, names, noise))
    possible = torch.stack([torch.isfinite(policy[n].detach()) & torch.isfinite(reference[n]) for n in names]).all(0)
    possible = possible[: len(pick)] & possible[len(pick) :]
    gaps = {n: _difference(policy[n] - reference[n], len(pick), possible) for n in names}
    if winners is not None:
        winners |= {n: _spread(torch.where(possible, policy[n][: len(pick)], 0.0), aligned) for n in names}
    kept = aligned.clone()
    kept[aligned] = possible.cpu()
    return {n: _spread(g, aligned) for n, g in gaps.items()}, kept.to(possible.device)


def _difference(ratio: Tensor, rows: int, possible: Tensor) -> Tensor:
    winner, loser = ratio[:rows], ratio[rows:]
    return torch.where(possible, winner, 0.0) - torch.where(possible, loser, 0.0)


def _spread(values: Tensor, where: Tensor) -> Tensor:
    """Values of the aligned pairs put back to their rows, 0 elsewhere."""
    if bool(where.all()):
        return values
    full = torch.zeros(len(where), dtype=values.dtype, device=values.device)
    return full.index_put((where.nonzero()[:, 0].to(values.device),), values)


def _check_pair(
    system: "CompoundSystem", chosen: Mapping[str, Batch], rejected: Mapping[str, Batch], names: list[str]
) -> int:
    rows, others = system.check_trace(chosen, names), system.check_trace(rejected, names)
    if rows != others:
        raise errors.BatchMismatchError(f"{rows} chosen traces but {others} rejected ones")
    if rows == 0:
        raise errors.BatchMismatchError("the batch holds no pairs")
    if system.output in names:
        _check_answers({"chosen": chosen[system.output], "rejected": rejected[system.output]})
    for name in system.inputs:
        if isinstance(chosen[name], Tensor) and isinstance(rejected[name], Tensor) and chosen[name].equal(rejected[name]):
            continue
        for row in range(rows):
            if not same_value(chosen[name][row], rejected[name][row]):
                raise errors.InputMismatchError(
                    f"row {row}: chosen and rejected have different inputs {name!r}: "
                    f"{chosen[name][row]!r} and {rejected[name][row]!r}; a pair compares answers to one input"
                )
    return rows


def _same_shape(
    system: "CompoundSystem", chosen: Mapping, rejected: Mapping, rows: int, names: list[str]
) -> Bool[Tensor, " B"]:
    """Pairs whose bound components have equally many parts (images) on both sides: only those can share noise."""
    same = torch.ones(rows, dtype=torch.bool)
    for name in names:
        if system[name].kind == "bound":
            for row in range(rows):
                left, right = chosen[name][row], rejected[name][row]
                same[row] &= getattr(left, "shape", None) == getattr(right, "shape", None)
    return same


def bound_errors(
    system: "CompoundSystem", chosen: Mapping[str, Batch], rejected: Mapping[str, Batch], names: list[str] | None = None
) -> dict[str, Float[Tensor, " B"]]:
    """Errors of the bound components in the `component_gaps` that were just computed, for the log.

    Returns:
        {"NAME_error_chosen", "..._rejected", "..._chosen_start", "..._rejected_start": (B,)}: the policy's and the
        frozen start's error on each side, under the same noise; NaN where a pair was left out or has no images.
    """
    names = system.order if names is None else names
    found, rows = {}, batch_length(chosen[names[0]])
    for name in names:
        kept = getattr(system[name], "last_errors", {})
        if system[name].kind != "bound" or not {"policy", "reference"} <= kept.keys():
            continue
        aligned = _same_shape(system, chosen, rejected, rows, names)
        for who, ending in (("policy", ""), ("reference", "_start")):
            for side, values in zip(("chosen", "rejected"), kept[who].chunk(2)):
                full = torch.full((rows,), torch.nan, dtype=torch.float64)
                full[aligned] = values.double().cpu()
                found[f"{name}_error_{side}{ending}"] = full
    return found


def _pair_noise(
    system: "CompoundSystem", both: Mapping[str, Batch], rows: int, generator, names: list[str]
) -> dict[str, Any]:
    """One noise draw a pair, used for winner and loser alike."""
    bound = [name for name in names if system[name].kind == "bound"]
    if bound and generator is None:
        generator = fresh_generator()
    drawn = {n: system[n].draw_noise(take_rows(both[n], range(rows)), generator=generator) for n in bound}
    return {name: system[name].repeat_noise(noise) for name, noise in drawn.items()}


# --- SysDPO-Sampling ----------------------------------------------------------------------------------------------------


def first_of_each(columns: list[Batch], rows: int, size: int) -> Bool[Tensor, "B K"]:
    """Whether entry k of a row is the first with its joint value.

    >>> first_of_each([torch.tensor([[1, 1, 2]])], 1, 3)
    tensor([[ True, False,  True]])
    """
    return _first_of(joint_codes(columns, rows, size))


def sampling_loss(
    system: "CompoundSystem",
    inputs: Mapping[str, Batch],
    chosen: Batch,
    rejected: Batch,
    intermediates: Mapping[str, Batch],
    beta: float,
    *,
    repeats: str = "drop",
    log_weights: Float[Tensor, "B K"] | None = None,
    generator: torch.Generator | None = None,
) -> PairLoss:
    """SysDPO-Sampling (E7): preferences on finals only, p(z | x) replaced by P_A(z | x) = sum_{a in A(x)} p(a | x) p(z | x, a).

    margin = beta [log P_A/P_A,ref(z^w | x) - log P_A/P_A,ref(z^l | x)], the same A for both sides, policy and reference.

    Args:
        system: the compound system.
        inputs: {input: B rows}.
        chosen, rejected: B values of the output each.
        intermediates: {hidden component: (B, k), or B lists of k}: k joint assignments a row. Deterministic components
            may be left out; they are computed. A component that does not influence the output may be left out; where
            it is given, its value is a part of the assignment and its term is counted.
        beta: > 0; larger keeps the optimum closer to the reference.
        repeats: "drop" (default) counts a joint assignment once; "count" counts every repeat (inconsistent as k grows).
        log_weights: (B, k) added to log p(a, z | x); all four uses get the same.
        generator: accepted for symmetry with `direct_loss`; nothing is random once the set is given.

    Raises:
        NoMarginError: no pair has a margin.  UnsupportedSamplerError: a component scores by a bound.
        UnknownOptionError, BatchMismatchError, MissingParentError, NonFiniteError.

    >>> from sysdpo_lab import CompoundSystem
    >>> from sysdpo_lab.components import Categorical
    >>> system = CompoundSystem([Categorical("y", {"x": 1}, 2), Categorical("z", {"y": 2}, 2)])
    >>> x = torch.zeros(1, dtype=torch.long)
    >>> out = sampling_loss(system, {"x": x}, x, x + 1, {"y": torch.tensor([[0, 1]])}, beta=0.1)
    >>> round(out.loss.item(), 4), round(out.effective.item(), 4)
    (0.6931, 2.0)
    """
    beta = errors.check_beta(beta)
    errors.check_option("repeats", repeats, ("drop", "count"))
    _check_can_be_summed(system)
    rows, size = _check_sets(system, inputs, chosen, rejected, intermediates)
    trace = _assignments(system, inputs, intermediates, rows, size)
    scored = [n for n in trace if n in system.order and (system[n].kind != "deterministic" or n in intermediates)]
    below = [name for name in scored if system.output in system.ancestors(name)]  # their parents differ by side
    hidden, last = [name for name in scored if name not in below], [system.output, *below]
    columns = [group_rows(system[name].identities(trace[name]), size) for name in trace if name not in system.inputs]
    codes = joint_codes(columns, rows, size)
    weights = repeat_log_weights(codes, repeats, _checked_weights(log_weights, rows, size))
    shared, shared_ref = _terms(system, trace, hidden, {}) if hidden else ({}, {})
    sides = {}
    finals = _terms(system, _with_both_finals(system, trace, chosen, rejected, size), last, {})
    for side, start in (("w", 0), ("l", rows * size)):
        here = slice(start, start + rows * size)
        sides[side] = tuple(
            {n: t.reshape(rows, size) for n, t in _wide({**terms, **{n: final[n][here] for n in last}}).items()}
            for terms, final in ((shared, finals[0]), (shared_ref, finals[1]))
        )
    return _sampling_pair_loss(sides, weights, beta, _same_rows(chosen, rejected))


def _sampling_pair_loss(sides: dict, weights: Tensor, beta: float, same: Tensor) -> PairLoss:
    """From each side's (policy, reference) terms to the loss, shares and effective numbers."""
    ratio, shares, effective, kept = {}, {}, {}, None
    for side, (policy, reference) in sides.items():
        weights = weights.to(next(iter(policy.values())).device)
        joint, joint_ref = sum(policy.values()), sum(reference.values())
        log_p, log_ref = log_mixture(joint, weights), log_mixture(joint_ref, weights)
        possible = torch.isfinite(log_p.detach()) & torch.isfinite(log_ref)
        kept = possible if kept is None else kept & possible
        ratio[side] = torch.where(possible, log_p, 0.0) - torch.where(possible, log_ref, 0.0)
        with torch.no_grad():
            shares[side] = sampling_shares({n: t.detach() for n, t in policy.items()}, reference, weights)
            effective[side] = 1 / posterior_weights(joint.detach(), weights).pow(2).sum(-1)
    gaps = {name: shares["w"][name] - shares["l"][name] for name in shares["w"]}
    gaps = {name: torch.where(kept, gap, torch.nan) for name, gap in gaps.items()}
    number = torch.where(kept, (effective["w"] + effective["l"]) / 2, torch.nan)
    return _pair_loss(ratio["w"] - ratio["l"], beta, kept, gaps, number, same)


def _check_can_be_summed(system: "CompoundSystem") -> None:
    for name in system.relevant:
        if system[name].kind == "bound":
            raise errors.UnsupportedSamplerError(
                f"component {name!r} scores by a bound, which cannot be summed over intermediates; "
                "train this system with SysDPO-Direct (direct_loss)"
            )
    if system[system.output].kind == "deterministic":
        raise errors.UnknownOptionError(
            f"the output {system.output!r} is deterministic: a single answer cannot be preferred within a set of "
            "intermediates; train this system with SysDPO-Direct (direct_loss)"
        )


def _check_sets(system, inputs, chosen, rejected, intermediates) -> tuple[int, int]:
    system._inputs(inputs)
    rows = batch_length(chosen)
    _check_answers({"chosen": chosen, "rejected": rejected})
    lengths = {"chosen": rows, "rejected": batch_length(rejected)}
    lengths |= {name: batch_length(value) for name, value in {**inputs, **intermediates}.items()}
    if len(set(lengths.values())) > 1:
        raise errors.BatchMismatchError(f"the pairs have different numbers of rows: {lengths}")
    if rows == 0:
        raise errors.BatchMismatchError("the batch holds no pairs")
    unknown = [name for name in intermediates if name not in system.order or name == system.output]
    if unknown:
        raise errors.UnknownComponentError(f"intermediates name {unknown[0]!r}; the hidden components are {system.hidden}")
    missing = [n for n in system.hidden if n not in intermediates and system[n].kind != "deterministic"]
    if missing:
        raise errors.MissingParentError(f"intermediates lack the hidden component {missing[0]!r}; got {sorted(intermediates)}")
    flat = [name for name, value in intermediates.items() if isinstance(value, Tensor) and value.dim() < 2]
    if flat:
        raise errors.BatchMismatchError(
            f"intermediates of {flat[0]!r} have shape {tuple(intermediates[flat[0]].shape)}, expected (B, k)"
        )
    sizes = {(name, batch_length(row)) for name, value in intermediates.items() for row in value}
    numbers = {size for _, size in sizes}
    if len(numbers) > 1 or 0 in numbers:
        raise errors.BatchMismatchError(f"every row needs the same number k >= 1 of joint assignments; found {sorted(sizes)}")
    return rows, numbers.pop() if numbers else 1


def _check_answers(sides: Mapping[str, Batch]) -> None:
    """A missing answer is no answer of log-probability 0."""
    for side, values in sides.items():
        if not isinstance(values, Tensor) and any(value is None for value in values):
            row = next(row for row, value in enumerate(values) if value is None)
            raise errors.EmptyCompletionError(f"row {row}: {side} holds no answer (None); leave the pair out")


def _checked_weights(log_weights: Tensor | None, rows: int, size: int) -> Float[Tensor, "B K"] | None:
    if log_weights is None:
        return None
    log_weights = torch.as_tensor(log_weights, dtype=torch.float64).detach().cpu()
    if tuple(log_weights.shape) != (rows, size):
        raise errors.BatchMismatchError(f"log_weights has shape {tuple(log_weights.shape)}, expected ({rows}, {size})")
    if bool((torch.isnan(log_weights) | (log_weights == torch.inf)).any()):
        raise errors.NonFiniteError("log_weights holds NaN or +inf; -inf takes an entry out of the set")
    return log_weights


def _assignments(system, inputs, intermediates, rows: int, size: int) -> dict[str, Batch]:
    """B * k rows with a value of every input and hidden component."""
    trace = {name: repeat_rows(inputs[name], size) for name in system.inputs}
    for name in system.hidden:
        if name in intermediates:
            trace[name] = flatten_rows(intermediates[name])
        else:
            trace[name] = system.computed(name, trace, rows * size)
    others = [n for n in system.order if n in intermediates and n not in trace]
    return trace | {name: flatten_rows(intermediates[name]) for name in others}


def _with_both_finals(system, trace, chosen, rejected, size: int) -> dict[str, Batch]:
    """The B * k rows with the winner as output, then the same rows with the loser."""
    both = {name: concatenate(value, value) for name, value in trace.items()}
    both[system.output] = concatenate(repeat_rows(chosen, size), repeat_rows(rejected, size))
    return both
