"""The shipped models of the faces world: how they are made, measured, stored and loaded.

`python -m sysdpo_lab.worlds.face_models lm | diffusion | diffusion-clean` trains one again from its seed into `data/`.
The weakened diffusion model is the base to align; the clean one shows what the same training reaches without wrong captions.
"""

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sysdpo_lab import atomic, checkpoints, errors, paths
from sysdpo_lab.worlds import face_diffusion, face_lm, shipped
from sysdpo_lab.worlds.face_diffusion import DiffusionBase
from sysdpo_lab.worlds.faces import drawing, language, measuring, requesting, scoring
from sysdpo_lab.worlds.faces.encoder import WordEncoder
from sysdpo_lab.worlds.faces.requesting import Request

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

FOLDERS = {"lm": "faces-lm", "diffusion": "faces-diffusion", "diffusion-clean": "faces-diffusion-clean"}
COMMAND = "python -m sysdpo_lab.worlds.face_models"
SAMPLING_STEPS = 12


# --- measurement ------------------------------------------------------------------------------------------------------


def control(
    base: DiffusionBase, generator: torch.Generator, per_caption: int = 12, guidance: float = 1.0
) -> dict[str, dict[str, float]]:
    """How well asked and measured levels agree on captions that training never named.

    Args:
        per_caption: pictures of each held-out caption (five captions an attribute).
        guidance: of classifier-free guidance; 1: none.

    Returns:
        {attribute: {"correlation", "mae", "colour"}}: Pearson's over all pictures of the attribute, mean absolute
        error, share of pictures in the asked colour; attributes of both families.
    """
    result = {}
    for family, names in drawing.ATTRIBUTES.items():
        captions = [caption for caption in language.heldout_captions(family) for _ in range(per_caption)]
        pictures = face_diffusion.sample(base, list(map(str, captions)), generator, SAMPLING_STEPS, guidance)
        measured = measuring.measure(pictures, family)
        colours = measuring.measured_colour(pictures, family)
        for a, attribute in enumerate(names):
            rows = [i for i, caption in enumerate(captions) if attribute in caption.levels]
            asked = torch.tensor([captions[i].levels[attribute] for i in rows])
            right = [drawing.COLOURS[colours[i]] == captions[i].colour for i in rows]
            result[attribute] = {
                "correlation": measuring.correlation(measured[rows, a], asked),
                "mae": float((measured[rows, a] - asked).abs().mean()),
                "colour": sum(right) / len(right),
            }
    return result


def family_means(rows: dict[str, dict[str, float]]) -> dict[str, float]:
    """The mean correlation of each family's attributes, and the worst one of all.

    >>> rows = {name: {"correlation": 0.5} for names in drawing.ATTRIBUTES.values() for name in names}
    >>> family_means(rows)
    {'face': 0.5, 'landscape': 0.5, 'worst': 0.5}
    """
    means = {
        family: sum(rows[name]["correlation"] for name in names) / len(names)
        for family, names in drawing.ATTRIBUTES.items()
    }
    return means | {"worst": min(row["correlation"] for row in rows.values())}


def answer_and_draw(
    base: DiffusionBase, requests: Sequence[Request], answers: Sequence[str], generator: torch.Generator
) -> list[scoring.Verdict]:
    """The judge's verdicts when a diffusion model draws the captions of answers."""
    texts = [language.split_captions(answer) for answer in answers]
    pictures = face_diffusion.sample(base, [text for row in texts for text in row], generator, SAMPLING_STEPS)
    rows = pictures.split([len(row) for row in texts])
    return list(map(scoring.judge, requests, answers, rows))


def mean_verdict(verdicts: Sequence[scoring.Verdict]) -> dict[str, float]:
    """The mean of each number of the judge."""
    return {name: sum(getattr(v, name) for v in verdicts) / len(verdicts) for name in vars(verdicts[0])}


def heldout_requests(n: int, seed: int = 0) -> list[Request]:
    """n requests of the held-out split, the same ones each time."""
    return requesting.requests(torch.Generator().manual_seed(seed), n, "heldout")


# --- loading ----------------------------------------------------------------------------------------------------------


def _folder(kind: str, folder: Path | str | None) -> Path:
    return paths.data_folder() / FOLDERS[kind] if folder is None else Path(folder)


