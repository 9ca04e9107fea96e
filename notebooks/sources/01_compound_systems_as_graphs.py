# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 Compound systems as graphs
#
# **What you will do**: write a system of several models as a directed acyclic graph (DAG), draw from it, and split the
# log-probability of what it did into one term per component.
#
# **What you will learn**: why a system of many models still has *one* log-probability, and how to compute the
# probability of an answer when several hidden paths lead to it.
#
# **What you need**: Python and a little probability. No GPU, no network. **Minutes**: 15 to read, under 10 seconds
# to run, 45 for the exercises.
#
# The mathematics is that of SysDPO (Wang, Zhang, Ding, Tsai, Wu and Koyejo, arXiv 2502.17721, "the paper" below).

# %%
import torch

from sysdpo_lab import CompoundSystem, errors, exact, figures, samplers
from sysdpo_lab.components import Categorical, Tool
from sysdpo_lab.coursework import checks
from sysdpo_lab.paths import data_folder
from sysdpo_lab.widgets import SliderFigure, slider

torch.set_printoptions(precision=4, sci_mode=False)

# %% [markdown]
# ## A system is a list of components
#
# Two writers answer the same question independently. A third component reads both drafts and writes the final answer. Only
# the final answer is shown to people. To be able to compute everything, each variable here has two values: 0 ("no") and
# 1 ("yes"). A component is then a table: one row for each combination of its parents' values, and each row sums to 1.

# %%
y1 = Categorical("y1", parents={"x": 2}, cardinality=2, probabilities=[[0.8, 0.2], [0.3, 0.7]])
y2 = Categorical("y2", parents={"x": 2}, cardinality=2, probabilities=[[0.6, 0.4], [0.4, 0.6]])
z = Categorical(
    "z", parents={"y1": 2, "y2": 2}, cardinality=2, probabilities=[[[0.9, 0.1], [0.5, 0.5]], [[0.4, 0.6], [0.1, 0.9]]]
)
system = CompoundSystem([z, y2, y1], inputs=("x",), output="z")
print("order:", system.order, " hidden:", system.hidden, " parents of z:", system.parents("z"))

# %% [markdown]
# The list was given in a mixed order; the system sorts it so that parents come first. Drawn as a graph (a square is an
# input, a circle a hidden component, a double ring the output that is judged):

# %%
figures.show(system.draw(), alt="a graph: the input x has arrows to y1 and y2, and both have arrows to the output z")

# %% [markdown]
# ## Draw a trace
#
# A **trace** is a value for every variable. To draw one, walk through the order: each component sees its parents' values and
# draws its own (ancestral sampling). The generator is passed in, so the same seed gives the same trace.

# %%
x = torch.tensor([0, 0, 1, 1])
trace = system.sample({"x": x}, generator=torch.Generator().manual_seed(1))
for name, value in trace.items():
    print(name, value.tolist())

# %% [markdown]
# ## One log-probability, one term per component
#
# The paper's factorisation (E1 in this course): given the input, the probability of a whole trace $s$ is the product of what
# each component did,
#
# $$\log p(s \mid x) = \sum_i \log p_i(y_i \mid \mathrm{Pa}(y_i)).$$
#
# The library returns the terms by name, in nats.

# %%
terms = system.log_prob_terms(trace)
for name, term in terms.items():
    print(f"{name}: {[round(value, 4) for value in term.tolist()]}")
total = system.log_prob(trace)
print("sum:", [round(value, 4) for value in total.tolist()])

# %% [markdown]
# By hand for the first trace: look up three numbers and multiply.

# %%
first = {name: int(value[0]) for name, value in trace.items()}
p_y1 = [[0.8, 0.2], [0.3, 0.7]][first["x"]][first["y1"]]
p_y2 = [[0.6, 0.4], [0.4, 0.6]][first["x"]][first["y2"]]
p_z = [[[0.9, 0.1], [0.5, 0.5]], [[0.4, 0.6], [0.1, 0.9]]][first["y1"]][first["y2"]][first["z"]]
print(f"{p_y1} * {p_y2} * {p_z} = {p_y1 * p_y2 * p_z:.4f}")
assert abs(p_y1 * p_y2 * p_z - total[0].exp().item()) < 1e-12


