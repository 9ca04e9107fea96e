# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 SysDPO-Sampling
#
# **What you will do**: train a system of two components when only its final answers were compared, compute the loss by hand from a few drafts, and follow
# the drafter's gradient until it vanishes.
#
# **What you will learn**: which drafts get the credit, why one draft teaches the drafter nothing, why the loss at the start says nothing about your
# drafts, and when training on finals reaches the optimum although training on traces (lesson 04) cannot.
#
# **What you need**: lessons 02 to 04; logarithms, Bayes' rule. No GPU, no network. **Minutes**: 45 to read, about half a minute to run.
#
# The method is SysDPO-Sampling (Wang, Zhang, Ding, Tsai, Wu and Koyejo, arXiv 2502.17721, "the paper" below). Its Theorem 1 is stated as the
# paper's. All exact conditions and numbers are this course's own, checked here by computing everything.

# %%
import math
import warnings

import torch

from sysdpo_lab import CompoundSystem, alignment, errors, exact, figures, losses, preferences, results, training
from sysdpo_lab.components import Categorical
from sysdpo_lab.coursework import checks
from sysdpo_lab.experiments import beta_figures
from sysdpo_lab.paths import data_folder
from sysdpo_lab.widgets import SliderFigure, slider
from sysdpo_lab.worlds import draft_laws

# %% [markdown]
# ## Only finals are in the data
#
# The small system of lesson 00: a drafter writes something terse, balanced or long, and a refiner tends to expand it by one level. Readers compared
# *final* answers. Which drafts stood behind them was not kept.

# %%
case = exact.load_case(data_folder() / "systems" / "lengths.json")
system, beta = case.system, case.beta
WORDS = ("terse", "balanced", "long")
x, winners, losers = torch.tensor([0, 0, 0]), torch.tensor([1, 1, 0]), torch.tensor([2, 0, 2])
pairs = preferences.Pairs.from_finals({"x": x}, winners, losers)
print(pairs)
for pair in pairs:
    print(f"  {WORDS[pair.chosen]} preferred to {WORDS[pair.rejected]}")

# %% [markdown]
# SysDPO-Direct compares whole traces, draft and final. It has nothing to work with here, and the library says so:

# %%
try:
    training.train(system, pairs, training.direct(beta), steps=1)
    raise AssertionError("these pairs have no drafts")
except errors.PairKindError as error:
    print(error)

# %% [markdown]
# What the judge saw is $z$, so what must be compared is the probability of $z$, over all drafts that may lead to it:
#
# $$p(z|x) = \sum_y p(y|x)\, p(z|x,y).$$
#
# For tables that is a short sum. For language models it runs over all texts. SysDPO-Sampling replaces it by a sum over a **small set** $A(x)$ of drafts (E7):
#
# $$P_A(z|x) = \sum_{a \in A(x)} p(a|x)\, p(z|x,a).$$
#
# By hand, with the two drafts "terse" and "balanced" in the set, for the first pair (a balanced answer preferred to a long one):

# %%
p_draft, p_refine = system["draft"].probabilities()[0].detach(), system["refine"].probabilities().detach()
A, chosen, rejected = [0, 1], 1, 2
P_A = {}
for z in (chosen, rejected):
    terms = [p_draft[a].item() * p_refine[a, z].item() for a in A]
    P_A[z] = sum(terms)
    print(f"{WORDS[z]:9} " + " + ".join(f"{p_draft[a]:.1f} x {p_refine[a, z]:.2f}" for a in A) + f" = {P_A[z]:.3f}")
everything = exact.marginal(system)[0].detach()
print("with all three drafts:", [round(v, 3) for v in everything.tolist()])
assert [round(P_A[z], 3) for z in (1, 2)] == [0.31, 0.31] and [round(v, 3) for v in everything.tolist()] == [0.086, 0.334, 0.58]

# %% [markdown]
# Both sums happen to be 0.31. The set holds nearly all ways to a balanced answer (0.31 of 0.334), but only half of the ways to a long one (0.31 of 0.58): that
# one mostly comes from long drafts, which are not in the set. $P_A$ is a lower bound of $p(z|x)$, and no good one. Keep this in mind.
#
# Texts have log-probabilities like -1000, and $e^{-1000}$ is 0 in floating point. So the sum is made of logs: add the two logs of a draft, then `logsumexp` over drafts.

# %%
joint = torch.tensor([-1000.0, -1001.0], dtype=torch.float64)
print("sum of probabilities:", joint.exp().sum().log().item(), "  logsumexp:", round(torch.logsumexp(joint, -1).item(), 3))
by_logs = torch.logsumexp(p_draft[A].log() + p_refine[A, chosen].log(), -1)
assert abs(by_logs.exp().item() - 0.31) < 1e-12 and round(torch.logsumexp(joint, -1).item(), 3) == -999.687

# %% [markdown]
# ## The margin
#
# The rest is DPO's loss with $P_A$ in the place of $p$:
#
# $$\text{margin} = \beta \left[\log \frac{P_A(z^w|x)}{P_{A,\text{ref}}(z^w|x)} - \log \frac{P_A(z^l|x)}{P_{A,\text{ref}}(z^l|x)}\right].$$
#
# Four sums, and **the same set in all four**: winner, loser, policy, reference. At the start the margin is 0. Move the policy a little (the drafter writes
# more terse drafts, the refiner keeps a terse draft less often), and compute it by hand:

# %%
p_new, refine_new = [0.5, 0.3, 0.2], [[0.2, 0.75, 0.05], [0.05, 0.25, 0.7], [0.02, 0.08, 0.9]]
moved = exact.with_tables(system, {"draft": [p_new], "refine": refine_new})
new = {z: sum(p_new[a] * refine_new[a][z] for a in A) for z in (chosen, rejected)}
by_hand = beta * (math.log(new[chosen] / P_A[chosen]) - math.log(new[rejected] / P_A[rejected]))
print(f"P_A after the move: {new[chosen]:.3f} and {new[rejected]:.3f}; margin by hand {by_hand:.4f}")

one = torch.zeros(1, dtype=torch.long)
drafts = {"draft": torch.tensor([A])}
found = losses.sampling_loss(moved, {"x": one}, one + chosen, one + rejected, drafts, beta)
print(f"losses.sampling_loss: margin {found.margin.item():.4f}, loss {found.loss.item():.4f}")
assert abs(found.margin.item() - by_hand) < 1e-12 and round(by_hand, 4) == 1.2993

# %% [markdown]
# What if the sets differ? Say the reference was scored once, with all drafts, and the policy with the two at hand. Nothing crashes, but the policy *is* the
# reference at this point, and yet:

# %%
mixed = beta * (math.log(P_A[chosen] / everything[chosen]) - math.log(P_A[rejected] / everything[rejected]))
loss = -math.log(1 / (1 + math.exp(-mixed)))
print(f"margin at the start {mixed:.4f} instead of 0, loss {loss:.4f} instead of log 2 = {math.log(2):.4f}")
assert round(mixed, 4) == 1.1038 and round(loss, 4) == 0.2864

