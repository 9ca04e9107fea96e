"""Tiny word-level Llamas that play the roles of a world, badly enough to be improved: build, train, measure, store, load.

What differs from world to world is a `Recipe`: its words and its faulty training text.
"""

import argparse
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from sysdpo_lab import atomic, decoding, errors, paths
from sysdpo_lab.worlds import shipped
from sysdpo_lab.worlds.shipped import WEIGHTS
from sysdpo_lab.worlds.tasks import happens

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
HIDDEN, LAYERS, HEADS = 96, 3, 4
BATCH, LEARNING_RATE, SEED = 64, 4e-3, 0
MAX_NEW_TOKENS = 40
TWO, THREE = ("draft", "refine"), ("answer1", "answer2", "merge")  # the chains of two and of three models


@dataclass(frozen=True)
class Recipe:
    """How one tiny model is made.

    Args:
        folder: its place under `data/`.
        command: the module that makes it again, `python -m COMMAND`.
        about: the heading of its card.
        world: the module with PROMPTS, records, render and judge.
        markers: special words of the prompts.
        words: () -> all words of the world, each once.
        texts: (n, generator) -> n (prompt, answer), faulty on purpose, of records of the training split only.
        steps: optimiser steps, each on `BATCH` new texts.
        chains: the systems that it can play: hidden roles, then the output's; they are measured for the card.
        drafts: {label: (record, generator) -> a draft}, for measuring what the output of a chain of two makes of it.
    """

    folder: str
    command: str
    about: str
    world: ModuleType
    markers: tuple[str, ...]
    words: Callable[[], list[str]]
    texts: Callable[[int, torch.Generator], list[tuple[str, str]]]
    steps: int
    chains: tuple[tuple[str, ...], ...] = (TWO, THREE)
    drafts: Mapping[str, Callable[[Any, torch.Generator], str]] = field(default_factory=dict)

    @property
    def again(self) -> str:
        """The command that makes the shipped model again."""
        return f"python -m {self.command} --out data/{self.folder}"


# --- training text ----------------------------------------------------------------------------------------------------

ROLES = ("draft", "refine", "answer1", "merge", "answer2", "refine", "draft", "answer2-seeing")  # in turn
MARKERS = ("<draft>", "<refine>", "<answer1>", "<answer2>", "<merge>", "<sep>", "<write>")


@dataclass(frozen=True)
class Faults:
    """Who writes the faulty text of a world; all draw from a generator.

    Args:
        answer: (role, record, generator) -> the answer of answer1 or answer2.
        merger: (record, first, second, generator) -> what merge makes of two answers.
        draft, good_draft: (record, generator) -> a draft; None where there is no drafter.
        refinement: (record, draft, generator) -> what refine makes of it.
    """

    answer: Callable[[str, Any, torch.Generator], str]
    merger: Callable[[Any, str, str, torch.Generator], str]
    draft: Callable[[Any, torch.Generator], str] | None = None
    good_draft: Callable[[Any, torch.Generator], str] | None = None
    refinement: Callable[[Any, str, torch.Generator], str] | None = None


def role_texts(
    world: ModuleType, faults: Faults, n: int, generator: torch.Generator, roles: Sequence[str] = ROLES
) -> list[tuple[str, str]]:
    """n (prompt, answer): the roles in turn, each of another record of the training split."""
    found = world.records(generator, n, "train")
    return [_role_text(world, faults, roles[i % len(roles)], record, generator) for i, record in enumerate(found)]


def _role_text(world, faults: Faults, role: str, record, generator: torch.Generator) -> tuple[str, str]:
    given = {"x": world.render(record)}
    if role == "draft":
        said = faults.draft(record, generator)
    elif role == "refine":
        # half of the drafts are perfect, so that the refiner meets the drafts that alignment leads to
        good = happens(0.5, generator)
        given["draft"] = (faults.good_draft if good else faults.draft)(record, generator)
        said = faults.refinement(record, given["draft"], generator)
    elif role == "merge":
        given |= {name: faults.answer(name, record, generator) for name in ("answer1", "answer2")}
        said = faults.merger(record, given["answer1"], given["answer2"], generator)
    else:  # answer2-seeing answers like answer2, as if it had not seen anything: only alignment can use the edge
        given |= {"answer1": faults.answer("answer1", record, generator)} if role == "answer2-seeing" else {}
        said = faults.answer(role.removesuffix("-seeing"), record, generator)
    return world.PROMPTS["tiny"][role].format(**given), said


# --- tokenizer and model ----------------------------------------------------------------------------------------------


def words_of(texts: Iterable[str]) -> list[str]:
    """All words and marks of texts, each once, sorted; places such as {name} do not count.

    >>> words_of(["{name} has {number} pens.", "Ada"])
    ['.', 'Ada', 'has', 'pens']
    """
    return sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]+", re.sub(r"\{\w+\}", " ", text))})