# %% [markdown]
# Which component made a trace unlikely? The picture stacks each component's surprise, $-\log p_i$, for all eight traces that
# start from $x = 0$. The longest bars are the rarest traces.


# %%
def plot_surprise(input_value):
    """Stacked bars of -log p for every trace with this input."""
    grid = torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(2))
    every = {"x": torch.full((8,), input_value), "y1": grid[:, 0], "y2": grid[:, 1], "z": grid[:, 2]}
    with torch.no_grad():
        surprise = {name: -term for name, term in system.log_prob_terms(every).items()}
    figure, (ax,) = figures.new_figure(height=3.2)
    base = torch.zeros(8, dtype=torch.float64)
    for (name, height), hatch, style in zip(surprise.items(), ("", "//", ".."), figures.line_styles(3)):
        look = {"label": name, "hatch": hatch, "color": style["color"], "edgecolor": "white"}
        ax.bar(range(8), height.tolist(), bottom=base.tolist(), **look)
        base = base + height
    ax.set_xticks(range(8), [f"{a}{b}{c}" for a, b, c in grid.tolist()])
    ax.set(xlabel=f"trace y1 y2 z, given x = {input_value}", ylabel="-log p (nats)", ylim=(0, 6))
    ax.legend(frameon=False, ncols=3)
    return figure


figures.show(
    plot_surprise(0), alt="stacked bars for eight traces; 1 1 0 is the rarest, 0 0 0 the most likely for x = 0"
)

# %% [markdown]
# ## The probability of an answer
#
# People see $z$ only. Its probability sums over everything hidden: $p(z \mid x) = \sum_{y_1, y_2} p(y_1|x)\,p(y_2|x)\,p(z|y_1,y_2)$.
# With four hidden combinations we can list them all...

# %%
every = samplers.enumerate_all(system, {"x": torch.tensor([0])})
print("y1:", every.values["y1"].tolist(), " y2:", every.values["y2"].tolist())
print("p(y1, y2 | x = 0):", [round(value, 3) for value in every.log_probs.exp()[0].tolist()])
by_hand = sum(
    every.log_probs[0, k].exp() * z.probabilities()[every.values["y1"][0, k], every.values["y2"][0, k], 1]
    for k in range(4)
)
print(f"p(z = 1 | x = 0) = {by_hand.item():.4f}")

# %% [markdown]
# ...and the library does it without listing, by eliminating one variable after the other:

# %%
p = exact.marginal(system).detach()
print(p)
assert abs(p[0, 1].item() - by_hand.item()) < 1e-12
assert torch.allclose(p.sum(1), torch.ones(2, dtype=torch.float64))

# %% [markdown]
# Elimination matters as soon as systems grow. A chain of 50 components with 10 values each has $10^{49}$ hidden
# combinations; eliminating them one by one costs 49 products of small matrices.

# %%
generator = torch.Generator().manual_seed(0)
tables = [torch.softmax(torch.randn(10, 10, generator=generator, dtype=torch.float64), -1) for _ in range(50)]
names = ["x", *(f"y{step}" for step in range(49)), "z"]
chain = CompoundSystem([Categorical(names[i + 1], {names[i]: 10}, 10, tables[i]) for i in range(50)], output="z")
assert torch.allclose(exact.marginal(chain).detach(), torch.linalg.multi_dot(tables))
print("p(z | x = 0) of the chain:", [round(value, 4) for value in exact.marginal(chain)[0].tolist()])

# %% [markdown]
# ## Move one number, watch the answer
#
# How much does the first writer matter? The slider sets $p(y_1 = 1 \mid x = 0)$ and leaves the rest alone. The answer moves on a
# straight line: $p(z|x)$ is linear in each single table (but not in several tables at once).


# %%
def plot_answer(p_yes):
    """p(z = 1 | x = 0) against p(y1 = 1 | x = 0), with the chosen point."""
    grid = torch.linspace(0.01, 0.99, 25).tolist()

    def answer(value):
        changed = Categorical("y1", {"x": 2}, 2, [[1 - value, value], [0.3, 0.7]])
        return exact.marginal(CompoundSystem([changed, y2, z], output="z"))[0, 1].item()

    figure, (ax,) = figures.new_figure(height=3.0)
    ax.plot(grid, [answer(value) for value in grid])
    ax.plot(p_yes, answer(p_yes), marker="o", markersize=9, color="black")
    ax.set(xlabel="p(y1 = 1 | x = 0)", ylabel="p(z = 1 | x = 0)", ylim=(0, 1))
    ax.annotate(f"{answer(p_yes):.3f}", (p_yes, answer(p_yes)), (8, -14), textcoords="offset points")
    return figure


