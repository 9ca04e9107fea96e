"""`run three-llm --profile tiny`, very short, and `run two-llm` on the other worlds: every row, resume, adapters, the edge."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from sysdpo_lab import CompoundSystem, errors, evaluation
from sysdpo_lab.experiments import runner
from sysdpo_lab.experiments.three_llm import EXPERIMENT
from sysdpo_lab.profiles import REGISTRY
from sysdpo_lab.worlds import registry, restaurants

SHORT = {
    "pairs": 6, "heldout": 3, "steps": 2, "batch": 2, "warmup": 0, "max_new_tokens": 12, "candidates": 3, "best_of": 2,
    "checkpoint_every": 1, "min_gap": 0.0,
}  # fmt: skip
ANSWERERS = {"answer1", "answer2"}
TRAINED = {
    "separate": {*ANSWERERS, "merge"}, "only:answer1": {"answer1"}, "only:answer2": {"answer2"}, "only:merge": {"merge"},
    "direct": {*ANSWERERS, "merge"}, "direct-edge": {*ANSWERERS, "merge"}, "joint": {*ANSWERERS, "merge"},
}  # fmt: skip
TINY = REGISTRY["three-llm", "tiny"]
FEW = {**SHORT, "rows": "prompted,direct,joint"}


def silent(line: str) -> None:
    pass


def run(out, changes, seeds=(0,), experiment="three-llm", **options):
    return runner.run(experiment, "tiny", out, seeds, changes, say=silent, **options)


def context_of(out, **changes):
    return runner.Context(TINY, TINY.with_settings({**SHORT, **changes}), out, say=silent)


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A run with every row."""
    out = tmp_path_factory.mktemp("three-llm") / "run"
    return run(out, {**SHORT, "rows": "all", "probe": True}), out


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """The starts, saved, without and with the edge: {component: tensors of its adapter}."""
    folder = tmp_path_factory.mktemp("untrained")
    for edge in (False, True):
        EXPERIMENT.build_system(context_of(folder), edge).save(folder / str(edge))
    return {edge: adapters_in(folder / str(edge)) for edge in (False, True)}


def adapters_in(system_folder):
    found = {name: next(system_folder.glob(f"components/*_{name}")) for name in EXPERIMENT.nodes}
    return {name: load_file(folder / "adapter_model.safetensors") for name, folder in found.items()}


def system_folder(out, row):
    return out / "seed-0" / row.replace(":", "-") / "system"


