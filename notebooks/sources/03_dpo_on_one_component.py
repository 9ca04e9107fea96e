# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 DPO on one component
#
# **What you will do**: derive the optimum of preference training in four steps, write DPO's loss, check its gradient by finite differences, and
# train a component from sampled comparisons.
#
# **What you will learn**: what the loss is for, why a larger beta stays closer to the start, which comparisons are enough, and four slips
# that train something else without any error message.
#
# **What you need**: lesson 02 (judges, beta, the gap); derivatives. No GPU, no network. **Minutes**: 35 to read, under half a minute to run.
#
# The method is Direct Preference Optimization (Rafailov et al. 2023, "DPO"). A whole system follows in lessons 04 and 05; here it has one component.

# %%
import math

import torch
from torch.nn.functional import logsigmoid, softplus

from sysdpo_lab import CompoundSystem, alignment, exact, figures, losses, preferences, training
from sysdpo_lab.components import Categorical
from sysdpo_lab.coursework import checks
from sysdpo_lab.paths import data_folder
from sysdpo_lab.widgets import SliderFigure, slider

# %% [markdown]
# ## What we want
#
# A component gives one of three answers. Its start $p_\text{ref}$ likes them in the opposite order of the judge, whose rewards are $r = (0, 1, 2)$. We
# want more reward, and we want to stay near the start, which knows many things that the judge never looks at. Both wishes in one number:
#
# $$J(p) = \mathbb{E}_{z \sim p}\, r(z) \;-\; \beta\,\mathrm{KL}(p \,\|\, p_\text{ref}), \qquad \mathrm{KL}(p\|q) = \sum_z p(z) \log \frac{p(z)}{q(z)}.$$
#
# Beta is the price of a nat of distance.

# %%
case = exact.load_case(data_folder() / "systems" / "three_answers.json")
reward, beta = case.reward[0], case.beta
p_ref = exact.marginal(case.system, reference=True)[0]


def objective(p, reward, p_ref, beta):
    """J(p) = expected reward - beta KL(p || p_ref)."""
    return (p * reward).sum() - beta * (p * (p / p_ref).log()).sum()


greedy = torch.tensor([0.01, 0.01, 0.98], dtype=torch.float64)
for name, p in (("the start", p_ref), ("nearly always answer 2", greedy)):
    distance = exact.kl(p[None], p_ref[None]).item()
    print(f"{name:23} reward {(p * reward).sum():.2f}   KL {distance:.2f}   J {objective(p, reward, p_ref, beta):.3f}")
assert objective(greedy, reward, p_ref, beta) > objective(p_ref, reward, p_ref, beta)

# %% [markdown]
# With two answers all of $J$ fits into a picture. The start gives answer 1 with probability 0.3; its reward is 1, that of answer 0 is 0. Each curve is
# $J$ for one beta, with its top marked. The tops move towards the start (the dotted line) as beta grows.

# %%
two, better = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
grid = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
figure, (ax,) = figures.new_figure(height=3.4)
tops = []
for style, b in zip(figures.line_styles(4), (0.25, 0.5, 1.0, 2.0)):
    values = torch.stack([objective(torch.stack([1 - g, g]), better, two, b) for g in grid])
    tops.append(grid[values.argmax()].item())
    ax.plot(grid, values, color=style["color"], linestyle=style["linestyle"], linewidth=2, label=f"beta = {b}")
    ax.plot(tops[-1], values.max(), style["marker"], color=style["color"], markersize=8)
ax.axvline(0.3, color="0.4", linestyle=":")
ax.set(xlabel="p(answer 1)", ylabel="J", ylim=(-0.4, 0.85))
ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.35, 0))
figures.show(figure, alt="four hills over p(answer 1); their tops lie at 0.96, 0.76, 0.54 and 0.41 for beta 0.25, 0.5, 1 and 2; the start is at 0.3")

# %%
for b, top in zip((0.25, 0.5, 1.0, 2.0), tops):
    closed_form = 0.3 * math.exp(1 / b) / (0.7 + 0.3 * math.exp(1 / b))
    print(f"beta = {b}: top of the curve {top:.3f}, closed form {closed_form:.3f}")
    assert abs(top - closed_form) < 1e-3

# %% [markdown]
# ## The top, derived
#
# Where does the closed form come from? Four steps, each of which we check with numbers.
#
# **Step 1.** Write the reward as a logarithm, $r = \beta \log e^{r/\beta}$, and put it under the KL:
# $J(p) = -\beta \sum_z p(z) \log \dfrac{p(z)}{p_\text{ref}(z)\, e^{r(z)/\beta}}$.

# %%
generator = torch.Generator().manual_seed(0)
some = torch.softmax(2 * torch.randn(200, 3, generator=generator, dtype=torch.float64), -1)
tilted = p_ref * (reward / beta).exp()
for p in some:
    step_1 = -beta * (p * (p / tilted).log()).sum()
    assert abs(step_1 - objective(p, reward, p_ref, beta)) < 1e-12
print("step 1 holds for 200 random p; the tilted start is", [round(v, 3) for v in tilted.tolist()])

