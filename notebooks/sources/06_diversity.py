# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 Diversity: DBS, Monte Carlo, Gumbel
#
# **What you will do**: write diverse beam search in five steps and compare it with the library's and with a list of all sentences; draw sets of
# drafts in four ways and compare each with its exact law; measure which way trains best.
#
# **What you will learn**: why the likeliest drafts make a bad set, what a penalty of 20 does, what repeats do to the sum over drafts, how to draw
# without repeats, and when diverse beam search beats sampling and when it loses.
#
# **What you need**: lesson 05 (the sum over a few drafts, the posterior); logarithms. No GPU, no network. **Minutes**: 60 to read and write, half a minute to run.
#
# The method is SysDPO-Sampling (Wang et al., arXiv 2502.17721, "the paper" below). It draws $k = 2$ drafts with diverse beam search (DBS; Vijayakumar
# et al. 2016). Statements about the paper's language models are the paper's; what we say of tables and of the word model is computed here.

# %%
import math

import torch

from sysdpo_lab import exact, figures, results, samplers
from sysdpo_lab.coursework import checks
from sysdpo_lab.decoding import sample_tokens
from sysdpo_lab.experiments import draft_sets, sampler_figures
from sysdpo_lab.experiments import samplers as experiment
from sysdpo_lab.samplers.gumbel import log_inclusion
from sysdpo_lab.samplers.stochastic_beam import stochastic_beam_tokens
from sysdpo_lab.widgets import SliderFigure, slider
from sysdpo_lab.worlds import draft_laws, word_lm
from sysdpo_lab.worlds.word_lm import LONGEST, STOP, WORDS, Beam, encode, text

# %% [markdown]
# ## A language model that can be listed
#
# SysDPO-Sampling replaces the probability of an answer by a sum over a few drafts, $P_A(z|x) = \sum_{a \in A} p(a|x)\, p(z|x,a)$. Which few? For a real
# language model nobody can check an answer to this, since its texts cannot be counted. So we take one with ten words and a full stop. It suggests
# what to do on a free day, in at most four words. All its sentences fit into a list, so every probability below is exact.

# %%
model = word_lm.WordLM()
law = word_lm.enumerate_sentences(model)
p = law.log_probs.exp()
print(f"{len(law)} sentences, probabilities sum to {p.sum():.6f}")
for number in range(8):
    print(f"{p[number]:.4f}  {text(law.token_ids[number])}")
assert len(law) == 1 + 10 + 10**2 + 10**3 + 10**4 and abs(p.sum() - 1) < 1e-12

# %% [markdown]
# The five likeliest sentences are all about walking. They are near-duplicates: other words, the same suggestion. The model does think of other things to do:

# %%
activity = law.activity
share = {name: p[activity == number].sum().item() for number, name in enumerate(word_lm.ACTIVITIES)}
print({name: round(value, 3) for name, value in share.items()})
assert (activity[:5] == 0).all() and activity[5] == 1  # the sixth is about swimming
assert [round(value, 2) for value in share.values()] == [0.69, 0.18, 0.12]

# %% [markdown]
# ## Why near-duplicates teach nothing
#
# A refiner reads the draft and asks a guest; the final answer is "yes" or "no". The guest cares about the activity only: walking is fine three times out of
# ten, swimming eight times, eating five times. Lesson 05 showed what the drafter's gradient is: the posterior of the drafts within $A$ given the
# chosen answer, minus the same given the rejected one. If all drafts in $A$ lead to the same answers, both posteriors are equal.

# %%
YES = torch.tensor([0.3, 0.8, 0.5, 0.1], dtype=torch.float64)  # walk, swim, eat, and (index -1) anything else
p_yes = YES[activity]


def posteriors(sentences):
    """p(draft | answer, A) for the answers yes and no: two lists."""
    at = [law.place[encode(sentence)] for sentence in sentences]
    joint = torch.stack([p[at] * p_yes[at], p[at] * (1 - p_yes[at])])
    return joint / joint.sum(1, keepdim=True)


top = [text(ids) for ids in law.token_ids[:2]]
diverse = ["walk along rivers.", "swim in lakes."]
for drafts in (top, diverse):
    given_yes, given_no = posteriors(drafts)
    print(drafts, "gradient:", [round(value, 3) + 0.0 for value in (given_yes - given_no).tolist()])
same, different = (posteriors(drafts)[0] - posteriors(drafts)[1] for drafts in (top, diverse))
assert same.abs().max() < 1e-12 and different.abs().min() > 0.2

# %% [markdown]
# With the two likeliest sentences the gradient is exactly 0: "yes" says nothing about which walk it was. With a walk and a swim it is not.
# Two drafts are enough, if they differ in what matters.
#
# ## Diverse beam search
#
# A greedy decoder takes the likeliest next word, again and again. DBS runs $k$ groups side by side. At each step the groups take turns, and a group pays for
# each earlier group that has just taken the same word:
#
# $$\text{score}_g(w) = \log p(w \mid \text{its own words}) - \text{penalty} \cdot \#\{\text{earlier groups that took } w \text{ at this step}\}.$$
#
# The paper uses $k$ groups of one beam and a penalty of 20. Here is one step of two groups by hand, at the first word, with a penalty of 2:

# %%
first = word_lm.transition_table()[STOP].log()
print("log p:    ", {WORDS[w]: round(first[w].item(), 2) for w in (1, 2, 3)})
fined = first.clone()
fined[1] -= 2.0  # group 1 has taken "walk"
print("group 2:  ", {WORDS[w]: round(fined[w].item(), 2) for w in (1, 2, 3)}, "takes", WORDS[fined.argmax()])
assert WORDS[first.argmax()] == "walk" and WORDS[fined.argmax()] == "swim"

# %% [markdown]
# A penalty below $\log(0.70/0.18) = 1.36$ would have left the second group walking. Ending is free: the full stop is never fined, or else only one group could
# finish at a time. When the search is over, the penalties are forgotten: the log-probability of each sentence is the model's own.


# %%
def library_search(groups, width, penalty, longest=LONGEST):
    """The library's DBS on the word model; a hypothesis's score is its penalised sum (length_penalty 0)."""
    ids, mask = word_lm.prompts()
    return samplers.diverse_beam_search(
        model, ids, mask, num_groups=groups, beams_per_group=width, diversity_penalty=float(penalty),
        max_new_tokens=longest, eos_token_id=STOP, pad_token_id=STOP, length_penalty=0.0,
    )  # fmt: skip


def found_by(groups, penalty):
    """The sentences of k groups of one beam, in order."""
    return [text(ids) for ids in library_search(groups, 1, penalty).token_ids[0]]


for penalty in (0, 1, 2, 20):
    print(f"penalty {penalty:2}: ", found_by(2, penalty))
assert found_by(2, 0) == ["walk along rivers."] * 2 and found_by(2, 1)[1] == "walk near lakes."
assert found_by(2, 2) == found_by(2, 20) == diverse
assert round(math.log(0.70 / 0.18), 2) == 1.36