view = SliderFigure(
    plot_answer,
    alt="a straight line that rises from 0.26 to 0.72; the point at p(y1 = 1) = 0.2 lies at 0.352",
    p_yes=slider(0.2, 0.01, 0.99),
)
view

# %%
low, middle, high = (
    exact.marginal(CompoundSystem([Categorical("y1", {"x": 2}, 2, [[1 - v, v], [0.3, 0.7]]), y2, z]))[0, 1].item()
    for v in (0.0, 0.5, 1.0)
)
assert abs(middle - (low + high) / 2) < 1e-12
print(f"from {low:.3f} to {high:.3f}; half-way {middle:.3f}")

# %% [markdown]
# ## Components that are not learned
#
# A calculator, a vote or a parser is a component too: its log-probability is 0 where the value is what the function returns and
# $-\infty$ elsewhere. It adds nothing to the sum, yet it stands in the graph and in the marginal.

# %%
vote = Tool("z", ["y1", "y2"], lambda first, second: first & second, cardinality=2)
voting = CompoundSystem([y1, y2, vote], output="z")
trace = voting.sample({"x": torch.tensor([0, 1])}, generator=torch.Generator().manual_seed(3))
print({name: value.tolist() for name, value in trace.items()})
print("term of the vote:", voting.log_prob_terms(trace)["z"].tolist())
print("p(both say yes | x):", [round(value, 2) for value in exact.marginal(voting)[:, 1].tolist()])
assert torch.allclose(exact.marginal(voting)[:, 1].detach(), torch.tensor([0.2 * 0.4, 0.7 * 0.6], dtype=torch.float64))

# %% [markdown]
# ## The frozen start
#
# Alignment compares the trained system with the system as it was. Every component remembers its start; inside
# `with system.reference():` the whole system is that start again. Change one table and look at both:

# %%
with torch.no_grad():
    system["y1"].logits[0] = torch.tensor([0.1, 0.9]).double().log()
trace = system.generate({"x": x})
with system.reference():
    before = system.log_prob(trace)
ratio = system.log_prob(trace).detach() - before.detach()
print("log-ratio of each trace (nats):", [round(value, 4) for value in ratio.tolist()])
assert abs(ratio[0].item() - torch.log(torch.tensor(0.9 / 0.2)).item()) < 1e-6
assert ratio[2].item() == 0.0

# %% [markdown]
# Only traces with $x = 0$ have changed, and only through $y_1$: the other terms cancel. That is what makes one preference
# loss for a whole system possible: a **log-ratio of the system is the sum of its components' log-ratios**.
#
# ## What the graph refuses
#
# Errors name the component and say what is wrong, and where it is clear, what to do.

# %%
mistakes = {
    "a loop": lambda: CompoundSystem(
        [Categorical("a", {"b": 2}, 2), Categorical("b", {"a": 2, "x": 2}, 2)], output="b"
    ),
    "a missing parent": lambda: CompoundSystem([Categorical("z", {"draft": 2}, 2)], output="z"),
    "a bad row": lambda: Categorical("z", {"x": 2}, 2, [[0.5, 0.5], [0.5, 0.6]]),
    "a wrong size": lambda: CompoundSystem([Categorical("y", {"x": 2}, 3), Categorical("z", {"y": 2}, 2)], output="z"),
}
for what, build in mistakes.items():
    try:
        build()
    except errors.SysDPOError as error:
        print(f"{what}: {type(error).__name__}: {error}\n")
    else:
        raise AssertionError(f"{what} was accepted")

# %% [markdown]
# ## Systems as files
#
# The lessons' toy systems lie in `data/systems/`. One of them is a trap that lesson 04 comes back to: two coin flips, and an
# answer that is good when they agree.

# %%
case = exact.load_case(data_folder() / "systems" / "xor_collider.json")
print(case.system.order, "beta =", case.beta)
print("p(good) at the start:", round(exact.marginal(case.system)[0, 1].item(), 4))
best = exact.tilted_marginal(case.system, case.reward, case.beta)
print("p(good) at the optimum:", round(best[0, 1].item(), 4))
assert round(best[0, 1].item(), 4) == 0.8808

