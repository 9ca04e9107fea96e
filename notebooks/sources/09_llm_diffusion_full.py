# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 LLM + diffusion, full GPU run
#
# **What you will do**: prepare the run of Llama-3-8B-Instruct with Stable Diffusion 1.5, prove every part of it on stand-ins of the same classes, plan its memory and time,
# and read the paper's numbers with their uncertainty.
#
# **What you will learn**: what changes from the small system to the large one and what does not, how CLIP can judge a picture without training, what LoRA saves, how many sequences
# tell 65 % from 73 %, and what to watch while it runs.
#
# **What you need**: lesson 08. No GPU and no network to read and run this notebook; one 80 GB GPU and a network for the real run. **Minutes**: 35 to read, under a minute here; the real run: many hours.
#
# **Which output comes from where.** Everything that this notebook *executes* uses tiny random stand-ins, or counts without weights. Tables marked "tiny" come from the stored run of lesson 08. Numbers of the paper are marked as the
# paper's. Nothing here was measured at the paper's size: nobody has run that profile for this course yet.

# %%
import math
import tempfile
from pathlib import Path

import torch

from sysdpo_lab import figures, planning, preferences, profiles, results, training
from sysdpo_lab.coursework import checks
from sysdpo_lab.experiments import faces_paper, faces_rows, runner
from sysdpo_lab.widgets import SliderFigure, slider
from sysdpo_lab.worlds import clip_scorer, photos, stand_ins

# %% [markdown]
# ## What changes, what stays
#
# | | tiny (lesson 08) | paper |
# |---|---|---|
# | captions | own Llama, 0.3 M parameters, all trained | Llama-3-8B-Instruct, LoRA |
# | images | own U-Net, pixels in patches, all trained | Stable Diffusion 1.5, VAE latents, LoRA |
# | reference | a frozen copy | the base with its adapter off |
# | world | drawn faces and landscapes | photographs of people and places |
# | judge | measures pixels | CLIP zero-shot, or a regressor that you give |
# | experiment, rows, E8, loss, metrics | `run faces` | the same code |
#
# The commands differ in one word. The second one downloads 20 GB:
#
#     python -m sysdpo_lab run faces --profile tiny  --out runs/faces-tiny
#     python -m sysdpo_lab run faces --profile paper --out runs/faces-paper

# %%
paper = profiles.find("faces", "paper")
tiny = profiles.find("faces", "tiny")
changed = {key: (tiny.settings.get(key, "-"), value) for key, value in paper.settings.items() if tiny.settings.get(key) != value}
print(f"{'setting':16} {'tiny':>12}  paper")
for key, (small, large) in changed.items():
    print(f"{key:16} {str(small)[:12]:>12}  {large}")
assert paper.settings["pairs"] == 6000 and paper.settings["beta"] * paper.settings["weight"] == 2500

# %% [markdown]
# 6,000 comparisons and the two models are the paper's. Steps, rates, ranks and the weight are our choice: the paper does not say them, or they are not available to us. $\beta W = 2500$ is Diffusion-DPO's value. Anchors are off, as in the paper.
# The row `one-round` is the paper's SysDPO-Direct: both components on answers of the start. `joint` adds the second round of lesson 08.
#
# ## Requests, prompts, captions
#
# A user asks for a row of photographs. The language model gets the request as a chat; it must answer with one caption a line. Four styles of the prompt make the answers diverse; training always conditions on the plain one.

# %%
asked = photos.requests(torch.Generator().manual_seed(4), 4, "train")
for request in asked:
    print("-", photos.render(request))
print()
for message in photos.plain(photos.render(asked[0])):
    print(f"[{message['role']}] {message['content']}")

# %%
answer = "1. A portrait of a man, not happy.\n2. A portrait of a man, moderately happy.\n3. A portrait of a man, extremely happy."
captions = photos.parse_answer(answer)
print(captions)
assert len(captions) == 3 and captions[0] == "A portrait of a man, not happy." and photos.parse_answer(" \n") is None

