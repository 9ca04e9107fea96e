# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 Beta-perfect alignment
#
# **What you will do**: measure how far a system is from answering as a judge would have it, read the judge's beta off a system's
# answers, and meet a judge whom no system can satisfy.
#
# **What you will learn**: what beta means, why the optimum of training is not always the system that agrees best with the judge,
# and how to tell a badly trained system from an impossible wish.
#
# **What you need**: lessons 00 and 01; logarithms. No GPU, no network. **Minutes**: 30 to read, under half a minute to run.
#
# Definition 1 is that of SysDPO (Wang, Zhang, Ding, Tsai, Wu and Koyejo, arXiv 2502.17721, "the paper" below). Statements about what
# it implies on tables are worked out in this course and checked here by computing everything.

# %%
import math

import torch

from sysdpo_lab import CompoundSystem, alignment, exact, figures
from sysdpo_lab.components import Categorical
from sysdpo_lab.coursework import checks
from sysdpo_lab.paths import data_folder
from sysdpo_lab.widgets import SliderFigure, slider

# %% [markdown]
# ## A judge and a system
#
# A **judge** looks at two answers to the same question and prefers one. Judges are noisy: the first of two answers wins with a
# probability $\text{pref}(z_1 \succ z_2 \mid x)$. A **system** never compares anything. It has a probability for each answer, $p(z \mid x)$.
#
# When do the two agree? Take two answers. Eight times out of ten the judge prefers the first, and the system gives it with
# probability 0.7.

# %%
pref = 0.8
p = torch.tensor([0.7, 0.3], dtype=torch.float64)
judge_logit = math.log(pref / (1 - pref))
system_log_odds = (p[0] / p[1]).log().item()
print(f"the judge's logit:     log 0.8/0.2 = {judge_logit:.4f}")
print(f"the system's log-odds: log 0.7/0.3 = {system_log_odds:.4f}")

# %% [markdown]
# Both numbers say by how much the first answer is ahead, on the same scale (nats). They need not be equal: a judge may be
# more or less decided than a system that shares their taste. Beta is the exchange rate.
#
# **Definition (E3).** A system is *beta-perfectly aligned* with a judge if for every input and every two answers
#
# $$\text{pref}(z_1 \succ z_2 \mid x) = \frac{p(z_1|x)^\beta}{p(z_1|x)^\beta + p(z_2|x)^\beta}
# \qquad\Longleftrightarrow\qquad \underbrace{\text{logit pref}}_{L_{12}} = \beta\,\log\frac{p(z_1|x)}{p(z_2|x)}.$$
#
# Both forms say the same, because $\sigma(\beta \log a/b) = a^\beta / (a^\beta + b^\beta)$:

# %%
for beta, expected in ((0.5, 0.60), (1.0, 0.70), (2.0, 0.84)):
    powers = p**beta
    left, right = powers[0] / powers.sum(), torch.sigmoid(torch.tensor(beta * system_log_odds, dtype=torch.float64))
    print(f"beta = {beta}: {left:.4f} = {right:.4f}")
    assert abs(left - right) < 1e-12 and round(left.item(), 2) == expected

# %% [markdown]
# At beta 0.5, 1 and 2 our system expects a judge who prefers the first answer with probability 0.60, 0.70 and 0.84. The real one
# says 0.80, so none of these betas fits. With only two answers some beta always fits, if both favour the same one:

# %%
fitting = judge_logit / system_log_odds
print(f"beta = {judge_logit:.4f} / {system_log_odds:.4f} = {fitting:.4f}")
assert abs((p**fitting / (p**fitting).sum())[0].item() - pref) < 1e-12

# %% [markdown]
# From three answers on, one beta must do for all pairs at once, and that is a real demand.
#
# ## What beta does to the odds
#
# Solve the definition for the system: $p(z_1)/p(z_2) = e^{L/\beta} = (\text{pref}/(1-\text{pref}))^{1/\beta}$. At pref = 0.8 the judge's odds are 4 to 1.
# The system's are $4^{1/\beta}$:

# %%
for beta, expected in ((0.1, 1048576), (0.5, 16), (1.0, 4), (2.0, 2), (10.0, 1.149)):
    odds = (0.8 / 0.2) ** (1 / beta)
    print(f"beta = {beta:4}: {odds:12,.3f} to 1")
    assert abs(odds - expected) < 1e-3 * expected

# %% [markdown]
# The figure shows the odds for judges from undecided (0.5) to nearly certain (0.99), against beta; both axes are logarithmic. All
# lines fall: a small beta blows a slight preference up into near certainty, a large one flattens even a strong one. The slider moves
# the thick line. At pref = 0.5 the odds are 1 whatever beta is.


