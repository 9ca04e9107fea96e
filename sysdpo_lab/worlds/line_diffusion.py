"""Diffusion models of one number, small enough that likelihood and evidence lower bound are computed exactly.

Words as in `components.elbo`: x0 the number, x_t = alpha_t x0 + sigma_t eps, t = 1..T at index t - 1. A model is its
denoiser x0_hat(x_t, t); its reverse chain starts from N(0, 1), goes by the Gaussians that are best for a known x0, with
x0_hat in its place (Ho et al. 2020), and ends with p(x0 | x_1) = N(x0_hat, 1 - abar_1). On a grid the chain is a product
of matrices, so p(x0) needs no bound; the error is that of the trapezoid rule.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sysdpo_lab.components import elbo

LOG_SNR = 5.0  # the schedule's log signal-to-noise ratio goes from this to minus this
REACH, GRID_POINTS = 6.0, 401  # of the grid on which densities live
NOISE_REACH, NOISE_POINTS = 6.0, 121  # of the grid over eps

Denoise = Callable[[Float[Tensor, "N *S"], Int[Tensor, " N"]], Float[Tensor, "N *S"]]


def schedule(steps: int) -> Float[Tensor, " T"]:
    """abar_t for t = 1..T: the log signal-to-noise ratio falls in equal steps from 5 to -5.

    >>> schedule(3)
    tensor([0.9933, 0.5000, 0.0067], dtype=torch.float64)
    """
    return torch.linspace(LOG_SNR, -LOG_SNR, steps, dtype=torch.float64).sigmoid()


def scheduler(abar: Float[Tensor, " T"]) -> SimpleNamespace:
    """What a `Diffusion` component reads of a diffusers scheduler: the schedule, and that the network says x0_hat."""
    return SimpleNamespace(alphas_cumprod=abar, config=SimpleNamespace(prediction_type="sample"))


def grid(points: int = GRID_POINTS) -> Float[Tensor, " G"]:
    """Where densities are computed: equal steps from -6 to 6."""
    return torch.linspace(-REACH, REACH, points, dtype=torch.float64)


# --- models -----------------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """The best denoiser of a mixture of Gaussians, E[x0 | x_t], in closed form; all its numbers can be trained.

    Args:
        weights, means, spreads: one an element; the weights sum to 1.
        abar: the schedule.

    >>> one = Mixture([1.0], [0.0], [1.0], schedule(3))
    >>> one(torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([1])).item()  # alpha x_t for a standard normal
    1.414...
    """

    def __init__(self, weights, means, spreads, abar: Float[Tensor, " T"]):
        super().__init__()
        self.logits, self.means, self.log_spreads = (
            nn.Parameter(
                torch.as_tensor(values, dtype=torch.float64).log() if log else torch.as_tensor(values).double()
            )
            for values, log in ((weights, True), (means, False), (spreads, True))
        )
        self.abar = abar

    def log_density(self, x: Float[Tensor, " *S"]) -> Float[Tensor, " *S"]:
        """log of the mixture's density, nats."""
        return torch.logsumexp(self._joint(x, torch.ones((), dtype=torch.float64)), -1)

    def _joint(self, x: Tensor, abar: Tensor) -> Tensor:
        """log of weight x density of x_t for each element, the last axis."""
        variance = abar[..., None] * (2 * self.log_spreads).exp() + 1 - abar[..., None]
        square = (x[..., None] - abar[..., None].sqrt() * self.means) ** 2 / variance
        return self.logits.log_softmax(0) - 0.5 * (square + variance.log() + math.log(2 * math.pi))

    def forward(self, x_t: Float[Tensor, "N *S"], t: Int[Tensor, " N"]) -> Float[Tensor, "N *S"]:
        abar = self.abar[t].reshape(-1, *[1] * (x_t.dim() - 1)).expand_as(x_t)
        share = self._joint(x_t, abar).softmax(-1)
        alpha, own = abar.sqrt()[..., None], (2 * self.log_spreads).exp()
        pull = alpha * own / (alpha**2 * own + 1 - alpha**2)
        return (share * (self.means + pull * (x_t[..., None] - alpha * self.means))).sum(-1)


class Moved(nn.Module):
    """A frozen denoiser plus a small network's correction, 0 at the start: free at every x_t and t.

    Args:
        start: the denoiser to start from.
        generator: for the first layer.
        hidden: units.
    """

    def __init__(self, start: Mixture, generator: torch.Generator, hidden: int = 32):
        super().__init__()
        self.start, self.abar = start, start.abar
        for parameter in start.parameters():
            parameter.requires_grad_(False)
        first, middle, last = nn.Linear(3, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 1)
        with torch.no_grad():
            for layer in (first, middle):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / layer.in_features**0.5)
                layer.bias.copy_(torch.randn(layer.bias.shape, generator=generator))
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.correction = nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), last).double()

    def forward(self, x_t: Float[Tensor, "N *S"], t: Int[Tensor, " N"]) -> Float[Tensor, "N *S"]:
        noise = torch.logit(self.abar[t]).reshape(-1, *[1] * (x_t.dim() - 1)).expand_as(x_t) / LOG_SNR
        seen = torch.stack([x_t, noise, noise**2], -1)
        return self.start(x_t, t) + self.correction(seen).squeeze(-1)