# %% [markdown]
# ## Exercises
#
# Each asks for a function; the cell after it checks yours and says what is probably wrong. The hints fold out.
#
# ### Exercise 1: One term per component
#
# **Difficulty** 1/5 · **importance** 5/5 · **minutes** 10
#
# Write `trace_terms(p_y1, p_y2, p_z, trace)` for the graph of this lesson ($x \to y_1$, $x \to y_2$, both $\to z$). The tables have the
# shapes (X, Y1), (X, Y2) and (Y1, Y2, Z); `trace` is a dict of whole numbers of shape (B,) for `x`, `y1`, `y2` and `z`. Return a
# dict with the terms of `y1`, `y2` and `z`: $\log p_i$ in nats, shape (B,).
#
# <details><summary>Hint 1</summary>
#
# Which row of a table does a component use? Its parents say so.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A table can be read at many places at once: `table[rows, columns]` with two lists of numbers gives one entry for each pair.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "trace-terms", "locked": false, "schema_version": 3, "solution": true, "task": false}
def trace_terms(p_y1, p_y2, p_z, trace):
    """{component: log p(its value | its parents' values)}, each of shape (B,)."""
    ### BEGIN SOLUTION
    x, first, second, answer = (trace[name] for name in ("x", "y1", "y2", "z"))
    return {"y1": p_y1[x, first].log(), "y2": p_y2[x, second].log(), "z": p_z[first, second, answer].log()}
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "trace-terms-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_01.check_trace_terms(trace_terms)
### BEGIN HIDDEN TESTS
coin, zeros = torch.full((2, 2), 0.5), {name: torch.zeros(3, dtype=torch.long) for name in ("x", "y1", "y2", "z")}
terms = trace_terms(coin, coin, torch.full((2, 2, 2), 0.5), zeros)
assert all(torch.allclose(term.exp(), torch.full((3,), 0.5)) for term in terms.values()), "a coin's term is log 1/2"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Kept apart, the terms say who did what; added up, they are the system's log-probability. The whole method rests on this split.
#
# ### Exercise 2: Sum out what is hidden
#
# **Difficulty** 2/5 · **importance** 5/5 · **minutes** 10
#
# Write `answer_given_input(p_y1, p_y2, p_z)`: $p(z|x)$ of the same graph, shape (X, Z), from the same three tables.
#
# <details><summary>Hint 1</summary>
#
# Write the sum of this lesson down with indices: which letters are summed, which stay?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `torch.einsum` takes such letters: the same letter for $x$ in both writers' tables, and the letters of the result after the arrow.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "answer-given-input", "locked": false, "schema_version": 3, "solution": true, "task": false}
def answer_given_input(p_y1, p_y2, p_z):
    """p(z | x) = sum over y1, y2 of p(y1 | x) p(y2 | x) p(z | y1, y2), shape (X, Z)."""
    ### BEGIN SOLUTION
    return torch.einsum("xa,xb,abz->xz", p_y1, p_y2, p_z)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "answer-given-input-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_01.check_answer_given_input(answer_given_input)