# %% [markdown]
# **Step 2.** The tilted start is no distribution: it sums to $Z = \sum_z p_\text{ref}(z)\,e^{r(z)/\beta}$. Divide by it and call the result $p^*$.

# %%
Z = tilted.sum()
best = tilted / Z
print(f"Z = {Z:.4f}, p* = {[round(v, 4) for v in best.tolist()]}")
assert torch.allclose(best, exact.tilt(p_ref[None], reward[None], beta)[0])

# %% [markdown]
# **Step 3.** Put $p_\text{ref}\, e^{r/\beta} = Z\, p^*$ into step 1. Since $p$ sums to 1, the constant comes out:
# $J(p) = \beta \log Z - \beta\, \mathrm{KL}(p \,\|\, p^*)$.

# %%
for p in some:
    step_3 = beta * Z.log() - beta * exact.kl(p[None], best[None])[0]
    assert abs(step_3 - objective(p, reward, p_ref, beta)) < 1e-12
print(f"step 3 holds for 200 random p; beta log Z = {beta * Z.log():.4f}")

# %% [markdown]
# **Step 4.** A KL is never negative, and 0 only if both are equal. So $J$ is largest at $p^*$ and nowhere else, with the value $\beta \log Z$:
#
# $$p^*(z|x) = \frac{p_\text{ref}(z|x)\, e^{r(x,z)/\beta}}{Z(x)} \qquad\text{(E4)}$$

# %%
highest = max(objective(p, reward, p_ref, beta).item() for p in some)
print(f"best of 200 random p: {highest:.4f}; J(p*) = {objective(best, reward, p_ref, beta):.4f}")
assert highest < objective(best, reward, p_ref, beta).item() and abs(objective(best, reward, p_ref, beta) - beta * Z.log()) < 1e-12

# %% [markdown]
# ## A larger beta stays closer
#
# The sentence "a larger beta keeps the optimum closer to the start" has been printed the wrong way round in two well-known courses on this method.
# Beta stands *in front of* the loss's log-ratios, where a larger number looks like a stronger push; but it is the price of distance. Do not trust a
# sentence, test it:


# %%
def distances(p_ref, reward, betas):
    """KL(optimum || start) for each beta (nats)."""
    return [exact.kl(exact.tilt(p_ref[None], reward[None], b), p_ref[None]).item() for b in betas]


def a_larger_beta_stays_closer(p_ref, reward, betas):
    """Whether KL(optimum || start) falls from each beta to the next larger one."""
    found = distances(p_ref, reward, sorted(betas))
    return all(nearer < further for further, nearer in zip(found, found[1:]))


BETAS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
assert a_larger_beta_stays_closer(p_ref, reward, BETAS)
generator = torch.Generator().manual_seed(1)
for _ in range(50):
    logits, other_reward = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    assert a_larger_beta_stays_closer(torch.softmax(logits, -1), other_reward, BETAS)
print("KL for beta", BETAS, "is", [round(d, 3) for d in distances(p_ref, reward, BETAS)])

# %% [markdown]
# It must be so: the derivative is $\frac{d}{d\beta}\mathrm{KL}(p^*\|p_\text{ref}) = -\mathrm{Var}_{p^*}(r)/\beta^3$, which is negative unless all answers are equally good.
# A finite difference agrees:

# %%
low, high = distances(p_ref, reward, (beta - 1e-4, beta + 1e-4))
variance = (best * reward**2).sum() - (best * reward).sum() ** 2
print(f"slope {(high - low) / 2e-4:.4f}   -Var / beta^3 = {-variance / beta**3:.4f}")
assert abs((high - low) / 2e-4 + variance / beta**3) < 1e-4

# %% [markdown]
# The slider moves beta. On the left the optimum's probabilities beside the start's; on the right its distance from the start, with a dot at
# the chosen beta. At beta 0.1 the distance is nearly $\log 10 = 2.303$, that of always giving answer 2, which the start gives one time in ten.


# %%
def plot_optimum(beta):
    """Left: start and optimum as bars. Right: KL(optimum || start) against beta."""
    figure, (left, right) = figures.new_figure(2, width=8.4, height=3.2)
    styles = figures.line_styles(2)
    at_beta = exact.tilt(p_ref[None], reward[None], beta)[0]
    for shift, p, label, hatch, style in ((-0.2, p_ref, "start", "//", styles[0]), (0.2, at_beta, "optimum", "", styles[1])):
        bars = left.bar([i + shift for i in range(3)], p.tolist(), 0.38, label=label, hatch=hatch, color=style["color"], edgecolor="white")
        left.bar_label(bars, fmt="%.2f", padding=2)
    left.set_xticks(range(3), [f"{i}: r = {value:.0f}" for i, value in enumerate(reward.tolist())])
    left.set(ylabel="probability", ylim=(0, 1.15), title=f"beta = {beta:.2f}")
    left.legend(frameon=False, ncols=2, loc="upper center")
    grid = torch.logspace(-1, 1, 60).tolist()
    right.plot(grid, distances(p_ref, reward, grid), color=styles[0]["color"], linewidth=2)
    here = distances(p_ref, reward, [beta])[0]
    right.plot(beta, here, "o", color="black")
    right.annotate(f"{here:.3f}", (beta, here), (8, 4), textcoords="offset points")
    right.set(xscale="log", xlabel="beta", ylabel="KL(optimum || start) (nats)")
    right.set_xticks([0.1, 0.5, 1, 2, 10], ["0.1", "0.5", "1", "2", "10"])
    right.minorticks_off()
    return figure


