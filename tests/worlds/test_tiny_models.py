"""The tiny language models: their words, their faulty training text, their training, the starts that they give, their files."""

import re
import shutil

import pytest
import torch

from sysdpo_lab import errors, paths
from sysdpo_lab.worlds import (
    arithmetic,
    arithmetic_lm,
    merge_lm,
    passages,
    passages_lm,
    restaurants,
    tiny_lm,
    tiny_models,
)
from sysdpo_lab.worlds.restaurants import Record, judge

RECIPES = {lm.RECIPE.folder: lm.RECIPE for lm in (tiny_lm, merge_lm, arithmetic_lm, passages_lm)}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
MODELS, MEASURED = {}, {}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def shipped(recipe):
    if recipe.folder not in MODELS:
        MODELS[recipe.folder] = tiny_models.load(recipe)
    return MODELS[recipe.folder]


def card_of(recipe):
    return (paths.data_folder() / recipe.folder / "CARD.md").read_text(encoding="utf-8")


def measured(recipe):
    """What the card measured, measured again; once a module."""
    if recipe.folder not in MEASURED:
        items = int(re.search(r"over (\d+) held-out", card_of(recipe))[1])
        held_out = tiny_models.heldout_records(recipe, items)
        MEASURED[recipe.folder] = tiny_models.measure(recipe, *shipped(recipe), held_out, generator(tiny_models.SEED))
    return MEASURED[recipe.folder]


# --- tokenizer and text -----------------------------------------------------------------------------------------------


@every_recipe
def test_every_text_of_the_world_is_in_the_vocabulary_and_comes_back_from_its_tokens(recipe):
    _, tokenizer = shipped(recipe)
    g = generator(1)
    texts = [recipe.world.render(record) for record in recipe.world.records(g, 100)]
    texts += [answer for _, answer in recipe.texts(200, g)]
    texts += [text for pair in recipe.world.preference_pairs(40, g) for text in (pair.chosen, pair.rejected)]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        back = tokenizer.decode(ids, skip_special_tokens=True)
        assert tokenizer(back)["input_ids"] == ids
    chosen = recipe.world.stored_pairs("heldout")[0].chosen
    assert tokenizer.decode(tokenizer(chosen)["input_ids"]) == chosen


@every_recipe
def test_a_prompt_tokenizes_with_its_markers_and_nothing_added(recipe):
    _, tokenizer = shipped(recipe)
    for role in (role for chain in recipe.chains for role in chain):
        ids = tokenizer(recipe.world.PROMPTS["tiny"][role].format(x="name", draft="a", answer1="a", answer2="a"))[
            "input_ids"
        ]
        tokens = tokenizer.convert_ids_to_tokens(ids)
        assert (tokens[0], tokens[-1]) == (f"<{role}>", "<write>") and set(tokens) <= {
            *recipe.markers,
            "name",
            "a",
            "<unk>",
        }
    assert tokenizer.bos_token_id is None and tokenizer.chat_template is None
    assert tokenizer.padding_side == "left" and tokenizer.pad_token_id != tokenizer.eos_token_id


@every_recipe
def test_the_shipped_tokenizer_is_the_one_that_the_code_builds(recipe):
    built = tiny_models.build_tokenizer(recipe.words(), recipe.markers)
    assert built.get_vocab() == shipped(recipe)[1].get_vocab()


@every_recipe
def test_training_never_sees_a_held_out_record_and_plays_every_role(recipe):
    texts = recipe.texts(80, generator(2))
    for prompt, _ in texts:
        x = prompt.split("> ", 1)[1].split(" <")[0]
        assert recipe.world.split_of(recipe.world.parse(x)) == "train"
    roles = {role for chain in recipe.chains for role in chain}
    assert {prompt.split(">")[0].strip("<") for prompt, _ in texts} == roles
    seeing = any(prompt.startswith("<answer2>") and "<sep>" in prompt for prompt, _ in texts)
    assert seeing == ("merge" in roles)