def tilted(model: Mixture, slope: float) -> Mixture:
    """The mixture times exp(slope x), normalised: again a mixture, with moved means and other weights (E4).

    >>> moved = tilted(Mixture([0.5, 0.5], [-1.0, 1.0], [0.5, 0.5], schedule(3)), 2.0)
    >>> moved.means.tolist(), moved.logits.softmax(0)[1].item()
    ([-0.5, 1.5], 0.982...)
    """
    with torch.no_grad():
        variance = (2 * model.log_spreads).exp()
        logits = model.logits + slope * model.means + 0.5 * slope**2 * variance
        return Mixture(logits.softmax(0), model.means + slope * variance, variance.sqrt(), model.abar)


# --- exact numbers ----------------------------------------------------------------------------------------------------


def posterior(abar: Float[Tensor, " T"], t: int) -> tuple[float, float, float]:
    """q(x_{t-1} | x_t, x0) = N(a x0 + b x_t, variance) for t = 2..T: returns a, b, variance (Ho et al. 2020, Eq. 6 and 7)."""
    before, now = abar[t - 2].item(), abar[t - 1].item()
    step = now / before
    a = math.sqrt(before) * (1 - step) / (1 - now)
    b = math.sqrt(step) * (1 - before) / (1 - now)
    return a, b, (1 - before) / (1 - now) * (1 - step)


def _normal(x: Tensor, mean: Tensor, variance: float) -> Tensor:
    return torch.exp(-0.5 * (x - mean) ** 2 / variance) / math.sqrt(2 * math.pi * variance)


@torch.no_grad()
def log_likelihood(model: Denoise, abar: Float[Tensor, " T"], points: int = GRID_POINTS) -> Float[Tensor, " G"]:
    """log p(x0) of the model's reverse chain at every point of the grid, nats: exact up to the trapezoid rule.

    Args:
        model: x0_hat(x_t, index); an index is t - 1.
    """
    x = grid(points)
    step = (x[1] - x[0]).item()
    density = _normal(x, torch.zeros((), dtype=x.dtype), 1.0)
    for t in range(len(abar), 0, -1):
        guess = model(x[:, None], torch.full((len(x),), t - 1))[:, 0]
        if t == 1:
            mean, variance = guess, 1 - abar[0].item()
        else:
            a, b, variance = posterior(abar, t)
            mean = a * guess + b * x
        density = _normal(x[:, None], mean, variance) @ density * step
    return density.clamp(min=1e-300).log()


@torch.no_grad()
def expected_squares(model: Denoise, abar: Float[Tensor, " T"], x0: Float[Tensor, " X"]) -> Float[Tensor, "T X"]:
    """E over eps of (eps - eps_hat)^2 for each t and x0, by the trapezoid rule over eps."""
    eps = torch.linspace(-NOISE_REACH, NOISE_REACH, NOISE_POINTS, dtype=torch.float64)
    weight = torch.exp(-0.5 * eps**2)
    found = []
    for index, now in enumerate(abar):
        x_t = now.sqrt() * x0[:, None] + (1 - now).sqrt() * eps
        guess = model(x_t, torch.full((len(x0),), index))
        square = elbo.snr(now) * (x0[:, None] - guess) ** 2
        found.append((square * weight).sum(1) / weight.sum())
    return torch.stack(found)


def constant_terms(abar: Float[Tensor, " T"], x0: Float[Tensor, " X"]) -> Float[Tensor, " X"]:
    """The part of the bound that no model changes: minus KL(q(x_T | x0) || N(0, 1)), and the normaliser of p(x0 | x_1)."""
    last, first = abar[-1], 1 - abar[0]
    prior = 0.5 * ((1 - last) + last * x0**2 - 1 - (1 - last).log())
    return -prior - 0.5 * (2 * math.pi * first).log()


def evidence_bound(model: Denoise, abar: Float[Tensor, " T"], x0: Float[Tensor, " X"]) -> Float[Tensor, " X"]:
    """The evidence lower bound of log p(x0), nats: constants - mean over t of W(t) E (eps - eps_hat)^2 (E8 with D = 1).

    >>> abar = schedule(16)
    >>> model = Mixture([1.0], [0.5], [0.8], abar)
    >>> here = grid()[190:211:10]
    >>> bool((log_likelihood(model, abar)[190:211:10] >= evidence_bound(model, abar, here)).all())
    True
    """
    weights = elbo.elbo_weights("epsilon", abar, size=1)
    return constant_terms(abar, x0) - (weights[:, None] * expected_squares(model, abar, x0)).mean(0)


@torch.no_grad()
def sample(model: Denoise, abar: Float[Tensor, " T"], number: int, generator: torch.Generator) -> Float[Tensor, " N"]:
    """Draws from the reverse chain."""
    x = torch.randn(number, generator=generator, dtype=torch.float64)
    for t in range(len(abar), 0, -1):
        guess = model(x[:, None], torch.full((number,), t - 1))[:, 0]
        a, b, variance = (1.0, 0.0, 1 - abar[0].item()) if t == 1 else posterior(abar, t)
        x = a * guess + b * x + math.sqrt(variance) * torch.randn(number, generator=generator, dtype=torch.float64)
    return x
