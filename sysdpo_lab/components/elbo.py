"""The mathematics of E8: what stands for the log-probability of an image, without any network.

Words: x0 an image with D numbers, eps standard normal noise, t = 1..T (index t - 1 in every tensor here),
x_t = alpha_t x0 + sigma_t eps with alpha_t^2 = abar_t and sigma_t^2 = 1 - abar_t, SNR(t) = alpha_t^2 / sigma_t^2.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sysdpo_lab import errors

PREDICTIONS = ("epsilon", "v_prediction", "sample")


# --- the schedule -----------------------------------------------------------------------------------------------------


def alphas_bar(scheduler: Any) -> Float[Tensor, " T"]:
    """abar_t for t = 1..T in float64, from the betas: differences of neighbours keep their digits.

    Args:
        scheduler: anything with `alphas_cumprod` (every DDPM-like scheduler of diffusers).
    """
    stored = torch.as_tensor(scheduler.alphas_cumprod).double().cpu()
    betas = getattr(scheduler, "betas", None)
    if betas is None:
        return stored
    exact = torch.cumprod(1 - torch.as_tensor(betas).double().cpu(), 0)
    return exact if torch.allclose(exact, stored, rtol=1e-3, atol=1e-6) else stored


def snr(abar: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Signal-to-noise ratio abar / (1 - abar); falls with t.

    >>> snr(torch.tensor([0.5, 0.2]))
    tensor([1.0000, 0.2500])
    """
    return abar / (1 - abar)


def noised(x0: Float[Tensor, "N *S"], eps: Float[Tensor, "N *S"], abar: Float[Tensor, " N"]) -> Float[Tensor, "N *S"]:
    """x_t = alpha_t x0 + sigma_t eps; `abar` holds abar_t of each row.

    >>> noised(torch.ones(1, 1), torch.ones(1, 1), torch.tensor([0.64]))
    tensor([[1.4000]])
    """
    return _wide(abar.sqrt(), x0) * x0 + _wide((1 - abar).sqrt(), x0) * eps


def _wide(values: Float[Tensor, " N"], like: Float[Tensor, "N *S"]) -> Tensor:
    return values.to(device=like.device, dtype=like.dtype).reshape(-1, *[1] * (like.dim() - 1))


# --- what a network predicts ------------------------------------------------------------------------------------------


def target(
    prediction: str, x0: Float[Tensor, "N *S"], eps: Float[Tensor, "N *S"], abar: Float[Tensor, " N"]
) -> Float[Tensor, "N *S"]:
    """What the network should say: eps, x0, or v = alpha_t eps - sigma_t x0 (Salimans & Ho 2022).

    Args:
        prediction: "epsilon", "v_prediction" or "sample", diffusers' names.
    """
    errors.check_option("prediction", prediction, PREDICTIONS)
    if prediction == "epsilon":
        return eps
    if prediction == "sample":
        return x0
    return _wide(abar.sqrt(), x0) * eps - _wide((1 - abar).sqrt(), x0) * x0


def as_noise(
    prediction: str, output: Float[Tensor, "N *S"], x_t: Float[Tensor, "N *S"], abar: Float[Tensor, " N"]
) -> Float[Tensor, "N *S"]:
    """eps_hat of a network that predicts something else (x_t is known, so each says the same).

    >>> as_noise("sample", torch.ones(1, 1), torch.full((1, 1), 1.4), torch.tensor([0.64]))
    tensor([[1.0000]])
    """
    errors.check_option("prediction", prediction, PREDICTIONS)
    alpha, sigma = _wide(abar.sqrt(), x_t), _wide((1 - abar).sqrt(), x_t)
    if prediction == "epsilon":
        return output
    return (x_t - alpha * output) / sigma if prediction == "sample" else sigma * x_t + alpha * output


def as_sample(
    prediction: str, output: Float[Tensor, "N *S"], x_t: Float[Tensor, "N *S"], abar: Float[Tensor, " N"]
) -> Float[Tensor, "N *S"]:
    """x0_hat of a network that predicts something else.

    >>> as_sample("epsilon", torch.ones(1, 1), torch.full((1, 1), 1.4), torch.tensor([0.64]))
    tensor([[1.0000]])
    """
    errors.check_option("prediction", prediction, PREDICTIONS)
    alpha, sigma = _wide(abar.sqrt(), x_t), _wide((1 - abar).sqrt(), x_t)
    if prediction == "sample":
        return output
    return (x_t - sigma * output) / alpha if prediction == "epsilon" else alpha * x_t - sigma * output


