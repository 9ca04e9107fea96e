"""The faces world: pictures with known attributes, captions and requests that read back, and a judge that reads pixels."""

import pytest
import torch

from sysdpo_lab import errors
from sysdpo_lab.worlds.faces import drawing, language, measuring, requesting, scoring
from sysdpo_lab.worlds.faces.drawing import ATTRIBUTES, COLOURS
from sysdpo_lab.worlds.faces.language import DEGREES, Caption
from sysdpo_lab.worlds.faces.requesting import EXAMPLE, Request

FAMILIES = tuple(ATTRIBUTES)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(*values):
    return torch.tensor(values)[:, None]


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_are_rgb_between_0_and_1_and_the_same_seed_draws_the_same(family):
    first, levels, colour = measuring.random_pictures(family, 6, generator(1))
    again, _, _ = measuring.random_pictures(family, 6, generator(1))
    assert first.shape == (6, 3, 24, 24) and first.min() >= 0 and first.max() <= 1
    assert torch.equal(first, again) and levels.shape == (6, len(ATTRIBUTES[family])) and colour.max() < len(COLOURS)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_attribute_changes_the_picture_and_the_nuisance_does_not_move_the_others(family):
    names = ATTRIBUTES[family]
    middle = torch.full((1, len(names)), 0.5)
    plain = drawing.DRAW[family](middle, torch.tensor([0]), torch.full((1, 4), 0.5))
    for a in range(len(names)):
        changed = middle.clone()
        changed[0, a] = 0.9
        other = drawing.DRAW[family](changed, torch.tensor([0]), torch.full((1, 4), 0.5))
        assert (other - plain).abs().max() > 0.1


def test_a_face_is_drawn_where_its_parameters_say():
    """By hand: large 0 has a radius of 6.4 pixels, so at level 0.5 of the place the pixel 8 to the right is background."""
    levels = torch.tensor([[0.5, 0.5, 1.0, 0.0, 0.0, 0.0]])
    picture = drawing.draw_faces(levels, torch.tensor([0]), torch.full((1, 4), 0.5))[0]
    background = torch.tensor([1.0, 1 - 0.7 * 0.85, 1 - 0.7 * 0.85]) * 0.97
    assert torch.allclose(picture[:, 12, 21], background, atol=1e-3)
    assert torch.allclose(picture[:, 0, 0], background, atol=1e-3)
    skin = (torch.tensor([0.70, 0.50, 0.36]) + torch.tensor([0.99, 0.86, 0.74])) / 2
    assert torch.allclose(picture[:, 13, 12], skin, atol=0.02)  # between the eyes and the mouth


def test_an_unknown_family_is_named():
    with pytest.raises(errors.UnknownOptionError, match="cat"):
        drawing.draw("cat", torch.zeros(1, 6), torch.zeros(1, dtype=torch.long), generator())
    with pytest.raises(errors.UnknownOptionError, match="cat"):
        measuring.measure(torch.zeros(1, 3, 24, 24), "cat")


# --- judge ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "noise, blur, mae, correlation",
    [(0, 0, 0.04, 0.99), (0, 0.5, 0.04, 0.99), (0.05, 0, 0.07, 0.97), (0.1, 0, 0.16, 0.9)],
)
def test_the_judge_measures_every_attribute_of_clean_blurred_and_noisy_pictures(family, noise, blur, mae, correlation):
    found = measuring.accuracy(family, 600, noise, blur)
    assert found.pop("colour")["accuracy"] > 0.99
    assert set(found) == set(ATTRIBUTES[family])
    for attribute, row in found.items():
        assert row["mae"] < mae and row["correlation"] > correlation, (attribute, row)


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbouring_degrees_are_told_apart_on_almost_every_picture(family):
    """Two pictures that differ in one attribute, one degree word apart, and in all nuisance: which shows more of it?"""
    g = generator(2)
    for a, attribute in enumerate(ATTRIBUTES[family]):
        low = torch.rand(200, len(ATTRIBUTES[family]), generator=g)
        low[:, a] = torch.tensor(list(DEGREES.values())[:-1])[torch.randint(7, (200,), generator=g)]
        high = low.clone()
        high[:, a] += 0.12
        colour = torch.randint(len(COLOURS), (200,), generator=g)
        seen = [measuring.measure(drawing.draw(family, levels, colour, g), family)[:, a] for levels in (low, high)]
        assert float((seen[1] > seen[0]).float().mean()) > 0.93, attribute


