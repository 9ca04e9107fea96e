# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 LLM + diffusion, small
#
# **What you will do**: derive what stands for the log-probability of a picture, check each step by numbers, compare it with a likelihood that can be
# computed exactly, and align a system in which a language model writes captions and a diffusion model paints them.
#
# **What you will learn**: where the weight in front of the noise error comes from, why policy and reference must see the same noise, what the bound
# hides, which of the two components learns how much, and how to read a table of swaps and ceilings.
#
# **What you need**: lessons 03 and 04; Gaussians, KL. No GPU, no network. **Minutes**: 60 to read, about a minute to run.
#
# The diffusion part is Diffusion-DPO (Wallace et al. 2023), the system is the first one of the SysDPO paper (arXiv 2502.17721, "the paper" below), in small.

# %%
import io
import math
import tempfile
import warnings
from pathlib import Path

import torch
from IPython.display import display
from PIL import Image
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import logsigmoid

from sysdpo_lab import CompoundSystem, figures, losses, paths, preferences, profiles, results, training
from sysdpo_lab.components import Diffusion, elbo
from sysdpo_lab.coursework import checks
from sysdpo_lab.experiments import faces_data, faces_figures, faces_rows, runner
from sysdpo_lab.widgets import SliderFigure, choice
from sysdpo_lab.worlds import faces
from sysdpo_lab.worlds import line_diffusion as line

# %% [markdown]
# ## A likelihood that nobody can compute
#
# A diffusion model is trained to undo noise. The forward process blurs a picture $x_0$ in $T$ steps, $x_t = \alpha_t x_0 + \sigma_t \epsilon$ with
# $\alpha_t^2 = \bar\alpha_t$, $\sigma_t^2 = 1 - \bar\alpha_t$, until only noise is left. The model goes back: it starts from pure noise and draws
# $x_{t-1}$ from $x_t$, step by step. Its likelihood is an integral over all chains that end in $x_0$:
#
# $$p(x_0) = \int p(x_T) \prod_{t=T}^{1} p(x_{t-1} \mid x_t) \; dx_1 \cdots dx_T.$$
#
# For a picture that is hopeless. For **one number** it is a product of $T$ matrices on a grid. So our first diffusion model draws numbers: mostly near
# -1 or near 1. Its denoiser is the best there is, $\hat x_0(x_t, t) = \mathrm{E}[x_0 \mid x_t]$, in closed form.

# %%
T = 16
abar = line.schedule(T)


def two_bumps(abar):
    """The start: two bumps of equal weight at -1 and 1."""
    return line.Mixture([0.5, 0.5], [-1.0, 1.0], [0.3, 0.3], abar)


start = two_bumps(abar)
grid = line.grid()
step = (grid[1] - grid[0]).item()
density = line.log_likelihood(start, abar).exp()
print(f"the model's density sums to {density.sum() * step:.6f}; p(1) = {density[(grid - 1).abs().argmin()]:.3f}")
assert abs(density.sum() * step - 1) < 1e-6

# %% [markdown]
# Left: chains of the reverse process; noise at the top, numbers at the bottom. Right: the density that the data have, and the exact density of the
# model with 16 steps. The two differ although the denoiser is perfect: a step back is a Gaussian of a fixed width, and with few steps that is too narrow.

# %%
generator = torch.Generator().manual_seed(3)
figure, (left, right) = figures.new_figure(2, width=8.6, height=3.4)
x = torch.randn(14, generator=generator, dtype=torch.float64)
chain = [x]
for t in range(T, 0, -1):
    guess = start(x[:, None], torch.full((14,), t - 1))[:, 0]
    a, b, variance = (1.0, 0.0, 1 - abar[0].item()) if t == 1 else line.posterior(abar, t)
    x = a * guess + b * x + math.sqrt(variance) * torch.randn(14, generator=generator, dtype=torch.float64)
    chain.append(x)
left.plot(torch.stack(chain).detach(), range(T, -1, -1), color="0.35", linewidth=1)
left.set(xlabel="x_t", ylabel="t", title="fourteen draws")
styles = figures.line_styles(2)
near = grid.abs() < 2.5
right.plot(grid[near], start.log_density(grid[near]).exp().detach(), label="data", color=styles[0]["color"], linestyle="-", linewidth=2)
right.plot(grid[near], density[near], label="model, T = 16", color=styles[1]["color"], linestyle="--", linewidth=2)
right.set(xlabel="x0", ylabel="density", ylim=(0, 0.85))
right.legend(frameon=False, loc="upper center", ncols=2)
figures.show(figure, alt="fourteen random lines run from t = 16 down to t = 0 and end near -1 or 1; the model's two bumps are a little narrower and higher than the data's")

# %% [markdown]
# ## E8 in six steps
#
# DPO needs $\log p(x_0) - \log p_\text{ref}(x_0)$. Each of the next steps replaces something that cannot be computed by something that can, and says what is lost.
#
# **Step 1: Jensen.** Divide and multiply by the forward process $q(x_{1:T} \mid x_0)$, whose chains are easy to draw. The likelihood is then the mean of a ratio over
# those chains, and the log of a mean is at least the mean of the logs:
#
# $$\log p(x_0) = \log \mathrm{E}_q \frac{p(x_{0:T})}{q(x_{1:T} \mid x_0)} \;\ge\; \mathrm{E}_q \log \frac{p(x_{0:T})}{q(x_{1:T} \mid x_0)} =: B(x_0).$$
#
# $B$ is the evidence lower bound. We draw 4,000 chains that end in $x_0 = 1$ and look at both sides.


