"""A pretrained language model learns to answer requests with captions: a LoRA adapter, by supervised fine-tuning.

Without it SmolLM2-135M ignores the format. `python -m sysdpo_lab.worlds.face_sft --out FOLDER` trains the adapter (slow:
about half an hour on one core) on the same faulty text as the tiny caption writer, and reports how it does. A run that was
stopped goes on from its last checkpoint, in FOLDER.partial, to the same result.
"""

import argparse
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sysdpo_lab import atomic, checkpoints, errors, loading, paths, progress
from sysdpo_lab.components import adapters
from sysdpo_lab.worlds import face_lm, face_models, tiny_lm
from sysdpo_lab.worlds.faces import requesting, scoring

SOURCE, FOLDER = "smollm2-135m-instruct", "faces-smollm2"
STEPS, BATCH, RANK, LEARNING_RATE, SEED = 180, 8, 8, 1e-3, 0
CHECKPOINT_EVERY = 10
MAX_NEW_TOKENS = 96
# The manner of the answer is named, so that diverse answers can be asked for; {x} is the request.
TEMPLATES = {style: f"Style: {style}\nRequest: {{x}}\nCaptions:" for style in face_lm.STYLES}


def adapter_folder(folder: Path | str = "") -> Path:
    """Where the adapter lies: the shipped one under data/, or another folder.

    Raises:
        MissingModelError: there is none.

    >>> adapter_folder().name
    'faces-smollm2'
    """
    path = Path(folder) if folder else paths.data_folder() / FOLDER
    if not (path / "adapter_config.json").is_file():
        raise errors.MissingModelError(
            f"{path}: no captions adapter (adapter_config.json); train one: python -m sysdpo_lab.worlds.face_sft --out {path}"
        )
    return path


def training_texts(n: int, generator: torch.Generator) -> list[tuple[str, str]]:
    """n (prompt, answer) as the tiny caption writer's, in words that a pretrained tokenizer reads well.

    >>> training_texts(1, torch.Generator().manual_seed(0))
    [('Style: ...\\nRequest: ...\\nCaptions:', ' a...')]
    """
    texts = []
    for prompt, answer in face_lm.training_texts(n, generator):
        style, words = prompt[1:].split("> ", 1)
        texts.append((TEMPLATES[style].format(x=words.removesuffix(f" {face_lm.WRITE}")), f" {answer}"))
    return texts