# %% [markdown]
# The margin of 1.1 says which drafts are missing, not what the system learned. With one set for all four, what is missing is missing in policy and reference alike: at the
# start it cancels exactly.
#
# ## The loss at the start says nothing about the set
#
# At the start policy = reference, so the margin is 0 and the loss is $\log 2$ **for every set**, good or bad. All seven sets of our three drafts:

# %%
found = {}
for A in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
    out = losses.sampling_loss(system, {"x": one}, one + 1, one + 2, {"draft": torch.tensor([A])}, beta)
    (gradient,) = torch.autograd.grad(out.loss, system["draft"].logits)
    found[tuple(A)] = (out.loss.item(), gradient.norm().item())
    print(f"A = {str(A):10} loss {out.loss.item():.4f}   gradient on the drafter {gradient.norm().item():.4f}")
assert all(abs(loss - math.log(2)) < 1e-12 for loss, _ in found.values())
assert all(norm < 1e-15 for A, (_, norm) in found.items() if len(A) == 1)
assert all(norm > 0.1 for A, (_, norm) in found.items() if len(A) > 1)

# %% [markdown]
# The loss is blind; the gradient is not. And sets of one draft have a gradient of **zero** on the drafter. Both are explained by the next formula.
#
# ## Who gets the credit
#
# Differentiate the log of a sum. With $w_a(z) = p(a|x)\,p(z|x,a) / P_A(z|x)$, the **posterior** of a draft within the set,
#
# $$\nabla \log P_A(z|x) = \sum_{a \in A} w_a(z) \left[\nabla \log p(a|x) + \nabla \log p(z|x,a)\right].$$
#
# A draft gets as much credit as it explains the answer: Bayes' rule. For the pair above:

# %%
weights = {}
for z in (chosen, rejected):
    log_joint = (p_draft[:2].log() + p_refine[:2, z].log())[None]
    weights[z] = losses.posterior_weights(log_joint, torch.zeros(1, 2))[0]
    print(f"given a {WORDS[z]:8} answer: " + ", ".join(f"{WORDS[a]} draft {w:.3f}" for a, w in enumerate(weights[z].tolist())))
assert [round(v, 3) for v in weights[chosen].tolist()] == [0.677, 0.323]
assert [round(v, 3) for v in weights[rejected].tolist()] == [0.097, 0.903]

# %% [markdown]
# A balanced answer probably came from a terse draft, a long one from a balanced draft: the refiner expands. The winner pulls its explanations up and the loser pushes
# its own down. For a table of drafts the normaliser cancels in the difference, and the gradient on the drafter's logits ($\psi_1$, the first component) is just
#
# $$\frac{\partial\,\text{loss}}{\partial\,\text{logit}_a} = -\beta\,\sigma(-m)\,\big[w_a(z^w) - w_a(z^l)\big].$$
#
# Lesson 03's formula had a 1 at the winner and a 1 at the loser; here each is spread over drafts. Formula, autograd and finite differences:


# %%
def pair_loss(system):
    """Sampling loss of "balanced preferred to long" with the drafts terse and balanced."""
    return losses.sampling_loss(system, {"x": one}, one + 1, one + 2, drafts, beta).loss


logits = system["draft"].logits
(by_autograd,) = torch.autograd.grad(pair_loss(system), logits)
by_formula = torch.zeros(3, dtype=torch.float64)
by_formula[:2] = -beta * 0.5 * (weights[chosen] - weights[rejected])
by_differences = []
for a in range(3):
    ends = []
    for step in (1e-5, -1e-5):
        twin = exact.with_tables(system, {"draft": torch.softmax(logits.detach() + step * torch.eye(3)[a], -1)})
        ends.append(pair_loss(twin).item())
    by_differences.append((ends[0] - ends[1]) / 2e-5)
for name, row in (("formula", by_formula), ("autograd", by_autograd[0]), ("differences", torch.tensor(by_differences))):
    print(f"{name:12}", [f"{v + 0.0:.4f}" for v in row.double().round(decimals=8).tolist()])
assert torch.allclose(by_autograd[0], by_formula, atol=1e-12)
assert torch.allclose(torch.tensor(by_differences, dtype=torch.float64), by_formula, atol=1e-8)

# %% [markdown]
# Going downhill raises terse drafts and lowers balanced ones, although no reader ever saw a draft. A draft outside the set gets nothing.
#
# Now a larger world: 16 drafts with probabilities proportional to 1, 1/2, 1/3, ... and four answers (you will meet it again in lesson 06). The bars show the posteriors
# of the $k$ most likely drafts, for the best answer and for the worst. The slider `k` changes the set. `temperature` divides the refiner's logits: at a high one the refiner ignores its
# draft, both posteriors become the drafts' own probabilities, and the difference goes away.

# %%
world = draft_laws.draw("zipf", 1, torch.Generator().manual_seed(2))
best, worst = world.reward[0].argmax().item(), world.reward[0].argmin().item()


def posteriors(k, temperature):
    """Posteriors of the k most likely drafts given the best and the worst answer: two tensors (k,)."""
    refine = torch.log_softmax(world.log_z[0] / temperature, -1)
    joint = world.log_y[0, :k, None] + refine[:k]
    return tuple(torch.softmax(joint[:, z], 0) for z in (best, worst))


def plot_posteriors(k, temperature):
    """Bars of the posterior given winner and loser, and the pull on the drafter between them."""
    chosen, rejected = posteriors(k, temperature)
    figure, (left, right) = figures.new_figure(2, width=8.8, height=3.2)
    styles, places = figures.line_styles(2), torch.arange(k)
    for shift, w, label, hatch, style in ((-0.2, chosen, "winner", "", styles[0]), (0.2, rejected, "loser", "//", styles[1])):
        number = (1 / w.pow(2).sum()).item()
        name = f"given the {label}: {number:.1f} effective drafts"
        left.bar(places + shift, w, 0.4, label=name, hatch=hatch, color=style["color"], edgecolor="white")
    left.set(xlabel="draft", ylabel="posterior weight in A", ylim=(0, 1.25))
    left.legend(frameon=False, loc="upper right")
    right.bar(places, chosen - rejected, 0.6, color="0.4")
    right.axhline(0, color="black", linewidth=1)
    right.set(xlabel="draft", ylabel="winner - loser", ylim=(-1, 1), title=f"pull: norm {(chosen - rejected).norm():.3f}")
    return figure


# %%
view = SliderFigure(
    plot_posteriors,
    alt="left: posterior bars of five drafts given winner and loser, of different heights; right: their differences, some up and some down",
    k=slider(5, 1, 16),
    temperature=slider(1.0, 0.25, 8.0, 0.25),
)
view

# %% [markdown]
# Push `k` down to 1: one draft explains winner and loser alike, both bars are 1, and the pull is 0. Push the temperature up: the same happens for another reason. In
# numbers:

# %%
pulls = {}
for k, temperature in ((1, 1.0), (2, 1.0), (5, 1.0), (16, 1.0), (5, 8.0), (5, 1e9)):
    chosen_w, rejected_w = posteriors(k, temperature)
    pulls[k, temperature] = (chosen_w - rejected_w).norm().item()
    print(f"k = {k:2}, temperature {temperature:g}: norm of the pull {pulls[k, temperature]:.3f}")
assert pulls[1, 1.0] == 0 and pulls[5, 1e9] < 1e-8 and pulls[5, 8.0] < 0.5 * pulls[5, 1.0] and pulls[5, 1.0] > 0.1

# %% [markdown]
# ## One draft teaches the drafter nothing
#
# With a single draft $P_A(z) = p(a|x)\,p(z|x,a)$. The factor $p(a|x)$ stands in winner and loser alike and cancels **exactly**: only the refiner ($\psi_2$) learns. The same holds for one draft
# that was drawn five times, and for several drafts that the refiner treats alike (paraphrases). We train with $k = 1$ and look at the drafter's table afterwards:

# %%
learner = exact.load_case(data_folder() / "systems" / "lengths.json").system
before = {name: learner[name].logits.detach().clone() for name in learner.order}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    history = training.train(
        learner, pairs, training.sampling(beta, "monte_carlo", 1), steps=60, lr=0.05, generator=torch.Generator().manual_seed(0)
    )
for name in learner.order:
    print(f"{name}: the same bits as before: {torch.equal(before[name], learner[name].logits)}")
print("the library warns:", said[0].message)
assert torch.equal(before["draft"], learner["draft"].logits) and not torch.equal(before["refine"], learner["refine"].logits)
assert all(record["grad_norm"]["draft"] == 0 for record in history)

# %% [markdown]
# Loss and accuracy look fine in such a run, since the refiner learns. That is why it is easily overlooked, and why the training loop warns.
#
# Paraphrases: three drafts, two of which the refiner treats alike. Sets of the two give no gradient either, though they hold two *distinct* drafts:

# %%
alike = CompoundSystem([
    Categorical("y", {"x": 1}, 3, [[0.5, 0.3, 0.2]]),
    Categorical("z", {"y": 3}, 2, [[0.8, 0.2], [0.8, 0.2], [0.3, 0.7]]),
])  # fmt: skip
for A in ([0, 1], [0, 2], [0, 0, 0]):
    out = losses.sampling_loss(alike, {"x": one}, one, one + 1, {"y": torch.tensor([A])}, 0.5)
    (gradient,) = torch.autograd.grad(out.loss, alike["y"].logits)
    print(f"A = {str(A):9} gradient on the drafter {gradient.abs().max().item():.4f}   effective drafts {out.effective.item():.2f}")
    assert (gradient.abs().max().item() < 1e-15) == (A != [0, 2])

# %% [markdown]
# How does the gradient grow with $k$? For 100 systems each of three laws of drafts: the norm of the drafter's gradient at the start with the $k$ most likely drafts,
# as a share of what all 16 drafts give.


# %%
def gradient_norms(law, k, systems=100):
    """Mean norm of the first gradient on the drafter when A holds the k most likely drafts."""
    drawn = draft_laws.draw(law, systems, torch.Generator().manual_seed(0))
    big = drawn.case()
    rows, i, j = exact.all_pairs(systems, draft_laws.OUTPUTS)
    order = drawn.log_y[0].argsort(descending=True, stable=True)[:k]
    out = losses.sampling_loss(big.system, {"x": rows}, i, j, {"y": order.expand(len(rows), -1)}, big.beta)
    loss = exact.population_loss(out.margin, big.preference_logits[rows, i, j]) * systems
    return torch.autograd.grad(loss, big.system["y"].logits)[0].norm(dim=1).mean().item()


SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
LAWS = ("zipf", "zipf2", "meanings")
norms = {law: [gradient_norms(law, k) for k in SIZES] for law in LAWS}
shares = {law: [norm / norms[law][-1] for norm in norms[law]] for law in LAWS}
for law in LAWS:
    print(f"{draft_laws.WORDS[law]:23}", dict(zip(SIZES, (round(share, 2) for share in shares[law]))))

# %%
assert all(norms[law][0] < 1e-15 for law in LAWS)
assert shares["meanings"][1] < 0.25 and shares["meanings"][2] < 0.4 and shares["meanings"][3] > 0.6
assert shares["zipf"][1] > 0.8 and all(shares["zipf2"][n] > 0.5 for n in range(1, 9))

figure, (ax,) = figures.new_figure(height=3.4)
for style, law in zip(figures.line_styles(3), LAWS):
    ax.plot(SIZES, shares[law], label=draft_laws.WORDS[law], **style)
ax.axhline(1, color="0.4", linestyle=":", linewidth=1)
ax.set(xlabel="k, drafts in the set", ylabel="norm of psi1's gradient / all drafts", ylim=(-0.05, None))
ax.legend(frameon=False)
figures.show(figure, alt="three lines that start at 0 for k = 1; two jump up at k = 2, that of the paraphrases only at k = 4, its first draft of another meaning")

# %% [markdown]
# All start at exactly 0. In the third law the three likeliest drafts say the same in other words; the gradient wakes up at $k = 4$, where the first draft with another meaning enters.
# So $k$ counts less than how *different* the drafts are: the subject of lesson 06.
# A norm near 1 does not mean that the direction is right, and one above 1 is no gain: with few drafts each takes a larger part of the credit. Direction is measured there, too.
#
# ## What the optimum is
#
# From now on the set holds *all* drafts, so that $P_A = p$, and we ask where training ends.
#
# **Theorem 1 (the paper's).** Under its Assumption 1, the optimum of SysDPO is beta-perfect for the whole system, also where its components are linked by something
# that cannot be differentiated. The paper's authors call the assumption sufficient, not necessary, and add that in practice diverse samples often suffice. Its text is not
# available to us, so we work out our own conditions:
#
# **Ours.** The loss sees only $p(z|x)$ and $p_\text{ref}(z|x)$; it is DPO's loss for the marginal. So its optimum is $p^* \propto p_\text{ref}(z|x)\,e^{r/\beta}$ (lesson 03)
# **if the graph can produce this marginal**, and then the system is beta-perfect iff $p_\text{ref}(z|x)$ is uniform (lesson 02). Direct asks for more: the graph must hold
# a whole *joint* (lesson 04). Three graphs:
#
# 1. The output sees $x$ and is free: always. (It may ignore the drafts and give $p^*$.) For instance the collider.
# 2. A chain $x \to y \to z$ whose refiner does not see $x$: iff $P^*$, as a matrix of $x$ and $z$, is a product of two stochastic matrices with $|Y|$ in the middle.
# 3. Several hidden components and an output that sees only drafts: it depends, so compute it.
#
# First the XOR collider of lesson 04, which Direct misses:

# %% tags=["nbval-ignore-output"]
xor = {}
for variant in ("sampling", "direct"):
    collider = exact.load_case(data_folder() / "systems" / "xor_collider.json")
    objective = getattr(exact, variant)(collider.system, collider.preference_logits, collider.beta)
    exact.train(collider.system, objective, 300, lr=0.1)
    xor[variant] = exact.marginal(collider.system)[0, 1].item()