# %%
def plot_odds(pref):
    """p(z1)/p(z2) against beta: a thin line for each of five judges, a thick one for the chosen judge."""
    betas = torch.logspace(-1, 1, 41)
    figure, (ax,) = figures.new_figure(height=3.6)
    for other in (0.5, 0.6, 0.7, 0.9, 0.99):
        ax.plot(betas, (other / (1 - other)) ** (1 / betas), color="0.6", linewidth=1)
        left = max(0.1, math.log(other / (1 - other)) / math.log(10**7))  # where the line enters the frame
        ax.annotate(f"{other}", (left, (other / (1 - other)) ** (1 / left)), (-4, -4), textcoords="offset points", ha="right")
    style = figures.line_styles(1)[0] | {"marker": None, "linewidth": 3}
    ax.plot(betas, (pref / (1 - pref)) ** (1 / betas), label=f"pref = {pref:.2f}", **style)
    for beta in (0.5, 1.0, 2.0):
        odds = (pref / (1 - pref)) ** (1 / beta)
        ax.plot(beta, odds, "o", color="black")
        ax.annotate(f"{odds:.3g}", (beta, odds), (7, 5), textcoords="offset points")
    ax.set(xscale="log", yscale="log", xlabel="beta", ylabel="odds p(z1) : p(z2)", ylim=(0.5, 10**7), xlim=(0.075, 10))
    ax.set_xticks([0.1, 0.5, 1, 2, 10], ["0.1", "0.5", "1", "2", "10"])
    ax.minorticks_off()
    ax.legend(frameon=False, loc="upper right")
    return figure


view = SliderFigure(
    plot_odds,
    alt="odds against beta, falling lines; at pref = 0.8 the thick line passes 16 at beta 0.5, 4 at beta 1 and 2 at beta 2",
    pref=slider(0.8, 0.5, 0.99, 0.01),
)
view

# %% [markdown]
# ## Two readings of the same beta
#
# The definition ties three things together: the judge, the system, and beta. Hold one of the first two and turn beta:
#
# - **The system is given.** Think of a chooser who values an answer at $\log p(z|x)$ and picks the better of two with rationality beta
#   (a *Boltzmann-rational* chooser). A larger beta is a **sharper judge**.
# - **The judge is given.** Then a larger beta is a **flatter system**.
#
# The two panels show them. Mixing them up is the commonest confusion about beta; ask what is held fixed.

# %%
betas = torch.linspace(0.05, 5, 100, dtype=torch.float64)
sharper_judge = torch.sigmoid(betas * math.log(4))
flatter_system = torch.sigmoid(math.log(4) / betas)
assert (sharper_judge.diff() > 0).all() and (flatter_system.diff() < 0).all()

figure, axes = figures.new_figure(2, width=8.0, height=3.0)
for ax, values, fixed, ylabel in (
    (axes[0], sharper_judge, "system given: 4 to 1", "the judge's pref(z1 over z2)"),
    (axes[1], flatter_system, "judge given: pref 0.8", "the system's p(z1)"),
):
    ax.plot(betas, values, color=figures.line_styles(1)[0]["color"], linewidth=2)
    ax.plot(1, 0.8, "o", color="black")
    ax.set(xlabel="beta", ylabel=ylabel, ylim=(0.45, 1.02), title=fixed)
figures.show(figure, alt="left: the judge's preference rises with beta from 0.5 to 1; right: the system's probability falls from 1 towards 0.5")

# %% [markdown]
# ## The gap
#
# For more than two answers we measure the worst disagreement, in nats: $\text{gap} = \max_{x, z_1, z_2} |L_{12} - \beta \log p(z_1|x)/p(z_2|x)|$. It
# is 0 exactly if the system is beta-perfect.
#
# The example of this lesson has three answers, a judge with rewards $r = (0, 1, 2)$, so that $L_{12} = r_1 - r_2$ (Bradley and Terry's model, E2),
# beta 0.5, and a start that likes the answers in the opposite order.

# %%
case = exact.load_case(data_folder() / "systems" / "three_answers.json")
judge, beta = case.preference_logits, case.beta
start = exact.marginal(case.system, reference=True)
print("the judge's logits:", judge[0].tolist())
print("the start:", [round(v, 2) for v in start[0].tolist()])
print(f"gap of the start: {alignment.gap(start, judge, beta):.4f}")

# %% [markdown]
# By hand: the largest disagreement is about answers 0 and 2. The judge says -2, the start says $0.5 \log 6$.

# %%
by_hand = abs((0 - 2) - beta * math.log(0.6 / 0.1))
print(f"|-2 - 0.5 log 6| = {by_hand:.4f}")
assert abs(alignment.gap(start, judge, beta) - by_hand) < 1e-12

# %% [markdown]
# Which system has gap 0? With $L_{12} = r_1 - r_2$ the definition says $\log p(z) = r(z)/\beta + \text{constant}$, that is, a softmax:

# %%
perfect = torch.softmax(case.reward / beta, -1)
print("beta-perfect:", [round(v, 4) for v in perfect[0].tolist()])
print(f"gap: {alignment.gap(perfect, judge, beta):.4f}")
assert alignment.gap(perfect, judge, beta) < 1e-12

