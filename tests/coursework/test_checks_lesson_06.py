"""Lesson 06's checks against answers as learners write them, and the reference search against the library's."""

import math

import pytest
import torch

from sysdpo_lab import samplers
from sysdpo_lab.coursework.checks import lesson_06, message
from sysdpo_lab.worlds import word_lm
from sysdpo_lab.worlds.word_lm import STOP, Beam


def said(check, answer):
    return message(check, answer) or "right"


# --- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, *range(60, 70)])
@pytest.mark.parametrize(("groups", "width"), [(1, 1), (4, 1), (1, 3), (2, 2), (3, 2)])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0, 20.0])
def test_the_reference_search_is_the_librarys(seed, groups, width, penalty):
    model = word_lm.WordLM() if seed is None else lesson_06._babble(seed)
    for longest in (3, 5):
        found = [b for group in lesson_06.diverse_search(model, groups, width, penalty, longest) for b in group]
        ids, mask = word_lm.prompts()
        library = samplers.diverse_beam_search(
            model, ids, mask, num_groups=groups, beams_per_group=width, diversity_penalty=penalty, length_penalty=0.0,
            max_new_tokens=longest, eos_token_id=STOP, pad_token_id=STOP,
        )  # fmt: skip
        assert [beam.words for beam in found] == [word_lm.until_stop(row) for row in library.token_ids[0].tolist()]
        assert torch.allclose(torch.tensor([beam.log_prob for beam in found]), library.log_probs[0], atol=1e-4)
        assert torch.allclose(torch.tensor([beam.score for beam in found]), library.scores[0], atol=1e-4)


# --- steps ------------------------------------------------------------------------------------------------------------


def by_hand(model, words):
    logits = model(torch.tensor([[STOP, *words]])).logits[0, -1].tolist()
    total = math.log(sum(math.exp(value) for value in logits))
    return [value - total for value in logits]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (by_hand, "right"),
        (lambda model, words: model(torch.tensor([[STOP, *words]])).logits[0, -1], "these are logits"),
        (lambda model, words: [math.exp(v) for v in by_hand(model, words)], "these are probabilities"),
        (lambda model, words: by_hand(model, ()), "the first word of a sentence, whatever came before"),
        (
            lambda model, words: torch.log_softmax(model(torch.tensor([words])).logits[:, -1], 1)[0],
            "the full stop that stands",
        ),
        (lambda model, words: torch.log_softmax(model(torch.tensor([[STOP, *words]])).logits[0], -1), "returned"),
    ],
)
def test_next_log_probs(answer, words):
    assert words in said(lesson_06.check_next_log_probs, answer)


def fined(log_probs, taken, penalty, change=lambda value, penalty: value - penalty):
    result = log_probs.clone()
    for word in taken:
        result[..., word] = change(result[..., word], penalty)
    return result


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (fined, "right"),
        (lambda p, taken, penalty: fined(p, taken, -penalty), "the penalty is added"),
        (lambda p, taken, penalty: fined(p, set(taken), penalty), "pays for each of them"),
        (lambda p, taken, penalty: fined(p, taken, math.inf), "forbidden"),
        (lambda p, taken, penalty: p - penalty * len(taken), "all words pay"),
        (lambda p, taken, penalty: fined(p, taken, 1.0), "returned"),
    ],
)
def test_penalised(answer, words):
    assert words in said(lesson_06.check_penalised, answer)


def extended(beams, log_probs, scores, width, own=lambda o, s: o, fine=lambda o, s: s, keep=2):
    flat = []
    for i, beam in enumerate(beams):
        for word in range(log_probs.shape[1]):
            o, s = log_probs[i, word].item(), scores[i, word].item()
            flat.append((beam.score + fine(o, s), (*beam.words, word), beam.log_prob + own(o, s)))
    flat.sort(reverse=True)
    return [Beam(words, log_prob, score) for score, words, log_prob in flat[: keep * width]]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (extended, "right"),
        (lambda *case: [tuple(beam) for beam in extended(*case)], "right"),
        (lambda *case: extended(*case, own=lambda o, s: s), "log_prob got the penalised number"),
        (lambda *case: extended(*case, fine=lambda o, s: o), "grew by the model's own"),
        (lambda *case: extended(*case, keep=1), "return twice as many"),
        (lambda *case: extended(*case)[::-1], "worst first"),
        (lambda beams, *rest: extended([Beam(b.words, 0.0, 0.0) for b in beams], *rest), "the last word only"),
        (
            lambda beams, *rest: extended([Beam(b.words, b.log_prob, b.log_prob) for b in beams], *rest),
            "are given back",
        ),
        (lambda *case: extended(*case, keep=3), "returned"),
    ],
)
def test_extend(answer, words):
    assert words in said(lesson_06.check_extend, answer)