target = exact.tilted_marginal(collider.system, collider.reward, collider.beta)[0, 1].item()
print(f"P(good): target {target:.4f}, Sampling {xor['sampling']:.4f}, Direct {xor['direct']:.4f}")
assert abs(target - 0.8808) < 5e-5 and abs(xor["sampling"] - target) < 1e-4 and abs(xor["direct"] - 0.9111) < 5e-4

# %% [markdown]
# ## A bottleneck
#
# Second graph: the refiner reads the draft alone, so everything it knows of $x$ must pass through $y$. Three inputs, three answers, a judge who wants answer $x$ for input $x$ (reward 1.5). How
# many different drafts are needed? Best of 20 starts, since such problems have poor local solutions:


# %%
def best_gap(target, drafts, steps=250):
    """Reference-adjusted gap of the best of 20 starts for x -> y -> z with so many drafts, when p* is `target`; beta 0.5."""
    inputs, answers = target.shape
    chain = CompoundSystem([Categorical("y", {"x": inputs}, drafts), Categorical("z", {"y": drafts}, answers)])
    judge = 0.5 * (target.log()[:, :, None] - target.log()[:, None, :])
    exact.minimise(chain, exact.sampling(chain, judge, 0.5), 20, torch.Generator().manual_seed(0), steps=steps)
    return alignment.gap(exact.marginal(chain).detach(), judge, 0.5, p_reference=exact.marginal(chain, reference=True))


diagonal = exact.tilt(torch.full((3, 3), 1 / 3, dtype=torch.float64), 1.5 * torch.eye(3, dtype=torch.float64), 0.5)
bottleneck = [best_gap(diagonal, drafts) for drafts in (1, 2, 3)]
for drafts, gap in enumerate(bottleneck, start=1):
    print(f"{drafts} drafts: best gap {gap:.3f}")
assert abs(bottleneck[0] - 1.5) < 1e-3 and abs(bottleneck[1] - 1.5) < 1e-3 and bottleneck[2] < 1e-3

# %% [markdown]
# Two drafts are no better than one: the gap is a maximum, and some pair is always left out. Three do it; in general $\min(|X|, |Z|)$ drafts suffice, since a draft
# can copy the input, or be the answer. Fewer suffice if the target is made of few ingredients, for instance of two laws of answers in different proportions:

# %%
generator = torch.Generator().manual_seed(3)
proportions, laws = (torch.softmax(torch.randn(*shape, generator=generator, dtype=torch.float64), -1) for shape in ((3, 2), (2, 3)))
mixed = [best_gap(proportions @ laws, drafts) for drafts in (1, 2)]
print(f"rank of the target: {torch.linalg.matrix_rank(proportions @ laws).item()}")
print(f"best gap with 1 draft {mixed[0]:.2f}, with 2 drafts {mixed[1]:.3f}")
assert mixed[0] > 0.05 and mixed[1] < 1e-3

# %% [markdown]
# ## Rank is not enough
#
# So is the number of drafts just the rank of the target? At least that many are needed. But the two factors are probabilities and cannot be negative. The smallest
# number that works is called the *nonnegative rank*, and it can be larger. The classical example, four inputs and four answers:
#
# $$P = (1-e)\,M + \tfrac{e}{4}, \qquad M = \tfrac12 \begin{pmatrix} 1&1&0&0\\ 1&0&1&0\\ 0&1&0&1\\ 0&0&1&1 \end{pmatrix}.$$
#
# Its rank is 3 for every $e < 1$. One can *see* when three drafts suffice. All rows of $P$ lie in a plane, and in it the possible laws of answers form a square. The four rows are the corners
# of a smaller square inside. With three drafts every row is a mixture of three laws of answers, so it lies in their triangle. Question: does a triangle fit between the squares?

# %%
M = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]], dtype=torch.float64) / 2


def nested(e):
    """(1 - e) M + e / 4."""
    return (1 - e) * M + e / 4


def in_plane(p):
    """Coordinates of laws of four answers in the plane of the example; all possible ones form the square from -1 to 1."""
    p = torch.as_tensor(p, dtype=torch.float64)
    return 2 * (p[..., 0] - p[..., 3]), 2 * (p[..., 1] - p[..., 2])


EDGES = (0.05, 0.2, 0.35, 0.5, 0.55, 0.6, 0.7, 0.8)
three = [best_gap(nested(e), 3) for e in EDGES]
four = best_gap(nested(0.05), 4)
print("three drafts:", {e: f"{gap:.3f}" for e, gap in zip(EDGES, three)})
print(f"four drafts at e = 0.05: {four:.3f}")

# %%
known = dict(zip(EDGES, three))
assert all(torch.linalg.matrix_rank(nested(e)) == 3 for e in EDGES)
assert abs(known[0.05] - 0.926) < 1e-3 and abs(known[0.5] - 0.086) < 1e-3 and known[0.6] < 1e-3 and known[0.8] < 1e-3 and four < 1e-3
assert all(a > b for a, b in zip(three[:5], three[1:6]))

# %% [markdown]
# Left, the squares for the chosen $e$ with the best triangle; right, the gap that the best of 20 starts reaches with three drafts. The gap reaches 0 exactly where the triangle begins to fit, at $e = 2 - \sqrt 2 = 0.586$.
# Move `e` across it.

# %%
S = math.sqrt(2) - 1  # half-width of the largest inner square that a triangle can hold
TRIANGLE = [(1.0, 1.0), (-1.0, 1 - 2 * S), (1 - 2 * S, -1.0), (1.0, 1.0)]


def plot_squares(e):
    """Left: both squares and the triangle. Right: gap with three drafts against e."""
    figure, (left, right) = figures.new_figure(2, width=8.4, height=3.6)
    first, second = figures.line_styles(2)
    around = [0, 1, 3, 2, 0]
    left.plot(*in_plane(M[around]), color="black", linewidth=2, label="all laws of answers")
    left.plot(*in_plane(nested(e)[around]), color=first["color"], marker="o", linewidth=2, label="what the four inputs need")
    left.plot(*zip(*TRIANGLE), color=second["color"], linestyle="--", marker="s", linewidth=2, label="three drafts")
    left.set(aspect="equal", xlim=(-1.1, 1.1), ylim=(-1.1, 1.9), title="fits" if 1 - e <= S else "does not fit")
    left.set_axis_off()
    left.legend(frameon=False, loc="upper left")
    right.plot(EDGES, three, **first)
    right.axvline(2 - math.sqrt(2), color="0.4", linestyle=":")
    right.axvline(e, color=second["color"], linewidth=1)
    right.set(xlabel="e", ylabel="best gap, three drafts (nats)", title=f"e = {e:.2f}")
    return figure


view = SliderFigure(
    plot_squares,
    alt="left: at e = 0.35 the inner square sticks out of the triangle; right: the gap falls from 0.93 at e = 0.05 to 0 at e = 0.586",
    e=slider(0.35, 0.0, 1.0, 0.05),
)
view