# %% [markdown]
# A gap in logits weighs all disagreements alike, also those between 0.999 and 0.9999. `probability_gap` measures the same thing in
# probabilities: the start expects the judge to prefer answer 0 to answer 2 with probability 0.71, while it happens with probability 0.12.

# %%
expected, happens = torch.sigmoid(torch.tensor([beta * math.log(6.0), -2.0])).tolist()
print(f"{expected:.2f} - {happens:.2f} = {alignment.probability_gap(start, judge, beta):.4f}")
assert round(expected, 2) == 0.71 and round(happens, 2) == 0.12
assert abs(alignment.probability_gap(start, judge, beta) - (expected - happens)) < 1e-6

# %% [markdown]
# ## Where training ends
#
# Does training on preferences reach the beta-perfect system? Its optimum (E4; derived in lesson 03) is the start tilted by the reward:
# $p^*(z) \propto p_\text{ref}(z)\,e^{r(z)/\beta}$. The softmax above has no $p_\text{ref}$ in it. Both can be seen on one map: every system with three answers is a
# point of a triangle, whose corners are the certain answers. We need a map, and a path of training with DPO's loss (lesson 03) from the start.


# %%
def place(p):
    """Point of a triangle for each distribution over three answers: corner 0 left, 1 right, 2 on top."""
    p = torch.as_tensor(p, dtype=torch.float64)
    return p[..., 1] + p[..., 2] / 2, p[..., 2] * math.sqrt(3) / 2


def triangle(ax):
    """The outline, with a name at each corner."""
    ax.plot(*place(torch.eye(3)[[0, 1, 2, 0]]), color="0.4", linewidth=1)
    for corner, align in ((0, "right"), (1, "left"), (2, "center")):
        shift = (0, 5 if corner == 2 else -12)
        ax.annotate(f"answer {corner}", place(torch.eye(3)[corner]), shift, textcoords="offset points", ha=align)
    ax.set(aspect="equal", xlim=(-0.25, 1.25), ylim=(-0.1, 0.97))
    ax.set_axis_off()


# %% tags=["nbval-ignore-output"]
def training_path(beta, steps=150):
    """p(z) before and after each step of Adam on DPO's population loss: (steps + 1, 3)."""
    case = exact.load_case(data_folder() / "systems" / "three_answers.json")
    seen = []
    objective = exact.direct(case.system, case.preference_logits, beta)
    exact.train(case.system, objective, steps, lr=0.1, watch=lambda step: seen.append(exact.marginal(case.system).detach()[0]))
    return torch.stack(seen)


path = training_path(beta)
optimum = exact.tilted_marginal(case.system, case.reward, beta)
print("path ends at:", [round(v, 4) for v in path[-1].tolist()])
print("optimum:     ", [round(v, 4) for v in optimum[0].tolist()])
assert (path[-1] - optimum[0]).abs().max() < 1e-3


# %% [markdown]
# The thin lines show all optima and all beta-perfect systems, for beta from infinity down to 0. Both end in the corner of the best answer; but one
# comes from the start, the other (dotted) from the middle of the triangle. Training follows neither; it takes what lowers the loss fastest,
# and Adam's momentum carries it a little past the optimum before it comes back. Move the slider: a larger beta gives a shorter path. (At the
# smallest betas 150 steps do not get all the way; lesson 03 says why.)


# %%
def plot_simplex(beta):
    """Path of training, optimum and beta-perfect system in the triangle of three answers."""
    figure, (ax,) = figures.new_figure(width=5.6, height=4.6)
    triangle(ax)
    every = torch.logspace(-1.5, 2.5, 80, dtype=torch.float64)
    ax.plot(*place(torch.cat([exact.tilt(start, case.reward, b) for b in every.tolist()])), color="0.6", linewidth=1)
    ax.plot(*place(torch.cat([torch.softmax(case.reward / b, -1) for b in every.tolist()])), color="0.6", linewidth=1, linestyle=":")
    styles = figures.line_styles(3)
    ax.plot(*place(training_path(beta)), label="training", markevery=10, **styles[0])
    best, perfect = exact.tilt(start, case.reward, beta)[0], torch.softmax(case.reward / beta, -1)[0]
    for p, label, marker, color in (
        (start[0], "start", "o", "black"),
        (best, "optimum", "D", styles[1]["color"]),
        (perfect, "beta-perfect", "s", styles[2]["color"]),
    ):
        ax.plot(*place(p), marker, color=color, markersize=9, label=label)
    ax.set_title(f"beta = {beta:.2f}")
    ax.legend(frameon=False, loc="upper left")
    return figure


view = SliderFigure(
    plot_simplex,
    alt="a triangle: training runs from the start, near answer 0, in a bow to the optimum, two thirds of the way to answer 2; "
    "the beta-perfect system lies apart from it, much closer to answer 2",
    beta=slider(0.5, 0.2, 3.0, 0.1),
)
view

