"""Diverse beam search over the hidden components of a system (Vijayakumar et al. 2018, as the paper uses it)."""

from collections.abc import Mapping

import torch

from sysdpo_lab import errors
from sysdpo_lab.components.base import Batch, repeat_rows
from sysdpo_lab.losses import first_of_each
from sysdpo_lab.samplers.ancestral import draw_jointly
from sysdpo_lab.samplers.candidates import Candidates, candidates, check_size, hidden_log_prob

OPTIONS = ("diversity_penalty", "max_new_tokens", "min_new_tokens", "length_penalty", "early_stopping", "finished_groups")


@torch.no_grad()
def diverse_beam(
    system,
    inputs: Mapping[str, Batch],
    k: int,
    generator: torch.Generator | None = None,
    *,
    diversity_penalty: float = 20.0,
    **options,
) -> Candidates:
    """k likely and different joint assignments (E7): assignment j takes group j of every first-layer search.

    A hidden component whose parents are all inputs gets one search of k groups of one beam (tables: the k most likely
    values); a later one is decoded greedily in the context of assignment j. Nothing is random.

    Args:
        system, inputs: any graph of hidden components.
        k: number of groups.
        generator: ignored.
        diversity_penalty: nats taken off a token for each earlier group that chose it in the same step; larger is more
            diverse (the paper: 20).
        options: passed to the language models' `diverse_beam_search`: those in `OPTIONS`.

    Returns:
        Candidates; entries that repeat an earlier one or are impossible (a table with fewer than k possible values) have
        weight -inf.

    Raises:
        UnknownOptionError: k < 1, or an option that no search has.
    """
    check_size(k)
    for option in options:
        errors.check_option("option of diverse_beam", option, OPTIONS)
    if not system.hidden:
        return candidates(system, inputs, {}, 1)
    options = {"diversity_penalty": diversity_penalty, **options}

    def root(component, rows):
        return repeat_rows(component.diverse({}, k, **options), rows)

    values = draw_jointly(system, inputs, k, lambda c, p: c.diverse(p, k, **options), lambda c, p: c.greedy(p), root)
    log_probs = hidden_log_prob(system, inputs, values, k)
    part = torch.isfinite(log_probs) & first_of_each(list(values.values()), *log_probs.shape)
    log_weights = torch.zeros_like(log_probs).masked_fill(~part, -torch.inf)
    return candidates(system, inputs, values, k, log_probs, log_weights)