def load_face_lm(folder: Path | str | None = None) -> tuple["LlamaForCausalLM", "PreTrainedTokenizerFast"]:
    """The shipped caption writer (fp32, evaluation mode) and its tokenizer, after a check of their hashes.

    Raises:
        MissingWeightsError, WeightsHashError: a file is not there, or not the one that its folder lists.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = _folder("lm", folder)
    shipped.check_hashes(folder, "faces LM", f"{COMMAND} lm --out {folder}")
    with torch.random.fork_rng(devices=[]):  # the random start is overwritten, and must not move the global state
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder, local_files_only=True)).float()
    shipped.load_weights(model, folder / shipped.WEIGHTS, skip=("lm_head.weight",))
    model.tie_weights()
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def load_face_diffusion(weakened: bool = True, folder: Path | str | None = None) -> DiffusionBase:
    """The shipped diffusion model (fp32, evaluation mode, no gradients), after a check of its hashes.

    Args:
        weakened: the base to align; False: the one that was trained without wrong captions.

    Returns:
        unet, scheduler, encoder and patch, as `Diffusion(name, parents, unet, scheduler, encoder, patch=patch,
        value_range=(0, 1))` takes them.

    Raises:
        MissingWeightsError, WeightsHashError: a file is not there, or not the one that its folder lists.
    """
    from diffusers import DDIMScheduler, UNet2DConditionModel

    kind = "diffusion" if weakened else "diffusion-clean"
    folder = _folder(kind, folder)
    shipped.check_hashes(folder, "faces diffusion", f"{COMMAND} {kind} --out {folder}")
    with torch.random.fork_rng(devices=[]):
        unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(folder / "unet"))
        encoder = WordEncoder()
    shipped.load_weights(unet, folder / "unet" / UNET_WEIGHTS)
    shipped.load_weights(encoder, folder / "encoder" / shipped.WEIGHTS)
    scheduler = DDIMScheduler.from_config(DDIMScheduler.load_config(folder / "scheduler"))
    for module in (unet, encoder):
        module.eval().requires_grad_(False)
    return DiffusionBase(unet, scheduler, encoder, face_diffusion.PATCH)


UNET_WEIGHTS = "diffusion_pytorch_model.safetensors"


# --- writing ----------------------------------------------------------------------------------------------------------


def write_lm(folder: Path | str, steps: int = face_lm.STEPS, seed: int = face_lm.SEED, items: int = 200) -> dict:
    """Train the caption writer, measure it on held-out requests, write it with its card; returns the measurements."""
    started = time.monotonic()
    model, tokenizer, losses = face_lm.train(steps, seed=seed)
    seconds = time.monotonic() - started
    shipped.half_rounded(model)
    measured = face_lm.measure(model, tokenizer, heldout_requests(items), torch.Generator().manual_seed(seed))
    with atomic.folder(folder) as new:
        shipped.save_weights(model, new / shipped.WEIGHTS, skip=("lm_head.weight",))  # tied to the embedding
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(new)
        tokenizer.save_pretrained(new)
        shipped.write_hashes(new)
        card = _LM_CARD.format(
            steps=steps, seed=seed, seconds=seconds, items=items, words=len(tokenizer), loss=sum(losses[-50:]) / 50,
            parameters=_count(model), digest=paths.file_sha256(new / shipped.WEIGHTS), **_versions(),
            rows="\n".join(f"| {s} | " + " | ".join(f"{v:.3f}" for v in row.values()) + " |" for s, row in measured.items()),
        )  # fmt: skip
        atomic.write_text(new / "CARD.md", card)
    return measured


def write_diffusion(
    folder: Path | str, mislabelled: float, steps: int = face_diffusion.STEPS, seed: int = face_diffusion.SEED,
    work: Path | str | None = None, per_caption: int = 12, enabled: bool | None = None,
) -> dict:  # fmt: skip
    """Train a diffusion base, measure it on held-out captions, write it with its card; returns the measurements.

    Args:
        work: folder for checkpoints, to go on from after an interruption; removed at the end.
    """
    started = time.monotonic()
    trainer = face_diffusion.train(steps, mislabelled=mislabelled, seed=seed, folder=work, enabled=enabled)
    seconds = time.monotonic() - started
    measured = store_diffusion(trainer, folder, seconds, per_caption)
    if work is not None:
        shutil.rmtree(Path(work) / checkpoints.FOLDER, ignore_errors=True)
    return measured


def store_diffusion(trainer: face_diffusion.Trainer, folder: Path | str, seconds: float, per_caption: int = 12) -> dict:
    """Measure what a trainer has reached, and write it with its card."""
    base = trainer.averaged()
    for module in (base.unet, base.encoder):
        shipped.half_rounded(module)
    generator = torch.Generator().manual_seed(trainer.seed)
    measured = control(base, generator, per_caption)
    guided = family_means(control(base, generator, max(1, per_caption // 2), guidance=2.0))
    with atomic.folder(folder) as new:
        shipped.save_weights(base.unet, new / "unet" / UNET_WEIGHTS)
        base.unet.save_config(new / "unet")
        shipped.save_weights(base.encoder, new / "encoder" / shipped.WEIGHTS)
        base.scheduler.save_pretrained(new / "scheduler")
        shipped.write_hashes(new)
        atomic.write_text(new / "CARD.md", _diffusion_card(new, trainer, base, seconds, measured, guided, per_caption))
    return measured


def _diffusion_card(folder, trainer, base, seconds, measured, guided, per_caption) -> str:
    rows = [f"| {name} | " + " | ".join(f"{v:.3f}" for v in row.values()) + " |" for name, row in measured.items()]
    means = family_means(measured)
    kind = "diffusion" if trainer.mislabelled else "diffusion-clean"
    return _DIFFUSION_CARD.format(
        kind=kind, name=FOLDERS[kind], steps=trainer.steps, seed=trainer.seed, seconds=seconds, batch=trainer.batch,
        mislabelled=trainer.mislabelled, parameters=_count(base.unet), encoder=_count(base.encoder), rows="\n".join(rows),
        loss=sum(trainer.losses[-200:]) / len(trainer.losses[-200:]), per_caption=per_caption, sampling=SAMPLING_STEPS,
        digest=paths.file_sha256(folder / "unet" / UNET_WEIGHTS), face=means["face"], landscape=means["landscape"],
        worst=means["worst"], guided_face=guided["face"], guided_landscape=guided["landscape"], **_versions(),
    )  # fmt: skip


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _versions() -> dict[str, object]:
    import diffusers
    import transformers

    versions = {
        "torch": torch.__version__.partition("+")[0],  # the build does not matter
        "transformers": transformers.__version__,
        "diffusers": diffusers.__version__,
    }
    return versions | {"threads": torch.get_num_threads()}


_LM_CARD = """# Faces LM: answers a request with captions

