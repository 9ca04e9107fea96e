"""Gumbel top-k: k joint assignments without replacement (Kool, van Hoof and Welling 2019, "Stochastic beams")."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.components.base import Batch, flatten_rows, fresh_generator, group_rows
from sysdpo_lab.samplers.candidates import Candidates, candidates, check_size
from sysdpo_lab.samplers.stochastic_beam import gumbel_with_maximum


def expand_perturbed(
    children: Float[Tensor, "B M V"], gumbels: Float[Tensor, "B M"], k: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One level of a stochastic beam over tables.

    Each beam's children get Gumbel-perturbed log-probabilities whose maximum is the beam's own; the k largest are kept.

    Args:
        children: (B, m, V) log-probability of every child, nats (-inf: impossible).
        gumbels: (B, m) perturbed log-probability of the beams.

    Returns:
        beam (B, k), child (B, k), log_probs (B, k), gumbels (B, k), best first; missing entries are -inf.
    """
    batch, beams, values = children.shape
    perturbed = gumbel_with_maximum(children, gumbels, generator)
    flat = perturbed.reshape(batch, beams * values)
    top, index = flat.topk(min(k, beams * values), dim=1)
    missing = k - top.shape[1]
    if missing > 0:
        top = torch.nn.functional.pad(top, (0, missing), value=-torch.inf)
        index = torch.cat([index, index[:, :1].expand(-1, missing)], 1)
    log_probs = children.reshape(batch, -1).gather(1, index)
    log_probs = torch.where(torch.isfinite(top), log_probs, -torch.inf)
    return index // values, index % values, log_probs, top


def log_inclusion(log_probs: Float[Tensor, "B K"], threshold: Float[Tensor, " B"]) -> Float[Tensor, "B K"]:
    """log q = log(1 - exp(-exp(log p - kappa))): probability that an entry beats the threshold kappa (Kool et al., Eq. 10).

    >>> round(log_inclusion(torch.tensor([[0.0]]), torch.tensor([-torch.inf])).item(), 6)
    0.0
    """
    rate = (log_probs - threshold[:, None]).exp()
    return torch.where(rate > 1e-4, (-torch.expm1(-rate)).log(), (log_probs - threshold[:, None]) - rate / 2)


@torch.no_grad()
def gumbel_top_k(
    system, inputs: Mapping[str, Batch], k: int, generator: torch.Generator | None = None, *, weights: str = "none"
) -> Candidates:
    """k different joint assignments a row, drawn without replacement from p(a | x).

    Tables perturb every value; language models run stochastic beam search; several hidden components form one beam over
    their joint values, in topological order.

    Args:
        system, inputs: any graph of hidden components with a perturbed search.
        k: set size; where fewer joint values exist, the surplus entries have weight -inf.
        generator: source of all randomness; None draws a fresh one.
        weights: "none", or "horvitz_thompson": 1 / inclusion probability (given the (k+1)-th perturbed score), which makes
            P_A an unbiased estimate of p(z | x); needs one more beam.

    Raises:
        UnknownOptionError, UnsupportedSamplerError.
    """
    check_size(k)
    errors.check_option("weights", weights, ("none", "horvitz_thompson"))
    if not system.hidden:
        return candidates(system, inputs, {}, 1)
    generator = fresh_generator() if generator is None else generator
    width = k + (weights == "horvitz_thompson")
    values, log_probs, gumbels = _search(system, inputs, width, generator)
    log_weights = torch.zeros_like(log_probs[:, :k])
    if weights == "horvitz_thompson":
        log_weights = -log_inclusion(log_probs[:, :k], gumbels[:, k])
    log_weights = torch.where(torch.isfinite(log_probs[:, :k]), log_weights, -torch.inf)
    values = {name: value[:, :k] if isinstance(value, Tensor) else [row[:k] for row in value] for name, value in values.items()}
    return candidates(system, inputs, values, k, log_probs[:, :k], log_weights)


def _search(system, inputs, width: int, generator) -> tuple[dict[str, Batch], Tensor, Tensor]:
    rows = system._inputs(inputs)[1]
    log_probs = torch.zeros(rows, 1, dtype=torch.float64)
    gumbels = -torch.empty(rows, 1, dtype=torch.float64).exponential_(generator=generator).log()
    wide = {name: group_rows(inputs[name], 1) for name in system.inputs}
    for name in system.hidden:
        parents = {parent: flatten_rows(wide[parent]) for parent in system.parents(name)}
        beam, value, log_probs, gumbels = system[name].perturbed_top_k(parents, log_probs, gumbels, width, generator)
        log_probs, gumbels = log_probs.double(), gumbels.double()
        wide = {n: _pick(kept, beam) for n, kept in wide.items()}
        wide[name] = value
    missing = width - log_probs.shape[1]
    if missing > 0:  # only deterministic components: one assignment
        log_probs = torch.nn.functional.pad(log_probs, (0, missing), value=-torch.inf)
        gumbels = torch.nn.functional.pad(gumbels, (0, missing), value=-torch.inf)
        wide = {n: _pick(v, torch.arange(width).clamp(max=width - missing - 1).expand(rows, -1)) for n, v in wide.items()}
    return {name: wide[name] for name in system.hidden}, log_probs, gumbels


def _pick(values: Batch, index: Tensor) -> Batch:
    """Entry index[b, j] of row b."""
    if isinstance(values, Tensor):
        return values[torch.arange(len(index), device=values.device)[:, None], index.to(values.device)]
    return [[row[int(i)] for i in chosen] for row, chosen in zip(values, index)]