def equal(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def records_of(out, row):
    return [record for record in runner.read_records(out / "records.jsonl") if record["system"] == row]


# --- the table ----------------------------------------------------------------------------------------------------------


def test_the_table_has_every_row_in_order_and_each_reports_what_it_can(complete):
    summary, _ = complete
    assert list(dict.fromkeys(row["system"] for row in summary["rows"])) == list(EXPERIMENT.rows)
    assert EXPERIMENT.rows == (
        "prompted", "best-of-n", "separate", "only:answer1", "only:answer2", "only:merge", "direct", "prompted-edge",
        "direct-edge", "joint",
    )  # fmt: skip
    found = {system: {r["metric"] for r in summary["rows"] if r["system"] == system} for system in EXPERIMENT.rows}
    measured = {"wr_chosen", "task_score", "validity", "words", "answer1_score", "answer2_score"}
    probed = {"kl", "distinct_2", "self_bleu"}
    assert found["prompted"] == measured | probed and found["best-of-n"] == measured | {"wr_prompted"}
    assert found["prompted-edge"] == measured | probed | {"wr_prompted"}
    for row in TRAINED:
        assert found[row] == set(EXPERIMENT.METRICS), row


def test_every_win_rate_is_against_the_same_start_and_so_is_that_of_the_edge(complete):
    _, out = complete
    start = {record["item"]: record for record in records_of(out, "prompted")}
    for row in EXPERIMENT.rows[1:]:
        for record in records_of(out, row):
            facts = restaurants.parse(record["x"])
            scores = [
                restaurants.judge(facts, text).score for text in (record["merge"], start[record["item"]]["merge"])
            ]
            assert record["wr_prompted"] == evaluation.win(*scores) and record["task_score"] == scores[0]


def test_the_report_explains_the_rows_of_whole_traces(complete):
    page = (complete[1] / "report.html").read_text(encoding="utf-8")
    assert "SysDPO-Direct on the sampled traces" in page and "prompted-edge: its start" in page


# --- what is trained ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TRAINED)
def test_a_row_changes_its_own_adapters_and_leaves_the_frozen_ones_bit_for_bit(complete, untrained, row):
    found, start = adapters_in(system_folder(complete[1], row)), untrained[row == "direct-edge"]
    assert {name for name in EXPERIMENT.nodes if not equal(found[name], start[name])} == TRAINED[row]


@pytest.mark.parametrize("row", TRAINED)
def test_the_loss_begins_at_log_2_and_there_is_something_to_learn(complete, row):
    history = runner.read_records(system_folder(complete[1], row).parent / "history.jsonl")
    losses = len(EXPERIMENT.nodes) if row == "separate" else 1
    assert history[0]["loss"] == pytest.approx(losses * 0.6931, abs=2e-3) and history[0]["grad_norm_total"] > 0
    assert set(history[0]["trained"]) == TRAINED[row]


@pytest.mark.parametrize("row", ["joint", "direct-edge"])
def test_the_saved_system_generates_the_recorded_answers(complete, row):
    system = CompoundSystem.load(system_folder(complete[1], row))
    found = records_of(complete[1], row)
    trace = system.generate({"x": [record["x"] for record in found]})
    for name in EXPERIMENT.nodes:
        assert [answer.text for answer in trace[name]] == [record[name] for record in found]


def test_joint_training_draws_joint_assignments_of_both_answers(tmp_path):
    """k = 2 pairs (answer1, answer2), not 2 x 2: assignment j takes group j of each search."""
    context = context_of(tmp_path)
    system = EXPERIMENT.build_system(context)
    x = {"x": [pair.inputs["x"] for pair in restaurants.stored_pairs("heldout")[:2]]}
    sets = EXPERIMENT.objective_of(context, "joint").sampler(system, x, 2, generator=torch.Generator().manual_seed(0))
    assert set(sets.values) == ANSWERERS
    assert all([len(row) for row in batch] == [2, 2] for batch in sets.values.values())
    assert sets.log_probs.shape == (2, 2)


# --- the edge -----------------------------------------------------------------------------------------------------------


def test_with_the_edge_the_second_answer_depends_on_the_first_and_without_it_does_not(tmp_path):
    context = context_of(tmp_path)
    plain, seeing = EXPERIMENT.build_system(context), EXPERIMENT.build_system(context, edge=True)
    assert (plain["answer2"].parents, seeing["answer2"].parents) == (("x",), ("x", "answer1"))
    x, said = [restaurants.stored_pairs("heldout")[0].inputs["x"]], ["Old Mill is a restaurant."]
    with torch.no_grad():
        one, other = (
            seeing["answer2"].log_prob(said, {"x": x, "answer1": [a]}).item() for a in ("Old Mill is cheap.", "Old")
        )
    assert one != other


def test_direct_trains_on_the_same_comparisons_as_sampling(complete):
    _, out = complete
    context = context_of(out)
    traces, finals = EXPERIMENT.training_traces(context, 0), EXPERIMENT.training_pairs(context, 0)
    assert len(traces) == len(finals) > 0
    for trace, final in zip(traces, finals):
        assert trace.inputs == final.inputs and set(trace.chosen) == {"x", *EXPERIMENT.nodes}
        assert (trace.chosen["merge"], trace.rejected["merge"]) == (final.chosen, final.rejected)


def test_rows_of_whole_traces_need_pairs_of_the_systems_own():
    with pytest.raises(errors.UnknownOptionError, match="whole traces"):
        EXPERIMENT.check({**TINY.settings, "data": "written", "rows": "prompted,direct"})


# --- resume -------------------------------------------------------------------------------------------------------------

KILLED_IN_STEP_2 = """
import json, os, signal, sys
from sysdpo_lab import training
from sysdpo_lab.experiments import runner

train = training.train

def dies(*arguments, **options):
    def on_step(record):
        if record["step"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return train(*arguments, **options, on_step=on_step)

training.train = dies
runner.run("three-llm", "tiny", sys.argv[1], (0,), json.loads(sys.argv[2]), say=lambda line: None)
"""


def test_a_run_killed_in_the_middle_of_direct_and_resumed_ends_the_same(complete, tmp_path):
    _, whole = complete
    out, changes = tmp_path / "run", {**FEW, "probe": True}
    command = [sys.executable, "-c", KILLED_IN_STEP_2, str(out), json.dumps(changes)]
    died = subprocess.run(command, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    run(out, changes, resume=True)
    expected = [record for row in ("prompted", "direct", "joint") for record in records_of(whole, row)]
    assert runner.read_records(out / "records.jsonl") == expected


# --- other worlds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", ["arithmetic", "passages"])
@pytest.mark.parametrize("experiment", ["two-llm", "three-llm"])
def test_both_systems_run_on_the_other_worlds(tmp_path, world, experiment):
    summary = run(tmp_path / "run", {**SHORT, "world": world, "rows": "prompted,joint"}, experiment=experiment)
    assert {row["system"] for row in summary["rows"]} == {"prompted", "joint"}
    module, output = registry.find(world), runner.experiment_of(experiment).output
    for record in records_of(tmp_path / "run", "joint"):
        assert record["task_score"] == module.judge(module.parse(record["x"]), record[output]).score
