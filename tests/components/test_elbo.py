"""The constants of E8: conversions, weights against Gaussian divergences written out, training weights, draws of t."""

import math

import pytest
import torch

from sysdpo_lab import errors
from sysdpo_lab.components import elbo
from tests import tiny_diffusion

PREDICTIONS = elbo.PREDICTIONS


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def schedule(steps=50):
    return elbo.alphas_bar(tiny_diffusion.scheduler(steps=steps))


def randoms(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def case(prediction, seed=0):
    """(abar of each row, x0, eps, x_t, an imperfect output) for timesteps all over the range."""
    abar = schedule()[[0, 3, 20, 49]]
    x0, eps = randoms(4, 2, 3, seed=seed), randoms(4, 2, 3, seed=seed + 1)
    output = elbo.target(prediction, x0, eps, abar) + 0.3 * randoms(4, 2, 3, seed=seed + 2)
    return abar, x0, eps, elbo.noised(x0, eps, abar), output


# --- conversions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_perfect_output_is_the_noise_and_the_sample(prediction):
    abar, x0, eps, x_t, _ = case(prediction)
    perfect = elbo.target(prediction, x0, eps, abar)
    torch.testing.assert_close(elbo.as_noise(prediction, perfect, x_t, abar), eps)
    torch.testing.assert_close(elbo.as_sample(prediction, perfect, x_t, abar), x0)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_noise_error_is_the_own_error_times_the_factor(prediction):
    """|eps - eps_hat|^2 = alpha^2 |v - v_hat|^2 = (alpha^2 / sigma^2) |x0 - x0_hat|^2."""
    abar, x0, eps, x_t, output = case(prediction)
    direct = elbo.mean_square(elbo.as_noise(prediction, output, x_t, abar), eps)
    own = elbo.mean_square(output, elbo.target(prediction, x0, eps, abar))
    torch.testing.assert_close(elbo.noise_factor(prediction, abar) * own, direct)


def test_v_is_what_diffusers_calls_v():
    abar, x0, eps, _, _ = case("v_prediction")
    theirs = tiny_diffusion.scheduler().get_velocity(x0, eps, torch.tensor([0, 3, 20, 49]))
    torch.testing.assert_close(elbo.target("v_prediction", x0, eps, abar), theirs, atol=1e-5, rtol=1e-5)


def test_noising_is_that_of_diffusers():
    abar, x0, eps, x_t, _ = case("epsilon")
    theirs = tiny_diffusion.scheduler().add_noise(x0, eps, torch.tensor([0, 3, 20, 49]))
    torch.testing.assert_close(x_t, theirs, atol=1e-5, rtol=1e-5)


def test_an_unknown_prediction_is_refused_by_name():
    for call in (
        lambda: elbo.target("eps", *[torch.zeros(1, 1)] * 2, torch.ones(1)),
        lambda: elbo.noise_factor("flow", torch.ones(1)),
        lambda: elbo.elbo_weights("x0", torch.ones(1), 1),
    ):
        with pytest.raises(errors.UnknownOptionError, match="'epsilon', 'v_prediction', 'sample'"):
            call()


# --- weights ----------------------------------------------------------------------------------------------------------


def divergence(abar, t, x0, x0_hat, x_t):
    """KL(q(x_{t-1} | x_t, x0) || q(x_{t-1} | x_t, x0_hat)) of two Gaussians with the posterior's variance (Ho et al. 2020)."""
    before, beta = abar[t - 1], 1 - abar[t] / abar[t - 1]
    variance = (1 - before) / (1 - abar[t]) * beta

    def mean(x):
        weights = before.sqrt() * beta / (1 - abar[t]), (1 - beta).sqrt() * (1 - before) / (1 - abar[t])
        return weights[0] * x + weights[1] * x_t

    return ((mean(x0) - mean(x0_hat)) ** 2 / (2 * variance)).sum()


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_elbo_weights_are_the_divergences_of_the_reverse_steps(prediction):
    abar, steps = schedule(), 50
    weights = elbo.elbo_weights(prediction, abar, size=6)
    for t in (1, 2, 20, 49):
        here = abar[t : t + 1]
        x0, eps = randoms(1, 2, 3), randoms(1, 2, 3, seed=1)
        x_t, wanted = elbo.noised(x0, eps, here), elbo.target(prediction, x0, eps, here)
        output = wanted + 0.3 * randoms(1, 2, 3, seed=2)
        by_hand = steps * divergence(abar, t, x0, elbo.as_sample(prediction, output, x_t, here), x_t)
        assert (weights[t] * elbo.mean_square(output, wanted)).item() == pytest.approx(by_hand.item(), rel=1e-9)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_first_timestep_is_a_gaussian_decoder_with_variance_beta(prediction):
    abar = schedule()
    here, beta = abar[:1], 1 - abar[0]
    x0, eps = randoms(1, 2, 3), randoms(1, 2, 3, seed=1)
    x_1, wanted = elbo.noised(x0, eps, here), elbo.target(prediction, x0, eps, here)
    outputs = [wanted + scale * randoms(1, 2, 3, seed=2) for scale in (0.3, 0.1)]
    decoders = [torch.distributions.Normal(elbo.as_sample(prediction, o, x_1, here), beta.sqrt()) for o in outputs]
    by_hand = 50 * (decoders[0].log_prob(x0).sum() - decoders[1].log_prob(x0).sum())
    weight = elbo.elbo_weights(prediction, abar, size=6)[0]
    squares = [elbo.mean_square(o, wanted) for o in outputs]
    assert (-weight * (squares[0] - squares[1])).item() == pytest.approx(by_hand.item(), rel=1e-9)


def test_a_last_snr_of_zero_is_finite_except_for_noise_prediction():
    abar = torch.tensor([0.9, 0.5, 0.0], dtype=torch.float64)
    for prediction in ("v_prediction", "sample"):
        assert torch.isfinite(elbo.elbo_weights(prediction, abar, 1)).all()
    with pytest.raises(errors.OptionRangeError, match="ratio is 0.*weighting='constant'"):
        elbo.elbo_weights("epsilon", abar, 1)


def test_alphas_bar_is_exact_where_float32_has_lost_digits():
    scheduler = tiny_diffusion.scheduler(steps=1000, beta_end=0.02)
    exact = elbo.alphas_bar(scheduler)
    by_hand = math.prod(1 - beta for beta in scheduler.betas.double().tolist()[:700])
    assert exact.dtype == torch.float64 and exact[699].item() == pytest.approx(by_hand, rel=1e-12)
    del scheduler.betas
    torch.testing.assert_close(elbo.alphas_bar(scheduler), exact, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_min_snr_weights_mean_the_same_for_every_prediction(prediction):
    """min(SNR, gamma) |x0 - x0_hat|^2, with |x0 - x0_hat|^2 = |eps - eps_hat|^2 / SNR."""
    abar, x0, eps, x_t, output = case(prediction)
    own = elbo.mean_square(output, elbo.target(prediction, x0, eps, abar))
    in_samples = elbo.mean_square(elbo.as_sample(prediction, output, x_t, abar), x0)
    expected = elbo.snr(abar).clamp(max=5) * in_samples
    torch.testing.assert_close(elbo.min_snr_weights(prediction, abar) * own, expected)
    expected = (elbo.min_snr_weights(prediction, abar) * own).mean()
    wanted = elbo.target(prediction, x0, eps, abar)
    torch.testing.assert_close(elbo.denoising_loss(output, wanted, elbo.min_snr_weights(prediction, abar)), expected)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_residuals_of_half_precision_outputs_are_taken_in_float32():
    """P39: rounding the target to bfloat16 would shift the error by more than the differences that are trained on."""
    wanted = torch.full((1, 1000), 1.001)
    output = torch.full((1, 1000), 0.5, dtype=torch.bfloat16)  # exact in bfloat16
    found = elbo.mean_square(output, wanted)
    naive = (wanted.bfloat16() - output).square().mean()
    assert found.item() == pytest.approx(0.501**2, rel=1e-6)
    assert abs(naive.item() - 0.501**2) > 5e-4  # the mutant


def test_sums_do_not_lose_small_terms():
    values = torch.cat([torch.full((1, 1), 4096.0), torch.full((1, 100_000), 1.0)], 1)
    assert elbo.mean_square(values, torch.zeros_like(values)).item() == pytest.approx(
        (4096**2 + 1e5) / 100_001, rel=1e-9
    )


def test_timesteps_are_uniform_over_the_whole_range():
    drawn = elbo.draw_timesteps(20_000, 1, 10, generator())
    counts = torch.bincount(drawn.flatten(), minlength=10)
    assert len(counts) == 10 and (counts - 2000).abs().max() < 5 * math.sqrt(2000 * 0.9)


def test_stratified_timesteps_are_one_in_each_part_and_uniform_together():
    drawn = elbo.draw_timesteps(9000, 3, 10, generator(), stratified=True)  # 10 is no multiple of 3
    assert (drawn[:, 0] <= 3).all() and (drawn[:, 2] >= 6).all()
    counts = torch.bincount(drawn.flatten(), minlength=10)
    assert (counts - 2700).abs().max() < 5 * math.sqrt(2700)
