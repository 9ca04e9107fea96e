"""The families of answer chains: their recipe against plain loops, recoding, and WR-chosen by hand."""

import math

import pytest
import torch

from sysdpo_lab import errors, exact
from sysdpo_lab.worlds import answer_chains as ac


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(family, systems=3, seed=0, **sizes):
    return ac.draw(family, systems, seeded(seed), **sizes)


def moments(law):
    """Mean and variance of a law on 0, 1, 2 ..."""
    line = torch.arange(law.shape[-1], dtype=torch.float64)
    mean = (law * line).sum(-1)
    return mean, (law * (line - mean[..., None]) ** 2).sum(-1)


# --- the recipe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ac.FAMILIES)
def test_tables_are_distributions_of_the_stated_shapes(family):
    systems = drawn(family, 4, inputs=3, answers=5)
    assert systems.p_y.shape == (4, 3, 5) and systems.reward.shape == (4, 3, 5) and len(systems) == 4
    assert systems.p_z.shape == ((4, 5, 5) if family == "blind" else (4, 3, 5, 5))
    for table in (systems.p_y, systems.p_z):
        assert torch.allclose(table.sum(-1), torch.ones(table.shape[:-1], dtype=torch.float64)) and table.min() > 0


def test_the_reward_falls_with_the_distance_from_a_target_on_the_line_at_one_slope_a_system():
    """r(z) = -kappa |z - t|: away from the target the steps are kappa; kappa from 0.5 to 1; t from the two end values."""
    reward = drawn("answer", 20).reward
    steps = (reward[..., 1:] - reward[..., :-1]).abs()
    kappa = steps.amax(-1)
    assert torch.allclose(kappa, kappa[:, :1].expand_as(kappa)) and 0.5 <= kappa.min() and kappa.max() <= 1
    for row, slope in zip(reward.reshape(-1, 6), kappa.flatten()):
        target = (5 + (row[-1] - row[0]) / slope) / 2
        assert 0 <= target <= 5
        assert torch.allclose(row, -slope * (torch.arange(6).double() - target).abs())


def test_log_ratios_of_neighbouring_drafts_are_those_of_a_gaussian():
    """log p(i+1)/p(i) falls by 1/width^2 a step, width from 0.8 to 1.5, one for all inputs of a system."""
    logs = drawn("answer", 20).p_y.log()
    curvature = -(logs[..., 2:] - 2 * logs[..., 1:-1] + logs[..., :-2])
    assert torch.allclose(curvature, curvature[:, :1, :1].expand_as(curvature))
    assert 1 / 1.5**2 <= curvature.min() and curvature.max() <= 1 / 0.8**2


def test_the_refiner_follows_the_draft_with_weight_one_minus_a():
    """The centre of p(z|x,y) moves by 1 - a (0.5 to 0.9) when the draft moves by one; a blind refiner stays at the draft."""
    for family, low, high in (("answer", 0.5, 0.9), ("blind", 1.0, 1.0)):
        logs = drawn(family, 20).p_z.log()
        curvature = -(logs[..., 2] - 2 * logs[..., 1] + logs[..., 0])
        pull = (logs[..., 1] - logs[..., 0])[..., 1:] - (logs[..., 1] - logs[..., 0])[..., :-1]
        weight = pull / curvature[..., 1:]
        assert low - 1e-9 <= weight.min() and weight.max() <= high + 1e-9


def test_drafts_have_something_to_learn_and_something_to_say():
    """Over many systems drafts lie near the target (better than chance) and off it (worse than the best)."""
    systems = drawn("answer", 200, seed=3)
    target = systems.reward.argmax(-1)
    hit = systems.p_y.gather(-1, target[..., None]).mean().item()
    assert 1 / 6 < hit < 0.5
    mean, variance = moments(systems.p_y)
    assert (mean - target).abs().mean() < 1.5 and 0.3 < variance.mean() < 2.3


@pytest.mark.parametrize("family", ac.FAMILIES)
def test_the_same_seed_gives_the_same_systems_and_another_others(family):
    one, again, other = drawn(family), drawn(family), drawn(family, seed=1)
    assert torch.equal(one.p_z, again.p_z) and torch.equal(one.reward, again.reward)
    assert not torch.allclose(one.p_y, other.p_y)


def test_the_global_random_state_is_left_alone():
    state = torch.get_rng_state()
    drawn("own-code")
    assert torch.equal(torch.get_rng_state(), state)


# --- recoding -----------------------------------------------------------------------------------------------------------


def test_the_code_says_which_answer_a_draft_stands_for():
    one, coded = drawn("answer"), drawn("own-code")
    assert torch.equal(one.reward, coded.reward) and torch.equal(one.code, torch.arange(6).repeat(3, 1))
    for system in range(3):
        for draft, answer in enumerate(coded.code[system].tolist()):
            assert torch.equal(coded.p_y[system, :, draft], one.p_y[system, :, answer])
            assert torch.equal(coded.p_z[system, :, draft], one.p_z[system, :, answer])
    assert not torch.equal(coded.code, one.code)