view = SliderFigure(
    plot_optimum,
    alt="at beta 0.5 the optimum is 0.07, 0.27, 0.66 where the start is 0.6, 0.3, 0.1; the distance is 1.06 and falls with beta from 2.3 to nearly 0",
    beta=slider(0.5, 0.1, 10.0, 0.1),
)
view

# %%
print(f"KL at beta 0.5: {distances(p_ref, reward, [0.5])[0]:.3f}; at 0.1: {distances(p_ref, reward, [0.1])[0]:.3f}")
assert abs(distances(p_ref, reward, [0.5])[0] - 1.061) < 5e-4 and abs(distances(p_ref, reward, [0.1])[0] - math.log(10)) < 0.01

# %% [markdown]
# ## From the optimum to a loss
#
# The closed form is of no use for a language model: nobody can sum over all texts for $Z$, and nobody has $r$. DPO turns it round. Solve E4 for the
# reward: $r(z) = \beta \log \frac{p^*(z)}{p_\text{ref}(z)} + \beta \log Z$. In a *difference* of two rewards for the same input $Z$ cancels:
#
# $$L_{12} = r(z_1) - r(z_2) = \underbrace{\beta \Big[\log \frac{p^*(z_1)}{p_\text{ref}(z_1)} - \log \frac{p^*(z_2)}{p_\text{ref}(z_2)}\Big]}_{\text{the margin}}.$$

# %%
log_ratio = (best / p_ref).log()
margins = beta * (log_ratio[:, None] - log_ratio[None, :])
print("margins of the optimum:", [[round(v, 4) + 0.0 for v in row] for row in margins.tolist()])
assert torch.allclose(margins, reward[:, None] - reward[None, :])

# %% [markdown]
# So a system *is* a reward, up to a constant: its log-ratio to the start, times beta. Fit it as one fits any judge of this kind: make the observed
# choices likely. A reader who chose $w$ over $l$ does so with probability $\sigma(\text{margin})$ if the system's reward is theirs. Minus the log of that is DPO's loss (E5):
#
# $$\text{loss} = -\log \sigma\Big(\beta \Big[\log \frac{p(w)}{p_\text{ref}(w)} - \log \frac{p(l)}{p_\text{ref}(l)}\Big]\Big), \quad \text{mean over pairs}.$$
#
# At the start $p = p_\text{ref}$: every margin is 0, every loss is $\log 2$, whatever the data. The library's function takes whole traces, because a system may have more components:

# %%
x, winners, losers = torch.zeros(3, dtype=torch.long), torch.tensor([2, 1, 2]), torch.tensor([0, 0, 1])
at_start = losses.direct_loss(case.system, {"x": x, "z": winners}, {"x": x, "z": losers}, beta=beta)
print(f"loss at the start {at_start.loss:.4f}, log 2 = {math.log(2):.4f}, margins {at_start.margin.tolist()}")
assert abs(at_start.loss.item() - math.log(2)) < 1e-12

# %%
with torch.no_grad():
    case.system["z"].logits[0] = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
moved = losses.direct_loss(case.system, {"x": x, "z": winners}, {"x": x, "z": losers}, beta=beta)
by_hand = beta * (math.log(0.5 / 0.1) - math.log(0.2 / 0.6))
print(f"margin of the first pair {moved.margin[0]:.4f}; by hand {by_hand:.4f}")
assert abs(moved.margin[0].item() - by_hand) < 1e-12
assert abs(moved.loss.item() - (-logsigmoid(moved.margin)).mean().item()) < 1e-12

# %% [markdown]
# ## What one pair wants
#
# The judge is noisy: of a hundred comparisons of the same two answers, eighty go one way. The expected loss of the pair, against its margin, is a bowl. Its
# bottom lies where the margin equals the judge's logit, here $\log 4$, and its height there is the entropy of the judge's choice, which no system can
# remove. The slope at 0 is $-(\text{pref} - \tfrac12)$. Move the slider: a judge who never errs (pref = 1) has no bottom at all, and the margin runs away.


