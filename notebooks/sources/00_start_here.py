# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 Start here
#
# **What you will do**: align a whole small system with preferences on its final answer only, then do the same with two small
# language models, and read the before/after table and the margin plot.
#
# **What you will learn**: that a component which nobody ever judges still learns, because one loss trains the system as a whole.
#
# **What you need**: nothing but this notebook; no GPU, no network. **Minutes**: 10 to read, under 1 to run,
# 25 for the exercises.
#
# The method is SysDPO (Wang, Zhang, Ding, Tsai, Wu and Koyejo, arXiv 2502.17721).

# %%
import math

import torch

from sysdpo_lab import CompoundSystem, exact, figures, preferences, training
from sysdpo_lab.components import Categorical, CausalLM
from sysdpo_lab.coursework import checks
from sysdpo_lab.widgets import SliderFigure, slider
from sysdpo_lab.worlds import restaurants, tiny_lm

# %% [markdown]
# ## A system of two
#
# Someone asks a question. A **drafter** writes a first answer; a **refiner** rewrites it. Both have only three styles: terse,
# balanced or long. The refiner has a habit: it tends to expand what it gets by one level.

# %%
STYLES = ("terse", "balanced", "long")


def build():
    """The start: draft and refiner as tables, one row for each value of the parent."""
    draft = Categorical("draft", {"x": 1}, 3, [[0.3, 0.4, 0.3]])
    refine = Categorical("refine", {"draft": 3}, 3, [[0.2, 0.7, 0.1], [0.05, 0.25, 0.7], [0.02, 0.08, 0.9]])
    return CompoundSystem([draft, refine], inputs=("x",), output="refine")


system = build()
figures.show(system.draw(), alt="a chain: the input x feeds draft, draft feeds the output refine")

# %% [markdown]
# What does it answer? Sum over the drafts (the library does it for you):

# %%
start = exact.marginal(system, reference=True)[0]
for style, p in zip(STYLES, start.tolist()):
    print(f"{style:9} {p:.3f}")
assert start.argmax() == 2 and abs(start[2].item() - 0.58) < 1e-9

# %% [markdown]
# More than half of the answers are long. The readers, however, prefer balanced ones.
#
# ## Preferences on the final answer
#
# Readers see two final answers and pick one. They never see a draft. Here a reader is a formula, so that everything can be
# checked: with rewards $r$ = 0 (terse), 1.5 (balanced), -0.5 (long) the first of two answers is preferred with probability
# $\sigma(r_1 - r_2)$ (Bradley and Terry's model). We draw 600 comparisons of the system's own answers.

# %%
reward = torch.tensor([0.0, 1.5, -0.5], dtype=torch.float64)
generator = torch.Generator().manual_seed(0)
first, second = torch.multinomial(start.detach(), 2 * 1200, replacement=True, generator=generator).reshape(2, -1)
keep = (first != second).nonzero()[:600, 0]
first, second = first[keep], second[keep]
prefers_first = torch.rand(600, generator=generator) < torch.sigmoid(reward[first] - reward[second])
chosen = torch.where(prefers_first, first, second)
rejected = torch.where(prefers_first, second, first)
pairs = preferences.Pairs.from_finals({"x": torch.zeros(600, dtype=torch.long)}, chosen, rejected)
print(pairs)
print("first pair:", STYLES[chosen[0]], "preferred to", STYLES[rejected[0]])

# %% [markdown]
# ## Train both components with one loss
#
# SysDPO-Sampling needs the probability of a final answer, $p(z|x) = \sum_y p(y|x)\,p(z|y)$. A few different drafts $y$ stand in for all
# of them; here there are only three, so we take them all. The loss is DPO's: $-\log \sigma(\text{margin})$, where
# margin = $\beta\,\times$ (how much more the system now favours the chosen answer than it did at the start).

# %%
history = training.train(
    system,
    pairs,
    training.sampling(beta=0.5, sampler="enumerate_all", k=3),
    steps=120,
    lr=0.05,
    batch_size=100,
    generator=torch.Generator().manual_seed(1),
)
print(f"loss at the first step: {history[0]['loss']:.4f} (log 2 = {math.log(2):.4f})")
assert abs(history[0]["loss"] - math.log(2)) < 1e-9
assert history[-1]["loss"] < 0.55

# %% [markdown]
# The first loss is $\log 2$ whatever the data: at the start the system *is* its own reference, so every margin is 0. If yours is
# not, something is wrong (a good check for any DPO code).

