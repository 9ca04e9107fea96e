"""Stored results: what is kept, what is refused."""

import json

import pytest

from sysdpo_lab import errors, results

SUMMARY = {
    "experiment": "toy", "profile": "toy", "seeds": [0, 1], "seconds": 3.0, "peak_memory_mb": 10.0, "command": "python -m ...",
    "versions": {"torch": "2"}, "notes": {"dtype": "float32"},
    "rows": [{"system": "joint", "metric": "gap", "value": 0.5, "ci_low": 0.25, "ci_high": 0.75, "n": 4}],
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "seed-0" / "joint" / "checkpoints").mkdir(parents=True)
    (folder / "figures").mkdir()
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "records.jsonl").write_text('{"item": 0}\n')
    (folder / "seed-0" / "joint" / "history.jsonl").write_text('{"step": 1}\n')
    (folder / "seed-0" / "joint" / "checkpoints" / "big.safetensors").write_bytes(b"0" * 1000)
    (folder / "figures" / "gap.png").write_bytes(b"png")
    return folder


def test_a_stored_run_keeps_summary_records_histories_and_pictures_but_no_weights(run, tmp_path):
    target = results.store(run, "toy", tmp_path / "results")
    kept = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert kept == ["CARD.md", "figures/gap.png", "histories/seed-0-joint.jsonl", "records.jsonl", "summary.json"]
    assert results.load("toy", tmp_path / "results") == SUMMARY
    card = (target / "CARD.md").read_text()
    assert "| joint | gap | 0.500 | [0.250, 0.750] | 4 |" in card and "python -m ..." in card and "0, 1" in card


def test_storing_again_replaces_the_older_result_as_a_whole(run, tmp_path):
    target = results.store(run, "toy", tmp_path / "results")
    (target / "leftover").write_text("old")
    results.store(run, "toy", tmp_path / "results")
    assert not (target / "leftover").exists()


def test_item_records_too_large_to_keep_stay_behind_and_the_card_says_so(run, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "LARGEST", 5)
    (run / "records.jsonl").write_text('{"a": 1}')
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    target = results.store(run, "toy", tmp_path / "results")
    assert not (target / "records.jsonl").exists() and (target / "summary.json").is_file()
    assert "Left out for its size: `records.jsonl`" in (target / "CARD.md").read_text()


def test_an_unfinished_run_is_refused(run, tmp_path):
    (run / "summary.json").unlink()
    with pytest.raises(errors.ResumeError, match="--resume"):
        results.store(run, "toy", tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_an_unknown_result_names_the_known_ones(run, tmp_path):
    results.store(run, "toy", tmp_path / "results")
    with pytest.raises(errors.MissingFileError, match="there are \\['toy'\\]"):
        results.load("toys", tmp_path / "results")