# %%
def plot_pair_loss(pref):
    """Expected loss of a pair against its margin, with the bottom of the bowl."""
    grid = torch.linspace(-3, 6, 181, dtype=torch.float64)
    values = exact.expected_loss(grid, torch.tensor(pref, dtype=torch.float64))
    figure, (ax,) = figures.new_figure(height=3.2)
    ax.plot(grid, values, color=figures.line_styles(1)[0]["color"], linewidth=2)
    ax.plot(0, math.log(2), "s", color="0.4", label="start: log 2")
    if pref < 1:
        bottom = math.log(pref / (1 - pref))
        height = -pref * math.log(pref) - (1 - pref) * math.log(1 - pref)
        ax.plot(bottom, height, "o", color="black", markersize=8, label=f"bottom: margin {bottom:.3f}, loss {height:.3f}")
    ax.set(xlabel="margin", ylabel="expected loss (nats)", ylim=(0, 3.2))
    ax.legend(frameon=False, loc="upper center")
    return figure


view = SliderFigure(
    plot_pair_loss,
    alt="a bowl: the expected loss falls from 0.693 at margin 0 to 0.500 at margin 1.386 and rises again to the right",
    pref=slider(0.8, 0.5, 1.0, 0.05),
)
view

# %%
margin = torch.tensor(math.log(4), dtype=torch.float64, requires_grad=True)
loss = exact.expected_loss(margin, torch.tensor(0.8, dtype=torch.float64))
loss.backward()
print(f"loss at margin log 4: {loss.item():.4f}, slope {abs(margin.grad.item()):.4f}")
assert abs(loss.item() - 0.5004) < 1e-4 and abs(margin.grad.item()) < 1e-12
at_zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
(slope,) = torch.autograd.grad(exact.expected_loss(at_zero, torch.tensor(0.8, dtype=torch.float64)), at_zero)
assert abs(slope.item() + (0.8 - 0.5)) < 1e-12

# %% [markdown]
# Each pair pulls its own margin to its own logit. If the judge has rewards, all these wishes can be granted at once, by $p^*$. That is why DPO's loss and $J$
# have the same optimum. (If the judge has circles they cannot: lesson 02.)
#
# ## The gradient, three ways
#
# For a table the gradient is short. With $m$ the margin, and $e_w$ the vector with a 1 at the winner:
#
# $$\frac{\partial\,\text{loss}}{\partial\,\text{logits}} = -\beta\, \sigma(-m)\, (e_w - e_l).$$
#
# The winner's logit goes up, the loser's down by as much, and others stay. The factor $\sigma(-m)$ is the probability that the system would have chosen wrongly:
# pairs that are already right count less. We compare the formula with automatic differentiation and with finite differences.


# %%
def pair_loss(logits, winner, loser):
    """DPO's loss of one comparison as a function of the table's logits."""
    log_ratio = torch.log_softmax(logits, -1) - p_ref.log()
    return -logsigmoid(beta * (log_ratio[winner] - log_ratio[loser]))


logits = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log().requires_grad_(True)
pair_loss(logits, 2, 0).backward()
weight = 1 / (1 + math.exp(by_hand))  # sigmoid(-margin)
by_formula = -beta * weight * torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
steps = 1e-6 * torch.eye(3, dtype=torch.float64)
with torch.no_grad():
    by_differences = torch.stack([(pair_loss(logits + s, 2, 0) - pair_loss(logits - s, 2, 0)) / 2e-6 for s in steps])
for name, gradient in (("autograd", logits.grad), ("formula", by_formula), ("differences", by_differences)):
    print(f"{name:12}", [f"{value + 0.0:.5f}" for value in gradient.round(decimals=8).tolist()])
assert torch.allclose(logits.grad, by_formula, atol=1e-12) and torch.allclose(by_differences, by_formula, atol=1e-8)

# %% [markdown]
# ## Down to the optimum
#
# Now the loss in expectation over all comparisons, and Adam on the logits, from the start:

# %% tags=["nbval-ignore-output"]
system = exact.load_case(data_folder() / "systems" / "three_answers.json").system
judge = case.preference_logits
history = exact.train(system, exact.direct(system, judge, beta), steps=500, lr=0.1)
trained = exact.marginal(system).detach()
adjusted = alignment.gap(trained, judge, beta, p_reference=p_ref[None])
print("trained:", [round(v, 4) for v in trained[0].tolist()], "  p*:", [round(v, 4) for v in best.tolist()])
print(f"reference-adjusted gap {adjusted:.4f}")
assert abs(history[0] - math.log(2)) < 1e-12 and adjusted < 1e-3

# %% [markdown]
# ## Which comparisons are enough?
#
# Four answers have six pairs. Must a judge see all of them? No: if $L_{01}$, $L_{12}$ and $L_{23}$ are right, the others are sums of these. The comparisons need
# only *connect* all answers. If they fall into islands, nothing says how the islands compare:

# %% tags=["nbval-ignore-output"]
FOUR = torch.tensor([[0.2, 0.8, 1.4, 1.88]], dtype=torch.float64)  # rewards
four_judge = FOUR[:, :, None] - FOUR[:, None, :]


def gap_after_training(compared, steps=500):
    """Gap of a uniform start trained on these pairs only."""
    law = torch.zeros(1, 4, 4, dtype=torch.float64)
    for i, j in compared:
        law[0, i, j] = 1.0
    system = CompoundSystem([Categorical("z", {"x": 1}, 4)])
    exact.train(system, exact.direct(system, four_judge, 0.5, law), steps, lr=0.1)
    return alignment.gap(exact.marginal(system).detach(), four_judge, 0.5)