### BEGIN HIDDEN TESTS
half = torch.full((2, 2), 0.5)
assert torch.allclose(answer_given_input(half, half, torch.full((2, 2, 3), 1 / 3)), torch.full((2, 3), 1 / 3)), (
    "chance stays chance"
)
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* People judge $z$ only, so this is the probability that preferences speak about.
#
# ### Exercise 3: Thirty components in a row
#
# **Difficulty** 2/5 · **importance** 4/5 · **minutes** 10
#
# Write `chain_answer(tables)`: $p(\text{last}|x)$ of a chain of components. `tables` is a list of tables of shape (N, N), the first
# with rows for $x$; `tables[i][a, b]` is the probability of value `b` of component `i` when its parent has the value `a`. Return
# shape (N, N). The check uses up to 30 tables.
#
# <details><summary>Hint 1</summary>
#
# With two tables you have done it already, in exercise 1 of lesson 00.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Do not list combinations. Keep one table that leads from $x$ to where you are, and take one step at a time.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "chain-answer", "locked": false, "schema_version": 3, "solution": true, "task": false}
def chain_answer(tables):
    """p(last | x), shape (N, N), one component eliminated at a time."""
    ### BEGIN SOLUTION
    product = tables[0]
    for table in tables[1:]:
        product = product @ table
    return product
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "chain-answer-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_01.check_chain_answer(chain_answer)
### BEGIN HIDDEN TESTS
flip = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
assert chain_answer([flip] * 3).tolist() == flip.tolist(), "three flips are one flip"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Cost grows with the number of components, not of combinations: that is what makes exact answers possible in the next lessons.
#
# ### Exercise 4: A system of your own
#
# **Difficulty** 2/5 · **importance** 4/5 · **minutes** 10
#
# Write `search_system()`, without arguments: a system that answers a question `x` (two values) with the help of a search. `query`
# reads `x`; `document` reads `query`; `answer` reads `x` and `document`, in this order, and is what people judge. All have two values. The tables are
#
# - `query`: `[[0.9, 0.1], [0.3, 0.7]]`
# - `document`: `[[0.8, 0.2], [0.4, 0.6]]`
# - `answer`: `[[[0.7, 0.3], [0.1, 0.9]], [[0.6, 0.4], [0.2, 0.8]]]`
#
# <details><summary>Hint 1</summary>
#
# One `Categorical` for each component; its `parents` say what it reads and how many values that has.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The order of the parents is the order of the table's axes. `output` names what is judged.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "search-system", "locked": false, "schema_version": 3, "solution": true, "task": false}
def search_system():
    """x -> query -> document, (x, document) -> answer."""
    ### BEGIN SOLUTION
    query = Categorical("query", {"x": 2}, 2, [[0.9, 0.1], [0.3, 0.7]])
    document = Categorical("document", {"query": 2}, 2, [[0.8, 0.2], [0.4, 0.6]])
    tables = [[[0.7, 0.3], [0.1, 0.9]], [[0.6, 0.4], [0.2, 0.8]]]
    answer = Categorical("answer", {"x": 2, "document": 2}, 2, tables)
    return CompoundSystem([query, document, answer], inputs=("x",), output="answer")
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "search-system-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_01.check_search_system(search_system)
### BEGIN HIDDEN TESTS
assert len(search_system().hidden) == 2, "query and document are hidden from whoever judges"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Retrieval, tools and votes are graphs too. Once the graph is written down, everything in this course applies to it.
#
# ### Exercise 5: How far from the start?
#
# **Difficulty** 1/5 · **importance** 5/5 · **minutes** 5
#
# Write `system_log_ratio(policy_terms, reference_terms)`: the log-ratio of each trace to the frozen start, shape (B,). Both arguments are dicts as
# exercise 1 returns them, with the same components, not necessarily in the same order.
#
# <details><summary>Hint 1</summary>
#
# What does a ratio of two products become when you take logs?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Match the components by name; then there is nothing left but adding and subtracting.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "system-log-ratio", "locked": false, "schema_version": 3, "solution": true, "task": false}
def system_log_ratio(policy_terms, reference_terms):
    """sum over components of log p_i - log p_i,ref, shape (B,)."""
    ### BEGIN SOLUTION
    return sum(policy_terms[name] - reference_terms[name] for name in policy_terms)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "system-log-ratio-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_01.check_system_log_ratio(system_log_ratio)
### BEGIN HIDDEN TESTS
same = {"draft": torch.tensor([-1.0]), "refine": torch.tensor([-2.0])}
assert system_log_ratio(same, same).tolist() == [0.0], "at the start nothing has changed"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Preferences are about whole systems, gradients are about single components. This sum is the bridge.
#
# ## Recap
#
# - A compound system is a DAG; its log-probability is the sum of its components' terms.
# - What people judge is $p(z|x)$, a sum over everything hidden; on tables it is exact and cheap.
# - Functions are components with log-probability 0 or $-\infty$.
# - A system's log-ratio to its start is the sum of its components' log-ratios.
#
# **Limits.** Everything here is a table. Language models have far too many values to sum over; lesson 05 replaces the sum by a
# few diverse values, and lesson 06 asks what that costs.
#
# **Further reading.** Wang et al., arXiv 2502.17721 (the factorisation and its use); Koller and Friedman, *Probabilistic
# Graphical Models*, chapter 9 (variable elimination).
