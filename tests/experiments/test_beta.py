"""`run beta`: what beta does, against the closed forms; and that groups trained side by side do not touch each other."""

import json
import math

import pytest
import torch

from sysdpo_lab import alignment, errors, evaluation, exact
from sysdpo_lab.experiments import beta, beta_figures, runner
from sysdpo_lab.profiles import REGISTRY
from tests.exact_systems import bradley_terry, seeded, soft

DEFAULTS = dict(REGISTRY["beta", "toy"].settings)
BETAS = (0.1, 0.5, 2.0)


def case_of(start, seed=0, systems=2, inputs=3):
    return beta.draw(seeded(seed), start, systems, inputs, 4, 4)


# --- the starts -----------------------------------------------------------------------------------------------------------


def test_both_starts_have_the_same_judges_and_only_the_ring_a_uniform_marginal():
    ring, uneven = (case_of(start) for start in beta.STARTS)
    assert torch.equal(ring.reward, uneven.reward) and ring.reward.shape == (6, 4)
    assert torch.allclose(exact.marginal(ring.system), torch.full((6, 4), 0.25).double(), atol=1e-12)
    assert (exact.marginal(uneven.system) - 0.25).abs().amax(1).min() > 0.01


def test_a_sweep_holds_every_case_at_every_beta():
    cases = [case_of(start) for start in beta.STARTS]
    swept = beta.sweep(cases, BETAS, 3)
    parts = exact.marginal(swept.system).detach().reshape(2, 3, 6, 4)
    for number, case in enumerate(cases):
        for place in range(3):
            assert torch.allclose(parts[number, place], exact.marginal(case.system), atol=1e-12)
            assert torch.equal(swept.reward.reshape(2, 3, 6, 4)[number, place], case.reward)
    assert swept.betas.reshape(2, 3, 6)[1, :, 0].tolist() == list(BETAS)


# --- training -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """Both starts at three betas, two systems of three inputs each."""
    swept = beta.sweep([case_of(start) for start in beta.STARTS], BETAS, 3)
    steps = beta.train(swept, 900, 0.1)
    return swept, steps, beta.measure(swept)


def test_every_group_arrives_at_the_optimum_of_its_own_beta(trained):
    swept, steps, records = trained
    reference = exact.marginal(swept.system, reference=True).detach()
    p = exact.marginal(swept.system).detach()
    for group, record in enumerate(records):
        mine = slice(3 * group, 3 * group + 3)
        own = swept.betas[3 * group].item()
        best = exact.tilt(reference[mine], swept.reward[mine], own)
        assert record["gap"] < beta.TOLERANCE and (p[mine] - best).abs().max() < 1e-3 / own
        assert record["kl"] == pytest.approx(exact.kl(best, reference[mine]).mean().item(), abs=1e-2)
    assert (steps > 0).all() and (steps <= 900).all()


def test_a_group_beside_others_is_trained_as_if_alone(trained):
    swept, steps, _ = trained
    case = case_of("uneven")
    alone = exact.Case(case.system, 0.5, case.reward)
    objective, seen = exact.sampling(alone.system, alone.preference_logits, 0.5, systems=6), []

    def look(step):
        p, reference = exact.marginal(alone.system).detach(), exact.marginal(alone.system, reference=True).detach()
        seen.append([
            alignment.gap(p[i : i + 3], alone.preference_logits[i : i + 3], 0.5, reference[i : i + 3]) for i in (0, 3)
        ])  # fmt: skip

    count = int(steps.reshape(2, 3, 2)[1, 1].max())
    exact.train(alone.system, objective, count, lr=0.1, watch=look)
    for member in (0, 1):
        first = next(step for step, gaps in enumerate(seen) if gaps[member] < beta.TOLERANCE)
        assert first == steps.reshape(2, 3, 2)[1, 1, member]


def test_a_run_that_is_too_short_says_so():
    swept = beta.sweep([case_of("ring")], (0.1, 2.0), 3)
    steps = beta.train(swept, 20, 0.1)
    assert steps.tolist() == [21] * 4
    records = beta.measure(swept)
    assert min(record["gap"] for record in records) > beta.TOLERANCE and min(record["kl"] for record in records) > 0