# %% [markdown]
# Penalty 0 is the same greedy sentence twice. Penalty 1 gives another walk: different words, the same meaning. From 2 to 20 nothing changes.
#
# The picture shows the groups word by word. Grey discs are the words that the model says at each place (area: probability); each group is a line.
# Move the penalty from 0 to 20, and the number of groups. With four groups two things happen that no two-group example shows.


# %%
def word_shares():
    """Probability of each word at each of the five places."""
    shares = torch.zeros(LONGEST, len(WORDS), dtype=torch.float64)
    for ids, probability in zip(law.token_ids, p.tolist()):
        for place, word in enumerate(ids):
            shares[place, word] += probability
    return shares


SHARES = word_shares()
HEIGHT = {word: height for height, word in enumerate(reversed(WORDS))}


def paths(groups, penalty):
    """The words of each group after 1, 2, ... steps: what the search with so many tokens returns, ended ones kept."""
    grown = [library_search(groups, 1, penalty, longest=step).token_ids[0] for step in range(1, LONGEST + 1)]
    return [word_lm.until_stop([int(step[g, t]) for t, step in enumerate(grown) if t < step.shape[1]]) for g in range(groups)]


# %%
def plot_groups(penalty, groups):
    """A line a group through the words that it took, and its sentence with the model's own probability."""
    figure, (ax,) = figures.new_figure(width=7.6, height=4.6)
    for place in range(LONGEST):
        heights = [HEIGHT[word] for word in WORDS]
        ax.scatter([place + 1] * len(WORDS), heights, s=(900 * SHARES[place]).tolist(), color="0.85", zorder=1)
    for group, (style, words) in enumerate(zip(figures.line_styles(groups), paths(groups, penalty))):
        shift = 0.13 * (group - (groups - 1) / 2)  # lines that share a word stay apart
        probability = p[law.place[words]].item()
        label = f"{group + 1}: {text(words)}  p = {probability:.5f}"
        ax.plot(range(1, len(words) + 1), [HEIGHT[WORDS[w]] + shift for w in words], label=label, zorder=2, **style)
    ax.set_yticks(range(len(WORDS)), list(reversed(WORDS)))
    ax.set_xticks(range(1, LONGEST + 1))
    ax.set(xlabel="step", xlim=(0.7, LONGEST + 0.3), ylim=(-0.6, len(WORDS) - 0.4), title=f"penalty {penalty:g}")
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, title="group")
    return figure


view = SliderFigure(
    plot_groups,
    alt="four lines over five steps at penalty 20: walk along rivers, swim in lakes, eat near town, and a fourth group that starts with "
    "along, since all three activities are taken, and says along rivers",
    penalty=slider(20.0, 0.0, 20.0, 0.5),
    groups=slider(4, 1, 5),
)
view

# %%
for penalty in (2, 20):
    print(f"penalty {penalty:2}: ", found_by(4, penalty))
assert found_by(4, 2)[3] == found_by(4, 2)[0] and found_by(4, 20)[3] == "along rivers."
assert p[law.place[encode("along rivers.")]] < 0.001 and word_lm.transition_table().log().min() > -10

# %% [markdown]
# There are three activities. At penalty 2 the fourth group finds all three taken once, pays the same for each, and repeats the first sentence: a penalty does not
# forbid repeats. At penalty 20 a fine outweighs the model altogether. Its log-probabilities lie above -10, so the group rather says
# "along rivers.", which is no sentence (probability below 0.001), than a word that was taken. A real model has more than three ways to begin, but the lesson holds:
# a large penalty gives different words at every place at any price, and different words are not different meanings.
#
# ## Is it the best set?
#
# With a large penalty DBS looks for sentences that share no word at the same place. Which set of such sentences is really the likeliest? Brute force
# over all pairs and triples of the likeliest sentences answers it.


# %%
def apart(a, b):
    """Whether two sentences share no word at the same place (ending together is allowed)."""
    return all(x != y or x == STOP for x, y in zip(a, b))


def best_set(size, among):
    """The set of `size` sentences, pairwise apart, with the largest product of probabilities: depth first."""
    best = (-math.inf, ())

    def grow(start, chosen, total):
        nonlocal best
        if len(chosen) == size:
            best = max(best, (total, chosen))
            return
        for i in range(start, among):
            if all(apart(law.token_ids[i], law.token_ids[j]) for j in chosen):
                grow(i + 1, (*chosen, i), total + law.log_probs[i].item())

    grow(0, (), 0.0)
    return best[1]


# %%
for size in (2, 3):
    best = best_set(size, 100)
    found = [law.place[encode(sentence)] for sentence in found_by(size, 20)]
    print(f"best {size}:", [text(law.token_ids[i]) for i in best], f"log of product {law.log_probs[list(best)].sum():.2f}")
    print(f"DBS  {size}:", [text(law.token_ids[i]) for i in found], f"log of product {law.log_probs[found].sum():.2f}")
assert set(best_set(2, 100)) == {law.place[encode(sentence)] for sentence in found_by(2, 20)}
assert law.log_probs[list(best)].sum() > law.log_probs[found].sum() + 0.1

# %% [markdown]
# For two groups DBS finds the best pair. For three it does not: the second group takes the lakes, and the third has to eat in town, where it is less likely.
# Groups decide one after the other and one word at a time; earlier ones do not care about later ones. It is a greedy search, and it never looks back.
#
# ## Monte Carlo
#
# The other simple way: draw $k$ sentences from the model (*ancestral sampling*: word by word, each from its distribution). 20000 sets of two at once. How often
# is a sentence in the set? Exactly $1 - (1-p)^2$ of the time.

# %% tags=["nbval-ignore-output"]
SETS, K = 20000, 2
drawn = sample_tokens(
    model, *word_lm.prompts(SETS), num_samples=K, max_new_tokens=LONGEST, eos_token_id=STOP, pad_token_id=STOP,
    generator=torch.Generator().manual_seed(0),
).token_ids  # fmt: skip
mc = torch.tensor([[law.place[word_lm.until_stop(ids)] for ids in pair] for pair in drawn.tolist()])


def in_sets(sets, number):
    """In which share of the sets a sentence is."""
    return (sets == number).any(1).double().mean().item()


for number in range(6):
    print(f"{text(law.token_ids[number]):26} drawn {in_sets(mc, number):.3f}   exact {1 - (1 - p[number]) ** K:.3f}")
    assert abs(in_sets(mc, number) - (1 - (1 - p[number]) ** K)) < 4 * (0.25 / SETS) ** 0.5

# %% [markdown]
# Two draws may be the same sentence, with probability $\sum_y p(y)^2$, or at least the same activity:

