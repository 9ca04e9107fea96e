"""The word model: its sentences, its exact law, and its place among causal language models."""

import pytest
import torch

from sysdpo_lab import errors, samplers
from sysdpo_lab.decoding import Decoder, evaluating, greedy_tokens, sample_tokens
from sysdpo_lab.samplers.stochastic_beam import stochastic_beam_tokens
from sysdpo_lab.worlds import word_lm
from sysdpo_lab.worlds.word_lm import LONGEST, STOP, WORDS

TOKENS = {"max_new_tokens": LONGEST, "eos_token_id": STOP, "pad_token_id": STOP}


@pytest.fixture(scope="module")
def model():
    return word_lm.WordLM()


@pytest.fixture(scope="module")
def law(model):
    return word_lm.enumerate_sentences(model)


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_word_has_a_row_of_foreseen_words_that_sums_to_one():
    assert set(word_lm.NEXT) == set(WORDS)
    assert all(abs(sum(row.values()) - 1) < 1e-12 and set(row) <= set(WORDS) for row in word_lm.NEXT.values())


def test_each_row_of_the_table_is_a_distribution_without_zeros_and_without_ties_at_the_top():
    table = word_lm.transition_table()
    assert torch.allclose(table.sum(1), torch.ones(len(WORDS), dtype=torch.float64))
    assert (table > 0).all()
    assert all(len(set(row.tolist())) == len(WORDS) for row in table)  # a search never has to break a tie


def test_a_hand_computed_entry_of_the_table():
    # 0.99 x 0.6 + 0.01 x (11 - 4) / (0.5 + 10 + 9 + ... + 1)
    assert abs(word_lm.transition_table()[1, 4].item() - (0.594 + 0.01 * 7 / 55.5)) < 1e-12


# --- the model --------------------------------------------------------------------------------------------------------


def test_logits_are_not_yet_log_probabilities(model):
    assert (model(torch.tensor([[STOP, 1]])).logits.logsumexp(-1) > 1e-3)[0, 1]


def test_what_counts_is_the_last_word_and_how_many_words_stand_since_the_stop(model):
    here = model(torch.tensor([[STOP, 1, 4, 7]])).logits
    longer = model(torch.tensor([[STOP, 2, STOP, 1, 4, 7]])).logits
    assert torch.equal(here[0, -1], longer[0, -1])
    assert torch.equal(here[0, -1], model(torch.tensor([[STOP, 7]])).logits[0, -1])


def test_after_four_words_the_model_stops_and_not_before(model):
    logits = model(torch.tensor([[STOP, 1, 4, 7, 10]])).logits[0]
    assert torch.isfinite(logits[:4]).all()
    assert logits[4, STOP] == 0
    assert torch.isinf(logits[4, 1:]).all()


def test_a_longer_reading_gives_the_same_logits_as_a_shorter_one(model):
    ids = torch.tensor([[STOP, 3, 6, 9]])
    for end in range(1, 5):
        assert torch.equal(model(ids[:, :end]).logits, model(ids).logits[:, :end])


# --- the law of the sentences -----------------------------------------------------------------------------------------


def test_all_sentences_are_listed_once_with_probabilities_that_sum_to_one(law):
    assert len(set(law.token_ids)) == len(law) == 11111
    assert abs(law.log_probs.exp().sum().item() - 1) < 1e-12
    assert (law.log_probs.diff() <= 0).all()
    assert all(ids[-1] == STOP and STOP not in ids[:-1] for ids in law.token_ids)


def test_a_sentences_log_probability_is_the_sum_of_its_table_entries(law):
    table = word_lm.transition_table()
    for number in (0, 5, 700, 11000):
        ids, total = law.token_ids[number], 0.0
        for place, (before, word) in enumerate(zip((STOP, *ids), ids)):
            total += 0.0 if place == LONGEST - 1 else table[before, word].log().item()  # the fifth token is certain
        assert abs(law.log_probs[number].item() - total) < 1e-9


def test_the_likeliest_sentences_are_near_duplicates_and_another_activity_follows(law):
    assert law.activity[:6].tolist() == [0, 0, 0, 0, 0, 1]
    assert set(law.activity.tolist()) == {-1, 0, 1, 2}
    assert law.place[law.token_ids[17]] == 17


def test_sampled_sentences_follow_the_law(model, law):
    drawn = sample_tokens(
        model, *word_lm.prompts(4000), num_samples=1, generator=torch.Generator().manual_seed(0), **TOKENS
    )
    counts = torch.zeros(len(law))
    for ids in drawn.token_ids[:, 0].tolist():
        counts[law.place[word_lm.until_stop(ids)]] += 1
    p = law.log_probs[:10].exp()
    assert ((counts[:10] / 4000 - p).abs() < 4 * (p * (1 - p) / 4000).sqrt()).all()


def test_a_decoders_log_probabilities_are_the_models(model):
    ids, mask = word_lm.prompts(2)
    with evaluating(model):
        decoder = Decoder(model, ids, mask)
        assert not decoder.cached
        decoder.advance(torch.tensor([1, 3]))
        expected = word_lm.transition_table()[[1, 3]].log().float()
    assert torch.allclose(decoder.log_probs, expected, atol=1e-6)


def test_greedy_decoding_gives_the_likeliest_sentence(model, law):
    found = greedy_tokens(model, *word_lm.prompts(), **TOKENS)
    assert word_lm.until_stop(found.token_ids[0, 0].tolist()) == law.token_ids[0]


def test_one_wide_group_finds_the_top_of_the_list(model, law):
    found = samplers.diverse_beam_search(
        model, *word_lm.prompts(), num_groups=1, beams_per_group=6, diversity_penalty=0.0, length_penalty=0.0, **TOKENS
    )
    assert [word_lm.until_stop(ids) for ids in found.token_ids[0].tolist()] == list(law.token_ids[:6])
    assert torch.allclose(found.log_probs[0].double(), law.log_probs[:6], atol=1e-5)


def test_stochastic_beams_report_the_laws_log_probabilities(model, law):
    zero = torch.zeros(50, 1, dtype=torch.float64)
    found = stochastic_beam_tokens(
        model,
        *word_lm.prompts(50),
        k=3,
        log_probs=zero,
        gumbels=zero,
        generator=torch.Generator().manual_seed(0),
        **TOKENS,
    )
    at = torch.tensor([[law.place[word_lm.until_stop(ids)] for ids in row] for row in found.token_ids.tolist()])
    assert torch.allclose(found.log_probs, law.log_probs[at], atol=1e-5)
    assert all(len(set(row)) == 3 for row in at.tolist())


# --- texts ------------------------------------------------------------------------------------------------------------


def test_texts_come_back_from_their_tokens(law):
    for ids in law.token_ids[::500]:
        assert word_lm.encode(word_lm.text(ids)) == ids


def test_an_unknown_word_is_named():
    with pytest.raises(errors.TokenIdError, match="fly"):
        word_lm.encode("fly along rivers.")


def test_what_stands_behind_the_stop_is_no_part_of_a_sentence():
    assert word_lm.until_stop((1, 4, 7)) == (1, 4, 7)
    assert word_lm.text((1, 0, 4)) == "walk."
