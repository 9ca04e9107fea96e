"""The world of Intel/orca_dpo_pairs from a file of the same schema: splits, prompts, named errors."""

import json

import pytest
import torch

from sysdpo_lab import errors
from sysdpo_lab.worlds import orca, registry


def rows(n):
    return [
        {
            "system": "Be exact." if i % 2 else "",
            "question": f"What is {i} + 1?",
            "chosen": f"It is {i + 1}.",
            "rejected": f"It is {i}.",
        }
        for i in range(n)
    ]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "orca_rlhf.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(40)))
    return tmp_path


def questions(pairs):
    return [pair.inputs["x"][-1]["content"] for pair in pairs]


def test_splits_share_no_question_and_do_not_depend_on_the_order_of_the_file(folder, tmp_path):
    world = orca.Orca(str(folder))
    splits = {split: questions(world.stored_pairs(split)) for split in orca.STORED}
    assert {split: len(found) for split, found in splits.items()} == {"heldout": 10, "validation": 10, "train": 20}
    assert len({question for found in splits.values() for question in found}) == 40
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows(40))))
    assert questions(orca.Orca(str(tmp_path / "again")).stored_pairs("heldout")) == splits["heldout"]


def test_193_are_held_out_of_a_file_that_is_large_enough(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(800)))
    assert len(orca.Orca(str(path)).stored_pairs("heldout")) == 193


def test_training_pairs_are_drawn_from_the_training_split_without_repeats(folder):
    world = orca.Orca(str(folder))
    drawn = questions(world.preference_pairs(8, torch.Generator().manual_seed(0)))
    assert len(set(drawn)) == 8 and set(drawn) <= set(questions(world.stored_pairs("train")))
    assert drawn != questions(world.preference_pairs(8, torch.Generator().manual_seed(1)))
    assert len(world.preference_pairs(1000, torch.Generator())) == 20


def test_long_answers_are_left_out_of_training_alone(folder):
    every, short = orca.Orca(str(folder)), orca.Orca(str(folder), longest=len("It is 1."))
    assert questions(short.stored_pairs("heldout")) == questions(every.stored_pairs("heldout"))
    kept = questions(short.stored_pairs("train"))
    assert kept == [
        q for q in questions(every.stored_pairs("train")) if len(q) == len("What is 1 + 1?") and "9" not in q
    ]
    assert 0 < len(kept) < len(every.stored_pairs("train"))
    settings = {"dataset": str(folder), "dataset_revision": "", "longest": len("It is 1.")}
    assert questions(orca.opened(settings).stored_pairs("train")) == kept


def test_prompts_keep_the_system_message_and_show_the_drafts():
    x = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})
    refine = orca.refine(x, "Because.")
    assert (
        refine[0] == {"role": "system", "content": "Be brief."}
        and "Why?" in refine[1]["content"]
        and "Because." in refine[1]["content"]
    )
    merge = orca.merge(x, "One.", "Two.")
    assert all(part in merge[1]["content"] for part in ("Why?", "One.", "Two.")) and len(merge) == 2
    assert "One." in orca.second_answer("Why?", "One.")[0]["content"]


def test_no_network_is_a_named_error_that_says_how_to_go_on(monkeypatch):
    def offline(*args, **options):
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(errors.MissingFileError, match="--set dataset=FOLDER"):
        orca.Orca()


def test_a_missing_or_ambiguous_source_is_named(tmp_path):
    with pytest.raises(errors.MissingFileError, match="no such file"):
        orca.Orca(str(tmp_path / "nothing"))
    with pytest.raises(errors.MissingFileError, match=r"expected one \*.jsonl file, found \[\]"):
        orca.Orca(str(tmp_path))


def test_the_registry_knows_that_it_has_no_exact_judge(folder):
    assert not registry.has_exact_judge("orca") and registry.has_exact_judge("restaurants")
    world = registry.opened({"world": "orca", "dataset": str(folder), "dataset_revision": ""})
    assert isinstance(world, orca.Orca)
