"""Anchors: a preference objective plus the winners' own negative log-probability. Ours, not the paper's.

A preference loss sees differences only. It falls as well when a winner becomes less likely, as long as its loser falls
faster, and a small model can lose its format that way. An anchor pays for each nat that a winner loses. Fine-tuning on
the winners alone is the same objective without the preference term.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.losses import PairLoss
from sysdpo_lab.objectives import Objective
from sysdpo_lab.options import positive


class _Anchored(Objective):
    name = "anchored"

    def __init__(self, inner: Objective, weights: Mapping[str, float], preference: float):
        super().__init__(inner.beta)
        positive(0.0, preference=preference, **weights)
        self.inner, self.weights, self.preference = inner, dict(weights), preference

    @property
    def settings(self) -> dict[str, Any]:
        own = {"name": f"anchored {self.inner.name}", "anchors": self.weights, "preference": self.preference}
        return {**self.inner.settings, **own}

    def check(self, system, pairs):
        for name in self.weights:
            errors.check_option("anchored component", name, tuple(system.order))
        if not pairs.is_trace:
            raise errors.PairKindError("anchors need pairs of whole traces: a winner has a value of every component")
        self.inner.check(system, pairs)

    def reset(self, system):
        self.inner.reset(system)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)

    def __call__(self, system, batch, generator=None):
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.preference > 0):
            found = self.inner(system, batch, generator)
        loss, extras = self.preference * found.loss, {}
        for name, weight in self.weights.items():
            if weight > 0 and not system.is_frozen(name):
                cost = -self._winners(system, batch.chosen, found, name, generator)
                loss = loss + weight * _mean_of_kept(cost, found.kept)
                extras[f"{name}_anchor"] = cost.detach()
        return dataclasses.replace(found, loss=loss, extras={**found.extras, **extras})

    def _winners(self, system, chosen: Mapping[str, Any], found: PairLoss, name: str, generator) -> Float[Tensor, " B"]:
        """log p of the winners' values of one component, nats: what the inner loss has computed, where it has a gradient."""
        if self.preference > 0:
            return found.winners[name]
        noise = {name: system[name].draw_noise(chosen[name], generator=generator)} if system[name].kind == "bound" else {}
        return system.log_prob_terms(chosen, noise, names=[name])[name]


def _mean_of_kept(values: Float[Tensor, " B"], kept: Bool[Tensor, " B"]) -> Tensor:
    kept = kept.to(values.device)
    return torch.where(kept, values, torch.zeros_like(values)).sum() / kept.sum()


def anchored(inner: Objective, weights: Mapping[str, float], preference: float = 1.0) -> Objective:
    """preference x the inner loss + sum over components of weight x mean of -log p(winner's value | its parents).

    Ours, not the paper's; for language models it is the term of Pang et al. 2024 ("Iterative Reasoning Preference
    Optimization") with the sum over tokens in place of their mean. For a diffusion component -log p stands for the bound
    of E8 without the reference: sum over images of W(t) e, under the noise of the pair.

    Args:
        inner: `direct(beta)` or `separate(beta)`, on whole traces.
        weights: {component: >= 0}; larger keeps its winners likelier (and what follows them: format, style). Components
            that are frozen, or not named, get no anchor.
        preference: 0 leaves the anchors alone: supervised fine-tuning on the winners; margins are still logged.

    Raises:
        UnknownOptionError: a negative weight, or (at the first step) a component that does not exist.

    >>> from sysdpo_lab.objectives import direct
    >>> anchored(direct(0.1), {"captions": 0.05})
    anchored(beta=0.1, anchors={'captions': 0.05}, preference=1.0)
    """
    return _Anchored(inner, weights, preference)
