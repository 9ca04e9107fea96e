"""`run samplers`: its numbers against the theory of the lessons, against the library's own measures, and as a run."""

import json
import math
import re

import pytest
import torch

from sysdpo_lab import alignment, errors, evaluation, exact, results
from sysdpo_lab.experiments import draft_sets, runner, sampler_figures, samplers
from sysdpo_lab.experiments.draft_sets import Shift
from sysdpo_lab.profiles import REGISTRY
from sysdpo_lab.worlds import draft_laws

DEFAULTS = dict(REGISTRY["samplers", "toy"].settings)
SIZES = (1, 2, 4, 5, 8, 16)
# loss error / cosine of one set / cosine of the mean gradient under 1/rank, 200 systems, 32 draws: theory of the lessons
ZIPF = {
    "dbs": ".0344/.46/.46 .0233/.70/.70 .0150/.88/.88 .0119/.92/.92 .0066/.97/.97 0/1/1",
    "mc-count": ".0406/.25/.58 .0308/.44/.78 .0231/.63/.86 .0212/.69/.88 .0181/.77/.89 .0158/.84/.89",
    "mc": ".0403/.26/.59 .0312/.44/.77 .0223/.64/.88 .0197/.70/.90 .0154/.81/.94 .0095/.92/.97",
    "gumbel": ".0405/.25/.58 .0299/.47/.81 .0192/.71/.92 .0152/.79/.94 .0093/.91/.98 0/1/1",
}
MEASURES = ("loss_error", "cosine_single", "cosine_mean")


def table():
    """(estimator, k, metric, the theory's value, half a unit of its last digit)."""
    for estimator, line in ZIPF.items():
        for k, cell in zip(SIZES, line.split()):
            for metric, number in zip(MEASURES, cell.split("/")):
                yield estimator, k, metric, float(number), 5e-5 if metric == "loss_error" else 5e-3


def estimates(law: str, count: int, draws: int, seed: int = 0):
    systems = draft_laws.draw(law, count, samplers.stream(seed, law, "systems"))
    policy = Shift.random(systems, 0.5, samplers.stream(seed, law, "policy")).policy(systems)
    return dict(samplers.estimators(systems, policy, seed, draws, 0.5)), policy


# --- the theory's table, at reduced size ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zipf():
    return estimates("zipf", 150, 32)[0]


def test_the_table_under_one_over_rank_is_the_theorys_within_sampling_error(zipf):
    for estimator, k, metric, expected, rounding in table():
        values = zipf[f"{estimator}-{k}[zipf]"][metric]
        # the theory's own mean over 200 systems is as uncertain as ours
        noise = values.std().item() * math.sqrt(1 / len(values) + 1 / 200)
        assert abs(values.mean().item() - expected) < 3 * noise + rounding, (estimator, k, metric)


def test_counting_repeats_has_a_limit_that_is_not_exact_and_weights_have_none(zipf):
    limit = zipf["mc-count-limit[zipf]"]
    assert limit["loss_error"].mean().item() == pytest.approx(0.014, abs=0.002)
    assert limit["cosine_mean"].mean().item() == pytest.approx(0.892, abs=0.015)
    assert zipf["mc-importance-5[zipf]"]["cosine_mean"].mean().item() == pytest.approx(0.96, abs=0.01)
    assert zipf["gumbel-ht-5[zipf]"]["cosine_mean"].mean().item() == pytest.approx(0.98, abs=0.01)


def test_a_top_2_set_gives_a_single_gradient_like_mc_5_and_a_worse_mean_one(zipf):
    top, five = zipf["dbs-2[zipf]"], zipf["mc-5[zipf]"]
    assert abs((top["cosine_single"] - five["cosine_single"]).mean().item()) < 0.05
    assert (top["cosine_mean"] - five["cosine_mean"]).mean().item() < -0.1
    assert top["variance"].max() == 0.0 and torch.equal(top["bias"], top["loss_error"])


@pytest.mark.parametrize("law", draft_laws.LAWS)
def test_gumbel_beats_both_kinds_of_monte_carlo_on_error_and_both_cosines(law):
    found, _ = estimates(law, 60, 32)
    for k in (2, 4, 5, 8):
        for rival in ("mc", "mc-count"):
            ours, theirs = found[f"gumbel-{k}[{law}]"], found[f"{rival}-{k}[{law}]"]
            assert (ours["loss_error"] - theirs["loss_error"]).mean() < 0, (k, rival)
            for cosine in ("cosine_single", "cosine_mean"):
                assert (ours[cosine] - theirs[cosine]).mean() > 0, (k, rival, cosine)