def test_the_judge_does_not_depend_on_the_batch_and_leaves_the_random_state_alone():
    pictures, _, _ = measuring.random_pictures("face", 5, generator(3))
    before = torch.get_rng_state()
    together = measuring.measure(pictures, "face")
    assert torch.equal(torch.get_rng_state(), before)
    alone = torch.cat([measuring.measure(picture[None], "face") for picture in pictures])
    assert torch.allclose(together, alone, atol=1e-5)
    assert measuring.measure(pictures[:0], "face").shape == (0, 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_judge_is_finite_on_anything(family):
    odd = torch.stack([torch.zeros(3, 24, 24), torch.ones(3, 24, 24), torch.rand(3, 24, 24, generator=generator())])
    found = measuring.measure(odd, family)
    assert found.isfinite().all() and found.min() >= 0 and found.max() <= 1


# --- captions ---------------------------------------------------------------------------------------------------------


def all_captions(family):
    for attribute in ATTRIBUTES[family]:
        for degree in DEGREES:
            for colour in COLOURS:
                yield Caption(family, ((attribute, degree),), colour)


def test_every_caption_reads_back():
    captions = [caption for family in FAMILIES for caption in all_captions(family)]
    captions.append(Caption("face", (("old", "extremely"), ("happy", "not")), "red"))
    assert [language.parse_caption(str(caption)) for caption in captions] == captions
    assert len(set(map(str, captions))) == len(captions) == 11 * 8 * 5 + 1


def test_what_is_not_in_the_grammar_is_not_parsed():
    wrong = (
        "", "a happy face", "a very happy face", "a very sunny face on a red background",
        "a very happy face on a pink background", "a very happy and very happy face on a red background",
        "a very happy face on a red background today",
    )  # fmt: skip
    for text in wrong:
        assert language.parse_caption(text) is None, text
    assert language.parse_caption("  A Very  happy face on a red background. ") is not None


def test_a_caption_cannot_name_what_its_family_does_not_have():
    for degrees in ((("sunny", "very"),), (("happy", "really"),), (), (("happy", "very"), ("happy", "not"))):
        with pytest.raises(errors.UnknownOptionError):
            Caption("face", degrees, "red")


def test_one_caption_of_eight_is_held_out_with_every_attribute_and_colour():
    for family in FAMILIES:
        held = language.heldout_captions(family)
        assert len(held) == 5 * len(ATTRIBUTES[family])
        assert {(c.degrees[0][0], c.colour) for c in held} == {(a, c) for a in ATTRIBUTES[family] for c in COLOURS}


def test_answers_split_and_join():
    captions = list(all_captions("face"))[:3]
    answer = language.join_captions(captions)
    assert language.parse_answer(answer) == captions
    assert language.parse_answer(f"{answer}; a cat") is None and language.parse_answer("") is None
    assert language.split_captions(" ; ") == []


# --- requests ---------------------------------------------------------------------------------------------------------


def test_every_wording_reads_back():
    found = requesting.requests(generator(4), 400)
    assert [requesting.parse_request(requesting.render(request)) for request in found] == found
    assert {r.wording for r in found} == set(range(8)) and {r.number for r in found} == {3, 4}
    assert {len(r.asks) for r in found} == {1, 2} and {r.family for r in found} == set(FAMILIES)


def test_different_requests_are_worded_differently():
    found = requesting.requests(generator(5), 300)
    assert len({requesting.render(request) for request in found}) == 300


def test_a_text_that_asks_for_nothing_is_refused():
    for text in ("", "three cats", "three faces on a blue background, each sunnier than the last"):
        with pytest.raises(errors.RecordFormatError):
            requesting.parse_request(text)


def test_the_same_content_is_in_one_split_whatever_its_number_and_order():
    asks = (("happy", "more"), ("old", "less"))
    same = [Request("face", asks, "red", 3, 1), Request("face", asks[::-1], "red", 4, 1)]
    assert len({requesting.split_of(request) for request in same}) == 1
    assert all(requesting.split_of(r) == "heldout" for r in requesting.requests(generator(6), 20, "heldout"))


def test_the_splits_have_their_sizes():
    splits = [requesting.split_of(request) for request in requesting.requests(generator(7), 1500)]
    shares = {split: splits.count(split) / 1500 for split in requesting.SPLITS}
    assert shares["train"] == pytest.approx(0.7, abs=0.06) and shares["heldout"] == pytest.approx(0.2, abs=0.05)


def test_drawing_requests_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    requesting.requests(generator(8), 5)
    assert torch.equal(torch.get_rng_state(), before)


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scores, consistent, preference",
    [
        (rows(0.0, 0.5, 1.0), 1, 1.0),
        (rows(0.2, 0.2, 0.2), 0, 0.0),  # equal pictures
        (rows(1.0, 0.5, 0.0), 0, -1.0),
        (rows(0.0, 0.8, 1.0), 1, 1 - 0.3 / 3),
        (rows(0.1, 0.9, 0.5), 0, 0.4 - 0.6 / 3),
        (rows(0.0, 0.5, 0.5, 1.0), 0, 1 - (1 / 6 + 1 / 6) / 4),  # the line is at 0, 1/3, 2/3, 1
        (torch.tensor([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]]), 0, 0.0),  # one attribute each way
    ],
)
def test_scores_of_rows_by_hand(scores, consistent, preference):
    assert scoring.order_consistency(scores) == consistent
    assert scoring.preference_score(scores) == pytest.approx(preference, abs=1e-6)


