"""Five laws of sixteen drafts: their tables by hand, what each hides where, and that they are systems of the library."""

import math

import pytest
import torch

from sysdpo_lab import errors, exact
from sysdpo_lab.worlds import draft_laws
from sysdpo_lab.worlds.draft_laws import LAWS, draw


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# --- p(y) ---------------------------------------------------------------------------------------------------------------


def test_the_laws_of_y_are_those_that_they_are_named_after():
    harmonic = sum(1 / rank for rank in range(1, 17))
    squares = sum(1 / rank**2 for rank in range(1, 17))
    for law in ("zipf", "tail", "head"):
        assert draft_laws.draft_law(law).tolist() == pytest.approx(
            [1 / rank / harmonic for rank in range(1, 17)], abs=1e-15
        )
    assert draft_laws.draft_law("zipf2").tolist() == pytest.approx(
        [1 / r**2 / squares for r in range(1, 17)], abs=1e-15
    )
    product = [m * p for m in (0.7, 0.2, 0.07, 0.03) for p in (0.4, 0.3, 0.2, 0.1)]
    assert draft_laws.draft_law("meanings").tolist() == pytest.approx(product, abs=1e-15)


@pytest.mark.parametrize("law", LAWS)
def test_every_system_is_a_pair_of_normalised_float64_tables(law):
    found = draw(law, 3, generator())
    assert (found.law, len(found)) == (law, 3)
    assert found.log_y.shape == (3, 16) and found.log_z.shape == (3, 16, 4) and found.reward.shape == (3, 4)
    assert {table.dtype for table in (found.log_y, found.log_z, found.reward)} == {torch.float64}
    assert torch.allclose(found.log_y.exp().sum(-1), torch.ones(3).double())
    assert torch.allclose(found.log_z.exp().sum(-1), torch.ones(3, 16).double())
    assert torch.allclose(found.log_y[0].exp(), draft_laws.draft_law(law))


# --- p(z | y) and the judge -----------------------------------------------------------------------------------------------


def test_logits_and_rewards_are_standard_normal():
    found = draw("zipf", 4000, generator())
    between = (found.log_z[..., 0] - found.log_z[..., 1]).flatten()  # the difference of two N(0, 1) has variance 2
    assert between.var().item() == pytest.approx(2.0, abs=0.05) and abs(between.mean().item()) < 0.03
    assert found.reward.var().item() == pytest.approx(1.0, abs=0.05) and abs(found.reward.mean().item()) < 0.03


def test_drafts_with_one_meaning_answer_nearly_alike_and_others_do_not():
    found = draw("meanings", 2000, generator())
    contrast = found.log_z[..., 0] - found.log_z[..., 1]
    same = contrast[:, 0] - contrast[:, 3]  # paraphrases: what is left is 0.1 N(0, 1), four of them
    other = contrast[:, 0] - contrast[:, 4]
    assert same.std().item() == pytest.approx(0.2, abs=0.02)
    assert other.std().item() == pytest.approx(math.sqrt(4 + 0.04), abs=0.15)


@pytest.mark.parametrize(
    ("law", "poor", "good"), [("tail", slice(0, 8), slice(8, 16)), ("head", slice(8, 16), slice(0, 8))]
)
def test_the_best_answer_hides_behind_one_half_of_the_ranks(law, poor, good):
    found = draw(law, 2000, generator())
    assert found.reward[7].tolist() == [2.0, 0.5, 0.0, -0.5]
    odds = found.log_z[..., 0] - found.log_z[..., 1]  # the noise q has mean 0 in a difference
    assert odds[:, poor].mean().item() == pytest.approx(math.log(0.02 / 0.3267), abs=0.03)
    assert odds[:, good].mean().item() == pytest.approx(math.log(0.85 / 0.05), abs=0.03)
    assert odds[:, good].std().item() == pytest.approx(math.sqrt(0.5), abs=0.02)


def test_the_same_seed_gives_the_same_systems_and_no_global_state_is_touched():
    before = torch.get_rng_state()
    one, again, other = (
        draw("meanings", 3, generator(1)),
        draw("meanings", 3, generator(1)),
        draw("meanings", 3, generator(2)),
    )
    assert torch.equal(one.log_z, again.log_z) and torch.equal(one.reward, again.reward)
    assert not torch.equal(one.log_z, other.log_z)
    assert torch.equal(torch.get_rng_state(), before)


# --- as a library system --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS)
def test_the_case_has_the_tables_and_the_judge_of_each_system(law):
    found = draw(law, 3, generator())
    case = found.case()
    expected = torch.einsum("sy,syz->sz", found.log_y.exp(), found.log_z.exp())
    assert torch.allclose(exact.marginal(case.system), expected, atol=1e-12)
    assert torch.equal(case.preference_logits, found.preference_logits)
    assert case.preference_logits[1, 0, 2].item() == (found.reward[1, 0] - found.reward[1, 2]).item()
    assert case.beta == 0.5


def test_unknown_laws_and_numbers_are_named():
    with pytest.raises(errors.UnknownOptionError, match="law='zipf3'.*'zipf', 'zipf2'"):
        draw("zipf3", 1, generator())
    for number in (0, True, 1.0):
        with pytest.raises(errors.UnknownOptionError, match="systems must be a whole number >= 1"):
            draw("zipf", number, generator())