# %% [markdown]
# Numbers and bullets are taken off. An answer with another number of lines than asked is *not* repaired: it has order consistency 0 and preference score -1, and stays in every mean.
#
# ## A judge without training
#
# CLIP (Radford et al. 2021) maps pictures and texts to unit vectors; pictures lie near the texts that describe them. The level of an attribute is which of two texts is nearer:
#
# $$a(z) = \frac{e^{s\cos(z, \text{high})}}{e^{s\cos(z, \text{low})} + e^{s\cos(z, \text{high})}} = \sigma\big(s\,[\cos(z, \text{high}) - \cos(z, \text{low})]\big).$$
#
# The scale $s$ was learned with the model; the published ones have 100.

# %%
request = photos.Request("portrait", (("happy", "more"),), "a man")
print("low text:  ", request.pairs[0][0])
print("high text: ", request.pairs[0][1])
directions = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]])  # four pictures between two texts
levels = clip_scorer.zero_shot(directions, low=torch.tensor([[1.0, 0.0]]), high=torch.tensor([[0.0, 1.0]]), scale=2.0)[:, 0]
print("levels:", [round(level, 3) for level in levels.tolist()])
assert torch.allclose(levels, torch.sigmoid(2 * torch.tensor([-1.0, -0.2, 0.2, 1.0])))

# %% [markdown]
# The scale matters. Cosines of real pictures with such texts differ by a few hundredths. The slider moves $s$: at 100 a difference of 0.02 already gives a level of 0.88, so levels crowd at 0 and 1 and the preference score becomes coarse; at
# 10 nothing leaves the middle. The *order* of levels, and so order consistency, does not depend on $s$ at all.


# %%
def plot_scale(scale):
    """Level against the difference of cosines."""
    figure, (ax,) = figures.new_figure(height=3.0)
    grid = torch.linspace(-0.08, 0.08, 161)
    ax.plot(grid, torch.sigmoid(scale * grid), color=figures.line_styles(1)[0]["color"], linewidth=2)
    level = torch.sigmoid(torch.tensor(scale * 0.02)).item()
    ax.plot(0.02, level, "o", color="black", markersize=7)
    ax.annotate(f"{level:.2f}", (0.02, level), (8, -12), textcoords="offset points")
    ax.set(xlabel="cos(picture, high) - cos(picture, low)", ylabel="level", ylim=(-0.03, 1.03), title=f"s = {scale}")
    return figure


view = SliderFigure(plot_scale, alt="at s = 100 the level rises from 0 to 1 within a difference of plus and minus 0.05; at 0.02 it is 0.88", scale=slider(100, 10, 200, 10))
view

# %%
assert abs(torch.sigmoid(torch.tensor(2.0)).item() - 0.88) < 0.005
print(f"level at a difference of 0.02 and s = 100: {torch.sigmoid(torch.tensor(2.0)).item():.2f}")

# %% [markdown]
# A judge that nobody trained for the task has faults: it likes props (an umbrella is "rain"), it reads written words in pictures, and its two texts differ in more than the attribute. Whoever has a regressor for their attributes should use it:
# `--set scorer=my_module:my_function`, a function of pictures (N, 3, H, W) and text pairs that returns levels (N, A). And because preferences and results come from the same judge, a gain may be a gain in its eyes only: look at the strips.
#
# ## The same classes, in small
#
# Stand-ins are random models of the real ones' classes, saved as folders in the hub's layout: a Llama with a chat template, a pipeline with CLIP text encoder, U-Net, VAE and PNDM scheduler, a CLIP. They say and draw nothing of sense. They prove the loaders, prompts, adapters and shapes.

# %%
work = tempfile.TemporaryDirectory()
named = stand_ins.write(work.name)
index = sorted(path.relative_to(work.name).as_posix() for path in Path(work.name).rglob("*.safetensors"))
print("settings:", sorted(named))
print("\n".join(index))
assert index == ["clip/model.safetensors", "model/model.safetensors", "pipeline/text_encoder/model.safetensors",
                 "pipeline/unet/diffusion_pytorch_model.safetensors", "pipeline/vae/diffusion_pytorch_model.safetensors"]  # fmt: skip

# %% [markdown]
# The system of the real run, built by the real function, from these folders:

# %%
changes = {**named, "dtype": "float32", "rank": 4, "ddim_steps": 3, "max_new_tokens": 16, "eval_batch": 16}
context = runner.Context(paper, paper.with_settings(changes), Path(work.name), say=lambda text: None, progress=False)
system = faces_paper.build_system(context)
world = faces_rows.world_of(context)
for name in system.order:
    component = system[name]
    total, trained = (sum(p.numel() for p in group) for group in (component.network.parameters(), component.trainable()))
    print(f"{name}: {type(component.network).__name__}, {component.kind}, {trained:,} of {total:,} parameters trained, reference: {component.strategy}")
assert [system[name].strategy for name in system.order] == ["adapter", "adapter"]

# %% [markdown]
# We ask it once. What a random model writes is no list of captions, so the answer is invalid, and counts as such.

# %%
words = world.render(request)
trace = system.sample({"x": [words]}, generator=torch.Generator().manual_seed(0))
verdict = world.judge(request, str(trace["captions"][0]), trace["images"][0])
print(f"request: {words}")
print(f"validity {verdict.validity:.0f}, preference score {verdict.preference_score:.0f}, order consistency {verdict.order_consistency:.0f}")
assert (verdict.validity, verdict.preference_score, verdict.order_consistency) == (0.0, -1.0, 0.0)

# %% [markdown]
# With captions in the right form the pictures are drawn, as **latents**: 4 x 64 x 64 numbers for a picture of 3 x 512 x 512 in the real pipeline, a 48th. Training needs only latents; the VAE decodes them for the judge's eyes alone.

# %%
captions = world.join_captions(world.oracle_captions(request))
(latents,) = system["images"].sample({"captions": [captions]}, generator=torch.Generator().manual_seed(0))
pictures = world.pictures(latents)
print(f"latents {tuple(latents.shape)}, pictures {tuple(pictures.shape)}; real: 3 x 4 x 64 x 64 and 3 x 3 x 512 x 512")
verdict = world.judge(request, captions, latents)
print(f"validity {verdict.validity:.0f}, levels measured by the random CLIP: {[round(v, 2) for v in world.scorer(pictures, request.pairs)[:, 0].tolist()]}")
assert verdict.validity == 1.0 and (3 * 512 * 512) / (4 * 64 * 64) == 48 and 0 <= pictures.min() and pictures.max() <= 1

# %% [markdown]
# Four steps of SysDPO-Direct, on pairs made by hand: captions in the asked order against the reverse order, each with pictures drawn from them. What must be true at any size: the loss starts at $\log 2$; both adapters move; the reference stays.

# %%
def side(texts, seed):
    """A whole trace of two rows: request, captions, latents."""
    rows = system["images"].sample({"captions": texts}, generator=torch.Generator().manual_seed(seed))
    return {"x": [words] * 2, "captions": texts, "images": rows}


backwards = world.join_captions(world.oracle_captions(request)[::-1])
pairs = preferences.Pairs.from_traces(side([captions] * 2, 1), side([backwards] * 2, 2))
before = [parameter.detach().clone() for parameter in system.trainable_parameters()]
history = training.train(
    system, pairs, training.direct(0.1), steps=4, lr=1e-2, batch_size=2, generator=torch.Generator().manual_seed(0)
)
moved = [bool((old != new).any()) for old, new in zip(before, system.trainable_parameters())]
print(f"loss at the start {history[0]['loss']:.4f} (log 2 = {math.log(2):.4f}); trained tensors that moved: {sum(moved)} of {len(moved)}")
print("shares after 4 steps are logged for", sorted(history[-1]["shares"]))
assert abs(history[0]["loss"] - math.log(2)) < 1e-4 and sum(moved) > 0.9 * len(moved)

# %%
fresh = faces_paper.build_system(context)
trace = {"x": [words], "captions": [captions], "images": [latents]}
noise = system.draw_noise(trace, generator=torch.Generator().manual_seed(5))
with torch.no_grad():
    policy, start = system.log_prob_terms(trace, noise), fresh.log_prob_terms(trace, noise)
    with system.reference():
        reference = system.log_prob_terms(trace, noise)
for name in system.order:
    print(f"{name}: reference equals a fresh start: {torch.allclose(reference[name], start[name])}; policy moved: {not torch.allclose(policy[name], start[name])}")
    assert torch.allclose(reference[name], start[name]) and not torch.allclose(policy[name], start[name])

# %% [markdown]
# ## Memory
#
# How large are the real models? Their *configurations* are enough: built on the "meta" device a network has shapes and no numbers. This counts parameters and operations without downloading a weight.