def sorted_out(extensions, width, look=None, fill=True):
    ended, going = [], []
    for rank, beam in enumerate(extensions):
        if beam.words[-1] == STOP:
            if rank < (width if look is None else look):
                ended.append(beam)
        elif len(going) < width and (fill or rank < width):
            going.append(beam)
    return ended, going


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (sorted_out, "right"),
        (lambda beams, width: sorted_out(beams, width, look=99), "below that the group had something better"),
        (lambda beams, width: sorted_out(beams, width, fill=False), "too few go on"),
        (lambda beams, width: ([], beams[:width]), "has reached its full stop goes on"),
        (lambda beams, width: sorted_out(beams, width)[::-1], "first what has ended"),
        (lambda beams, width: sorted_out(beams, width)[1], "returned"),
    ],
)
def test_sort_out(answer, words):
    assert words in said(lesson_06.check_sort_out, answer)


# --- the search, as one long function ---------------------------------------------------------------------------------


def search(model, groups, width, penalty, longest, slip=""):
    """Everything inline, with one slip of a learner."""
    opened = [[((), 0.0, 0.0)] for _ in range(groups)]
    ended, done = [[] for _ in range(groups)], [False] * groups
    counts = torch.zeros(len(word_lm.WORDS))
    for _ in range(longest):
        if slip != "counts never reset":
            fresh = torch.zeros(len(word_lm.WORDS))
            last, counts = counts, fresh
        for g in range(groups):
            if done[g]:
                continue
            candidates = []
            used = last if slip == "last step" else counts
            for words, own, score in opened[g]:
                for word, value in enumerate(by_hand_or_inf(model, words)):
                    fine = penalty * used[word].item()
                    fine = -fine if slip == "added" else fine
                    kept = own + value - (fine if slip == "score as log-prob" else 0.0)
                    candidates.append(((*words, word), kept, score + value - fine))
            candidates = sorted(candidates, key=lambda c: c[2], reverse=True)[: 2 * width]
            stops = [c for c in candidates[:width] if c[0][-1] == STOP and c[2] > -math.inf]
            opened[g] = [c for c in candidates if c[0][-1] != STOP][:width]
            if slip == "stop ignored":
                stops, opened[g] = [], candidates[:width]
            ended[g] = sorted(ended[g] + stops, key=lambda c: c[2], reverse=True)[:width]
            for words, *_ in candidates[:width] if slip == "stops fined" else opened[g]:
                counts[words[-1]] += 1
            done[g] = len(ended[g]) == width and ended[g][-1][2] >= candidates[0][2]
    for g in range(groups):
        rest = [c for c in opened[g] if c[2] > -math.inf and not done[g]]
        ended[g] = sorted(ended[g] + rest, key=lambda c: c[2], reverse=True)[:width]
    if slip == "one heap":
        flat = sorted((c for group in ended for c in group), key=lambda c: c[2], reverse=True)
        return [flat[i : i + width] for i in range(0, len(flat), width)]
    return ended


def by_hand_or_inf(model, words):
    return model(torch.tensor([[STOP, *words]])).logits[0, -1].log_softmax(-1).tolist()


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ("", "right"),
        ("added", "the penalty is added"),
        ("last step", "counts the words of the step before"),
        ("counts never reset", "counts the words of all steps so far"),
        ("score as log-prob", "log_prob holds the penalised score"),
        ("one heap", "lie in one list"),
        ("stop ignored", "go on behind their full stop"),
        ("stops fined", "fined for ending"),
    ],
)
def test_diverse_search(slip, words):
    assert words in said(lesson_06.check_diverse_search, lambda *case: search(*case, slip=slip))