# %%
rows = torch.stack(in_plane(nested(2 - math.sqrt(2))), -1)
corners = torch.tensor(TRIANGLE, dtype=torch.float64)
edges, off = corners[1:] - corners[:-1], rows[:, None] - corners[:-1]
side = edges[:, 0] * off[..., 1] - edges[:, 1] * off[..., 0]  # >= 0: on the inner side of each edge
print(f"at e = 2 - sqrt 2 the corners are inside or on the triangle by {abs(side.min().item()):.4f}")
assert side.min() > -1e-12 and (side.abs() < 1e-12).sum() >= 3

# %% [markdown]
# In practice drafts are texts, and $|Y|$ is no limit. The lesson is about *what passes through* a link: if the refiner does not see the question, the drafts must carry every distinction that the judge
# makes. If it does see the question (an arrow $x \to z$), this worry disappears.
#
# ## A surprise about uniform starts
#
# Beta-perfection needs a uniform *marginal* at the start. Four starts of drafter and refiner (lesson 02 had the first two columns), one input, $r = (0, 1, 2)$, beta 0.5. New is how far Sampling moves the drafter, as
# total variation. Its solution is not unique (see below), so it depends on the optimiser: we show L-BFGS and Adam, both from the start.

# %% tags=["nbval-ignore-output"]
UNIFORM, SKEWED = [1 / 3, 1 / 3, 1 / 3], [0.8, 0.15, 0.05]
MIXING = [[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.1, 0.7]]  # rows and columns sum to 1
STARTS = {"all uniform": (UNIFORM, [UNIFORM] * 3), "z uniform": (SKEWED, [UNIFORM] * 3)}
STARTS |= {"y uniform, z mixes": (UNIFORM, MIXING), "y skewed, z mixes": (SKEWED, MIXING)}
reward = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
judge = reward[:, :, None] - reward[:, None, :]


def after(start, variant, optimiser):
    """(plain gap, total variation moved in y, adjusted gap) after training from a start."""
    p_y, p_z = STARTS[start]
    chain = CompoundSystem([Categorical("y", {"x": 1}, 3, [p_y]), Categorical("z", {"x": 1, "y": 3}, 3, [p_z])])
    optimiser(chain, getattr(exact, variant)(chain, judge, 0.5))
    p, p_ref = exact.marginal(chain).detach(), exact.marginal(chain, reference=True)
    moved = (chain["y"].probabilities() - chain["y"].probabilities(True)).abs().sum().item() / 2
    return alignment.gap(p, judge, 0.5), moved, alignment.gap(p, judge, 0.5, p_reference=p_ref)


columns = {"Direct": ("direct", exact.descend), "Sampling, L-BFGS": ("sampling", exact.descend), "Sampling, Adam": ("sampling", exact.train)}
table = {start: {name: after(start, *how) for name, how in columns.items()} for start in STARTS}
for start, row in table.items():
    moved = "   ".join(f"{name} {value[1]:.3f}" for name, value in row.items())
    print(f"{start:19} gap {row['Direct'][0]:.3f}   y moved by: {moved}")

# %%
WANTED = {"all uniform": (0, 0, 0), "z uniform": (0, 0, 0.150), "y uniform, z mixes": (0, 0.288, 0.523), "y skewed, z mixes": (0.697, 0.218, 0.164)}
for start, (gap, by_direct, by_sampling) in WANTED.items():
    row = table[start]
    assert all(abs(value[0] - gap) < 2e-3 and value[2] < 1e-3 for value in row.values()), start
    assert abs(row["Direct"][1] - by_direct) < 5e-4 and abs(row["Sampling, L-BFGS"][1] - by_sampling) < 2e-3, start
assert abs(table["y skewed, z mixes"]["Sampling, Adam"][1] - 0.164) > 0.1

# %% [markdown]
# All twelve runs reach the optimum of the loss. The first three starts become beta-perfect; in the last one the start's unevenness remains (0.697). But look at the first row: **nobody moves the drafter**, neither
# method, neither optimiser. With everything uniform each draft explains each answer equally well, winner and loser posteriors are equal, and the gradient is zero, at the start and along the whole way:

# %%
for start in ("all uniform", "y uniform, z mixes"):
    p_y, p_z = STARTS[start]
    chain = CompoundSystem([Categorical("y", {"x": 1}, 3, [p_y]), Categorical("z", {"x": 1, "y": 3}, 3, [p_z])])
    for variant in ("direct", "sampling"):
        loss = getattr(exact, variant)(chain, judge, 0.5)
        gradient = torch.autograd.grad(loss(), chain["y"].logits)[0].abs().max().item()
        print(f"{start:19} {variant:9} largest entry of the drafter's gradient {gradient:.4f}")
        assert gradient < 1e-16 if start == "all uniform" else gradient > 0.01

# %% [markdown]
# The start for which the guarantee is cleanest is the one for which joint training has nothing to do upstream. Do not test a system-level method there. The third start is better: uniform marginal, and real credit to
# assign.
#
# ## Many solutions
#
# Why does the optimiser matter? Sampling's loss fixes the marginal $p(z|x)$ only. Many pairs of drafter and refiner have the same marginal, and all are optimal. Where the graph can hold it (lesson 04), Direct's optimum is one of them, and a special one: among all systems with the right
# marginal it has the smallest distance from the start as a *whole*, $\mathrm{KL}(p(y,z|x)\,\|\,p_\text{ref}(y,z|x))$. Reason: that KL is the marginal's KL plus the mean KL of the posteriors $p(y|x,z)$, and Direct leaves the posteriors as they were.
# Twenty random chains, both methods:

# %% tags=["nbval-ignore-output"]
generator = torch.Generator().manual_seed(1)


def random_chain():
    """x -> y -> z with x -> z, three values each, random tables."""
    p_y, p_z = (torch.softmax(torch.randn(*shape, generator=generator, dtype=torch.float64), -1) for shape in ((3, 3), (3, 3, 3)))
    return CompoundSystem([Categorical("y", {"x": 3}, 3, p_y), Categorical("z", {"x": 3, "y": 3}, 3, p_z)])


chains = [random_chain() for _ in range(20)]
rewards = torch.randn(60, 3, generator=generator, dtype=torch.float64)
all_judges = rewards[:, :, None] - rewards[:, None, :]
distance = {}
for variant in ("direct", "sampling"):
    together = exact.stack(chains)
    exact.train(together, getattr(exact, variant)(together, all_judges, 0.5, systems=20), 600, lr=0.1)
    kls = exact.kl_joint(together), exact.kl_marginal(together)
    distance[variant] = [exact.by_member(kl, 20).mean(1) for kl in kls]
    joint, marginal = (kl.mean().item() for kl in distance[variant])
    print(f"{variant:9} joint KL {joint:.3f}, marginal KL {marginal:.3f}")

# %% tags=["nbval-ignore-output"]
assert (distance["direct"][0] - distance["direct"][1]).abs().max() < 1e-4
assert (distance["sampling"][0] > distance["direct"][0]).all() and (distance["sampling"][1] - distance["direct"][1]).abs().max() < 1e-3

