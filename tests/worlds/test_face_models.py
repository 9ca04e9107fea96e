"""The models of the faces world: their training data, shortened trainings, and what the shipped ones do."""

import shutil

import pytest
import torch
from torch import nn

from sysdpo_lab import errors, paths
from sysdpo_lab.worlds import face_diffusion, face_lm, face_models
from sysdpo_lab.worlds.face_diffusion import DiffusionBase
from sysdpo_lab.worlds.faces import drawing, language, measuring, requesting, scoring
from sysdpo_lab.worlds.faces.encoder import WordEncoder


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def lm():
    return face_models.load_face_lm()


@pytest.fixture(scope="module")
def weakened():
    return face_models.load_face_diffusion()


# --- caption writer: words and training text --------------------------------------------------------------------------


def test_every_request_and_answer_is_in_the_vocabulary_and_comes_back_from_its_tokens(lm):
    _, tokenizer = lm
    for prompt, answer in face_lm.training_texts(200, generator(1)):
        ids = tokenizer(prompt + " " + answer)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        back = tokenizer.decode(tokenizer(answer)["input_ids"], skip_special_tokens=True)
        assert language.parse_answer(back) == language.parse_answer(answer) is not None
        assert len(tokenizer(answer)["input_ids"]) < face_lm.MAX_NEW_TOKENS


def test_a_prompt_tokenizes_with_its_markers_and_nothing_added(lm):
    _, tokenizer = lm
    ids = tokenizer(face_lm.TEMPLATES["bold"].format(x="three faces on a red background"))["input_ids"]
    words = ["<bold>", "three", "faces", "on", "a", "red", "background", "<write>"]
    assert tokenizer.convert_ids_to_tokens(ids) == words
    assert tokenizer.bos_token_id is None and tokenizer.padding_side == "left"


def test_the_shipped_tokenizer_is_the_one_that_the_code_builds(lm):
    assert face_lm.build_tokenizer().get_vocab() == lm[1].get_vocab()


def test_the_caption_writer_never_trains_on_a_held_out_request():
    for prompt, _ in face_lm.training_texts(150, generator(2)):
        words = prompt.split("> ", 1)[1].removesuffix(f" {face_lm.WRITE}")
        assert requesting.split_of(requesting.parse_request(words)) == "train"


@pytest.mark.parametrize("style", face_lm.STYLES)
def test_training_answers_are_in_order_as_often_as_their_style_says(style):
    g = generator(3)
    asked = requesting.requests(g, 400, "train")
    answers = [face_lm.faulty_answer(request, style, g) for request in asked]
    in_order = sum(map(scoring.caption_order, asked, answers)) / len(asked)
    # some that were in order lose it to a caption about another attribute
    assert face_lm.IN_ORDER[style] - 0.16 < in_order < face_lm.IN_ORDER[style] + 0.05
    assert sum(map(scoring.validity, asked, answers)) / len(asked) > 0.97
    assert 0.9 < sum(map(scoring.faithfulness, asked, answers)) / len(asked) < 0.99


def test_a_short_training_of_the_caption_writer_lowers_the_loss_and_repeats_exactly(capsys):
    before = torch.get_rng_state()
    first, _, losses = face_lm.train(steps=12, batch=16, seed=5)
    again, _, _ = face_lm.train(steps=12, batch=16, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] > 3.5 and losses[-1] < losses[0] - 0.8
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))
    assert capsys.readouterr() == ("", "")


# --- caption writer: what it does -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(lm):
    return face_models.face_lm.measure(*lm, face_models.heldout_requests(100), generator(), samples=1)


def test_the_start_is_right_in_form_and_poor_in_order(written):
    assert written["plain"]["validity"] > 0.95
    assert 0.2 < written["plain"]["caption_order"] < 0.45
    assert 0.88 < written["plain"]["faithfulness"] < 0.99


def test_careful_answers_are_more_often_in_order_than_plain_ones(written):
    assert written["careful"]["caption_order"] > written["plain"]["caption_order"] + 0.25
    assert all(row["validity"] > 0.9 for row in written.values())


