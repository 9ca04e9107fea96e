"""A word-level tokenizer and a tiny Llama that draft and refine restaurant sentences, badly enough to be improved.

The training text is faulty on purpose. Drafts leave slots out (some often, some seldom) and sometimes state a wrong value;
refinements say what their draft says, add some of what is missing and repair some of what is wrong. So a good draft helps,
and both nodes of the system draft -> refine have something to learn.
`python -m sysdpo_lab.worlds.tiny_lm --out data/tiny-lm` trains it again from its seed.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from sysdpo_lab import atomic, decoding, errors, paths
from sysdpo_lab.worlds import restaurants
from sysdpo_lab.worlds.restaurants import TINY_DRAFT, TINY_REFINE, VALUES, Record

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
MARKERS = ("<draft>", "<refine>", "<sep>", "<write>")
HIDDEN, LAYERS, HEADS = 96, 3, 4
STEPS, BATCH, LEARNING_RATE, SEED = 400, 64, 4e-3, 0
MAX_NEW_TOKENS = 40

# How the training text is spoiled: probabilities, by slot or for a whole text.
DRAFT_OMITS = {"food": 0.25, "price": 0.4, "area": 0.45, "rating": 0.6, "family": 0.65, "near": 0.55}
REFINE_ADDS = {"food": 0.4, "price": 0.3, "area": 0.35, "rating": 0.25, "family": 0.2, "near": 0.25}
DRAFT_CHANGES, DRAFT_INVENTS, DRAFT_UNFORMED = 0.06, 0.15, 0.05
REFINE_REPAIRS, REFINE_OMITS, REFINE_UNFORMED = 0.4, 0.04, 0.03


# --- training text ----------------------------------------------------------------------------------------------------


def _happens(probability: float, generator: torch.Generator) -> bool:
    return float(torch.rand((), generator=generator)) < probability


def _other_value(slot: str, value: str | None, generator: torch.Generator) -> str:
    return restaurants.choice([other for other in VALUES[slot] if other != value], generator)


def _unformed(record: Record, text: str, probability: float, generator: torch.Generator) -> str:
    if not _happens(probability, generator):
        return text
    kind = "ramble" if _happens(0.6, generator) else "truncate"
    return restaurants.perturb(record, text, generator, kind).text


def faulty_draft(record: Record, generator: torch.Generator) -> str:
    """A first answer: some slots left out, some values wrong, now and then one slot too many.

    >>> faulty_draft(Record("Old Mill", food="Thai", near="museum"), torch.Generator().manual_seed(1))
    'There is a Thai restaurant named Old Mill.'
    """
    said = {"name": record.name}
    for slot, value in list(record.slots.items())[1:]:
        if not _happens(DRAFT_OMITS[slot], generator):
            said[slot] = _other_value(slot, value, generator) if _happens(DRAFT_CHANGES, generator) else value
    free = [slot for slot in VALUES if slot not in record.slots]
    if free and _happens(DRAFT_INVENTS, generator):
        slot = restaurants.choice(free, generator)
        said[slot] = _other_value(slot, None, generator)
    described = Record(**said)
    return _unformed(described, restaurants.reference_sentence(described, generator), DRAFT_UNFORMED, generator)


def faulty_refinement(record: Record, draft: str, generator: torch.Generator) -> str:
    """A second answer: what the draft states, in its template, with some of its gaps filled and faults repaired."""
    said: dict[str, str | None] = {}
    for slot, value in restaurants.stated(draft):
        said.setdefault(slot, value if value in VALUES[slot] else None)
    said = {"name": record.name} | {slot: value for slot, value in said.items() if slot != "name" and value}
    template = restaurants.template_of(Record(**said), draft)
    for slot in list(said)[1:]:
        right = record.slots.get(slot)
        if said[slot] != right and _happens(REFINE_REPAIRS, generator):
            said[slot] = right
        elif _happens(REFINE_OMITS, generator):
            said[slot] = None
    for slot, value in list(record.slots.items())[1:]:
        if slot not in said and _happens(REFINE_ADDS[slot], generator):
            said[slot] = value
    described = Record(**{slot: value for slot, value in said.items() if value})
    return _unformed(described, restaurants.sentence(described, template), REFINE_UNFORMED, generator)


def training_texts(n: int, generator: torch.Generator) -> list[tuple[str, str]]:
    """n (prompt, answer): drafts and refinements in turn, of records of the training split only."""
    texts = []
    for number, record in enumerate(restaurants.records(generator, n, "train")):
        x, draft = restaurants.render(record), faulty_draft(record, generator)
        if number % 2 == 0:
            texts.append((TINY_DRAFT.format(x=x), draft))
        else:
            # half of the drafts are perfect, so that the refiner meets the drafts that alignment leads to
            draft = draft if number % 4 == 1 else restaurants.reference_sentence(record, generator)
            texts.append((TINY_REFINE.format(x=x, draft=draft), faulty_refinement(record, draft, generator)))
    return texts


# --- tokenizer and model ----------------------------------------------------------------------------------------------


def vocabulary() -> list[str]:
    """All words of the world, each once, in a fixed order."""
    full = Record(**{slot: values[0] for slot, values in VALUES.items()})
    described = [restaurants.replace(full, **{slot: value}) for slot, values in VALUES.items() for value in values]
    described += [Record(full.name, **{slot: value}) for slot in list(VALUES)[1:] for value in VALUES[slot]]
    described += [Record(full.name), Record(full.name, area=full.area, near=full.near)]
    texts = [restaurants.render(record) for record in described]
    texts += [restaurants.sentence(r, template) for r in described for template in range(len(restaurants.TEMPLATES))]
    words = " ".join([*texts, *restaurants.RAMBLES]).replace(".", " . ").replace(",", " , ").replace(":", " : ").split()
    return sorted(set(words))


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """One token a word, in the case of the text; adds no BOS (the prompt's markers say where an answer starts)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [PAD, EOS, UNKNOWN, *MARKERS, *vocabulary()]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(
        prefix="##", cleanup=True
    )  # joins words and takes the space before a full stop
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN,
        extra_special_tokens=list(MARKERS), padding_side="left", clean_up_tokenization_spaces=False,
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
    steps: int = STEPS, batch: int = BATCH, seed: int = SEED, progress: bool | None = None
) -> tuple["LlamaForCausalLM", "PreTrainedTokenizerFast", list[float]]:
    """Train the tiny model on generated text; the same seed and number of threads give the same weights.

    Args:
        steps: optimiser steps (AdamW, warm-up, then cosine decay), each on `batch` new texts.
        progress: show a bar; default: on a terminal only.

    Returns:
        the model in evaluation mode, its tokenizer, and the loss of each step (nats a token of the answers).
    """
    generator = torch.Generator().manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer), seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, _warm_up_then_cosine(steps))
    losses = []
    for _ in tqdm(range(steps), desc="tiny LM", disable=None if progress is None else not progress):
        loss = answer_loss(model, tokenizer, training_texts(batch, generator))
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