# %%
figures.show(
    figures.plot_training(history, window=6),
    alt="over 120 steps the loss falls from 0.69 to about 0.46, the margin rises from 0 to 1.1, accuracy settles near 0.8",
)

# %% [markdown]
# ## Before and after
#
# The **win rate** says how often readers prefer an answer of the trained system to one of the start (ties count one half).

# %%
after = exact.marginal(system).detach()[0]
wins = torch.einsum("i,j,ij->", after, start.detach(), torch.sigmoid(reward[:, None] - reward[None, :])).item()
draft_before, draft_after = (system["draft"].probabilities(flag).detach()[0] for flag in (True, False))
print(f"{'':9} {'draft':^15}   {'final answer':^15}")
print(f"{'':9} {'before':>7} {'after':>7}   {'before':>7} {'after':>7}")
for i, style in enumerate(STYLES):
    print(f"{style:9} {draft_before[i]:7.3f} {draft_after[i]:7.3f}   {start[i]:7.3f} {after[i]:7.3f}")
print(f"win rate against the start: {wins:.3f}")
assert wins > 0.65 and after[1] > 0.7

# %% [markdown]
# Balanced answers went up, as they should. Now look at the **drafts**: terse drafts went up, balanced and long ones almost vanished. No
# reader ever saw a draft. The drafter learned to be terse *because the refiner expands*: credit went through the system. Trained on its
# own, with "balanced is better" as the lesson, it would have learned to write balanced drafts, which this refiner makes long.

# %%
assert draft_after[0] > draft_before[0] + 0.1 and draft_after[1:].max() < 0.15

# %% [markdown]
# Who contributed how much? The log-ratio gap of a pair is the sum of the components' shares (plus a small term for re-weighing
# the drafts, which lesson 05 explains).

# %%
figures.show(
    figures.plot_shares(history, window=6),
    alt="the shares of draft and refine both grow above zero during training and add up, with the posterior term, to the gap",
)
last = history[-1]
assert abs(sum(last["shares"].values()) - last["log_ratio_gap"]) < 1e-6

# %% [markdown]
# ## What beta does
#
# DPO's optimum is known in closed form: $p^*(z|x) \propto p_{\text{ref}}(z|x)\, e^{r(x,z)/\beta}$. Move the slider: a **larger** beta stays **closer**
# to the start, a smaller one goes nearly all the way to the best answer.


# %%
def plot_optimum(beta):
    """Start and optimum as bars."""
    best = exact.tilted_marginal(build(), reward[None], beta)[0]
    figure, (ax,) = figures.new_figure(height=3.0)
    for shift, values, label, hatch, style in (
        (-0.2, start.tolist(), "start", "//", figures.line_styles(2)[0]),
        (0.2, best.tolist(), f"optimum, beta = {beta:.2f}", "", figures.line_styles(2)[1]),
    ):
        places = [i + shift for i in range(3)]
        bars = ax.bar(places, values, 0.38, label=label, hatch=hatch, color=style["color"], edgecolor="white")
        ax.bar_label(bars, fmt="%.2f", padding=2)
    ax.set_xticks(range(3), STYLES)
    ax.set(ylabel="p(final answer)", ylim=(0, 1.1))
    ax.legend(frameon=False)
    return figure


view = SliderFigure(
    plot_optimum,
    alt="bars for terse, balanced, long: the start has 0.09, 0.33, 0.58; the optimum at beta 0.5 has 0.01, 0.96, 0.03",
    beta=slider(0.5, 0.1, 5.0, 0.1),
)
view

# %%
distance = []
for beta in (0.1, 0.5, 1.0, 2.0, 5.0):
    best = exact.tilted_marginal(build(), reward[None], beta)[0]
    distance.append((best * (best / start.detach()).log()).sum().item())
print("KL(optimum || start) for beta 0.1, 0.5, 1, 2, 5:", [round(value, 3) for value in distance])
assert distance == sorted(distance, reverse=True)

# %% [markdown]
# ## The same with language models
#
# Now draft and refine are two language models: two LoRA adapters on one tiny Llama (0.4 M parameters, trained for this course;
# its card is in `data/tiny-lm`). The task: say the facts of a record in one sentence. The judge is exact: it finds which facts are
# stated, missing or invented.