# %%
from diffusers import UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

with torch.device("meta"):
    unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)  # otherwise the defaults are SD 1.5's
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    )
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        unet(torch.zeros(1, 4, 64, 64), torch.zeros(1), encoder_hidden_states=torch.zeros(1, 77, 768))
count = {"U-Net": sum(p.numel() for p in unet.parameters()), "language model": sum(p.numel() for p in llama.parameters())}
flops = counter.get_total_flops()
print({name: f"{number / 1e9:.2f} billion" for name, number in count.items()}, f"one U-Net call at 512 x 512: {flops / 1e12:.2f} TFLOP")
assert all(abs(planning.PARAMETERS[name] / number - 1) < 0.01 for name, number in count.items()) and 0.5 < flops / 1e12 < 1.0

# %% [markdown]
# Training all weights needs, for each: the weight, its gradient, and two moments of Adam, all in fp32; and a second copy of the network as reference. LoRA trains a few millions and has no second copy. The bars hold the language model and the U-Net together, before activations.

# %%
rank = paper.settings["rank"]
lora = {name: planning.LORA[name] * rank for name in count}
full = {name: number * (2 + 2 + 16) / 1e9 for name, number in count.items()}  # base and reference in bf16, training state in fp32
small = {name: (2 * count[name] + 16 * lora[name]) / 1e9 for name in count}
print(f"LoRA of rank {rank}: {sum(lora.values()) / 1e6:.0f} million trained; {sum(small.values()):.0f} GB against {sum(full.values()):.0f} GB for full training with a reference copy")
assert 17 < sum(small.values()) < 20 and 170 < sum(full.values()) < 185
figure, (ax,) = figures.new_figure(height=2.4)
styles = figures.line_styles(2)
for place, parts in enumerate((full, small)):
    left = 0.0
    for style, hatch, (name, size) in zip(styles, ("", "//"), sorted(parts.items())):
        ax.barh(place, size, left=left, color=style["color"], hatch=hatch, edgecolor="white", label=name if place == 0 else None)
        left += size
    ax.annotate(f"{left:.0f} GB", (left, place), (4, -4), textcoords="offset points")
ax.axvline(80, color="0.3", linestyle=":", linewidth=1.5)
ax.set_yticks([0, 1], ["all weights,\nreference copy", "LoRA,\nadapter off"])
ax.set(xlabel="GB before activations (dotted: an 80 GB GPU)", xlim=(0, 205))
ax.legend(frameon=False, loc="upper right")
figures.show(figure, alt="two bars: full training with a reference copy needs 178 GB, far over the dotted 80 GB; LoRA needs about 18 GB")

# %% [markdown]
# Activations come on top; the largest single one is easy to overlook. The language model's logits have 128,256 columns: 32 texts of 350 tokens in fp32 are

# %%
logits = 32 * 350 * 128256 * 4 / 1e9
print(f"{logits:.1f} GB, and as much again for their gradient")
assert 5.6 < logits < 5.8

# %% [markdown]
# If memory runs out, lower `batch`; the loss is a mean over pairs.
#
# ## Time
#
# `python -m sysdpo_lab plan faces --profile paper` prints these counts. Hours depend on the machine: divide operations by what your GPU really does. An H200 promises 989 TFLOP/s in bf16; 20 to 50 % of that is usual. The slider moves that share; it covers the U-Net's calls (drawing for data
# and for evaluation, and training), of one seed. The language model, the VAE and CLIP come on top. **These are estimates from counts, not measurements.**


# %%
SEQUENCES = 6 * paper.settings["heldout"] * paper.settings["samples"] * planning.PICTURES  # pictures of six rows' evaluation
work_items = planning.faces_work(paper.settings)
CALLS = {
    "data": work_items["network calls to draw them"],
    "evaluation": SEQUENCES * paper.settings["ddim_steps"] * 2,
    "training": 2 * work_items["network calls of a training step"] * (paper.settings["steps_2"] * 3),  # a backward pass counts two
}