def test_the_asked_direction_always_increases():
    values = torch.tensor([[0.1, 0.9], [0.2, 0.4]])
    assert torch.allclose(scoring.oriented(values, ["more", "less"]), torch.tensor([[0.1, 0.1], [0.2, 0.6]]))


@pytest.mark.parametrize("direction", requesting.DIRECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_perfect_captions_drawn_perfectly_are_consistent(family, direction):
    for attribute in ATTRIBUTES[family]:
        request = Request(family, ((attribute, direction),), "green", 4)
        captions = requesting.oracle_captions(request)
        verdict = scoring.judge(request, language.join_captions(captions), drawn(captions))
        assert verdict.order_consistency == verdict.caption_order == verdict.faithfulness == verdict.validity == 1
        assert verdict.preference_score > 0.7 and verdict.colour == 1
        backwards = captions[::-1]
        verdict = scoring.judge(request, language.join_captions(backwards), drawn(backwards))
        assert verdict.order_consistency == verdict.caption_order == 0 and verdict.preference_score < -0.7


def drawn(captions, seed=9):
    family = captions[0].family
    levels = torch.rand(1, len(ATTRIBUTES[family]), generator=generator(seed)).repeat(len(captions), 1)
    for row, caption in enumerate(captions):
        for attribute, level in caption.levels.items():
            levels[row, ATTRIBUTES[family].index(attribute)] = level
    colour = torch.tensor([COLOURS.index(caption.colour) for caption in captions])
    return drawing.draw(family, levels, colour, generator(seed))


def test_two_attributes_must_both_be_in_order():
    request = Request("face", (("happy", "more"), ("large", "less")), "blue")
    captions = requesting.oracle_captions(request)
    assert captions[0].levels == {"happy": 0.05, "large": 0.94}
    assert scoring.judge(request, language.join_captions(captions), drawn(captions)).order_consistency == 1
    half = [Caption("face", (c.degrees[0], d.degrees[1]), "blue") for c, d in zip(captions, captions[::-1])]
    verdict = scoring.judge(request, language.join_captions(half), drawn(half))
    assert verdict.order_consistency == verdict.caption_order == 0 and verdict.faithfulness == 1


@pytest.mark.parametrize("spoil", ["too few", "too many", "not a caption", "no pictures"])
def test_an_invalid_answer_scores_minus_one_and_stays_in_the_mean(spoil):
    captions = requesting.oracle_captions(EXAMPLE)
    pictures = drawn(captions)
    answer = language.join_captions(captions)
    if spoil == "too few":
        answer, pictures = language.join_captions(captions[:2]), pictures[:2]
    if spoil == "too many":
        answer, pictures = language.join_captions([*captions, captions[0]]), torch.cat([pictures, pictures[:1]])
    if spoil == "not a caption":
        answer = f"{language.join_captions(captions[:2])}; a cat"
    verdict = scoring.judge(EXAMPLE, answer, pictures[:0] if spoil == "no pictures" else pictures)
    assert (verdict.preference_score, verdict.order_consistency) == (-1, 0)


def test_faithfulness_counts_captions_off_the_attribute_or_the_colour():
    right, other = Caption("face", (("happy", "very"),), "blue"), Caption("face", (("old", "very"),), "blue")
    red = Caption("face", (("happy", "very"),), "red")
    faithfulness = [
        scoring.faithfulness(EXAMPLE, language.join_captions(captions))
        for captions in ([right] * 3, [right, other, red], [right] * 2, [right] * 4)
    ]
    assert faithfulness == pytest.approx([1, 1 / 3, 2 / 3, 3 / 4])


def test_pictures_with_nan_are_named():
    captions = requesting.oracle_captions(EXAMPLE)
    pictures = torch.full((3, 3, 24, 24), torch.nan)
    with pytest.raises(errors.NonFiniteError):
        scoring.judge(EXAMPLE, language.join_captions(captions), pictures)
