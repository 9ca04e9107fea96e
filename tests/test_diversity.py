"""Diversity measures against values worked out by hand."""

import math

import pytest
import torch

from sysdpo_lab import diversity, errors


def test_distinct_n_is_the_share_of_different_n_grams():
    texts = ["the cat sat", "the cat ran"]  # bigrams: the-cat twice, cat-sat, cat-ran; words: 4 different of 6
    assert diversity.distinct_n(texts, 2) == 3 / 4 and diversity.distinct_n(texts, 1) == 4 / 6
    assert diversity.distinct_n(["one"], 2) == 0.0 == diversity.distinct_n([], 1)
    with pytest.raises(errors.UnknownOptionError):
        diversity.distinct_n(texts, 0)


def test_bleu_is_brevity_times_the_geometric_mean_of_precisions():
    candidate, reference = "the the cat".split(), "the cat sat here".split()
    # words: "the" clipped to 1, cat 1: 2/3; pairs (the the), (the cat): (1+1)/(2+1); triples: (0+1)/(1+1); exp(1 - 4/3)
    expected = math.exp(-1 / 3) * (2 / 3 * 2 / 3 * 1 / 2) ** (1 / 3)
    assert diversity.bleu(candidate, [reference]) == pytest.approx(expected)


def test_bleu_counts_the_best_reference_for_each_n_gram_and_the_closest_length():
    assert diversity.bleu("a b".split(), ["a x".split(), "b y".split()], order=1) == 1.0
    assert diversity.bleu("a b".split(), ["a b".split(), "a b c d e".split()]) == pytest.approx(1.0)
    assert diversity.bleu([], [["a"]]) == diversity.bleu(["a"], []) == diversity.bleu(["a"], [["b"]]) == 0.0


def test_self_bleu_is_1_for_copies_and_0_without_a_common_word():
    assert diversity.self_bleu(["a b c d"] * 3) == pytest.approx(1.0)
    assert diversity.self_bleu(["a b", "c d", "e f"]) == 0.0
    with pytest.raises(errors.UnknownOptionError, match="1 text"):
        diversity.self_bleu(["a"])


def test_a_more_diverse_set_scores_so_by_every_measure():
    alike = ["a cheap thai place by the river", "a cheap thai place near the river"]
    apart = ["a cheap thai place by the river", "come for breakfast and stay long"]
    assert diversity.distinct_n(apart) > diversity.distinct_n(alike)
    assert diversity.self_bleu(apart) < diversity.self_bleu(alike)


class Axes:
    def encode(self, texts):
        return torch.stack([torch.eye(3)["abc".index(text)] for text in texts])


def test_embedding_distance_is_the_mean_over_pairs():
    assert diversity.embedding_distance(["a", "a", "b"], Axes()) == pytest.approx(2 / 3)  # one of three pairs is equal
    assert diversity.embedding_distance(["a"], Axes()) == 0.0


def test_the_effective_number_is_k_for_equal_weights_and_1_for_one_of_them():
    rows = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [0.0, -1e9, -torch.inf, -torch.inf], [math.log(3.0), 0.0, -torch.inf, -torch.inf]]
    )
    assert diversity.effective_number(rows).tolist() == pytest.approx([4.0, 1.0, 1 / (0.75**2 + 0.25**2)])
    with pytest.raises(errors.NonFiniteError):
        diversity.effective_number(torch.full((1, 2), -torch.inf))


def test_near_duplicates_point_at_the_first_like_text():
    texts = [
        "a cheap thai place by the river",
        "go there for breakfast",
        "a cheap thai place near the river",
        "go there for breakfast",
    ]
    assert diversity.near_duplicates(texts) == [None, None, 0, 1]
    assert diversity.near_duplicates(texts, 1.1) == [None] * 4
