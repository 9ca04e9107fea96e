"""Preference pairs: what is refused, how pairs become batches, and what each line of a file turns into."""

import json

import pytest
import torch

from sysdpo_lab import errors, preferences
from sysdpo_lab.components.completion import Completion
from sysdpo_lab.preferences import Pair, Pairs, as_pairs, collate


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write(path, *rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


GOOD = {"prompt": "q", "chosen": "a", "rejected": "b"}


# --- batches ----------------------------------------------------------------------------------------------------------


def test_whole_numbers_become_a_long_tensor_and_everything_else_a_list():
    assert torch.equal(collate([1, torch.tensor(2)]), torch.tensor([1, 2]))
    assert collate([1, 2]).dtype == torch.int64
    assert collate(["a", "b"]) == ["a", "b"]
    assert collate([True, False]) == [True, False]
    assert collate([1, None]) == [1, None]
    images = [torch.zeros(2, 3, 4, 4), torch.zeros(3, 3, 4, 4)]
    assert collate(images) == images
    assert collate([]) == []


def test_a_batch_holds_the_asked_pairs_in_the_asked_order():
    pairs = Pairs.from_finals({"x": torch.tensor([0, 1, 2])}, torch.tensor([3, 4, 5]), torch.tensor([6, 7, 8]))
    batch = pairs.batch([2, 0])
    assert batch.inputs["x"].tolist() == [2, 0] and batch.rows == [2, 0] and len(batch) == 2
    assert batch.chosen.tolist() == [5, 3] and batch.rejected.tolist() == [8, 6]


def test_the_same_batch_twice_is_equal_and_leaves_the_pairs_alone():
    pairs = Pairs.from_finals({"x": ["p", "q"]}, ["a", "b"], ["c", "d"])
    first = pairs.batch([0, 1])
    first.chosen[0] = "changed"
    assert pairs.batch([0, 1]).chosen == ["a", "b"] and pairs[0].chosen == "a"


def test_traces_collate_variable_by_variable_with_their_inputs():
    chosen = {"x": torch.tensor([0, 1]), "y": ["u", "v"], "z": torch.tensor([1, 0])}
    rejected = {"x": torch.tensor([0, 1]), "y": ["u", "w"], "z": torch.tensor([2, 2])}
    batch = Pairs.from_traces(chosen, rejected).batch([1])
    assert batch.is_trace and batch.inputs["x"].tolist() == [1]
    assert batch.chosen["y"] == ["v"] and batch.rejected["z"].tolist() == [2] and batch.chosen["x"].tolist() == [1]


def test_traces_may_leave_the_inputs_out():
    batch = Pairs([Pair({"x": 4}, {"z": 1}, {"z": 2})]).batch([0])
    assert batch.chosen["x"].tolist() == [4] and batch.rejected["z"].tolist() == [2]


def test_a_slice_is_pairs_and_an_index_a_pair():
    pairs = as_pairs([{"x": i, "chosen": 1, "rejected": 2} for i in range(5)])
    assert isinstance(pairs[1:3], Pairs) and [pair.inputs["x"] for pair in pairs[1:3]] == [1, 2]
    assert pairs[-1].inputs == {"x": 4}
    assert [pair.inputs["x"] for pair in pairs.select(torch.tensor([3, 0]))] == [3, 0]


@pytest.mark.parametrize(
    "data",
    [
        [{"x": 0, "chosen": 1, "rejected": 2}],
        [Pair({"x": 0}, 1, 2)],
        {"x": torch.tensor([0]), "chosen": torch.tensor([1]), "rejected": torch.tensor([2])},
        Pairs([Pair({"x": 0}, 1, 2)]),
    ],
)
def test_every_way_to_hold_preferences_gives_the_same_pairs(data):
    assert list(as_pairs(data)) == [Pair({"x": 0}, 1, 2)]


def test_rows_of_whole_traces_find_their_inputs_inside_the_traces():
    (pair,) = as_pairs([{"chosen": {"x": 1, "z": 2}, "rejected": {"x": 1, "z": 3}, "score": 4}])
    assert pair.inputs == {"x": 1} and pair.meta == {"score": 4} and pair.is_trace


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pair, error",
    [
        (Pair({"x": "q"}, "a", "  "), errors.EmptyAnswerError),
        (Pair({"x": "q"}, None, "a"), errors.EmptyAnswerError),
        (Pair({"x": "q"}, Completion("", ()), "a"), errors.EmptyAnswerError),
        (Pair({"x": "q"}, {"y": "", "z": "a"}, {"y": "b", "z": "a"}), errors.EmptyAnswerError),
        (Pair({"x": "q"}, "a", "a "), errors.IdenticalPairError),
        (Pair({"x": "q"}, Completion("a", (5, 2)), Completion("a ", (5, 2))), errors.IdenticalPairError),
        (Pair({"x": 0}, {"y": 1, "z": 2}, {"x": 0, "y": 1, "z": 2}), errors.IdenticalPairError),
        (Pair({"x": 0}, torch.ones(1, 3, 2, 2), torch.ones(1, 3, 2, 2)), errors.IdenticalPairError),
        (Pair({"x": 0}, torch.tensor([1.0, float("nan")]), torch.zeros(2)), errors.NonFiniteError),
        (Pair({"x": torch.tensor([float("inf")])}, 1, 2), errors.NonFiniteError),
        (Pair({"x": 0}, {"x": 0, "z": 1}, {"x": 1, "z": 2}), errors.InputMismatchError),
        (Pair({"x": 0}, {"z": 1}, 2), errors.PairFormatError),
        (Pair({"x": 0}, {"y": 1, "z": 1}, {"z": 2}), errors.PairFormatError),
        ({"x": 0, "chosen": 1, "rejected": 2}, errors.PairFormatError),
    ],
)
def test_a_bad_pair_is_refused_with_its_row_and_source(pair, error):
    good = (
        Pair({"x": "q"}, {"y": "b", "z": "a"}, {"y": "c", "z": "a"}) if getattr(pair, "is_trace", False) else GOOD_PAIR
    )
    with pytest.raises(error, match="mine, row 1"):
        Pairs([good, pair], source="mine")


