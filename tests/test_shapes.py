"""The shapes in the signatures are true: the core runs with jaxtyping and beartype watching every call."""

import subprocess
import sys
from pathlib import Path

CODE = """
import jaxtyping

with jaxtyping.install_import_hook("sysdpo_lab", "beartype.beartype"):
    from sysdpo_lab import CompoundSystem, alignment, exact, losses, samplers
    from sysdpo_lab.components import Categorical, Tool

import torch

g, x = torch.Generator().manual_seed(0), torch.tensor([0, 1, 1])
system = CompoundSystem([
    Categorical("y", {"x": 2}, 3), Tool("t", ["y"], abs), Categorical("r", {}, 2), Categorical("v", {"t": 3}, 2),
    Categorical("z", {"x": 2, "v": 2, "y": 3, "r": 2}, 4),
])
a, b = system.sample({"x": x}, generator=g), system.generate({"x": x})
b["z"] = (a["z"] + 1) % 4
losses.direct_loss(system, a, b, 0.5).loss.backward()
for sampler, options in (
    (samplers.enumerate_all, {}), (samplers.monte_carlo, {"k": 3}), (samplers.monte_carlo, {"k": 1, "weights": "importance"}),
    (samplers.diverse_beam, {"k": 4}), (samplers.gumbel_top_k, {"k": 2}),
    (samplers.gumbel_top_k, {"k": 20, "weights": "horvitz_thompson"}),
):
    c = sampler(system, {"x": x}, generator=g, **options)
    for repeats in ("drop", "count"):
        losses.sampling_loss(system, {"x": x}, a["z"], b["z"], c.values, 0.5, log_weights=c.log_weights, repeats=repeats)
p, logits = exact.marginal(system), torch.zeros(2, 4, 4)
alignment.gap(p, logits, 1.0, p), alignment.fit_beta(p, logits), alignment.cycle_residual(logits)
exact.tilted_marginal(system, torch.zeros(2, 4), 0.5)
judge, rewards = torch.zeros(2, 4, 4), torch.randn(2, 4, generator=g)
alignment.probability_gap(p, logits, 1.0, p), alignment.fit_beta(p, logits, p), alignment.hodge_split(logits)
alignment.best_gap(logits), alignment.logistic_potential(logits), alignment.excess_loss(p, logits, 1.0, p)
grid, joint = exact.Joint(system), exact.tilted_joint(system, rewards, 0.5)
exact.project(system, joint), exact.factorisation_defect(system, joint), exact.h_transform(system, rewards, 0.5)
exact.holds_direct(system, rewards, 0.5), exact.with_edge(system, "r", "v"), exact.posterior(system), exact.kl_joint(system)
exact.kl_marginal(system), exact.win_rate(exact.decoded(system, "greedy"), p, judge), exact.expected_reward(p, rewards)
stacked = exact.stack([system, system])
for variant in (exact.direct, exact.sampling, exact.separate_traces):
    objective = variant(stacked, judge.repeat(2, 1, 1), 0.5, systems=2)
    exact.train(stacked, objective.sampled(50, g, 2), steps=2)
exact.separate(system, judge, 0.5, answers=[])(), exact.minimise(system, exact.sampling(system, judge, 0.5), 2, g, steps=2)
with system.reference():
    system.log_prob(a)
system.freeze("y"), system.unfreeze("y"), system.trainable_parameters()
for call in (
    lambda: losses.dpo_loss(torch.zeros(2, 2)),
    lambda: losses.log_mixture(torch.zeros(2, 3), torch.zeros(2, 2)),
    lambda: alignment.gap(torch.ones(2), torch.zeros(1, 2, 2), 1.0),
    lambda: exact.tilt(torch.ones(1, 2), torch.zeros(1, 3), 1.0),
):
    try:
        call()
    except jaxtyping.TypeCheckError:
        continue
    raise SystemExit("a wrong shape went unnoticed")
print("all shapes hold")
"""


def test_the_core_runs_under_shape_checks_and_wrong_shapes_are_seen():
    out = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert out.stdout.strip() == "all shapes hold", out.stderr
