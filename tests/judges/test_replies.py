"""The store of replies: what was asked once is on disk, whatever happened to the process."""

import json

import pytest

from sysdpo_lab import errors
from sysdpo_lab.judges.replies import ReplyStore, key_of

QUESTION = [{"role": "user", "content": "A or B?"}]


def test_a_reply_survives_the_process(tmp_path):
    ReplyStore(tmp_path / "replies.jsonl").add("k", "[[A]] \u00e9\n", "m")
    again = ReplyStore(tmp_path / "replies.jsonl")
    assert "k" in again and again["k"] == "[[A]] \u00e9\n" and len(again) == 1


def test_a_half_written_line_costs_one_reply_and_no_other(tmp_path):
    path = tmp_path / "replies.jsonl"
    ReplyStore(path).add("one", "[[A]]")
    with path.open("a") as file:
        file.write('{"key": "two", "rep')
    with pytest.warns(errors.DamagedReplyWarning, match=r"1 unreadable lines .*line 2"):
        store = ReplyStore(path)
    store.add("three", "[[B]]")
    with pytest.warns(errors.DamagedReplyWarning):
        again = ReplyStore(path)
    assert {key: again[key] for key in ("one", "three")} == {"one": "[[A]]", "three": "[[B]]"} and "two" not in again


def test_two_processes_may_append_to_one_file(tmp_path):
    path = tmp_path / "replies.jsonl"
    first, second = ReplyStore(path), ReplyStore(path)
    first.add("one", "a")
    second.add("two", "b")
    assert sorted(json.loads(line)["key"] for line in path.read_text().splitlines()) == ["one", "two"]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ReplyStore().add("k", "r")
    assert list(tmp_path.iterdir()) == []


def test_the_key_depends_on_model_order_and_every_word():
    keys = {
        key_of(model, messages)
        for model in ("m, greedy", "m, temperature 1")
        for messages in (QUESTION, QUESTION[::-1] + QUESTION, [{"role": "user", "content": "B or A?"}])
    }
    assert len(keys) == 6 and key_of("m", QUESTION) == key_of("m", [dict(reversed(QUESTION[0].items()))])


def test_a_folder_in_its_place_is_a_named_error(tmp_path):
    with pytest.raises(errors.ReplyStoreError, match="cannot be used"):
        ReplyStore(tmp_path)