GOOD_PAIR = Pair({"x": "q"}, "a", "b")


def test_completions_with_other_tokens_but_the_same_text_differ():
    pairs = Pairs([Pair({"x": "q"}, Completion("a", (5, 2)), Completion("a", (6, 2)))])
    assert len(pairs) == 1


def test_an_answer_of_eos_alone_is_an_answer():
    assert len(Pairs([Pair({"x": "q"}, "a", Completion("", (2,)))])) == 1


def test_a_tool_may_return_an_empty_text_when_named():
    row = Pair({"x": "q"}, {"result": "", "z": "a"}, {"result": "1", "z": "b"})
    assert len(Pairs([row], may_be_empty=["result"])) == 1


def test_batches_of_different_lengths_are_refused():
    with pytest.raises(errors.BatchMismatchError, match="'chosen': 1"):
        Pairs.from_finals({"x": ["a", "b"]}, ["c"], ["d", "e"])
    with pytest.raises(errors.BatchMismatchError, match="rejected z"):
        Pairs.from_traces({"x": [0, 1], "z": [1, 1]}, {"x": [0, 1], "z": [2]})


def test_traces_of_different_inputs_are_refused_with_the_row():
    with pytest.raises(errors.InputMismatchError, match="row 1: input 'x'"):
        Pairs.from_traces({"x": [0, 1], "z": [1, 1]}, {"x": [0, 2], "z": [2, 2]})


def test_a_missing_input_or_side_is_named():
    with pytest.raises(errors.PairFormatError, match="row 0: 'rejected' is missing"):
        as_pairs([{"x": 0, "chosen": 1}])
    with pytest.raises(errors.PairFormatError, match="'question' is missing"):
        as_pairs([{"x": 0, "chosen": 1, "rejected": 2}], inputs=("question",))
    with pytest.raises(errors.PairFormatError, match="preferences.load"):
        as_pairs("pairs.jsonl")


def test_rows_with_other_variables_than_row_0_are_refused():
    with pytest.raises(errors.PairFormatError, match="row 1"):
        Pairs([Pair({"x": 0}, 1, 2), Pair({"u": 0}, 1, 2)])


# --- schemas ----------------------------------------------------------------------------------------------------------

CONVERSATION = (user("q"),)


