"""The paper profile's own code on tiny random models of its architecture, saved to folders: loaders, judge, resume."""

import json

import pytest
import torch

from sysdpo_lab import CompoundSystem, errors, training
from sysdpo_lab.experiments import runner
from sysdpo_lab.profiles import REGISTRY
from tests import tiny

EXPERIMENTS = [name for name in ("two-llm", "three-llm") if (name, "paper") in REGISTRY]


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny Qwen2 with a byte-level tokenizer without BOS and with a chat template, and pairs in Intel's schema."""
    place = tmp_path_factory.mktemp("paper")
    for name, seed in (("model", 0), ("judge", 1)):
        tiny.model("qwen2", seed, max_position_embeddings=1024).save_pretrained(place / name)
        tiny.tokenizer(chat=True).save_pretrained(place / name)
    (place / "data").mkdir()
    rows = [
        {"system": "the abc" if i % 2 else "", "question": f"the {i}?", "chosen": f"the abc {i}", "rejected": f"ab {i}"}
        for i in range(40)
    ]
    (place / "data" / "orca_rlhf.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def changes(folders, **more):
    return {
        "model": str(folders / "model"), "dataset": str(folders / "data"), "judge": f"local:{folders / 'judge'}",
        "dtype": "float32",
        "pairs": 6, "heldout": 3, "steps": 3, "batch": 2, "warmup": 0, "max_new_tokens": 6, "checkpoint_every": 1, "rank": 2,
        "lr": 1e-2, **more,
    }  # fmt: skip


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_paper_profile_runs_every_row_on_a_tiny_model_of_its_architecture(folders, tmp_path, experiment):
    summary = runner.run(experiment, "paper", tmp_path / "run", (0,), changes(folders), say=silent)
    rows = REGISTRY[experiment, "paper"].settings["rows"].split(",")
    assert list(dict.fromkeys(row["system"] for row in summary["rows"])) == rows
    found = {row["metric"] for row in summary["rows"] if row["system"] == "joint"}
    assert found >= {"wr_chosen", "wr_prompted", "words", "validity", "margin_accuracy"} and "task_score" not in found
    judge = json.loads(summary["notes"]["judge"])
    assert judge["asked"] > 0 and judge["compared"] > 0 and str(folders / "model") in summary["notes"]["model"]
    assert (tmp_path / "run" / "judge.jsonl").is_file() and (tmp_path / "run" / "report.html").is_file()
    system = CompoundSystem.load(tmp_path / "run" / "seed-0" / "joint" / "system")
    (answer,) = system.generate({"x": ["the abc?"]})[system.output]
    assert answer.token_ids


def test_a_run_stopped_in_the_middle_goes_on_to_the_same_weights_and_asks_the_judge_nothing_twice(
    folders, tmp_path, monkeypatch
):
    settings = changes(folders, rows="prompted,joint")
    whole = runner.run("two-llm", "paper", tmp_path / "whole", (0,), settings, say=silent)
    train = training.train

    def stops(*arguments, **options):
        def on_step(record):
            if record["step"] == 2:
                raise KeyboardInterrupt

        return train(*arguments, **options, on_step=on_step)

    with monkeypatch.context() as patch:
        patch.setattr(training, "train", stops)
        with pytest.raises(KeyboardInterrupt):
            runner.run("two-llm", "paper", tmp_path / "cut", (0,), settings, say=silent)
    again = runner.run("two-llm", "paper", tmp_path / "cut", (0,), settings, resume=True, say=silent)
    assert again["rows"] == whole["rows"]
    systems = [CompoundSystem.load(tmp_path / place / "seed-0" / "joint" / "system") for place in ("whole", "cut")]
    for one, other in zip(*(system.trainable_parameters() for system in systems)):
        assert torch.equal(one, other)
    lines = (tmp_path / "cut" / "judge.jsonl").read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    assert len(keys) == len(set(keys)) == len((tmp_path / "whole" / "judge.jsonl").read_text().splitlines())


def test_micro_batches_with_checkpointing_train_to_the_weights_of_one_batch(folders, tmp_path):
    """What fits a large model into memory must change nothing but the memory."""
    assert REGISTRY["two-llm", "paper"].settings["checkpointing"] and REGISTRY["two-llm", "paper"].settings["accumulate"] > 1
    ways = {
        "parts": {"batch": 1, "accumulate": 2, "checkpointing": True},
        "whole": {"batch": 2, "accumulate": 1, "checkpointing": False},
    }
    trained = {}
    for name, way in ways.items():
        runner.run("two-llm", "paper", tmp_path / name, (0,), changes(folders, rows="prompted,joint", **way), say=silent)
        trained[name] = CompoundSystem.load(tmp_path / name / "seed-0" / "joint" / "system").trainable_parameters()
    for one, other in zip(trained["parts"], trained["whole"]):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_without_a_network_the_paper_profile_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(errors.MissingFileError, match="needs a network"):
        runner.run("two-llm", "paper", tmp_path / "run", (0,), {"judge": "similarity"}, say=silent)


def test_the_similarity_judge_compares_with_the_chosen_answers(folders, tmp_path):
    settings = changes(folders, judge="similarity", rows="prompted")
    summary = runner.run("two-llm", "paper", tmp_path / "run", (0,), settings, say=silent)
    assert {row["metric"] for row in summary["rows"]} == {"wr_chosen", "words", "validity"}