# %% [markdown]
# ## How far apart, exactly
#
# Put the optimum into the definition: $\beta \log p^*_1/p^*_2 = r_1 - r_2 + \beta \log p_{\text{ref},1}/p_{\text{ref},2}$. The first part is what the judge wants; the
# rest is the gap. So $\text{gap}(p^*) = \beta \max |\log p_{\text{ref},1}/p_{\text{ref},2}|$: how uneven the start was, times beta. Perfect training cannot
# do better, because the start is part of what it was asked for.

# %%
print(f"gap of the optimum: {alignment.gap(optimum, judge, beta):.4f}   beta log 6 = {beta * math.log(6):.4f}")
assert abs(alignment.gap(optimum, judge, beta) - beta * math.log(6)) < 1e-9

# %% [markdown]
# To judge *training*, compare with the start: replace $p$ by $p/p_\text{ref}$ in the gap. This **reference-adjusted gap** is 0 exactly at the optimum. It
# is the number to watch while training. The plain gap judges the *result*: it still says how often the system will disagree with the judge.

# %% tags=["nbval-ignore-output"]
for name, p in (("start", start), ("after training", path[-1:]), ("optimum", optimum), ("beta-perfect", perfect)):
    plain, adjusted = alignment.gap(p, judge, beta), alignment.gap(p, judge, beta, p_reference=start)
    print(f"{name:15} gap {plain:.4f}   reference-adjusted {adjusted:.4f}")
assert alignment.gap(optimum, judge, beta, p_reference=start) < 1e-9
assert alignment.gap(path[-1:], judge, beta, p_reference=start) < 1e-3
assert alignment.gap(perfect, judge, beta, p_reference=start) > 0.8

# %% [markdown]
# Another way to say it: the optimum *is* beta-perfect, for another judge. That judge has the reward $r + \beta \log p_\text{ref}$: partly the
# real judge's taste, partly the habits of the start. On 20 random problems:

# %%
generator = torch.Generator().manual_seed(0)
plain, shifted, adjusted = [], [], []
for _ in range(20):
    r, logits = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    reference = torch.softmax(logits, -1)
    best = exact.tilt(reference, r, beta)
    other = r + beta * reference.log()
    adjusted.append(alignment.gap(best, r[:, :, None] - r[:, None, :], beta, p_reference=reference))
    shifted.append(alignment.gap(best, other[:, :, None] - other[:, None, :], beta))
    plain.append(alignment.gap(best, r[:, :, None] - r[:, None, :], beta))
print(f"mean gap {sum(plain) / 20:.2f}; for the shifted judge {max(shifted):.4f}; reference-adjusted {max(adjusted):.4f}")
assert max(shifted) < 1e-12 and max(adjusted) < 1e-12 and min(plain) > 0.3

# %% [markdown]
# ## A start that costs nothing
#
# If $p_\text{ref}(z|x)$ is uniform, both optima are one: the end of training is beta-perfect (the paper's Proposition 1). In a system of several
# components, must every component be uniform? No: only what the judge sees, the **marginal** $p(z|x)$. Four starts of a drafter $y$ and a refiner $z$:

# %%
UNIFORM = [1 / 3, 1 / 3, 1 / 3]
SKEWED = [0.8, 0.15, 0.05]
MIXING = [[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.1, 0.7]]  # rows and columns sum to 1: doubly stochastic
STARTS = {
    "every component uniform": (UNIFORM, [UNIFORM] * 3),
    "z uniform, y skewed": (SKEWED, [UNIFORM] * 3),
    "y uniform, z mixes": (UNIFORM, MIXING),
    "y skewed, z mixes": (SKEWED, MIXING),
}
table = {}
for name, (p_y, p_z) in STARTS.items():
    system = CompoundSystem([Categorical("y", {"x": 1}, 3, [p_y]), Categorical("z", {"x": 1, "y": 3}, 3, [p_z])], output="z")
    best = exact.tilted_marginal(system, case.reward, beta)
    joint = exact.tilted_joint(system, case.reward, beta).reshape(3, 3)  # y, z
    moved = (joint.sum(1) - torch.tensor(p_y, dtype=torch.float64)).abs().sum().item() / 2
    table[name] = (alignment.gap(best, judge, beta), moved)
    print(f"{name:24} gap of the optimum {table[name][0]:.3f}   share of y's probability that moves {moved:.3f}")

# %%
for name, (gap, moved) in zip(STARTS, ((0, 0), (0, 0), (0, 0.288), (0.697, 0.218))):
    assert abs(table[name][0] - gap) < 5e-4 and abs(table[name][1] - moved) < 5e-4, name

# %% [markdown]
# Three of the four can become beta-perfect. The third is the one to learn with: $y$ and $z$ alone are far from uniform given their parents, yet the
# marginal is uniform, since each column of $z$'s table sums to 1.
#
# The last column holds a surprise: where the refiner is uniform, the optimum over whole traces (SysDPO-Direct's, lesson 04) leaves the
# drafter exactly as it was. A refiner that ignores its draft gives no reason to change drafts. The start for which the theorem
# is cleanest is the one for which joint training has nothing to do upstream.
#
# ## Reading beta off a system
#
# Turn the definition round. Given a system and a judge, which beta fits best? Plot $L_{12}$ against $D_{12} = \log p_1/p_2$, one dot a pair; beta is the
# slope of the best line through the origin, $\hat\beta = \sum L D / \sum D^2$, and what is left over is the gap again, as a root mean square.

