"""Lesson 09's checks against answers as learners write them."""

import math

import pytest
import torch

from sysdpo_lab.coursework.checks import lesson_09, message


def said(check, answer):
    return message(check, answer) or "right"


def memory(base, trained, width, copy, each=(4, 4, 4, 4)):
    total = base * width + sum(size * trained for size in each)
    return total + base * width if copy else total


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (memory, "right"),
        (lambda *case: memory(*case, each=(4, 4)), "two moments"),
        (lambda *case: memory(*case, each=(4, 4, 4)), "is missing"),
        (lambda base, trained, width, copy: memory(base, trained, width, True), "where there is none"),
        (lambda base, trained, width, copy: memory(base, trained, width, False), "missing where there is one"),
        (lambda base, trained, width, copy: memory(base, base, width, copy), "only the trained part"),
        (lambda *case: memory(*case) / 2**30, "returned"),
    ],
)
def test_training_memory(answer, words):
    assert words in said(lesson_09.check_training_memory, answer)


def cost(batch, tokens, images, timesteps, policy=3, reference=1):
    rows = 2 * batch * (policy + reference)
    return {"tokens": rows * tokens, "network calls": rows * images * timesteps}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (cost, "right"),
        (lambda *case: cost(*case, policy=1), "half of it is missing"),
        (lambda *case: cost(*case, reference=0), "reference's forward pass"),
        (lambda *case: cost(*case, reference=3), "needs only a forward pass"),
        (lambda batch, tokens, images, timesteps: cost(batch, tokens, images, 1), "several timesteps"),
        (lambda batch, tokens, images, timesteps: cost(batch, tokens, 1, timesteps), "several images"),
        (lambda *case: cost(*case)["tokens"], "returned"),
    ],
)
def test_step_cost(answer, words):
    assert words in said(lesson_09.check_step_cost, answer)


def size(p, q, a, b, total=1, up=math.ceil):
    return total * up((a + b) ** 2 * (p - p * p + q - q * q) / (q - p) ** 2)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (size, "right"),
        (lambda *case: size(*case, total=2), "both arms together"),
        (lambda *case: size(*case, up=math.floor), "round up"),
        (lambda p, q, a, b: size(p, q, a, 0.0), "z_power is missing"),
        (lambda p, q, a, b: math.ceil((a * a + b * b) * (p - p * p + q - q * q) / (q - p) ** 2), "then square the sum"),
        (lambda p, q, a, b: math.ceil((a + b) ** 2 * (p - p * p + q - q * q) / abs(q - p)), "not squared"),
    ],
)
def test_sample_size(answer, words):
    assert words in said(lesson_09.check_sample_size, answer)


def level(pictures, low, high, scale):
    found = []
    for picture in pictures:
        cosines = [float(picture @ text / (picture.norm() * text.norm())) for text in (low, high)]
        found.append(math.exp(scale * cosines[1]) / sum(math.exp(scale * c) for c in cosines))
    return found


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (level, "right"),
        (lambda x, low, high, scale: level(x, high, low, scale), "the low text"),
        (lambda x, low, high, scale: level(x, low, high, 1.0), "the scale is missing"),
        (
            lambda x, low, high, scale: torch.softmax(scale * torch.stack([x @ low, x @ high], 1), 1)[:, 1],
            "not normalised",
        ),
        (lambda x, low, high, scale: [1 - v for v in level(x, low, high, scale)], "the low text"),
    ],
)
def test_clip_level(answer, words):
    assert words in said(lesson_09.check_clip_level, answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda public, half, beta: (public / 2 if half else public) / beta, "right"),
        (lambda public, half, beta: public / beta, "a factor 1/2"),
        (lambda public, half, beta: public / 2 / beta, "one of the two conventions only"),
        (lambda public, half, beta: (public / 2 if half else public) * beta, "multiply your W by beta"),
        (lambda public, half, beta: 2500.0, "returned"),
    ],
)
def test_equivalent_weight(answer, words):
    assert words in said(lesson_09.check_equivalent_weight, answer)