# %% tags=["nbval-ignore-output"]
twice = (p**2).sum().item()
same_activity = sum(value**2 for value in share.values())
print(f"same sentence: drawn {(mc[:, 0] == mc[:, 1]).double().mean():.3f}   exact {twice:.3f}")
print(f"same activity: drawn {(activity[mc[:, 0]] == activity[mc[:, 1]]).double().mean():.3f}   exact {same_activity:.3f}")
assert round(twice, 3) == 0.072 and round(same_activity, 2) == 0.53
assert abs((mc[:, 0] == mc[:, 1]).double().mean() - twice) < 0.01

# %% [markdown]
# Seven sets in a hundred hold a single sentence, and 53 % a single activity: from more than half of its sets of two the drafter learns nothing at all.
# How bad this is depends on how peaked the drafts are. The laws of 16 drafts that the stored experiment uses, without any training:

# %%
sharing = {}
for name in ("zipf", "zipf2", "meanings"):
    draft_p = draft_laws.draft_law(name)
    by_meaning = torch.zeros(16, dtype=torch.float64).index_add_(0, draft_laws.meaning_of(name), draft_p)
    sharing[name] = (draft_p.square().sum().item(), by_meaning.square().sum().item())
    print(f"{draft_laws.WORDS[name]:24} one distinct draft {sharing[name][0]:.3f}   one meaning {sharing[name][1]:.3f}")
assert abs(sharing["zipf2"][0] - 0.45) < 0.03 and abs(sharing["meanings"][0] - 0.20) < 0.05 and abs(sharing["meanings"][1] - 0.54) < 0.01

# %% [markdown]
# With $p \propto 1/\text{rank}^2$ 43 % of the sets hold one distinct draft; where four meanings have four wordings each, 16 % do, and 54 % share a meaning. (A policy on its way
# adds its own unevenness: over random policies near the reference the shares are a little different, see the stored table below.)

# %%
stored = results.load("samplers")
table = sampler_figures.cells(stored)
for row, metric in (("mc-2[zipf2]", "one_draft"), ("mc-2[meanings]", "one_draft"), ("mc-2[meanings]", "one_meaning")):
    cell = table[row, metric]
    print(f"{row:16} {metric:12} {cell['value']:.3f} [{cell['ci_low']:.3f}, {cell['ci_high']:.3f}]")
assert abs(table["mc-2[zipf2]", "one_draft"]["value"] - 0.45) < 0.06 and abs(table["mc-2[meanings]", "one_draft"]["value"] - 0.20) < 0.04
assert round(sharing["zipf2"][0], 2) == 0.43 and round(sharing["meanings"][0], 2) == 0.16 and round(sharing["meanings"][1], 2) == 0.54

# %% [markdown]
# ## What to do with repeats
#
# A draft that was drawn $m$ times may count once ("dropped"), $m$ times ("counted"), or $m / (k\,p(y))$ times (*importance weights*: likely drafts come up more often, so
# each of their draws weighs less). On average over sets, $P_A(z) = \sum_y \text{weight}(y)\, p(y)\, p(z|y)$ has the weights
#
# $$\text{dropped: } 1-(1-p(y))^k, \qquad \text{counted: } k\,p(y), \qquad \text{importance: } 1.$$
#
# Only ratios of $P_A$ matter for the loss, so look at the share of "yes" among the answers that the average set expects. The truth is the share under all sentences.


# %%
def share_of_yes(weight):
    """P_A(yes) / (P_A(yes) + P_A(no)) when sentence y has this weight."""
    return ((weight * p * p_yes).sum() / (weight * p).sum()).item()


truth = share_of_yes(torch.ones_like(p))
counted = share_of_yes(p)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
dropped = [share_of_yes(1 - (1 - p) ** k) for k in SIZES]
likeliest = [share_of_yes((torch.arange(len(p)) < k).double()) for k in SIZES]
print(f"all sentences {truth:.3f}; repeats counted, any k: {counted:.3f}")
print("repeats dropped:", dict(zip(SIZES, (round(value, 3) for value in dropped))))
assert abs(dropped[-1] - truth) < 0.02 and truth - counted > 0.06
assert round(truth, 3) == 0.413 and round(counted, 3) == 0.332

# %%
figure, (ax,) = figures.new_figure(height=3.3)
curves = (
    ("top-k", likeliest),
    ("MC, repeats counted", [counted] * len(SIZES)),
    ("MC, repeats dropped", dropped),
    ("MC, importance weights", [truth] * len(SIZES)),
)
for style, (label, values) in zip(figures.line_styles(4), curves):
    ax.plot(SIZES, values, label=label, **style)
ax.set(xscale="log", xlabel="k", ylabel="share of yes, average set", ylim=(0.28, 0.43))
ax.set_xticks(SIZES, [str(k) for k in SIZES])
ax.minorticks_off()
ax.legend(frameon=False, loc="lower right")
figures.show(
    figure,
    alt="share of yes against k: counting repeats stays at 0.332 for every k; dropping them rises from 0.332 to the truth, 0.413; importance weights are "
    "at the truth for every k; top-k starts at 0.3 and rises late",
)

# %% [markdown]
# Counting repeats never gets better: the average set at $k = 256$ is that at $k = 1$. As $k$ grows, $P_A/k$ tends to $\sum_y p(y)^2\, p(z|y)$, in which likely drafts count twice
# over. It is not an estimate that needs more draws, it is an estimate of something else. Dropping repeats starts at the same place and gets there in the end.
# Importance weights are right on average for every $k$, but with single sets scattered widely.
#
# ## Drawing without replacement: the Gumbel trick
#
# Why draw a repeat at all? Add to each $\log p(y)$ an independent Gumbel number, $-\log(-\log u)$ with $u$ uniform. Two facts:
#
# 1. The largest perturbed log-probability belongs to $y$ with probability $p(y)$: an exact sample.
# 2. The $k$ largest are an exact sample of $k$ *without replacement*: the second is drawn from $p$ with the first one taken out, and so on.
#
# We try it on the full list of sentences, 2000 times.

# %% tags=["nbval-ignore-output"]
generator = torch.Generator().manual_seed(1)
listed = []
for _ in range(4):  # 500 at a time, for the sake of memory
    uniform = torch.rand(500, len(law), generator=generator, dtype=torch.float64)
    listed.append((law.log_probs - (-uniform.log()).log()).topk(2, dim=1).indices)
listed = torch.cat(listed)
print(f"{text(law.token_ids[0])} is the largest in {(listed[:, 0] == 0).double().mean():.3f} of the trials, p = {p[0]:.3f}")
after = listed[listed[:, 0] == 0, 1]
print(f"{text(law.token_ids[1])} comes next in {(after == 1).double().mean():.3f} of these, p / (1 - p of the first) = {p[1] / (1 - p[0]):.3f}")
assert abs((listed[:, 0] == 0).double().mean() - p[0]) < 0.04 and abs((after == 1).double().mean() - p[1] / (1 - p[0])) < 0.06