# %%
i, j = torch.triu_indices(3, 3, offset=1)
systems = {"beta-perfect": perfect, "optimum": optimum, "start": start}
found = {}
for name, p in systems.items():
    D, L = (p[0, i] / p[0, j]).log(), judge[0, i, j]
    slope = ((L * D).sum() / (D * D).sum()).item()
    rms = (L - slope * D).pow(2).mean().sqrt().item()
    found[name] = (slope, rms)
    assert all(abs(a - b) < 1e-9 for a, b in zip(found[name], alignment.fit_beta(p, judge)))
    print(f"{name:13} beta_hat {slope:7.4f}   rms {rms:.4f}")
assert abs(found["beta-perfect"][0] - 0.5) < 1e-12 and found["beta-perfect"][1] < 1e-12
assert round(found["optimum"][0], 4) == 0.8956 and round(found["optimum"][1], 3) == 0.149
assert round(found["start"][0], 3) == -1.097

# %% [markdown]
# The picture: dots are pairs of answers, lines are the fits. The beta-perfect system's dots lie on a line of slope 0.5. The start's line **falls**: a
# negative beta means that the system likes what the judge dislikes. The optimum has slope 0.8956 although it was trained at 0.5
# and training is perfect: the start still speaks through it.

# %%
figure, (ax,) = figures.new_figure(height=3.6)
for style, (name, p) in zip(figures.line_styles(3), systems.items()):
    D, L = (p[0, j] / p[0, i]).log(), judge[0, j, i]
    reach = torch.tensor([-2.0, 4.2])
    ax.plot(reach, found[name][0] * reach, color=style["color"], linestyle=style["linestyle"], linewidth=1.5)
    ax.plot(D, L, style["marker"], color=style["color"], markersize=8, label=f"{name}: {found[name][0]:.2f}")
ax.set(xlabel="the system's log-odds D (nats)", ylabel="the judge's logit L", ylim=(-1, 3.2))
ax.legend(frameon=False, title="slope beta_hat")
figures.show(figure, alt="dots of three systems: the beta-perfect one's lie on a line of slope 0.5, the optimum's near a steeper line, the start's line falls")

# %% [markdown]
# The repair is to let the start speak for itself: with $\log p_{\text{ref},1}/p_{\text{ref},2}$ as a second variable, a perfectly trained system has the
# coefficients $(\beta, -\beta)$ exactly, whatever its start.

# %%
slope, of_start, rms = alignment.fit_beta(optimum, judge, p_reference=start)
print(f"log p: {slope:.4f}   log p_ref: {of_start:.4f}   rms {rms:.4f}")
assert abs(slope - 0.5) < 1e-9 and abs(of_start + 0.5) < 1e-9 and rms < 1e-9

# %% [markdown]
# ## A judge who goes round in circles
#
# So far judges had rewards. Now take three answers of which each beats the next: 0 beats 1, 1 beats 2, and 2 beats 0, each with probability 0.8.
# Such judges exist: one that looks at length, correctness and tone by turns, or a crowd of people who each have a consistent order.

# %%
rock = math.log(4) * torch.tensor([[[0, 1, -1], [-1, 0, 1], [1, -1, 0]]], dtype=torch.float64)
print("pref of row over column:", [[round(v, 1) for v in row] for row in torch.sigmoid(rock[0]).tolist()])
around = rock[0, 0, 1] + rock[0, 1, 2] + rock[0, 2, 0]
print(f"sum of L round the circle: {around:.4f} = 3 log 4")
assert abs(around.item() - 3 * math.log(4)) < 1e-12

# %% [markdown]
# A system's log-odds add up to 0 round every circle: $\log p_0/p_1 + \log p_1/p_2 + \log p_2/p_0 = 0$, for every $p$. The judge's add up to $3 \log 4$. So the three
# disagreements add up to $3 \log 4$, whatever the system and whatever beta, and the largest is at least $\log 4 = 1.386$. That is a proof that nobody can
# satisfy this judge. Two thousand random systems, and betas, for those who like to see it:

# %%
generator = torch.Generator().manual_seed(1)
best = min(
    alignment.gap(torch.softmax(2 * torch.randn(1, 3, generator=generator, dtype=torch.float64), -1), rock, b)
    for b in (0.1, 0.5, 1.0, 2.0)
    for _ in range(500)
)
print(f"smallest gap found {best:.4f}; smallest possible {alignment.best_gap(rock)[0]:.4f} = log 4")
assert best >= alignment.best_gap(rock)[0] - 1e-12 and abs(alignment.best_gap(rock)[0] - math.log(4)) < 1e-12

