"""The one-dimensional diffusion: its exact likelihood, its bound, and their agreement with the component."""

import math

import pytest
import torch

from sysdpo_lab.components import Diffusion, elbo
from sysdpo_lab.worlds import line_diffusion as line

STEP = 2 * line.REACH / (line.GRID_POINTS - 1)


def two_bumps(abar, right=0.5):
    return line.Mixture([1 - right, right], [-1.0, 1.0], [0.3, 0.3], abar)


def shaken(abar, seed):
    model = line.Moved(two_bumps(abar), torch.Generator().manual_seed(seed))
    with torch.no_grad():
        model.correction[-1].weight.copy_(0.1 * torch.randn(1, 32, generator=torch.Generator().manual_seed(seed)))
    return model


def test_the_likelihood_of_one_gaussian_is_that_of_its_linear_chain():
    abar = line.schedule(8)
    model = line.Mixture([1.0], [0.4], [0.7], abar)
    mean, variance = 0.0, 1.0  # of x_t, by the recursion of a linear Gaussian chain
    for t in range(8, 0, -1):
        now = abar[t - 1].item()
        pull = math.sqrt(now) * 0.49 / (now * 0.49 + 1 - now)
        a, b, noise = (1.0, 0.0, 1 - now) if t == 1 else line.posterior(abar, t)
        slope = a * pull + b
        mean, variance = slope * mean + a * (0.4 - pull * math.sqrt(now) * 0.4), slope**2 * variance + noise
    x = line.grid()
    wanted = -0.5 * ((x - mean) ** 2 / variance + math.log(2 * math.pi * variance))
    near = (x - mean).abs() < 3
    assert torch.allclose(line.log_likelihood(model, abar)[near], wanted[near], atol=1e-5)


def test_the_likelihood_sums_to_one():
    for model in (two_bumps(line.schedule(16)), shaken(line.schedule(16), 0)):
        assert abs(line.log_likelihood(model, model.abar).exp().sum().item() * STEP - 1) < 1e-3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_bound_never_exceeds_the_likelihood_whatever_the_denoiser(seed):
    model = shaken(line.schedule(8), seed)
    here = line.grid()[134:267:7]
    assert (line.log_likelihood(model, model.abar)[134:267:7] - line.evidence_bound(model, model.abar, here)).min() > 0


def test_the_gap_of_a_best_denoiser_halves_when_the_timesteps_double():
    gaps = []
    for steps in (16, 32):
        model = two_bumps(line.schedule(steps))
        here = line.grid()[134:267:7]
        gaps.append(
            (line.log_likelihood(model, model.abar)[134:267:7] - line.evidence_bound(model, model.abar, here)).mean()
        )
    assert 1.8 < gaps[0] / gaps[1] < 2.6


def test_a_tilted_mixture_is_the_density_times_the_exponential():
    model = two_bumps(line.schedule(4), right=0.3)
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    apart = line.tilted(model, 1.5).log_density(x) - model.log_density(x) - 1.5 * x
    assert torch.allclose(apart, apart[:1].expand(9))


def test_a_moved_denoiser_starts_where_it_came_from():
    abar = line.schedule(4)
    start, x = two_bumps(abar), torch.linspace(-1, 1, 4, dtype=torch.float64)[:, None]
    moved = line.Moved(start, torch.Generator().manual_seed(0))
    assert torch.equal(moved(x, torch.arange(4)), start(x, torch.arange(4)))


def test_the_component_scores_the_line_by_the_same_weight_and_error():
    abar = line.schedule(6)
    model = two_bumps(abar)
    component = Diffusion("z", ["x"], model, line.scheduler(abar), weighting="elbo", image_shape=(1, 1, 1))
    value = [torch.tensor(v, dtype=torch.float64).reshape(1, 1, 1, 1) for v in (0.7, -1.2)]
    noise = component.draw_noise(value, torch.Generator().manual_seed(0))
    weights = elbo.elbo_weights("epsilon", abar, 1)
    for row, (found, drawn) in enumerate(zip(component.log_prob(value, {"x": ["-", "-"]}, noise), noise)):
        t, eps = drawn.timesteps[0], drawn.eps.flatten().double()
        x_t = abar[t].sqrt() * value[row].flatten() + (1 - abar[t]).sqrt() * eps
        eps_hat = (x_t - abar[t].sqrt() * model(x_t[:, None], t)[:, 0]) / (1 - abar[t]).sqrt()
        assert torch.allclose(found, -(weights[t] * (eps - eps_hat) ** 2).sum())


def test_samples_follow_the_likelihood():
    model = two_bumps(line.schedule(16), right=0.8)
    drawn = line.sample(model, model.abar, 4000, torch.Generator().manual_seed(0))
    x, density = line.grid(), line.log_likelihood(model, model.abar).exp() * STEP
    right = density[x > 0].sum().item()
    assert abs((drawn > 0).double().mean().item() - right) < 4 * math.sqrt(right * (1 - right) / 4000)