@pytest.mark.parametrize(("law", "roughly"), [("zipf2", 0.43), ("meanings", 0.18)])
def test_two_draws_hold_one_draft_as_often_as_the_sum_of_squares_says(law, roughly):
    found, (p_y, _) = estimates(law, 100, 64)
    share, expected = found[f"mc-2[{law}]"]["one_draft"].mean().item(), (p_y**2).sum(-1).mean().item()
    assert share == pytest.approx(expected, abs=3 * math.sqrt(0.25 / 6400))
    assert share == pytest.approx(roughly, abs=0.04)
    assert found[f"gumbel-2[{law}]"]["one_draft"].max() == 0.0
    assert ("one_meaning" in found[f"mc-2[{law}]"]) == (law == "meanings")


def test_half_of_two_draws_share_a_meaning_and_dbs_never_does():
    found, _ = estimates("meanings", 100, 32)
    assert found["mc-2[meanings]"]["one_meaning"].mean().item() == pytest.approx(0.54, abs=0.03)
    assert found["dbs-2[meanings]"]["one_meaning"].max() == 0.0


def test_an_estimate_by_hand():
    def of(loss, y):
        return draft_sets.Gradients(
            torch.tensor(loss).double(), torch.tensor(y).double(), torch.zeros(len(y), 1, 2, 0).double()
        )

    truth = of([[1.0]], [[[1.0, 0.0]]])
    found = samplers.estimate(of([[1.5], [0.75]], [[[2.0, 0.0]], [[0.0, 2.0]]]), truth)
    assert found["loss_error"].item() == 0.375 and found["bias"].item() == 0.125
    assert found["variance"].item() == pytest.approx(2 * 0.375**2)  # of two values, unbiased
    assert found["cosine_single"].item() == pytest.approx(0.5) and found["cosine_mean"].item() == pytest.approx(
        0.5**0.5
    )


# --- outcomes against the library's measures --------------------------------------------------------------------------------


def test_outcomes_are_those_that_the_library_measures():
    systems = draft_laws.draw("zipf", 5, torch.Generator().manual_seed(0))
    shift = Shift.random(systems, 1.5, torch.Generator().manual_seed(1))
    case = systems.case()
    with torch.no_grad():
        for name, change in (("y", shift.y), ("z", shift.z)):
            case.system[name].logits.add_(change)
    found = samplers.outcome(systems, shift, 0.5)
    p, reference = exact.marginal(case.system).detach(), exact.marginal(case.system, reference=True).detach()
    judge = case.preference_logits
    for metric, decoding in (("wr_greedy", "greedy"), ("wr_sampled", "sampled")):
        answers = [exact.decoded(case.system, decoding, reference=flag) for flag in (False, True)]
        assert torch.allclose(found[metric], exact.win_rate(*answers, judge)), metric
    for s in range(5):
        one = slice(s, s + 1)
        assert found["gap"][s].item() == pytest.approx(
            alignment.gap(p[one], judge[one], 0.5, p_reference=reference[one])
        )
    assert torch.allclose(found["reward"], (p * systems.reward).sum(-1))


def test_the_start_wins_half_and_the_target_has_no_gap():
    systems = draft_laws.draw("tail", 4, torch.Generator().manual_seed(0))
    start = samplers.outcome(systems, Shift.none(systems), 0.5)
    assert torch.allclose(start["wr_greedy"], torch.full((4,), 0.5).double())
    assert torch.allclose(start["wr_sampled"], torch.full((4,), 0.5).double())
    target = exact.tilt(Shift.none(systems).marginal(systems), systems.reward, 0.5)
    assert samplers.reached(systems, target, 0.5)["gap"].max() < 1e-12


# --- training: when DBS is ahead and when the order reverses ------------------------------------------------------------------