# %% [markdown]
# And training? The reference is uniform; we begin somewhere else and let DPO's loss decide. It goes back to uniform: all three pulls cancel. The
# fitted beta is 0, and the loss stays 0.1927 above the entropy of the judge's own choices. More data, more steps or a larger model change nothing.

# %% tags=["nbval-ignore-output"]
z = Categorical("z", {"x": 1}, 3, [[0.6, 0.3, 0.1]], reference=[UNIFORM])
cyclic = CompoundSystem([z], output="z")
objective = exact.direct(cyclic, rock, beta=0.5)
exact.train(cyclic, objective, steps=400, lr=0.05)
p = exact.marginal(cyclic).detach()
print("after training:", [round(v, 4) for v in p[0].tolist()])
print(f"excess loss {objective.excess:.4f}   gap {alignment.gap(p, rock, 0.5):.4f}   beta_hat {abs(alignment.fit_beta(torch.tensor([UNIFORM]), rock)[0]):.4f}")
assert (p - 1 / 3).abs().max() < 1e-4 and round(objective.excess, 4) == 0.1927

# %% [markdown]
# ## Taste and circles, taken apart
#
# Real judges are mixtures. Every table of logits is a sum of two parts in exactly one way (the *Hodge decomposition* on the complete graph):
#
# $$L = \text{grad}\,\varphi + C, \qquad \varphi_i = \text{mean}_j\, L_{ij}, \qquad (\text{grad}\,\varphi)_{ij} = \varphi_i - \varphi_j .$$
#
# $\varphi$ is the best reward one can give this judge in least squares; $C$ is made of circles, and no reward reaches any of it. A judge with
# rewards $(0, 0.5, 1, 1.5)$ and on top of it a circle of strength 0.9 through answers 0, 1, 2:


# %%
def mixed_judge(strength):
    """Logits of rewards 0, 0.5, 1, 1.5 plus a circle 0 > 1 > 2 > 0 of this strength: (1, 4, 4)."""
    r = torch.tensor([0.0, 0.5, 1.0, 1.5], dtype=torch.float64)
    circle = torch.zeros(4, 4, dtype=torch.float64)
    circle[[0, 1, 2], [1, 2, 0]] = strength
    return (r[:, None] - r[None, :] + circle - circle.T)[None]


mixed = mixed_judge(0.9)
phi, cycle = alignment.hodge_split(mixed)
print("phi:", [round(v, 2) for v in phi[0].tolist()])
print(f"rms of C: {alignment.cycle_residual(mixed):.3f}")
assert round(alignment.cycle_residual(mixed), 3) == 0.636
assert (cycle.sum(2)).abs().max() < 1e-12  # what flows into an answer flows out again

# %% [markdown]
# The three tables of the picture: what the judge says, the part that a reward explains, and the circle, which is back in full.

# %%
gradient = phi[0][:, None] - phi[0][None, :]
figure, axes = figures.new_figure(3, width=8.4, height=3.3)
for ax, values, title in zip(axes, (mixed[0], gradient, cycle[0]), ("L: the judge", "grad phi: a reward", "C: the circle")):
    ax.imshow(values.tolist(), cmap="PuOr", vmin=-2.5, vmax=2.5)
    for row in range(4):
        for column in range(4):
            color = "white" if abs(values[row, column]) > 1.7 else "black"
            ax.text(column, row, f"{values[row, column] + 0.0:.1f}", ha="center", va="center", color=color)
    ax.grid(False)
    ax.set(title=title, xticks=range(4), yticks=range(4), xlabel="over answer")
axes[0].set_ylabel("answer")
figures.show(figure, alt="three 4 by 4 tables: the judge's logits are the sum of a reward's differences and of plus and minus 0.9 on a circle of three answers")

# %% [markdown]
# $C$ is at right angles to every gradient, so no system can bring the root mean square of its gap below that of $C$ (0.636 here).
# Several "best" systems now differ, because they forgive differently:
#
# - the smallest possible *largest* gap, 0.9: a linear programme;
# - least squares, $\varphi$ itself: smallest rms;
# - DPO's loss, which is logistic and cares more about undecided pairs: rms 0.647, largest gap 1.097.

# %%
rows, columns = torch.triu_indices(4, 4, offset=1)
potentials = {"best largest gap": alignment.best_gap(mixed)[1], "least squares": phi, "DPO": alignment.logistic_potential(mixed)}
numbers = {}
for name, potential in potentials.items():
    rest = (mixed - (potential[:, :, None] - potential[:, None, :]))[0, rows, columns]
    numbers[name] = (rest.pow(2).mean().sqrt().item(), alignment.gap(torch.softmax(potential / beta, -1), mixed, beta))
    print(f"{name:17} rms {numbers[name][0]:.3f}   largest gap {numbers[name][1]:.3f}")
    assert numbers[name][0] >= alignment.cycle_residual(mixed) - 1e-12
assert abs(numbers["best largest gap"][1] - 0.9) < 1e-9
assert round(numbers["DPO"][0], 3) == 0.647 and round(numbers["DPO"][1], 3) == 1.097