# %% tags=["nbval-ignore-output"]
model, tokenizer = tiny_lm.load_tiny_lm()
draft = CausalLM("draft", ["x"], model, tokenizer, restaurants.TINY_DRAFT, adapter=8, max_new_tokens=40)
refine = CausalLM("refine", ["x", "draft"], model, tokenizer, restaurants.TINY_REFINE, adapter=8, max_new_tokens=40)
writers = CompoundSystem([draft, refine], inputs=("x",), output="refine")
held_out = restaurants.stored_pairs("heldout")[:60]
inputs = [pair.inputs["x"] for pair in held_out]
before = writers.generate({"x": inputs})
print("facts:", inputs[0])
print("draft:", before["draft"][0])
print("final:", before["refine"][0])

# %% [markdown]
# Training pairs: sample a few answers of the system itself for records that are *not* held out, and let the judge pick the best
# and the worst of each. Drafts are thrown away; only finals are kept.

# %% tags=["nbval-ignore-output"]
generator = torch.Generator().manual_seed(0)
train_inputs = [restaurants.render(record) for record in restaurants.records(generator, 100, "train")]
draws = [writers.sample({"x": train_inputs}, generator=generator)["refine"] for _ in range(5)]
answers = [list(candidates) for candidates in zip(*draws)]
text_pairs, ties = restaurants.pairs_from_candidates(train_inputs, answers, generator, min_gap=0.2)
print(f"{len(text_pairs)} pairs; {ties} records gave none (their answers score too much alike)")
print("chosen:  ", text_pairs[0].chosen)
print("rejected:", text_pairs[0].rejected)

# %% [markdown]
# The objective is the one from above. Two drafts a record come from *diverse beam search*: likely, and different from each other.

# %% tags=["nbval-ignore-output"]
history = training.train(
    writers,
    text_pairs,
    training.sampling(beta=0.1, sampler="diverse_beam", k=2),
    steps=24,
    lr=1e-3,
    batch_size=8,
    generator=torch.Generator().manual_seed(0),
)
after = writers.generate({"x": inputs})


def mean_score(values):
    """Mean exact score over the held-out records."""
    return sum(restaurants.judge(restaurants.parse(x), value).score for x, value in zip(inputs, values)) / len(inputs)


table = {node: (mean_score(before[node]), mean_score(after[node])) for node in ("draft", "refine")}
records = [restaurants.parse(x) for x in inputs]
wins = [restaurants.compare(r, b, a) for r, a, b in zip(records, before["refine"], after["refine"])]
rate = sum(wins) / len(wins)
for node, (old, new) in table.items():
    print(f"{node:7} score before {old:.2f}, after {new:.2f}")
print(f"win rate of the final answers against the start: {rate:.2f} (n = {len(records)})")

# %%
assert table["refine"][1] > table["refine"][0] + 0.05
assert rate > 0.55

# %% tags=["nbval-ignore-output"]
for row in range(3):
    print("facts: ", inputs[row])
    print("before:", before["refine"][row])
    print("after: ", after["refine"][row], "\n")

# %% [markdown]
# The margin plot: each line is one quantity a step. With so few steps it is rough; `python -m sysdpo_lab run two-llm --profile tiny`
# runs longer, with three seeds and intervals.

# %% tags=["nbval-ignore-output"]
figures.show(
    figures.plot_training(history, window=3),
    alt="24 noisy steps: the loss falls below 0.69, the margin grows above 0, the accuracy is mostly above one half",
)

# %% [markdown]
# ## Exercises
#
# Each asks for a function; the cell after it checks yours and says what is probably wrong. The hints fold out.
#
# ### Exercise 1: What does a system answer?
#
# **Difficulty** 1/5 · **importance** 5/5 · **minutes** 5
#
# Write `answer_probabilities(p_draft, p_refine)`: the probability of each final answer of a drafter and a refiner. `p_draft` has shape (Y,), one
# probability for each draft; `p_refine` has shape (Y, Z), `p_refine[y, z]` $= p(z|y)$. Return shape (Z,).
#
# <details><summary>Hint 1</summary>
#
# An answer can come from any draft. How much of it comes from draft number `y`?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Multiply each row by the probability of its draft; then one axis has to go.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "answer-probabilities", "locked": false, "schema_version": 3, "solution": true, "task": false}
def answer_probabilities(p_draft, p_refine):
    """p(z) = sum over y of p(y) p(z | y), shape (Z,)."""
    ### BEGIN SOLUTION
    return p_draft @ p_refine
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "answer-probabilities-test", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.lesson_00.check_answer_probabilities(answer_probabilities)
### BEGIN HIDDEN TESTS
certain, copy = torch.tensor([0.0, 1.0, 0.0]), torch.eye(3)
assert answer_probabilities(certain, copy).tolist() == [0.0, 1.0, 0.0], "a certain draft that is copied is the answer"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* This sum is the only place where people's judgement of the answer touches the drafter. Lesson 01 does it for any graph.
#
# ### Exercise 2: The margin of a pair
#
# **Difficulty** 1/5 · **importance** 5/5 · **minutes** 5
#
# Write `margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta)`. The first four are log-probabilities of
# shape (B,), one for each pair of answers: of the chosen and the rejected answer, under the trained system (policy) and under its
# start (reference). Return shape (B,).
#
# <details><summary>Hint 1</summary>
#
# Compared with the start, how much has the chosen answer gained? And the rejected one?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A gain is a difference of two log-probabilities. The margin is beta times the difference of two gains.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "margin", "locked": false, "schema_version": 3, "solution": true, "task": false}
def margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta):
    """beta x (log-ratio of the chosen - log-ratio of the rejected), shape (B,)."""
    ### BEGIN SOLUTION
    return beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "margin-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_00.check_margin(margin)
