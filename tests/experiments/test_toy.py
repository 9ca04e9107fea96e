"""`run toy`: its numbers against plain enumeration, and what each row can and cannot reach."""

import itertools
import math

import pytest
import torch

from sysdpo_lab import errors, evaluation, exact, results
from sysdpo_lab.experiments import runner, toy
from sysdpo_lab.paths import data_folder
from sysdpo_lab.profiles import REGISTRY

DEFAULTS = dict(REGISTRY["toy", "toy"].settings)
PAIRS = list(itertools.combinations(range(4), 2))


def case_of(seed=0, inputs=2, beta=0.5):
    return toy.draw_case(torch.Generator().manual_seed(seed), inputs, 4, 4, beta)


def moved(case, seed=5, size=0.7):
    """The case with policy tables that differ from the start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in ("y", "z"):
            logits = case.system[name].logits
            logits += size * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
    return case


def tables(case, reference: bool):
    """p(y|x) and p(z|x,y) as nested lists."""
    return [case.system[name].probabilities(reference).tolist() for name in ("y", "z")]


def p_z(case, x, z, reference=False) -> float:
    y_table, z_table = tables(case, reference)
    return sum(y_table[x][y] * z_table[x][y][z] for y in range(4))


def log_ratio(case, x, z) -> float:
    return math.log(p_z(case, x, z) / p_z(case, x, z, reference=True))


def sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number))


def snapshot(case):
    return {name: case.system[name].logits.detach().clone() for name in ("y", "z")}


# --- the start ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [2, 3, 4])
def test_the_start_is_uniform_though_its_tables_are_not(outputs):
    case = toy.draw_case(torch.Generator().manual_seed(1), 3, outputs, outputs, 0.5)
    assert torch.allclose(exact.marginal(case.system), torch.full((3, outputs), 1 / outputs, dtype=torch.float64))
    assert case.system["z"].probabilities(False).std() > 0.05
    assert case.reward.shape == (3, outputs) and case.reward.dtype == torch.float64


def test_the_same_seed_gives_the_same_judge_and_another_another():
    assert torch.equal(case_of(3).reward, case_of(3).reward)
    assert not torch.equal(case_of(3).reward, case_of(4).reward)


def test_all_pairs_lists_each_comparison_once():
    x, i, j = toy.all_pairs(2, 4)
    assert list(zip(x.tolist(), i.tolist(), j.tolist())) == [(x, i, j) for x in range(2) for i, j in PAIRS]


# --- numbers against enumeration ----------------------------------------------------------------------------------------


def test_margins_are_those_of_the_enumerated_marginals():
    case = moved(case_of())
    margin, logit = toy.margins(case)
    expected = [0.5 * (log_ratio(case, x, i) - log_ratio(case, x, j)) for x in range(2) for i, j in PAIRS]
    assert margin.tolist() == pytest.approx(expected, abs=1e-12)
    judge = [float(case.reward[x, i] - case.reward[x, j]) for x in range(2) for i, j in PAIRS]
    assert logit.tolist() == pytest.approx(judge, abs=1e-12)


def test_the_population_loss_is_the_expectation_over_the_judges_choice():
    margin, logit = [0.3, -2.0], [1.0, -0.5]
    chosen = [sigmoid(number) for number in logit]
    terms = [-(p * math.log(sigmoid(m)) + (1 - p) * math.log(sigmoid(-m))) for m, p in zip(margin, chosen)]
    found = toy.population_loss(torch.tensor(margin, dtype=torch.float64), torch.tensor(logit, dtype=torch.float64))
    assert found.item() == pytest.approx(sum(terms) / 2, abs=1e-12)


def test_measured_numbers_are_those_of_plain_enumeration():
    case = moved(case_of(inputs=4))
    for system, found in enumerate(toy.measure(case, 2)):
        xs = (2 * system, 2 * system + 1)
        reward = case.reward.tolist()
        gaps = [
            abs(reward[x][i] - reward[x][j] - 0.5 * (log_ratio(case, x, i) - log_ratio(case, x, j)))
            for x in xs for i, j in PAIRS
        ]  # fmt: skip
        wins = [
            p_z(case, x, i) * p_z(case, x, j, reference=True) * sigmoid(reward[x][i] - reward[x][j])
            for x in xs for i in range(4) for j in range(4)
        ]  # fmt: skip
        kl = [p_z(case, x, z) * log_ratio(case, x, z) for x in xs for z in range(4)]
        right = [
            (reward[x][i] - reward[x][j]) * (log_ratio(case, x, i) - log_ratio(case, x, j)) > 0 for x in xs for i, j in PAIRS
        ]
        expected = {"gap": max(gaps), "wr_prompted": sum(wins) / 2, "kl": sum(kl) / 2, "margin_accuracy": sum(right) / 12}
        assert found == pytest.approx(expected, abs=1e-12)


def test_the_start_wins_half_and_has_no_margin():
    case = case_of()
    (found,) = toy.measure(case, 2)
    biggest = max(abs(float(case.reward[x, i] - case.reward[x, j])) for x in range(2) for i, j in PAIRS)
    assert found == pytest.approx({"gap": biggest, "wr_prompted": 0.5, "margin_accuracy": 0.5, "kl": 0.0}, abs=1e-12)


def test_the_separate_loss_is_the_sum_of_two_dpo_losses():
    case = moved(case_of())
    (y, z), (y_start, z_start) = tables(case, False), tables(case, True)
    refine, draft = [], []
    for x in range(2):
        for i, j in PAIRS:
            p = sigmoid(float(case.reward[x, i] - case.reward[x, j]))

            def expected_loss(gap, p=p):
                return -(p * math.log(sigmoid(0.5 * gap)) + (1 - p) * math.log(sigmoid(-0.5 * gap)))

            own = math.log(y[x][i] / y_start[x][i]) - math.log(y[x][j] / y_start[x][j])
            draft.append(expected_loss(own))
            gaps = [
                math.log(z[x][d][i] / z_start[x][d][i]) - math.log(z[x][d][j] / z_start[x][d][j]) for d in range(4)
            ]
            refine.append(sum(y_start[x][d] * expected_loss(gap) for d, gap in enumerate(gaps)))
    expected = sum(refine) / len(refine) + sum(draft) / len(draft)
    assert toy.separate_loss(case).item() == pytest.approx(expected, abs=1e-12)


def test_both_losses_begin_at_log_two_a_component():
    case = case_of()
    assert toy.population_loss(*toy.margins(case)).item() == pytest.approx(math.log(2), abs=1e-12)
    assert toy.separate_loss(case).item() == pytest.approx(2 * math.log(2), abs=1e-12)


# --- training -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "trained"), [("only:y", "y"), ("only:z", "z"), ("joint", "yz"), ("separate", "yz")])
def test_a_row_moves_its_own_tables_only(row, trained):
    case = case_of()
    before = snapshot(case)
    toy.train(case, row, steps=3, lr=0.1)
    assert {name for name, logits in snapshot(case).items() if not torch.equal(logits, before[name])} == set(trained)


def test_systems_trained_as_one_are_those_trained_alone():
    together = case_of(7, inputs=4)
    alone = [case_of(7, inputs=2), case_of(7, inputs=2)]
    for number, case in enumerate(alone):
        case.reward.copy_(together.reward[2 * number : 2 * number + 2])
        toy.train(case, "joint", steps=20, lr=0.1)
    toy.train(together, "joint", steps=20, lr=0.1)
    for name in ("y", "z"):
        parts = torch.cat([snapshot(case)[name] for case in alone])
        assert torch.allclose(snapshot(together)[name], parts, atol=1e-9), name
    records = [record for case in alone for record in toy.measure(case, 2)]
    for found, expected in zip(toy.measure(together, 2), records):
        assert found == pytest.approx(expected, abs=1e-9)


def test_joint_training_finds_the_tilted_marginal():
    case = case_of(2)
    toy.train(case, "joint", steps=300, lr=0.1)
    optimum = exact.tilted_marginal(case.system, case.reward, case.beta)
    assert torch.allclose(exact.marginal(case.system), optimum, atol=1e-3)


def test_an_unknown_row_is_named():
    with pytest.raises(errors.UnknownOptionError, match="row='only:x'.*'separate', 'only:y', 'only:z', 'joint'"):
        toy.train(case_of(), "only:x", 1, 0.1)


# --- the run ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    out = tmp_path_factory.mktemp("toy") / "run"
    summary = runner.run("toy", "toy", out, [0], {"systems": 3}, say=lambda line: None)
    assert (summary["settings"]["steps"], summary["settings"]["lr"], summary["settings"]["beta"]) == (300, 0.1, 0.5)
    return summary, out


def value(summary, system, metric):
    return evaluation.find_row(summary, system, metric)["value"]


def test_joint_reaches_the_optimum_and_only_y_and_separate_do_not(complete):
    summary, out = complete
    records = runner.read_records(out / "records.jsonl")
    gaps = {system: [r["gap"] for r in records if r["system"] == system] for system in toy.ROWS}
    assert max(gaps["joint"]) < 1e-3 and max(gaps["only:z"]) < 1e-3  # each system, not their mean
    assert min(gaps["only:y"]) > 0.5 and min(gaps["separate"]) > 0.1
    found = next(d for d in summary["differences"] if (d["a"], d["b"], d["metric"]) == ("joint", "only:y", "gap"))
    assert found["ci_high"] < 0
    assert value(summary, "joint", "margin_accuracy") == 1.0 == value(summary, "only:z", "margin_accuracy")
    assert value(summary, "joint", "wr_prompted") > value(summary, "only:y", "wr_prompted") > 0.5


def test_every_row_and_metric_is_reported_for_each_system_once(complete):
    summary, out = complete
    metrics = {"gap", "wr_prompted", "margin_accuracy", "kl"}
    assert {(r["system"], r["metric"], r["n"]) for r in summary["rows"]} == {(s, m, 3) for s in toy.ROWS for m in metrics}
    records = runner.read_records(out / "records.jsonl")
    assert sorted((r["system"], r["item"]) for r in records) == sorted((s, i) for s in toy.ROWS for i in range(3))
    rates = [r["value"] for r in summary["rows"] if r["metric"] in ("wr_prompted", "margin_accuracy")]
    assert all(0 <= rate <= 1 for rate in rates)


def test_the_report_shows_gap_win_rate_and_graph(complete):
    _, out = complete
    assert {p.name for p in (out / "figures").iterdir()} == {
        f"{name}.{kind}" for name in ("gap", "wr_prompted", "graph") for kind in ("png", "svg")
    }
    assert "only:y cannot" in (out / "report.html").read_text(encoding="utf-8")


# --- bad settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"systems": 0}, "systems must be a whole number >= 1"),
        ({"inputs": 0}, "inputs must be a whole number >= 1"),
        ({"steps": 0}, "steps must be a whole number >= 1"),
        ({"beta": 0.0}, "beta must be a number > 0"),
        ({"lr": -0.1}, "lr must be a number > 0"),
        ({"drafts": 3}, "drafts = 3 and outputs = 4 must be the same"),
        ({"drafts": 5, "outputs": 5}, "2 to 4"),
        ({"drafts": 1, "outputs": 1}, "2 to 4"),
    ],
)
def test_settings_that_no_run_can_have_are_named(changes, words):
    with pytest.raises(errors.UnknownOptionError, match=words):
        toy.check({**DEFAULTS, **changes})


# --- answer chains: the credit table ------------------------------------------------------------------------------------

CREDIT = {"family": "answer", "systems": 3, "inputs": 2, "drafts": 4, "outputs": 4, "lr": 0.05, "steps": 20}


@pytest.mark.parametrize("family", ["own-code", "answer", "blind"])
def test_measured_numbers_of_answer_chains_are_those_of_plain_enumeration(family):
    case = toy.make_case(torch.Generator().manual_seed(3), {**DEFAULTS, **CREDIT, "family": family})
    case = moved(case)
    for system, found in enumerate(toy.measure(case, 2)):
        expected = {"wr_prompted": 0.0, "wr_chosen": 0.0, "reward": 0.0, "kl": 0.0}
        gaps = []
        for x in range(2):
            policy, start = (answers_of(case, system, x, flag) for flag in (False, True))
            reward = case.reward[2 * system + x].tolist()
            total = sum(math.exp(2 * r) for r in reward)
            for i, j in itertools.product(range(4), repeat=2):
                beats = 0.5 if i == j else sigmoid(reward[i] - reward[j])
                expected["wr_prompted"] += policy[i] * start[j] * beats / 2
                expected["wr_chosen"] += policy[i] * math.exp(2 * reward[j]) / total * beats / 2
                ratio = math.log(policy[i] / start[i]) - math.log(policy[j] / start[j])
                gaps.append(abs(reward[i] - reward[j] - 0.5 * ratio))
            expected["reward"] += sum(p * r for p, r in zip(policy, reward)) / 2
            expected["kl"] += sum(p * math.log(p / q) for p, q in zip(policy, start)) / 2
        expected |= {"gap": max(gaps), "J": expected["reward"] - 0.5 * expected["kl"]}
        assert found == pytest.approx(expected, abs=1e-9)


def answers_of(case, system, x, reference):
    """p(z|x) of one system of a stack, by a loop over drafts."""
    y, z = (case.system[name].probabilities(reference).detach() for name in ("y", "z"))
    refiner = z[system, x] if z.dim() == 4 else z[system]
    return [sum((y[system, x, d] * refiner[d, answer]).item() for d in range(4)) for answer in range(4)]


@pytest.fixture(scope="module")
def credit(tmp_path_factory):
    out = tmp_path_factory.mktemp("credit") / "run"
    return runner.run("toy", "toy", out, [0], CREDIT, say=lambda line: None), out


def test_a_credit_run_reports_its_metrics_paired_differences_and_figures(credit):
    summary, out = credit
    metrics = {"gap", "wr_prompted", "kl", "wr_chosen", "J", "reward"}
    assert {(r["system"], r["metric"], r["n"]) for r in summary["rows"]} == {(s, m, 3) for s in toy.ROWS for m in metrics}
    assert {(d["a"], d["b"]) for d in summary["differences"]} >= {("joint", row) for row in toy.ROWS[:-1]}
    assert value(summary, "joint", "J") > value(summary, "separate", "J") > value(summary, "before", "J")
    assert {p.stem for p in (out / "figures").iterdir()} == {"gap", "wr_chosen", "graph"}
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "draft is an answer" in report and "only:y cannot" not in report


def test_the_default_family_is_the_ring_and_draws_what_it_always_drew():
    assert DEFAULTS["family"] == "ring"
    sizes = {key: DEFAULTS[key] for key in ("drafts", "outputs", "beta")}
    case = toy.make_case(torch.Generator().manual_seed(5), DEFAULTS)
    before = toy.draw_case(torch.Generator().manual_seed(5), DEFAULTS["systems"] * DEFAULTS["inputs"], **sizes)
    assert torch.equal(case.reward, before.reward) and case.system.inputs == ("x",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"family": "chain"}, "family='chain' does not exist; choose one of 'ring', 'own-code', 'answer', 'blind'"),
        ({**CREDIT, "drafts": 3}, "drafts = 3 and outputs = 4 must be the same number, 2 to 20"),
        ({**CREDIT, "drafts": 21, "outputs": 21}, "2 to 20"),
    ],
)
def test_bad_families_and_sizes_are_named(changes, words):
    with pytest.raises(errors.UnknownOptionError, match=words):
        toy.check({**DEFAULTS, **changes})


@pytest.mark.parametrize("family", ["own-code", "answer", "blind"])
def test_the_stored_credit_runs_are_of_sixty_systems_and_these_settings(family):
    for steps in (20, 60, 1500):
        summary = results.load(f"credit-{family}-{steps}")
        expected = {"family": family, "systems": 60, "inputs": 4, "drafts": 6, "outputs": 6, "lr": 0.05, "steps": steps}
        assert summary["settings"] == {**DEFAULTS, **expected}
        assert evaluation.find_row(summary, "joint", "wr_chosen")["n"] == 60


def test_a_stored_credit_run_can_be_repeated():
    """The first of the 60 stored systems' numbers come out again."""
    settings = results.load("credit-own-code-20")["settings"]
    folder = data_folder() / "results" / "credit-own-code-20"
    stored = [r for r in runner.read_records(folder / "records.jsonl") if r["system"] == "separate"]
    case = toy.make_case(torch.Generator().manual_seed(0), settings)
    toy.train(case, "separate", settings["steps"], settings["lr"])
    for found, record in zip(toy.measure(case, settings["inputs"]), stored, strict=True):
        assert found == pytest.approx({key: record[key] for key in found}, abs=1e-6)
