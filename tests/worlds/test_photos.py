"""Requests for photographs, their captions, and the judge through CLIP, with a tiny random CLIP and with a known scorer."""

import pytest
import torch

from sysdpo_lab import errors
from sysdpo_lab.worlds import clip_scorer, photos
from sysdpo_lab.worlds.photos import Request
from tests import tiny_diffusion

HAPPY = Request("portrait", (("happy", "more"),), "a man")


def brightness(pictures, pairs):
    """A regressor of one's own: every attribute is the mean colour."""
    return pictures.mean((1, 2, 3))[:, None].expand(-1, len(pairs))


def rows(*levels):
    return torch.stack([torch.full((3, 8, 8), level) for level in levels])


def tiny_clip():
    from transformers import CLIPConfig, CLIPModel

    shape = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "projection_dim": 4,
    }
    text = {**shape, "vocab_size": 8, "max_position_embeddings": 6, "bos_token_id": 0, "eos_token_id": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CLIPModel(
            CLIPConfig(text_config=text, vision_config={**shape, "image_size": 8, "patch_size": 4}, projection_dim=4)
        )


# --- requests and captions --------------------------------------------------------------------------------------------


def test_requests_are_different_of_their_split_and_the_same_each_time():
    first, again = (photos.requests(torch.Generator().manual_seed(1), 30, "heldout") for _ in range(2))
    assert first == again and len(set(first)) == 30
    assert {photos.split_of(request) for request in first} == {"heldout"}


def test_a_request_for_less_says_so_at_both_ends():
    words = photos.render(Request("landscape", (("foggy", "less"),), "a harbour", 4, 5))
    assert words == "start with the most foggy of four landscapes of a harbour and end with the least foggy"


@pytest.mark.parametrize("style", photos.STYLES)
def test_each_style_is_a_chat_prompt_with_the_request_last(style):
    system, user = photos.TEMPLATES[style]("draw")
    assert system["content"].startswith(photos.TASK) and user == {"role": "user", "content": "draw"}


def test_the_oracle_rises_or_falls_as_asked_and_is_read_back():
    falling = photos.oracle_captions(Request("landscape", (("snowy", "less"),), "a harbour"))
    assert [caption.split(", ")[1] for caption in falling] == [
        "extremely snowy",
        "moderately snowy",
        "not at all snowy",
    ]
    assert photos.parse_answer(photos.join_captions(falling)) == falling


# --- the judge --------------------------------------------------------------------------------------------------------


def test_the_judge_scores_an_even_rise_and_an_even_fall():
    world = photos.Photos(brightness)
    answer = photos.join_captions(["a man", "a happy man", "a very happy man"])
    verdict = world.judge(HAPPY, answer, rows(0.0, 0.5, 1.0))
    assert (verdict.preference_score, verdict.order_consistency, verdict.faithfulness, verdict.validity) == (
        1.0,
        1.0,
        1.0,
        1.0,
    )
    less = Request("portrait", (("happy", "less"),), "a man")
    assert world.judge(less, answer, rows(0.0, 0.5, 1.0)).preference_score == -1.0


@pytest.mark.parametrize("answer", ["", "a man", "a man\na man\na man\na man"])
def test_another_number_of_captions_stays_in_the_denominator(answer):
    verdict = photos.Photos(brightness).judge(HAPPY, answer, rows(0.1, 0.5, 0.9))
    assert (verdict.preference_score, verdict.order_consistency, verdict.validity) == (-1.0, 0.0, 0.0)


def test_captions_that_leave_the_subject_out_are_not_faithful():
    verdict = photos.Photos(brightness).judge(HAPPY, "a man\na woman with hats\nthe man", rows(0.1, 0.5, 0.9))
    assert verdict.faithfulness == pytest.approx(1.0)  # "woman" holds "man": the measure is a coarse one
    assert photos.Photos(brightness).judge(
        HAPPY, "a man\na cat\na dog", rows(0.1, 0.5, 0.9)
    ).faithfulness == pytest.approx(1 / 3)


def test_a_scorer_of_the_wrong_shape_is_named():
    with pytest.raises(errors.NonFiniteError, match="attribute scorer"):
        photos.Photos(lambda pictures, pairs: torch.zeros(1)).judge(HAPPY, "a man\na man\na man", rows(0.1, 0.5, 0.9))


# --- CLIP -------------------------------------------------------------------------------------------------------------


def test_the_level_is_clips_own_softmax_over_the_two_texts():
    model, tokenizer = tiny_clip(), tiny_diffusion.clip_tokenizer()
    scorer = clip_scorer.ClipScorer(model, tokenizer)
    pictures = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = scorer(pictures, [("a cat", "cat a a")])[:, 0]
    middle, spread = (torch.tensor(values).reshape(3, 1, 1) for values in (clip_scorer.MEAN, clip_scorer.SPREAD))
    read = tokenizer(["a cat", "cat a a"], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(pixel_values=(pictures - middle) / spread, **read).logits_per_image
    assert torch.allclose(found, logits.softmax(1)[:, 1], atol=1e-5)
    assert torch.allclose(scorer.of_texts(["cat a a"], [("a cat", "cat a a")]) > 0.5, torch.tensor([[True]]))


def test_pictures_of_any_size_are_read_and_batches_change_nothing():
    model, tokenizer = tiny_clip(), tiny_diffusion.clip_tokenizer()
    pictures = torch.rand(3, 3, 24, 16, generator=torch.Generator().manual_seed(0))
    one, many = (clip_scorer.ClipScorer(model, tokenizer, batch)(pictures, [("a", "cat")]) for batch in (1, 64))
    assert torch.allclose(one, many, atol=1e-6) and one.shape == (3, 1)


def test_a_scorer_is_found_by_folder_or_by_the_name_of_a_function(tmp_path):
    tiny_clip().save_pretrained(tmp_path)
    tiny_diffusion.clip_tokenizer().save_pretrained(tmp_path)
    assert isinstance(clip_scorer.load_scorer(tmp_path), clip_scorer.ClipScorer)
    assert clip_scorer.load_scorer("tests.worlds.test_photos:brightness") is not None
    with pytest.raises(errors.MissingModelError, match="no CLIP model"):
        clip_scorer.load_scorer(tmp_path / "nothing")
