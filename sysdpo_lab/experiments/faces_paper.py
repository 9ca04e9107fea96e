"""`run faces --profile paper`: Llama-3-8B-Instruct writes captions, Stable Diffusion 1.5 draws them, LoRA on both.

The same rows, rounds, objective and measures as at tiny (`faces_rows`, `faces`); here is only what differs: the models and
their adapters, the world of photographs and its judge. Pictures travel as latents, stored in half precision.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sysdpo_lab.components import CausalLM, Diffusion, adapters
from sysdpo_lab.components.image_space import ImageSpace
from sysdpo_lab.system import CompoundSystem
from sysdpo_lab.worlds import clip_scorer, photos

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sysdpo_lab.experiments.runner import Context

DECODED_AT_ONCE = 8


class Bases(NamedTuple):
    """The frozen models of a run.

    Attributes:
        language, tokenizer: the caption writer.
        parts: of the diffusion pipeline; its VAE serves the judge alone.
        vae_scale: a side of a picture over a side of its latents.
    """

    language: nn.Module
    tokenizer: Any
    parts: Any
    vae_scale: int


def device() -> str:
    """Where the models run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_bases(context: "Context") -> Bases:
    """Both models, from the hub or from the folders that `--set model=` and `base=` name; loaded once a run."""
    from sysdpo_lab import loading

    if "bases" not in context.shared:
        options, dtype = context.settings, getattr(torch, context.settings["dtype"])
        source, pipeline = options["model"] or context.profile.model.split(" + ")[0], options["base"]
        language, tokenizer = loading.load_causal_lm(source, dtype=dtype, revision=options["revision"] or None)
        parts = loading.load_diffusion(pipeline, revision=options["base_revision"] or None, dtype=dtype)
        vae = loading.load_part(
            pipeline, "vae", revision=options["base_revision"] or None
        )  # float32: half may overflow
        parts = parts._replace(vae=vae.to(device()))
        for module in (language, parts.unet, parts.text_encoder):
            module.to(device())
        commit = getattr(language.config, "_commit_hash", None)
        context.note("model", f"{source}, commit {commit}" if commit else source)
        context.note("diffusion", pipeline)
        scale = 2 ** (len(vae.config.block_out_channels) - 1)
        context.shared["bases"] = Bases(language, tokenizer, parts, scale)
    return context.shared["bases"]


def world(context: "Context") -> photos.Photos:
    """Requests, prompts and the judge of a run; the scorer is read from `--set scorer=`."""
    if "world" not in context.shared:
        scorer = clip_scorer.load_scorer(context.settings["scorer"], device())
        context.shared["world"] = photos.Photos(scorer, decoder(load_bases(context).parts.vae))
    return context.shared["world"]


def decoder(vae: nn.Module):
    """Latents -> pictures in [0, 1], a few at a time."""
    space = ImageSpace("images", vae, value_range=(0.0, 1.0))

    @torch.no_grad()
    def decode(latents: Float[Tensor, "n C h w"]) -> Float[Tensor, "n 3 H W"]:
        weight = next(vae.parameters())
        parts = latents.to(weight.device, weight.dtype).split(DECODED_AT_ONCE)
        return torch.cat([space.to_images(part).float().cpu() for part in parts])

    return decode


# --- the system -------------------------------------------------------------------------------------------------------