def plot_hours(percent):
    """Hours of the U-Net's calls at a share of the GPU's promise."""
    hours = {name: calls * flops / (989e12 * percent / 100) / 3600 for name, calls in CALLS.items()}
    figure, (ax,) = figures.new_figure(height=2.3)
    bars = ax.barh(list(hours), list(hours.values()), color=figures.line_styles(1)[0]["color"])
    ax.bar_label(bars, fmt="%.1f h", padding=3)
    ax.set(xlabel=f"hours a seed at {percent} % of 989 TFLOP/s", xlim=(0, 6))
    ax.invert_yaxis()
    return figure


view = SliderFigure(plot_hours, alt="at 30 percent drawing the data takes 1.7 hours, evaluation 0.7, and training 0.3", percent=slider(30, 10, 60, 5))
view

# %%
hours = {name: calls * flops / (989e12 * 0.3) / 3600 for name, calls in CALLS.items()}
print({name: f"{calls:,.0f} calls, {hours[name]:.1f} h" for name, calls in CALLS.items()})
assert hours["data"] > hours["evaluation"] > hours["training"] and 1 < sum(hours.values()) < 5

# %% [markdown]
# Drawing pictures costs more than training on them: thirty steps, twice for guidance, against one timestep. So data are drawn once, stored (a gigabyte of latents), and used by all rows. The run writes every stage; interrupted, the same command with `--resume` goes on to the same result.
#
# ## What to watch
#
# | look at | where | should | if not |
# |---|---|---|---|
# | loss at the first step | `history.jsonl` | 0.693 | reference and policy differ: dropout, other noise, an adapter that was not neutral |
# | validity, faithfulness | table | stay near the start's | anchor the captions (`--set anchor_captions=0.05`), lower `lr_captions` |
# | errors of winners and losers | figure `errors`, warnings | winners' not above the start's | lower `lr_images`, raise beta, anchor the images |
# | shares of the margin | figure `shares` | both components move | one is silent: change `weight` |
# | image drift | table | a few per cent | as for errors |
# | strips | figure `strips` | pictures people would prefer | the judge is being fooled |
#
# ## The paper's numbers, and how sure one can be
#
# The paper reports (preference score / order consistency): before -0.20 / 32 %, only the diffusion model - / 38 %, only the LLM 0.23 / 65 %, joint 0.25 / 73 %. How many sequences stand behind them is not known to us. The slider shows the 95 % intervals that each rate would have with $n$ sequences.

# %%
PAPER = {"before": 0.32, "only images": 0.38, "only captions": 0.65, "joint": 0.73}


def plot_intervals(n):
    """The paper's order consistency with the interval that n independent sequences would give (our assumption)."""
    figure, (ax,) = figures.new_figure(height=2.8)
    color = figures.line_styles(1)[0]["color"]
    for place, rate in enumerate(PAPER.values()):
        half = 1.96 * math.sqrt(rate * (1 - rate) / n)
        ax.plot([rate - half, rate + half], [place, place], color=color, linewidth=2)
        ax.plot(rate, place, "o", color=color, markersize=8)
    ax.set_yticks(range(4), list(PAPER))
    ax.set(xlabel=f"order consistency (the paper's values; intervals if n were {n})", xlim=(0, 1), ylim=(3.5, -0.5))
    return figure


view = SliderFigure(plot_intervals, alt="with 200 sequences the intervals of only captions and joint overlap, as do those of before and only images; the gap between the two groups is wide", n=slider(200, 50, 2000, 50))
view

# %%
def needed(p, q):
    """Sequences an arm to find the difference at the 5 % level four times in five (unpaired)."""
    return math.ceil((1.96 + 0.8416) ** 2 * (p * (1 - p) + q * (1 - q)) / (p - q) ** 2)


for a, b in (("before", "only captions"), ("only captions", "joint"), ("before", "only images")):
    print(f"{a:14} {PAPER[a]:.0%} against {b:14} {PAPER[b]:.0%}: {needed(PAPER[a], PAPER[b]):5} sequences an arm")
assert needed(0.32, 0.65) < 40 and 500 < needed(0.65, 0.73) < 540 and needed(0.32, 0.38) > 900

