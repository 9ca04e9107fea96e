"""Rows of `run faces`: which stage is trained from what on which data, and whose captions meet whose pictures.

A stage is one training run; a row of the table is a view: captions of one stage, pictures of another. The two-round
recipe: round 1 trains the captions alone, on answers of the start; round 2 begins with its result, which is also its
reference, and trains on answers of that system. Every stage of round 2 sees the same pairs.
"""

import copy
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sysdpo_lab import anchoring, atomic, checkpoints, training
from sysdpo_lab.components import CausalLM
from sysdpo_lab.experiments import faces_data
from sysdpo_lab.preferences import Pairs
from sysdpo_lab.system import CompoundSystem
from sysdpo_lab.worlds import faces

if TYPE_CHECKING:
    from sysdpo_lab.experiments.runner import Context

BOTH = COMPONENTS = ("captions", "images")
WEIGHTS = "trained.safetensors"
ORACLE = "oracle"


@dataclass(frozen=True)
class Stage:
    """One training run.

    Args:
        start: the stage whose weights it begins with, which are its reference; None: the shipped models.
        data: round of the preference data, 1 or 2.
        trained: components; the others are frozen.
        objective: "direct" (one margin) or "separate" (a sigmoid a component).
        preference: factor of the preference loss; 0: fine-tuning on the winners.
        anchors: whether winners are anchored (ours, see `anchoring`).
        steps: the setting that says how many steps it has.
        lr: {component: the setting that holds its learning rate}.
        alike: whether pairs with the same captions are in its data; captions learn nothing from those.
    """

    start: str | None
    data: int
    trained: tuple[str, ...] = BOTH
    objective: str = "direct"
    preference: float = 1.0
    anchors: bool = True
    steps: str = "steps_2"
    lr: Mapping[str, str] = field(default_factory=lambda: {"captions": "lr_captions", "images": "lr_images"})
    alike: bool = True


STAGES = {
    "round-1": Stage(None, 1, ("captions",), steps="steps_1", lr={"captions": "lr_round_1"}, alike=False),
    "only:captions": Stage("round-1", 2, ("captions",)),
    "only:images": Stage(None, 1, ("images",)),
    "separate": Stage("round-1", 2, objective="separate"),
    "joint": Stage("round-1", 2),
    "only:captions-longer": Stage("round-1", 2, ("captions",), steps="steps_longer"),
    "winners-only": Stage("round-1", 2, preference=0.0),
    "preference-only": Stage("round-1", 2, anchors=False),
    "one-round": Stage(None, 1),
    "one-round-preference-only": Stage(None, 1, anchors=False),
}


EXPLAINING = ("only:captions-longer", "winners-only", "preference-only", "one-round", "one-round-preference-only")


@dataclass(frozen=True)
class View:
    """A row of the table: whose captions and whose pictures.

    Args:
        captions: a stage, None for the start's, or "oracle": those that a perfect writer writes.
        images: a stage, or None for the start's.
    """

    captions: str | None
    images: str | None


def _own(stage: str) -> View:
    trained = STAGES[stage].trained
    return View(stage if "captions" in trained else None, stage if "images" in trained else None)


VIEWS = {
    "before": View(None, None),
    "best-of-n": View(None, None),
    **{stage: _own(stage) for stage in ("only:captions", "only:images", "separate", "joint")},
    "swap:captions": View("joint", None),
    "swap:images": View(None, "joint"),
    "oracle": View(ORACLE, None),
    "oracle:joint": View(ORACLE, "joint"),
    **{stage: _own(stage) for stage in EXPLAINING},
}
ROWS = tuple(VIEWS)
DEFAULT = "before,best-of-n,only:captions,only:images,separate,joint,swap:captions,swap:images,oracle,oracle:joint"


# --- the system -------------------------------------------------------------------------------------------------------


def picture_captions(answer: str) -> list[str] | None:
    """The captions that pictures are painted of, or None where the answer does not parse.

    >>> picture_captions("a very old face on a red background; a cat") is None
    True
    """
    found = faces.parse_answer(answer)
    return None if found is None else [str(caption) for caption in found]


def world_of(context: "Context") -> Any:
    """What is asked and who judges: the drawn world (the module `worlds.faces`), or the photographs of the paper profile."""
    if context.profile.name != "paper":
        return faces
    from sysdpo_lab.experiments import faces_paper

    return faces_paper.world(context)


def load_bases(context: "Context") -> tuple[Any, Any]:
    """((caption model, tokenizer), diffusion base), loaded once a run."""
    from sysdpo_lab import loading
    from sysdpo_lab.worlds import face_models

    if "bases" not in context.shared:
        wanted = context.settings["base"]
        folder = None if wanted in ("weakened", "clean") else wanted
        diffusion = face_models.load_face_diffusion(weakened=wanted != "clean", folder=folder)
        pretrained = "adapter" in context.settings
        writer = loading.load_causal_lm(_pretrained(context)) if pretrained else face_models.load_face_lm()
        context.shared["bases"] = writer, diffusion
    return context.shared["bases"]