def build_system(context: "Context", weights: Mapping[str, Mapping[str, Tensor]] | None = None) -> CompoundSystem:
    """x -> captions -> images (latents) with a LoRA adapter on each model.

    The frozen start is the bare base, or the adapters in `weights`.
    """
    from sysdpo_lab.components import TextEncoder
    from sysdpo_lab.experiments.language import fresh_copy

    bases, options, weights = load_bases(context), context.settings, weights or {}
    language = adapted(fresh_copy(bases.language), "captions", options["rank"], weights.get("captions"))
    unet = adapted(fresh_copy(bases.parts.unet), "images", lora(options["rank"]), weights.get("images"))
    captions = CausalLM(
        "captions", ["x"], language[0], bases.tokenizer, photos.plain, adapter=language[1],
        max_new_tokens=options["max_new_tokens"],
    )  # fmt: skip
    size = bases.parts.unet.config.sample_size
    images = Diffusion(
        "images", ["captions"], unet[0], bases.parts.scheduler, TextEncoder(bases.parts.text_encoder, bases.parts.tokenizer),
        options["weight"], error=options["error"], timesteps=options["timesteps"], captions=photos.parse_answer,
        image_shape=(bases.parts.unet.config.in_channels, size, size), steps=options["ddim_steps"],
        guidance_scale=options["guidance"], max_batch=options["eval_batch"], adapter=unet[1],
    )  # fmt: skip
    return CompoundSystem([captions, images], inputs=("x",), output="images")


def lora(rank: int) -> Any:
    """LoRA on the attention of a U-Net, as a rank given to `Diffusion` makes it."""
    from peft import LoraConfig

    from sysdpo_lab.components.diffusion import ATTENTION

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(ATTENTION))


def adapted(model: nn.Module, name: str, adapter: Any, state: Mapping[str, Tensor] | None) -> tuple[nn.Module, Any]:
    """(model, adapter) for a component: a new adapter, or one that holds `state` already, which is then its reference."""
    if state is None:
        return model, adapter
    attached = adapters.attach(model, adapter, name)
    parameters = adapters.adapter_parameters(attached.model, attached.name)
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(state[key])
    return attached.model, attached.name


# --- what people see --------------------------------------------------------------------------------------------------


def prose(context: "Context") -> str:
    """What the report says above the table."""
    options = context.settings
    language = options["model"] or context.profile.model.split(" + ")[0]
    return (
        f"{language} writes captions, {options['base']} draws them; LoRA of rank {options['rank']} on both. "
        f"{options['samples']} sequences a request at temperature 1 on {options['heldout']} requests of the {options['split']} "
        f"split; {options['ddim_steps']} steps, guidance {options['guidance']:g}. Levels of the asked attributes are measured by "
        f"{options['scorer']}; preferences and results come from this same scorer. preference_score and order_consistency are "
        "defined here; the paper's own formulas, requests and scorer are not available to us.\n\n"
        "one-round is SysDPO-Direct as in the paper: both components on answers of the start. only:captions, separate and joint "
        "have two rounds: the captions alone on answers of the start, then the rest on answers of that system. Anchors on the "
        f"winners: {options['anchor_captions']:g} and {options['anchor_images']:g} (0: none, as in the paper). beta = "
        f"{options['beta']:g}, W = {options['weight']:g} on the {options['error']} error."
    )


def plot_strips(strips: Mapping[tuple[str, int], Tensor], records: Sequence[Mapping]) -> "Figure":
    """One line a request, one column a system: its first row of photographs.

    Args:
        strips: {(system, item): (n, 3, H, W), 8 bits a colour}.
        records: of the run, for the requests.
    """
    from matplotlib.figure import Figure

    from sysdpo_lab.experiments.faces_figures import joined

    told = {r["item"]: r["x"] for r in records if r["seed"] == records[0]["seed"]}
    systems, items = list(dict.fromkeys(system for system, _ in strips)), sorted({item for _, item in strips})
    figure = Figure(figsize=(4.2 * len(systems), 1.5 * len(items)), facecolor="white", layout="constrained")
    axes = figure.subplots(len(items), len(systems), squeeze=False)
    for line, item in enumerate(items):
        for ax, system in zip(axes[line], systems):
            ax.set_axis_off()
            ax.set_title(system if line == 0 else "", fontsize=9)
            if (system, item) in strips:
                ax.imshow(joined(strips[system, item]).numpy())
            else:
                ax.text(0.5, 0.5, "no pictures", ha="center", transform=ax.transAxes, fontsize=8)
        axes[line][0].text(0, -0.1, told[item], fontsize=7, va="top", transform=axes[line][0].transAxes)
    return figure