# %% [markdown]
# Is "DPO" in this table what training finds? Yes:

# %% tags=["nbval-ignore-output"]
four = CompoundSystem([Categorical("z", {"x": 1}, 4)], output="z")
exact.train(four, exact.direct(four, mixed, beta), steps=400, lr=0.1)
trained = exact.marginal(four).detach()
print(f"trained: largest gap {alignment.gap(trained, mixed, beta):.3f}")
assert abs(alignment.gap(trained, mixed, beta) - numbers["DPO"][1]) < 1e-3

# %% [markdown]
# The slider sets the strength of the circle. At 0 all three agree and the gap is 0. From then on no system gets below the lowest line, which is
# the strength itself; least squares happens to lie on it too. DPO's line is higher: its loss cares most about close calls, and leaves
# the largest gap to a pair that is nearly decided.


# %%
def plot_gaps(strength):
    """Largest gap of three systems against the strength of the circle."""
    grid = torch.linspace(0, 2, 11).tolist()

    def gaps(value):
        judge = mixed_judge(value)
        found = alignment.best_gap(judge)[1], alignment.hodge_split(judge)[0], alignment.logistic_potential(judge)
        return [alignment.gap(torch.softmax(potential / beta, -1), judge, beta) for potential in found]

    figure, (ax,) = figures.new_figure(height=3.2)
    curves = list(zip(*map(gaps, grid)))
    for style, values, here, label in zip(figures.line_styles(3), curves, gaps(strength), potentials):
        ax.plot(grid, values, label=f"{label}: {here:.3f}", markevery=2, **style)
        ax.plot(strength, here, "o", color="black")
    ax.set(xlabel="strength of the circle (nats)", ylabel="largest gap (nats)")
    ax.legend(frameon=False, title=f"at {strength:.1f}")
    return figure


view = SliderFigure(
    plot_gaps,
    alt="three lines rise from 0 with the strength of the circle; at 0.9 the best possible gap and that of least squares are 0.9, "
    "DPO's is 1.097",
    strength=slider(0.9, 0.0, 2.0, 0.1),
)
view

# %% [markdown]
# **In practice**: before you blame training, compute `cycle_residual` of the judge. A gap that is not above it is not the system's fault.
#
# ## Exercises
#
# Each asks for a function; the cell after it checks yours and says what is probably wrong. The hints fold out.
#
# ### Exercise 1: The odds of a beta-perfect system
#
# **Difficulty** 1/5 · **importance** 5/5 · **minutes** 5
#
# Write `perfect_odds(pref, beta)`: the odds $p(z_1)/p(z_2)$ of a system that is beta-perfectly aligned with a judge who prefers $z_1$ to $z_2$ with
# probability `pref` (a number between 0 and 1). Return one number.
#
# <details><summary>Hint 1</summary>
#
# The definition equates the judge's logit with beta times a logarithm. Solve for what stands under the logarithm.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A judge's odds are pref to 1 - pref. At beta = 1 the system's odds are the same; at beta = 0.5 they are that number squared.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "perfect-odds", "locked": false, "schema_version": 3, "solution": true, "task": false}
def perfect_odds(pref, beta):
    """Odds p(z1) : p(z2) of a beta-perfect system, one number."""
    ### BEGIN SOLUTION
    return (pref / (1 - pref)) ** (1 / beta)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "perfect-odds-test", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.lesson_02.check_perfect_odds(perfect_odds)
### BEGIN HIDDEN TESTS
assert abs(perfect_odds(0.5, 0.1) - 1) < 1e-9, "an undecided judge wants even odds, whatever beta is"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Beta is the number that people set without knowing what it stands for; now you can say what it does to two answers.
#
# ### Exercise 2: The gap
#
# **Difficulty** 2/5 · **importance** 5/5 · **minutes** 10
#
# Write `largest_gap(p, judge, beta)`: the gap of this lesson, one number. `p` has shape (X, Z), one row of probabilities for each input; `judge` has
# shape (X, Z, Z), `judge[x, i, j]` = logit of preferring `i` to `j`.
#
# <details><summary>Hint 1</summary>
#
# You need the system's log-odds of all pairs at once, in the shape of `judge`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `log_p[:, :, None] - log_p[:, None, :]` has row `i` and column `j` in the right places. Disagreement counts in both directions.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "largest-gap", "locked": false, "schema_version": 3, "solution": true, "task": false}
def largest_gap(p, judge, beta):
    """max over x, i, j of |L - beta log p_i/p_j|, one number (nats)."""
    ### BEGIN SOLUTION
    log_p = p.log()
    return (judge - beta * (log_p[:, :, None] - log_p[:, None, :])).abs().max()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "largest-gap-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_02.check_largest_gap(largest_gap)