def noise_factor(prediction: str, abar: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """f_t with |eps - eps_hat|^2 = f_t |target - output|^2: 1, alpha_t^2 (v), alpha_t^2 / sigma_t^2 (sample).

    >>> noise_factor("sample", torch.tensor([0.5, 0.2])), noise_factor("v_prediction", torch.tensor([0.5, 0.2]))
    (tensor([1.0000, 0.2500]), tensor([0.5000, 0.2000]))
    """
    errors.check_option("prediction", prediction, PREDICTIONS)
    if prediction == "epsilon":
        return torch.ones_like(abar)
    return abar if prediction == "v_prediction" else snr(abar)


# --- errors and weights -----------------------------------------------------------------------------------------------


def mean_square(output: Float[Tensor, "N *S"], wanted: Float[Tensor, "N *S"]) -> Float[Tensor, " N"]:
    """Mean over the D numbers of (wanted - output)^2; residuals in float32 at least, the sum in float64.

    Residuals of half precision would be wrong by about 1e-3, and a weight of thousands stands before them.

    >>> mean_square(torch.zeros(1, 2, dtype=torch.bfloat16), torch.tensor([[1.0, 2.0]]))
    tensor([2.5000], dtype=torch.float64)
    """
    wide = torch.promote_types(torch.promote_types(output.dtype, wanted.dtype), torch.float32)
    squares = (wanted.to(wide) - output.to(wide)).square().flatten(1)
    exact = torch.float32 if squares.device.type == "mps" else torch.float64  # mps has no float64
    return squares.mean(1, dtype=exact)


def elbo_weights(prediction: str, abar: Float[Tensor, " T"], size: int) -> Float[Tensor, " T"]:
    """W(t) f_t in nats: what multiplies the network's own mean square in an unbiased one-timestep estimate of -ELBO.

    W(t) = T (D/2) (SNR(t-1)/SNR(t) - 1) for t > 1 on the noise error (Kingma et al. 2021, Eq. 14; Ho et al. 2020,
    Eq. 8 with the posterior's variance). SNR(0) is infinite, so t = 1 needs a choice: p(x0 | x_1) is the Gaussian
    N(x0_hat(x_1), beta_1 I), hence W(1) = T (D/2) / abar_1. Its normaliser and the prior term at T have no parameters
    and cancel in every log-ratio.

    Args:
        prediction: "epsilon", "v_prediction" or "sample"; the result is finite wherever the exact weight times the error is,
            also for a last SNR of 0.
        abar: abar_t for t = 1..T, float64.
        size: D, numbers in an image as the network sees it.

    Raises:
        OptionRangeError: a last SNR of 0 together with epsilon-prediction: that term is infinite.

    >>> elbo_weights("epsilon", torch.tensor([0.5, 0.2], dtype=torch.float64), size=2)
    tensor([4., 6.], dtype=torch.float64)
    """
    errors.check_option("prediction", prediction, PREDICTIONS)
    if prediction == "epsilon" and not bool((abar > 0).all()):
        raise errors.OptionRangeError(
            "the schedule's last signal-to-noise ratio is 0, where noise prediction has an infinite ELBO weight; use a "
            "v-prediction or sample-prediction network, or weighting='constant'"
        )
    before = torch.cat([torch.full_like(abar[:1], torch.inf), snr(abar)[:-1]])  # SNR(t - 1)
    in_noise = {"epsilon": (1 - abar) / abar, "v_prediction": 1 - abar, "sample": torch.ones_like(abar)}[prediction]
    own = {"epsilon": torch.ones_like(abar), "v_prediction": abar, "sample": snr(abar)}[prediction]
    weights = before * in_noise - own
    weights[0] = (in_noise / (1 - abar))[0]
    return len(abar) * size / 2 * weights


def min_snr_weights(prediction: str, abar: Float[Tensor, " T"], gamma: float = 5.0) -> Float[Tensor, " T"]:
    """Training weights min(SNR, gamma) on the sample's error (Hang et al. 2023), for the network's own error.

    A larger gamma gives more weight to small t (fine detail).

    >>> min_snr_weights("sample", torch.tensor([0.9, 0.5])), min_snr_weights("epsilon", torch.tensor([0.9, 0.5]))
    (tensor([5., 1.]), tensor([0.5556, 1.0000]))
    """
    errors.check_option("prediction", prediction, PREDICTIONS)
    ratio = snr(abar)
    weights = ratio.clamp(max=gamma)
    if prediction == "sample":
        return weights
    return (
        weights / ratio.clamp(min=torch.finfo(ratio.dtype).tiny) if prediction == "epsilon" else weights / (ratio + 1)
    )


def denoising_loss(
    output: Float[Tensor, "N *S"], wanted: Float[Tensor, "N *S"], weights: Float[Tensor, " N"] | None = None
) -> Tensor:
    """Mean over images of weight x mean square: what a base model is trained on.

    Args:
        output, wanted: the network's output and its `target`.
        weights: one an image, for its timestep (`min_snr_weights(...)[timesteps]`); None: 1.

    >>> denoising_loss(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([1.0, 3.0]))
    tensor(2., dtype=torch.float64)
    """
    square = mean_square(output, wanted)
    return (square if weights is None else square * weights.to(square)).mean()


# --- noise ------------------------------------------------------------------------------------------------------------


def draw_timesteps(
    number: int, times: int, steps: int, generator: torch.Generator, stratified: bool = False
) -> Int[Tensor, "N M"]:
    """Indices 0..steps-1, uniform; each image has `times` of them.

    Args:
        number: images.
        stratified: the j-th is drawn from the j-th of `times` equal parts of the range: still unbiased for the mean over a
            row, with less variance.

    >>> draw_timesteps(1, 4, 1000, torch.Generator().manual_seed(0), stratified=True) // 250
    tensor([[0, 1, 2, 3]])
    """
    places = torch.rand(number, times, generator=generator, dtype=torch.float64, device=generator.device)
    if stratified:
        places = (places + torch.arange(times, device=places.device)) / times
    return (places * steps).long().clamp(max=steps - 1)
