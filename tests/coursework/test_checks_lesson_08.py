"""Lesson 08's checks against answers as learners write them."""

import pytest
import torch

from sysdpo_lab.coursework.checks import lesson_08, message


def said(check, answer):
    return message(check, answer) or "right"


# --- noise error ------------------------------------------------------------------------------------------------------


def noise_error(prediction, output, x0, eps, abar, reduce=lambda row: sum(row) / len(row)):
    found = []
    for out, x, e, bar in zip(output.tolist(), x0.tolist(), eps.tolist(), abar.tolist()):
        alpha, sigma = bar**0.5, (1 - bar) ** 0.5
        row = []
        for o, a, b in zip(out, x, e):
            noisy = alpha * a + sigma * b
            guess = {"epsilon": o, "sample": (noisy - alpha * o) / sigma, "v_prediction": sigma * noisy + alpha * o}[
                prediction
            ]
            row.append((b - guess) ** 2)
        found.append(reduce(row))
    return found


def by_factor(prediction, output, x0, eps, abar):
    """The own error times its factor, instead of a conversion: right too."""
    alpha, sigma = abar.sqrt()[:, None], (1 - abar).sqrt()[:, None]
    wanted = {"epsilon": eps, "sample": x0, "v_prediction": alpha * eps - sigma * x0}[prediction]
    factor = {"epsilon": 1.0, "sample": abar / (1 - abar), "v_prediction": abar}[prediction]
    return factor * (wanted - output).square().mean(1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (noise_error, "right"),
        (by_factor, "right"),
        (lambda *case: noise_error(*case, reduce=sum), "are added up"),
        (lambda kind, out, x0, eps, abar: noise_error("epsilon", out, x0, eps, abar), "taken for eps_hat"),
        (lambda kind, out, x0, eps, abar: by_factor(kind, out, x0, eps, torch.ones(len(abar)) / 2), "returned"),
        (lambda *case: torch.tensor(noise_error(*case)).mean(), "one number for all images"),
    ],
)
def test_noise_error(answer, words):
    assert words in said(lesson_08.check_noise_error, answer)


# --- weights ----------------------------------------------------------------------------------------------------------


def weights(abar, size, t=None, ratio=lambda a, b: (a / (1 - a)) / (b / (1 - b)) - 1):
    values = abar.tolist()
    return [(t or len(values)) * size / 2 * ratio(a, b) for a, b in zip(values, values[1:])]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (weights, "right"),
        (lambda abar, size: weights(abar, 1), "D is missing"),
        (lambda abar, size: weights(abar, size, t=1), "T is missing"),
        (lambda abar, size: weights(abar, size, t=len(abar) - 1), "the factor is T"),
        (lambda abar, size: weights(abar, 2 * size), "the 1/2"),
        (lambda abar, size: weights(abar, size, ratio=lambda a, b: a / b - 1), "ratio of abar"),
        (lambda abar, size: weights(abar, size, ratio=lambda a, b: a / (1 - a) - b / (1 - b)), "error of x0"),
        (lambda abar, size: [0.0] + weights(abar, size), "returned"),
    ],
)
def test_bound_weights(answer, words):
    assert words in said(lesson_08.check_bound_weights, answer)


# --- log-ratio --------------------------------------------------------------------------------------------------------


def log_ratio(policy, reference, x0, abar, weights, draw, sign=-1, reduce=torch.mean, once=True):
    def error(model, t, eps):
        bar = abar[t][:, None]
        return reduce((eps - model(bar.sqrt() * x0 + (1 - bar).sqrt() * eps, t)) ** 2, 1)

    t, eps = draw()
    first = weights[t] * error(policy, t, eps)
    if not once:
        t, eps = draw()
    return sign * (first - weights[t] * error(reference, t, eps))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (log_ratio, "right"),
        (lambda *case: log_ratio(*case, sign=1), "the sign is flipped"),
        (lambda *case: log_ratio(*case, reduce=torch.sum), "are added up"),
        (lambda *case: log_ratio(*case, once=False), "draw once"),
        (
            lambda p, r, x0, abar, w, draw: log_ratio(p, r, x0, abar, torch.ones(len(w)), draw),
            "the weight of the drawn timestep",
        ),
        (
            lambda p, r, x0, abar, w, draw: log_ratio(p, r, x0, abar, w.mean().expand(len(w)), draw),
            "one weight for all",
        ),
        (lambda p, r, *rest: log_ratio(r, p, *rest), "the sign is flipped"),
        (lambda *case: log_ratio(*case).sum(), "returned"),
    ],
)
def test_bound_log_ratio(answer, words):
    assert words in said(lesson_08.check_bound_log_ratio, answer)


# --- margin -----------------------------------------------------------------------------------------------------------


def margin(cw, cl, ew, el, weight, beta, images=sum):
    found = []
    for b in range(len(cw)):
        parts = [(ew[0, b, i] - ew[1, b, i]) - (el[0, b, i] - el[1, b, i]) for i in range(ew.shape[2])]
        found.append(beta * (cw[b] - cl[b]) - beta * weight * images(parts))
    return torch.stack(found)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (margin, "right"),
        (lambda *case: margin(*case, images=lambda parts: sum(parts) / len(parts)), "a mean over the images"),
        (lambda cw, cl, ew, el, w, beta: margin(cw, cl, el, ew, w, beta), "wrong sign"),
        (
            lambda cw, cl, ew, el, w, beta: beta * (cw - cl) - w * ((ew[0] - ew[1]) - (el[0] - el[1])).sum(1),
            "the captions only",
        ),
        (lambda cw, cl, ew, el, w, beta: margin(cw, cl, ew, el, w, 1.0), "beta times it"),
        (lambda cw, cl, ew, el, w, beta: margin(cl, cw, ew, el, w, beta), "returned"),
        (lambda cw, cl, ew, el, w, beta: margin(cw, cl, ew * 0, el * 0, w, beta), "the images are missing"),
    ],
)
def test_system_margin(answer, words):
    assert words in said(lesson_08.check_system_margin, answer)


# --- order and preference score ---------------------------------------------------------------------------------------


def scores(rows, number, strict=True, keep=True, bad=-1.0):
    orders, values = [], []
    for row in rows:
        if row is None or len(row) != number:
            if keep:
                orders.append(0.0)
                values.append(bad)
            continue
        a = row.tolist()
        n = len(a)
        line = [a[0] + i * (a[-1] - a[0]) / (n - 1) for i in range(n)]
        orders.append(float(all(y > x if strict else y >= x for x, y in zip(a, a[1:]))))
        values.append(a[-1] - a[0] - sum(abs(x - y) for x, y in zip(a, line)) / n)
    return {"order_consistency": sum(orders) / len(orders), "preference_score": sum(values) / len(values)}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (scores, "right"),
        (lambda rows, n: scores(rows, n, strict=False), "must be strict"),
        (lambda rows, n: scores(rows, n, keep=False), "left out of the denominator"),
        (lambda rows, n: scores(rows, n, bad=0.0), "not 0"),
        (lambda rows, n: scores(rows, n)["order_consistency"], "returned"),
    ],
)
def test_sequence_scores(answer, words):
    assert words in said(lesson_08.check_sequence_scores, answer)