def measure(model: nn.Module, tokenizer, records: Sequence[Record], generator: torch.Generator) -> dict[str, float]:
    """Mean judge scores of the system draft -> refine, and of the refiner after a perfect and after a bare draft."""
    xs = [restaurants.render(record) for record in records]

    def refine(drafts: Sequence[str], generator=None) -> list[str]:
        prompts = [TINY_REFINE.format(x=x, draft=draft) for x, draft in zip(xs, drafts)]
        return answer(model, tokenizer, prompts, generator)

    draft_prompts = [TINY_DRAFT.format(x=x) for x in xs]
    greedy, sampled = answer(model, tokenizer, draft_prompts), answer(model, tokenizer, draft_prompts, generator)
    texts = {
        "draft, greedy": greedy,
        "draft, sampled": sampled,
        "refine, greedy": refine(greedy),
        "refine, sampled": refine(sampled, generator),
        "refine, greedy, perfect draft": refine([restaurants.reference_sentence(r, generator) for r in records]),
        "refine, greedy, bare draft": refine([restaurants.sentence(Record(r.name)) for r in records]),
    }
    verdicts = {name: list(map(restaurants.judge, records, answers)) for name, answers in texts.items()}
    result = {name: _mean(v.score for v in found) for name, found in verdicts.items()}
    result |= {f"validity of {n}": _mean(v.valid for v in verdicts[n]) for n in ("refine, greedy", "refine, sampled")}
    result |= {f"words of {n}": _mean(v.words for v in verdicts[n]) for n in ("refine, greedy", "refine, sampled")}
    return result


def _mean(values: Iterable[float]) -> float:
    values = [float(value) for value in values]
    return sum(values) / len(values)


# --- stored model -----------------------------------------------------------------------------------------------------

WEIGHTS = "model.safetensors"
HASHES = "SHA256SUMS"