figure, (ax,) = figures.new_figure(width=5.2, height=3.8)
top = distance["sampling"][0].max().item()
ax.plot([0, top], [0, top], color="0.4", linestyle=":", linewidth=1, label="joint = marginal")
for style, (variant, (joint, marginal)) in zip(figures.line_styles(2), distance.items()):
    ax.plot(marginal, joint, style["marker"], color=style["color"], markersize=7, label=variant.capitalize())
ax.set(xlabel="KL of the answers (nats)", ylabel="KL of whole traces (nats)")
ax.legend(frameon=False)
figures.show(figure, alt="twenty squares of Sampling lie above the diagonal, twenty dots of Direct on it, at the same places along the lower axis")

# %% [markdown]
# Direct's dots lie on the diagonal: nothing moves that the answers do not force. Sampling's squares lie above: the same answers, but drafts have drifted further than needed. That is no error of the loss; it does not
# look at drafts. If drafts matter to you (someone reads them, another program parses them), it is a reason to prefer traces.
#
# ## How long, and how many pairs
#
# Does training on finals take longer than plain DPO on one component, which has no drafts at all? The chain with skip of lesson 04 has a uniform marginal. The gap against the step for Direct, Sampling and a single component with the same judge:


# %%
def gaps_while_training(method, beta, lr, steps):
    """Gap before and after each Adam step on the population loss."""
    skip = exact.load_case(data_folder() / "systems" / "chain_with_skip.json")
    trained = skip.system if method != "plain DPO" else CompoundSystem([Categorical("z", {"x": 3}, 4)])
    build = exact.sampling if method == "Sampling" else exact.direct
    objective, seen = build(trained, skip.preference_logits, beta), []
    exact.train(trained, objective, steps, lr, watch=lambda _: seen.append(alignment.gap(exact.marginal(trained).detach(), skip.preference_logits, beta)))
    return seen


def plot_speed(beta, lr):
    """Gap against step for three methods, logarithmic."""
    figure, (ax,) = figures.new_figure(height=3.4)
    for style, method in zip(figures.line_styles(3), ("Direct", "Sampling", "plain DPO")):
        ax.plot(gaps_while_training(method, beta, lr, 400), label=method, **{**style, "marker": None})
    ax.axhline(1e-3, color="0.4", linestyle=":", linewidth=1)
    ax.set(yscale="log", ylim=(1e-7, 10), xlabel="Adam step", ylabel="gap (nats)", title=f"beta = {beta:.1f}, lr = {lr:.2f}")
    ax.legend(frameon=False, loc="lower left")
    return figure


view = SliderFigure(
    plot_speed,
    alt="three lines that fall side by side and cross 0.001 between steps 100 and 160, at beta 0.5 and learning rate 0.1",
    beta=slider(0.5, 0.1, 2.0, 0.1),
    lr=slider(0.1, 0.02, 0.2, 0.02),
)
view

# %% tags=["nbval-ignore-output"]
needed = {}
for method in ("Direct", "Sampling", "plain DPO"):
    seen = gaps_while_training(method, 0.5, 0.1, 200)
    needed[method] = next(step for step, gap in enumerate(seen) if gap < 1e-3)
    print(f"{method:9} first below 0.001 after {needed[method]} steps; gap after 50 steps {seen[50]:.3f}, after 200 {seen[200]:.5f}")
    assert seen[50] < 0.2 and seen[200] < 1e-3
assert all(100 <= steps <= 170 for steps in needed.values())

# %% [markdown]
# No: all three take the same number of steps within a few dozen. Beta and the learning rate matter more. From a stored run over 72 systems a beta (`python -m sysdpo_lab run beta --profile toy --out runs/beta`):

# %%
stored = results.load("beta")
figure = beta_figures.plot_steps(stored)
figures.show(figure, alt="steps to a gap of 0.001 against beta: at learning rate 0.01 they fall from 3645 at beta 0.1 to 143 at beta 5; at 0.1 from 467 to a floor near 140")

# %%
fast, slow = ({b: row["value"] for b, row in beta_figures.curve(stored, metric, "ring").items()} for metric in ("steps", "steps_slow"))
print("lr 0.1: ", {b: round(steps) for b, steps in fast.items()})
print("lr 0.01:", {b: round(steps) for b, steps in slow.items()})
assert round(slow[0.1]) == 3645 and round(slow[5.0]) == 143 and round(fast[0.1]) == 467 and 136 < min(fast.values()) < 141
assert 1.7 < slow[0.1] / slow[0.2] < 2.3 and 1.7 < slow[1.0] / slow[2.0] < 2.3

# %% [markdown]
# Halve beta and the steps double, until a floor of about 140 (we put it down to Adam's momentum). The same run shows the price list of beta: distance from the start against win rate over it.

# %%
figures.show(
    beta_figures.plot_frontier(stored),
    alt="win rate against KL: from 0.5 at distance 0 the curve rises steeply to 0.6 at a quarter nat (beta 1) and flattens out near 0.69 (beta 0.1)",
)

# %%
kl, wins = ({b: row["value"] for b, row in beta_figures.curve(stored, metric, "ring").items()} for metric in ("kl", "wr_prompted"))
for b in kl:
    print(f"beta = {b:3}: KL {kl[b]:.3f}, win rate {wins[b]:.3f}")
assert list(kl.values()) == sorted(kl.values(), reverse=True) and list(wins.values()) == sorted(wins.values(), reverse=True)
assert round(kl[1.0], 2) in (0.25, 0.26) and round(wins[1.0], 2) == 0.61 and round(wins[0.1], 2) == 0.69

# %% [markdown]
# Now a finite number of comparisons. One input, three drafts, four answers, uniform start; $N$ comparisons drawn and judged, 60 data sets for each $N$, with training to the end on each.

# %% tags=["nbval-ignore-output"]
NUMBERS = (100, 1000, 10000, 100000)
sample_reward = torch.randn(1, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64).expand(60, -1)
sample_judge = sample_reward[:, :, None] - sample_reward[:, None, :]


def median_gap(variant, number, copies=60):
    """Median over data sets of the gap after training on `number` sampled judgements."""
    many = exact.stack([CompoundSystem([Categorical("y", {"x": 1}, 3), Categorical("z", {"x": 1, "y": 3}, 4)]) for _ in range(copies)])
    objective = getattr(exact, variant)(many, sample_judge, 0.5, systems=copies)
    exact.train(many, objective.sampled(number, torch.Generator().manual_seed(number), copies), 400, lr=0.1)
    log_p = exact.marginal(many).detach().log()
    return (sample_judge - 0.5 * (log_p[:, :, None] - log_p[:, None, :])).abs().amax((1, 2)).median().item()


medians = {variant: [median_gap(variant, number) for number in NUMBERS] for variant in ("sampling", "direct")}
slopes = {}
for variant, values in medians.items():
    logs = torch.tensor([NUMBERS, values], dtype=torch.float64).log()
    centred = logs - logs.mean(1, keepdim=True)
    slopes[variant] = ((centred[0] * centred[1]).sum() / centred[0].pow(2).sum()).item()
    print(f"{variant:9}", {n: round(v, 3) for n, v in zip(NUMBERS, values)}, f"slope {slopes[variant]:.2f}")