@pytest.mark.parametrize("family", ["answer", "blind"])
def test_recoding_keeps_the_answers_and_the_judge(family):
    one = drawn(family)
    other = one.recoded(torch.stack([torch.randperm(6, generator=seeded(s)) for s in range(3)]))
    laws = [exact.marginal(systems.case().system) for systems in (one, other)]
    assert torch.allclose(*laws, rtol=0, atol=1e-14) and torch.equal(one.reward, other.reward)
    assert not torch.allclose(one.p_y, other.p_y)


def test_recoding_twice_is_one_recoding_and_there_is_a_way_back():
    one = drawn("answer")
    first, second = (torch.stack([torch.randperm(6, generator=seeded(s + k)) for s in range(3)]) for k in (10, 20))
    twice = one.recoded(first).recoded(second)
    assert torch.equal(twice.code, first.gather(-1, second)) and torch.equal(twice.p_z, one.recoded(twice.code).p_z)
    back = one.recoded(first).recoded(first.argsort(-1))
    assert torch.equal(back.p_y, one.p_y) and torch.equal(back.code, one.code)


@pytest.mark.parametrize("codes", [[[0, 1, 2, 3, 4, 4]], [[1, 2, 3, 4, 5, 6]], [[0, 1, 2]]])
def test_what_is_no_renumbering_is_refused(codes):
    with pytest.raises(errors.ValueRangeError, match="no renumbering of the 6 drafts of 1 systems"):
        drawn("answer", 1).recoded(torch.tensor(codes))


# --- as one system ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ac.FAMILIES)
def test_the_case_holds_each_system_and_its_judge(family):
    systems = drawn(family)
    case = systems.case(0.7)
    assert case.beta == 0.7 and case.name == family and case.system.output == "z"
    together = exact.by_member(exact.marginal(case.system), 3)
    for number in range(3):
        alone = ac.chain(systems.p_y[number], systems.p_z[number])
        torch.testing.assert_close(together[number], exact.marginal(alone))
        for x in range(4):
            refiner = systems.p_z[number] if family == "blind" else systems.p_z[number, x]
            torch.testing.assert_close(together[number, x], systems.p_y[number, x] @ refiner)
    assert torch.equal(case.reward.reshape(3, 4, 6), systems.reward)


# --- WR-chosen ----------------------------------------------------------------------------------------------------------


def sigmoid(number):
    return 1 / (1 + math.exp(-number))


def test_wr_chosen_is_a_double_sum_with_ties_at_one_half():
    case = drawn("blind", 1, inputs=2).case()
    answers = exact.marginal(case.system).tolist()
    for x, found in enumerate(ac.wr_chosen(case).tolist()):
        reward = case.reward[x].tolist()
        total = sum(math.exp(2 * r) for r in reward)
        expected = sum(
            p * math.exp(2 * s) / total * (0.5 if i == j else sigmoid(r - s))
            for i, (p, r) in enumerate(zip(answers[x], reward))
            for j, s in enumerate(reward)
        )
        assert found == pytest.approx(expected, abs=1e-12)


def test_a_system_that_answers_like_the_chosen_law_wins_half_and_greedy_decoding_counts_modes():
    case = ac.lengths()
    chosen = ac.chosen_law(case.reward)
    assert exact.win_rate(chosen, chosen, case.preference_logits).item() == pytest.approx(0.5)
    # greedily the draft is balanced and becomes long: r = -0.5 against 0, 1.5, -0.5
    expected = sum(
        p * (0.5 if j == 2 else sigmoid(-0.5 - r)) for j, (p, r) in enumerate(zip(chosen[0].tolist(), (0, 1.5, -0.5)))
    )
    assert ac.wr_chosen(case, "greedy").item() == pytest.approx(expected, abs=1e-12)


def test_the_fixed_toy_has_the_stated_numbers():
    case = ac.lengths()
    assert (
        case.beta == 2.0
        and case.reward.tolist() == [[0.0, 1.5, -0.5]]
        and list(case.system.order) == ["draft", "refine"]
    )
    assert case.system["draft"].probabilities(True)[0].tolist() == pytest.approx([0.3, 0.4, 0.3])
    rows = case.system["refine"].probabilities(True).detach()
    assert torch.allclose(rows, torch.tensor([[0.2, 0.7, 0.1], [0.05, 0.25, 0.7], [0.02, 0.08, 0.9]]).double())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("answers", 2), "family='answers' does not exist"),
        (("answer", 0), "systems must be"),
        (("answer", True), "systems must be"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(errors.UnknownOptionError, match=words):
        ac.draw(*arguments, seeded())