def test_kl_and_win_rate_fall_with_beta_in_every_system(trained):
    _, _, records = trained
    for metric in ("kl", "wr_prompted"):
        values = torch.tensor([record[metric] for record in records]).reshape(2, 3, 2)
        assert (values.diff(dim=1) < 0).all()
    assert min(record["wr_prompted"] for record in records) > 0.5


def test_beta_can_be_read_off_once_the_start_is_a_regressor(trained):
    swept, _, records = trained
    for group, record in enumerate(records):
        own = swept.betas[3 * group].item()
        assert record["beta_hat_adjusted"] == pytest.approx(own, rel=2e-3)
        uniform = group < 6
        assert (abs(record["beta_hat"] / own - 1) < 2e-3) == uniform or own == 0.1


def test_the_plain_gap_is_beta_times_the_unevenness_of_the_start(trained):
    swept, _, records = trained
    log_start = exact.marginal(swept.system, reference=True).detach().log()
    for group, record in enumerate(records):
        spread = (log_start.amax(1) - log_start.amin(1))[3 * group : 3 * group + 3].max().item()
        assert record["gap_unadjusted"] == pytest.approx(swept.betas[3 * group].item() * spread, abs=1.1e-3)


def test_s6_2_without_the_start_the_fitted_beta_is_off():
    """Perfect optima of random references and judges: the ratio to beta lies anywhere up to about 1."""
    g, ratios = seeded(6), []
    for own in (0.5, 1.0, 2.0, 5.0) * 10:
        start, reward = soft(g, 3, 4), torch.randn(3, 4, generator=g, dtype=torch.float64)
        p, judge = exact.tilt(start, reward, own), bradley_terry(reward)
        ratios.append(alignment.fit_beta(p, judge)[0] / own)
        assert alignment.fit_beta(p, judge, start)[:2] == pytest.approx((own, -own), abs=1e-9)
    assert min(ratios) < 0.3 and max(ratios) < 1.2 and 0.2 < sum(ratios) / 40 < 0.8


# --- the run ----------------------------------------------------------------------------------------------------------------

SMALL = {"betas": "0.1,0.5,2", "systems": 6, "steps": 800, "steps_slow": 900, "lr_slow": 0.05}


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    out = tmp_path_factory.mktemp("beta") / "run"
    return runner.run("beta", "toy", out, [0], SMALL, say=lambda line: None), out


def test_every_row_is_there_once(complete):
    summary, _ = complete
    names = {row["system"] for row in summary["rows"]}
    trained = {beta.row_name(start, b) for start in beta.STARTS for b in BETAS}
    assert names == trained | {"before", "before[uneven]"}
    assert {row["metric"] for row in summary["rows"] if row["system"] in trained} == set(beta.METRICS)
    assert all(row["n"] == 6 for row in summary["rows"])
    compared = {(d["a"], d["b"]) for d in summary["differences"]}
    assert ("joint[beta=0.5]", "joint[beta=0.1]") in compared and (
        "joint[beta=2,uneven]",
        "joint[beta=0.5,uneven]",
    ) in compared
    assert ("joint[beta=0.1,uneven]", "joint[beta=2]") not in compared


def test_steps_grow_when_beta_or_the_learning_rate_falls(complete):
    """S5 at lr 0.1: 130 to 160 steps at beta 0.5, 160 to 630 at 0.1 (means over systems)."""
    summary, _ = complete
    steps = {b: row["value"] for b, row in beta_figures.curve(summary, "steps", "ring").items()}
    slow = {b: row["value"] for b, row in beta_figures.curve(summary, "steps_slow", "ring").items()}
    assert 120 < steps[0.5] < 165 and 160 < steps[0.1] < 630
    assert steps[0.1] > 2 * steps[0.5] and slow[0.5] > 1.2 * steps[0.5]


def test_the_start_has_the_judges_largest_logit_as_its_gap(complete):
    summary, out = complete
    records = [r for r in runner.read_records(out / "records.jsonl") if r["system"] == "before"]
    reward = case_of("ring", systems=6).reward
    expected = (reward.amax(1) - reward.amin(1)).reshape(6, 3).amax(1).tolist()
    assert [record["gap"] for record in records] == pytest.approx(expected, abs=1e-12)
    assert evaluation.find_row(summary, "before", "wr_prompted")["value"] == 0.5