### BEGIN HIDDEN TESTS
assert largest_gap(torch.softmax(case.reward / 0.5, -1), judge, 0.5) < 1e-9, "a beta-perfect system has gap 0"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Every claim about alignment in the next lessons is a statement about this number.
#
# ### Exercise 3: The beta-perfect system of a judge
#
# **Difficulty** 3/5 · **importance** 4/5 · **minutes** 10
#
# Write `perfect_system(judge, beta)`: probabilities of shape (X, Z) with gap 0. `judge` has shape (X, Z, Z) and no circles: for all
# triples $L_{ij} + L_{jk} = L_{ik}$. Rewards are not given; you only have comparisons.
#
# <details><summary>Hint 1</summary>
#
# Find one number a row for each answer, such that the differences of these numbers are the judge's logits.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# How far is answer `i` ahead of the others on average? Then beta, then a softmax.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "perfect-system", "locked": false, "schema_version": 3, "solution": true, "task": false}
def perfect_system(judge, beta):
    """p(z|x) with gap 0, shape (X, Z)."""
    ### BEGIN SOLUTION
    return torch.softmax(judge.mean(2) / beta, -1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "perfect-system-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_02.check_perfect_system(perfect_system)
### BEGIN HIDDEN TESTS
assert alignment.gap(perfect_system(judge, 2.0), judge, 2.0) < 1e-9, "the gap must be 0 for every beta"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* It is the target that training would reach from a uniform start.
#
# ### Exercise 4: Read beta off a system
#
# **Difficulty** 3/5 · **importance** 4/5 · **minutes** 10
#
# Write `fitted_beta(p, judge)`: the least-squares slope of the judge's logits on the system's log-odds, through the origin, over all inputs and
# pairs. Shapes as in exercise 2; return one number. (Counting each pair in both orders changes nothing.)
#
# <details><summary>Hint 1</summary>
#
# Which of the two stands on the horizontal axis? Swapping them gives another number, and not simply its inverse.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Minimise $\sum (L - b D)^2$ over $b$: set the derivative to zero.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "fitted-beta", "locked": false, "schema_version": 3, "solution": true, "task": false}
def fitted_beta(p, judge):
    """beta_hat = sum L D / sum D^2 over all inputs and pairs, one number."""
    ### BEGIN SOLUTION
    log_p = p.log()
    log_odds = log_p[:, :, None] - log_p[:, None, :]
    return (judge * log_odds).sum() / (log_odds**2).sum()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "fitted-beta-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_02.check_fitted_beta(fitted_beta)
### BEGIN HIDDEN TESTS
assert fitted_beta(start, judge) < 0, "the start likes what the judge dislikes: its slope is negative"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* For a system of unknown training this slope, with its residual, is the first thing to look at.
#
# ### Exercise 5: The part that goes in circles
#
# **Difficulty** 4/5 · **importance** 3/5 · **minutes** 15
#
# Write `cyclic_part(judge)`: the part $C$ of a judge's logits (X, Z, Z) that no reward explains, in the same shape.
#
# <details><summary>Hint 1</summary>
#
# First find the best reward in least squares, as in exercise 3; then take away what it explains.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# What it explains of $L_{ij}$ is $\varphi_i - \varphi_j$. What is left sums to 0 in every row: look whether yours does.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "cyclic-part", "locked": false, "schema_version": 3, "solution": true, "task": false}
def cyclic_part(judge):
    """C = L - grad phi, shape (X, Z, Z)."""
    ### BEGIN SOLUTION
    phi = judge.mean(2)
    return judge - (phi[:, :, None] - phi[:, None, :])
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "cyclic-part-test", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.lesson_02.check_cyclic_part(cyclic_part)
### BEGIN HIDDEN TESTS
assert (cyclic_part(rock) - rock).abs().max() < 1e-9, "rock, paper, scissors is nothing but a circle"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* It separates what a system got wrong from what cannot be got right.
#
# ## Recap
#
# - Beta-perfect: the judge's logit is beta times the system's log-odds, for all pairs. For a given judge a larger beta means a flatter system; for a
#   given system, a sharper judge.
# - The gap measures the worst disagreement. DPO's optimum has gap $\beta \max|\log p_{\text{ref},1}/p_{\text{ref},2}|$: 0 exactly if the start's marginal is uniform,
#   whatever its components are. The reference-adjusted gap is 0 at every optimum.
# - $\hat\beta$ is a slope; with $\log p_\text{ref}$ beside it a trained system shows $(\beta, -\beta)$; a negative slope means anti-aligned.
# - A judge with circles cannot be satisfied; $\text{rms}(C)$ bounds every system from below.
#
# **Limits.** All judges here are known exactly. Estimating $L$ from comparisons adds noise, and noise makes circles: a small `cycle_residual` of an
# estimated judge proves nothing. The paper's text of its Assumption 1 is not used; the conditions here are this course's own.
#
# **Next**: lesson 03 derives the optimum and trains one component. **Further reading**: Wang et al., arXiv 2502.17721 (Definition 1); Bradley and
# Terry 1952 (the judge with rewards); Jiang, Lim, Yao and Ye 2011, "Statistical ranking and combinatorial Hodge theory" (circles); Laidlaw
# and Dragan 2022, "The Boltzmann policy distribution" (rational choosers).