# %% [markdown]
# A real model cannot list its sentences. *Stochastic beam search* (Kool, van Hoof and Welling 2019) finds the same $k$ largest word by word: the maximum over all sentences that
# begin with some words is again a Gumbel number, so it draws that first, and the numbers of longer and longer beginnings under the condition that their maximum is what was drawn.
# It keeps $k$ beams and reads nothing else.

# %% tags=["nbval-ignore-output"]
none = torch.zeros(SETS, 1, dtype=torch.float64)
start = -torch.empty(SETS, 1, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(3)).log()
beams = stochastic_beam_tokens(
    model, *word_lm.prompts(SETS), k=K + 1, log_probs=none, gumbels=start, max_new_tokens=LONGEST, eos_token_id=STOP,
    pad_token_id=STOP, generator=torch.Generator().manual_seed(2),
)  # fmt: skip
gumbel = torch.tensor([[law.place[word_lm.until_stop(ids)] for ids in row] for row in beams.token_ids.tolist()])
assert (gumbel.sort(1).values.diff(dim=1) > 0).all()
print("one set of two:", [text(law.token_ids[i]) for i in gumbel[0, :K].tolist()])
print("no repeats in", len(gumbel), "sets")

# %% [markdown]
# The exact probability that a sentence is among the first two: it comes first, or another one does and it comes second,
# $\pi(y) = p(y) + p(y) \sum_{b \ne y} \frac{p(b)}{1 - p(b)}$. The picture divides it by $2\,p(y)$, how often the sentence comes up in two independent draws. Lines are exact,
# dots are the sets that were drawn, with 95 % bars.

# %%
odds = p / (1 - p)
inclusion = p + p * (odds.sum() - odds)
assert abs(inclusion.sum() - K) < 1e-9  # two places to fill
number = list(range(8))
figure, (ax,) = figures.new_figure(width=7.0, height=3.4)
for style, (label, sets, exactly) in zip(
    figures.line_styles(2), (("Gumbel", gumbel[:, :K], inclusion), ("MC", mc, 1 - (1 - p) ** K))
):
    line = style | {"marker": None, "label": f"{label}, exact"}
    ax.plot(number, (exactly / (K * p))[:8], **line)
    bars = [1.96 * (exactly[i] * (1 - exactly[i]) / SETS).sqrt() / (K * p[i]) for i in number]
    drawn_share = [in_sets(sets, i) / (K * p[i]) for i in number]
    look = {"color": style["color"], "fmt": style["marker"], "capsize": 2, "label": f"{label}, {SETS} sets"}
    ax.errorbar([i + (0.06 if label == "MC" else -0.06) for i in number], drawn_share, bars, **look)
ax.set_xticks(number, [text(law.token_ids[i])[:-1] for i in number], rotation=30, ha="right", fontsize=8)
ax.set(ylabel="P(in a set of two) / 2p", ylim=(0.8, 1.15))
ax.legend(frameon=False, ncols=2, loc="upper left")
worst = max(abs(in_sets(gumbel[:, :K], i) - inclusion[i].item()) for i in number)
assert worst < 4 * (0.25 / SETS) ** 0.5 and (inclusion > 1 - (1 - p) ** K).all()
figures.show(figure, alt="inclusion probability over 2p for the eight likeliest sentences: Gumbel rises from 0.91 to 1.03, Monte Carlo from 0.89 to 0.99; nearly all bars reach their lines")

# %% [markdown]
# Gumbel's line lies above Monte Carlo's for every sentence: no place is wasted on a repeat. Still, likely sentences are in the set too often for an unbiased sum. The
# *Horvitz-Thompson* weight is 1 over the probability of being included. Kool et al. use the one given the $(k+1)$-th perturbed value, the
# threshold that the others passed, which is why we asked the search for three:

# %% tags=["nbval-ignore-output"]
inside = gumbel[:, :K]
weights = (-log_inclusion(p.log()[inside], beams.gumbels[:, K])).exp()
estimates = {"all answers": (weights * p[inside]).sum(1), "yes": (weights * p[inside] * p_yes[inside]).sum(1)}
goals = {"all answers": 1.0, "yes": (p * p_yes).sum().item()}
for name, values in estimates.items():
    error = values.std() / SETS**0.5
    print(f"{name:12} mean of the estimates {values.mean():.3f} +- {error:.3f}, exact {goals[name]:.3f}")
    assert abs(values.mean() - goals[name]) < 4 * error
plain = p[inside].sum(1).mean()
print(f"without weights the set holds {plain:.3f} of the probability")
assert round(plain.item(), 2) == 0.14

# %% [markdown]
# Right on average, although a set holds only 14 % of the probability. But the loss contains the *logarithm* of $P_A$, and the log of an unbiased estimate is too small on average (Jensen's inequality), the more so the more the
# estimate scatters. On one system of 16 drafts all 256 sets of two draws can be summed, with no chance left:

# %%
one = draft_laws.draw("zipf", 1, torch.Generator().manual_seed(0))
draft_p, answer_p = one.log_y[0].exp(), one.log_z[0].exp()
first_draw, second_draw = (grid.flatten() for grid in torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"))
chance = draft_p[first_draw] * draft_p[second_draw]
estimate = (answer_p[first_draw] + answer_p[second_draw]) / 2  # weights m / (k p): p(y) cancels
exactly = draft_p @ answer_p
print("mean estimate - exact:", [f"{value:+.4f}" for value in ((chance @ estimate - exactly).round(decimals=9) + 0.0).tolist()])
print("mean log - log exact: ", [f"{value:+.4f}" for value in (chance @ estimate.log() - exactly.log()).tolist()])
assert (chance @ estimate - exactly).abs().max() < 1e-12 and (chance @ estimate.log() < exactly.log() - 0.02).all()

# %% [markdown]
# ## Bias, variance and direction, under five laws
#
# Which way trains best? The experiment `run samplers` measures it exactly on systems of 16 drafts and 4 answers: loss and gradient with a set $A$ against loss and gradient with
# all drafts. Five laws: drafts with probabilities $1/\text{rank}$, $1/\text{rank}^2$, four meanings with four wordings each, and two in which the best answer hides behind the unlikely half of the drafts
# ("tail") or the likely half ("head"). "DBS" on a table means top-k, the best wording of each meaning first.
#
# A short live run: one law, 40 systems, 32 sets each.

# %% tags=["nbval-ignore-output"]
systems = draft_laws.draw("zipf", 40, torch.Generator().manual_seed(5))
policy = draft_sets.Shift.random(systems, 0.5, torch.Generator().manual_seed(6)).policy(systems)
live = {row: {name: values.mean().item() for name, values in found.items()} for row, found in experiment.estimators(systems, policy, 7, 32, 0.5)}
names = ("loss_error", "cosine_single", "cosine_mean")
for row in ("dbs-2[zipf]", "mc-2[zipf]", "mc-5[zipf]", "gumbel-2[zipf]", "mc-count-limit[zipf]"):
    print(f"{row:22}", {name: (round(live[row][name], 2), round(table[row, name]["value"], 2)) for name in names})
assert all(abs(live[row][name] - table[row, name]["value"]) < 0.12 for row in live for name in names[1:])
assert all(abs(live[row]["loss_error"] - table[row, "loss_error"]["value"]) < 0.02 for row in live)

# %% [markdown]
# Each pair shows the live number and the stored one (3 seeds of 86 systems). Now all five laws, all estimators, from the stored run. *One set* is
# the cosine of a single set's gradient to the exact gradient; *mean of sets* that of the gradient averaged over draws. The first tells about a short training, the second
# about where a long one heads. (The bias is measured over 32 draws and keeps some of their noise.)

# %%
def compact(figure, width, height):
    """The same figure for a page: smaller, with thinner lines."""
    figure.set_size_inches(width, height)
    for ax in figure.axes:
        ax.tick_params(labelsize=8)
        ax.title.set_fontsize(8)
        ax.yaxis.label.set_size(8)
        for line in ax.lines:
            line.set(markersize=3.5, linewidth=1.4)
    return figure


figures.show(
    compact(sampler_figures.plot_estimators(stored), 8.2, 6.0),
    alt="bias and variance of the loss, cosine of one set and of the mean of sets, against k from 1 to 16, for five laws and six estimators: DBS has no variance "
    "and the largest bias; Gumbel lies between DBS and Monte Carlo in one set, and with Horvitz-Thompson weights leads in the mean; counting repeats levels off below 1",
)

# %% [markdown]
# Four things to see, each with its numbers below.
#
# 1. **Counting repeats does not converge.** Its limit has a loss error of about .013 and a cosine of .89 under $1/\text{rank}$.
# 2. **Gumbel top-k beats both kinds of Monte Carlo** on loss error and both cosines, for $k = 2$ to 8, under all laws.
# 3. **Low variance, permanent bias.** Under $1/\text{rank}$ one top-2 set points better than one set of five draws (.72 against .71), but sets of two draws, averaged, point better than it (.77): top-2
#    is the same set each time, and averaging does not help.
# 4. **The law decides.** Under $1/\text{rank}^2$ top-2 is good (.91); with the reward in the tail it is bad (.28).


# %%
def stored_value(row, metric):
    """A number of the stored table."""
    return table[row, metric]["value"]


limit = {name: stored_value("mc-count-limit[zipf]", name) for name in ("loss_error", "cosine_single")}
wins, of = sampler_figures.gumbel_wins(stored)
print("counting repeats, limit:", {name: round(value, 3) for name, value in limit.items()})
print(f"Gumbel ahead of Monte Carlo in {wins} of {of} comparisons")
for row in ("dbs-2[zipf]", "mc-5[zipf]", "mc-2[zipf]", "dbs-2[zipf2]", "dbs-2[tail]", "mc-2[tail]"):
    print(f"{row:14} one set {stored_value(row, 'cosine_single'):.2f}   mean of sets {stored_value(row, 'cosine_mean'):.2f}")
assert abs(limit["loss_error"] - 0.014) < 0.002 and abs(limit["cosine_single"] - 0.892) < 0.02 and wins == of == 120
assert stored_value("dbs-2[zipf]", "cosine_single") > stored_value("mc-5[zipf]", "cosine_single")
assert stored_value("dbs-2[zipf]", "cosine_mean") < stored_value("mc-2[zipf]", "cosine_mean")
assert round(stored_value("dbs-2[zipf2]", "cosine_mean"), 2) == 0.91 and round(stored_value("dbs-2[tail]", "cosine_mean"), 2) == 0.28

# %% [markdown]
# The log of an unbiased estimate, again: weights remove most of the bias in the direction (at $k = 5$ the averaged cosine is .96 with importance, .98 with Horvitz-Thompson weights), but
# trained on, they overshoot. 60 systems whose reward hides in the tail, 250 steps; the target is the reward of the exact optimum:

# %% tags=["nbval-ignore-output"]
tail = draft_laws.draw("tail", 60, torch.Generator().manual_seed(8))
goal = exact.expected_reward(exact.tilt(draft_sets.Shift.none(tail).marginal(tail), tail.reward, 0.5), tail.reward)
overshoot = {}
for name, k in (("exact", 16), ("gumbel", 2), ("gumbel-ht", 2), ("mc-importance", 2)):
    shift = draft_sets.train(tail, name, k, 250, 4, torch.Generator().manual_seed(9))
    overshoot[name] = (exact.expected_reward(shift.marginal(tail), tail.reward) - goal).mean().item()
    print(f"{sampler_figures.NAMES.get(name, 'all drafts'):28} reward - target {overshoot[name]:+.4f}   (target {goal.mean():.3f})")
assert abs(overshoot["exact"]) < 1e-3 and overshoot["gumbel"] < 0 < min(overshoot["gumbel-ht"], overshoot["mc-importance"]) < 0.05
assert round(stored_value("mc-importance-5[zipf]", "cosine_mean"), 2) == 0.96 and round(stored_value("gumbel-ht-5[zipf]", "cosine_mean"), 2) == 0.98

# %% [markdown]
# ## Does DBS train better than Monte Carlo?
#
# The paper reports for its two language models a win rate over the start of 68.5 with DBS at $k = 2$ and 68.2 at $k = 4$, against 66.8, 67.0, 66.7 and 66.0 with Monte Carlo at $k = 2, 3, 4, 5$:
# DBS above MC, and flat in $k$. It decodes greedily. In our tables we can decode both ways. A short live run first: drafts with meanings, 64 systems, 40 steps of one set:

# %% tags=["nbval-ignore-output"]
few = draft_laws.draw("meanings", 64, torch.Generator().manual_seed(10))
options = {"short_steps": 40, "short_sets": 1, "lr": 0.05, "beta": 0.5}
runs = {row.split("[")[0]: found for row, found in experiment.trainings(few, "short", "", 11, options)}
for arm in ("dbs-2", "mc-2", "mc-5", "gumbel-2", "exact"):
    print(f"{arm:9} greedy {100 * runs[arm]['wr_greedy'].mean():.1f}   sampled {100 * runs[arm]['wr_sampled'].mean():.1f}   gap {runs[arm]['gap'].mean():.2f}")
assert runs["dbs-2"]["wr_greedy"].mean() > runs["mc-2"]["wr_greedy"].mean() - 0.01
assert runs["exact"]["wr_sampled"].mean() > runs["dbs-2"]["wr_sampled"].mean()

# %% [markdown]
# Now the stored run with 258 systems a law. Long training first: greedy decoding in the upper row, sampled in the lower one.

# %%
LONG = [f"{name},long" for name in draft_laws.LAWS]
figures.show(
    compact(sampler_figures.plot_win_rates(stored, LONG, bars=("dbs-2", "dbs-4", "mc-2", "mc-5")), 8.0, 4.0),
    alt="win rates of DBS-2, DBS-4, MC-2 and MC-5 after long training under five laws; greedy: DBS slightly above MC in three laws, far below in the tail law, all equal "
    "in the head law; sampled: DBS below MC everywhere",
)

# %% [markdown]
# Upper row, first three laws: both of the paper's trends, DBS a little above MC, and everything nearly flat in $k$. The lower row has the opposite order, everywhere. And when the good
# answer hides behind unlikely drafts, DBS loses under both ways of decoding. The paired differences with their intervals, for all trainings:

# %%
SETTINGS = sampler_figures.settings_of(stored)
figures.show(
    compact(sampler_figures.plot_order(stored, SETTINGS), 6.6, 4.4),
    alt="DBS-2 minus MC-2 in points for thirteen trainings: greedy above 0 in eight, below in the three long trainings of the tail law; sampled below 0 in eleven",
)

# %%
greedy, sampled = (sampler_figures.orders(stored, metric) for metric in ("wr_greedy", "wr_sampled"))
print("greedy: ", {verdict: len(found) for verdict, found in greedy.items()}, "below:", greedy["below"])
print("sampled:", {verdict: len(found) for verdict, found in sampled.items()}, "above:", sampled["above"])
assert (len(greedy["above"]), len(greedy["below"])) == (8, 3) and all(found.startswith("tail,long") for found in greedy["below"])
assert (len(sampled["above"]), len(sampled["below"])) == (1, 11) and sampled["above"] == ["zipf2,short"]
pair = sampler_figures.differences(stored)
changes = [100 * pair[f"dbs-4[{s}]", f"dbs-2[{s}]", "wr_greedy"]["value"] for s in LONG if not s.startswith("tail")]
print("DBS-4 minus DBS-2, greedy, long, without the tail law:", [round(change, 1) + 0.0 for change in changes])
assert max(map(abs, changes)) < 0.5

# %% [markdown]
# Greedily DBS-2 is ahead of MC-2 in 8 of 13 trainings, and behind in 3, all of them long trainings with the reward in the tail. Sampled it is ahead in 1 and behind in 11.
# Greedy decoding reads only the likeliest draft, which top-k trains at every step; the drafts that top-k never trains do not show. Sampling reads them all. Trained on the drafter
# alone, with the reward in the tail, the difference is stark:

# %%
alone = {arm: stored_value(f"{arm}[tail,long,psi1]", "reward") for arm in ("dbs-2", "mc-2", "exact")}
print("reward, drafter alone:", {arm: round(value, 2) for arm, value in alone.items()}, f"target {stored_value('target[tail]', 'reward'):.2f}")
very_short = pair["dbs-2[tail,short]", "mc-2[tail,short]", "wr_greedy"]
print(f"short training, greedy: DBS-2 - MC-2 = {100 * very_short['value']:+.1f} points")
assert round(alone["dbs-2"], 2) == 0.54 and round(alone["mc-2"], 2) == 1.70 and round(alone["exact"], 2) == 1.72 and very_short["ci_low"] > 0.05

# %% [markdown]
# 0.54 with top-2 against 1.70 with two draws: what is never in the set is never learned. (After a short training DBS still leads greedily, by 8.0 points: Monte Carlo had no time to find the
# tail.)
#
# **What the paper's figures can and cannot say.** They come from 193 instructions. One win rate of 68.5 % then has a standard error of 3.3 points; the distance to 66.8 is 1.7.

# %%
rate, items = 0.685, 193
error = (rate * (1 - rate) / items) ** 0.5
difference = 0.685 - 0.668
needed = 2 * rate * (1 - rate) * (1.96 / difference) ** 2
print(f"standard error {100 * error:.1f} points; of a difference of two such rates {100 * 2**0.5 * error:.1f}; z = {difference / (2**0.5 * error):.2f}")
print(f"instructions an arm for an interval of +- {100 * difference:.1f} points: {needed:.0f}")
assert round(100 * error, 1) == 3.3 and difference / (2**0.5 * error) < 0.5 and 5000 < needed < 6500
assert round(100 * very_short["value"], 1) == 8.0

# %% [markdown]
# So 68.5 cannot be told from 66 to 67 with 193 instructions (if both arms answered the same instructions and paired answers agree often, somewhat fewer than 5,700 would do; the paired
# answers are not published). Our tables reproduce both trends where the reward is not tied to the likelihood of a draft, with hundreds of systems and paired intervals, and show where they turn around.
# That is what can be said.
#
# ## Exercises: a search of your own
#
# Exercises 1 to 5 are the five steps of diverse beam search; each builds on those before, so solve them in order. A beam is `Beam(words, log_prob, score)`: `words` a tuple of token ids,
# `log_prob` the model's own log-probability, `score` the same minus the penalties paid. Token 0 (`STOP`) is the full stop.
#
# ### Exercise 1: What comes next?
#
# **Difficulty** 1/5 · **importance** 4/5 · **minutes** 5
#
# Write `next_log_probs(model, words)`: the log-probabilities of the next word after a tuple of words, shape (V,). `model(ids).logits` has shape (B, P, V) for ids (B, P): at each
# position the logits of the word after it. A sentence starts after a full stop: the model must read `STOP` first.
#
# <details><summary>Hint 1</summary>
#
# The batch has one row. Which of its positions is the last?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Logits are log-probabilities plus some constant; `log_softmax` removes it. Over which axis?
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "next-log-probs", "locked": false, "schema_version": 3, "solution": true, "task": false}
def next_log_probs(model, words):
    """log p(next word | words), nats, shape (V,)."""
    ### BEGIN SOLUTION
    ids = torch.tensor([[STOP, *words]])
    return model(ids).logits[0, -1].log_softmax(-1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "next-log-probs-test", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.lesson_06.check_next_log_probs(next_log_probs)
### BEGIN HIDDEN TESTS
after_four = next_log_probs(word_lm.WordLM(), (1, 4, 7, 10))
assert after_four[STOP] == 0 and torch.isinf(after_four[1:]).all(), "after four words the model stops"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* All that a search ever asks a language model is this.
#
# ### Exercise 2: The fine
#
# **Difficulty** 1/5 · **importance** 5/5 · **minutes** 5
#
# Write `penalised(log_probs, taken, penalty)`: the log-probabilities after the fine. `taken` is a list of words, with repeats, that earlier groups took at this step. `log_probs` has shape
# (V,) or (m, V), a row for each beam; each row is fined alike.
#
# <details><summary>Hint 1</summary>
#
# How often is each word in the list? `torch.bincount` counts.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `torch.bincount` wants a tensor of whole numbers, also when the list is empty (`dtype=torch.long`), and a `minlength`.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "penalised", "locked": false, "schema_version": 3, "solution": true, "task": false}
def penalised(log_probs, taken, penalty):
    """log_probs - penalty x how often each word was taken; same shape."""
    ### BEGIN SOLUTION
    times = torch.bincount(torch.tensor(taken, dtype=torch.long), minlength=log_probs.shape[-1])
    return log_probs - penalty * times
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "penalised-test", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.lesson_06.check_penalised(penalised)
### BEGIN HIDDEN TESTS
assert penalised(torch.zeros(3), [2, 2], 5.0).tolist() == [0.0, 0.0, -10.0], "two groups took word 2"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* This line is the whole difference between diverse and ordinary beam search.
#
# ### Exercise 3: One word further
#
# **Difficulty** 2/5 · **importance** 4/5 · **minutes** 10
#
# Write `extend(beams, log_probs, scores, width)`. `beams` is a list of m `Beam`s of one group; `log_probs` (m, V) are the model's own, `scores` (m, V) the penalised ones. Extend every beam by every
# word and return the best 2 x width of all as a list of `Beam`s, best `score` first. (Twice as many as needed: some may have ended.)
#
# <details><summary>Hint 1</summary>
#
# The two numbers of a beam grow separately: one by the model's own log-probability, the other by the penalised one.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Two loops and `sorted(..., key=..., reverse=True)`; `.item()` or `.tolist()` makes numbers of tensors.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "extend", "locked": false, "schema_version": 3, "solution": true, "task": false}
def extend(beams, log_probs, scores, width):
    """The 2 x width best extensions by one word, a list of Beams, best score first."""
    ### BEGIN SOLUTION
    longer = []
    for beam, own, fined in zip(beams, log_probs.tolist(), scores.tolist()):
        for word in range(len(own)):
            longer.append(Beam((*beam.words, word), beam.log_prob + own[word], beam.score + fined[word]))
    return sorted(longer, key=lambda beam: beam.score, reverse=True)[: 2 * width]
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "extend-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_06.check_extend(extend)
### BEGIN HIDDEN TESTS
longer = extend([Beam((1,), -1.0, -3.0)], torch.tensor([[-1.0, -2.0]]), torch.tensor([[-5.0, -2.0]]), 1)
assert longer[0] == Beam((1, 1), -3.0, -5.0), "word 1 is better after the fine; log_prob and score grow separately"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Reporting the penalised score as a log-probability is the commonest mistake in code that trains on the results: every posterior is wrong then.
#
# ### Exercise 4: What has ended
#
# **Difficulty** 2/5 · **importance** 3/5 · **minutes** 10
#
# Write `sort_out(extensions, width)` for a list as exercise 3 returns it, best first. Return two lists: the sentences **among the first `width`** that end with `STOP`, and the first `width`
# extensions **of the whole list** that do not.
#
# <details><summary>Hint 1</summary>
#
# `beam.words[-1]` is the last word.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The first list looks at `extensions[:width]`, the second at all of them, and is cut afterwards.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "sort-out", "locked": false, "schema_version": 3, "solution": true, "task": false}
def sort_out(extensions, width):
    """(ended, going): two lists of Beams, in the order in which they came."""
    ### BEGIN SOLUTION
    ended = [beam for beam in extensions[:width] if beam.words[-1] == STOP]
    going = [beam for beam in extensions if beam.words[-1] != STOP]
    return ended, going[:width]
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "sort-out-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_06.check_sort_out(sort_out)
### BEGIN HIDDEN TESTS
pieces = [Beam((1, 0), -1.0, -1.0), Beam((1, 2), -2.0, -2.0), Beam((1, 3), -3.0, -3.0), Beam((2, 0), -4.0, -4.0)]
assert sort_out(pieces, 2) == ([pieces[0]], [pieces[1], pieces[2]]), "one ended in the first two; two others go on"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* If an ended sentence took a beam's place away, groups would get narrower at each full stop.
#
# ### Exercise 5: The search
#
# **Difficulty** 4/5 · **importance** 5/5 · **minutes** 25
#
# Write `diverse_search(model, groups, width, penalty, longest)`: for each group a list of its `width` best sentences (`Beam`s, best score first). Each group starts with one empty beam,
# `Beam((), 0.0, 0.0)`. At each of at most `longest` steps the groups take turns, in order. A group that has not finished
#
# 1. scores its beams' next words, with the fine for what earlier groups took **at this step** (empty for the first group);
# 2. extends, sorts out, and adds what ended to **its own** list of sentences, of which it keeps the `width` best;
# 3. announces the last words of its beams that go on (all of them, never the full stop);
# 4. has finished if it holds `width` sentences and the worst of them scores at least as high as the best extension of this step.
#
# A finished group chooses and announces nothing. After the last step the open beams of groups that have not finished count as sentences too. Leave out beams of score `-inf`.
#
# <details><summary>Hint 1</summary>
#
# Keep three things for each group: open beams, sentences, whether it has finished. The list of taken words starts empty at each step.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# One helper that does a group's turn and returns the announced words makes the rest three short loops. `torch.stack` makes (m, V) of m rows.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "diverse-search", "locked": false, "schema_version": 3, "solution": true, "task": false}
def diverse_search(model, groups, width, penalty, longest):
    """The width best sentences of each group: a list of lists of Beams, best score first."""
    ### BEGIN SOLUTION
    state = [{"open": [Beam((), 0.0, 0.0)], "ended": [], "finished": False} for _ in range(groups)]

    def keep(group, beams):
        possible = [beam for beam in beams if beam.score > -math.inf]
        group["ended"] = sorted(group["ended"] + possible, key=lambda beam: beam.score, reverse=True)[:width]

    for _ in range(longest):
        taken = []
        for group in state:
            if group["finished"]:
                continue
            own = torch.stack([next_log_probs(model, beam.words) for beam in group["open"]])
            extensions = extend(group["open"], own, penalised(own, taken, penalty), width)
            ended, group["open"] = sort_out(extensions, width)
            keep(group, ended)
            taken = taken + [beam.words[-1] for beam in group["open"]]
            full = len(group["ended"]) == width
            group["finished"] = full and group["ended"][-1].score >= extensions[0].score
    for group in state:
        if not group["finished"]:
            keep(group, group["open"])
    return [group["ended"] for group in state]
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "diverse-search-test", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
checks.lesson_06.check_diverse_search(diverse_search)
### BEGIN HIDDEN TESTS
two = diverse_search(word_lm.WordLM(), 2, 1, 20.0, 5)
assert [text(group[0].words) for group in two] == ["walk along rivers.", "swim in lakes."], "two groups, the paper's penalty"
assert two[1][0].log_prob >= two[1][0].score, "a fine lowers the score, never the log-probability"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* You have written what transformers removed from its core and what the paper's best row uses.
#
# **Your search against the library's**, for penalties from 0 to 20, one to five groups of one to three beams: the same sentences, the same log-probabilities, the same scores.

# %%
compared = 0
for penalty in (0, 0.25, 0.5, 1, 1.5, 2, 3, 5, 10, 20):
    for groups, width in ((1, 1), (2, 1), (4, 1), (5, 1), (1, 3), (2, 2), (3, 3)):
        mine = [beam for group in diverse_search(model, groups, width, penalty, LONGEST) for beam in group]
        theirs = library_search(groups, width, penalty)
        assert [beam.words for beam in mine] == [word_lm.until_stop(ids) for ids in theirs.token_ids[0].tolist()]
        assert torch.allclose(torch.tensor([beam.log_prob for beam in mine]), theirs.log_probs[0], atol=1e-4)
        assert torch.allclose(torch.tensor([beam.score for beam in mine]), theirs.scores[0], atol=1e-4)
        compared += len(mine)
print(compared, "sentences, all alike")

# %% [markdown]
# **Against brute force.** One wide group is ordinary beam search. Its sentences must be the top of the list of all sentences, if it is wide enough; and every log-probability must be the list's:

# %%
for width in (1, 2, 4, 8):
    (found,) = diverse_search(model, 1, width, 0.0, LONGEST)
    right = sum(beam.words == ids for beam, ids in zip(found, law.token_ids))
    print(f"{width} beams: the first {right} of {width} are those of the full list")
    assert right == width
for group in diverse_search(model, 4, 2, 1.0, LONGEST):
    assert all(abs(beam.log_prob - law.log_probs[law.place[beam.words]].item()) < 1e-9 for beam in group)

# %% [markdown]
# ### Exercise 6: Gumbel top-k
#
# **Difficulty** 2/5 · **importance** 4/5 · **minutes** 5
#
# Write `gumbel_top_k(log_p, uniform, k)`: the numbers of k different drafts, drawn without replacement with the help of `uniform`, one number in (0, 1) for each draft. The first drawn comes
# first; shape (k,).
#
# <details><summary>Hint 1</summary>
#
# A Gumbel number is $-\log(-\log u)$.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `topk` sorts, largest first.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "gumbel-top-k", "locked": false, "schema_version": 3, "solution": true, "task": false}
def gumbel_top_k(log_p, uniform, k):
    """k different drafts, first drawn first, shape (k,)."""
    ### BEGIN SOLUTION
    return (log_p - (-uniform.log()).log()).topk(k).indices
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "gumbel-top-k-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_06.check_gumbel_top_k(gumbel_top_k)
### BEGIN HIDDEN TESTS
tested = torch.rand(2000, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
hits = [int(gumbel_top_k(torch.tensor([0.6, 0.3, 0.1]).log(), u, 2)[0]) for u in tested]
assert abs(hits.count(0) / 2000 - 0.6) < 0.05, "the first is a sample from p"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* One line, no loop, no rejected repeats, and ahead of Monte Carlo under all five laws above.
#
# ### Exercise 7: Importance weights
#
# **Difficulty** 2/5 · **importance** 4/5 · **minutes** 5
#
# Write `importance_weights(drawn, p)`: `drawn` (k,) are the numbers of the drafts that k draws gave, `p` (Y,) their probabilities. Return the weight $m_y / (k\,p(y))$ of every draft, shape (Y,); 0 for
# one that was not drawn.
#
# <details><summary>Hint 1</summary>
#
# $m_y$ is how often draft y was drawn.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `torch.bincount(drawn, minlength=...)`.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "importance-weights", "locked": false, "schema_version": 3, "solution": true, "task": false}
def importance_weights(drawn, p):
    """m / (k p) of each draft, shape (Y,)."""
    ### BEGIN SOLUTION
    return torch.bincount(drawn, minlength=len(p)) / (len(drawn) * p)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "importance-weights-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_06.check_importance_weights(importance_weights)
### BEGIN HIDDEN TESTS
weighed = importance_weights(torch.tensor([1, 1, 0]), torch.tensor([0.5, 0.25, 0.25]))
assert torch.allclose((weighed * torch.tensor([0.5, 0.25, 0.25])).sum(), torch.tensor(1.0)), "p times weight sums to 1 in every set"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* The sum becomes right on average for every $k$; you pay with scatter, and the log in the loss makes a small bias of the scatter.
#
# ### Exercise 8: What repeats do
#
# **Difficulty** 3/5 · **importance** 4/5 · **minutes** 10
#
# Write `expected_set_probability(p, p_z, k, repeats)`: the mean of $P_A(z) = \sum_y \text{weight}(y)\, p(y)\, p(z|y)$ over all sets of k Monte-Carlo draws. `p` (Y,) are the drafts' probabilities,
# `p_z` (Y,) the probability of one answer behind each draft. With `repeats="drop"` a drawn draft has weight 1, with `"count"` as many as it was drawn. Return one number.
#
# <details><summary>Hint 1</summary>
#
# The mean of a sum is the sum of the means: only the mean weight of one draft is asked for.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# How often does a draft come up in k draws, on average? And with which probability at all?
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "expected-set-probability", "locked": false, "schema_version": 3, "solution": true, "task": false}
def expected_set_probability(p, p_z, k, repeats):
    """E P_A(z) over sets of k draws, repeats "drop" or "count"."""
    ### BEGIN SOLUTION
    weight = k * p if repeats == "count" else 1 - (1 - p) ** k
    return (weight * p * p_z).sum().item()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "expected-set-probability-test", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.lesson_06.check_expected_set_probability(expected_set_probability)
### BEGIN HIDDEN TESTS
fair, sure = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
assert abs(expected_set_probability(fair, sure, 50, "drop") - 1) < 1e-9, "with many draws every draft is in the set"
assert abs(expected_set_probability(fair, sure, 50, "count") - 25) < 1e-9, "k times the sum of squares"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* An estimate that stays wrong however many samples you pay for looks exactly like one that is slow.
#
# ## Recap
#
# - Drafts that lead to the same answers teach the drafter nothing. The likeliest sentences of a model are near-duplicates.
# - DBS: groups in turn, a fine for words that earlier groups took at the same step. Log-probabilities are the model's own; ending is free. It is greedy over groups and words, and different words
#   are not different meanings.
# - Monte Carlo repeats itself; counting repeats converges to something else; dropping them is right in the end; importance weights are right on average.
# - Gumbel top-k draws without replacement and beats both kinds of Monte Carlo in the middle range of $k$; Horvitz-Thompson weights make it unbiased. The log of an unbiased estimate is still biased.
# - Top-k and DBS: low variance, permanent bias. Decoded greedily, with the reward not tied to unlikely drafts, they win a little; sampled, or with the reward in the tail, they lose.
#
# **Limits.** On tables "DBS" is top-k, one wording of each meaning first; sizes of win rates do not carry over to language models, the order may. The word model has a history of one word. The
# paper's own comparison cannot be decided from 193 instructions; lesson 13 takes it up with language models.
#
# **Next**: lesson 07 asks who deserves the credit. **Further reading**: Vijayakumar et al. 2016, "Diverse Beam Search"; Kool, van Hoof and Welling 2019, "Stochastic Beams and Where to Find
# Them"; Horvitz and Thompson 1952, "A generalization of sampling without replacement from a finite universe"; Gumbel 1954, "Statistical theory of extreme values and some practical applications".
