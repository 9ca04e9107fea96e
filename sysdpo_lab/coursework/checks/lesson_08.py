"""Lesson 08: noise errors, the bound's weight, the log-ratio under shared noise, a pair's margin, order and preference score."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab.components import elbo
from sysdpo_lab.coursework.checks.core import Check, Mistake, fail
from sysdpo_lab.coursework.checks.lesson_00 import draws
from sysdpo_lab.worlds.faces import scoring

KINDS = ("epsilon", "v_prediction", "sample")


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _levels(generator: torch.Generator, *shape: int) -> Tensor:
    """Numbers in (0.1, 0.9)."""
    return 0.1 + 0.8 * torch.rand(*shape, generator=generator, dtype=torch.float64)


# --- the noise error --------------------------------------------------------------------------------------------------


def noise_error(
    prediction: str,
    output: Float[Tensor, "N D"],
    x0: Float[Tensor, "N D"],
    eps: Float[Tensor, "N D"],
    abar: Float[Tensor, " N"],
) -> Float[Tensor, " N"]:
    """Mean over the D numbers of (eps - eps_hat)^2, by the library."""
    eps_hat = elbo.as_noise(prediction, output, elbo.noised(x0, eps, abar), abar)
    return elbo.mean_square(eps_hat, eps)


def _outputs() -> list[tuple]:
    g = draws(80)
    return [
        (kind, _normal(g, n, d), _normal(g, n, d), _normal(g, n, d), _levels(g, n))
        for kind in KINDS
        for n, d in ((2, 3), (3, 2))
    ]


def _parts(x0: Tensor, eps: Tensor, abar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    alpha, sigma = abar.sqrt()[:, None], (1 - abar).sqrt()[:, None]
    return alpha, sigma, alpha * x0 + sigma * eps


def _own_error(kind, output, x0, eps, abar):
    alpha, sigma, _ = _parts(x0, eps, abar)
    wanted = {"epsilon": eps, "sample": x0, "v_prediction": alpha * eps - sigma * x0}[kind]
    return (wanted - output).square().mean(1)


def _sign_of_v(kind, output, x0, eps, abar):
    if kind != "v_prediction":
        return noise_error(kind, output, x0, eps, abar)
    alpha, sigma, x_t = _parts(x0, eps, abar)
    return (eps - (sigma * x_t - alpha * output)).square().mean(1)


def _not_rooted(kind, output, x0, eps, abar):
    alpha, sigma = abar[:, None], 1 - abar[:, None]
    x_t = alpha * x0 + sigma * eps
    guess = {"epsilon": output, "sample": (x_t - alpha * output) / sigma, "v_prediction": sigma * x_t + alpha * output}
    return (eps - guess[kind]).square().mean(1)


check_noise_error = Check(
    cases=_outputs,
    right=noise_error,
    mistakes=[
        Mistake(
            "output taken for noise",
            lambda kind, output, x0, eps, abar: (eps - output).square().mean(1),
            "the output is taken for eps_hat whatever it predicts; turn x0_hat and v_hat into eps_hat first",
        ),
        Mistake(
            "own error",
            _own_error,
            "this is the error of what the network predicts; on the noise each kind has a factor that depends on abar",
        ),
        Mistake(
            "sum over numbers",
            lambda kind, output, x0, eps, abar: noise_error(kind, output, x0, eps, abar) * x0.shape[1],
            "the D numbers are added up; e is their mean, and the D stands in the weight",
        ),
        Mistake(
            "mean over images too",
            lambda *case: noise_error(*case).mean(),
            "one number for all images; return one for each, shape (N,)",
        ),
        Mistake(
            "abar not rooted",
            _not_rooted,
            "abar is alpha squared: alpha = sqrt(abar), sigma = sqrt(1 - abar)",
        ),
        Mistake(
            "sign of v",
            _sign_of_v,
            "x0 and eps are right, v is not: v = alpha eps - sigma x0 and x_t = alpha x0 + sigma eps; solve both for eps",
        ),
        Mistake(
            "absolute error",
            lambda kind, output, x0, eps, abar: (
                (eps - elbo.as_noise(kind, output, elbo.noised(x0, eps, abar), abar)).abs().mean(1)
            ),
            "the errors are not squared",
        ),
    ],
)


# --- the weight -------------------------------------------------------------------------------------------------------


def bound_weights(abar: Float[Tensor, " T"], size: int) -> Float[Tensor, " T-1"]:
    """W(t) = T (D/2) (SNR(t-1)/SNR(t) - 1) for t = 2..T, by the library."""
    return elbo.elbo_weights("epsilon", abar, size)[1:]


def _schedules() -> list[tuple]:
    g = draws(81)
    falling = [_levels(g, steps).sort(descending=True).values for steps in (4, 6)]
    return [(falling[0], 3), (falling[1], 12)]


def _ratio(abar: Tensor) -> Tensor:
    snr = abar / (1 - abar)
    return snr[:-1] / snr[1:]


check_bound_weights = Check(
    cases=_schedules,
    right=bound_weights,
    mistakes=[
        Mistake(
            "T forgotten",
            lambda abar, size: size / 2 * (_ratio(abar) - 1),
            "T is missing: one timestep, drawn uniformly, stands for a sum over T of them",
        ),
        Mistake(
            "T - 1",
            lambda abar, size: (len(abar) - 1) * size / 2 * (_ratio(abar) - 1),
            "t is drawn from all T timesteps, t = 1 included, so the factor is T",
        ),
        Mistake(
            "D forgotten",
            lambda abar, size: len(abar) / 2 * (_ratio(abar) - 1),
            "D is missing: e is a mean over the D numbers, the bound has their sum",
        ),
        Mistake(
            "half forgotten",
            lambda abar, size: len(abar) * size * (_ratio(abar) - 1),
            "the 1/2 of the Gaussian's exponent is missing",
        ),
        Mistake(
            "minus 1 forgotten",
            lambda abar, size: len(abar) * size / 2 * _ratio(abar),
            "the -1 is missing: the weight of t is a *difference* of two signal-to-noise ratios, in units of SNR(t)",
        ),
        Mistake(
            "ratio upside down",
            lambda abar, size: len(abar) * size / 2 * (1 / _ratio(abar) - 1),
            "these are negative: SNR falls with t, so SNR(t-1)/SNR(t) is above 1",
        ),
        Mistake(
            "ratio of abar",
            lambda abar, size: len(abar) * size / 2 * (abar[:-1] / abar[1:] - 1),
            "this is the ratio of abar; SNR = abar / (1 - abar)",
        ),
        Mistake(
            "on x0",
            lambda abar, size: len(abar) * size / 2 * -(abar / (1 - abar)).diff(),
            "this is the weight for the error of x0; on the noise it is divided by SNR(t)",
        ),
        Mistake(
            "ratio of standard deviations",
            lambda abar, size: len(abar) * size / 2 * (_ratio(abar).sqrt() - 1),
            "a square root too many: SNR = alpha^2 / sigma^2",
        ),
    ],
)


# --- the log-ratio under one noise ------------------------------------------------------------------------------------

Denoiser = Callable[[Tensor, Tensor], Tensor]


def bound_log_ratio(
    policy: Denoiser,
    reference: Denoiser,
    x0: Float[Tensor, "N D"],
    abar: Float[Tensor, " T"],
    weights: Float[Tensor, " T"],
    draw: Callable,
) -> Float[Tensor, " N"]:
    """- W(t) (e_policy - e_reference), one draw of (t, eps) for both (E8)."""
    t, eps = draw()
    x_t = elbo.noised(x0, eps, abar[t])
    errors = [elbo.mean_square(model(x_t, t), eps) for model in (policy, reference)]
    return -weights[t] * (errors[0] - errors[1])


def _drawing(seed: int, steps: int, shape: tuple[int, int]) -> Callable:
    """A function that gives other (t, eps) at each call."""
    generator = draws(seed)
    return lambda: (torch.randint(steps, shape[:1], generator=generator), _normal(generator, *shape))


def _linear(a: float, b: float) -> Denoiser:
    return lambda x_t, t: a * x_t + b * (t[:, None] + 1) / 10


def _denoisers() -> list[tuple]:
    g, cases = draws(82), []
    for seed, (n, d, steps) in enumerate(((3, 4, 5), (5, 2, 8))):
        abar = _levels(g, steps).sort(descending=True).values
        weights, x0 = 100 * _levels(g, steps), _normal(g, n, d)
        models = _linear(0.5, 0.3), _linear(0.4, -0.2)
        cases.append((*models, x0, abar, weights, _drawing(90 + seed, steps, (n, d))))
    return cases


def _two_draws(policy, reference, x0, abar, weights, draw):
    found = []
    for model in (policy, reference):
        t, eps = draw()
        found.append(weights[t] * elbo.mean_square(model(elbo.noised(x0, eps, abar[t]), t), eps))
    return found[1] - found[0]


def _two_noises(policy, reference, x0, abar, weights, draw):
    (t, eps), (_, other) = draw(), draw()
    one, two = (elbo.mean_square(m(elbo.noised(x0, e, abar[t]), t), e) for m, e in ((policy, eps), (reference, other)))
    return -weights[t] * (one - two)


def _difference_of_guesses(policy, reference, x0, abar, weights, draw):
    t, eps = draw()
    x_t = elbo.noised(x0, eps, abar[t])
    return -weights[t] * (policy(x_t, t) - reference(x_t, t)).square().mean(1)


def _policy_alone(policy, reference, x0, abar, weights, draw):
    t, eps = draw()
    return -weights[t] * elbo.mean_square(policy(elbo.noised(x0, eps, abar[t]), t), eps)


def _reference_added(policy, reference, x0, abar, weights, draw):
    t, eps = draw()
    x_t = elbo.noised(x0, eps, abar[t])
    return -weights[t] * sum(elbo.mean_square(model(x_t, t), eps) for model in (policy, reference))


def _unweighted(policy, reference, x0, abar, weights, draw):
    return bound_log_ratio(policy, reference, x0, abar, torch.ones_like(weights), draw)


def _nothing_moved(answer: Callable) -> None:
    policy, _, *rest = _denoisers()[0]
    found = torch.as_tensor(answer(policy, policy, *rest))
    if float(found.abs().max()) > 1e-9:
        fail("bound_log_ratio: a policy that equals its reference must give exactly 0; do both see the same t and eps?")


check_bound_log_ratio = Check(
    cases=_denoisers,
    right=bound_log_ratio,
    mistakes=[
        Mistake(
            "sign flipped",
            lambda *case: -bound_log_ratio(*case),
            "the sign is flipped: a smaller error is a larger likelihood",
        ),
        Mistake(
            "sum over numbers",
            lambda policy, reference, x0, *rest: x0.shape[1] * bound_log_ratio(policy, reference, x0, *rest),
            "the squared errors are added up over the numbers; e is their mean (the D is in the weight already)",
        ),
        Mistake("weight forgotten", _unweighted, "the weight of the drawn timestep is missing"),
        Mistake(
            "mean weight",
            lambda policy, reference, x0, abar, weights, draw: bound_log_ratio(
                policy, reference, x0, abar, weights.mean().expand_as(weights), draw
            ),
            "one weight for all timesteps; take that of each image's own t",
        ),
        Mistake(
            "two draws",
            _two_draws,
            "policy and reference see different timesteps and noise: draw once, and give both the same x_t",
        ),
        Mistake(
            "two noises", _two_noises, "policy and reference see different noise: draw once, and give both the same x_t"
        ),
        Mistake(
            "distance of the guesses",
            _difference_of_guesses,
            "this is how far the two guesses lie apart; compare each with the true noise, then subtract",
        ),
        Mistake(
            "reference forgotten", _policy_alone, "the reference is missing: the policy's bound alone means nothing"
        ),
        Mistake("reference added", _reference_added, "the reference's error is added; a log-ratio subtracts it"),
    ],
    also=[_nothing_moved],
)


# --- the margin of a pair ---------------------------------------------------------------------------------------------


def system_margin(
    captions_chosen: Float[Tensor, " B"],
    captions_rejected: Float[Tensor, " B"],
    errors_chosen: Float[Tensor, "2 B n"],
    errors_rejected: Float[Tensor, "2 B n"],
    weight: float,
    beta: float,
) -> Float[Tensor, " B"]:
    """beta (caption log-ratio gap - sum over images of W [(e - e_ref)^w - (e - e_ref)^l]) (E8)."""
    rise = (errors_chosen[0] - errors_chosen[1]) - (errors_rejected[0] - errors_rejected[1])
    return beta * (captions_chosen - captions_rejected - weight * rise.sum(-1))


def _pairs() -> list[tuple]:
    g = draws(83)
    cases = []
    for b, n, weight, beta in ((2, 3, 40.0, 0.1), (3, 4, 7.0, 2.0)):
        cases.append((_normal(g, b), _normal(g, b), _levels(g, 2, b, n), _levels(g, 2, b, n), weight, beta))
    return cases


check_system_margin = Check(
    cases=_pairs,
    right=system_margin,
    mistakes=[
        Mistake(
            "images' sign",
            lambda cw, cl, ew, el, weight, beta: system_margin(cw, cl, ew, el, -weight, beta),
            "the images' part has the wrong sign, or policy and reference are swapped: a winner whose error falls gains margin",
        ),
        Mistake(
            "mean over images",
            lambda cw, cl, ew, el, weight, beta: system_margin(cw, cl, ew, el, weight / ew.shape[-1], beta),
            "a mean over the images; log-probabilities of the images of a sequence add up",
        ),
        Mistake(
            "weight forgotten",
            lambda cw, cl, ew, el, weight, beta: system_margin(cw, cl, ew, el, 1.0, beta),
            "the weight is missing: errors are no nats",
        ),
        Mistake(
            "beta on the captions only",
            lambda cw, cl, ew, el, weight, beta: system_margin(cw, cl, ew, el, weight / beta, beta),
            "beta multiplies the captions only; the margin has one beta in front of the whole log-ratio gap",
        ),
        Mistake(
            "beta on the images only",
            lambda cw, cl, ew, el, weight, beta: system_margin(cw / beta, cl / beta, ew, el, weight, beta),
            "beta multiplies the images only; the margin has one beta in front of the whole log-ratio gap",
        ),
        Mistake(
            "beta forgotten",
            lambda cw, cl, ew, el, weight, beta: system_margin(cw, cl, ew, el, weight, 1.0),
            "this is the log-ratio gap; the margin is beta times it",
        ),
        Mistake(
            "captions left out",
            lambda cw, cl, ew, el, weight, beta: system_margin(0 * cw, 0 * cl, ew, el, weight, beta),
            "the captions' log-ratios are missing: without them this is Diffusion-DPO, not the system",
        ),
        Mistake(
            "images left out",
            lambda cw, cl, ew, el, weight, beta: system_margin(cw, cl, 0 * ew, 0 * el, weight, beta),
            "the images are missing: this aligns the captions alone",
        ),
        Mistake(
            "reference forgotten",
            lambda cw, cl, ew, el, weight, beta: beta * (cw - cl - weight * (ew[0] - el[0]).sum(-1)),
            "the reference's errors are missing: some images are harder for every model",
        ),
        Mistake(
            "winner only",
            lambda cw, cl, ew, el, weight, beta: system_margin(cw, 0 * cl, ew, 0 * el, weight, beta),
            "the loser is missing: this raises every winner against the reference, whatever it was compared with",
        ),
        Mistake(
            "images' loser added",
            lambda cw, cl, ew, el, weight, beta: system_margin(cw, cl, ew, -el, weight, beta),
            "the loser's image errors are added; the margin is winner minus loser in both components",
        ),
    ],
)


# --- order and preference score ---------------------------------------------------------------------------------------


def sequence_scores(rows: Sequence[Tensor | None], number: int) -> dict[str, float]:
    """{"order_consistency", "preference_score"} of sequences, means over all of them (E10), by the library."""
    valid = [row is not None and len(row) == number for row in rows]
    orders = [scoring.order_consistency(row[:, None]) if ok else 0.0 for row, ok in zip(rows, valid)]
    scores = [scoring.preference_score(row[:, None]) if ok else scoring.INVALID_SCORE for row, ok in zip(rows, valid)]
    return {"order_consistency": sum(orders) / len(rows), "preference_score": sum(scores) / len(rows)}


def _sequences() -> list[tuple]:
    three = [[0.1, 0.5, 0.7], [0.2, 0.2, 0.9], None, [0.8, 0.4, 0.3], [0.1, 0.9], [0.0, 0.9, 1.0]]
    four = [[0.1, 0.2, 0.3, 0.9], None, None, [0.3, 0.6, 0.6, 0.7], [0.1, 0.4, 0.3, 0.8], [0.2, 0.5, 0.9]]
    return [
        ([None if row is None else torch.tensor(row, dtype=torch.float64) for row in rows], number)
        for rows, number in ((three, 3), (four, 4))
    ]


def _scores(rows, number, rises=lambda row: bool((row.diff() > 0).all()), score=None, keep=None, invalid=(0.0, -1.0)):
    """The two means, with one thing at a time replaced."""
    score = score or (lambda row: scoring.preference_score(row[:, None]))
    keep = keep or (lambda row: row is not None and len(row) == number)
    found = [(float(rises(row)), score(row)) if keep(row) else invalid for row in rows]
    found = [pair for pair in found if pair is not None]
    means = [sum(column) / len(found) for column in zip(*found)]
    return dict(zip(("order_consistency", "preference_score"), means))


def _bent(row: Tensor) -> Tensor:
    return (row - torch.linspace(0, 1, len(row), dtype=row.dtype) * (row[-1] - row[0]) - row[0]).abs()


check_sequence_scores = Check(
    cases=_sequences,
    right=sequence_scores,
    mistakes=[
        Mistake(
            "unparsable left out",
            lambda rows, number: _scores(rows, number, invalid=None),
            "sequences that do not parse are left out of the denominator; then a model that fails on the hard requests wins",
        ),
        Mistake(
            "None left out only",
            lambda rows, number: _scores([row for row in rows if row is not None], number),
            "sequences that do not parse (None) are left out of the denominator; they stay in, with 0 and -1",
        ),
        Mistake(
            "unparsable scores 0",
            lambda rows, number: _scores(rows, number, invalid=(0.0, 0.0)),
            "an unusable sequence has preference score -1, not 0: 0 is what equal pictures get",
        ),
        Mistake(
            "ties increase",
            lambda rows, number: _scores(rows, number, rises=lambda row: bool((row.diff() >= 0).all())),
            "equal neighbours are counted as increasing; the order must be strict",
        ),
        Mistake(
            "number of pictures ignored",
            lambda rows, number: _scores(rows, number, keep=lambda row: row is not None),
            "a sequence with another number of pictures than asked is judged as if it were right; it counts 0 and -1",
        ),
        Mistake(
            "ends only",
            lambda rows, number: _scores(rows, number, rises=lambda row: bool(row[-1] > row[0])),
            "only the ends are compared; every step must rise",
        ),
        Mistake(
            "bend forgotten",
            lambda rows, number: _scores(rows, number, score=lambda row: float(row[-1] - row[0])),
            "the distance from the straight line is missing in the preference score",
        ),
        Mistake(
            "bend summed",
            lambda rows, number: _scores(rows, number, score=lambda row: float(row[-1] - row[0] - _bent(row).sum())),
            "the distances from the straight line are added up; take their mean over all n pictures",
        ),
        Mistake(
            "bend of inner pictures",
            lambda rows, number: _scores(
                rows, number, score=lambda row: float(row[-1] - row[0] - _bent(row)[1:-1].mean())
            ),
            "the mean of the distances is over the inner pictures; it is over all n, the ends (distance 0) included",
        ),
        Mistake(
            "pairs instead of sequences",
            lambda rows, number: _scores(rows, number, rises=lambda row: float((row.diff() > 0).double().mean())),
            "this is the share of steps that rise; a sequence counts only as a whole",
        ),
    ],
)