def build_tokenizer(words: Sequence[str], markers: Sequence[str]) -> "PreTrainedTokenizerFast":
    """One token a word, in the case of the text; adds no BOS (the prompt's markers say where an answer starts)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    listed = [PAD, EOS, UNKNOWN, *markers, *words]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(listed)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(
        prefix="##", cleanup=True
    )  # joins words and takes the space before a full stop
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN,
        extra_special_tokens=list(markers), padding_side="left", clean_up_tokenization_spaces=False,
        model_max_length=256,
    )  # fmt: skip


def build_model(vocabulary_size: int, seed: int) -> "LlamaForCausalLM":
    """A Llama with 3 layers of width 96 and random weights; the global random state is left as it was."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary_size, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=256, tie_word_embeddings=True,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.05,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


# --- training ---------------------------------------------------------------------------------------------------------


def train(
    recipe: Recipe, steps: int | None = None, batch: int = BATCH, seed: int = SEED, progress: bool | None = None
) -> tuple["LlamaForCausalLM", "PreTrainedTokenizerFast", list[float]]:
    """Train a tiny model on its world's faulty text; the same seed and number of threads give the same weights.

    Args:
        steps: optimiser steps (AdamW, warm-up, then cosine decay), each on `batch` new texts; default: the recipe's.
        progress: show a bar; default: on a terminal only.

    Returns:
        the model in evaluation mode, its tokenizer, and the loss of each step (nats a token of the answers).
    """
    steps = recipe.steps if steps is None else steps
    generator = torch.Generator().manual_seed(seed)
    tokenizer = build_tokenizer(recipe.words(), recipe.markers)
    model = build_model(len(tokenizer), seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, _warm_up_then_cosine(steps))
    losses = []
    for _ in tqdm(range(steps), desc=recipe.folder, disable=None if progress is None else not progress):
        loss = answer_loss(model, tokenizer, recipe.texts(batch, generator))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.item())
    return model.eval(), tokenizer, losses


def _warm_up_then_cosine(steps: int) -> Callable[[int], float]:
    warm = min(50, max(1, steps // 10))

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * (step - warm) / max(1, steps - warm))))) + 0.01

    return factor