path, islands = gap_after_training([(0, 1), (1, 2), (2, 3)]), gap_after_training([(0, 1), (2, 3)])
print(f"path 0-1-2-3: gap {path:.4f}   islands 0-1 and 2-3: gap {islands:.4f}")
assert path < 7e-10 and round(islands, 2) == 1.14

# %% [markdown]
# Inside each island all is well; the 1.14 is the difference of the islands' mean rewards, which training never saw: it leaves the islands as they
# stood to each other at the start. Comparisons across topics are worth more than their number says.

# %%
print(f"mean rewards {FOUR[0, :2].mean():.2f} and {FOUR[0, 2:].mean():.2f}")
assert abs(islands - (FOUR[0, 2:].mean() - FOUR[0, :2].mean()).item()) < 1e-6

# %% [markdown]
# ## Slip 1: mean instead of sum
#
# A text's log-probability is the **sum** of its tokens'. Some code takes the mean, "so that long answers are not punished". The loss then has another
# optimum: the log-ratio of each answer becomes its length times what it should be (up to a constant inside the bracket). Four answers of 1, 2, 4 and 8
# tokens; the second and the last are equally good:

# %% tags=["nbval-ignore-output"]
lengths = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
even = torch.tensor([0.0, 0.5, 1.0, 0.5], dtype=torch.float64)
first, second = torch.triu_indices(4, 4, offset=1)


def train_with(divisor):
    """p(z) after training on log-ratios divided by `divisor`, from a uniform start, beta 0.5."""
    system = CompoundSystem([Categorical("z", {"x": 1}, 4)])

    def loss():
        ratio = (exact.marginal(system)[0].log() - math.log(0.25)) / divisor
        return exact.population_loss(0.5 * (ratio[first] - ratio[second]), even[first] - even[second])

    exact.train(system, loss, steps=600, lr=0.1)
    return exact.marginal(system).detach()[0]


by_sum, by_mean = train_with(1.0), train_with(lengths)
print("sum: ", [round(v, 3) for v in by_sum.tolist()])
print("mean:", [round(v, 3) for v in by_mean.tolist()])
assert abs(by_sum[1] - by_sum[3]) < 1e-4 and by_mean[1] > 20 * by_mean[3]

# %% [markdown]
# With the sum, equally good answers get equal probability. With the mean the good 4-token answer takes nearly everything, and of the two equally
# good ones the long one all but vanishes. Check the claim about the bracket: (log-ratio / length) minus $r/\beta$ is the same for all four.

# %% tags=["nbval-ignore-output"]
constant = (by_mean.log() - math.log(0.25)) / lengths - even / 0.5
print("constant:", [round(v, 2) for v in constant.tolist()])
assert constant.max() - constant.min() < 0.01

# %% [markdown]
# Length-normalised losses exist and have their uses; but they are other losses, with another optimum. Here log-probabilities are always sums, in nats.
#
# ## Slip 2: the log sigmoid of a mean
#
# The loss of a batch is the mean of the pairs' losses. Averaging the margins first looks harmless and is not: $-\log \sigma$ is a bowed line, so the loss of the mean
# is smaller than the mean of the losses (Jensen's inequality), and its gradient gives all pairs the same weight. A batch of a hopeless pair and a finished one:

# %%
batch = torch.tensor([-3.0, 3.0], dtype=torch.float64, requires_grad=True)
right = losses.dpo_loss(batch)
wrong = -logsigmoid(batch.mean())
for name, value in (("mean of the losses", right), ("loss of the mean", wrong)):
    (gradient,) = torch.autograd.grad(value, batch)
    print(f"{name:19} {value.item():.4f}   gradient on the two margins {[round(v, 3) for v in gradient.tolist()]}")
(gradient,) = torch.autograd.grad(losses.dpo_loss(batch), batch)
assert [round(-v, 3) for v in gradient.tolist()] == [0.476, 0.024]
assert abs(wrong.item() - math.log(2)) < 1e-12 and round(right.item(), 3) == 1.549

# %% [markdown]
# The right loss sees that the first pair is wrong and works on it alone (0.476 against 0.024). The other one reports $\log 2$, as if nothing had been learned, and
# pushes both alike. The picture shows the two pairs on the curve; the dashed chord's middle is the right loss.

# %%
figure, (ax,) = figures.new_figure(height=3.0)
grid = torch.linspace(-4, 4, 100, dtype=torch.float64)
styles = figures.line_styles(2)
ax.plot(grid, -logsigmoid(grid), color=styles[0]["color"], linewidth=2, label="-log sigmoid(margin)")
ax.plot([-3, 3], -logsigmoid(batch.detach()), "o--", color=styles[1]["color"], linewidth=2, label="the two pairs")
ax.plot(0, right.item(), "s", color="black", label=f"mean of the losses {right.item():.3f}")
ax.plot(0, wrong.item(), "^", color="0.4", label=f"loss of the mean {wrong.item():.3f}")
ax.set(xlabel="margin", ylabel="loss (nats)")
ax.legend(frameon=False)
figures.show(figure, alt="a falling bowed curve; the chord from margin -3 to 3 passes 1.549 at 0, the curve itself only 0.693")

