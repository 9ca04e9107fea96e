"""Samplers of intermediates: each takes (system, inputs, k, generator) and returns `Candidates`.

`diverse_beam_search` and `stochastic_beam_tokens` work on one causal language model's tokens.
"""

from sysdpo_lab.samplers.ancestral import monte_carlo
from sysdpo_lab.samplers.beam import diverse_beam
from sysdpo_lab.samplers.beam_search import diverse_beam_search
from sysdpo_lab.samplers.candidates import Candidates
from sysdpo_lab.samplers.enumeration import enumerate_all
from sysdpo_lab.samplers.gumbel import gumbel_top_k

__all__ = ["Candidates", "diverse_beam", "diverse_beam_search", "enumerate_all", "gumbel_top_k", "monte_carlo"]
