"""Anchored objectives: the winners' own log-probability beside a preference loss, by hand on tables."""

import math

import pytest
import torch

from sysdpo_lab import CompoundSystem, errors, losses, training
from sysdpo_lab.anchoring import anchored
from sysdpo_lab.components import Categorical
from sysdpo_lab.preferences import Pairs

PAIRS = [
    {"x": 0, "chosen": {"y": 0, "z": 1}, "rejected": {"y": 1, "z": 0}},
    {"x": 0, "chosen": {"y": 1, "z": 1}, "rejected": {"y": 1, "z": 0}},
]


def chain():
    y = Categorical("y", {"x": 1}, 2, torch.tensor([[0.25, 0.75]]))
    z = Categorical("z", {"y": 2}, 2, torch.tensor([[0.5, 0.5], [0.2, 0.8]]))
    return CompoundSystem([y, z], inputs=("x",), output="z")


def batch():
    return training.preferences.as_pairs(PAIRS).batch([0, 1])


def test_the_loss_is_the_preference_loss_plus_the_winners_cost():
    # winners: y = 0, z = 1 | 0 and y = 1, z = 1 | 1; at the start every margin is 0
    found = anchored(training.direct(0.1), {"y": 0.5, "z": 2.0})(chain(), batch())
    y_cost = -(math.log(0.25) + math.log(0.75)) / 2
    z_cost = -(math.log(0.5) + math.log(0.8)) / 2
    assert found.loss.item() == pytest.approx(math.log(2) + 0.5 * y_cost + 2.0 * z_cost)
    assert found.margin.tolist() == [0.0, 0.0]
    assert found.extras["y_anchor"].tolist() == pytest.approx([-math.log(0.25), -math.log(0.75)])


def test_without_preference_the_gradient_is_that_of_fine_tuning_on_the_winners():
    system = chain()
    anchored(training.direct(0.1), {"y": 1.0}, preference=0.0)(system, batch()).loss.backward()
    # d(-log p)/d logits = p - onehot, mean over the winners 0 and 1
    assert system["y"].logits.grad.flatten().tolist() == pytest.approx([0.25 - 0.5, 0.75 - 0.5])
    assert system["z"].logits.grad is None


def test_weights_of_zero_change_nothing():
    system = chain()
    with torch.no_grad():
        system["y"].logits += torch.tensor([[0.3, 0.0]])
    plain = training.direct(0.1)(system, batch())
    found = anchored(training.direct(0.1), {"y": 0.0, "z": 0.0})(system, batch())
    assert found.loss.item() == plain.loss.item() and found.extras == plain.extras


def test_a_frozen_component_gets_no_anchor():
    system = chain()
    system.freeze("z")
    found = anchored(training.direct(0.1), {"y": 0.5, "z": 2.0})(system, batch())
    assert "z_anchor" not in found.extras and "y_anchor" in found.extras


def test_only_pairs_with_a_margin_are_anchored():
    y = Categorical("y", {"x": 1}, 3, torch.tensor([[0.25, 0.75, 0.0]]))
    system = CompoundSystem([y], inputs=("x",), output="y")
    pairs = [{"x": 0, "chosen": {"y": 0}, "rejected": {"y": 1}}, {"x": 0, "chosen": {"y": 2}, "rejected": {"y": 1}}]
    found = anchored(training.direct(0.1), {"y": 1.0})(system, training.preferences.as_pairs(pairs).batch([0, 1]))
    assert found.dropped == 1
    assert found.loss.item() == pytest.approx(math.log(2) - math.log(0.25))
    found.loss.backward()
    assert torch.isfinite(system["y"].logits.grad[:, :2]).all()


def test_separate_dpo_can_be_anchored_too():
    inner = training.separate(0.1)
    found = anchored(inner, {"y": 1.0})(chain(), batch())
    assert found.loss.item() == pytest.approx(2 * math.log(2) - (math.log(0.25) + math.log(0.75)) / 2)


def test_an_anchor_keeps_winners_that_a_preference_loss_alone_lets_fall():
    # loser and winner share their first value, which a preference can push down together with the loser
    pairs = training.preferences.as_pairs([{"x": 0, "chosen": {"y": 0, "z": 1}, "rejected": {"y": 0, "z": 0}}])
    anchor, plain = chain(), chain()
    training.train(anchor, pairs, anchored(training.direct(0.1), {"y": 0.1}), steps=20, lr=0.1)
    training.train(plain, pairs, training.direct(0.1), steps=20, lr={"z": 0.1})
    y = torch.tensor([0])
    assert anchor["y"].log_prob(y, {"x": y}).item() > math.log(0.25) + 0.3
    assert plain["y"].log_prob(y, {"x": y}).item() == pytest.approx(math.log(0.25))


def test_other_anchors_are_another_run(tmp_path):
    pairs = training.preferences.as_pairs(PAIRS)
    training.train(chain(), pairs, anchored(training.direct(0.1), {"y": 0.1}), steps=2, lr=0.1, out=tmp_path)
    with pytest.raises(errors.ResumeError, match="anchors"):
        training.train(
            chain(), pairs, anchored(training.direct(0.1), {"y": 0.2}), steps=2, lr=0.1, out=tmp_path, resume=True
        )


@pytest.mark.parametrize("weights", [{"y": -1.0}, {"y": float("nan")}])
def test_a_negative_anchor_is_refused(weights):
    with pytest.raises(errors.UnknownOptionError):
        anchored(training.direct(0.1), weights)


def test_unknown_components_and_pairs_of_finals_are_refused_before_the_first_step():
    with pytest.raises(errors.UnknownOptionError, match="'w'"):
        training.train(
            chain(), training.preferences.as_pairs(PAIRS), anchored(training.direct(0.1), {"w": 1.0}), steps=1
        )
    finals = Pairs.from_finals({"x": torch.tensor([0])}, torch.tensor([1]), torch.tensor([0]))
    with pytest.raises(errors.PairKindError, match="whole traces"):
        anchored(training.separate(0.1), {"y": 1.0}).check(chain(), finals)


def test_losses_are_those_of_the_wrapped_objective():
    system = chain()
    with torch.no_grad():
        system["z"].logits += torch.randn(2, 2, generator=torch.Generator().manual_seed(1))
    found = anchored(training.direct(0.3), {"y": 0.0})(system, batch())
    assert torch.equal(found.margin, losses.direct_loss(system, batch().chosen, batch().rejected, 0.3).margin)