@pytest.mark.parametrize(
    "row, schema, x",
    [
        (GOOD, "trl-plain", "q"),
        (
            {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
            "trl-conversational",
            CONVERSATION,
        ),
        ({"prompt": [user("q")], "chosen": "a", "rejected": "b"}, "trl-conversational", CONVERSATION),
        (
            {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
            "trl-implicit-prompt",
            CONVERSATION,
        ),
        (
            {"prompt": "q", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
            "trl-implicit-prompt",
            CONVERSATION,
        ),
        ({"system": "", "question": "q", "chosen": "a", "rejected": "b"}, "intel-orca", CONVERSATION),
        (
            {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
            "intel-orca",
            ({"role": "system", "content": "s"}, user("q")),
        ),
    ],
)
def test_each_schema_gives_the_same_answers_and_its_own_input(tmp_path, row, schema, x):
    pairs, report = preferences.load(write(tmp_path / "p.jsonl", {**row, "score": 3}))
    assert list(pairs) == [Pair({"x": x}, "a", "b", {"score": 3})]
    assert report.schema == schema and report.kept == 1 and report.dropped == []


def test_earlier_turns_stay_in_the_input(tmp_path):
    shared = [user("q"), assistant("r"), user("s")]
    row = {"chosen": [*shared, assistant("a")], "rejected": [*shared, assistant("b")]}
    pairs, _ = preferences.load(write(tmp_path / "p.jsonl", row))
    assert pairs[0].inputs["x"] == tuple(shared)


@pytest.mark.parametrize("prompt", ["q", [user("q")], [{"role": "system", "content": "s"}, user("q")]])
def test_a_system_column_is_the_system_message_in_every_schema(tmp_path, prompt):
    rows = [{"system": "s", "prompt": prompt, "chosen": "a", "rejected": "b"}]
    rows.append({"system": "s", "question": "p", "chosen": [assistant("a")], "rejected": [user("p"), assistant("b")]})
    pairs, report = preferences.load(write(tmp_path / "p.jsonl", *rows))
    asked = [({"role": "system", "content": "s"}, user(question)) for question in "qp"]
    assert [pair.inputs["x"] for pair in pairs] == asked and report.dropped == []
    assert [(pair.chosen, pair.rejected, pair.meta) for pair in pairs] == [("a", "b", {})] * 2
    preferences.save(tmp_path / "q.jsonl", pairs)
    assert list(preferences.load(tmp_path / "q.jsonl")[0]) == list(pairs)


BAD_LINES = [
    ({"system": "t", "prompt": [{"role": "system", "content": "s"}, user("q")], "chosen": "a", "rejected": "b"}, "wrong one"),
    (b'{"prompt": "q", "chosen": "a"', "not JSON"),
    (b"[1, 2]", "a JSON list, not an object"),
    (b'{"prompt": "caf\xe9", "chosen": "a", "rejected": "b"}', "not UTF-8"),
    (b'{"prompt": "q", "chosen": "\\ud800", "rejected": "b"}', "surrogate"),
    ({"prompt": "q", "chosen": "a"}, "'rejected' is missing"),
    ({"chosen": "a", "rejected": "b"}, "no 'prompt'"),
    ({"prompt": 3, "chosen": "a", "rejected": "b"}, "'prompt' must be a text"),
    ({"prompt": " ", "chosen": "a", "rejected": "b"}, "'prompt' is empty"),
    ({"prompt": "q", "chosen": None, "rejected": "b"}, "'chosen' must be a text, found NoneType"),
    ({"prompt": "q", "chosen": "a", "rejected": ["b"]}, "list of messages"),
    ({"prompt": "q", "chosen": " ", "rejected": "b"}, "'chosen' is empty"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "identical"),
    ({"system": "s", "question": "", "chosen": "a", "rejected": "b"}, "question is empty"),
    ({"system": 1, "question": "q", "chosen": "a", "rejected": "b"}, "'system' must be a text"),
    ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "no prompt"),
    ({"chosen": [user("q"), assistant("a")], "rejected": [user("p"), assistant("b")]}, "differ before"),
    ({"prompt": [user("q")], "chosen": [user("a")], "rejected": [assistant("b")]}, "role 'user'"),
    ({"prompt": [user("q")], "chosen": [assistant("a"), assistant("c")], "rejected": [assistant("b")]}, "2 messages"),
    ({"prompt": [{"role": "user"}], "chosen": [assistant("a")], "rejected": [assistant("b")]}, "'content'"),
    (
        {"prompt": "other", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        "not the last message",
    ),
]


@pytest.mark.parametrize("bad, reason", BAD_LINES)
def test_a_bad_line_is_dropped_with_its_number_and_reason(tmp_path, bad, reason):
    path = write(tmp_path / "p.jsonl", GOOD, b"", bad, {**GOOD, "chosen": "c"})
    before = path.read_bytes()
    pairs, report = preferences.load(path)
    assert [pair.chosen for pair in pairs] == ["a", "c"] and report.lines == [1, 4]
    ((line, found),) = report.dropped
    assert line == 3 and reason in found and f"line 3: {found}" in str(report)
    assert path.read_bytes() == before


@pytest.mark.parametrize("bad, reason", BAD_LINES)
def test_raise_stops_at_the_first_bad_line_naming_file_and_line(tmp_path, bad, reason):
    path = write(tmp_path / "p.jsonl", GOOD, bad)
    with pytest.raises(errors.PreferenceFileError) as caught:
        preferences.load(path, on_error="raise")
    assert f"{path}, line 2: " in str(caught.value) and reason in str(caught.value)


def test_a_file_without_usable_lines_is_an_error_that_says_why(tmp_path):
    with pytest.raises(errors.PreferenceFileError, match="line 1: not JSON"):
        preferences.load(write(tmp_path / "p.jsonl", b"nonsense"))
    with pytest.raises(errors.PreferenceFileError, match="no usable pair"):
        preferences.load(write(tmp_path / "empty.jsonl", b""))


def test_a_missing_file_is_named():
    with pytest.raises(errors.MissingFileError, match="nowhere.jsonl: no such file"):
        preferences.load("nowhere.jsonl")


def test_a_mistyped_option_is_refused(tmp_path):
    path = write(tmp_path / "p.jsonl", GOOD)
    with pytest.raises(errors.UnknownOptionError, match="'drop', 'raise'"):
        preferences.load(path, on_error="ignore")


def test_repeated_lines_are_counted_and_kept_only_on_request(tmp_path):
    path = write(tmp_path / "p.jsonl", GOOD, GOOD, {**GOOD, "rejected": "c"})
    pairs, report = preferences.load(path)
    assert len(pairs) == 2 and report.duplicates == 1 and report.dropped[0][0] == 2
    assert "repeats line 1" in report.dropped[0][1]
    pairs, report = preferences.load(path, duplicates="keep")
    assert len(pairs) == 3 and report.duplicates == 1 and report.dropped == []


def test_a_byte_order_mark_is_no_error(tmp_path):
    path = write(tmp_path / "p.jsonl", b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert preferences.load(path)[1].dropped == []


def test_schemas_of_a_mixed_file_are_all_reported(tmp_path):
    row = {"system": "", "question": "q", "chosen": "a", "rejected": "b"}
    _, report = preferences.load(write(tmp_path / "p.jsonl", GOOD, row))
    assert report.schema == "intel-orca + trl-plain" and report.schemas["trl-plain"] == 1


# --- writing ----------------------------------------------------------------------------------------------------------


def test_saved_pairs_load_as_the_same_pairs(tmp_path):
    rows = [
        Pair({"x": "Où?"}, "là", "ici", {"score": 0.25}),
        Pair({"x": (user("q"),)}, "a", "b"),
        Pair({"x": "q"}, Completion("a", (5, 2)), Completion("b", (6, 7), truncated=True)),
    ]
    preferences.save(tmp_path / "p.jsonl", rows)
    loaded, report = preferences.load(tmp_path / "p.jsonl", on_error="raise")
    assert list(loaded) == rows and report.kept == 3
    assert loaded[2].rejected.truncated and loaded[2].rejected.text == "b"


def test_a_failed_save_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "p.jsonl"
    preferences.save(path, [GOOD_PAIR])
    before = path.read_bytes()
    with pytest.raises(errors.PairFormatError, match="row 1"):
        preferences.save(path, [GOOD_PAIR, Pair({"x": 0}, 1, 2)])
    with pytest.raises(TypeError):
        preferences.save(path, [Pair({"x": "q"}, "a", "b", {"score": object()})])
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["p.jsonl"]


def test_meta_cannot_overwrite_the_answers(tmp_path):
    with pytest.raises(errors.PairFormatError, match="'prompt'"):
        preferences.save(tmp_path / "p.jsonl", [Pair({"x": "q"}, "a", "b", {"prompt": "p"})])