def test_a_changed_weights_file_is_refused(tmp_path):
    folder = shutil.copytree(paths.data_folder() / "faces-lm", tmp_path / "lm")
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\1")
    with pytest.raises(errors.WeightsHashError, match="faces LM"):
        face_models.load_face_lm(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(errors.MissingWeightsError, match="face_models lm"):
        face_models.load_face_lm(folder)


# --- text encoder -----------------------------------------------------------------------------------------------------


def test_the_vector_of_an_attribute_says_its_degree():
    encoder = WordEncoder()
    very, barely, colour = encoder(
        [
            "a very happy face on a blue background",
            "a barely happy face on a blue background",
            "a very happy face on a red background",
        ]
    )
    assert not torch.allclose(very[2], barely[2])  # the place of "happy"
    assert torch.equal(very[2], colour[2]) and not torch.equal(very[6], colour[6])


def test_the_longest_caption_fits_and_the_empty_one_is_all_padding():
    encoder = WordEncoder()
    longest = max(
        len(str(language.Caption("landscape", (("dark", d), ("wooded", d)), "red")).split()) for d in language.DEGREES
    )
    assert longest <= encoder.length
    assert encoder.token_ids([""]).tolist() == [[0] * encoder.length]


# --- diffusion: training data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 24, 24), (1, 3, 8, 8)])
def test_patches_are_undone_exactly(shape):
    pictures = torch.rand(shape, generator=generator())
    latent = face_diffusion.to_latent(pictures)
    assert latent.shape == (shape[0], 48, shape[2] // 4, shape[3] // 4)
    assert torch.allclose(face_diffusion.to_pictures(latent), pictures, atol=1e-6)


@pytest.mark.parametrize("mislabelled, low, high", [(0.0, 0.0, 0.02), (0.35, 0.16, 0.34), (1.0, 0.5, 0.8)])
def test_the_share_of_wrong_captions_by_the_judge(mislabelled, low, high):
    """A random degree is more than 0.15 off in about 2 of 3 cases: 1 - (8 + 14) / 64 = 0.66 for neighbours or the same."""
    pictures, captions = face_diffusion.training_batch(800, generator(4), mislabelled)
    wrong = total = 0
    for family in drawing.FAMILIES:
        rows = [i for i, caption in enumerate(captions) if caption.family == family]
        measured = measuring.measure(pictures[rows], family)
        for i, values in zip(rows, measured):
            attribute, level = next(iter(captions[i].levels.items()))
            wrong += abs(float(values[drawing.ATTRIBUTES[family].index(attribute)]) - level) > 0.17
            total += 1
    assert low <= wrong / total <= high


def test_held_out_combinations_are_never_named_in_training():
    _, captions = face_diffusion.training_batch(2000, generator(5), 0.35)
    named = {(c.family, a, d, c.colour) for c in captions for a, d in c.degrees}
    assert len(named) > 300
    assert not any(language.is_heldout(*combination) for combination in named)
    assert {c.family for c in captions} == set(drawing.FAMILIES) and {len(c.degrees) for c in captions} == {1, 2}


# --- diffusion: loss --------------------------------------------------------------------------------------------------


class Zero(nn.Module):
    """A network that predicts a grey picture."""

    def forward(self, x, t, encoder_hidden_states):
        return type("Output", (), {"sample": torch.zeros_like(x)})


def test_the_loss_of_a_grey_prediction_by_hand():
    """All-white pictures are 1 in every patch, so each squared error is 1 and the loss is the mean of the two weights."""
    base = DiffusionBase(Zero(), face_diffusion.build_scheduler(), WordEncoder(), 4)
    weight = torch.rand(64, 24, 24, generator=generator(6))
    loss = face_diffusion.weighted_error(base, torch.ones(64, 3, 24, 24), ["a"] * 64, weight, generator(7))
    t = face_diffusion.training_timesteps(64, 1000, generator(7))
    abar = torch.cos((torch.arange(1001) / 1000 + 0.008) / 1.008 * torch.pi / 2).square()
    by_hand = (1 / (1 - abar[1:] / abar[0])).clamp(max=5)[t] * weight.mean((1, 2))
    assert float(loss) == pytest.approx(float(by_hand.mean()), rel=1e-3)


def test_two_timesteps_of_three_are_late():
    t = face_diffusion.training_timesteps(6000, 1000, generator(8))
    assert 0 <= int(t.min()) and int(t.max()) == 999
    assert float((t >= 800).float().mean()) == pytest.approx(2 / 3 + 1 / 3 / 5, abs=0.03)


@pytest.mark.parametrize("family", drawing.FAMILIES)
def test_pixels_that_carry_much_in_little_space_count_more(family):
    weight = face_diffusion.importance(family)
    assert weight.shape == (24, 24) and float(weight.mean()) == pytest.approx(1, abs=1e-4) and weight.min() > 0.2
    if family == "face":
        assert weight[15:18, 8:16].mean() > 2 > 1 > weight[:4, :4].mean()  # mouth, corner


# --- diffusion: training ----------------------------------------------------------------------------------------------


def test_a_short_training_lowers_the_loss_and_goes_on_exactly_after_an_interruption(tmp_path, capsys):
    before = torch.get_rng_state()
    whole = face_diffusion.train(steps=14, batch=8, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    first = face_diffusion.Trainer(steps=14, batch=8, seed=3)
    for _ in range(5):
        first.advance()
    first.save(tmp_path)
    second = face_diffusion.train(steps=14, batch=8, seed=3, folder=tmp_path)
    assert second.losses == whole.losses
    assert all(torch.equal(a, b) for a, b in zip(whole.mean.values(), second.mean.values()))
    assert sum(whole.losses[-3:]) < 0.8 * sum(whole.losses[:3])
    with pytest.raises(errors.CheckpointError, match="settings"):
        face_diffusion.train(steps=14, batch=8, seed=3, mislabelled=0.35, folder=tmp_path)
    with pytest.raises(errors.CheckpointError, match="fall"):
        face_diffusion.train(steps=99, batch=8, seed=3, folder=tmp_path)
    assert capsys.readouterr() == ("", "")


def test_a_shortened_training_writes_a_folder_that_loads_to_the_same_pictures(tmp_path):
    trainer = face_diffusion.train(steps=2, batch=4, seed=1)
    measured = face_models.store_diffusion(trainer, tmp_path / "new", seconds=1, per_caption=1)
    assert set(measured) == {name for names in drawing.ATTRIBUTES.values() for name in names}
    loaded = face_models.load_face_diffusion(folder=tmp_path / "new")
    texts = ["a very happy face on a blue background", ""]
    pictures = face_diffusion.sample(loaded, texts, generator(), 3)
    averaged = trainer.averaged()
    for module in (averaged.unet, averaged.encoder):
        face_models.shipped.half_rounded(module)
    assert torch.equal(pictures, face_diffusion.sample(averaged, texts, generator(), 3))
    assert "0 %" in (tmp_path / "new" / "CARD.md").read_text() or "0%" in (tmp_path / "new" / "CARD.md").read_text()


def test_the_command_line_refuses_a_training_without_steps():
    with pytest.raises(errors.OptionRangeError, match="--steps"):
        face_models.main(["lm", "--steps", "0"])


# --- diffusion: what the shipped ones do ------------------------------------------------------------------------------


def test_the_weakened_base_draws_pictures_in_the_asked_colour_and_follows_captions_only_in_part(weakened):
    means = face_models.family_means(face_models.control(weakened, generator(), per_caption=2))
    assert 0.3 < means["face"] < 0.9 and 0.4 < means["landscape"] < 0.95


def test_the_clean_base_follows_captions_better(weakened):
    clean = face_models.load_face_diffusion(weakened=False)
    rows = face_models.control(clean, generator(), per_caption=2)
    assert min(row["colour"] for row in rows.values()) > 0.9
    weak = face_models.family_means(face_models.control(weakened, generator(), per_caption=2))
    assert face_models.family_means(rows)["face"] > weak["face"] + 0.05


def test_the_shipped_base_serves_as_a_component(weakened):
    from sysdpo_lab.components.diffusion import Diffusion

    unet, scheduler, encoder, patch = weakened
    images = Diffusion(
        "images", ["captions"], unet, scheduler, encoder, weight=1.0, patch=patch, value_range=(0, 1),
        captions=language.split_captions, image_shape=(3, 24, 24), steps=4,
    )  # fmt: skip
    answer = language.join_captions(requesting.oracle_captions(requesting.EXAMPLE))
    (drawn,) = images.sample({"captions": [answer]}, generator=generator())
    assert drawn.shape == (3, 3, 24, 24) and drawn.min() >= 0 and drawn.max() <= 1
    noise = images.draw_noise([drawn], generator())
    assert images.log_prob([drawn], {"captions": [answer]}, noise).isfinite().all()


@pytest.mark.parametrize("family, least", [("face", 0.8), ("landscape", 0.75)])
def test_the_judge_agrees_with_an_independent_fit_on_the_pictures_of_the_diffusion_model(weakened, family, least):
    """Nobody knows the true levels of these pictures; the nearest drawing says what they are without the judge's readings."""
    captions = [
        str(language.Caption(family, ((attribute, degree),), "green"))
        for attribute in drawing.ATTRIBUTES[family]
        for degree in ("not", "somewhat", "fairly", "extremely")
    ]
    pictures = face_diffusion.sample(weakened, captions, generator(9))
    levels, left = measuring.fitted(pictures, family, steps=150)
    near = left <= left.quantile(0.9)  # now and then the fit is caught in a poor minimum
    measured = measuring.measure(pictures, family)
    for a, attribute in enumerate(drawing.ATTRIBUTES[family]):
        assert measuring.correlation(levels[near, a], measured[near, a]) > least, attribute
    assert float(left.median()) < 0.06


@pytest.mark.parametrize("family", drawing.FAMILIES)
def test_the_fit_finds_the_levels_of_drawn_pictures(family):
    pictures, levels, _ = measuring.random_pictures(family, 6, generator(10))
    found, left = measuring.fitted(pictures, family)
    assert (found - levels).abs().max() < 0.02 and left.max() < 0.01