# %% tags=["nbval-ignore-output"]
assert all(-0.65 < slope < -0.4 for slope in slopes.values())
assert all(values == sorted(values, reverse=True) and values[-1] < 0.04 for values in medians.values())
assert 0.4 < medians["sampling"][-1] / medians["direct"][-1] < 2.5

figure, (ax,) = figures.new_figure(height=3.2)
for style, (variant, values) in zip(figures.line_styles(2), medians.items()):
    ax.plot(NUMBERS, values, label=f"{variant.capitalize()}: slope {slopes[variant]:.2f}", **style)
ax.plot(NUMBERS, [4 / math.sqrt(n) for n in NUMBERS], color="0.4", linestyle=":", label="slope -1/2")
ax.set(xscale="log", yscale="log", xlabel="number of comparisons N", ylabel="median gap (nats)")
ax.legend(frameon=False)
figures.show(figure, alt="two lines on logarithmic axes that fall with slope minus one half, close together")

# %% [markdown]
# The gap falls like $1/\sqrt N$: a hundred times the data for a tenth of the gap. Direct estimates whole traces, three times as many numbers as there are answers, and yet its line lies near Sampling's. For large $N$ it pays nothing for its drafts
# here; with very few comparisons it can do worse.
#
# ## Watch the shares
#
# A run with the course's training loop, as for language models: comparisons sampled from the start, sets drawn anew in each step. `shares` splits each margin's log-ratio gap into what each component contributed. With a sum over drafts
# there is one more entry, "posterior": $\mathrm{KL}(w\|w_\text{ref})$ of the loser minus that of the winner, the part that comes from re-weighing the drafts.

# %% tags=["nbval-ignore-output"]
generator = torch.Generator().manual_seed(0)
skip = exact.load_case(data_folder() / "systems" / "chain_with_skip.json")
inputs = torch.randint(3, (600,), generator=generator)
first, second = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(600)]).T
prefers_first = torch.rand(600, generator=generator) < torch.sigmoid(skip.preference_logits[inputs, first, second])
finals = preferences.Pairs.from_finals(
    {"x": inputs}, torch.where(prefers_first, first, second), torch.where(prefers_first, second, first)
)
run = training.train(
    skip.system, finals, training.sampling(skip.beta, "gumbel_top_k", 2), steps=150, lr=0.05, batch_size=50, clip=None, generator=generator
)
last = run[-1]
print("last step:", {name: round(share, 3) for name, share in last["shares"].items()}, f"gap {last['log_ratio_gap']:.3f}")
print(f"effective drafts {last['effective']:.2f} of {last['distinct']:.0f}")

# %%
assert abs(run[0]["loss"] - math.log(2)) < 1e-9 and all(abs(sum(r["shares"].values()) - r["log_ratio_gap"]) < 1e-9 for r in run)
assert set(last["shares"]) == {"y", "z", "posterior"} and last["distinct"] == 2 and 1 < last["effective"] < 2
assert sum(r["shares"]["z"] for r in run[-50:]) > sum(r["shares"]["y"] for r in run[-50:]) > 0

# %% tags=["nbval-ignore-output"]
figures.show(
    figures.plot_shares(run, window=10),
    alt="shares of the log-ratio gap against the step: the refiner's grows most, the drafter's less, the posterior's stays near 0; the black line is their sum",
)

# %% [markdown]
# If the drafter's share stays flat at 0 while the refiner's grows, look at `effective`: when it is near 1, one draft explains everything, and the drafter is not being trained.
#
# ## Exercises
#
# ### Exercise 1: The probability of an answer from a few drafts
#
# **Difficulty** 1/5 · **importance** 5/5 · **minutes** 5
#
# Write `log_p_set(log_p_draft, log_p_final)`: $\log P_A(z|x)$ for a batch. Both arguments have shape (B, K): $\log p(a|x)$ and $\log p(z|x,a)$ of each draft. Return shape (B,). Some of the inputs are long texts.
#
# <details><summary>Hint 1</summary>
#
# A draft *and* its final: multiply. One draft *or* another: add. What do both become in logs?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `torch.logsumexp`, over the last axis.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "log-p-set", "locked": false, "schema_version": 3, "solution": true, "task": false}
def log_p_set(log_p_draft, log_p_final):
    """log P_A(z|x), shape (B,)."""
    ### BEGIN SOLUTION
    return torch.logsumexp(log_p_draft + log_p_final, -1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "log-p-set-test", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.lesson_05.check_log_p_set(log_p_set)
### BEGIN HIDDEN TESTS
assert abs(log_p_set(torch.full((1, 4), -3000.0), torch.zeros(1, 4)).item() + 3000 - math.log(4)) < 1e-2, "texts of 3000 nats must not underflow"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* It is the only place where SysDPO-Sampling differs from DPO.
#
# ### Exercise 2: Which draft was it?
#
# **Difficulty** 2/5 · **importance** 5/5 · **minutes** 5
#
# Write `posterior(log_p_draft, log_p_final)`: the weights $w_a(z)$, shape (B, K), from the same two tensors. Each row sums to 1.
#
# <details><summary>Hint 1</summary>
#
# Bayes' rule: prior times likelihood, then normalise over the drafts of a row.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A softmax is an exponential that is normalised.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "posterior", "locked": false, "schema_version": 3, "solution": true, "task": false}
def posterior(log_p_draft, log_p_final):
    """w_a(z) = p(a|x) p(z|x,a) / P_A(z|x), shape (B, K)."""
    ### BEGIN SOLUTION
    return torch.softmax(log_p_draft + log_p_final, -1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "posterior-test", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.lesson_05.check_posterior(posterior)
### BEGIN HIDDEN TESTS
assert posterior(torch.tensor([[-5.0]]), torch.tensor([[-7.0]])).tolist() == [[1.0]], "a single draft explains everything"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* These weights say who is trained. Log them.
#
# ### Exercise 3: The margin
#
# **Difficulty** 2/5 · **importance** 5/5 · **minutes** 10
#
# Write `set_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta)`: each of the first four has shape (B, K) and holds $\log p(a, z|x)$ of
# each draft, under the policy or the reference, with the winner or the loser. Return the margins, shape (B,).
#
# <details><summary>Hint 1</summary>
#
# Four sums over the same drafts come first. Ratios come after.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# With the four logs of sums in hand it is the margin of lesson 03.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "set-margin", "locked": false, "schema_version": 3, "solution": true, "task": false}
def set_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta):
    """beta x log-ratio gap with P_A in the place of p, shape (B,)."""
    ### BEGIN SOLUTION
    pc, pr, rc, rr = (
        torch.logsumexp(joint, -1) for joint in (policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    )
    return beta * ((pc - rc) - (pr - rr))
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "set-margin-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_05.check_set_margin(set_margin)
### BEGIN HIDDEN TESTS
some, other = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -0.5]])
assert abs(set_margin(some, other, some, other, 0.7).item()) < 1e-9, "at the start every margin is 0"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Averaging the drafts' log-ratios with the policy's weights looks alike and is another loss: it leaves out the posterior's share.
#
# ### Exercise 4: The drafter's gradient
#
# **Difficulty** 3/5 · **importance** 5/5 · **minutes** 10
#
# Write `drafter_gradient(posterior_chosen, posterior_rejected, margin, beta)`: the gradient of one pair's loss with respect to the logits of the drafts in the set. The posteriors have shape (K,), `margin` is a number that contains beta already. Return
# shape (K,).
#
# <details><summary>Hint 1</summary>
#
# The chain rule again: slope of $-\log\sigma$ at the margin, times beta, times how the log-ratio gap moves with a logit.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# $\nabla \log P_A(z)$ is an average over drafts with the posterior's weights; the normaliser of the drafter is the same for winner and loser.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "drafter-gradient", "locked": false, "schema_version": 3, "solution": true, "task": false}
def drafter_gradient(posterior_chosen, posterior_rejected, margin, beta):
    """d loss / d logits of the drafts in A, shape (K,)."""
    ### BEGIN SOLUTION
    wrong = 1 / (1 + math.exp(margin))
    return -beta * wrong * (posterior_chosen - posterior_rejected)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "drafter-gradient-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_05.check_drafter_gradient(drafter_gradient)