def trained(law, mode, count, variant="", rows=("dbs-2", "mc-2", "exact")):
    """{arm: outcome} of some arms of a training with the profile's steps."""
    systems = draft_laws.draw(law, count, samplers.stream(0, law, "systems"))
    kept = {
        samplers.row_name(e, k, law, mode, variant): samplers.row_name(e, k).removesuffix("[]")
        for e, k in samplers.ARMS
    }
    with pytest.MonkeyPatch.context() as patch:
        few = tuple(arm for arm in samplers.arms(variant) if samplers.row_name(*arm).removesuffix("[]") in rows)
        patch.setattr(samplers, "arms", lambda variant: few)
        return {kept[name]: found for name, found in samplers.trainings(systems, mode, variant, 0, DEFAULTS)}


def lead(found, metric):
    """DBS-2 minus MC-2 in points, with the half-width of its 95 % interval."""
    difference = 100 * (found["dbs-2"][metric] - found["mc-2"][metric])
    return difference.mean().item(), 1.96 * difference.std().item() / math.sqrt(len(difference))


def test_meanings_short_dbs_leads_greedily_and_not_when_sampled():
    found = trained("meanings", "short", 150)
    value, width = lead(found, "wr_greedy")
    assert value - width > 0 and value == pytest.approx(
        4.0, abs=width + 1.2
    )  # the theory's 4.0 +- 1.2: intervals overlap
    assert lead(found, "wr_sampled")[0] < 0.2


def test_peaked_drafts_short_dbs_leads_under_both_decodings():
    found = trained("zipf2", "short", 150)
    assert lead(found, "wr_greedy")[0] > 0
    value, width = lead(found, "wr_sampled")
    assert value - width > 0 and value == pytest.approx(0.8, abs=width + 0.2)


def test_reward_behind_unlikely_drafts_reverses_the_order_under_every_metric():
    found = trained("tail", "long", 60)
    value, width = lead(found, "wr_greedy")
    assert value + width < 0 and value == pytest.approx(-7.2, abs=width + 1.5)
    assert lead(found, "wr_sampled")[0] == pytest.approx(-15.5, abs=1.5)
    assert found["dbs-2"]["gap"].mean().item() == pytest.approx(1.49, abs=0.06)
    assert found["mc-2"]["gap"].mean().item() == pytest.approx(0.08, abs=0.03)
    assert found["exact"]["gap"].max() < 0.01


def test_psi1_alone_finds_the_tail_with_two_draws_and_never_with_the_top_two():
    found = trained("tail", "long", 40, "psi1")
    rewards = [found[arm]["reward"].mean().item() for arm in ("dbs-2", "mc-2", "exact")]
    assert rewards == pytest.approx([0.53, 1.71, 1.71], abs=0.04)


def test_a_shared_refiner_shrinks_what_dbs_loses_but_not_to_nothing():
    own, shared = (lead(trained("zipf", "long", 60, v, ("dbs-2", "mc-2")), "wr_sampled") for v in ("", "shared"))
    assert own[0] < 3 * shared[0] < 0 and shared[0] + shared[1] < 0


# --- the run ----------------------------------------------------------------------------------------------------------------

QUICK = {"systems": 5, "draws": 4, "long_steps": 6, "long_sets": 2, "short_steps": 2, "laws": "tail,meanings"}


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    out = tmp_path_factory.mktemp("samplers") / "run"
    return runner.run("samplers", "toy", out, [0, 3], QUICK, say=lambda line: None), out


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("samplers") / "run"
    return runner.run("samplers", "toy", out, [0, 3], {**QUICK, "laws": "tail"}, say=lambda line: None), out


def test_every_row_has_the_systems_of_all_seeds_as_its_items(complete):
    summary, out = complete
    rows = {(row["system"], row["metric"]): row for row in summary["rows"]}
    assert {row["n"] for row in summary["rows"]} == {10}
    for metric in ("loss_error", "cosine_single", "cosine_mean", "bias", "variance"):
        assert ("gumbel-2[tail]", metric) in rows and ("mc-count-limit[meanings]", metric) in rows
    for metric in ("wr_greedy", "wr_sampled", "gap", "reward"):
        for name in ("dbs-2[tail,long]", "mc-5[meanings,short]", "exact[tail,long,shared]", "mc-2[tail,long,psi1]"):
            assert (name, metric) in rows
    records = runner.read_records(out / "records.jsonl")
    mine = [r["wr_greedy"] for r in records if r["system"] == "dbs-2[tail,long]"]
    assert rows["dbs-2[tail,long]", "wr_greedy"]["value"] == pytest.approx(sum(mine) / 10)