# %% [markdown]
# That captions matter is beyond doubt: 33 sequences would show it. That the joint system beats the aligned LLM (65 against 73 %) needs about 520 an arm; that training the diffusion model alone helps (32 against 38 %), about a thousand. Our profile draws 4 sequences for each of 200 requests and compares rows on the *same* requests and
# noise, which is sharper than these unpaired numbers.
#
# ## Beside the small system
#
# The same rows of the stored tiny run (three training seeds, held-out requests). The worlds, models and judges differ, so levels cannot be compared; the *order* can.

# %%
stored = results.load("faces-tiny")
ours = {row["system"]: row for row in stored["rows"] if row["metric"] == "order_consistency"}
names = {"before": "before", "only images": "only:images", "only captions": "only:captions", "joint": "joint"}
print(f"{'':15} {'paper':>6}   tiny [95 % interval]")
for name, row in ((name, ours[key]) for name, key in names.items()):
    print(f"{name:15} {PAPER[name]:6.0%}   {row['value']:.0%} [{row['ci_low']:.0%}, {row['ci_high']:.0%}]")
assert ours["before"]["value"] < ours["only:captions"]["value"] < ours["joint"]["value"]

# %% [markdown]
# In both, captions bring the larger part and the joint system is on top. What differs: in our table `joint` and `only:captions` have two rounds and anchors, the paper has one round and none (lesson 08 shows ours without, too).
#
# ## Exercises
#
# ### Exercise 1: Memory
#
# **Difficulty** 2/5 · **importance** 4/5 · **minutes** 10
#
# Write `training_memory(base, trained, weight_bytes, reference_copy)`: bytes before activations. The base has `base` weights of `weight_bytes` each; `trained` numbers are kept in fp32 with a gradient and Adam's state in fp32; with `reference_copy` there is a second copy of the base.
#
# <details><summary>Hint 1</summary>
#
# How many fp32 numbers belong to one trained parameter?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The number itself, its gradient, Adam's first and second moment.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "training-memory", "locked": false, "schema_version": 3, "solution": true, "task": false}
def training_memory(base, trained, weight_bytes, reference_copy):
    """Bytes before activations."""
    ### BEGIN SOLUTION
    copies = 2 if reference_copy else 1
    return copies * base * weight_bytes + 4 * 4 * trained
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "training-memory-test", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.lesson_09.check_training_memory(training_memory)
### BEGIN HIDDEN TESTS
assert training_memory(10, 0, 2, False) == 20, "a frozen model needs its weights only"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Adapter off as reference is what makes the run fit on one GPU.
#
# ### Exercise 2: The cost of a step
#
# **Difficulty** 2/5 · **importance** 3/5 · **minutes** 10
#
# Write `step_cost(batch, tokens, images, timesteps)`: a dict with `"tokens"` and `"network calls"` of one step of SysDPO-Direct, in forward passes, where a backward pass counts as two. `tokens` is the length of a prompt with its captions.
#
# <details><summary>Hint 1</summary>
#
# Which networks read each side of a pair, and which of them need a backward pass?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Policy forward (1), policy backward (2), reference forward (1); winner and loser.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "step-cost", "locked": false, "schema_version": 3, "solution": true, "task": false}
def step_cost(batch, tokens, images, timesteps):
    """{"tokens", "network calls"} of one step."""
    ### BEGIN SOLUTION
    passes = 2 * batch * (1 + 2 + 1)
    return {"tokens": passes * tokens, "network calls": passes * images * timesteps}
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "step-cost-test", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.lesson_09.check_step_cost(step_cost)
### BEGIN HIDDEN TESTS
assert step_cost(1, 0, 3, 2)["network calls"] == 2 * step_cost(1, 0, 3, 1)["network calls"], "twice the timesteps, twice the calls"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* Before a GPU is rented one should know what for.
#
# ### Exercise 3: How many sequences?
#
# **Difficulty** 3/5 · **importance** 5/5 · **minutes** 10
#
# Write `sample_size(p1, p2, z_level, z_power)`: the number of independent sequences an arm that finds a true difference of two rates,
# $n = (z_\text{level} + z_\text{power})^2 \,(p_1 q_1 + p_2 q_2) / (p_1 - p_2)^2$ with $q = 1 - p$, rounded up.
#
# <details><summary>Hint 1</summary>
#
# The variance of a rate from $n$ sequences is $pq/n$; those of two arms add up.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `math.ceil` of the formula.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "sample-size", "locked": false, "schema_version": 3, "solution": true, "task": false}
def sample_size(p1, p2, z_level, z_power):
    """Sequences an arm, a whole number."""
    ### BEGIN SOLUTION
    spread = p1 * (1 - p1) + p2 * (1 - p2)
    return math.ceil((z_level + z_power) ** 2 * spread / (p1 - p2) ** 2)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "sample-size-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_09.check_sample_size(sample_size)