def load_tiny_lm(folder: Path | str | None = None) -> tuple["LlamaForCausalLM", "PreTrainedTokenizerFast"]:
    """The shipped tiny model (fp32, evaluation mode) and its tokenizer, after a check of their hashes.

    Args:
        folder: where they lie; default: `data/tiny-lm`.

    Raises:
        MissingWeightsError: a file is not there.
        WeightsHashError: a file is not the one that the folder's SHA256SUMS lists.
    """
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = paths.data_folder() / "tiny-lm" if folder is None else Path(folder)
    _check_hashes(folder)
    with torch.random.fork_rng(devices=[]):  # the random start is overwritten, and must not move the global state
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder, local_files_only=True)).float()
    missing, unexpected = model.load_state_dict(load_file(folder / WEIGHTS), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise errors.WeightsHashError(f"tiny LM: {folder / WEIGHTS} does not fit its config: {unexpected or missing}")
    model.tie_weights()
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def _check_hashes(folder: Path) -> None:
    again = f"python -m sysdpo_lab.worlds.tiny_lm --out {folder} makes it again"
    for name, expected in _listed_hashes(folder, again).items():
        if not (folder / name).is_file():
            raise errors.MissingWeightsError(f"tiny LM: {folder / name} is missing; {again}")
        found = paths.file_sha256(folder / name)
        if found != expected:
            raise errors.WeightsHashError(
                f"tiny LM: {folder / name} has SHA-256 {found[:16]}..., {HASHES} says {expected[:16]}...; {again}"
            )


def _listed_hashes(folder: Path, again: str) -> dict[str, str]:
    if not (folder / HASHES).is_file():
        raise errors.MissingWeightsError(f"tiny LM: {folder / HASHES} is missing; {again}")
    rows = [line.split() for line in (folder / HASHES).read_text(encoding="utf-8").splitlines() if line.strip()]
    listed = {row[-1]: row[0] for row in rows}
    if WEIGHTS not in listed:
        raise errors.WeightsHashError(f"tiny LM: {folder / HASHES} does not list {WEIGHTS}; {again}")
    return listed


def write_model(folder: Path | str, steps: int = STEPS, seed: int = SEED, items: int = 300) -> dict[str, float]:
    """Train, measure on held-out records, and write weights, tokenizer, hashes and card; returns the measurements."""
    started = time.monotonic()
    model, tokenizer, losses = train(steps, seed=seed)
    seconds = time.monotonic() - started
    measured = measure(model, tokenizer, heldout_records(items), torch.Generator().manual_seed(seed))
    with atomic.folder(folder) as new:
        _save_weights(new, model, tokenizer)
        atomic.write_text(new / HASHES, "".join(f"{paths.file_sha256(p)}  {p.name}\n" for p in sorted(new.iterdir())))
        parameters = sum(p.numel() for p in model.parameters())
        text = _card(new, steps, seed, seconds, losses[-1], parameters, len(tokenizer), items, measured)
        atomic.write_text(new / "CARD.md", text)
    return measured


def heldout_records(n: int, seed: int = 0) -> list[Record]:
    """n records of the held-out split, the same ones each time."""
    return restaurants.records(torch.Generator().manual_seed(seed), n, "heldout")


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


def _card(folder: Path, steps, seed, seconds, loss, parameters, words, items, measured) -> str:
    import transformers

    return _CARD.format(
        steps=steps, seed=seed, seconds=seconds, loss=loss, parameters=parameters, words=words, items=items, batch=BATCH,
        hidden=HIDDEN, layers=LAYERS, heads=HEADS, threads=torch.get_num_threads(), torch=torch.__version__,
        transformers=transformers.__version__, size=(folder / WEIGHTS).stat().st_size / 1e6,
        digest=paths.file_sha256(folder / WEIGHTS), draft=TINY_DRAFT, refine=TINY_REFINE,
        rows="\n".join(f"| {name} | {value:.3f} |" for name, value in measured.items()),
    )  # fmt: skip


_CARD = """# Tiny LM: drafts and refines restaurant sentences

* Origin: trained here from random weights on generated text by `python -m sysdpo_lab.worlds.tiny_lm --out data/tiny-lm
  --seed {seed} --steps {steps}` in {seconds:.0f} s on {threads} thread(s); torch {torch}, transformers {transformers}.
  Other versions, processors and numbers of threads give slightly other weights.
* Model: Llama, {layers} layers, width {hidden}, {heads} heads, {parameters} parameters (fp32, {size:.1f} MB);
  word-level tokenizer, {words} tokens, no BOS, no chat template.
* Weights: {weights_file}, SHA-256 {digest};
  all files: SHA256SUMS, checked at load.
* Licence: Apache-2.0, like the code.
* Prompts: `{draft}` and `{refine}`; an answer ends with `</s>`.
* Data: {batch} new texts a step, of training records only, faulty on purpose (see the module);
  last loss {loss:.3f} nats a token.
* Use: the start of the two-LLM system draft -> refine. It is meant to be improvable, not good.

Mean scores of the exact judge over {items} held-out records (sampled: temperature 1):

| | |
|---|---|
{rows}
"""
_CARD = _CARD.replace("{weights_file}", WEIGHTS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: train the tiny language model and write it with its card."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", default="data/tiny-lm", help="folder to write to")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    measured = write_model(options.out, options.steps, options.seed)
    for name, value in measured.items():
        print(f"{name:32s}{value:7.3f}")


if __name__ == "__main__":
    main()