def test_the_report_shows_five_figures_and_what_was_found(complete):
    summary, out = complete
    names = {path.stem for path in (out / "figures").glob("*.png")}
    assert names == {"graph", "kl", "wr_prompted", "beta_hat", "gap_unadjusted", "steps"}
    page = (out / "report.html").read_text(encoding="utf-8")
    kl = beta_figures.curve(summary, "kl", "ring")
    assert f"from {kl[0.1]['value']:.3f} to {kl[2.0]['value']:.3f} nats" in page
    assert "with log p_ref as a second regressor" in page


def test_a_run_of_one_start_has_a_report_too(tmp_path):
    small = {"starts": "uneven", "betas": "1", "systems": 2, "steps": 5, "steps_slow": 5, "drafts": 3, "outputs": 2}
    summary = runner.run("beta", "toy", tmp_path / "run", [0], small, say=lambda line: None)
    assert {row["system"] for row in summary["rows"]} == {"before[uneven]", "joint[beta=1,uneven]"}
    json.dumps(summary)


# --- bad settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"betas": "0.1,x"}, "betas must be numbers"),
        ({"betas": ""}, "betas must be numbers"),
        ({"betas": "0,1"}, "betas must be > 0"),
        ({"betas": "nan"}, "betas must be > 0"),
        ({"betas": "inf"}, "betas must be > 0"),
        ({"starts": "ring,flat"}, "starts='flat'.*'uneven'"),
        ({"systems": 0}, "systems must be a whole number >= 1"),
        ({"steps_slow": 0}, "steps_slow must be a whole number >= 1"),
        ({"outputs": 1}, "outputs must be a whole number >= 2"),
        ({"lr_slow": 0.0}, "lr_slow must be a number > 0"),
        ({"drafts": 3}, "the ring needs as many drafts as outputs"),
        ({"drafts": 5, "outputs": 5}, "2 to 4"),
    ],
)
def test_settings_that_no_run_can_have_are_named(changes, words):
    with pytest.raises(errors.UnknownOptionError, match=words):
        beta.check({**DEFAULTS, **changes})


def test_an_uneven_start_may_have_other_sizes():
    beta.check({**DEFAULTS, "starts": "uneven", "drafts": 3, "outputs": 7})


# --- the stored result --------------------------------------------------------------------------------------------------------


def test_the_stored_run_says_what_the_theory_says():
    from sysdpo_lab import results

    summary = results.load("beta")
    assert summary["settings"] == DEFAULTS and summary["seeds"] == [0, 1, 2]
    for start in beta.STARTS:
        kl = [row["value"] for row in beta_figures.curve(summary, "kl", start).values()]
        assert kl == sorted(kl, reverse=True) and len(kl) == 6
        for own, row in beta_figures.curve(summary, "beta_hat_adjusted", start).items():
            assert row["value"] == pytest.approx(own, rel=1e-3)
        assert all(row["value"] < beta.TOLERANCE for row in beta_figures.curve(summary, "gap", start).values())
    plain = beta_figures.curve(summary, "beta_hat", "uneven")
    ratios = [row["value"] / own for own, row in plain.items()]
    assert ratios == sorted(ratios, reverse=True) and 0.04 < ratios[-1] < 0.5 < ratios[0] < 1.03
    steps, slow = (beta_figures.curve(summary, metric, "ring") for metric in ("steps", "steps_slow"))
    assert 130 <= steps[0.5]["value"] <= 160 <= steps[0.1]["value"] <= 630
    assert 360 <= slow[0.5]["value"] <= 1160 and 2190 <= slow[0.1]["value"] <= 4480
    assert math.isclose(slow[0.1]["value"] / slow[0.2]["value"], 2, rel_tol=0.15)  # steps ~ 1 / beta


def test_systems_that_do_not_arrive_are_counted_in_a_note(tmp_path):
    few = {"betas": "0.5", "starts": "ring", "systems": 2, "steps": 3, "steps_slow": 3}
    summary = runner.run("beta", "toy", tmp_path / "run", [0], few, say=lambda line: None)
    assert summary["notes"]["not arrived, seed 0"].startswith("2 of 2 by steps, 2 of 2 by steps_slow")