def test_a_refinement_keeps_what_its_draft_says_more_often_than_it_adds():
    record = Record("Old Mill", food="Thai", price="cheap", area="harbour", near="museum")
    full, bare = restaurants.sentence(record), restaurants.sentence(Record("Old Mill"))
    g = generator(3)
    mean = {
        d: sum(judge(record, tiny_lm.faulty_refinement(record, d, g)).score for _ in range(200)) / 200
        for d in (full, bare)
    }
    assert mean[full] > 0.85 and mean[bare] < 0.65


def test_a_refined_plan_says_its_last_number_and_sometimes_takes_the_missing_step():
    record = arithmetic.Record("packed-less", "Ada", "books", 3, 4, 5, "bags")
    g = generator(3)
    said = [arithmetic_lm.faulty_refinement(record, "3 x 4 = 12", g) for _ in range(300)]
    completed = sum(arithmetic.judge(record, text).numbers[-1] == 7 for text in said) / 300
    assert completed == pytest.approx(arithmetic_lm.REFINE_COMPLETES, abs=0.08)
    wrong = [arithmetic_lm.faulty_refinement(record, "3 x 4 = 12, 12 + 5 = 17", g) for _ in range(300)]
    repaired = sum(arithmetic.judge(record, text).numbers[-1] == 7 for text in wrong) / 300
    assert repaired == pytest.approx(arithmetic_lm.REFINE_REPAIRS, abs=0.08)


def test_a_careful_plan_is_right_and_a_hasty_one_is_wrong_in_its_own_way():
    g = generator(4)
    problems = [r for r in arithmetic.records(g, 400) if r.kind == "packed-less"]
    drafts = [(r, arithmetic_lm.faulty_draft(r, g)) for r in problems for _ in range(5)]
    right = {True: [], False: []}
    for record, draft in drafts:
        right[draft.startswith("First")].append(arithmetic_lm.calculations_of(draft)[-1][3] == record.answer)
    assert sum(right[True]) / len(right[True]) > 0.8 > 0.4 > sum(right[False]) / len(right[False])


def test_an_eager_answerer_seldom_refuses_and_a_careful_one_seldom_answers():
    g = generator(5)
    found = passages.records(g, 300)
    refusals = {
        role: sum(passages.judge(r, passages_lm.faulty_answer(role, r, g)).refuses for r in found) / 300
        for role in ("answer1", "answer2")
    }
    assert refusals["answer1"] < 0.35 and refusals["answer2"] > 0.6


def test_the_answerers_of_restaurants_tell_different_things_and_the_merger_joins_some_of_them():
    g = generator(6)
    found = restaurants.records(g, 300)
    firsts, seconds = ([merge_lm.faulty_answer(role, r, g) for r in found] for role in ("answer1", "answer2"))

    def share(texts, slot):
        given = [(r, t) for r, t in zip(found, texts) if slot in r.slots]
        return sum(slot in judge(r, t).present for r, t in given) / len(given)

    assert share(firsts, "food") > 0.7 > 0.5 > share(seconds, "food")
    assert share(seconds, "area") > 0.6 > 0.5 > share(firsts, "area")
    merged = [merge_lm.faulty_merger(r, a, b, g) for r, a, b in zip(found, firsts, seconds)]
    mean = [sum(judge(r, t).score for r, t in zip(found, texts)) / 300 for texts in (firsts, seconds, merged)]
    assert max(mean[:2]) + 0.05 < mean[2] < 0.85


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@every_recipe
def test_training_lowers_the_loss_and_the_same_seed_gives_the_same_weights(recipe):
    before = torch.get_rng_state()
    first, _, losses = tiny_models.train(recipe, steps=12, batch=16, seed=5)
    again, _, _ = tiny_models.train(recipe, steps=12, batch=16, seed=5)
    other, _, _ = tiny_models.train(recipe, steps=1, batch=16, seed=6)
    assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] > 3.5 and sum(losses[-3:]) / 3 < losses[0] - 0.8
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_the_loss_counts_the_answers_tokens_only():
    """Against a plain sum over one row at a time, without padding."""
    model, tokenizer = shipped(tiny_lm.RECIPE)
    texts = tiny_lm.training_texts(4, generator(4))
    total, count = 0.0, 0
    with torch.no_grad():
        for prompt, answer in texts:
            start = tokenizer(prompt)["input_ids"]
            ids = torch.tensor([start + tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]])
            log_probs = model(input_ids=ids).logits.log_softmax(-1)[0, :-1]
            taken = log_probs.gather(1, ids[0, 1:, None])[len(start) - 1 :]
            total, count = total - float(taken.sum()), count + len(taken)
        assert float(tiny_models.answer_loss(model, tokenizer, texts)) == pytest.approx(total / count, abs=1e-5)


