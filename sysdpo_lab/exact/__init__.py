"""Exact discrete systems: whatever SysDPO claims, computed by summing instead of sampling.

tables: marginals by variable elimination - joint: the grid of all joint values - tilting: the closed-form optima (E4) and
their steps - factorisation: what a graph can hold - measures: posteriors, divergences, win rates - pairs, population:
losses over all comparisons - fitting, stacking: training them - cases: files.
"""

from sysdpo_lab.exact.cases import FORMAT, Case, case_from_spec, load_case
from sysdpo_lab.exact.factorisation import (
    Verdict,
    conditionals,
    factorisation_defect,
    holds_direct,
    project,
    with_edge,
    with_tables,
)
from sysdpo_lab.exact.fitting import descend, minimise, train
from sysdpo_lab.exact.joint import Joint
from sysdpo_lab.exact.measures import decoded, expected_reward, kl, kl_joint, kl_marginal, posterior, win_rate
from sysdpo_lab.exact.pairs import PairLaw, all_pairs, expected_loss, final_pairs, population_loss, trace_pairs
from sysdpo_lab.exact.population import Objective, direct, sampling, separate, separate_traces
from sysdpo_lab.exact.stacking import by_member, stack, unstack
from sysdpo_lab.exact.tables import cardinality, input_sizes, joint_marginal, marginal, probability_table
from sysdpo_lab.exact.tilting import TiltedStep, h_transform, tilt, tilted_joint, tilted_marginal

__all__ = [
    "FORMAT",
    "Case",
    "Joint",
    "Objective",
    "PairLaw",
    "TiltedStep",
    "Verdict",
    "all_pairs",
    "by_member",
    "cardinality",
    "case_from_spec",
    "conditionals",
    "decoded",
    "descend",
    "direct",
    "expected_loss",
    "expected_reward",
    "factorisation_defect",
    "final_pairs",
    "h_transform",
    "holds_direct",
    "input_sizes",
    "joint_marginal",
    "kl",
    "kl_joint",
    "kl_marginal",
    "load_case",
    "marginal",
    "minimise",
    "population_loss",
    "posterior",
    "probability_table",
    "project",
    "sampling",
    "separate",
    "separate_traces",
    "stack",
    "tilt",
    "tilted_joint",
    "tilted_marginal",
    "trace_pairs",
    "train",
    "unstack",
    "win_rate",
    "with_edge",
    "with_tables",
]