def answer_loss(model: nn.Module, tokenizer, texts: Sequence[tuple[str, str]]) -> Float[Tensor, ""]:
    """Mean negative log-probability of the answers' tokens, EOS included, in nats."""
    prompts = tokenizer([prompt for prompt, _ in texts], add_special_tokens=False)["input_ids"]
    answers = tokenizer([answer for _, answer in texts], add_special_tokens=False)["input_ids"]
    rows = [prompt + answer + [tokenizer.eos_token_id] for prompt, answer in zip(prompts, answers)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    labels = ids.clone()
    for i, (prompt, row) in enumerate(zip(prompts, rows)):
        labels[i, : len(prompt)] = -100
        labels[i, len(row) :] = -100
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


# --- measurement ------------------------------------------------------------------------------------------------------


def answer(model: nn.Module, tokenizer, prompts: Sequence[str], generator: torch.Generator | None = None) -> list[str]:
    """One answer a prompt: greedy, or with a generator sampled at temperature 1."""
    encoded = tokenizer(list(prompts), add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    options = dict(
        max_new_tokens=MAX_NEW_TOKENS, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    if generator is None:
        found = decoding.greedy_tokens(model, ids, mask, **options)
    else:
        found = decoding.sample_tokens(model, ids, mask, generator=generator, **options)
    return tokenizer.batch_decode(found.token_ids[:, 0], skip_special_tokens=True)


def measure(
    recipe: Recipe, model: nn.Module, tokenizer, records: Sequence[Any], generator: torch.Generator
) -> dict[str, float]:
    """Mean judge scores of every role of the recipe's chains, greedy and sampled, and of the output after given drafts."""
    xs, templates = [recipe.world.render(record) for record in records], recipe.world.PROMPTS["tiny"]

    def say(role: str, given: Mapping[str, Sequence[str]], drawn: torch.Generator | None = None) -> list[str]:
        rows = [dict(zip(("x", *given), values)) for values in zip(xs, *given.values())]
        return answer(model, tokenizer, [templates[role].format(**row) for row in rows], drawn)

    texts: dict[str, list[str]] = {}
    for *hidden, output in recipe.chains:
        drafts = {}
        for mode, drawn in (("greedy", None), ("sampled", generator)):
            drafts[mode] = {role: say(role, {}, drawn) for role in hidden}
            texts |= {f"{role}, {mode}": said for role, said in drafts[mode].items()}
        for mode, drawn in (("greedy", None), ("sampled", generator)):
            texts[f"{output}, {mode}"] = say(output, drafts[mode], drawn)
        if len(hidden) == 1:
            for label, make in recipe.drafts.items():
                texts[f"{output}, greedy, {label}"] = say(output, {hidden[0]: [make(r, generator) for r in records]})
    return _scores(recipe, records, texts)


def _scores(recipe: Recipe, records: Sequence[Any], texts: Mapping[str, list[str]]) -> dict[str, float]:
    verdicts = {name: list(map(recipe.world.judge, records, answers)) for name, answers in texts.items()}
    result = {name: _mean(v.score for v in found) for name, found in verdicts.items()}
    outputs = [f"{chain[-1]}, {mode}" for chain in recipe.chains for mode in ("greedy", "sampled")]
    result |= {f"validity of {name}": _mean(v.valid for v in verdicts[name]) for name in outputs}
    return result | {f"words of {name}": _mean(v.words for v in verdicts[name]) for name in outputs}


def _mean(values: Iterable[float]) -> float:
    values = [float(value) for value in values]
    return sum(values) / len(values)


def heldout_records(recipe: Recipe, n: int, seed: int = 0) -> list[Any]:
    """n records of the held-out split, the same ones each time."""
    return recipe.world.records(torch.Generator().manual_seed(seed), n, "heldout")


# --- stored model -----------------------------------------------------------------------------------------------------


def load(recipe: Recipe, folder: Path | str | None = None) -> tuple["LlamaForCausalLM", "PreTrainedTokenizerFast"]:
    """The shipped tiny model (fp32, evaluation mode) and its tokenizer, after a check of their hashes.

    Args:
        folder: where they lie; default: the recipe's folder under `data/`.

    Raises:
        MissingWeightsError: a file is not there.
        WeightsHashError: a file is not the one that the folder's SHA256SUMS lists.
    """
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = paths.data_folder() / recipe.folder if folder is None else Path(folder)
    shipped.check_hashes(folder, "tiny LM", recipe.again)
    with torch.random.fork_rng(devices=[]):  # the random start is overwritten, and must not move the global state
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder, local_files_only=True)).float()
    missing, unexpected = model.load_state_dict(load_file(folder / WEIGHTS), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise errors.WeightsHashError(f"tiny LM: {folder / WEIGHTS} does not fit its config: {unexpected or missing}")
    model.tie_weights()
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def write(
    recipe: Recipe, folder: Path | str, steps: int | None = None, seed: int = SEED, items: int = 300
) -> dict[str, float]:
    """Train, measure on held-out records, and write weights, tokenizer, hashes and card; returns the measurements."""
    steps, started = recipe.steps if steps is None else steps, time.process_time()
    model, tokenizer, losses = train(recipe, steps, seed=seed)
    seconds = time.process_time() - started
    found = measure(recipe, model, tokenizer, heldout_records(recipe, items), torch.Generator().manual_seed(seed))
    with atomic.folder(folder) as new:
        _save_weights(new, model, tokenizer)
        shipped.write_hashes(new)
        parameters = sum(p.numel() for p in model.parameters())
        text = _card(recipe, new, steps, seed, seconds, losses[-1], parameters, len(tokenizer), items, found)
        atomic.write_text(new / "CARD.md", text)
    return found


def _save_weights(folder: Path, model, tokenizer) -> None:
    """In the formats of transformers, without the bars and the paths that its own writers leave."""
    from safetensors.torch import save_file

    tensors = {
        n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"
    }  # tied to the embedding
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _card(recipe: Recipe, folder: Path, steps, seed, seconds, loss, parameters, words, items, measured) -> str:
    import transformers

    templates = recipe.world.PROMPTS["tiny"]
    roles = [role for chain in recipe.chains for role in chain]
    return _CARD.format(
        about=recipe.about, command=recipe.command, folder=recipe.folder, steps=steps, seed=seed, seconds=seconds, loss=loss,
        parameters=parameters, words=words, items=items, batch=BATCH, hidden=HIDDEN, layers=LAYERS, heads=HEADS,
        threads=torch.get_num_threads(), torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__, weights=WEIGHTS,
        size=(folder / WEIGHTS).stat().st_size / 1e6, digest=paths.file_sha256(folder / WEIGHTS),
        prompts=", ".join(f"`{templates[role]}`" for role in roles), chains=" and ".join(map(", ".join, recipe.chains)),
        rows="\n".join(f"| {name} | {value:.3f} |" for name, value in measured.items()),
    )  # fmt: skip


_CARD = """# {about}

* Origin: trained here from random weights on generated text by `python -m {command} --out data/{folder}
  --seed {seed} --steps {steps}` in {seconds:.0f} s of processor time on {threads} thread(s); torch {torch},
  transformers {transformers}. Other versions, processors and numbers of threads give slightly other weights.
* Model: Llama, {layers} layers, width {hidden}, {heads} heads, {parameters} parameters (fp32, {size:.1f} MB);
  word-level tokenizer, {words} tokens, no BOS, no chat template.
* Weights: {weights}, SHA-256 {digest};
  all files: SHA256SUMS, checked at load.
* Licence: Apache-2.0, like the code.
* Prompts: {prompts}; an answer ends with `</s>`.
* Data: {batch} new texts a step, of training records only, faulty on purpose (see the module);
  last loss {loss:.3f} nats a token.
* Use: the start of the systems {chains}. It is meant to be improvable, not good.

Mean scores of the exact judge over {items} held-out records (sampled: temperature 1):

| | |
|---|---|
{rows}
"""


def main(recipe: Recipe, arguments: Sequence[str] | None = None) -> None:
    """Command line: train a tiny language model and write it with its card."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", default=f"data/{recipe.folder}", help="folder to write to")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=recipe.steps)
    options = parser.parse_args(arguments)
    for name, value in write(recipe, options.out, options.steps, options.seed).items():
        print(f"{name:32s}{value:7.3f}")
