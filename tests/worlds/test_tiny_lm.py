"""The tiny language model: its words, its faulty training text, its training, and the start that it gives the system."""

import shutil

import pytest
import torch

from sysdpo_lab import errors, paths
from sysdpo_lab.worlds import restaurants, tiny_lm
from sysdpo_lab.worlds.restaurants import Record, judge


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def shipped():
    return tiny_lm.load_tiny_lm()


@pytest.fixture(scope="module")
def measured(shipped):
    return tiny_lm.measure(*shipped, tiny_lm.heldout_records(300), generator(tiny_lm.SEED))


# --- tokenizer and text -----------------------------------------------------------------------------------------------


def test_every_text_of_the_world_is_in_the_vocabulary_and_comes_back_from_its_tokens(shipped):
    _, tokenizer = shipped
    g = generator(1)
    texts = [restaurants.render(record) for record in restaurants.records(g, 100)]
    texts += [answer for _, answer in tiny_lm.training_texts(200, g)]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        back = tokenizer.decode(ids, skip_special_tokens=True)
        assert tokenizer(back)["input_ids"] == ids
    assert tokenizer.decode(tokenizer("Old Mill is cheap.")["input_ids"]) == "Old Mill is cheap."


def test_a_prompt_tokenizes_with_its_markers_and_nothing_added(shipped):
    _, tokenizer = shipped
    ids = tokenizer(restaurants.TINY_DRAFT.format(x="name: Old Mill"))["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<draft>", "name", ":", "Old", "Mill", "<write>"]
    assert tokenizer.bos_token_id is None and tokenizer.chat_template is None
    assert tokenizer.padding_side == "left" and tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_shipped_tokenizer_is_the_one_that_the_code_builds(shipped):
    assert tiny_lm.build_tokenizer().get_vocab() == shipped[1].get_vocab()


def test_training_never_sees_a_held_out_record():
    for prompt, _ in tiny_lm.training_texts(200, generator(2)):
        x = prompt.split("> ", 1)[1].split(" <")[0]
        assert restaurants.split_of(restaurants.parse(x)) == "train"


def test_a_refinement_keeps_what_its_draft_says_more_often_than_it_adds():
    record = Record("Old Mill", food="Thai", price="cheap", area="harbour", near="museum")
    full, bare = restaurants.sentence(record), restaurants.sentence(Record("Old Mill"))
    g = generator(3)
    mean = {
        d: sum(judge(record, tiny_lm.faulty_refinement(record, d, g)).score for _ in range(200)) / 200
        for d in (full, bare)
    }
    assert mean[full] > 0.85 and mean[bare] < 0.65


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_training_lowers_the_loss_and_the_same_seed_gives_the_same_weights():
    before = torch.get_rng_state()
    first, _, losses = tiny_lm.train(steps=12, batch=16, seed=5)
    again, _, _ = tiny_lm.train(steps=12, batch=16, seed=5)
    other, _, _ = tiny_lm.train(steps=1, batch=16, seed=6)
    assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] > 3.5 and sum(losses[-3:]) / 3 < losses[0] - 0.8
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_the_loss_counts_the_answers_tokens_only(shipped):
    """Against a plain sum over one row at a time, without padding."""
    model, tokenizer = shipped
    texts = tiny_lm.training_texts(4, generator(4))
    total, count = 0.0, 0
    with torch.no_grad():
        for prompt, answer in texts:
            start = tokenizer(prompt)["input_ids"]
            ids = torch.tensor([start + tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]])
            log_probs = model(input_ids=ids).logits.log_softmax(-1)[0, :-1]
            taken = log_probs.gather(1, ids[0, 1:, None])[len(start) - 1 :]
            total, count = total - float(taken.sum()), count + len(taken)
        assert float(tiny_lm.answer_loss(model, tokenizer, texts)) == pytest.approx(total / count, abs=1e-5)


def test_training_is_silent_outside_a_terminal(capsys):
    tiny_lm.train(steps=1, batch=2)
    assert capsys.readouterr() == ("", "")


# --- the start --------------------------------------------------------------------------------------------------------


def test_the_system_starts_between_bad_and_good_with_valid_sentences(measured):
    for mode in ("greedy", "sampled"):
        assert 0.3 <= measured[f"refine, {mode}"] <= 0.8
        assert measured[f"validity of refine, {mode}"] >= 0.9


def test_a_good_draft_makes_a_good_refinement(measured):
    assert measured["refine, greedy, perfect draft"] - measured["refine, greedy, bare draft"] > 0.4
    assert measured["refine, greedy, perfect draft"] - measured["refine, greedy"] > 0.2


def test_the_card_states_what_is_measured(measured):
    card = (paths.data_folder() / "tiny-lm" / "CARD.md").read_text(encoding="utf-8")
    rows = dict(
        line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ") and line != "| | |"
    )
    for name, value in measured.items():
        assert float(rows[name]) == pytest.approx(
            value, abs=0.2 if "words" in name else 0.02
        )  # processors round otherwise


# --- files ------------------------------------------------------------------------------------------------------------


def test_loading_is_silent_leaves_the_random_state_and_gives_what_transformers_loads(shipped, capsys):
    from transformers import AutoModelForCausalLM

    before = torch.get_rng_state()
    model, _ = tiny_lm.load_tiny_lm()
    assert capsys.readouterr() == ("", "") and torch.equal(torch.get_rng_state(), before)
    other = AutoModelForCausalLM.from_pretrained(paths.data_folder() / "tiny-lm", dtype=torch.float32).eval()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)


def test_the_shipped_model_is_fp32_in_evaluation_mode_and_small(shipped):
    model, _ = shipped
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    assert 300_000 <= sum(p.numel() for p in model.parameters()) <= 600_000


def test_a_changed_file_is_refused_and_a_missing_one_named(tmp_path):
    folder = tmp_path / "tiny-lm"
    shutil.copytree(paths.data_folder() / "tiny-lm", folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(errors.WeightsHashError, match="config.json"):
        tiny_lm.load_tiny_lm(folder)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    with pytest.raises(errors.MissingWeightsError, match="makes it again"):
        tiny_lm.load_tiny_lm(folder)
    with pytest.raises(errors.MissingWeightsError, match="SHA256SUMS is missing"):
        tiny_lm.load_tiny_lm(tmp_path / "nowhere")


def test_the_command_writes_a_folder_that_loads(tmp_path, capsys):
    tiny_lm.write_model(tmp_path / "lm", steps=2, items=3)
    model, tokenizer = tiny_lm.load_tiny_lm(tmp_path / "lm")
    assert len(tokenizer) == model.config.vocab_size
    assert {"CARD.md", "SHA256SUMS", "model.safetensors"} <= {file.name for file in (tmp_path / "lm").iterdir()}
    assert "steps 2" in (tmp_path / "lm" / "CARD.md").read_text(encoding="utf-8")
