"""The restaurants world: splits without overlap, a judge that is exact, and pairs whose winner is better."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sysdpo_lab import errors, paths, preferences
from sysdpo_lab.components.completion import Completion
from sysdpo_lab.worlds import restaurants as world
from sysdpo_lab.worlds.restaurants import Record, judge

FULL = Record("Old Mill", food="Thai", price="cheap", area="harbour", rating="five stars", family="yes", near="museum")
THREE = Record("Old Mill", food="Thai", near="museum")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@st.composite
def any_record(draw):
    slots = draw(st.lists(st.sampled_from(world.SLOTS[1:]), unique=True, max_size=6))
    return Record(**{slot: draw(st.sampled_from(world.VALUES[slot])) for slot in ["name", *slots]})


# --- records ----------------------------------------------------------------------------------------------------------


def test_records_are_different_have_3_to_6_slots_and_lie_in_the_asked_split():
    for split in world.SPLITS:
        found = world.records(generator(), 200, split)
        assert len(set(found)) == 200
        assert {len(record.slots) for record in found} == {3, 4, 5, 6}
        assert {world.split_of(record) for record in found} == {split}


def test_the_split_depends_on_the_content_alone_in_the_announced_shares():
    found = world.records(generator(), 4000)
    share = {split: sum(world.split_of(record) == split for record in found) / 4000 for split in world.SPLITS}
    assert share == pytest.approx({"train": 0.7, "validation": 0.1, "heldout": 0.2}, abs=0.03)
    # fixed for ever: another hash would move records from train to held-out in everybody's stored results
    assert [world.split_of(record) for record in (FULL, THREE, Record("Red Barn"))] == ["heldout", "heldout", "train"]


def test_the_same_seed_gives_the_same_records_and_global_random_state_is_untouched():
    before = torch.get_rng_state()
    assert world.records(generator(3), 20) == world.records(generator(3), 20)
    assert world.records(generator(3), 20) != world.records(generator(4), 20)
    assert torch.equal(torch.get_rng_state(), before)


@given(any_record())
def test_parse_undoes_render(record):
    assert world.parse(world.render(record)) == record


@pytest.mark.parametrize("text", ["food: Thai", "name: Old Mill | drink: tea", "name: Nowhere", "Old Mill", ""])
def test_a_text_that_is_no_record_is_refused(text):
    with pytest.raises(errors.RecordFormatError):
        world.parse(text)


def test_a_mistyped_split_is_refused():
    with pytest.raises(errors.UnknownOptionError, match="heldout"):
        world.records(generator(), 1, "test")


# --- the judge --------------------------------------------------------------------------------------------------------


@given(any_record(), st.integers(0, 3))
def test_a_reference_sentence_is_perfect_by_every_template(record, template):
    verdict = judge(record, world.sentence(record, template))
    assert verdict.score == 1.0 and verdict.valid and verdict.missing == () and verdict.invented == ()


@pytest.mark.parametrize(
    "text, score, missing, invented",
    [
        ("Old Mill is a Thai restaurant near the museum.", 1.0, (), ()),
        ("OLD MILL: thai food, next to the Museum!", 1.0, (), ()),
        ("Old Mill is a Thai restaurant.", 2 / 3, ("near",), ()),
        ("Old Mill is a Thai restaurant near the market.", 1 / 3, ("near",), (("near", "market"),)),
        ("Old Mill is a cheap Thai restaurant near the museum.", 2 / 3, (), (("price", "cheap"),)),
        ("Old Mill is a Thai and Irish place near the museum.", 2 / 3, (), (("food", "irish"),)),
        ("Thai Orchid is near the museum.", 0.0, ("name", "food"), (("name", "Thai Orchid"),)),
        ("Old Mill is a Thai restaurant near the museum", 0.5, (), ()),
        ("Old Mill is Thai. It is near the museum.", 0.5, (), ()),
        ("Old Mill is Thai\nIt is near the museum.", 0.5, (), ()),
        ("Old Mill, Thai, museum " + "very " * 32 + "nice.", 0.5, (), ()),
        ("Old Mill. Thai museum", 0.5, (), ()),
        ("Old Mill is not a Thailand museums place.", 1 / 3, ("food", "near"), ()),
        ("A good place for Italian and Mexican food.", 0.0, ("name", "food", "near"), None),
        ("", 0.0, ("name", "food", "near"), ()),
    ],
)
def test_scores_derived_by_hand(text, score, missing, invented):
    verdict = judge(THREE, text)
    assert verdict.score == pytest.approx(score) and verdict.missing == missing
    assert set(verdict.present) | set(verdict.missing) == set(THREE.slots)
    if invented is not None:
        assert verdict.invented == invented


@pytest.mark.parametrize(
    "name, words", [("Thai Orchid", "food"), ("French Horn", "food")], ids=["thai in the name", "french in the name"]
)
def test_a_food_word_inside_the_name_states_no_food(name, words):
    assert judge(Record(name, price="cheap"), f"{name} is a cheap place.").score == 1.0
    food = name.split()[0]
    assert judge(Record(name, food=food), f"{name} is a nice place.").missing == ("food",)
    assert judge(Record(name, food=food), f"{name} is a {food} place.").score == 1.0


@pytest.mark.parametrize(
    "slot, value, wording",
    [
        ("price", "cheap", "low-priced"),
        ("price", "cheap", "inexpensive"),
        ("price", "cheap", "not expensive"),
        ("price", "moderate", "moderately priced"),
        ("price", "expensive", "high-priced"),
        ("rating", "five stars", "5 out of 5"),
        ("rating", "three stars", "three-star"),
        ("family", "yes", "family-friendly"),
        ("family", "no", "not family friendly"),
        ("family", "no", "isn\u2019t child friendly"),
        ("family", "no", "non-family-friendly"),
        ("area", "city centre", "city center"),
        ("near", "theatre", "theater"),
    ],
)
def test_each_wording_states_exactly_one_value(slot, value, wording):
    assert world.stated(f"It is {wording}, they say.") == ((slot, value),)


def test_mutant_judges_by_substring_would_be_caught():
    """A judge that looks for substrings finds 'Thai' in 'Thailand' and 'expensive' in 'inexpensive'."""
    assert world.stated("Thailand, supermarket, inexpensive") == (("price", "cheap"),)


def test_valid_needs_form_and_name():
    assert judge(THREE, "Old Mill is a nice place.").valid
    assert not judge(THREE, "It is a Thai place near the museum.").valid
    assert not judge(THREE, "Old Mill is a nice place").valid


def test_compare_counts_ties_as_one_half_and_is_antisymmetric():
    good, bad = "Old Mill is a Thai restaurant near the museum.", "Old Mill is a restaurant."
    assert world.compare(THREE, good, bad) == 1.0 and world.compare(THREE, bad, good) == 0.0
    assert world.compare(THREE, good, good) == 0.5


def test_the_judge_reads_completions_as_their_text():
    assert judge(THREE, Completion("Old Mill is a Thai restaurant near the museum.", (5, 1))).score == 1.0


# --- faults and pairs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", world.FAULTS)
def test_every_fault_lowers_the_score_of_a_perfect_answer(kind):
    g = generator(1)
    for record in world.records(g, 60):
        text = world.reference_sentence(record, g)
        assert judge(record, world.perturb(record, text, g, kind).text).score < 1.0


@pytest.mark.parametrize("kind, lost, gained", [("drop", 1, 0), ("change", 1, 1), ("invent", 0, 1)])
def test_a_fault_changes_one_slot_and_keeps_the_template(kind, lost, gained):
    g = generator(2)
    for record in world.records(g, 40):
        text = world.reference_sentence(record, g)
        found = world.perturb(record, text, g, kind)
        verdict = judge(record, found.text)
        assert (len(verdict.missing), len(verdict.invented)) == (lost, gained)
        assert found.text == world.sentence(found.record, world.template_of(record, text))


def test_chosen_beats_rejected_in_every_pair_and_meta_says_by_how_much():
    pairs = world.preference_pairs(150, generator(), "validation")
    assert len({pair.inputs["x"] for pair in pairs}) == 150
    for pair in pairs:
        record = world.parse(pair.inputs["x"])
        high, low = judge(record, pair.chosen).score, judge(record, pair.rejected).score
        assert high > low and world.split_of(record) == "validation"
        found = [pair.meta[name] for name in ("score_chosen", "score_rejected", "score_gap")]
        assert found == pytest.approx([high, low, high - low], abs=1e-5)
        assert pair.meta["kind"].split("+")[0] in world.FAULTS


def test_sampled_answers_give_best_against_worst_and_ties_are_counted():
    x = world.render(THREE)
    best, middle, worst = (
        "Old Mill is a Thai restaurant near the museum.",
        Completion("Old Mill is a Thai place.", (4, 1)),
        Completion("", (1,)),
    )
    pairs, ties = world.pairs_from_candidates([x, x], [[middle, worst, best], [best, best]], generator())
    assert ties == 1 and len(pairs) == 1
    assert pairs[0].chosen == best and pairs[0].rejected == worst and pairs[0].meta["score_gap"] == 1.0


def test_a_smaller_difference_than_asked_counts_as_a_tie():
    answers = ["Old Mill is a Thai restaurant near the museum.", "Old Mill is a Thai restaurant."]
    x = world.render(THREE)
    assert world.pairs_from_candidates([x], [answers], generator(), min_gap=0.5)[1] == 1
    assert world.pairs_from_candidates([x], [answers], generator(), min_gap=0.3)[1] == 0


def test_candidates_for_another_number_of_inputs_are_refused():
    with pytest.raises(errors.BatchMismatchError, match="2"):
        world.pairs_from_candidates([world.render(THREE)], [["a"], ["b"]], generator())


# --- stored data ------------------------------------------------------------------------------------------------------


def test_the_stored_data_come_from_their_command_byte_for_byte(tmp_path):
    world.main(["--out", str(tmp_path)])
    stored = paths.data_folder() / "restaurants"
    assert sorted(file.name for file in stored.iterdir()) == sorted(file.name for file in tmp_path.iterdir())
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (stored / file.name).read_bytes(), file.name


def test_stored_splits_load_without_a_bad_line_and_share_no_record():
    inputs = {split: [pair.inputs["x"] for pair in world.stored_pairs(split)] for split in world.SPLITS}
    assert {split: len(set(xs)) for split, xs in inputs.items()} == world.STORED
    assert len(set().union(*inputs.values())) == sum(world.STORED.values())
    assert all(world.split_of(world.parse(x)) == split for split, xs in inputs.items() for x in xs)


def test_every_word_of_the_other_splits_occurs_in_train():
    def words(split):
        pairs = world.stored_pairs(split)
        return {w for p in pairs for text in (p.inputs["x"], p.chosen, p.rejected) for w in re.findall(r"\w+", text)}

    assert words("heldout") | words("validation") <= words("train")


def test_the_card_names_the_hashes():
    card = (paths.data_folder() / "restaurants" / "CARD.md").read_text(encoding="utf-8")
    for split in world.SPLITS:
        assert paths.file_sha256(paths.data_folder() / "restaurants" / f"{split}.jsonl") in card


def test_stored_pairs_are_plain_trl_rows(tmp_path):
    file = paths.data_folder() / "restaurants" / "train.jsonl"
    row = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    assert {"prompt", "chosen", "rejected"} <= set(row) and all(isinstance(row[k], str) for k in ("prompt", "chosen"))
    assert preferences.load(file)[1].schema == "trl-plain"
