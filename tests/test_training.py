"""The loop is the textbook step, however it is cut, stopped, killed and resumed; and it refuses to fool anyone."""

import contextlib
import datetime
import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from sysdpo_lab import CompoundSystem, alignment, checkpoints, errors, exact, losses, optimisation, scoring, training
from sysdpo_lab.components import Categorical, CausalLM, Tool
from sysdpo_lab.history import read
from sysdpo_lab.losses import PairLoss
from sysdpo_lab.options import Order, Settings
from sysdpo_lab.preferences import Pairs
from tests import tiny
from tests.training_cases import (
    Letters,
    chain,
    equal,
    finals,
    letters_finals,
    letters_system,
    letters_traces,
    same_type_chain,
    traces,
    weights,
    without_times,
)

BETA = 0.5


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def coin() -> tuple[CompoundSystem, Pairs]:
    """One binary table, uniform, and the preference 1 > 0."""
    return CompoundSystem([Categorical("z", {"x": 1}, 2)]), Pairs.from_finals({"x": [0]}, [1], [0])


def on_finals(system, batch, generator=None):
    """Direct on a system without intermediates: the objective of `coin`."""
    sides = [{**batch.inputs, "z": side} for side in (batch.chosen, batch.rejected)]
    return losses.direct_loss(system, *sides, BETA)


# --- one step ---------------------------------------------------------------------------------------------------------------