def test_systems_of_different_seeds_are_resampled_as_one_list(complete):
    summary, out = complete
    records = [r for r in runner.read_records(out / "records.jsonl") if r["system"] == "mc-2[tail]"]
    expected = evaluation.interval([[r["bias"] for r in sorted(records, key=lambda r: (r["seed"], r["item"]))]])
    row = evaluation.find_row(summary, "mc-2[tail]", "bias")
    assert (row["ci_low"], row["ci_high"]) == (expected.ci_low, expected.ci_high)
    assert "own" in summary["notes"]["intervals"]


def test_differences_are_the_comparisons_that_the_lesson_draws_and_no_others(complete):
    summary, _ = complete
    pairs = {(d["a"], d["b"]) for d in summary["differences"]}
    assert ("dbs-2[tail,long]", "mc-2[tail,long]") in pairs and ("gumbel-5[meanings]", "mc-count-5[meanings]") in pairs
    assert all(a[a.index("[") :] == b[b.index("[") :] for a, b in pairs)
    found = sampler_figures.differences(summary)["dbs-2[tail,short]", "mc-2[tail,short]", "reward"]
    values = [evaluation.find_row(summary, f"{arm}[tail,short]", "reward")["value"] for arm in ("dbs-2", "mc-2")]
    assert found["value"] == pytest.approx(values[0] - values[1])


def test_a_law_gives_the_same_numbers_whichever_others_run_beside_it(complete, alone):
    both = {(r["system"], r["metric"]): r for r in complete[0]["rows"]}
    assert len(alone[0]["rows"]) > 200
    assert all(row == both[row["system"], row["metric"]] for row in alone[0]["rows"])


def test_the_report_says_what_this_run_found(complete):
    summary, out = complete
    text = (out / "report.html").read_text(encoding="utf-8")
    value = evaluation.find_row(summary, "mc-2[tail]", "one_draft")["value"]
    assert f"{value:.0%} (best z behind unlikely y)" in text
    assert "DBS-2 minus MC-2 over 6 trainings" in text  # two laws, long and short; tail also shared and psi1 alone
    greedy = sampler_figures.orders(summary, "wr_greedy")
    assert f"Greedy: above 0 in {len(greedy['above'])}, below in {len(greedy['below'])}" in text
    names = {path.name for path in (out / "figures").iterdir()}
    assert names == {
        f"{n}.{kind}" for n in ("estimators", "win_rates_long", "win_rates_short", "order") for kind in ("png", "svg")
    }


def test_an_interrupted_run_is_resumed_to_the_same_result(alone, tmp_path):
    summary, out = alone
    again = tmp_path / "run"
    (again / "seed-0").mkdir(parents=True)
    for name in ("run.json", "seed-0/records.jsonl"):
        (again / name).write_bytes((out / name).read_bytes())
    options = {**QUICK, "laws": "tail"}
    resumed = runner.run("samplers", "toy", again, [0, 3], options, resume=True, say=lambda line: None)
    assert resumed["rows"] == summary["rows"] and resumed["differences"] == summary["differences"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"systems": 0}, "systems must be a whole number >= 1"),
        ({"draws": 0}, "draws must be a whole number >= 1"),
        ({"long_steps": 0}, "long_steps must be a whole number >= 1"),
        ({"short_sets": 0}, "short_sets must be a whole number >= 1"),
        ({"beta": 0.0}, "beta must be a number > 0"),
        ({"lr": -1.0}, "lr must be a number > 0"),
        ({"scale": 0.0}, "scale must be a number > 0"),
        ({"laws": "zipf,normal"}, "laws='normal'.*'zipf', 'zipf2'"),
        ({"laws": ""}, "laws=''"),
    ],
)
def test_settings_that_no_run_can_have_are_named(changes, words):
    with pytest.raises(errors.UnknownOptionError, match=words):
        samplers.check({**DEFAULTS, **changes})


# --- figures ------------------------------------------------------------------------------------------------------------------


