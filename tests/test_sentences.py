"""Sentence vectors: unit length, independent of the batch, and MiniLM's own sense of meaning."""

import pytest
import torch

from sysdpo_lab import errors, sentences

TEXTS = [
    "A cheap Thai place by the river.",
    "Thai food at low prices near the water.",
    "The stock market fell on Monday.",
]


@pytest.fixture(scope="module")
def encoder():
    return sentences.load_sentence_encoder()


@pytest.mark.real_weights
def test_like_sentences_are_closer_than_unlike_ones(encoder):
    vectors = encoder.encode(TEXTS)
    cosines = vectors @ vectors.T
    assert vectors.dtype == torch.float32 and torch.allclose(cosines.diagonal(), torch.ones(3), atol=1e-5)
    assert cosines[0, 1] > 0.5 > 0.2 > cosines[0, 2]


@pytest.mark.real_weights
def test_a_vector_does_not_depend_on_its_neighbours(encoder):
    together = encoder.encode([*TEXTS, "x " * 100])
    alone = torch.cat([encoder.encode([text]) for text in TEXTS])
    assert torch.allclose(together[:3], alone, atol=1e-5)


@pytest.mark.real_weights
def test_the_vector_is_the_masked_mean_of_the_states(encoder):
    tokens = encoder.tokenizer(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        mean = encoder.model(**tokens).last_hidden_state[0].mean(0)
    assert torch.allclose(encoder.encode(TEXTS[:1])[0], mean / mean.norm(), atol=1e-5)


@pytest.mark.real_weights
def test_an_empty_text_is_refused_by_row(encoder):
    with pytest.raises(errors.EmptyAnswerError, match="row 1"):
        encoder.encode(["a", "  "])
    assert encoder.encode([]).shape == (0, 384)


def test_an_unknown_encoder_is_a_named_error(tmp_path):
    with pytest.raises(errors.MissingModelError, match="no config.json"):
        sentences.load_sentence_encoder(tmp_path)