# %% [markdown]
# ## Slip 3: a reference that is off
#
# Add a constant $c$ to the reference's log-probability of **both** answers (a missing normalisation, say): it cancels, as $Z$ did. Add it to the **winner only** (an
# end-of-text token counted on one side, a reference in another precision): each margin moves by $-\beta c$, and $c$ changes sides with each comparison, since each
# answer wins sometimes. What is the best margin then, for a judge with pref = 0.8?


# %%
def best_margin(shift, pref=0.8):
    """Margin (before the shift) with the smallest expected loss when every winner's margin is computed too low by `shift`."""
    grid = torch.linspace(-2, 8, 100001, dtype=torch.float64)
    expected = pref * softplus(-(grid - shift)) + (1 - pref) * softplus(grid + shift)
    return grid[expected.argmin()].item()


print(f"the judge's logit: {math.log(4):.3f}")
for shift in (-2.0, -1.0, 0.0, 1.0, 2.0):
    print(f"beta c = {shift:4}: best margin {best_margin(shift):.3f}, loss at the start {softplus(torch.tensor(shift)).item():.3f}")
found = [best_margin(shift) for shift in (-8.0, -2.0, 0.0, 2.0)]
assert found == sorted(found) and abs(found[0] - math.log(4) / 2) < 1e-2 and abs(found[2] - math.log(4)) < 1e-3 and found[3] > 2 * math.log(4)

# %% [markdown]
# A reference that is too high on winners makes training overshoot, too low makes it stop half-way (the limit is half the logit). Nothing crashes and the
# loss goes down. But the loss at the start is not $\log 2$: look at it before you look at anything else.
#
# **Slip 4** is beta the wrong way round, which you met above.
#
# ## Train from samples
#
# Real data are finite: $N$ comparisons, each judged once. We draw two answers from the start, let the judge choose, and hand the pairs to the course's
# training loop, the same that trains language models. A one-component system's trace is its input and its answer.


# %%
def sampled_pairs(number, generator):
    """`number` comparisons of two different answers drawn from the start, as whole traces."""
    one, other = torch.multinomial(p_ref, 8 * number, replacement=True, generator=generator).reshape(2, -1)
    keep = (one != other).nonzero()[:number, 0]
    one, other = one[keep], other[keep]
    prefers_one = torch.rand(number, generator=generator) < torch.sigmoid(reward[one] - reward[other])
    chosen, rejected = torch.where(prefers_one, one, other), torch.where(prefers_one, other, one)
    x = torch.zeros(number, dtype=torch.long)
    return preferences.Pairs.from_traces({"x": x, "z": chosen}, {"x": x, "z": rejected})


def adjusted_gap(system):
    """Reference-adjusted gap of a system as it stands."""
    return {"gap": alignment.gap(exact.marginal(system).detach(), judge, beta, p_reference=p_ref[None])}


pairs = sampled_pairs(1000, torch.Generator().manual_seed(0))
print(pairs, "- the first:", pairs[0].chosen, "preferred to", pairs[0].rejected)

# %% tags=["nbval-ignore-output"]
runs = {}
for number in (100, 1000, 10000):
    learner = exact.load_case(data_folder() / "systems" / "three_answers.json").system
    runs[number] = training.train(
        learner,
        sampled_pairs(number, torch.Generator().manual_seed(0)),
        training.direct(beta),
        steps=200,
        lr=0.05,
        batch_size=min(number, 250),
        schedule="cosine",
        clip=None,
        generator=torch.Generator().manual_seed(1),
        evaluate=adjusted_gap,
        evaluate_every=10,
    )
    print(f"{number:6} pairs: gap after training {runs[number][-1]['evaluation']['gap']:.3f}")

# %%
last = {number: run[-1]["evaluation"]["gap"] for number, run in runs.items()}
assert all(abs(run[0]["loss"] - math.log(2)) < 1e-9 for run in runs.values())
assert last[10000] < 0.2 and last[1000] < 0.5 and last[100] > 2 * last[10000]

# %% [markdown]
# The gap against steps, on a logarithmic scale, beside the loss in expectation (which is what infinitely many comparisons would give). At first all fall
# alike. Then each run settles where *its sample* has its optimum: more steps do not help, more comparisons do. (With these 100 pairs the gap passes
# its lowest point early and then grows again: the sample's noise is being learned.)

# %% tags=["nbval-ignore-output"]
exact_run = []
learner = exact.load_case(data_folder() / "systems" / "three_answers.json").system
exact.train(learner, exact.direct(learner, judge, beta), 200, lr=0.05, watch=lambda step: exact_run.append(adjusted_gap(learner)["gap"]))