### BEGIN HIDDEN TESTS
assert sample_size(0.4, 0.5, 1.96, 0.8416) == sample_size(0.6, 0.5, 1.96, 0.8416), "rates below and above one half are alike"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* "65 against 73 %" from a hundred sequences is an anecdote.
#
# ### Exercise 4: CLIP's level
#
# **Difficulty** 3/5 · **importance** 4/5 · **minutes** 10
#
# Write `clip_level(pictures, low, high, scale)`: levels of N pictures from *unnormalised* embeddings `pictures` (N, E), `low` (E,), `high` (E,). Return shape (N,).
#
# <details><summary>Hint 1</summary>
#
# CLIP compares directions: divide each vector by its length.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A softmax over two numbers is a sigmoid of their difference.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "clip-level", "locked": false, "schema_version": 3, "solution": true, "task": false}
def clip_level(pictures, low, high, scale):
    """Probability of the high text for each picture, shape (N,)."""
    ### BEGIN SOLUTION
    pictures = pictures / pictures.norm(dim=1, keepdim=True)
    return torch.sigmoid(scale * (pictures @ (high / high.norm() - low / low.norm())))
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "clip-level-test", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.lesson_09.check_clip_level(clip_level)
### BEGIN HIDDEN TESTS
assert abs(clip_level(torch.ones(1, 2), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 7.0]), 50.0).item() - 0.5) < 1e-5, "in the middle: one half"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* The judge defines what "aligned" means in this run.
#
# ### Exercise 5: The same weight in another code
#
# **Difficulty** 1/5 · **importance** 3/5 · **minutes** 5
#
# A public Diffusion-DPO code multiplies the error gap by its own beta, `public_beta`, or, if `half`, by half of it. Write `equivalent_weight(public_beta, half, beta)`: the `weight` that does the same in this library, whose loss multiplies by `beta`.
#
# <details><summary>Hint 1</summary>
#
# Which product must be equal?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# beta x weight = public factor.
#
# </details>


# %% nbgrader={"grade": false, "grade_id": "equivalent-weight", "locked": false, "schema_version": 3, "solution": true, "task": false}
def equivalent_weight(public_beta, half, beta):
    """W with beta x W = the public factor."""
    ### BEGIN SOLUTION
    return (public_beta / 2 if half else public_beta) / beta
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "equivalent-weight-test", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.lesson_09.check_equivalent_weight(equivalent_weight)
### BEGIN HIDDEN TESTS
assert equivalent_weight(5000, True, 0.1) == equivalent_weight(2500, False, 0.1), "the two public conventions are one"
### END HIDDEN TESTS

# %% [markdown]
# *Why it matters.* A hyper-parameter copied from another code without its convention is off by a factor of two, or of ten.
#
# ## Recap
#
# - One experiment, two sizes: rows, rounds, loss and metrics are the same code; models, adapters, world and judge differ.
# - CLIP's level is a softmax over two texts. It orders pictures without training; its scale sets how coarse the preference score is.
# - LoRA with the adapter off as reference needs a tenth of the memory of full training with a copy. Drawing the data costs more than training.
# - The paper's order is clear for the captions; for joint against captions alone one needs some 520 sequences an arm.
#
# **Limits.** The run itself has not been made here: hours are estimates from counts, hyper-parameters are untried, and ranges will have to be set by whoever runs it. The paper's requests, attribute scorer, metric formulas and sample sizes are not available to us. CLIP's judgement is not a person's.
#
# **Next**: lesson 10 has two language models. **Further reading**: Wang et al. 2025, "Aligning Compound AI Systems via System-level DPO" (arXiv 2502.17721); Wallace et al. 2023, "Diffusion Model Alignment Using Direct Preference Optimization";
# Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models"; Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision"; Hu et al. 2021, "LoRA".

# %% tags=["instructor"]
work.cleanup()  # the stand-ins' folder