def _pretrained(context: "Context") -> str:
    from sysdpo_lab.worlds import face_sft

    return context.settings["model"] or face_sft.SOURCE


def templates_of(context: "Context") -> Mapping[str, Any]:
    """{style: template} of the caption writer's prompts."""
    from sysdpo_lab.worlds import face_lm, face_sft

    if context.profile.name == "paper":
        return world_of(context).TEMPLATES
    return face_sft.TEMPLATES if "adapter" in context.settings else face_lm.TEMPLATES


def build_system(context: "Context", weights: Mapping[str, Mapping[str, Tensor]] | None = None) -> CompoundSystem:
    """x -> captions -> images; the frozen start is what it is built with.

    At tiny all weights of both are trained; at small the captions are a pretrained model's with the stored adapter, which
    is what is trained of it.

    Args:
        weights: {component: state of what is trained of it} in place of the shipped one.
    """
    from sysdpo_lab.components import Diffusion

    if context.profile.name == "paper":
        from sysdpo_lab.experiments import faces_paper

        return faces_paper.build_system(context, weights)
    _, base = load_bases(context)
    options, weights, unet = context.settings, weights or {}, copy.deepcopy(base.unet)
    if "images" in weights:
        unet.load_state_dict(weights["images"])
    images = Diffusion(
        "images", ["captions"], unet.requires_grad_(True), base.scheduler, base.encoder, options["weight"],
        error=options["error"], timesteps=options["timesteps"], captions=picture_captions, patch=base.patch,
        value_range=(0.0, 1.0), image_shape=(3, faces.SIZE, faces.SIZE), steps=options["ddim_steps"],
        guidance_scale=options["guidance"], max_batch=128,
    )  # fmt: skip
    return CompoundSystem([_writer(context, weights.get("captions")), images], inputs=("x",), output="images")


def _writer(context: "Context", state: Mapping[str, Tensor] | None) -> CausalLM:
    from sysdpo_lab.worlds import face_lm, face_sft

    (model, tokenizer), _ = load_bases(context)
    if "adapter" in context.settings:
        network, adapter = _with_adapter(context, model, state)
        return CausalLM(
            "captions", ["x"], network, tokenizer, face_sft.TEMPLATES["plain"], adapter=adapter,
            max_new_tokens=face_sft.MAX_NEW_TOKENS,
        )  # fmt: skip
    network = copy.deepcopy(model)
    if state is not None:
        network.load_state_dict(state)
    template = face_lm.TEMPLATES["plain"]
    return CausalLM(
        "captions", ["x"], network.requires_grad_(True), tokenizer, template, max_new_tokens=face_lm.MAX_NEW_TOKENS
    )


def _with_adapter(context: "Context", model: Any, state: Mapping[str, Tensor] | None) -> tuple[Any, Any]:
    from sysdpo_lab.experiments import faces_paper, language
    from sysdpo_lab.worlds import face_sft

    folder = face_sft.adapter_folder(context.settings["adapter"])
    return faces_paper.adapted(language.fresh_copy(model), "captions", folder, state)