def test_a_search_that_gives_texts_only_is_told_what_was_expected():
    answer = lambda *case: [[beam.words for beam in group] for group in lesson_06.diverse_search(*case)]  # noqa: E731
    assert "returned" in said(lesson_06.check_diverse_search, answer)


# --- drawing ----------------------------------------------------------------------------------------------------------


def perturbed(log_p, uniform, k, noise=lambda u: -math.log(-math.log(u))):
    keys = [value + noise(u) for value, u in zip(log_p.tolist(), uniform.tolist())]
    return sorted(range(len(keys)), key=lambda i: -keys[i])[:k]


def exponential_race(log_p, uniform, k):
    """The other well-known form: the smallest E / p with E exponential."""
    return (-uniform.log() / log_p.exp()).argsort()[:k]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (perturbed, "right"),
        (exponential_race, "right"),
        (lambda p, u, k: perturbed(p, u, k, lambda u: 0.0), "the noise is not used"),
        (lambda p, u, k: perturbed(p, u, k, lambda u: math.log(-math.log(u))), "the noise has the wrong sign"),
        (lambda p, u, k: perturbed(p, u, k, lambda u: -math.log(u)), "needs a second logarithm"),
        (lambda p, u, k: perturbed(p, u, k, lambda u: u), "turn them into Gumbel numbers"),
        (lambda p, u, k: perturbed(p.exp(), u, k), "add it to log-probabilities"),
        (lambda p, u, k: sorted(perturbed(p, u, k)), "the order says who was drawn first"),
        (lambda p, u, k: perturbed(p, u, k)[:1], "returned"),
    ],
)
def test_gumbel_top_k(answer, words):
    assert words in said(lesson_06.check_gumbel_top_k, answer)


def weights(drawn, p, each=lambda m, k, p: m / (k * p)):
    listed = drawn.tolist()
    return [each(listed.count(y), len(listed), value) if y in listed else 0.0 for y, value in enumerate(p.tolist())]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (weights, "right"),
        (lambda drawn, p: weights(drawn, p, lambda m, k, p: m / p), "the number of draws is missing"),
        (lambda drawn, p: weights(drawn, p, lambda m, k, p: 1 / (k * p)), "drawn twice weighs twice"),
        (lambda drawn, p: weights(drawn, p, lambda m, k, p: m / k), "the probability is missing"),
        (lambda drawn, p: weights(drawn, p, lambda m, k, p: m * p / k), "multiplies; it divides"),
        (lambda drawn, p: weights(drawn, p, lambda m, k, p: 1 / (1 - (1 - p) ** k)), "is unbiased too"),
        (lambda drawn, p: weights(drawn, p, lambda m, k, p: 1.0), "returned"),
    ],
)
def test_importance_weights(answer, words):
    assert words in said(lesson_06.check_importance_weights, answer)


def listed_sets(p, p_z, k, repeats):
    """All Y^k sets, one by one."""
    total = 0.0
    for number in range(len(p) ** k):
        drawn = [number // len(p) ** i % len(p) for i in range(k)]
        members = drawn if repeats == "count" else set(drawn)
        total += math.prod(p[y].item() for y in drawn) * sum((p[y] * p_z[y]).item() for y in members)
    return total


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (listed_sets, "right"),
        (lambda p, q, k, repeats: listed_sets(p, q, k, "drop"), "repeats are dropped in both cases"),
        (lambda p, q, k, repeats: listed_sets(p, q, k, "count"), "repeats are counted in both cases"),
        (lambda p, q, k, repeats: listed_sets(p, q, k, "drop" if repeats == "count" else "count"), "swapped"),
        (lambda p, q, k, repeats: listed_sets(p, q / p, k, repeats), "p(y) is missing"),
        (lambda p, q, k, repeats: listed_sets(p, q, k, repeats) / k, "the sum is divided by k"),
        (lambda p, q, k, repeats: (p * q).sum(), "returned"),
    ],
)
def test_expected_set_probability(answer, words):
    assert words in said(lesson_06.check_expected_set_probability, answer)