def test_figures_show_the_numbers_that_the_summary_holds(complete):
    summary, _ = complete
    figure = sampler_figures.plot_estimators(summary, ("bias", "cosine_mean"), ("meanings",), ("mc", "gumbel"))
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["MC, repeats removed", "Gumbel top-k"]
    expected = [evaluation.find_row(summary, f"gumbel-{k}[meanings]", "bias")["value"] for k in SIZES]
    assert list(lines[1].get_xdata()) == list(SIZES) and list(lines[1].get_ydata()) == expected
    bars = sampler_figures.plot_win_rates(summary, ["tail,long"], ("dbs-2", "mc-2"), ("wr_sampled",)).axes[0].patches
    heights = [
        100 * evaluation.find_row(summary, f"{arm}[tail,long]", "wr_sampled")["value"] for arm in ("dbs-2", "mc-2")
    ]
    assert [bar.get_height() for bar in bars] == pytest.approx(heights)
    assert bars[0].get_hatch() != bars[1].get_hatch()  # colour is not the only difference


def test_the_order_figure_has_a_point_a_setting_and_decoding(complete):
    summary, _ = complete
    ax = sampler_figures.plot_order(summary, ["tail,long", "tail,short"]).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "best z behind unlikely y, short", "best z behind unlikely y, long",
    ]  # fmt: skip
    row = sampler_figures.differences(summary)["dbs-2[tail,long]", "mc-2[tail,long]", "wr_sampled"]
    points = [line.get_xdata()[0] for line in ax.get_lines() if len(line.get_xdata()) == 1]
    assert any(point == pytest.approx(100 * row["value"]) for point in points) and len(points) == 4


def test_unknown_metrics_are_named(complete):
    with pytest.raises(errors.UnknownOptionError, match="metric='skew'"):
        sampler_figures.plot_estimators(complete[0], ("skew",))


# --- the stored run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored():
    return results.load("samplers")


def test_the_stored_run_has_at_least_200_systems_and_the_profiles_settings(stored):
    assert stored["settings"] == DEFAULTS
    assert {row["n"] for row in stored["rows"]} == {258}
    assert json.dumps(stored).count("NaN") == 0


def test_the_stored_table_overlaps_the_theorys(stored):
    found = sampler_figures.cells(stored)
    for estimator, k, metric, expected, rounding in table():
        row = found[f"{estimator}-{k}[zipf]", metric]
        # the theory's interval over 200 systems is taken as wide as ours
        width = (row["ci_high"] - row["ci_low"]) * math.sqrt(258 / 200) / 2
        assert row["ci_low"] - width - rounding <= expected <= row["ci_high"] + width + rounding, (estimator, k, metric)


def test_in_the_stored_run_gumbel_beats_both_kinds_of_monte_carlo_everywhere(stored):
    assert sampler_figures.gumbel_wins(stored) == (120, 120)


def test_in_the_stored_run_the_order_reverses_where_the_theory_says(stored):
    greedy = sampler_figures.orders(stored, "wr_greedy")
    assert greedy["below"] == ["tail,long", "tail,long,shared", "tail,long,psi1"]
    assert greedy["open"] == ["head,long", "head,short"] and len(greedy["above"]) == 8
    assert sampler_figures.orders(stored, "wr_sampled")["above"] == ["zipf2,short"]


@pytest.mark.parametrize(
    ("setting", "greedy", "sampled"),
    [
        ("meanings,short", (4.0, 1.2), (-0.3, 0.2)),
        ("meanings,long", (0.6, 0.4), (-4.0, 0.3)),
        ("zipf2,short", (1.5, 0.7), (0.8, 0.2)),
        ("zipf,long", (0.4, 0.4), (-4.3, 0.3)),
        ("tail,long", (-7.2, 1.5), (-15.5, 0.3)),
    ],
)
def test_the_stored_differences_overlap_the_theorys_intervals(stored, setting, greedy, sampled):
    found = sampler_figures.differences(stored)
    for metric, (value, width) in (("wr_greedy", greedy), ("wr_sampled", sampled)):
        row = found[f"dbs-2[{setting}]", f"mc-2[{setting}]", metric]
        assert 100 * row["ci_low"] - 0.05 <= value + width and value - width <= 100 * row["ci_high"] + 0.05, metric


def test_the_card_says_how_the_stored_run_was_made():
    from sysdpo_lab import paths

    card = (paths.data_folder() / "results" / "samplers" / "CARD.md").read_text(encoding="utf-8")
    assert re.search(r"Command: `python -m sysdpo_lab run samplers --profile toy", card)
    assert "Left out for its size: `records.jsonl`" in card