### BEGIN HIDDEN TESTS
at_start = -torch.arange(1.0, 5.0).reshape(2, 2)
assert margin(*at_start, *at_start, 0.1).tolist() == [0.0, 0.0], "the start is its own reference: every margin is 0"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Every preference loss in this course is a function of this number. Most wrong DPO code is wrong here.
#
# ### Exercise 3: The loss
#
# **Difficulty** 2/5 · **importance** 5/5 · **minutes** 5
#
# Write `preference_loss(margins)`: DPO's loss of a batch, one number, from its margins of shape (B,). It must also be right for a margin of -1000.
#
# <details><summary>Hint 1</summary>
#
# Each pair has a loss of its own. What is it at margin 0, and what did the first training step above print?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# For a margin of -1000 the sigmoid is 0 in floating point, and the log of 0 is not what you want. `torch.nn.functional` has both steps in one.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "preference-loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
def preference_loss(margins):
    """-log sigmoid(margin), mean over the pairs, one number."""
    ### BEGIN SOLUTION
    return -torch.nn.functional.logsigmoid(margins).mean()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "preference-loss-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_00.check_preference_loss(preference_loss)
### BEGIN HIDDEN TESTS
assert abs(preference_loss(torch.zeros(5)).item() - math.log(2)) < 1e-6, "at the start the loss is log 2"
assert preference_loss(torch.tensor([1.0, 3.0])) < preference_loss(torch.tensor([1.0, 2.0])), (
    "larger margins, smaller loss"
)
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* With the mean inside the log sigmoid, one very good pair could hide many bad ones.
#
# ### Exercise 4: The win rate
#
# **Difficulty** 2/5 · **importance** 4/5 · **minutes** 10
#
# Write `win_rate(p_after, p_before, reward)`: how often readers prefer an answer of the trained system to one of the start, one
# number. All three have shape (Z,). The two systems answer independently; answer `i` is preferred to answer `j` with probability $\sigma(r_i - r_j)$.
#
# <details><summary>Hint 1</summary>
#
# Make a table with a row for each answer of the trained system and a column for each answer of the start. What stands in its cells?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `reward[:, None] - reward[None, :]` has all differences at once. How likely is it that row `i` and column `j` meet?
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "win-rate", "locked": false, "schema_version": 3, "solution": true, "task": false}
def win_rate(p_after, p_before, reward):
    """sum over i, j of p_after(i) p_before(j) sigmoid(r_i - r_j), one number."""
    ### BEGIN SOLUTION
    preferred = torch.sigmoid(reward[:, None] - reward[None, :])
    return p_after @ preferred @ p_before
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "win-rate-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_00.check_win_rate(win_rate)
### BEGIN HIDDEN TESTS
assert abs(win_rate(start.detach(), start.detach(), reward) - 0.5) < 1e-9, (
    "against itself a system wins half of the time"
)
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* It is the number that papers report. Against itself every system has 0.5, ties included: try it before you trust an evaluation.
#
# ## Recap
#
# - Preferences on the final answer alone train every component, through one loss on the *system's* log-probability.
# - The first loss is $\log 2$, and the shares of the components add up to the gap.
# - A larger beta stays closer to the start.
# - The code is the same for tables and for language models.
#
# **Limits.** One seed and few records: this shows how it works, not how well. Stored runs with intervals are in `data/results/`.
#
# **Next**: lesson 01 takes systems apart as graphs. **Further reading**: Rafailov et al. 2023 (DPO); Wang et al., arXiv 2502.17721.