* Origin: trained here from random weights on generated text by `python -m sysdpo_lab.worlds.face_models lm
  --out data/faces-lm --seed {seed} --steps {steps}` in {seconds:.0f} s on {threads} thread(s); torch {torch},
  transformers {transformers}. Other versions, processors and numbers of threads give slightly other weights.
* Model: Llama, 3 layers, width 96, 4 heads, {parameters} parameters (stored in fp16);
  word-level tokenizer, {words} tokens, no BOS, no chat template.
* Weights: model.safetensors, SHA-256 {digest};
  all files: SHA256SUMS, checked at load.
* Licence: Apache-2.0, like the code.
* Prompts: `<plain> {{x}} <write>`, or `<careful>`, `<creative>`, `<bold>`; an answer is captions joined by `;`, then `</s>`.
* Data: new texts at each step, of training requests only, out of order and now and then wrong on purpose (see the module);
  last loss {loss:.3f} nats a token.
* Use: the start of the system captions -> images. It is meant to be improvable, not good.

{items} held-out requests, two answers each, sampled at temperature 1:

| style | validity | caption order | faithfulness |
|---|---|---|---|
{rows}
"""

_DIFFUSION_CARD = """# Faces diffusion: draws a face or a landscape from a caption

* Origin: trained here from random weights on pictures drawn by the code, by `python -m sysdpo_lab.worlds.face_models
  {kind} --out data/{name} --seed {seed} --steps {steps}` in {seconds:.0f} s on {threads} thread(s) of a busy machine;
  torch {torch}, diffusers {diffusers}. Other versions, processors and numbers of threads give slightly other weights.
* Captions: {mislabelled:.0%} of the training captions name random degrees instead of the picture's own.
* Model: diffusers' UNet2DConditionModel on 4 x 4 pixel patches (6 x 6 x 48), {parameters} parameters, with a word
  encoder of {encoder} parameters that was trained with it; both stored in fp16 (means of the weights along training).
* Schedule: cosine, 1000 timesteps; the network predicts the clean picture; one caption of ten was dropped.
* Weights: unet/diffusion_pytorch_model.safetensors, SHA-256 {digest};
  all files: SHA256SUMS, checked at load.
* Licence: Apache-2.0, like the code.
* Data: {batch} new pictures a step; last loss {loss:.4f}.

Asked against measured level on captions that training never named, {per_caption} pictures of each (five captions an
attribute), DDIM with {sampling} steps and no guidance. Mean correlation: faces {face:.3f}, landscapes {landscape:.3f};
worst attribute {worst:.3f}. With guidance 2: faces {guided_face:.3f}, landscapes {guided_landscape:.3f}.

| attribute | correlation | mean absolute error | right colour |
|---|---|---|---|
{rows}
"""


# --- command line -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: train one of the models and write it with its card."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", choices=list(FOLDERS))
    parser.add_argument("--out", help="folder to write to; default: data/NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--work", help="folder for checkpoints of the diffusion model, to go on from when interrupted")
    options = parser.parse_args(arguments)
    out = options.out or f"data/{FOLDERS[options.model]}"
    if options.steps is not None and options.steps < 1:
        raise errors.OptionRangeError(f"--steps must be 1 or more, found {options.steps}")
    steps = {} if options.steps is None else {"steps": options.steps}
    if options.model == "lm":
        measured = write_lm(out, seed=options.seed, **steps)
    else:
        wrong = face_diffusion.MISLABELLED if options.model == "diffusion" else 0.0
        measured = write_diffusion(out, wrong, seed=options.seed, work=options.work, **steps)
    for name, row in measured.items():
        print(f"{name:10s}" + "".join(f"  {key} {value:.3f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