def state_of(system: CompoundSystem, names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """The networks' weights, copied; of a component with an adapter, the adapter's."""
    return {name: {key: t.detach().clone() for key, t in _trained_part(system[name]).items()} for name in names}


def _trained_part(component: Any) -> Mapping[str, Tensor]:
    from sysdpo_lab.components import adapters

    if not component.adapter_name:
        return component.network.state_dict()
    return adapters.adapter_parameters(component.model, component.adapter_name)


def save_state(path: Path, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write `state_of` as one safetensors file, atomically."""
    from safetensors.torch import save

    flat = {f"{name}/{key}": t.contiguous() for name, part in state.items() for key, t in part.items()}
    atomic.write_bytes(path, save(flat))


def load_state(path: Path) -> dict[str, dict[str, Tensor]]:
    """Read what `save_state` wrote."""
    from safetensors.torch import load_file

    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(path).items():
        name, _, rest = key.partition("/")
        found.setdefault(name, {})[rest] = tensor
    return found


# --- data -------------------------------------------------------------------------------------------------------------


def answers_of_round(context: "Context", seed: int, number: int) -> list[faces_data.Answer]:
    """The answers that a round's pairs are made of; read back even when they are new, so that a resumed run trains alike."""
    folder = context.out / f"seed-{seed}" / f"data-{number}"
    if not (folder / "pictures.safetensors").is_file():
        context.say(f"seed {seed}, preference data of round {number}")
        faces_data.save_answers(folder, _new_answers(context, seed, number))
    return faces_data.load_answers(folder)


def _new_answers(context: "Context", seed: int, number: int) -> list[faces_data.Answer]:
    options = context.settings
    system = build_system(context, None if number == 1 else stage_weights(context, seed, "round-1"))
    generator = torch.Generator().manual_seed(1000 * number + seed)
    world = world_of(context)
    asked = world.requests(generator, options[f"requests_{number}"], "train")
    styles = words_of(options[f"styles_{number}"])
    return faces_data.draw_answers(
        system, asked, templates_of(context), styles, options[f"draws_{number}"], options["penalty"], generator,
        options["eval_batch"], world,
    )  # fmt: skip


def pairs_of(context: "Context", seed: int, stage: Stage) -> Pairs:
    """The pairs that a stage trains on; their card is written beside the answers."""
    options = context.settings
    answers = answers_of_round(context, seed, stage.data)
    found = faces_data.candidates(answers, options["min_gap"])
    share = options["same_captions"] if stage.alike else 0.0
    chosen = faces_data.choose(
        found, options["pairs"], share, torch.Generator().manual_seed(7000 + 10 * seed + stage.data)
    )
    folder = context.out / f"seed-{seed}" / f"data-{stage.data}"
    used = {
        key: options[key]
        for key in (f"styles_{stage.data}", f"draws_{stage.data}", "min_gap", "penalty", "same_captions", "base")
    }
    numbers = faces_data.statistics(answers, found, chosen)
    name = "CARD.md" if stage.alike else "CARD-captions.md"
    drawn_from = "the start" if stage.data == 1 else "the system after round 1"
    title = f"Preference data of round {stage.data}, seed {seed}: answers of {drawn_from}"
    atomic.write_text(folder / name, faces_data.card(numbers, title, used))
    context.note(f"pairs of seed {seed}, round {stage.data}", _told(numbers))
    return faces_data.as_pairs(answers, chosen, str(folder))


def _told(numbers: Mapping[str, Any]) -> str:
    answers = f"{numbers['answers']} answers ({numbers['usable']} usable)"
    alike = numbers["pairs with the same captions"]
    return f"{numbers['pairs']} from {answers}, {alike} with the same captions, {numbers['ties']} ties left out"


def words_of(text: str) -> list[str]:
    """The words of a comma-separated setting.

    >>> words_of("plain, bold")
    ['plain', 'bold']
    """
    return [word.strip() for word in text.split(",") if word.strip()]


# --- training ---------------------------------------------------------------------------------------------------------


def objective_of(stage: Stage, options: Mapping[str, Any]):
    """What a stage trains with.

    Where one component is trained, Separate-DPO and SysDPO-Direct are the same loss (a frozen log-ratio is 0), and the
    former does not score the others.
    """
    alone = stage.objective == "separate" or len(stage.trained) == 1
    inner = training.separate(options["beta"]) if alone else training.direct(options["beta"])
    anchors = {name: options[f"anchor_{name}"] for name in COMPONENTS} if stage.anchors else {}
    if not any(anchors.values()):
        return inner
    return anchoring.anchored(inner, anchors, stage.preference)


def stage_folder(context: "Context", seed: int, name: str) -> Path:
    """Where a stage keeps its history and its weights."""
    return context.out / f"seed-{seed}" / name.replace(":", "-")


def stage_weights(context: "Context", seed: int, name: str) -> dict[str, dict[str, Tensor]]:
    """The trained networks of a stage and of the stages before it, trained now unless they are there."""
    stage, path = STAGES[name], stage_folder(context, seed, name) / WEIGHTS
    before = stage_weights(context, seed, stage.start) if stage.start else {}
    if not path.is_file():
        context.say(f"seed {seed}, training {name}")
        system = train_stage(context, seed, name, before)
        save_state(path, state_of(system, stage.trained))
        shutil.rmtree(path.parent / checkpoints.FOLDER, ignore_errors=True)  # 60 MB that only an unfinished run needs
    return {**before, **load_state(path)}


def train_stage(context: "Context", seed: int, name: str, start: Mapping) -> CompoundSystem:
    """Train one stage from its start; the system with its frozen reference."""
    stage, options = STAGES[name], context.settings
    pairs = pairs_of(context, seed, stage)
    system = build_system(context, start)
    for frozen in set(COMPONENTS) - set(stage.trained):
        system.freeze(frozen)
    began = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.train(
            system, pairs, objective_of(stage, options), steps=options[stage.steps],
            lr={part: options[stage.lr[part]] for part in stage.trained}, generator=torch.Generator().manual_seed(seed),
            out=stage_folder(context, seed, name), resume=True, batch_size=options["batch"], warmup=options["warmup"],
            schedule="linear", betas=(0.9, 0.99), checkpoint_every=options["checkpoint_every"], progress=context.progress,
        )  # fmt: skip
    context.note(f"CPU seconds of seed {seed}, {name}", f"{time.process_time() - began:.0f}")
    for warning in caught:
        context.note(f"{warning.category.__name__}, seed {seed}, {name}", str(warning.message))
    return system