# %%
def log_ratios(model, x0, number, generator):
    """log p(x_0..x_T) - log q(x_1..x_T | x_0) of forward chains from x0."""
    x = x0 + torch.zeros(number, dtype=torch.float64)
    total, before = torch.zeros(number, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for t, now in enumerate(abar, start=1):
        keep = (now / before).sqrt()
        forward = Normal(keep * x, (1 - now / before).sqrt())
        x_t = forward.loc + forward.scale * torch.randn(number, generator=generator, dtype=torch.float64)
        guess = model(x_t[:, None], torch.full((number,), t - 1))[:, 0]
        a, b, variance = (1.0, 0.0, 1 - now.item()) if t == 1 else line.posterior(abar, t)
        total += Normal(a * guess + b * x_t, math.sqrt(variance)).log_prob(x) - forward.log_prob(x_t)
        x, before = x_t, now
    return total + Normal(0.0, 1.0).log_prob(x)


with torch.no_grad():
    chains = log_ratios(start, 1.0, 4000, torch.Generator().manual_seed(0))
exact = line.log_likelihood(start, abar)[(grid - 1).abs().argmin()].item()
log_of_mean, mean_of_logs = (torch.logsumexp(chains, 0) - math.log(4000)).item(), chains.mean().item()
print(f"log of the mean {log_of_mean:.2f}, exact log p(1) {exact:.2f}; mean of the logs: {mean_of_logs:.2f}")
assert abs(log_of_mean - exact) < 0.1 and mean_of_logs < exact - 0.3

# %% [markdown]
# **Step 2: a sum of KLs.** Sort the logs by timestep. Given $x_0$, the step back $q(x_{t-1} \mid x_t, x_0)$ is a Gaussian in closed form (Ho et al. 2020), and
#
# $$B = -\mathrm{KL}\big(q(x_T|x_0)\,\|\,p(x_T)\big) \;-\; \sum_{t=2}^{T} \mathrm{E}_{x_t}\, \mathrm{KL}\big(q(x_{t-1}|x_t,x_0)\,\|\,p(x_{t-1}|x_t)\big) \;+\; \mathrm{E}_{x_1} \log p(x_0|x_1).$$

# %%
def step_back(t, x_t, x0):
    """The Gaussian of x_{t-1} if x0 is known; with the denoiser's guess in place of x0 it is the model's step."""
    a, b, variance = line.posterior(abar, t)
    return Normal(a * x0 + b * x_t, math.sqrt(variance))


x0 = torch.tensor([[1.0]], dtype=torch.float64)
eps = torch.linspace(-6, 6, 241, dtype=torch.float64)[None]
share = torch.softmax(-(eps**2) / 2, 1)  # a standard normal on a grid
kls, noisy, guesses = {}, {}, {}
with torch.no_grad():
    for t in range(1, T + 1):
        noisy[t] = abar[t - 1].sqrt() * x0 + (1 - abar[t - 1]).sqrt() * eps
        guesses[t] = start(noisy[t], torch.tensor([t - 1]))
    for t in range(2, T + 1):
        kls[t] = kl_divergence(step_back(t, noisy[t], x0), step_back(t, noisy[t], guesses[t]))
last = kl_divergence(Normal(abar[-1].sqrt() * x0, (1 - abar[-1]).sqrt()), Normal(0.0, 1.0)).sum()
first = (share * Normal(guesses[1], (1 - abar[0]).sqrt()).log_prob(x0)).sum()
bound = (first - last - sum((share * kl).sum() for kl in kls.values())).item()
error = (chains.std() / 4000**0.5).item()
print(f"sum of the terms {bound:.3f}; mean over the chains {mean_of_logs:.3f} +- {error:.3f}")
assert abs(bound - mean_of_logs) < 4 * error

# %% [markdown]
# **Step 3: two Gaussians of equal width.** Both have the variance of the known-$x_0$ step, so their KL is the squared distance of the means over twice the variance. The
# means differ by $a\,(x_0 - \hat x_0)$, and the constants melt into a difference of signal-to-noise ratios, $\mathrm{SNR}(t) = \alpha_t^2 / \sigma_t^2$ (Kingma et al. 2021):
#
# $$\mathrm{KL}_t = \tfrac12\, \big(\mathrm{SNR}(t-1) - \mathrm{SNR}(t)\big)\, (x_0 - \hat x_0)^2.$$
#
# **Step 4: in noise.** Since $x_t$ is known, a wrong $\hat x_0$ is a wrong noise: $(x_0 - \hat x_0)^2 = (\epsilon - \hat\epsilon)^2 / \mathrm{SNR}(t)$. Hence
#
# $$\mathrm{KL}_t = \tfrac12 \Big(\frac{\mathrm{SNR}(t-1)}{\mathrm{SNR}(t)} - 1\Big) (\epsilon - \hat\epsilon)^2.$$
#
# A picture has $D$ numbers whose KLs add up: their sum is $D$ times the mean squared error $e$.

# %%
snr = elbo.snr(abar)
for t in range(2, T + 1):
    step_3 = (snr[t - 2] - snr[t - 1]) / 2 * (x0 - guesses[t]) ** 2
    guessed_noise = (noisy[t] - abar[t - 1].sqrt() * guesses[t]) / (1 - abar[t - 1]).sqrt()
    step_4 = (snr[t - 2] / snr[t - 1] - 1) / 2 * (eps - guessed_noise) ** 2
    assert torch.allclose(step_3, kls[t], atol=1e-10) and torch.allclose(step_4, kls[t], atol=1e-10)
print(f"steps 3 and 4 agree with the KL of two Gaussians for t = 2..{T} at {eps.numel()} noises each")

# %% [markdown]
# **Step 5: one timestep instead of all.** A sum of $T$ terms is $T$ times their mean; draw $t$ uniformly from $1..T$ and the noise from its Gaussian, and one term estimates the whole:
#
# $$B = \text{constants} - \mathrm{E}_{t, \epsilon}\, W(t)\, e, \qquad W(t) = T\, \frac D2 \Big(\frac{\mathrm{SNR}(t-1)}{\mathrm{SNR}(t)} - 1\Big).$$
#
# At $t = 1$ there is no step back to compare with ($\mathrm{SNR}(0)$ is infinite). The model ends with $p(x_0|x_1) = \mathcal N(\hat x_0, \sigma_1^2)$, a choice, which gives $W(1) = T (D/2) / \bar\alpha_1$.

# %%
weights = elbo.elbo_weights("epsilon", abar, size=1)
by_hand = T / 2 * (snr[:-1] / snr[1:] - 1)
assert torch.allclose(weights[1:], by_hand) and abs(weights[0] - T / 2 / abar[0]) < 1e-12
by_weights = line.evidence_bound(start, abar, x0[0])[0].item()
print(f"W(1) = {weights[0]:.3f}, W(2) to W({T}) = {weights[1]:.3f}; the bound by weights {by_weights:.4f}, by KLs {bound:.4f}")
assert abs(by_weights - bound) < 1e-6

# %% [markdown]
# Here all later weights are equal, because this schedule lets the log of the signal-to-noise ratio fall in equal steps. Others differ. The figure shows $W(t)$ per number, divided by $T/2$, of
# the cosine schedule (that of the faces below) and of Stable Diffusion 1.5: the bound cares most for the very first, nearly noiseless steps, where the finest detail is decided (and, in
# the cosine schedule, for the last ones, which take away what is left of the picture at one blow).

# %%
from diffusers import DDIMScheduler

SCHEDULES = {
    "cosine": DDIMScheduler(num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2"),
    "Stable Diffusion 1.5": DDIMScheduler(num_train_timesteps=1000, beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012),
}
figure, (ax,) = figures.new_figure(height=3.2)
relative = {}
for style, (name, scheduler) in zip(figures.line_styles(2), SCHEDULES.items()):
    relative[name] = elbo.elbo_weights("epsilon", elbo.alphas_bar(scheduler), size=1) / 500
    ax.plot(range(2, 1001), relative[name][1:], label=name, color=style["color"], linestyle=style["linestyle"], linewidth=2)
ax.set(yscale="log", xlabel="t", ylabel="SNR(t-1) / SNR(t) - 1")
ax.legend(frameon=False)
figures.show(figure, alt="two curves on a log axis: cosine falls from about 1.5 at t = 2 to 0.006 in the middle and rises steeply at the end; Stable Diffusion 1.5 falls from 1 and stays near 0.01")

# %%
middle = {name: values[499].item() for name, values in relative.items()}
print("W / (T/2) at t = 2:", {k: round(v[1].item(), 2) for k, v in relative.items()}, " at t = 500:", {k: round(v, 4) for k, v in middle.items()})
assert all(values[1] > 50 * values[499] for values in relative.values()) and all(0.004 < v < 0.02 for v in middle.values())

# %% [markdown]
# **Step 6: the difference.** The constants have no parameters. They are the same for policy and reference, so they cancel:
#
# $$\log \frac{p(x_0)}{p_\text{ref}(x_0)} \;\approx\; B - B_\text{ref} = -\mathrm{E}\, W(t)\, (e - e_\text{ref}) \qquad\text{(E8)}$$
#
# This "$\approx$" is the only step without an inequality sign: a difference of two lower bounds is neither a lower nor an upper bound. How wrong it is we shall see. The library's component does
# this for any diffusers model. It refuses to give a log-probability without the noise, which must be drawn once for everything that is compared:

# %%
with torch.no_grad():
    policy = line.tilted(start, 1.0)  # the start, times exp(x): its right bump is likelier
component = Diffusion("z", ["x"], two_bumps(abar), line.scheduler(abar), weighting="elbo", image_shape=(1, 1, 1))
system = CompoundSystem([component], inputs=("x",), output="z")
with torch.no_grad():
    component.network.load_state_dict(policy.state_dict())  # its frozen copy stays the start
trace = {"x": ["-"], "z": [torch.ones(1, 1, 1, 1, dtype=torch.float64)]}
noise = system.draw_noise(trace, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    now = system.log_prob(trace, noise)
    with system.reference():
        before = system.log_prob(trace, noise)
t, drawn = noise["z"][0].timesteps[0], noise["z"][0].eps.double().flatten()
squares = [
    (drawn - elbo.as_noise("sample", m(x_t, t), x_t, abar[t]).flatten()) ** 2
    for m in (policy, start)
    for x_t in [elbo.noised(torch.ones(1, 1, dtype=torch.float64), drawn[:, None], abar[t])]
]
by_hand = -(weights[t] * (squares[0] - squares[1])).item()
print(f"one draw, t = {t.item() + 1}: {(now - before).item():.4f}; by hand {by_hand:.4f}")
assert abs((now - before).item() - by_hand) < 1e-6

# %% [markdown]
# ## One noise for everything
#
# The estimate is a *difference* of two noisy numbers. With the same $t$ and $\epsilon$ for policy and reference most of the noise cancels; with a draw for each it does not. The mean is
# the same. We estimate the log-ratio at $x_0 = 1$ of a policy close to the start (times $e^{0.3 x}$) 4,000 times in three ways.


# %%
def estimates(policy, x0, number, share_t, share_eps, generator):
    """-W e of the policy minus -W e of the start, `number` times, each from one draw of (t, eps)."""
    t, other_t = torch.randint(T, (2, number), generator=generator)
    eps, other_eps = torch.randn(2, number, 1, generator=generator, dtype=torch.float64)
    other_t, other_eps = (t if share_t else other_t), (eps if share_eps else other_eps)
    scores = []
    for model, when, drawn in ((policy, t, eps), (start, other_t, other_eps)):
        x_t = elbo.noised(torch.full((number, 1), x0, dtype=torch.float64), drawn, abar[when])
        scores.append(-weights[when] * elbo.mean_square(elbo.as_noise("sample", model(x_t, when), x_t, abar[when]), drawn))
    return scores[0] - scores[1]


WAYS = {"same t, same noise": (True, True), "same t, other noise": (True, False), "other t, other noise": (False, False)}
with torch.no_grad():
    close = line.tilted(start, 0.3)
    difference = (line.evidence_bound(close, abar, x0[0]) - line.evidence_bound(start, abar, x0[0])).item()
    drawn = {name: estimates(close, 1.0, 4000, *how, torch.Generator().manual_seed(1)) for name, how in WAYS.items()}
for name, values in drawn.items():
    print(f"{name:21} mean {values.mean():6.2f}  standard deviation {values.std():5.2f}   (difference of the bounds: {difference:.2f})")
    assert abs(values.mean() - difference) < 4 * values.std() / 4000**0.5
spread = {name: values.std().item() for name, values in drawn.items()}
assert 5 * spread["same t, same noise"] < min(spread["same t, other noise"], spread["other t, other noise"])

# %% [markdown]
# All three estimate the same number. Without shared noise the spread is more than five times as large: a pair's margin would be mostly chance. The same holds between winner and loser, which
# is why image $i$ of both sides shares its $t_i$ and $\epsilon_i$.

# %%
figure, (ax,) = figures.new_figure(height=3.0)
for style, (name, values) in zip(figures.line_styles(3), drawn.items()):
    counts, edges = torch.histogram(values.clamp(-40, 40), bins=81, range=(-40.5, 40.5), density=True)
    ax.plot(range(-40, 41), counts, label=name, color=style["color"], linestyle=style["linestyle"], linewidth=2)
ax.axvline(difference, color="0.3", linestyle=":", linewidth=1.5)
ax.set(yscale="log", xlabel="estimate of the log-ratio (nats)", ylabel="share per nat", ylim=(1e-4, 1.5), xlim=(-35, 35))
ax.legend(frameon=False, loc="upper left")
figures.show(figure, alt="with the same noise nearly all estimates lie within a few nats of the dotted true difference; without it they spread over plus and minus thirty nats")

# %% [markdown]
# ## Why one timestep makes the loss larger
#
# The loss is $-\log\sigma$ of the margin, a convex function. By Jensen, the mean of the loss over noisy margins is at least the loss at the mean margin: training with one timestep minimises
# an *upper bound* of the loss with the full sum. More timesteps a picture tighten it, at the price of as many network calls.

# %%
winner, loser = 1.0, -1.0
gap = sum(s * (line.evidence_bound(policy, abar, v) - line.evidence_bound(start, abar, v)).item()
          for s, v in ((1, x0[0]), (-1, -x0[0])))  # fmt: skip
full = -logsigmoid(torch.tensor(gap)).item()
with torch.no_grad():
    gaps = torch.stack([estimates(policy, v, 64 * 500, True, True, torch.Generator().manual_seed(2)) for v in (winner, loser)])
gaps = gaps[0] - gaps[1]  # the same generator: winner and loser share t and noise
means = {m: -logsigmoid(gaps.reshape(-1, m).mean(1)).mean().item() for m in (1, 2, 4, 16, 64)}
print(f"loss of the full sum {full:.3f}; with m timesteps:", {m: round(value, 3) for m, value in means.items()})
values = list(means.values())
assert values == sorted(values, reverse=True) and values[-1] > full - 0.02 and values[0] > full + 0.05

# %% [markdown]
# ## The constants, and who learns
#
# $W(t)$ in nats is huge for small $t$ and small elsewhere. Most people train with the *same* weight for all timesteps instead: the images look better, as they do when a diffusion model is
# trained from scratch. Diffusion-DPO writes it as $\beta T \omega$ with a constant $\omega$. Two public codes of it look different and are the same:
# one takes $0.5 \times 5000$, the other 2500 without a half; both use the mean squared error. In our notation that is $\beta W = 2500$.


# %%
def two_public_losses(e, e_ref):
    """Diffusion-DPO's loss by the two conventions; e, e_ref: (2, B) errors of winners and losers."""
    model_diff, ref_diff = e[0] - e[1], e_ref[0] - e_ref[1]
    one = -logsigmoid(-0.5 * 5000 * (model_diff - ref_diff)).mean()
    other = -logsigmoid(2500 * (ref_diff - model_diff)).mean()
    return one.item(), other.item()


with torch.no_grad():
    nearly = line.tilted(start, 0.001)  # close to the start: with this weight a policy moves little
constant = Diffusion("z", ["x"], two_bumps(abar), line.scheduler(abar), weight=25_000.0, image_shape=(1, 1, 1))
constant.network.load_state_dict(nearly.state_dict())
scaled = CompoundSystem([constant], inputs=("x",), output="z")
images = [torch.full((1, 1, 1, 1), v, dtype=torch.float64) for v in (1.0, 0.8, -1.0, -0.7)]
chosen, rejected = {"x": ["-"] * 2, "z": images[:2]}, {"x": ["-"] * 2, "z": images[2:]}
ours = losses.direct_loss(scaled, chosen, rejected, beta=0.1, generator=torch.Generator().manual_seed(0)).loss.item()
noise = constant.draw_noise(images[:2], torch.Generator().manual_seed(0))
with torch.no_grad():
    e = [torch.stack([constant.denoising_errors(side["z"], side, noise) for side in (chosen, rejected)])]
    with constant.reference():
        e.append(torch.stack([constant.denoising_errors(side["z"], side, noise) for side in (chosen, rejected)]))
print(f"ours with beta 0.1 and W 25000: {ours:.6f}; the two public conventions: {two_public_losses(*e)[0]:.6f}, {two_public_losses(*e)[1]:.6f}")
assert 0.1 < ours < 2 and abs(ours - math.log(2)) > 0.01 and max(abs(value - ours) for value in two_public_losses(*e)) < 1e-6

# %% [markdown]
# In a system the loss has *one* beta, and the language model's log-ratio comes in nats. The constant $W$ decides what a change of the images counts in those nats. It is therefore no detail: it sets who
# learns. To compare, the bound's own weight for Stable Diffusion 1.5 ($D = 4 \cdot 64 \cdot 64$ latent numbers):

# %%
nats = elbo.elbo_weights("epsilon", elbo.alphas_bar(SCHEDULES["Stable Diffusion 1.5"]), size=4 * 64 * 64)
print(f"W in nats: at t = 2 {nats[1]:.2g}, at t = 500 {nats[499]:.2g}; 2500 / W(500) = {2500 / nats[499]:.3f}")
assert 0.02 < 2500 / nats[499] < 0.06

# %% [markdown]
# At a middle timestep $\beta W = 2500$ is what the bound in nats would give with a beta of about 0.03. At $t = 2$ the constant weight is thousands of times smaller than the bound's: fine detail hardly counts.
#
# ## Is the bound tight?
#
# Back to one number, where the likelihood is known. First the bound of one model, then the difference of two. The left figure shows $\log p(x_0) - B(x_0)$ of the start for growing $T$, the right one its mean over the model's own numbers.

# %%
def facts(steps, slope):
    """Exact log-likelihoods and bounds of the start and of the start times exp(slope x), at points from -2 to 2."""
    schedule = line.schedule(steps)
    one = two_bumps(schedule)
    other = line.tilted(one, slope)
    x = grid[134:267:4]
    logs = [line.log_likelihood(model, schedule)[134:267:4] for model in (one, other)]
    bounds = [line.evidence_bound(model, schedule, x).detach() for model in (one, other)]
    return {"x": x, "log_p": logs, "bound": bounds}


by_steps = {steps: facts(steps, 1.0) for steps in (4, 8, 16, 32, 64)}
gaps = {steps: found["log_p"][0] - found["bound"][0] for steps, found in by_steps.items()}
mean_gap = {steps: ((p := by_steps[steps]["log_p"][0].exp()) * gap).sum().item() / p.sum().item() for steps, gap in gaps.items()}
print("mean gap in nats:", {steps: round(gap, 3) for steps, gap in mean_gap.items()})
assert all(gap.min() > 0 for gap in gaps.values())
assert all(mean_gap[steps] > 2 * mean_gap[2 * steps] for steps in (4, 8, 16, 32)) and mean_gap[32] < 2.5 * mean_gap[64]

# %%
figure, (left, right) = figures.new_figure(2, width=8.6, height=3.2)
for style, steps in zip(figures.line_styles(4), (8, 16, 32, 64)):
    left.plot(by_steps[steps]["x"], gaps[steps], label=f"T = {steps}", **dict(style, marker=None))
left.set(xlabel="x0", ylabel="log p(x0) - bound (nats)")
left.legend(frameon=False)
right.plot(list(mean_gap), list(mean_gap.values()), "o-", color="black", linewidth=2)
right.set(xscale="log", yscale="log", xlabel="T", ylabel="mean gap (nats)")
right.set_xticks([4, 8, 16, 32, 64], ["4", "8", "16", "32", "64"])
right.minorticks_off()
figures.show(figure, alt="the gap is positive everywhere, largest between the bumps, and about halves when T doubles")

# %% [markdown]
# The bound of a *best* denoiser becomes tight: twice the timesteps, half the gap (or less). With $T = 1000$ it would be about a hundredth of a nat a number. (A picture has thousands of numbers, so nats add up.)
#
# Now the difference. The policy is the start times $e^{x}$, the optimum E4 of a judge who likes large numbers. Move the slider: the exact log-ratio and the difference of the two bounds. Where the dashed line lies above the solid one E8
# flatters the policy, where it lies below E8 wrongs it.


# %%
def plot_difference(steps):
    """Exact log-ratio and difference of the bounds against x0."""
    found = by_steps[steps]
    exact, approximate = (found[key][1] - found[key][0] for key in ("log_p", "bound"))
    figure, (ax,) = figures.new_figure(height=3.4)
    styles = figures.line_styles(2)
    ax.plot(found["x"], exact, label="exact log-ratio", color=styles[0]["color"], linewidth=2)
    ax.plot(found["x"], approximate, label="difference of the bounds (E8)", color=styles[1]["color"], linestyle="--", linewidth=2)
    ax.fill_between(found["x"], exact, approximate, where=approximate > exact, color="0.8", label="E8 above")
    ax.set(xlabel="x0", ylabel="nats", title=f"T = {steps}: errors from {(approximate - exact).min():.2f} to {(approximate - exact).max():.2f} nats", ylim=(-5, 4))
    ax.legend(frameon=False, loc="lower right")
    return figure


view = SliderFigure(
    plot_difference,
    alt="at T = 8 the difference of the bounds lies below the exact log-ratio left of 0 and above it on the right of 0",
    steps=choice((8, 4, 16, 32, 64)),
)
view

# %%
wrong = {steps: (f["bound"][1] - f["bound"][0]) - (f["log_p"][1] - f["log_p"][0]) for steps, f in by_steps.items()}
for steps, values in wrong.items():
    print(f"T = {steps:2}: E8 is wrong by {values.min():.2f} to {values.max():+.2f} nats")
assert all(values.min() < 0 < values.max() for values in wrong.values()) and wrong[64].abs().max() < wrong[8].abs().max() / 4

# %% [markdown]
# Neither an upper nor a lower bound: both signs occur at every $T$. Between two best denoisers the error fades as $T$ grows. But a policy under training is not the best denoiser of anything. What then?
#
# ## What training does to the bound
#
# We train three policies by E8 with 2 timesteps a number and beta 1, each on 1,000 comparisons of the start's own numbers. The first two see a judge whose preferences have a probability, $\sigma(2x^w - 2x^l)$; the optimum is then known, the start times $e^{2x}$.
#
# - **tied**: a mixture with free weights, means and widths, so always the best denoiser of *something*.
# - **free**: the start's denoiser plus a small network, which may say anything at any noise level, as a real U-Net may.
# - **free, hard judge**: the same network, and a judge who *always* prefers the larger number, as a judge that measures does. No finite policy satisfies such a judge.


# %%
def line_pairs(number, hard, generator):
    """Pairs of the start's own numbers; the larger wins always, or with probability sigmoid(2 x difference)."""
    one, other = line.sample(start, abar, 2 * number, generator).reshape(2, -1)
    sure = (one > other).double() if hard else torch.sigmoid(2 * (one - other))
    wins = torch.rand(number, generator=generator, dtype=torch.float64) < sure
    sides = torch.where(wins, one, other), torch.where(wins, other, one)
    chosen, rejected = ({"x": ["-"] * number, "z": [v.reshape(1, 1, 1, 1) for v in side]} for side in sides)
    return preferences.Pairs.from_traces(chosen, rejected)


def trained(network, lr, hard):
    """The network after 100 steps of SysDPO-Direct on the line, its history, and what the library warned of."""
    component = Diffusion("z", ["x"], network, line.scheduler(abar), weighting="elbo", timesteps=2, image_shape=(1, 1, 1))
    alone = CompoundSystem([component], inputs=("x",), output="z")
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = training.train(
            alone, line_pairs(1000, hard, generator), training.direct(1.0), steps=100, lr=lr, batch_size=64, schedule="cosine",
            generator=generator,
        )  # fmt: skip
    return component.network, history, [str(warning.message) for warning in caught]


def free_policy():
    """The start plus a small network that says 0 at first."""
    return line.Moved(two_bumps(abar), torch.Generator().manual_seed(0))


# %% tags=["nbval-ignore-output"]
learned = {
    "tied": trained(two_bumps(abar), 0.03, hard=False),
    "free": trained(free_policy(), 0.01, hard=False),
    "free, hard judge": trained(free_policy(), 0.001, hard=True),
}
late = {name: sum(record["loss"] for record in history[-20:]) / 20 for name, (_, history, _) in learned.items()}
for name, (_, history, said) in learned.items():
    print(f"{name}: loss {history[0]['loss']:.3f} -> {late[name]:.3f}")
    print("  ", *said, sep="\n   ")

# %%
log_two = math.log(2)
assert all(abs(history[0]["loss"] - log_two) < 1e-9 for _, history, _ in learned.values())
assert late["tied"] < 0.60 and late["free"] < 0.65 and late["free, hard judge"] < 0.35
assert all("denoising error is above the start's for winners" in " ".join(said) for _, _, said in learned.values())

# %% [markdown]
# All losses fall, that of the hard judge furthest. The library warns in each case: the denoising error rose for winners *and* losers. That is a known trait of Diffusion-DPO, since the loss sees differences only. On a picture it
# shows as artefacts. Here we can look further: at the exact densities, and at what E8 says of them.

# %%
points = grid[134:267:4]
start_log, start_bound = line.log_likelihood(start, abar), line.evidence_bound(start, abar, points).detach()
best = start_log + 2 * grid
best = best - torch.logsumexp(best, 0) - math.log(step)
story = {}
for name, (network, _, _) in learned.items():
    log_p = line.log_likelihood(network, abar)
    e8 = line.evidence_bound(network, abar, points).detach() - start_bound
    ratio = (log_p - start_log)[134:267:4]
    story[name] = {"log_p": log_p, "ratio": ratio, "e8": e8, "distance": (best.exp() * (best - log_p)).sum().item() * step}
distance = (best.exp() * (best - start_log)).sum().item() * step
print(f"KL(optimum || start) {distance:.2f}; of the two that can reach it: tied {story['tied']['distance']:.2f}, free {story['free']['distance']:.2f}")
print("mean over x0 < 0 and over x0 > 0.5, nats:")
for name, s in story.items():
    means = {key: [s[key][part].mean().item() for part in (points < 0, points > 0.5)] for key in ("ratio", "e8")}
    print(f"  {name:17} exact log-ratio {means['ratio'][0]:7.2f} {means['ratio'][1]:6.2f}   E8 {means['e8'][0]:7.2f} {means['e8'][1]:6.2f}")
assert story["tied"]["distance"] < story["free"]["distance"] < 0.75 * distance

# %% tags=["nbval-ignore-output"]
figure, axes = figures.new_figure(4, width=12.0, height=3.2)
styles = figures.line_styles(5)
curves = {"start": start_log, "optimum": best, **{name: s["log_p"] for name, s in story.items()}}
for style, (name, log_p) in zip(styles, curves.items()):
    axes[0].plot(grid[near], log_p.exp()[near], label=name, color=style["color"], linestyle=style["linestyle"], linewidth=2)
axes[0].set(xlabel="x0", ylabel="density", ylim=(0, 2.6))
axes[0].legend(frameon=False, loc="upper left", fontsize=8)
for ax, low, (name, s) in zip(axes[1:], (-6, -6, -90), story.items()):
    ax.plot(points, s["ratio"], color=styles[0]["color"], linewidth=2, label="exact log-ratio")
    ax.plot(points, s["e8"], color=styles[1]["color"], linestyle="--", linewidth=2, label="E8")
    ax.set(xlabel="x0", ylabel="nats", ylim=(low, 8), title=name)
    ax.legend(frameon=False, loc="lower right", fontsize=8)
figures.show(
    figure,
    alt="all trained densities have moved to the right bump; for the tied policy E8 follows the exact log-ratio, for the free one it runs a little below; "
    "under the hard judge E8 lies far below the exact log-ratio on the left and slightly below zero on the right, where the exact one is above zero",
)

# %%
left, right = points < 0, points > 0.5
apart = {name: s["ratio"] - s["e8"] for name, s in story.items()}
print("exact log-ratio minus E8, mean over x0 < 0:", {name: round(values[left].mean().item(), 2) for name, values in apart.items()})
assert abs(apart["tied"][left].mean()) < 0.15 < apart["free"][left].mean() < 1.0 and apart["free, hard judge"][left].mean() > 10
hard = story["free, hard judge"]
assert hard["ratio"][right].mean() > 0.3 and hard["e8"][right].mean() < -1.0
assert all((line.log_likelihood(n, abar)[134:267:4] - line.evidence_bound(n, abar, points)).min() > 0 for n, _, _ in learned.values())

# %% [markdown]
# The tied policy's E8 follows its likelihood to a tenth of a nat; the free one's drifts by a few tenths. Under the hard judge the two part. Losers did become rare, but E8 says they lost nearly twice as many nats as they did. And the *winners*: their exact
# likelihood rose, while their bound fell. The policy has learned to denoise badly where losers are, which costs the winners' bound too, and the margin, a difference, does not mind. Nothing on the loss curve shows this. It is a reason to judge a
# diffusion model by its pictures and never by its margin, and to anchor its winners, as we shall do below.
#
# ## The faces
#
# Now the whole system, in a world where everything can be measured. A user asks for a row of pictures; a language model writes one caption a picture; a diffusion model paints each caption. A judge measures the asked
# attribute *in the pixels*, with the geometry that the drawings were made with. No gradient can pass from a picture to its caption: pixels do not depend on words by anything that can be differentiated.

# %%
tiny = profiles.find("faces", "tiny")
work = tempfile.TemporaryDirectory()
changes = {"requests_1": 12, "min_gap": 0.2, "pairs": 60, "steps_2": 8}
context = runner.Context(tiny, tiny.with_settings(changes), Path(work.name), say=lambda text: None, progress=False)
system = faces_rows.build_system(context)
figures.show(figures.draw_graph(system), alt="x points to captions, captions points to images")

# %% [markdown]
# First the world alone. Drawings with known attributes, and the judge that measures them. Its error is small beside the steps of the degree words, which are 0.05 to 0.94.

# %%
print("mean absolute error of the judge on 500 new drawings a family, and correlation:")
for family in faces.FAMILIES:
    measured = {name: row for name, row in faces.accuracy(family, n=500).items() if name != "colour"}
    print(f"  {family}:", {name: (round(row["mae"], 3), round(row["correlation"], 3)) for name, row in measured.items()})
    assert all(row["mae"] < 0.05 and row["correlation"] > 0.98 for row in measured.values())
print("degree words:", faces.DEGREES)

# %% [markdown]
# Four requests and the start's answers. Both models were trained here, and badly on purpose: the language model often writes captions out of order, and a third of the diffusion model's training captions named a random degree.

# %%
requests = faces.requests(torch.Generator().manual_seed(7), 4, "validation")
words = [faces.render(request) for request in requests]
trace = system.sample({"x": words}, generator=torch.Generator().manual_seed(2))
for request, text, pictures in zip(requests, trace["captions"], trace["images"]):
    verdict = faces.judge(request, str(text), pictures)
    print(f"{faces.render(request)}\n  {text}\n  order of the captions {verdict.caption_order:.0f}, of the pictures {verdict.order_consistency:.0f}, preference score {verdict.preference_score:.2f}")

# %% tags=["nbval-ignore-output"]
records = [{"seed": 0, "system": "before", "item": i, "x": w, "captions": str(c)} for i, (w, c) in enumerate(zip(words, trace["captions"]))]
strips = {("before", i): faces_data.to_bytes(row) for i, row in enumerate(trace["images"])}
figures.show(faces_figures.plot_strips(strips, records), alt="four rows of small drawn pictures under their requests, degree words below each picture; rows in the asked order are framed")

# %% [markdown]
# Two measures, both of the pictures alone (E10; the definitions are ours, the paper's formulas are not available to us). With $a_i$ the measured level of picture $i$, turned so that the asked direction is up:
#
# - **order consistency** is 1 if $a_1 < a_2 < \dots < a_n$, else 0;
# - **preference score** is $(a_n - a_1) - \frac1n \sum_i |a_i - \text{the straight line from } a_1 \text{ to } a_n|$.
#
# A sequence that does not parse counts 0 and -1, and stays in the mean.

# %%
row = torch.tensor([[0.1], [0.6], [0.9]])
print(f"levels 0.1, 0.6, 0.9: order {faces.order_consistency(row):.0f}, score {faces.preference_score(row):.3f}")
assert abs(faces.preference_score(row) - (0.8 - 0.1 / 3)) < 1e-6

# %% [markdown]
# ## Preference data of whole sequences
#
# Answers are drawn under four prompting styles and painted; two answers to one request become a pair if their scores differ enough. Some pairs have the same captions and other pictures: those say nothing about captions, and much about pictures.
# Here 12 requests, in the run 200.

# %% tags=["nbval-ignore-output"]
answers = faces_rows.answers_of_round(context, 0, 1)
found = faces_data.candidates(answers, context.settings["min_gap"])
pairs = faces_rows.pairs_of(context, 0, faces_rows.STAGES["one-round"])
print(f"{len(answers)} answers, {len(found.same)} possible pairs with the same captions, {len(found.different)} with others, {found.ties} ties; {len(pairs)} pairs taken")

# %% [markdown]
# ## A few steps
#
# Eight steps of SysDPO-Direct on these pairs, both components at once, with the anchors of the run: the negative log-probability of the winner is added with a small weight to each component. **The anchors are ours, not the paper's**; why they are there we shall see in the table.

# %% tags=["nbval-ignore-output"]
stage = faces_rows.STAGES["one-round"]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # eight steps say little about errors
    history = training.train(
        system, pairs, faces_rows.objective_of(stage, context.settings), steps=8, lr={"captions": 3e-4, "images": 5e-4},
        batch_size=8, generator=torch.Generator().manual_seed(0), progress=False,
    )  # fmt: skip
for record in history:
    parts = ", ".join(f"{name} {value:+.2f}" for name, value in sorted(record["shares"].items()))
    print(f"step {record['step']}: loss {record['loss']:.3f}, log-ratio gap in nats: {parts}")

# %%
assert set(history[0]["shares"]) == {"captions", "images"} and len(history) == 8
assert max(abs(value) for value in history[0]["shares"].values()) < 1e-3, "policy and reference are one at the start"

# %% [markdown]
# ## The whole run
#
# Eight steps show that it moves, not that it helps. The stored run has 200 requests a round and 240 steps, three training seeds, 64 held-out requests with 4 sequences each, and a validation split on which everything was tuned. It has **two rounds**:
# round 1 trains the captions alone on answers of the start; round 2 begins with that system, which is then also the reference, on *its* answers. A picture that is drawn as asked can stand in a losing sequence because its captions were out of order; once
# the order is mostly right, the pictures' own errors decide, and the diffusion model gets a clean signal.
#
# **Tiny profile, stored** (`python -m sysdpo_lab run faces --profile tiny --set rows=all`):

# %%
run = results.load("faces-tiny")
cell = {(row["system"], row["metric"]): row for row in run["rows"]}
METRICS = ("preference_score", "order_consistency", "caption_order", "faithfulness", "validity", "image_drift")
rows = list(dict.fromkeys(row["system"] for row in run["rows"]))
print(f"seeds {run['seeds']}; n = {cell['before', 'order_consistency']['n']} (seeds x requests, {run['settings']['samples']} sequences each)")
print(f"{'':26}" + "".join(f"{metric.replace('_', ' '):>19}" for metric in METRICS))
for name in rows:
    print(f"{name:26}" + "".join(f"{cell[name, metric]['value']:19.3f}" for metric in METRICS))



# %%
def value(system, metric="order_consistency"):
    """A row's stored mean."""
    return cell[system, metric]["value"]


gap = {(d["a"], d["b"], d["metric"]): d for d in run["differences"]}
for a, b in (("only:captions", "before"), ("joint", "only:captions"), ("joint", "separate"), ("only:images", "before")):
    for metric in ("order_consistency", "preference_score"):
        d = gap[a, b, metric]
        print(f"{a} - {b}, {metric}: {d['value']:+.3f} [{d['ci_low']:+.3f}, {d['ci_high']:+.3f}]")
first = gap["only:captions", "before", "order_consistency"]["value"], gap["joint", "only:captions", "order_consistency"]
assert first[0] >= 0.20 and first[1]["value"] >= 0.08 and first[1]["ci_low"] > 0
assert gap["joint", "only:captions", "preference_score"]["value"] >= 0.10 and gap["joint", "only:captions", "preference_score"]["ci_low"] > 0

# %% tags=["nbval-ignore-output"]
shown = ["before", "best-of-n", "only:captions", "only:images", "separate", "joint", "swap:captions", "swap:images", "oracle", "oracle:joint"]
figures.show(
    figures.plot_rows([row for name in shown for row in run["rows"] if row["system"] == name], "order_consistency"),
    alt="order consistency with intervals: before is lowest, only:images hardly above it, only:captions in the middle, joint highest of the trained rows, the oracle rows above",
)

# %% [markdown]
# Read it from the ceilings. **oracle** is a perfect writer with the start's pictures: what the captions alone can ever reach. **oracle:joint** is the same writer with the trained pictures: the diffusion part has lifted the ceiling. **swap:captions** (joint's
# captions, the start's pictures) and **swap:images** (the start's captions, joint's pictures) split the gain: the captions bring most of it, and the trained pictures without ordered captions bring little, because a row whose captions are in the wrong order cannot be
# painted into the right one. For the same reason **only:images** stays near the start. **best-of-n** picks the
# best of the start's four sequences by the judge itself, at four times the price for ever; one sequence of joint is better than that.

# %%
assert value("oracle:joint") > value("oracle") + 0.05 and value("swap:images") < value("swap:captions") < value("joint")
assert abs(value("only:images") - value("before")) < 0.10
assert min(value(name, "validity") for name in ("before", "only:captions", "joint")) >= 0.95
assert value("joint", "faithfulness") >= value("before", "faithfulness") and value("joint") > value("best-of-n")
assert 0.20 <= value("before") <= 0.35
print(f"validity: before {value('before', 'validity'):.3f}, joint {value('joint', 'validity'):.3f}; faithfulness: {value('before', 'faithfulness'):.3f}, {value('joint', 'faithfulness'):.3f}")

# %% [markdown]
# Rows of pictures of the first seed, before and after. A frame marks a row whose measured levels rise as asked.

# %% tags=["nbval-ignore-output"]
def stored_picture(name, alt, folder="faces-tiny"):
    """Show a stored figure in 64 colours, which keeps the notebook small."""
    small = io.BytesIO()
    with Image.open(paths.data_folder() / "results" / folder / "figures" / f"{name}.png") as picture:
        picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    data, metadata = figures.picture(small.getvalue(), alt)
    display(data, metadata=metadata, raw=True)


stored_picture("strips", "eight requests, three columns: before, only:captions, joint; more rows are framed from left to right")

# %% [markdown]
# **Who carries the margin?** The log-ratio gap of winner against loser during joint training of the first seed, split by component. The images' part is the larger one and the noisier one: $W$ = 2,000 makes it so, and each step sees one timestep a picture.

# %% tags=["nbval-ignore-output"]
stored_picture("shares", "two lines that rise from 0: the captions' share and the images' share of the log-ratio gap, in nats")

# %% [markdown]
# ## What the anchors do
#
# **Plain SysDPO-Direct, as in the paper**, is the row one-round-preference-only: both components, answers of the start, one loss, nothing else. **preference-only** is round 2 without anchors, **winners-only** round 2 without the preference (fine-tuning on the winners), **one-round** has anchors but a single round.
# **only:captions-longer** gives the captions alone about the CPU time of joint.

# %%
for name in ("only:captions", "only:captions-longer", "winners-only", "preference-only", "joint", "one-round", "one-round-preference-only"):
    print(f"{name:27} order {value(name):.3f}  score {value(name, 'preference_score'):+.3f}  validity {value(name, 'validity'):.3f}  drift {value(name, 'image_drift'):+.2f}")

# %% tags=["nbval-ignore-output"]
stored_picture("errors", "relative denoising errors of winners and losers in round 2 for joint, winners-only and preference-only")

# %% [markdown]
# The dashed and full lines tell it. Without anchors (green) the errors of winners and losers rise together, losers a little further: the margin grows, the pictures drift. Fine-tuning on the winners (orange) lowers both. Joint (blue) lowers the winners' and
# holds the losers'. In the table:
#
# - **winners-only** reaches most of joint's order, and about half of its gain in preference score over the captions alone. What the losers add is worth having, and it is not the larger part.
# - **preference-only** ends no better in order than the captions alone; its pictures drift by more than half, and its captions lose validity. In round 2, where the pictures of winner and loser come from nearly the same captions, the plain loss breaks more than it mends.
# - **one-round-preference-only**, the paper's loss as it is, works here: it more than doubles the start's order, as **one-round** with anchors does. Its price is drift. The anchors' use shows in the second round.
# - **only:captions-longer** is no better than only:captions: four times the steps on 900 pairs cost validity.
#
# (Separate-DPO is as good as joint here. In a chain of two components with whole traces the two losses differ by their sigmoids only, see lesson 07; the paper's Separate, with finals only, cannot train a caption writer at all.)

# %%
gain = {name: value(name, "preference_score") - value("only:captions", "preference_score") for name in ("winners-only", "joint")}
print(f"winners-only brings {gain['winners-only'] / gain['joint']:.0%} of joint's gain in preference score over only:captions")
assert 0.4 < gain["winners-only"] / gain["joint"] < 0.7 and value("winners-only") > 0.9 * value("joint")
assert value("preference-only") < value("only:captions") and value("preference-only", "image_drift") > 0.5
assert value("preference-only", "validity") < 0.95 < value("winners-only", "validity")
assert value("one-round-preference-only") > 2 * value("before") and value("one-round-preference-only", "image_drift") > 0.2
assert value("only:captions-longer") <= value("only:captions") + 0.02 and value("only:captions-longer", "validity") < value("only:captions", "validity")
assert abs(value("separate") - value("joint")) < 0.03

# %% [markdown]
# ## What makes the diffusion part matter
#
# Five studies, one setting varied at a time, everything else as in the run above (`python -m sysdpo_lab.experiments.faces_studies NAME --main runs/faces-tiny --out runs/faces-study-NAME`). **Tiny profile, stored.**

# %%
studies = {name: results.load(f"faces-study-{name}") for name in ("noise", "weight", "timesteps", "pairs", "anchors")}


def study_value(study, point, system, metric="order_consistency"):
    """A mean of a study's point."""
    rows = next(p["rows"] for p in studies[study]["points"] if p["x"] == point)
    return next(row["value"] for row in rows if (row["system"], row["metric"]) == (system, metric))


for name, study in studies.items():
    print(f"{study['title']} (seeds {study['points'][0]['seeds']})")
    for point in study["points"]:
        systems = dict.fromkeys(row["system"] for row in point["rows"])
        print(f"  {point['x']:>12}: " + ", ".join(f"{system} {study_value(name, point['x'], system):.2f}" for system in systems))

# %% tags=["nbval-ignore-output"]
for name in studies:
    figures.show(
        faces_figures.plot_study(studies[name]["points"], "order_consistency", studies[name]["xlabel"]),
        alt=f"order consistency with intervals against {studies[name]['xlabel']}",
    )

# %% [markdown]
# - **Label noise.** With a base that never saw a wrong caption there is nothing for the pictures to learn: joint and only:captions end together, and the oracle's ceiling is near 1. (The start is better too. Its aligned captions lose validity; the recipe was tuned for the weakened base.) The diffusion model matters
#   here *because* it is weak.
# - **beta x W.** An eighth of the weight costs a little order at most, and the pictures then drift up instead of down: the preference term has less to hold against the anchor's noise. The choice of $W$ is not delicate within this range.
# - **Timesteps.** Four timesteps a picture and a quarter of the steps need the same network calls of the diffusion model; the captions then see a quarter of the pairs, and the system ends lower. At a fixed budget more pairs beat quieter margins.
# - **Pairs with the same captions.** They speak about the pictures alone. Without them the pictures still learn from pairs with different captions.
# - **Anchors.** The table above, with intervals.

# %%
clean, weak = ({name: study_value("noise", point, name) for name in ("before", "only:captions", "joint", "oracle")} for point in ("0 %", "35 %"))
assert abs(clean["joint"] - clean["only:captions"]) < 0.05 < weak["joint"] - weak["only:captions"] and clean["oracle"] > 0.95
assert clean["before"] > weak["before"] and study_value("noise", "0 %", "joint", "validity") < 0.95
assert abs(study_value("weight", "200", "joint") - study_value("weight", "25", "joint")) < 0.06
assert study_value("weight", "25", "joint", "image_drift") > 0 > study_value("weight", "200", "joint", "image_drift")
assert study_value("timesteps", "4 (60)", "joint") < study_value("timesteps", "1 (240)", "joint")
assert study_value("pairs", "0", "joint") > study_value("pairs", "0", "before") + 0.30

# %% [markdown]
# ## Exercises
#
# ### Exercise 1: The noise error
#
# **Difficulty** 2/5 · **importance** 4/5 · **minutes** 10
#
# Networks predict one of three things: the noise ("epsilon"), the clean picture ("sample"), or $v = \alpha \epsilon - \sigma x_0$ ("v_prediction"). Write `noise_error(prediction, output, x0, eps, abar)`: for each of N images the mean over its D numbers of $(\epsilon - \hat\epsilon)^2$. `output`, `x0`, `eps` are
# (N, D), `abar` is (N,); $x_t$ is not given, so make it.
#
# <details><summary>Hint 1</summary>
#
# $x_t = \alpha x_0 + \sigma \epsilon$ with $\alpha = \sqrt{\bar\alpha}$. If $\hat x_0$ is known, which $\hat\epsilon$ gives the same $x_t$?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# For v: $\hat\epsilon = \sigma x_t + \alpha \hat v$. Check it by putting in the definitions.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "noise-error", "locked": false, "schema_version": 3, "solution": true, "task": false}
def noise_error(prediction, output, x0, eps, abar):
    """Mean squared error on the noise, shape (N,)."""
    ### BEGIN SOLUTION
    alpha, sigma = abar.sqrt()[:, None], (1 - abar).sqrt()[:, None]
    x_t = alpha * x0 + sigma * eps
    guesses = {"epsilon": output, "sample": (x_t - alpha * output) / sigma, "v_prediction": sigma * x_t + alpha * output}
    return (eps - guesses[prediction]).square().mean(1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "noise-error-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_08.check_noise_error(noise_error)
### BEGIN HIDDEN TESTS
clean, drawn_noise, level = torch.ones(1, 4), torch.full((1, 4), 2.0), torch.tensor([0.25])
for kind, exact in (("epsilon", drawn_noise), ("sample", clean), ("v_prediction", 0.5 * drawn_noise - 0.75**0.5 * clean)):
    assert noise_error(kind, exact, clean, drawn_noise, level).item() < 1e-9, "a network that is right has error 0, whatever it predicts"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* The same loss must mean the same for Stable Diffusion 1.5 (noise) and for the small model here (clean picture).
#
# ### Exercise 2: The bound's weights
#
# **Difficulty** 2/5 · **importance** 3/5 · **minutes** 10
#
# Write `bound_weights(abar, size)`: $W(t)$ of step 5 for $t = 2..T$, shape (T - 1,). `abar` is (T,) in double precision, `size` is D.
#
# <details><summary>Hint 1</summary>
#
# SNR = abar / (1 - abar), one number a timestep.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Divide the vector without its last entry by the vector without its first.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "bound-weights", "locked": false, "schema_version": 3, "solution": true, "task": false}
def bound_weights(abar, size):
    """T (D/2) (SNR(t-1) / SNR(t) - 1) for t = 2..T."""
    ### BEGIN SOLUTION
    snr = abar / (1 - abar)
    return len(abar) * size / 2 * (snr[:-1] / snr[1:] - 1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "bound-weights-test", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.lesson_08.check_bound_weights(bound_weights)
### BEGIN HIDDEN TESTS
assert torch.allclose(bound_weights(abar, 1), weights[1:]), "the weights of the line above"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* This is what a constant weight replaces.
#
# ### Exercise 3: The log-ratio under one noise
#
# **Difficulty** 3/5 · **importance** 5/5 · **minutes** 15
#
# Write `bound_log_ratio(policy, reference, x0, abar, weights, draw)`: one draw of E8 for each of N images. `policy(x_t, t)` and `reference(x_t, t)` return noise (N, D); `draw()` returns `(t, eps)`, other ones at each call; `t` counts from 0, so that `abar[t]` and
# `weights[t]` belong to it.
#
# <details><summary>Hint 1</summary>
#
# How often may you call `draw`?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A smaller error than the reference's is a positive log-ratio.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "bound-log-ratio", "locked": false, "schema_version": 3, "solution": true, "task": false}
def bound_log_ratio(policy, reference, x0, abar, weights, draw):
    """- W(t) (e - e_ref) under one (t, eps), shape (N,)."""
    ### BEGIN SOLUTION
    t, eps = draw()
    x_t = abar[t].sqrt()[:, None] * x0 + (1 - abar[t]).sqrt()[:, None] * eps
    e, e_ref = ((eps - model(x_t, t)).square().mean(1) for model in (policy, reference))
    return -weights[t] * (e - e_ref)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "bound-log-ratio-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_08.check_bound_log_ratio(bound_log_ratio)
### BEGIN HIDDEN TESTS
ones = torch.ones(2, 3, dtype=torch.float64)
still = bound_log_ratio(lambda x, t: ones, lambda x, t: 3 * ones, ones, abar, weights, lambda: (torch.tensor([1, 2]), 2 * ones))
assert still.abs().max() < 1e-9, "both are wrong by one: neither is likelier"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Two draws in place of one is the commonest fault in this loss, and nothing crashes.
#
# ### Exercise 4: The margin of a system's pair
#
# **Difficulty** 2/5 · **importance** 5/5 · **minutes** 10
#
# Write `system_margin(captions_chosen, captions_rejected, errors_chosen, errors_rejected, weight, beta)`. `captions_...` (B,) are log-ratios of the captions in nats; `errors_...` (2, B, n) are the denoising errors of the n images, policy first, reference second. Return (B,).
#
# <details><summary>Hint 1</summary>
#
# The images of a sequence are drawn one by one: what happens to their log-probabilities?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# One beta in front of everything; the weight stands before the images' errors only, with a minus.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "system-margin", "locked": false, "schema_version": 3, "solution": true, "task": false}
def system_margin(captions_chosen, captions_rejected, errors_chosen, errors_rejected, weight, beta):
    """beta x the log-ratio gap of the whole system, shape (B,)."""
    ### BEGIN SOLUTION
    rises = [(errors[0] - errors[1]).sum(1) for errors in (errors_chosen, errors_rejected)]
    return beta * (captions_chosen - captions_rejected - weight * (rises[0] - rises[1]))
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "system-margin-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_08.check_system_margin(system_margin)
### BEGIN HIDDEN TESTS
nothing, same = torch.zeros(1), torch.ones(2, 1, 3)
assert system_margin(nothing + 2, nothing, same, same, 100.0, 0.5).item() == 1.0, "images that did not move leave the captions' margin"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* This line is the whole of SysDPO-Direct for this system.
#
# ### Exercise 5: Order and preference score
#
# **Difficulty** 2/5 · **importance** 4/5 · **minutes** 15
#
# Write `sequence_scores(rows, number)`: `rows` is a list of measured levels, one 1-d tensor a sequence, already turned so that the asked direction is up, or `None` where the answer did not parse; `number` pictures were asked for. Return
# `{"order_consistency": ..., "preference_score": ...}`, means over *all* sequences.
#
# <details><summary>Hint 1</summary>
#
# What does a sequence with too few pictures count?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `torch.linspace(0, 1, n)` gives the straight line; the mean of the distances is over all n pictures.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "sequence-scores", "locked": false, "schema_version": 3, "solution": true, "task": false}
def sequence_scores(rows, number):
    """Mean order consistency and preference score of all sequences."""
    ### BEGIN SOLUTION
    orders, scores = [], []
    for row in rows:
        if row is None or len(row) != number:
            orders.append(0.0)
            scores.append(-1.0)
            continue
        line_up = row[0] + torch.linspace(0, 1, number, dtype=row.dtype) * (row[-1] - row[0])
        orders.append(float((row.diff() > 0).all()))
        scores.append(float(row[-1] - row[0] - (row - line_up).abs().mean()))
    return {"order_consistency": sum(orders) / len(rows), "preference_score": sum(scores) / len(rows)}
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "sequence-scores-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_08.check_sequence_scores(sequence_scores)
### BEGIN HIDDEN TESTS
assert sequence_scores([torch.tensor([0.0, 0.5, 1.0]), None], 3) == {"order_consistency": 0.5, "preference_score": 0.0}, "one perfect, one lost"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* A system that answers only the easy requests must not win.
#
# ## Recap
#
# - $\log p(x_0)$ of a diffusion model is out of reach; the bound is a sum of KLs, each a weighted squared error on the noise; one random timestep estimates it.
# - Policy, reference, winner and loser see the same timestep and noise. Otherwise the margin is chance.
# - E8 is a difference of two bounds, and no bound itself. Between best denoisers it becomes exact as T grows; a trained network may make its bound loose for losers instead of making them rare.
# - The constant weight sets what a change of the pictures counts in nats, and so who learns.
# - In the faces system the captions bring most of the gain, the pictures lift the ceiling, and only the two together reach it.
#
# **Limits.** A world of small drawings with a judge that is nearly exact; both models are tiny and weakened on purpose. Preferences and results come from the same judge. Two rounds and anchors are ours. Three seeds.
#
# **Next**: lesson 09 prepares the same run with Llama-3-8B and Stable Diffusion 1.5. **Further reading**: Wallace et al. 2023, "Diffusion Model Alignment Using Direct Preference Optimization"; Ho, Jain and Abbeel 2020, "Denoising Diffusion Probabilistic Models";
# Kingma et al. 2021, "Variational Diffusion Models"; Wang et al. 2025 (arXiv 2502.17721), the system of this lesson; Pang et al. 2024, "Iterative Reasoning Preference Optimization", for the anchor on a winner's log-probability.

# %% tags=["instructor"]
work.cleanup()  # the folder of the eight steps