### BEGIN HIDDEN TESTS
same = torch.tensor([0.3, 0.7])
assert drafter_gradient(same, same, 0.4, 0.5).abs().max() == 0, "drafts that explain both answers equally well do not move"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Every way in which the drafter stops learning is a way in which this difference becomes 0.
#
# ### Exercise 5: How many drafts count?
#
# **Difficulty** 1/5 · **importance** 3/5 · **minutes** 5
#
# Write `effective_number(weights)`: one over the sum of squared weights, for weights of shape (B, K). Return shape (B,).
#
# <details><summary>Hint 1</summary>
#
# If all K weights are 1/K, the result must be K.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Square first, then add over the last axis.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "effective-number", "locked": false, "schema_version": 3, "solution": true, "task": false}
def effective_number(weights):
    """1 / sum_a w_a^2, shape (B,)."""
    ### BEGIN SOLUTION
    return 1 / (weights**2).sum(-1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "effective-number-test", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.lesson_05.check_effective_number(effective_number)
### BEGIN HIDDEN TESTS
assert abs(effective_number(torch.full((1, 8), 0.125)).item() - 8) < 1e-6, "eight equal weights are eight drafts"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Two distinct drafts with an effective number of 1.01 are one draft: the drafter's gradient is nearly nothing.
#
# ### Exercise 6: Drawn twice
#
# **Difficulty** 2/5 · **importance** 4/5 · **minutes** 10
#
# Monte Carlo draws may repeat. Write `p_of_draws(drafts, p_draft, p_final)`: $P_A(z)$ when $A$ is the *set* of the drawn drafts. `drafts` holds K whole numbers, `p_draft` (Y,) is $p(y)$, `p_final` (Y,) is $p(z|y)$ of the answer in question. Return a number.
#
# <details><summary>Hint 1</summary>
#
# A set holds each draft once, however often it was drawn.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `torch.unique`, or a Python set of plain numbers (tensors in a set are all different).
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "p-of-draws", "locked": false, "schema_version": 3, "solution": true, "task": false}
def p_of_draws(drafts, p_draft, p_final):
    """P_A(z), each distinct draft once."""
    ### BEGIN SOLUTION
    distinct = torch.unique(drafts)
    return (p_draft[distinct] * p_final[distinct]).sum()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "p-of-draws-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_05.check_p_of_draws(p_of_draws)
### BEGIN HIDDEN TESTS
often = torch.tensor([0, 1] * 500)
assert abs(float(p_of_draws(often, torch.tensor([0.9, 0.1]), torch.tensor([0.5, 0.2]))) - 0.47) < 1e-6, "with all drafts in the set it is p(z)"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* With repeats counted, more draws do not lead to $p(z)$ but to $\sum_y p(y)^2 p(z|y)$, likely drafts twice over. Lesson 06 measures it.
#
# ### Exercise 7: How narrow may the link be?
#
# **Difficulty** 3/5 · **importance** 2/5 · **minutes** 10
#
# A chain $x \to y \to z$ whose refiner does not see $x$ must produce `target` (X, Z). Write `drafts_needed(target)`: two whole numbers, (with fewer drafts it is impossible, with so many it is always possible).
#
# <details><summary>Hint 1</summary>
#
# A product of an (X, Y) and a (Y, Z) matrix: what does the algebra say about its rank?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# For the second number build the factors: the draft repeats the input, or the draft is the answer.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "drafts-needed", "locked": false, "schema_version": 3, "solution": true, "task": false}
def drafts_needed(target):
    """(at least, always enough)."""
    ### BEGIN SOLUTION
    return int(torch.linalg.matrix_rank(target)), min(target.shape)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "drafts-needed-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_05.check_drafts_needed(drafts_needed)
### BEGIN HIDDEN TESTS
assert tuple(drafts_needed(nested(0.05))) == (3, 4), "the nested squares lie between the two numbers"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Between the two numbers lies the nonnegative rank, which is hard to compute in general; running the optimiser from many starts is a fair substitute.
#
# ## Recap
#
# - Finals only: sum over a small set of drafts, $P_A(z|x) = \sum_a p(a|x)\,p(z|x,a)$, with the same set for winner, loser, policy and reference; then it is DPO.
# - A draft gets credit by its posterior; the drafter's gradient is the difference of winner's and loser's posteriors. One draft, repeats of one draft, or paraphrases: exactly 0.
# - The loss is $\log 2$ at the start for every set. Look at the gradient, the effective number of drafts, and the shares.
# - With all drafts, Sampling's optimum is the right marginal if the graph can produce it: always if the output sees $x$; through a bottleneck only if it is wide enough, and rank alone does not tell.
# - It leaves open *how* the marginal is made; Direct's optimum, where the graph can hold it, is the one that moves whole traces least. Uniform components give the drafter nothing to learn.
# - Steps grow like $1/\beta$ down to a floor; the gap falls like $1/\sqrt N$; neither is worse than plain DPO's on these tables.
#
# **Limits.** All optima here are for the set of *all* drafts; with a few, the loss is another one, and how much that matters is lesson 06. Tables share nothing between drafts or inputs. "Best of 20 starts" is a search, not a proof (for the nested squares
# the geometry is one).
#
# **Next**: lesson 06 asks which drafts to put into the set. **Further reading**: the paper, section on SysDPO-Sampling; Cohen and Rothblum 1993, "Nonnegative ranks, decompositions, and factorizations of nonnegative matrices"; Vavasis 2009, "On the
# complexity of nonnegative matrix factorization"; Dempster, Laird and Rubin 1977 (EM), whose E-step computes the same posteriors.