def test_training_is_silent_outside_a_terminal(capsys):
    tiny_models.train(tiny_lm.RECIPE, steps=1, batch=2)
    assert capsys.readouterr() == ("", "")


# --- the start --------------------------------------------------------------------------------------------------------


@every_recipe
def test_each_system_starts_between_bad_and_good_with_valid_sentences(recipe):
    for chain in recipe.chains:
        for mode in ("greedy", "sampled"):
            assert 0.25 <= measured(recipe)[f"{chain[-1]}, {mode}"] <= 0.8
            assert measured(recipe)[f"validity of {chain[-1]}, {mode}"] >= 0.9


@pytest.mark.parametrize(
    "recipe", [r for r in RECIPES.values() if r.drafts], ids=[n for n, r in RECIPES.items() if r.drafts]
)
def test_a_good_draft_makes_a_good_refinement(recipe):
    found = measured(recipe)
    assert found["refine, greedy, perfect draft"] - found["refine, greedy, bare draft"] > 0.3
    assert found["refine, greedy, perfect draft"] - found["refine, greedy"] > 0.15


@every_recipe
def test_the_card_states_what_is_measured(recipe):
    lines = [line for line in card_of(recipe).splitlines() if line.startswith("| ") and line != "| | |"]
    rows = dict(line.strip("| ").split(" | ") for line in lines)
    for name, value in measured(recipe).items():
        if name in rows:  # the oldest card has fewer
            assert float(rows[name]) == pytest.approx(
                value, abs=0.2 if "words" in name else 0.02
            )  # processors round otherwise
    assert len(set(rows) & set(measured(recipe))) >= 10


# --- files ------------------------------------------------------------------------------------------------------------


@every_recipe
def test_loading_is_silent_leaves_the_random_state_and_gives_what_transformers_loads(recipe, capsys):
    from transformers import AutoModelForCausalLM

    before = torch.get_rng_state()
    model, _ = tiny_models.load(recipe)
    assert capsys.readouterr() == ("", "") and torch.equal(torch.get_rng_state(), before)
    other = AutoModelForCausalLM.from_pretrained(paths.data_folder() / recipe.folder, dtype=torch.float32).eval()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)


@every_recipe
def test_a_shipped_model_is_fp32_in_evaluation_mode_and_small(recipe):
    model, _ = shipped(recipe)
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    assert 300_000 <= sum(p.numel() for p in model.parameters()) <= 600_000
    assert sum(file.stat().st_size for file in (paths.data_folder() / recipe.folder).iterdir()) < 2e6


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


def test_the_roles_of_a_run_decide_which_model_of_restaurants_is_loaded():
    two, three = (restaurants.load_tiny(roles)[1].get_vocab() for roles in (tiny_models.TWO, tiny_models.THREE))
    assert "<refine>" in two and "<merge>" not in two and "<merge>" in three and "<refine>" not in three


@every_recipe
def test_the_command_writes_a_folder_that_loads(recipe, tmp_path, capsys, monkeypatch):
    heldout = tiny_models.heldout_records
    monkeypatch.setattr(tiny_models, "heldout_records", lambda recipe, n: heldout(recipe, 3))
    tiny_models.main(recipe, ["--out", str(tmp_path / "lm"), "--steps", "2"])
    model, tokenizer = tiny_models.load(recipe, tmp_path / "lm")
    assert len(tokenizer) == model.config.vocab_size
    assert {"CARD.md", "SHA256SUMS", "model.safetensors"} <= {file.name for file in (tmp_path / "lm").iterdir()}
    card = (tmp_path / "lm" / "CARD.md").read_text(encoding="utf-8")
    assert "steps 2" in card and f"python -m {recipe.command} --out data/{recipe.folder}" in card
    assert f"{recipe.chains[0][-1]}, greedy" in capsys.readouterr().out
