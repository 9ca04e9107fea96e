"""Monte Carlo: k independent ancestral draws of the hidden components."""

import math
from collections.abc import Mapping

import torch

from sysdpo_lab import errors
from sysdpo_lab.components.base import Batch, flatten_rows, fresh_generator, group_rows, repeat_rows
from sysdpo_lab.losses import first_of_each
from sysdpo_lab.samplers.candidates import Candidates, candidates, check_size, hidden_log_prob, multiplicity


def draw_jointly(system, inputs: Mapping[str, Batch], k: int, choose_first, choose_later, choose_root) -> dict[str, Batch]:
    """Walk the hidden components in order, k joint assignments a row.

    A component whose parents are all inputs (or that has none) gets one call a row for its k values
    (`choose_first(component, parents)` -> (B, k)); a later one is asked in the context of each assignment
    (`choose_later(component, parents)` -> B * k rows); a component without parents gets `choose_root(component, rows)`.
    """
    rows = system._inputs(inputs)[1]
    wide = {name: repeat_rows(inputs[name], k) for name in system.inputs}
    for name in system.hidden:
        component = system[name]
        if component.kind == "deterministic":
            wide[name] = system.computed(name, wide, rows * k)
        elif component.parents and all(parent in system.inputs for parent in component.parents):
            wide[name] = flatten_rows(choose_first(component, system.parent_values(name, inputs)))
        elif component.parents:
            wide[name] = choose_later(component, system.parent_values(name, wide))
        else:
            wide[name] = flatten_rows(choose_root(component, rows))
    return {name: group_rows(wide[name], k) for name in system.hidden}


@torch.no_grad()
def monte_carlo(
    system, inputs: Mapping[str, Batch], k: int, generator: torch.Generator | None = None, *, weights: str = "none"
) -> Candidates:
    """k ancestral draws a row; repeats may occur (the loss drops or counts them).

    Args:
        system, inputs: any graph of hidden components that can be sampled.
        k: number of draws a row.
        generator: source of all randomness; None draws a fresh one.
        weights: "none", or "importance": m_a / (k p(a | x)) for a value that was drawn m_a times
            (P_A is then an unbiased estimate of p(z | x) when repeats are dropped).

    Raises:
        UnknownOptionError: k < 1 or unknown weights.
    """
    check_size(k)
    errors.check_option("weights", weights, ("none", "importance"))
    generator = fresh_generator() if generator is None else generator
    if not system.hidden:
        return candidates(system, inputs, {}, 1)
    rows = system._inputs(inputs)[1]

    def first(component, parents):
        drawn = component.sample(parents, num_samples=k, generator=generator)
        return group_rows(drawn, 1) if k == 1 else drawn

    def root(component, rows):  # independent draws for every row
        drawn = component.sample({}, num_samples=max(rows * k, 2), generator=generator)
        return group_rows(drawn[0][: rows * k], k)

    values = draw_jointly(system, inputs, k, first, lambda c, p: c.sample(p, generator=generator), root)
    log_probs = hidden_log_prob(system, inputs, values, k)
    log_weights = None
    if weights == "importance":
        times = multiplicity(values, rows, k).double()
        log_weights = times.log() - math.log(k) - log_probs
        kept = first_of_each(list(values.values()), rows, k)
        log_weights = log_weights.masked_fill(~kept, -torch.inf)
    return candidates(system, inputs, values, k, log_probs, log_weights)