def test_the_first_steps_are_those_derived_by_hand():
    # margin = beta (u1 - u0), u = logits - start; d loss / d u1 = -beta sigmoid(-margin); SGD with rate 1 adds 0.25 first
    system, pairs = coin()
    history = training.train(system, pairs, on_finals, steps=2, lr=1.0, optimizer="sgd", clip=None)
    second = -BETA / (1 + math.exp(0.25))
    assert [r["loss"] for r in history] == pytest.approx([math.log(2), math.log(1 + math.exp(-0.25))], abs=1e-12)
    assert [r["margin"] for r in history] == pytest.approx([0.0, 0.25], abs=1e-12)
    assert [r["log_ratio_gap"] for r in history] == pytest.approx([0.0, 0.5], abs=1e-12)
    assert [r["accuracy"] for r in history] == [0.5, 1.0]
    assert [r["grad_norm"]["z"] for r in history] == pytest.approx([0.25 * 2**0.5, -second * 2**0.5], abs=1e-12)
    moved = system["z"].logits.detach() - math.log(0.5)
    assert moved[0].tolist() == pytest.approx([-0.25 + second, 0.25 - second], abs=1e-12)


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_the_loop_is_a_handwritten_loop_bit_for_bit(kind):
    system, pairs = chain(), traces()
    training.train(system, pairs, training.direct(BETA), steps=7, lr=0.05, batch_size=4, generator=seeded(9), clip=None,
                   optimizer=kind, weight_decay=0.01, schedule="cosine", warmup=2)  # fmt: skip
    other, order_seed = chain(), int(torch.randint(2**63 - 1, (2,), generator=seeded(9))[0])
    own = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    optimizer, shuffle, left = own(other.parameters(), lr=0.05, weight_decay=0.01), seeded(order_seed), []
    for step in range(7):
        left = left or torch.randperm(11, generator=shuffle).tolist()
        rows, left = left[:4], left[4:]
        batch = pairs.batch(rows)
        rate = (step + 1) / 2 if step < 2 else (1 + math.cos(math.pi * (step - 2) / 5)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * rate
        optimizer.zero_grad()
        losses.direct_loss(other, batch.chosen, batch.rejected, BETA).loss.backward()
        optimizer.step()
    assert equal(weights(system), weights(other))


def structural_zeros() -> tuple[CompoundSystem, Pairs]:
    """Some of the pairs have an answer that the system cannot give."""
    y = Categorical("y", {"x": 2}, 3, [[0.5, 0.3, 0.2], [0.4, 0.6, 0.0]])
    system = CompoundSystem([y, Categorical("z", {"y": 3}, 4)])
    return system, traces(12)


def mean_of_means(system, batch, generator):
    """The mutant: every micro-batch counts the same, whatever it kept."""
    found = training.direct(BETA)(system, batch, generator)
    found.loss = found.loss * 4 / int(found.kept.sum())
    return found


@pytest.mark.parametrize("make", [structural_zeros, lambda: (letters_system(), letters_traces())], ids=["dropped", "lengths"])
@pytest.mark.parametrize("size, times", [(1, 12), (2, 6), (3, 4), (4, 3), (5, 3)])
def test_accumulated_gradients_are_those_of_the_big_batch(make, size, times):
    def gradient(batch_size, accumulate, objective=None):
        system, pairs = make()
        before = {name: w.double() for name, w in weights(system).items()}
        history = training.train(
            system, pairs, objective or training.direct(BETA), steps=1, lr=1.0, optimizer="sgd", clip=None,
            batch_size=batch_size, accumulate=accumulate,
        )  # fmt: skip
        return {n: torch.nan_to_num(before[n] - w.double()) for n, w in weights(system).items()}, history[0]

    (wanted, whole), (found, cut) = gradient(12, 1), gradient(size, times)
    assert all(torch.allclose(found[n], wanted[n], rtol=0, atol=1e-6) for n in wanted)
    assert max(w.abs().max() for w in wanted.values()) > 1e-2
    same = ("loss", "margin", "accuracy", "pairs", "dropped", "log_ratio_gap")
    assert [cut[key] for key in same] == pytest.approx([whole[key] for key in same], abs=1e-6)
    if make is structural_zeros:
        assert whole["dropped"] > 0
        if size == 4:
            mutant = gradient(size, times, mean_of_means)[0]
            assert not all(torch.allclose(mutant[n], wanted[n], rtol=0, atol=1e-4) for n in wanted)


def test_the_setting_of_accelerate_in_the_environment_changes_nothing(monkeypatch):
    def run():
        system = chain()
        options = {"optimizer": "sgd", "clip": None, "accumulate": 2, "batch_size": 3}
        training.train(system, traces(), training.direct(BETA), steps=2, lr=0.5, **options)
        return weights(system)

    wanted = run()
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    found = run()
    assert all(torch.allclose(found[n], wanted[n], atol=1e-12) for n in wanted)


def test_clipping_bounds_the_norm_over_all_components_together():
    def movement(clip):
        system = chain()
        before = weights(system)
        options = {"lr": 1.0, "optimizer": "sgd", "clip": clip, "batch_size": 11}
        history = training.train(system, traces(), training.direct(5.0), steps=1, **options)
        moved = torch.cat([(weights(system)[n] - before[n]).reshape(-1) for n in before])
        return moved, history[0]["grad_norm_total"]

    (free, norm), (bounded, logged) = movement(None), movement(0.1)
    assert free.norm().item() == pytest.approx(norm, rel=1e-9) and norm > 0.2
    assert bounded.norm().item() == pytest.approx(0.1, rel=1e-5) and logged == norm  # logged before clipping
    assert torch.allclose(bounded / bounded.norm(), free / free.norm(), atol=1e-9)
    assert torch.equal(movement(1e6)[0], free)


def test_rates_warm_up_from_more_than_zero_and_never_end_at_zero():
    def rates(**options):
        history = training.train(chain(), traces(), training.direct(BETA), steps=6, lr={"y": 1.0, "z": 0.5}, **options)
        assert history.column("lr", "z") == [rate / 2 for rate in history.column("lr", "y")]
        return history.column("lr", "y")

    assert rates() == [1.0] * 6
    assert rates(warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(warmup=2, schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(schedule="cosine") == pytest.approx([(1 + math.cos(math.pi * i / 6)) / 2 for i in range(6)])
    assert min(rates(warmup=9, schedule="linear")) > 0


def test_each_epoch_takes_every_pair_once_in_a_new_order_that_the_objective_cannot_change():
    def rows(objective, data, seed):
        seen = []

        def recording(system, batch, generator):
            seen.append(list(batch.rows))
            return objective(system, batch, generator)

        training.train(chain(), data, recording, steps=9, lr=0.1, batch_size=4, generator=seeded(seed))
        return seen

    seen = rows(training.sampling(BETA, "monte_carlo", 3), finals(), 5)
    assert [len(batch) for batch in seen] == [4, 4, 3] * 3
    epochs = [sum(seen[i : i + 3], []) for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert rows(training.direct(BETA), traces(), 5) == seen
    assert rows(training.direct(BETA), traces(), 6) != seen


def test_no_generator_means_seed_zero():
    systems = [chain(), chain(), chain()]
    for system, generator in zip(systems, (None, seeded(0), seeded(1))):
        objective = training.sampling(BETA, "monte_carlo", 2)
        training.train(system, finals(), objective, steps=4, lr=0.1, batch_size=4, generator=generator)
    assert equal(weights(systems[0]), weights(systems[1])) and not equal(weights(systems[0]), weights(systems[2]))


# --- what is trained --------------------------------------------------------------------------------------------------------


def test_a_frozen_component_stays_bit_for_bit_and_its_flags_too():
    system = chain()
    system.freeze("y")
    before = system["y"].logits.detach().clone()
    history = training.train(system, traces(), training.direct(BETA), steps=5, lr=0.1, weight_decay=0.1)
    assert torch.equal(system["y"].logits, before) and not system["y"].logits.requires_grad
    assert (history[0]["trained"], history[0]["not_trained"]) == (["z"], ["y"]) and set(history[0]["grad_norm"]) == {"z"}


def test_a_dict_of_rates_trains_what_it_names_and_says_so():
    system = chain()
    before = system["z"].logits.detach().clone()
    history = training.train(system, traces(), training.direct(BETA), steps=5, lr={"y": 0.1}, weight_decay=0.1)
    assert torch.equal(system["z"].logits, before)
    assert system["z"].logits.requires_grad  # only in this run
    assert (history[0]["trained"], history[0]["not_trained"], history[0]["lr"]) == (["y"], ["z"], {"y": 0.1})
    assert system["z"].logits.grad is None and system["y"].logits.grad is None


def test_rates_belong_to_their_components():
    system, other = chain(), chain()
    training.train(system, traces(), training.direct(BETA), steps=1, lr={"y": 0.3, "z": 0.01}, optimizer="sgd", clip=None)
    training.train(other, traces(), training.direct(BETA), steps=1, lr=0.1, optimizer="sgd", clip=None)
    start = weights(chain())
    ratio = {n: (weights(system)[n] - start[n]) / (weights(other)[n] - start[n]) for n in start}
    y, z = (ratio[name][torch.isfinite(ratio[name])] for name in ratio)
    assert torch.allclose(y, torch.full_like(y, 3.0)) and torch.allclose(z, torch.full_like(z, 0.1))


def tied() -> tuple[CompoundSystem, Pairs]:
    y = Categorical("y", {"x": 3}, 3)
    system = CompoundSystem([y, Categorical("z", {"y": 3}, 3, tie=y)])
    return system, Pairs.from_traces({"x": [0], "y": [1], "z": [2]}, {"x": [0], "y": [0], "z": [1]})


def test_tied_parameters_are_stepped_once_with_both_gradients():
    system, pairs = tied()
    history = training.train(system, pairs, training.direct(BETA), steps=1, lr=1.0, optimizer="sgd", clip=None)
    # u[0] moves by beta/2 (e1 - e0) for y; z adds beta/2 e2 in row 1 and takes beta/2 from e1 in row 0
    wanted = torch.tensor([[-0.25, 0.25 - 0.25, 0.0], [0.0, 0.0, 0.25], [0.0, 0.0, 0.0]], dtype=torch.float64)
    softmax = torch.tensor([[1 / 3] * 3, [1 / 3] * 3, [0.0] * 3], dtype=torch.float64)
    wanted = wanted - softmax * wanted.sum(-1, keepdim=True)
    assert torch.allclose(system["y"].logits.detach() - math.log(1 / 3), wanted, atol=1e-12)
    assert system["y"].logits is system["z"].logits
    assert history[0]["grad_norm"]["y"] == history[0]["grad_norm"]["z"] == history[0]["grad_norm_total"]


def test_tied_components_need_one_rate():
    system, pairs = tied()
    with pytest.raises(errors.UnknownOptionError, match="'z' and 'y' share"):
        training.train(system, pairs, training.direct(BETA), lr={"y": 0.1, "z": 0.2})
    history = training.train(system, pairs, training.direct(BETA), steps=1, lr={"z": 0.1})
    assert history[0]["not_trained"] == [] and history[0]["lr"] == {"z": 0.1}


def with_tool() -> CompoundSystem:
    return CompoundSystem([Categorical("y", {"x": 2}, 4), Tool("t", ["y"], lambda y: y, 4), Categorical("z", {"t": 4}, 4)])


WRONG = {
    "unknown component": ({"lr": {"drafft": 0.1}}, errors.UnknownComponentError, "drafft"),
    "nothing to train": ({"lr": {"t": 0.1}}, errors.NothingToTrainError, "'t'"),
    "negative rate": ({"lr": -1.0}, errors.UnknownOptionError, "learning rate"),
    "NaN rate": ({"lr": {"y": math.nan}}, errors.UnknownOptionError, "'y'"),
    "rate as text": ({"lr": "1e-4"}, errors.UnknownOptionError, "number"),
    "schedule": ({"schedule": "cosin"}, errors.UnknownOptionError, "'constant', 'linear', 'cosine'"),
    "optimizer": ({"optimizer": "adamW"}, errors.UnknownOptionError, "'adamw', 'adam', 'sgd'"),
    "batch size": ({"batch_size": 0}, errors.UnknownOptionError, "batch_size"),
    "accumulate": ({"accumulate": 1.5}, errors.UnknownOptionError, "accumulate"),
    "steps": ({"steps": -1}, errors.UnknownOptionError, "steps"),
    "clip": ({"clip": 0.0}, errors.UnknownOptionError, "clip"),
    "warmup": ({"warmup": True}, errors.UnknownOptionError, "warmup"),
    "betas": ({"betas": (0.9, 1.0)}, errors.UnknownOptionError, "betas"),
    "weight decay": ({"weight_decay": -0.1}, errors.UnknownOptionError, "weight_decay"),
    "stop after": ({"stop_after": "5s"}, errors.UnknownOptionError, "stop_after"),
    "stop after nothing": ({"stop_after": 0}, errors.UnknownOptionError, "stop_after"),
    "objective by name": ({"objective": "direct"}, errors.UnknownOptionError, "training.direct"),
    "objective not called": ({"objective": training.separate}, errors.UnknownOptionError, "training.separate"),
    "objective returns a tensor": ({"objective": lambda s, b, g: torch.ones(())}, errors.ObjectiveError, "Tensor"),
    "no pairs": ({"pairs": []}, errors.EmptyPairsError, "no pairs"),
    "pairs by name": ({"pairs": "data.jsonl"}, errors.PairFormatError, "preferences.load"),
}


@pytest.mark.parametrize("options, kind, says", WRONG.values(), ids=WRONG)
def test_wrong_options_are_named_and_change_nothing(tmp_path, options, kind, says):
    system = with_tool()
    before = weights(system)
    given = {"pairs": finals(), "objective": training.sampling(BETA, "enumerate_all"), "steps": 2, "out": tmp_path / "run"}
    given |= options
    with pytest.raises(kind, match=says):
        training.train(system, **given)
    assert equal(weights(system), before) and all(p.requires_grad for p in system.parameters())
    assert checkpoints.folders(tmp_path / "run") == []


def test_frozen_everywhere_is_an_error():
    system = chain()
    system.freeze("y"), system.freeze("z")
    with pytest.raises(errors.NothingToTrainError, match="unfreeze"):
        training.train(system, traces(), training.direct(BETA))


# --- what must not pass in silence ------------------------------------------------------------------------------------------


def spoiled(at: int, spoil):
    """Direct, with the PairLoss of one step changed."""
    calls = []

    def objective(system, batch, generator):
        calls.append(1)
        found = training.direct(BETA)(system, batch, generator)
        return spoil(system, found) if len(calls) == at else found

    return objective


class Poison(torch.autograd.Function):
    """A finite value with a gradient of NaN."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


def nan_loss(system, found):
    found.loss = found.loss * math.nan
    return found


def infinite_share(system, found):
    found.margin, found.shares["y"] = found.margin + math.inf, found.shares["y"] + math.inf
    return found


def nan_gradient(system, found):
    found.loss = found.loss + 0 * Poison.apply(system["y"].logits).sum()
    return found


SPOILED = {
    "loss": (nan_loss, "step 3, the loss"),
    "margin": (infinite_share, "step 3, component 'y'"),
    "gradient": (nan_gradient, "step 3, component 'y': the gradient"),
}


@pytest.mark.parametrize("spoil, says", SPOILED.values(), ids=SPOILED)
def test_a_number_that_is_not_finite_stops_before_the_weights_are_touched(tmp_path, spoil, says):
    healthy, system = chain(), chain()
    training.train(healthy, traces(), training.direct(BETA), steps=2, lr=0.1)
    with pytest.raises(errors.NonFiniteError, match=says):
        training.train(system, traces(), spoiled(3, spoil), steps=5, lr=0.1, out=tmp_path, checkpoint_every=1)
    assert equal(weights(system), weights(healthy))
    assert checkpoints.newest(tmp_path).step == 2 and len(read(tmp_path)) == 2
    assert all(p.grad is None for p in system.parameters())


def test_a_component_that_scores_nan_is_named_with_the_step():
    system = letters_system()
    system["answer"].log_prob = lambda value, parents: torch.full((len(value),), math.nan)
    with pytest.raises(errors.NonFiniteError, match="step 1: component 'answer', row 0"):
        training.train(system, letters_traces(), training.direct(BETA))


def test_weights_that_are_nan_before_the_first_step_are_named():
    system = chain()
    with torch.no_grad():
        system["z"].logits[0, 0, 0] = math.nan
    with pytest.raises(errors.NonFiniteError, match="'z'.*before the first step"):
        training.train(system, traces(), training.direct(BETA))


def test_structural_zeros_stay_and_decay_that_would_break_them_is_refused():
    system, pairs = structural_zeros()
    training.train(system, pairs, training.direct(BETA), steps=4, lr=0.1, weight_decay=0.1)
    assert system["y"].logits[1, 2].item() == -math.inf and not torch.isnan(system["y"].logits).any()
    for kind in ("adam", "sgd"):
        with pytest.raises(errors.NonFiniteError, match="structural zeros"):
            training.train(structural_zeros()[0], pairs, training.direct(BETA), optimizer=kind, weight_decay=0.1)


def test_a_step_that_changes_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    with pytest.raises(errors.NoUpdateError, match="step 1.*no trainable tensor"):
        training.train(chain(), traces(), training.direct(BETA), steps=3, lr=0.1)


def test_half_precision_weights_are_warned_about_and_an_update_that_they_lose_is_an_error():
    def step(lr):
        training.train(letters_system(dtype=torch.bfloat16), letters_traces(), training.direct(BETA), steps=1, lr=lr)

    with pytest.raises(errors.NoUpdateError, match="bfloat16"):
        with pytest.warns(errors.HalfPrecisionWarning, match="bfloat16") as caught:
            step(1e-5)
    assert ["'draft'" in str(w.message) for w in caught] == [True, False]
    with pytest.warns(errors.HalfPrecisionWarning):
        step(0.1)
    small = letters_system()  # float32: the same rate moves every weight that has a gradient
    before = weights(small)
    training.train(small, letters_traces(), training.direct(BETA), steps=1, lr=1e-5)
    assert all(not torch.equal(before[n], w) for n, w in weights(small).items())


def test_a_learning_rate_of_zero_is_no_fault():
    history = training.train(chain(), traces(), training.direct(BETA), steps=3, lr=0.0)
    assert history.column("loss") == pytest.approx([math.log(2)] * 3)


def test_a_loss_that_no_weight_influences_is_an_error():
    def constant(system, batch, generator):
        found = training.direct(BETA)(system, batch, generator)
        return PairLoss(found.loss.detach(), found.margin.detach(), found.log_ratio_gap)

    with pytest.raises(errors.NothingToTrainError, match="step 1.*does not depend"):
        training.train(chain(), traces(), constant, steps=1)


def test_gradients_of_zero_are_warned_about_once():
    def flat(system, batch, generator):
        found = training.direct(BETA)(system, batch, generator)
        found.loss = found.loss * 0
        return found

    with pytest.warns(errors.ZeroGradientWarning, match="step 1") as caught:
        training.train(chain(), traces(), flat, steps=4)
    assert len(caught) == 1


def one_draft() -> CompoundSystem:
    """Every draw of y is the same, whatever k."""
    y = Categorical("y", {"x": 2}, 3, [[1.0, 0.0, 0.0]] * 2)
    return CompoundSystem([y, Categorical("z", {"x": 2, "y": 3}, 4)])


@pytest.mark.parametrize("make, k, steps", [(chain, 1, 3), (chain, 1, 30), (one_draft, 4, 3)], ids=["k = 1", "long", "coincide"])
def test_sets_without_diversity_are_warned_about_once(make, k, steps):
    system = make()
    before = system["y"].logits.detach().clone()
    with pytest.warns(errors.NoDiversityWarning, match="exactly no gradient") as caught:
        history = training.train(system, finals(), training.sampling(BETA, "monte_carlo", k), steps=steps, lr=0.1)
    assert len(caught) == 1
    # the claim of the warning itself
    assert torch.equal(system["y"].logits, before)
    assert history.column("grad_norm", "y") == [0.0] * steps and history.column("distinct") == [1.0] * steps


def test_a_frozen_draft_or_a_diverse_set_is_not_warned_about():
    system = chain()
    system.freeze("y")
    training.train(system, finals(), training.sampling(BETA, "monte_carlo", 1), steps=8, lr=0.1)
    history = training.train(chain(), finals(), training.sampling(BETA, "gumbel_top_k", 2), steps=8, lr=0.1)
    assert set(history.column("distinct")) == {2.0}
    assert all(1 <= number <= 2 for number in history.column("effective"))


def test_one_batch_without_a_margin_is_skipped_and_counted():
    system, pairs = structural_zeros()
    impossible = [row for row, pair in enumerate(pairs) if pair.inputs["x"] == 1 and 2 in (pair.chosen["y"], pair.rejected["y"])]
    assert impossible
    before = weights(system)
    snapshots = []
    history = training.train(
        system, pairs, training.direct(BETA), steps=12, lr=0.1, batch_size=1, on_step=lambda r: snapshots.append(weights(system))
    )
    empty = [step for step, record in enumerate(history) if record["dropped"]]
    assert len(empty) == len(impossible)
    for step in empty:
        assert history[step]["loss"] is None and history[step]["accuracy"] is None
        assert equal(snapshots[step], snapshots[step - 1] if step else before)


def test_no_margin_at_all_is_an_error():
    system = CompoundSystem([Categorical("z", {"x": 1}, 3, [[0.5, 0.5, 0.0]])])
    for number, steps in ((1, 2), (4, 100)):
        pairs = Pairs.from_finals({"x": [0] * number}, [2] * number, [0] * number)
        with pytest.raises(errors.NoMarginError):
            training.train(system, pairs, on_finals, steps=steps, batch_size=1)


# --- resuming ---------------------------------------------------------------------------------------------------------------


DECAY = {"weight_decay": 0.1}
RUNS = {
    "direct": (chain, traces, lambda: training.direct(BETA), {}),
    "direct, decay, linear": (chain, traces, lambda: training.direct(BETA), {**DECAY, "schedule": "linear", "warmup": 3}),
    "direct, sgd": (chain, traces, lambda: training.direct(BETA), {"optimizer": "sgd"}),
    "direct, accumulated": (chain, traces, lambda: training.direct(BETA), {"batch_size": 2, "accumulate": 2}),
    "direct, one component": (chain, traces, lambda: training.direct(BETA), {"lr": {"z": 0.1}}),
    "monte carlo": (chain, finals, lambda: training.sampling(BETA, "monte_carlo", 3), {}),
    "gumbel, weighted": (chain, finals, lambda: training.sampling(BETA, "gumbel_top_k", 2, weights="horvitz_thompson"), {}),
    "monte carlo, fixed": (chain, finals, lambda: training.sampling(BETA, "monte_carlo", 20, fixed=True), {"batch_size": 3}),
    "separate": (same_type_chain, finals, lambda: training.separate(BETA), {"batch_size": 3}),
    "dropout": (lambda: letters_system(0.2), letters_finals, lambda: training.sampling(BETA, "monte_carlo", 2), {}),
}


def options_of(name: str) -> dict:
    return {"lr": 0.1, "batch_size": 4, "generator": seeded(3), "checkpoint_every": 1, **RUNS[name][3]}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("cut", [1, 5], ids=["mid-epoch", "second epoch"])
def test_ten_steps_are_some_steps_and_the_rest_after_a_resume(tmp_path, name, cut):
    make, data, objective, _ = RUNS[name]
    whole = make()
    wanted = training.train(whole, data(), objective(), 10, **options_of(name))
    training.train(make(), data(), objective(), 10, out=tmp_path, stop_after=cut, **options_of(name))
    # another process has new objects, and a generator in another state
    resumed = make()
    options = {**options_of(name), "generator": seeded(77)}
    found = training.train(resumed, data(), objective(), 10, out=tmp_path, resume=True, **options)
    assert equal(weights(resumed), weights(whole))
    assert without_times(found) == without_times(wanted) == without_times(read(tmp_path))
    assert checkpoints.newest(tmp_path).step == 10 and len(checkpoints.folders(tmp_path)) == 2


def test_resuming_needs_what_a_checkpoint_holds(tmp_path):
    """Mutants: without any one of its parts the resumed run is another one."""
    make, data, objective, _ = RUNS["monte carlo"]
    whole = make()
    training.train(whole, data(), objective(), 10, **options_of("monte carlo"))
    training.train(make(), data(), objective(), 10, out=tmp_path, stop_after=5, **options_of("monte carlo"))
    good = checkpoints.newest(tmp_path)
    for part in ("draws", "order", "permutation", "optimizer/z/logits/exp_avg", "optimizer/z/logits/step", "weights/y/logits"):
        old = good.tensors[part]
        new = seeded(1).get_state() if part in ("draws", "order") else old.flip(0) if old.dim() else torch.zeros(())
        out, mutant = tmp_path / part.replace("/", "-"), make()
        checkpoints.save(out, checkpoints.Checkpoint(good.step, {**good.tensors, part: new}, good.state))
        training.train(mutant, data(), objective(), 10, out=out, resume=True, **options_of("monte carlo"))
        assert not equal(weights(mutant), weights(whole)), part


def test_a_resume_may_ask_for_more_steps_and_go_in_many_pieces(tmp_path):
    whole, system = chain(), chain()
    wanted = training.train(whole, traces(), training.direct(BETA), 9, lr=0.1, batch_size=4)
    for steps in (2, 3, 7, 9, 9):
        found = training.train(system, traces(), training.direct(BETA), steps, lr=0.1, batch_size=4, out=tmp_path, resume=True)
        assert len(found) == steps
    assert equal(weights(system), weights(whole)) and without_times(found) == without_times(wanted)
    with pytest.raises(errors.ResumeError, match="beyond steps=4"):
        training.train(system, traces(), training.direct(BETA), 4, lr=0.1, batch_size=4, out=tmp_path, resume=True)


def test_resuming_where_nothing_is_starts_at_the_beginning(tmp_path):
    history = training.train(chain(), traces(), training.direct(BETA), 3, out=tmp_path / "new", resume=True)
    assert history.column("step") == [1, 2, 3]


def other_start() -> CompoundSystem:
    return chain(seed=8)


DIFFERENT = {
    "batch_size": {"batch_size": 5},
    "accumulate": {"accumulate": 2},
    "lr": {"lr": 0.2},
    "clip": {"clip": None},
    "optimizer": {"optimizer": "adam"},
    "weight_decay": {"weight_decay": 0.01},
    "betas": {"betas": (0.8, 0.999)},
    "schedule": {"schedule": "cosine"},
    "warmup": {"warmup": 2},
    "beta": {"objective": training.sampling(0.7, "monte_carlo", 2)},
    "k": {"objective": training.sampling(BETA, "monte_carlo", 3)},
    "sampler": {"objective": training.sampling(BETA, "gumbel_top_k", 2)},
    "weights": {"objective": training.sampling(BETA, "monte_carlo", 2, weights="importance")},
    "objective": {"objective": training.separate(BETA)},
    "pairs": {"pairs": finals(seed=4)},
    "frozen parts": {"system": other_start},
}


@pytest.mark.parametrize("key, change", DIFFERENT.items(), ids=DIFFERENT)
def test_a_resume_with_other_settings_says_which(tmp_path, key, change):
    given = {"pairs": finals(), "objective": training.sampling(BETA, "monte_carlo", 2), "steps": 8, "lr": 0.1, "out": tmp_path}
    training.train(chain(), **given, stop_after=2)
    make = change.pop("system", chain) if "system" in change else chain
    with pytest.raises(errors.ResumeError, match=key):
        training.train(make(), **{**given, **change}, resume=True)
    assert checkpoints.newest(tmp_path).step == 2
    again = training.train(chain(), **given, resume=True, log_every=2, generator=seeded(5), checkpoint_every=3)
    assert again[-1]["step"] == 8


def test_a_run_is_not_overwritten_by_accident(tmp_path):
    training.train(chain(), traces(), training.direct(BETA), 2, out=tmp_path)
    with pytest.raises(errors.ResumeError, match="resume=True"):
        training.train(chain(), traces(), training.direct(BETA), 2, out=tmp_path)
    assert checkpoints.newest(tmp_path).step == 2


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(tmp_path):
    whole, resumed = chain(), chain()
    options = {"lr": 0.1, "batch_size": 4}
    training.train(whole, traces(), training.direct(BETA), 6, **options)
    training.train(chain(), traces(), training.direct(BETA), 6, out=tmp_path, checkpoint_every=1, stop_after=4, **options)
    with open(checkpoints.folder_of(tmp_path, 4) / checkpoints.TENSORS, "ab") as file:
        file.write(b"x")
    with pytest.warns(errors.DamagedCheckpointWarning, match="step-000004"):
        found = training.train(resumed, traces(), training.direct(BETA), 6, out=tmp_path, resume=True, **options)
    assert equal(weights(resumed), weights(whole)) and found.column("step") == [1, 2, 3, 4, 5, 6]


def test_a_line_that_a_kill_cut_off_is_left_out_of_the_history(tmp_path):
    training.train(chain(), traces(), training.direct(BETA), 4, out=tmp_path, stop_after=2)
    with open(tmp_path / "history.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    assert read(tmp_path).column("step") == [1, 2]
    assert training.train(chain(), traces(), training.direct(BETA), 4, out=tmp_path, resume=True).column("step") == [1, 2, 3, 4]
    (tmp_path / "history.jsonl").write_text('{"step": 1, "lo\n{"step": 2}\n')
    with pytest.raises(errors.CheckpointError, match="line 1"):
        read(tmp_path)


def interrupt(at: int, objective):
    """Ctrl-C inside the loss of one step, after it has drawn random numbers."""
    calls = []

    def interrupted(system, batch, generator):
        calls.append(1)
        found = objective(system, batch, generator)
        if len(calls) == at:
            raise KeyboardInterrupt
        return found

    interrupted.settings = objective.settings
    for name in ("state_dict", "load_state_dict", "reset"):
        setattr(interrupted, name, getattr(objective, name))
    return interrupted


def raise_interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("moment", ["loss", "on_step", "evaluate", "update"])
def test_an_interrupt_keeps_all_whole_steps_and_is_raised_again(tmp_path, moment, fixed, monkeypatch):
    def objective():
        return training.sampling(BETA, "monte_carlo", 3, fixed=fixed)

    options = {"lr": 0.1, "batch_size": 3}
    whole, system = chain(), chain()
    wanted = training.train(whole, finals(), objective(), 7, **options)
    how = {
        "loss": {"objective": interrupt(4, objective())},
        "on_step": {"on_step": lambda record: record["step"] == 3 and raise_interrupt()},
        "evaluate": {"evaluate": raise_interrupt, "evaluate_every": 3},
        "update": {},
    }[moment]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if moment == "update":
            real, count = torch.optim.AdamW.step, iter(range(1, 9))
            patch.setattr(torch.optim.AdamW, "step", lambda self: raise_interrupt() if next(count) == 4 else real(self))
        given = {"objective": objective(), "steps": 7, "out": tmp_path, "checkpoint_every": 2, **options, **how}
        training.train(system, finals(), **given)
    assert checkpoints.newest(tmp_path).step == (2 if moment == "update" else 3)
    resumed = chain()
    found = training.train(resumed, finals(), objective(), 7, out=tmp_path, resume=True, **options)
    assert equal(weights(resumed), weights(whole)) and without_times(found) == without_times(wanted)


@pytest.mark.parametrize("after, steps", [(3, 3), (1e-9, 1), (datetime.timedelta(microseconds=1), 1)])
def test_stop_after_ends_cleanly_with_a_checkpoint(tmp_path, after, steps):
    history = training.train(chain(), traces(), training.direct(BETA), 9, out=tmp_path, stop_after=after)
    assert (len(history), history.stopped) == (steps, "stop_after")
    assert checkpoints.newest(tmp_path).step == steps
    assert training.train(chain(), traces(), training.direct(BETA), 9, stop_after=1e9).stopped == "finished"


def test_without_being_told_a_run_saves_ten_times_and_at_the_end(tmp_path, monkeypatch):
    saved, save = [], checkpoints.save
    monkeypatch.setattr(checkpoints, "save", lambda out, found: saved.append(found.step) or save(out, found))
    training.train(chain(), traces(), training.direct(BETA), 25, out=tmp_path)
    assert saved == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 25]
    saved.clear()
    training.train(chain(), traces(), training.direct(BETA), 7, out=tmp_path / "b", checkpoint_every=3)
    assert saved == [3, 6, 7]


KILLED = """
import sys, time, torch
sys.path.insert(0, sys.argv[2])
from sysdpo_lab import training
from tests.training_cases import chain, finals
training.train(chain(), finals(), training.sampling(0.5, "monte_carlo", 3), 100_000, lr=0.1, batch_size=4, out=sys.argv[1],
               checkpoint_every=1)
"""


def test_a_run_killed_with_signal_9_goes_on_as_if_nothing_had_happened(tmp_path, request):
    root = str(request.config.rootpath)
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), root], cwd=root)
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and not any(int(p.name[5:]) >= 12 for p in checkpoints.folders(tmp_path)):
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    done = checkpoints.newest(tmp_path).step
    assert done >= 12
    whole, resumed = chain(), chain()
    objective = training.sampling(0.5, "monte_carlo", 3)
    wanted = training.train(whole, finals(), objective, done + 5, lr=0.1, batch_size=4)
    found = training.train(resumed, finals(), objective, done + 5, lr=0.1, batch_size=4, out=tmp_path, resume=True)
    assert equal(weights(resumed), weights(whole)) and without_times(found) == without_times(wanted)


# --- leaving things as they are ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def global_state_untouched(seed: int = 0):
    random.seed(seed + 1), np.random.seed(seed + 2), torch.manual_seed(seed + 3)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    yield
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_training_with_dropout_leaves_global_random_state_alone_and_does_not_depend_on_it():
    results, objective = [], training.sampling(BETA, "monte_carlo", 2)
    for seed in range(2):
        with global_state_untouched(seed):
            system = letters_system(dropout=0.2)
            training.train(system, letters_finals(), objective, steps=3, lr=0.1, generator=seeded(4))
        results.append(weights(system))
    assert equal(*results)
    calm = letters_system(dropout=0.0)
    training.train(calm, letters_finals(), objective, steps=3, lr=0.1, generator=seeded(4))
    assert not equal(weights(calm), results[0])  # dropout was on


def disturbing(system):
    """An evaluation that does everything it should not."""
    assert not torch.is_grad_enabled() and not any(module.training for module in system.modules())
    random.random(), np.random.rand(), torch.rand(1)
    system.train()
    for parameter in system.parameters():
        parameter.requires_grad_(False)
    return {"value": np.float64(0.25), "tensor": torch.tensor(2.0), "none": math.nan}


def test_an_evaluation_disturbs_nothing_and_is_logged():
    def run(**options):
        system = letters_system(dropout=0.2)
        system["draft"].eval()
        with global_state_untouched():
            history = training.train(
                system, letters_finals(), training.sampling(BETA, "monte_carlo", 2), steps=5, lr=0.1, batch_size=3, **options
            )
        assert system["answer"].training and not system["draft"].training
        return history, weights(system)

    (_, wanted), (history, found) = run(), run(evaluate=disturbing, evaluate_every=2)
    assert equal(found, wanted)
    assert [r["step"] for r in history if "evaluation" in r] == [2, 4, 5]
    assert history[-1]["evaluation"] == {"value": 0.25, "tensor": 2.0, "none": None}
    assert [r["step"] for r in run(evaluate=disturbing)[0] if "evaluation" in r] == [5]


def test_the_train_flags_of_a_user_and_old_gradients_are_respected():
    system = chain()
    for parameter in system.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)  # left over from something else
    other = chain()
    for each in (system, other):
        training.train(each, traces(), training.direct(BETA), steps=1, lr=1.0, optimizer="sgd", clip=None)
    assert equal(weights(system), weights(other))


def live_tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():  # looking at other libraries' objects may warn
        warnings.simplefilter("ignore")
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def test_memory_after_many_steps_is_that_after_a_few():
    counts = {}

    def count(record):
        if record["step"] in (5, 50):
            counts[record["step"]] = live_tensors()

    history = training.train(chain(), finals(), training.sampling(BETA, "monte_carlo", 2), steps=50, lr=0.1, on_step=count)
    assert counts[50] <= counts[5] + 2
    json.dumps(history, allow_nan=False)


def test_the_bar_is_silent_in_tests(capfd):
    training.train(chain(), traces(), training.direct(BETA), steps=2)
    assert capfd.readouterr() == ("", "")


def test_a_bar_that_is_asked_for_shows_steps_and_time_left(capfd):
    training.train(chain(), traces(), training.direct(BETA), steps=2, progress=True)
    shown = capfd.readouterr().err
    assert "training" in shown and "2/2" in shown


# --- the log ----------------------------------------------------------------------------------------------------------------


def test_records_say_what_the_step_was():
    history = training.train(chain(), finals(), training.sampling(BETA, "monte_carlo", 3), steps=4, lr=0.1, batch_size=4)
    last = history[-1]
    assert set(last["shares"]) == {"y", "z", "posterior"}
    assert sum(last["shares"].values()) == pytest.approx(last["log_ratio_gap"], abs=1e-9)
    assert last["margin"] == pytest.approx(BETA * last["log_ratio_gap"], abs=1e-12)
    assert last["grad_norm_total"] == pytest.approx(math.hypot(*last["grad_norm"].values()), rel=1e-9)
    assert (last["epoch"], last["pairs"], last["dropped"]) == (2, 4, 0) and last["pairs_per_second"] > 0
    assert history.column("epoch") == [1, 1, 1, 2] and history.column("grad_norm", "y")[-1] == last["grad_norm"]["y"]
    assert history.column("trained")[1:] == [None] * 3
    with pytest.raises(errors.UnknownOptionError, match="no record has 'los'; there are accuracy"):
        history.column("los")


def test_log_every_thins_the_records_not_the_steps(tmp_path):
    seen = []
    history = training.train(chain(), traces(), training.direct(BETA), 11, log_every=4, out=tmp_path, on_step=seen.append)
    assert history.column("step") == [1, 4, 8, 11] == read(tmp_path).column("step")
    assert [record["step"] for record in seen] == list(range(1, 12))


# --- measuring --------------------------------------------------------------------------------------------------------------


def test_margins_of_a_set_are_those_of_its_batches_and_the_loss_is_over_all_pairs():
    system, pairs = structural_zeros()
    training.train(system, pairs, training.direct(BETA), steps=3, lr=0.3)
    whole = pairs.batch(range(len(pairs)))
    wanted = losses.direct_loss(system, whole.chosen, whole.rejected, BETA)
    for size in (1, 5, 12):
        found = training.margins(system, pairs, training.direct(BETA), batch_size=size)
        assert torch.allclose(found.margin, wanted.margin.detach(), equal_nan=True, atol=1e-12)
        assert found.loss.item() == pytest.approx(wanted.loss.item(), abs=1e-12)
        assert (found.accuracy, found.dropped) == (wanted.accuracy, wanted.dropped) and not found.margin.requires_grad


def test_measuring_twice_gives_equal_numbers_and_disturbs_nothing():
    system, objective = letters_system(dropout=0.5), training.sampling(BETA, "monte_carlo", 2, fixed=True)
    training.train(system, letters_finals()[:3], objective, steps=2, lr=0.1)
    state = objective.state_dict()
    with global_state_untouched():
        one, two = (training.margins(system, letters_finals(), objective) for _ in range(2))
    assert torch.equal(one.margin, two.margin) and objective.state_dict() == state
    assert all(module.training for module in system.modules())
    other = training.margins(system, letters_finals(), training.sampling(BETA, "monte_carlo", 2), generator=seeded(8))
    assert not torch.equal(other.margin, one.margin)


def test_held_out_accuracy_can_be_watched_with_the_same_objective():
    pairs, objective = finals(20), training.sampling(BETA, "monte_carlo", 3, fixed=True)
    held_out, plain = pairs[14:], chain()
    training.train(plain, pairs[:14], training.sampling(BETA, "monte_carlo", 3, fixed=True), steps=4, lr=0.1)
    watched = chain()
    history = training.train(
        watched, pairs[:14], objective, steps=4, lr=0.1, evaluate_every=2,
        evaluate=lambda system: {"margin_accuracy": training.margins(system, held_out, objective).accuracy},
    )  # fmt: skip
    assert equal(weights(watched), weights(plain))
    assert 0 <= history[-1]["evaluation"]["margin_accuracy"] <= 1


def test_the_start_has_accuracy_one_half_and_loss_log_2():
    for objective in (training.sampling(BETA, "monte_carlo", 2), training.sampling(BETA, "diverse_beam", 3)):
        found = training.margins(chain(), finals(), objective)
        assert found.accuracy == 0.5 and found.loss.item() == pytest.approx(math.log(2), abs=1e-12)


# --- does it align? ---------------------------------------------------------------------------------------------------------


def bradley_terry_traces(reward: torch.Tensor, drafts: int = 3):
    """Every pair of whole traces once, and the objective that weighs both orders as the judge would choose."""
    outputs = reward.shape[1]
    states = [(x, y, z) for x in range(len(reward)) for y in range(drafts) for z in range(outputs)]
    rows = [(a, b) for i, a in enumerate(states) for b in states[i + 1 :] if a[0] == b[0]]
    sides = [dict(zip("xyz", map(list, zip(*side)))) for side in zip(*rows)]
    logit = torch.tensor([reward[a[0], a[2]] - reward[b[0], b[2]] for a, b in rows], dtype=torch.float64)

    def population(system, batch, generator):
        found = losses.direct_loss(system, batch.chosen, batch.rejected, BETA)
        wins = torch.sigmoid(logit[torch.tensor(batch.rows)])
        found.loss = -(wins * logsigmoid(found.margin) + (1 - wins) * logsigmoid(-found.margin)).mean()
        return found

    return Pairs.from_traces(*sides), population


def test_direct_on_a_full_graph_reaches_the_aligned_system():
    # x -> y -> z with x -> z can hold every tilt (S2.2), so Direct's optimum is DPO's: gap against the reference 0
    reward = torch.randn(2, 4, generator=seeded(6), dtype=torch.float64)
    pairs, population = bradley_terry_traces(reward)
    system = chain()
    judge = reward[:, :, None] - reward[:, None, :]

    def gap() -> float:
        return alignment.gap(exact.marginal(system), judge, BETA, exact.marginal(system, reference=True))

    assert gap() > 1
    training.train(system, pairs, population, steps=500, lr=0.1, batch_size=len(pairs), optimizer="adam", clip=None)
    assert gap() < 1e-3
    assert (exact.marginal(system) - exact.tilted_marginal(chain(), reward, BETA)).abs().max() < 1e-3


def test_sampling_over_all_intermediates_reaches_it_from_finals_alone():
    reward = torch.randn(2, 4, generator=seeded(6), dtype=torch.float64)
    rows = [(x, i, j) for x in range(2) for i in range(4) for j in range(4) if i < j]
    pairs = Pairs.from_finals({"x": [r[0] for r in rows]}, [r[1] for r in rows], [r[2] for r in rows])
    wins = torch.tensor([torch.sigmoid(reward[x, i] - reward[x, j]) for x, i, j in rows], dtype=torch.float64)
    sampled = training.sampling(BETA, "enumerate_all")

    def population(system, batch, generator):
        found = sampled(system, batch, generator)
        w = wins[torch.tensor(batch.rows)]
        found.loss = -(w * logsigmoid(found.margin) + (1 - w) * logsigmoid(-found.margin)).mean()
        return found

    system = chain()
    training.train(system, pairs, population, steps=300, lr=0.1, batch_size=12, optimizer="adam", clip=None)
    judge = reward[:, :, None] - reward[:, None, :]
    assert alignment.gap(exact.marginal(system), judge, BETA, exact.marginal(system, reference=True)) < 1e-3


# --- language models --------------------------------------------------------------------------------------------------------

X = ["ab the cat", "a", "the abc: ab", "cab", "the"]
WON, LOST = ["abc", "the a", "x: ab cab", "a", "b the"], ["the", "cab", "ab", "the the", "c"]


def language_models(reference="auto", dropout=0.0) -> CompoundSystem:
    """draft and refine: two adapters on one tiny base."""
    from peft import LoraConfig

    base, words = tiny.model(), tiny.tokenizer()
    lora = LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    draft, refine = (
        CausalLM(name, parents, base, words, template, lora, 5, reference=reference)
        for name, parents, template in (("draft", ("x",), "{x}:"), ("refine", ("x", "draft"), "{x} {draft}:"))
    )
    return CompoundSystem([draft, refine], output="refine")


def adapters(system: CompoundSystem) -> dict[str, torch.Tensor]:
    return {f"{c.name} {i}": p.detach().clone() for c in system.components for i, p in enumerate(c.trainable())}


LM_RUNS = {
    "diverse beam": (lambda: training.sampling(BETA, "diverse_beam", 2), 0.0),
    "monte carlo, dropout": (lambda: training.sampling(BETA, "monte_carlo", 2), 0.3),
    "gumbel, fixed": (lambda: training.sampling(BETA, "gumbel_top_k", 2, fixed=True), 0.0),
    "separate": (lambda: training.separate(BETA), 0.0),
}


@pytest.mark.parametrize("objective, dropout", LM_RUNS.values(), ids=LM_RUNS)
def test_two_adapters_on_one_base_train_jointly_and_resume_bit_for_bit(tmp_path, objective, dropout):
    options = {"lr": 0.02, "batch_size": 2}
    pairs = Pairs.from_finals({"x": X}, WON, LOST)
    whole, resumed = language_models(dropout=dropout), language_models(dropout=dropout)
    start, base = adapters(whole), {n: p.clone() for n, p in weights(whole).items() if "lora" not in n}
    history = training.train(whole, pairs, objective(), 5, **options)
    assert history[0]["loss"] == pytest.approx(math.log(2) * (2 if "separate" in history[0] else 1), abs=1e-6)
    assert [name for name, before in start.items() if torch.equal(adapters(whole)[name], before)] == []
    assert equal({n: p for n, p in weights(whole).items() if "lora" not in n}, base)
    training.train(language_models(dropout=dropout), pairs, objective(), 5, out=tmp_path, stop_after=2, **options)
    found = training.train(resumed, pairs, objective(), 5, out=tmp_path, resume=True, **options)
    assert equal(adapters(resumed), adapters(whole)) and without_times(found) == without_times(history)
    checkpoints_hold = checkpoints.newest(tmp_path).tensors
    assert {name.split("/")[1] for name in checkpoints_hold if name.startswith("weights/")} == {"draft", "refine"}


def test_a_frozen_adapter_beside_a_trained_one_stays_bit_for_bit():
    system = language_models()
    before = adapters(system)
    history = training.train(
        system, Pairs.from_finals({"x": X}, WON, LOST), training.sampling(BETA, "diverse_beam", 2), 4, lr={"refine": 0.02}
    )
    after = adapters(system)
    assert all(torch.equal(after[n], before[n]) == n.startswith("draft") for n in before)
    assert history[0]["not_trained"] == ["draft"]
    assert all(p.requires_grad for c in system.components for p in c.trainable())


@pytest.mark.parametrize("kind", ["direct", "fixed", "separate"])
def test_cached_references_give_the_same_run_without_scoring_the_reference(kind, monkeypatch):
    if kind == "direct":
        sides = [{"x": X, "draft": answers[::-1], "refine": answers} for answers in (WON, LOST)]
        pairs, make = Pairs.from_traces(*sides), lambda: training.direct(BETA)
    else:
        pairs = Pairs.from_finals({"x": X}, WON, LOST)
        fixed = training.sampling(BETA, "monte_carlo", 2, fixed=True)
        make = (lambda: training.separate(BETA)) if kind == "separate" else lambda: fixed
    system, objective = language_models(reference="cached"), make()
    assert training.cache_reference(system, pairs, objective, seeded(5)) >= 10
    other = language_models()
    if kind != "direct":  # the other run is given the sets that were drawn while caching
        state, twin = objective.state_dict(), make()
        plain = training.train(other, pairs, Given(twin, state), 4, lr=0.02, batch_size=2)
    else:
        plain = training.train(other, pairs, make(), 4, lr=0.02, batch_size=2)
    scored = []
    real = scoring.sequence_log_probs
    monkeypatch.setattr(
        scoring, "sequence_log_probs", lambda *a, **k: scored.append(system["draft"].is_reference) or real(*a, **k)
    )
    found = training.train(system, pairs, objective, 4, lr=0.02, batch_size=2)
    assert scored and not any(scored)
    assert found.column("loss") == pytest.approx(plain.column("loss"), abs=1e-5)
    assert found[-1]["loss"] < found[0]["loss"]


class Given:
    """An objective that starts with sets that another one drew."""

    def __init__(self, objective, state):
        self.objective, self.state = objective, state

    def reset(self, system):
        self.objective.load_state_dict(self.state)

    def __call__(self, *arguments):
        return self.objective(*arguments)


def test_a_reference_that_cannot_be_cached_is_named():
    pairs = Pairs.from_finals({"x": X}, WON, LOST)
    with pytest.raises(errors.UnknownOptionError, match="other values in each step"):
        training.cache_reference(language_models("cached"), pairs, training.sampling(BETA, "monte_carlo", 2))
    with pytest.raises(errors.UnknownOptionError, match="reference='cached'"):
        training.cache_reference(language_models(), pairs, training.separate(BETA))


# --- small pieces -----------------------------------------------------------------------------------------------------------


def test_a_permutation_is_never_split_over_two_epochs():
    order = Order(5, seeded(1))
    taken = [order.take(2) for _ in range(6)]
    assert [len(rows) for rows in taken] == [2, 2, 1, 2, 2, 1]
    assert sorted(sum(taken[:3], [])) == sorted(sum(taken[3:], [])) == [0, 1, 2, 3, 4]


def test_a_gradient_too_large_for_its_dtype_squared_still_has_a_norm():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3e30, 4e30])
    assert optimisation.grad_norm([weight]) == pytest.approx(5e30, rel=1e-6)
    assert optimisation.grad_norm([torch.nn.Parameter(torch.zeros(2))]) == 0.0


def test_settings_compare_steps_only_where_the_schedule_depends_on_them():
    rest = (4, 1, 1.0, 0, "constant", 0.0, (0.9, 0.999), "adamw", 1, None, None)
    assert "steps" not in Settings(10, *rest).compared()
    assert Settings(10, 4, 1, 1.0, 0, "linear", *rest[5:]).compared()["steps"] == 10


def test_a_component_without_registered_parameters_can_be_trained_and_resumed(tmp_path):
    class Outside(Letters):
        """Its weights live elsewhere, as those of a shared base model may."""

        def __init__(self, name, parents):
            super().__init__(name, parents)
            self.kept = [self._parameters.pop("logits")]

        @property
        def logits(self):
            return self.kept[0]

        def trainable(self):
            return self.kept

    def make():
        return CompoundSystem([Outside("draft", ["x"]), Outside("answer", ["x", "draft"])], output="answer")

    whole, resumed = make(), make()
    training.train(whole, letters_finals(), training.sampling(BETA, "monte_carlo", 2), 4, lr=0.1)
    training.train(make(), letters_finals(), training.sampling(BETA, "monte_carlo", 2), 4, lr=0.1, out=tmp_path, stop_after=2)
    training.train(resumed, letters_finals(), training.sampling(BETA, "monte_carlo", 2), 4, lr=0.1, out=tmp_path, resume=True)
    assert torch.equal(whole["draft"].logits, resumed["draft"].logits)
    assert not torch.equal(whole["draft"].logits, make()["draft"].logits)
