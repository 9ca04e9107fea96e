"""`run faces`: a caption writer and a diffusion model, aligned as one system by SysDPO-Direct.

x (a request) -> captions (a text) -> images (a row of pictures). No gradient can flow from a picture to its caption;
preferences are about the pictures alone. See `faces_rows` for the recipe and `faces_data` for the preferences.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sysdpo_lab import atomic, errors, evaluation
from sysdpo_lab.experiments import faces_data, faces_rows
from sysdpo_lab.experiments.faces_rows import DEFAULT, ORACLE, ROWS, VIEWS, build_system, stage_weights, words_of
from sysdpo_lab.options import positive, whole
from sysdpo_lab.system import CompoundSystem
from sysdpo_lab.worlds import faces
from sysdpo_lab.worlds.faces import Request

if TYPE_CHECKING:
    from sysdpo_lab.experiments.runner import Context

TITLE = "Faces: a caption writer and a diffusion model, aligned as one system"
JUDGED = ("preference_score", "order_consistency", "caption_order", "faithfulness", "validity", "colour")
METRICS = (*JUDGED, "image_drift")
BY_NUMBER = ("preference_score", "order_consistency")
NUMBERS = (3, 4)
SHOWN_SIDE = 96  # pixels a side of a photograph in the strips
SHOWN = 8  # held-out requests whose first row of pictures is kept for the strips
DRIFT_DRAWS = 8  # timesteps a picture when image drift is measured
COUNTS = (
    "requests_1", "requests_2", "draws_1", "draws_2", "pairs", "timesteps", "steps_1", "steps_2", "steps_longer", "batch",
    "checkpoint_every", "heldout", "samples", "ddim_steps", "eval_batch",
)  # fmt: skip
WEIGHTS = ("penalty", "guidance", "anchor_captions", "anchor_images", "min_gap")
RATES = ("lr_round_1", "lr_captions", "lr_images", "beta", "weight")


# --- settings ---------------------------------------------------------------------------------------------------------


def rows_of(settings: Mapping[str, Any]) -> list[str]:
    """The rows of the table, in order; "default" stands for those that a reader needs, "all" for every one.

    Raises:
        UnknownOptionError: an unknown or repeated row, or one before the start.
    """
    named = {"default": DEFAULT, "all": ",".join(ROWS)}.get(settings["rows"], settings["rows"])
    rows = words_of(named)
    for row in rows:
        errors.check_option("row", row, ROWS)
    if rows[:1] != ["before"] or len(set(rows)) < len(rows):
        raise errors.UnknownOptionError(
            f"rows must begin with 'before', which the others are compared with, and name each row once; found {rows}"
        )
    return rows


def check(settings: Mapping[str, Any]) -> None:
    """Refuse settings that no run can have.

    Raises:
        UnknownOptionError: a row, split, style or base that does not exist, or a number out of range.
    """
    from sysdpo_lab.worlds import face_lm

    rows_of(settings)
    whole(1, **{name: settings[name] for name in COUNTS})
    whole(0, warmup=settings["warmup"])
    positive(0.0, **{name: settings[name] for name in WEIGHTS})
    positive(math.ulp(0.0), **{name: settings[name] for name in RATES})
    errors.check_option("split", settings["split"], ("validation", "heldout"))
    errors.check_option("error", settings["error"], ("noise", "prediction"))
    for style in words_of(settings["styles_1"]) + words_of(settings["styles_2"]):
        errors.check_option("style", style, face_lm.STYLES)
    if not 0 <= settings["same_captions"] < 1:
        raise errors.UnknownOptionError(f"same_captions is a share in [0, 1), found {settings['same_captions']!r}")
    if (
        "scorer" not in settings
        and settings["base"] not in ("weakened", "clean")
        and not Path(settings["base"]).is_dir()
    ):
        raise errors.UnknownOptionError(
            f"base={settings['base']!r}: choose weakened, clean, or the folder of a diffusion base"
        )


def asked(settings: Mapping[str, Any], world: Any = faces) -> list[Request]:
    """The requests that rows are measured on: the same ones for every seed."""
    return world.requests(torch.Generator().manual_seed(0), settings["heldout"], settings["split"])


# --- answers of a row -------------------------------------------------------------------------------------------------


def captions_by(context: "Context", seed: int, stage: str | None) -> list[Any]:
    """`samples` texts of captions for each request at temperature 1, the same random numbers for every stage."""
    kept = context.shared.setdefault(("captions", seed), {})
    if stage not in kept:
        options, world = context.settings, faces_rows.world_of(context)
        requests = asked(options, world)
        repeated = [request for request in requests for _ in range(options["samples"])]
        kept[stage] = (
            [world.join_captions(world.oracle_captions(request)) for request in repeated]
            if stage == ORACLE
            else _written(context, seed, stage, [world.render(request) for request in repeated])
        )
    return kept[stage]


def _written(context: "Context", seed: int, stage: str | None, words: list[str]) -> list[Any]:
    system = build_system(context, stage_weights(context, seed, stage) if stage else None)
    generator, size = torch.Generator().manual_seed(50_000 + seed), context.settings["eval_batch"]
    found = []
    for start in range(0, len(words), size):
        found += system["captions"].sample({"x": words[start : start + size]}, generator=generator)
    return found


def painted_by(context: "Context", seed: int, view: faces_rows.View) -> tuple[CompoundSystem, list[Tensor]]:
    """The system of a view and its pictures, one row for each text of captions, from the same noise for every view."""
    weights = stage_weights(context, seed, view.images) if view.images else {}
    system = build_system(context, {name: state for name, state in weights.items() if name == "images"})
    texts, size = captions_by(context, seed, view.captions), context.settings["eval_batch"]
    generator, found = torch.Generator().manual_seed(60_000 + seed), []
    for start in range(0, len(texts), size):
        found += [rows[0] for rows in faces_data.paint(system, texts[start : start + size], generator)]
    return system, found


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(context: "Context", row: str, seed: int, folder: Path) -> list[dict]:
    """The records of a row, one a request: means over its `samples` sequences (best-of-n: the best of the start's)."""
    view, options, world = VIEWS[row], context.settings, faces_rows.world_of(context)
    texts = captions_by(context, seed, view.captions)
    system, pictures = painted_by(context, seed, view)
    drifts = image_drift(context, system, seed)
    records, strips, size = [], [], options["samples"]
    for item, request in enumerate(asked(options, world)):
        mine = range(item * size, (item + 1) * size)
        verdicts = [world.judge(request, str(texts[i]), pictures[i]) for i in mine]
        best = max(range(size), key=lambda place: verdicts[place].preference_score) if row == "best-of-n" else 0
        used = [verdicts[best]] if row == "best-of-n" else verdicts
        means = {name: sum(getattr(v, name) for v in used) / len(used) for name in JUDGED}
        shown = {"x": world.render(request), "number": request.number, "captions": str(texts[mine[best]])}
        records.append({"seed": seed, "system": row, "item": item, **shown, **means, "image_drift": drifts[item]})
        strips.append(faces_data.to_bytes(_seen(world, pictures[mine[best]])))
    save_strips(folder / "strips.safetensors", strips[:SHOWN])
    return records


def _seen(world: Any, values: Tensor) -> Tensor:
    """Pictures for the strips: photographs are decoded and made small."""
    if world is faces or not len(values):
        return values
    return torch.nn.functional.interpolate(world.pictures(values), (SHOWN_SIDE, SHOWN_SIDE), mode="area")


def image_drift(context: "Context", system: CompoundSystem, seed: int) -> list[float]:
    """How much more denoising error than the start a system's image model has on the start's own pictures, a request.

    Relative: 0.1 is a rise by a tenth of the start's mean error. The prediction error of E8, the same noise for both.
    """
    if ("drift", seed) not in context.shared:
        start = build_system(context)
        world = faces_rows.world_of(context)
        words = [world.render(request) for request in asked(context.settings, world)]
        generator = torch.Generator().manual_seed(70_000 + seed)
        trace = {"captions": start["captions"].sample({"x": words}, generator=generator)}
        trace["images"] = [rows[0] for rows in faces_data.paint(start, trace["captions"], generator)]
        context.shared["drift", seed] = trace, _errors(start, trace, seed)
    trace, before = context.shared["drift", seed]
    return ((_errors(system, trace, seed) - before) / before.mean()).tolist()


@torch.no_grad()
def _errors(system: CompoundSystem, trace: Mapping[str, Any], seed: int) -> Tensor:
    generator, images = torch.Generator().manual_seed(80_000 + seed), system["images"]
    draws = []
    for _ in range(DRIFT_DRAWS):
        noise = images.draw_noise(trace["images"], generator=generator)
        draws.append(images.denoising_errors(trace["images"], trace, noise))
    return torch.stack(draws).mean(0).cpu()


def save_strips(path: Path, strips: Sequence[Tensor]) -> None:
    """Keep rows of pictures for the figure."""
    from safetensors.torch import save

    atomic.write_bytes(path, save({str(item): strip.contiguous() for item, strip in enumerate(strips) if len(strip)}))


def run_seed(context: "Context", seed: int) -> list[dict]:
    """Records of one seed, row after row; stages are trained when the first row needs them."""
    records = []
    for row in rows_of(context.settings):
        folder = context.out / f"seed-{seed}" / "rows" / row.replace(":", "-")
        context.say(f"seed {seed}, {row}")
        records += context.cached_records(folder, lambda row=row, folder=folder: measured(context, row, seed, folder))
    for key in [key for key in context.shared if isinstance(key, tuple) and key[1] == seed]:
        del context.shared[key]
    return records


def summarise(records: list[dict], seeds: Sequence[int]) -> tuple[list[dict], list[dict]]:
    """Rows and paired differences, over all requests and by number of pictures (chance of an order is 1 / n!)."""
    rows, differences = evaluation.summarise(records, METRICS, seeds)
    for number in NUMBERS:
        names = {f"{metric}_{number}": metric for metric in BY_NUMBER}
        part = [
            {
                **{key: record[key] for key in ("seed", "system", "item")},
                **{new: record[old] for new, old in names.items()},
            }
            for record in records
            if record["number"] == number
        ]
        if part:
            more, apart = evaluation.summarise(part, tuple(names), seeds)
            rows, differences = rows + more, differences + apart
    return rows, differences


# --- what people see --------------------------------------------------------------------------------------------------


def figures(context: "Context", summary: dict, records: list[dict]) -> dict:
    """Graph, order consistency, preference score, strips before and after, shares of the margin, winners' and losers' errors."""
    from sysdpo_lab.experiments import faces_figures

    return faces_figures.figures(context, summary, records)


def prose(context: "Context") -> str:
    """What the report says above the table."""
    options = context.settings
    if context.profile.name == "paper":
        from sysdpo_lab.experiments import faces_paper

        return faces_paper.prose(context)
    writer = "SmolLM2 with the stored captions adapter" if "adapter" in options else "A tiny language model"
    return (
        f"{writer} writes captions for a request, a small diffusion model ({options['base']} base) paints one "
        f"picture a caption. {options['samples']} sequences a request at temperature 1 on {options['heldout']} requests of the "
        f"{options['split']} split, pictures by {options['ddim_steps']} steps of DDIM with guidance "
        f"{options['guidance']:g}; every row gets the same random numbers. "
        "The judge measures the asked attribute in the pixels. preference_score and order_consistency are defined here; the "
        "paper's own formulas are not available to us. A sequence that does not parse counts as -1 and 0.\n\n"
        "The recipe has two rounds: round 1 trains the captions alone; round 2 starts from its result, which is its reference, "
        "on preferences among that system's own answers. only:captions, separate and joint see the same pairs in round 2. "
        "Winners are anchored (their negative log-probability, or denoising error, is added to the loss): ours, not the "
        f"paper's; weights {options['anchor_captions']:g} and {options['anchor_images']:g}. beta = {options['beta']:g}, W = "
        f"{options['weight']:g} on the {options['error']} error, {options['timesteps']} timestep(s) a picture.\n\n"
        "best-of-n: the best of the start's sequences by the judge itself. only:images: trained on the start's answers. "
        "swap:captions: joint's captions, the start's pictures; swap:images the reverse. oracle: a perfect writer's captions. "
        "winners-only: round 2 without the preference term; preference-only: without anchors; one-round: both components on "
        "the start's answers at once, with anchors and without (the paper's SysDPO-Direct as it is). image_drift: relative "
        "rise of the denoising error on the start's own pictures."
    )


def samples(context: "Context", records: list[dict]) -> list[dict]:
    """Captions before and after, for the first requests of the first seed."""
    first, last = records[0]["seed"], "joint" if any(r["system"] == "joint" for r in records) else records[-1]["system"]
    mine = {(r["system"], r["item"]): r for r in records if r["seed"] == first}
    shown = []
    for item in range(min(6, len({item for _, item in mine}))):
        before, after = mine["before", item], mine[last, item]
        score = f"{before['preference_score']:.2f} -> {after['preference_score']:.2f}"
        shown.append(
            {"x": before["x"], "before": before["captions"], f"after ({last})": after["captions"], "score": score}
        )
    return shown