figure, (ax,) = figures.new_figure(height=3.4)
styles = figures.line_styles(4)
for style, (number, run) in zip(styles, runs.items()):
    points = [(record["step"], record["evaluation"]["gap"]) for record in run if "evaluation" in record]
    ax.plot(*zip(*points), label=f"{number} pairs", markevery=3, **style)
ax.plot(exact_run, label="in expectation", markevery=20, **styles[3])
ax.set(yscale="log", xlabel="step", ylabel="reference-adjusted gap (nats)")
ax.legend(frameon=False)
figures.show(figure, alt="four falling lines: those of 100, 1000 and 10000 pairs settle one below the other, the one in expectation keeps falling")

# %% [markdown]
# ## Beta and the time it takes
#
# A smaller beta asks for a larger change: log-ratios of $r/\beta$. Adam moves a logit by about its learning rate a step, so the number of steps grows
# like (range of $r$) / (beta x lr), with a floor of some 130 steps that we put down to Adam's momentum. Steps until the gap stays below 0.001:


# %% tags=["nbval-ignore-output"]
def steps_needed(beta, lr=0.1, limit=1200):
    """Adam steps from a uniform start until the gap stays below 0.001."""
    system, seen = CompoundSystem([Categorical("z", {"x": 1}, 4)]), []
    loss = exact.direct(system, four_judge, beta)
    exact.train(system, loss, limit, lr, watch=lambda step: seen.append(alignment.gap(exact.marginal(system).detach(), four_judge, beta)))
    return 1 + max(step for step, gap in enumerate(seen) if gap >= 1e-3)


needed = {beta: steps_needed(beta, limit=500) for beta in (2.0, 0.5, 0.1)}
slow = steps_needed(0.1, lr=0.03)
span = (FOUR.max() - FOUR.min()).item()
for b, number in needed.items():
    print(f"beta = {b:3}, lr 0.1:  {number:4} steps   range / (beta lr) = {span / b / 0.1:.0f}")
print(f"beta = 0.1, lr 0.03: {slow:4} steps   range / (beta lr) = {span / 0.1 / 0.03:.0f}")
assert 130 <= needed[2.0] <= 160 and 130 <= needed[0.5] <= 160 and 160 < needed[0.1] <= 630 and slow > 2 * needed[0.1]