def fine_tune(
    model: nn.Module, tokenizer: Any, steps: int = STEPS, batch: int = BATCH, rank: int = RANK, seed: int = SEED,
    learning_rate: float = LEARNING_RATE, folder: Path | str | None = None, enabled: bool | None = None,
) -> tuple[adapters.Attached, list[float]]:  # fmt: skip
    """Train a new LoRA adapter on a frozen model.

    Args:
        model: a transformers causal language model; its own weights stay as they are.
        steps: of AdamW with a short rise and a straight fall, each on `batch` new texts.
        rank: of the adapter on all linear layers; larger learns more and weighs more.
        seed: of the adapter and the texts; step i draws from a generator of its own, so a resumed run goes on exactly.
        folder: for checkpoints, and to go on from them; None keeps none.
        enabled: show a bar; None: on a terminal only.

    Returns:
        the model with its adapter in evaluation mode, and the loss of each step (nats a token of the answers).
    """
    model.requires_grad_(False)
    attached = adapters.attach(model, rank, "captions", torch.Generator().manual_seed(seed))
    parameters = dict(adapters.adapter_parameters(attached.model, attached.name))
    optimiser = torch.optim.AdamW(parameters.values(), learning_rate, weight_decay=0.0)
    losses = _resume(folder, parameters, optimiser)
    attached.model.train()
    with progress.bar(steps, "captions adapter", len(losses), enabled) as bar:
        for step in range(len(losses), steps):
            for group in optimiser.param_groups:
                group["lr"] = learning_rate * min(1.0, (step + 1) / max(1, steps // 20), 1.05 - step / steps)
            texts = training_texts(batch, torch.Generator().manual_seed(1_000_003 * (seed + 1) + step))
            loss = tiny_lm.answer_loss(attached.model, tokenizer, texts)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            losses.append(loss.item())
            bar.update(1, loss=losses[-1])
            if folder is not None and (step + 1) % CHECKPOINT_EVERY == 0:
                _save(folder, parameters, optimiser, losses)
    attached.model.eval()
    return attached, losses


def _save(folder: Path | str, parameters: Mapping[str, nn.Parameter], optimiser: Any, losses: list[float]) -> None:
    tensors = {f"weights.{name}": p.detach() for name, p in parameters.items()}
    for name, p in parameters.items():
        tensors |= {f"optimiser.{name}.{key}": value for key, value in optimiser.state[p].items()}
    checkpoints.save(folder, checkpoints.Checkpoint(len(losses), tensors, {"losses": losses}))


def _resume(folder: Path | str | None, parameters: Mapping[str, nn.Parameter], optimiser: Any) -> list[float]:
    """Set weights and optimiser to the newest checkpoint's; the losses so far."""
    found = None if folder is None else checkpoints.newest(folder)
    if found is None:
        return []
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(found.tensors[f"weights.{name}"])
            start = f"optimiser.{name}."
            optimiser.state[p] = {k.removeprefix(start): v for k, v in found.tensors.items() if k.startswith(start)}
    return list(found.state["losses"])


def measure(
    model: nn.Module, tokenizer: Any, items: int, generator: torch.Generator, style: str = "plain"
) -> dict[str, float]:
    """Validity, caption order and faithfulness of one sampled answer to each of some held-out requests."""
    asked = face_models.heldout_requests(items)
    prompts = [TEMPLATES[style].format(x=requesting.render(request)) for request in asked]
    answers = [face_lm.complete(model, tokenizer, [prompt], generator, MAX_NEW_TOKENS)[0] for prompt in prompts]
    rows = {"validity": scoring.validity, "caption_order": scoring.caption_order, "faithfulness": scoring.faithfulness}
    return {name: sum(map(f, asked, answers)) / len(asked) for name, f in rows.items()}


def write(folder: Path | str, steps: int = STEPS, seed: int = SEED, items: int = 60, source: str = SOURCE) -> dict:
    """Train the adapter, measure it, and write it with its card; returns the measurements."""
    model, tokenizer = loading.load_causal_lm(source)
    started, partial = time.process_time(), Path(f"{folder}.partial")
    attached, losses = fine_tune(model, tokenizer, steps, seed=seed, folder=partial)
    seconds = time.process_time() - started
    measured = measure(attached.model, tokenizer, items, torch.Generator().manual_seed(seed))
    with atomic.folder(folder) as new:
        adapters.save_weights(attached.model.get_base_model(), attached.name, new, source)
        numbers = "\n".join(f"| {name} | {value:.3f} |" for name, value in measured.items())
        digest = paths.file_sha256(new / "adapter_model.safetensors")
        text = _CARD.format(
            source=source, steps=steps, seed=seed, seconds=seconds, threads=torch.get_num_threads(), rank=RANK,
            batch=BATCH, loss=sum(losses[-20:]) / len(losses[-20:]), digest=digest, items=items, numbers=numbers,
        )  # fmt: skip
        atomic.write_text(new / "CARD.md", text)
    shutil.rmtree(partial)
    return measured


_CARD = """# Captions adapter for {source}

* Origin: LoRA of rank {rank}, trained here by
  `python -m sysdpo_lab.worlds.face_sft --out FOLDER --steps {steps} --seed {seed}` in {seconds:.0f} s of processor time on
  {threads} thread(s), since its last start: {batch} generated texts a step, of training requests, out of order on purpose.
* Weights: adapter_model.safetensors, SHA-256 {digest}.
* Licence: Apache-2.0, like the code and the base model.
* Last loss {loss:.3f} nats a token. One sampled answer to each of {items} held-out requests, plain style:

| | |
|---|---|
{numbers}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: train the captions adapter and write it with its card."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--items", type=int, default=60, help="held-out requests to measure it on")
    parser.add_argument("--source", default=SOURCE, help="the pretrained model")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.items < 1:
        raise errors.OptionRangeError(
            f"--steps and --items must be 1 or more, found {options.steps} and {options.items}"
        )
    for name, value in write(options.out, options.steps, options.seed, options.items, options.source).items():
        print(f"{name:16s}{value:7.3f}")


if __name__ == "__main__":
    main()