# %% [markdown]
# Comparing two betas after the same number of steps can therefore be unfair: the smaller one may simply not be there yet. And of a run that is stopped
# early one cannot say that beta held it near the start; the clock did.
#
# ## Exercises
#
# ### Exercise 1: The optimum
#
# **Difficulty** 1/5 · **importance** 5/5 · **minutes** 5
#
# Write `optimum(p_ref, reward, beta)`: E4 for a batch of inputs. `p_ref` and `reward` have shape (X, Z); return probabilities of the same shape.
#
# <details><summary>Hint 1</summary>
#
# Two factors, then a normalisation. Over which axis?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A softmax of a sum of two terms does it in one line, and cannot overflow at small beta.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "optimum", "locked": false, "schema_version": 3, "solution": true, "task": false}
def optimum(p_ref, reward, beta):
    """p*(z|x), shape (X, Z)."""
    ### BEGIN SOLUTION
    return torch.softmax(p_ref.log() + reward / beta, -1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "optimum-test", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.lesson_03.check_optimum(optimum)
### BEGIN HIDDEN TESTS
assert (optimum(p_ref[None], reward[None], 1e6)[0] - p_ref).abs().max() < 1e-4, "a huge beta stays at the start"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* It is the yardstick for every training run of the following lessons.
#
# ### Exercise 2: What a system thinks of two answers
#
# **Difficulty** 2/5 · **importance** 5/5 · **minutes** 10
#
# Write `implied_preference(p, p_ref, beta)`: the probability with which a judge whose reward is this system's would prefer `i` to `j`. `p` and
# `p_ref` have shape (X, Z); return shape (X, Z, Z).
#
# <details><summary>Hint 1</summary>
#
# The system's reward, up to a constant that cancels, is beta times something.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Log-ratios to the start, differences of all pairs, beta, sigmoid.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "implied-preference", "locked": false, "schema_version": 3, "solution": true, "task": false}
def implied_preference(p, p_ref, beta):
    """[x, i, j] = probability that i is preferred to j, shape (X, Z, Z)."""
    ### BEGIN SOLUTION
    log_ratio = (p / p_ref).log()
    return torch.sigmoid(beta * (log_ratio[:, :, None] - log_ratio[:, None, :]))
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "implied-preference-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_03.check_implied_preference(implied_preference)
### BEGIN HIDDEN TESTS
assert (implied_preference(p_ref[None], p_ref[None], 0.5) - 0.5).abs().max() < 1e-9, "the start itself has no preference"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* "Your language model is secretly a reward model" is this function.
#
# ### Exercise 3: The price of distance
#
# **Difficulty** 2/5 · **importance** 4/5 · **minutes** 10
#
# Write `regularised_reward(p, p_ref, reward, beta)`: $J(p)$ of each input. All have shape (X, Z); return shape (X,).
#
# <details><summary>Hint 1</summary>
#
# Both terms are sums over answers, weighted by `p`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# KL of *what* from *what*? The system's answers are drawn from `p`, so `p` weighs, and stands on top.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "regularised-reward", "locked": false, "schema_version": 3, "solution": true, "task": false}
def regularised_reward(p, p_ref, reward, beta):
    """J(p) = E_p r - beta KL(p || p_ref) of each input, shape (X,)."""
    ### BEGIN SOLUTION
    return (p * (reward - beta * (p / p_ref).log())).sum(-1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "regularised-reward-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_03.check_regularised_reward(regularised_reward)
### BEGIN HIDDEN TESTS
assert abs(regularised_reward(best[None], p_ref[None], reward[None], beta)[0] - beta * Z.log()) < 1e-9, "J(p*) = beta log Z"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Two trained systems are compared fairly by $J$: more reward alone can always be bought with distance.
#
# ### Exercise 4: The margins of texts
#
# **Difficulty** 3/5 · **importance** 5/5 · **minutes** 10
#
# Texts come as log-probabilities of their tokens. Write `text_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta)`: each of
# the first four is a list with one tensor a text, of different lengths. Return the margins, shape (B,).
#
# <details><summary>Hint 1</summary>
#
# First one number for each text; then it is the formula of this lesson.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The probability of a text is the product of its tokens' probabilities. What becomes of a product under a log?
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "text-margin", "locked": false, "schema_version": 3, "solution": true, "task": false}
def text_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta):
    """beta x log-ratio gap of each pair of texts, shape (B,)."""
    ### BEGIN SOLUTION
    pc, pr, rc, rr = (
        torch.stack([text.sum() for text in texts])
        for texts in (policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    )
    return beta * ((pc - rc) - (pr - rr))
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "text-margin-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_03.check_text_margin(text_margin)
### BEGIN HIDDEN TESTS
short, long = [torch.tensor([-1.0])], [torch.tensor([-1.0, -1.0, -1.0])]
assert abs(text_margin(long, short, short, short, 1.0).item() + 2) < 1e-6, "a sum over tokens, not a mean"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Mean instead of sum is the commonest silent change of the method.
#
# ### Exercise 5: The gradient of one comparison
#
# **Difficulty** 4/5 · **importance** 4/5 · **minutes** 15
#
# Write `pair_gradient(logits, reference_logits, winner, loser, beta)`: the gradient of DPO's loss of one comparison with respect to `logits` (Z,), by the
# formula. `reference_logits` has shape (Z,) too; `winner` and `loser` are indices. Do not change the inputs.
#
# <details><summary>Hint 1</summary>
#
# The chain rule: derivative of $-\log\sigma(m)$ at $m$, times beta, times how the log-ratio gap depends on the logits. The softmax's normaliser cancels.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# $\frac{d}{dm}(-\log \sigma(m)) = -\sigma(-m)$. The gap contains the winner's logit once and the loser's once.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "pair-gradient", "locked": false, "schema_version": 3, "solution": true, "task": false}
def pair_gradient(logits, reference_logits, winner, loser, beta):
    """d loss / d logits for one comparison, shape (Z,)."""
    ### BEGIN SOLUTION
    change = logits - reference_logits
    margin = beta * (change[winner] - change[loser])
    gradient = torch.zeros_like(logits)
    gradient[winner] = -beta * torch.sigmoid(-margin)
    gradient[loser] = beta * torch.sigmoid(-margin)
    return gradient
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "pair-gradient-test", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.lesson_03.check_pair_gradient(pair_gradient)
### BEGIN HIDDEN TESTS
assert abs(pair_gradient(torch.zeros(3), torch.zeros(3), 0, 1, 0.5)[0] + 0.25) < 1e-6, "at the start sigmoid(0) = 1/2"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* In lesson 05 the same $\sigma(-m)$ stands in front of a difference of two averages over drafts, and sometimes they cancel.
#
# ## Recap
#
# - $J$ trades reward for distance at the price beta; its top is the tilted start $p^* \propto p_\text{ref}\, e^{r/\beta}$. A larger beta stays closer.
# - DPO reads the reward off the system: beta times the log-ratio to the start. $Z$ cancels in pairs; the loss starts at $\log 2$; each pair pulls its
#   margin to the judge's logit.
# - Comparisons must connect all answers; they need not cover all pairs.
# - Sums over tokens, the mean after the log sigmoid, the same reference on both sides, beta the right way round: four slips that no error message shows.
# - Few comparisons limit the result, few steps limit it differently; small betas need more of both.
#
# **Limits.** One table has a free number for each answer, so it can reach $p^*$; a neural network may not, and its answers share parameters. Rewards of the
# kind of Bradley and Terry are assumed for the judge. The rule for steps is our reading of runs, not a theorem.
#
# **Next**: lesson 04 trains a whole system on traces. **Further reading**: Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is
# Secretly a Reward Model"; Korbak, Perez and Buckley 2022, "RL with KL penalties is better viewed as Bayesian inference" (step 3);
# Bradley and Terry 1952, "Rank analysis of incomplete block designs".
