"""`run two-llm`: two language models, draft and refine, aligned as one system on the restaurants world.

x -> draft -> refine, x -> refine; two LoRA adapters on one base; SysDPO-Sampling with diverse beam search, k = 2.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sysdpo_lab import errors, evaluation, preferences, samplers
from sysdpo_lab.components.base import take_rows
from sysdpo_lab.optimisation import SCHEDULES
from sysdpo_lab.options import positive, whole
from sysdpo_lab.preferences import Pairs
from sysdpo_lab.system import CompoundSystem
from sysdpo_lab.worlds import restaurants

if TYPE_CHECKING:
    from sysdpo_lab.experiments.runner import Context

TITLE = "Two language models, draft and refine, aligned as one system"
METRICS = ("wr_prompted", "wr_chosen", "task_score", "validity", "words", "draft_score", "margin_accuracy")
NODES = ("draft", "refine")
SMALL_MODEL = "smollm2-135m-instruct"
ROWS = ("prompted", "best-of-n", "separate", *(f"only:{name}" for name in NODES), "joint")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHOICES = {
    "data": ("on-policy", "written"),
    "dtype": ("auto", *DTYPES),
    "sampler": ("diverse_beam", "monte_carlo", "gumbel_top_k"),
    "schedule": SCHEDULES,
}
COUNTS = (
    "pairs", "heldout", "candidates", "steps", "batch", "k", "rank", "max_new_tokens", "best_of", "checkpoint_every",
    "eval_batch",
)  # fmt: skip


# --- the system ---------------------------------------------------------------------------------------------------------


def load_base(context: "Context") -> tuple[Any, Any]:
    """Model and tokenizer of the profile, loaded once a run."""
    if "base" not in context.shared:
        load = _load_tiny if context.profile.name == "tiny" else _load_small
        model, tokenizer = load(context)
        context.shared["base"] = model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer
        context.note("dtype", str(model.dtype).removeprefix("torch."))
    return context.shared["base"]


def _load_tiny(context: "Context") -> tuple[Any, Any]:
    from sysdpo_lab.worlds.tiny_lm import load_tiny_lm

    model, tokenizer = load_tiny_lm()
    return model.to(DTYPES.get(context.settings["dtype"], torch.float32)), tokenizer


def _load_small(context: "Context") -> tuple[Any, Any]:
    from sysdpo_lab import loading

    found = loading.load_causal_lm(SMALL_MODEL, dtype=DTYPES.get(context.settings["dtype"], torch.bfloat16))
    if context.settings["dtype"] == "auto" and measured_dtype(context, found[0]) != torch.bfloat16:
        found = loading.load_causal_lm(SMALL_MODEL, dtype=torch.float32)  # not .to(): bf16 has rounded the weights
    return found


def measured_dtype(context: "Context", model: Any) -> torch.dtype:
    """The quicker of fp32 and bf16 on this machine; a resumed run keeps what it began with."""
    from sysdpo_lab import atomic, loading

    path = context.out / "dtype.json"
    if context.resume and path.is_file():
        return DTYPES[json.loads(path.read_text(encoding="utf-8"))["dtype"]]
    dtype, seconds = loading.measure_dtype(model)
    context.say(f"precision: {dtype} (one-second measurement: {seconds})")
    atomic.write_json(path, {"dtype": str(dtype).removeprefix("torch."), "seconds": seconds})
    return dtype


def build_system(context: "Context") -> CompoundSystem:
    """A fresh system: the prompted start, with two untrained adapters on the shared base.

    The adapters start the same for every seed; a training seed changes the data, their order and the draws.
    """
    from sysdpo_lab.components import CausalLM

    model, tokenizer = load_base(context)
    model = fresh_copy(model)
    tiny = context.profile.name == "tiny"
    templates = (restaurants.TINY_DRAFT, restaurants.TINY_REFINE) if tiny else (restaurants.CHAT_DRAFT, restaurants.CHAT_REFINE)
    options = {"max_new_tokens": context.settings["max_new_tokens"], "diversity_penalty": context.settings["diversity_penalty"]}
    draft = CausalLM("draft", ["x"], model, tokenizer, templates[0], adapter=context.settings["rank"], **options)
    refine = CausalLM("refine", ["x", "draft"], model, tokenizer, templates[1], adapter=context.settings["rank"], **options)
    return CompoundSystem([draft, refine], inputs=("x",), output="refine")


def fresh_copy(model: Any) -> Any:
    """The base without adapters of an earlier row; its frozen weights are shared, not copied."""
    import copy

    memo = {id(parameter): parameter for parameter in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo)


# --- data ---------------------------------------------------------------------------------------------------------------


def training_pairs(context: "Context", seed: int) -> Pairs:
    """Preference pairs of the training split: written (references against faults) or sampled from the start and judged."""
    options = context.settings
    generator = torch.Generator().manual_seed(1000 + seed)
    if options["data"] == "written":
        return restaurants.preference_pairs(options["pairs"], generator, "train")
    path = context.out / f"seed-{seed}" / "pairs.jsonl"
    if not path.is_file():
        preferences.save(path, sampled_pairs(context, seed, generator))
    # read back even when they are new: a resumed run, on another number of threads perhaps, must train on the same pairs
    return preferences.load(path, on_error="raise", duplicates="keep")[0]


def sampled_pairs(context: "Context", seed: int, generator: torch.Generator) -> Pairs:
    """On-policy pairs: of each record's sampled answers, the judge's best against its worst."""
    options = context.settings
    system = build_system(context)
    records = restaurants.records(generator, options["pairs"], "train")
    inputs = [restaurants.render(record) for record in records]
    answers = [[] for _ in inputs]
    for _ in range(options["candidates"]):
        for trace, rows in in_batches(system.sample, inputs, options["eval_batch"], generator):
            for row, answer in zip(rows, trace["refine"]):
                answers[row].append(answer)
    pairs, ties = restaurants.pairs_from_candidates(inputs, answers, generator, options["min_gap"])
    context.note(f"pairs of seed {seed}", f"{len(pairs)} kept, {ties} records without a clear pair")
    return pairs


def in_batches(run, inputs: Sequence[str], size: int, generator: torch.Generator | None = None):
    """Traces of `run` (system.sample or system.generate) over batches of inputs, with their row numbers."""
    for start in range(0, len(inputs), size):
        rows = list(range(start, min(start + size, len(inputs))))
        batch = {"x": take_rows(inputs, rows)}
        yield (run(batch) if generator is None else run(batch, generator=generator)), rows


# --- training and measuring ---------------------------------------------------------------------------------------------


def objective_of(context: "Context", row: str):
    """What a row of the table trains with."""
    from sysdpo_lab import training

    options = context.settings
    if row == "separate":
        return training.separate(options["beta"])
    extra = {"diversity_penalty": options["diversity_penalty"]} if options["sampler"] == "diverse_beam" else {}
    return training.sampling(options["beta"], getattr(samplers, options["sampler"]), options["k"], **extra)


def train_row(context: "Context", row: str, system: CompoundSystem, pairs: Pairs, seed: int, folder: Path):
    """Train one row; freezes what the row does not train. Returns the history."""
    from sysdpo_lab import training

    options = context.settings
    if row.startswith("only:"):
        for name in NODES:
            if row != f"only:{name}":
                system.freeze(name)
    return training.train(
        system, pairs, objective_of(context, row), steps=options["steps"], lr=options["lr"],
        generator=torch.Generator().manual_seed(seed), out=folder, resume=True, batch_size=options["batch"],
        warmup=options["warmup"], schedule=options["schedule"], checkpoint_every=options["checkpoint_every"],
        progress=context.progress,
    )  # fmt: skip


def answers_of(context: "Context", row: str, system: CompoundSystem, inputs: Sequence[str], seed: int) -> list[dict]:
    """Draft and final of every held-out input: greedy for every component, or the best of n samples."""
    options = context.settings
    found: list[dict] = [{} for _ in inputs]
    if row != "best-of-n":
        for trace, rows in in_batches(system.generate, inputs, options["eval_batch"]):
            for row_number, draft, final in zip(rows, trace["draft"], trace["refine"]):
                found[row_number] = {"draft": draft.text, "refine": final.text, "truncated": final.truncated}
        return found
    generator = torch.Generator().manual_seed(2000 + seed)
    for _ in range(options["best_of"]):
        for trace, rows in in_batches(system.sample, inputs, options["eval_batch"], generator):
            for number, draft, final in zip(rows, trace["draft"], trace["refine"]):
                new = {"draft": draft.text, "refine": final.text, "truncated": final.truncated}
                record = restaurants.parse(inputs[number])
                if not found[number] or restaurants.compare(record, final.text, found[number]["refine"]) == 1:
                    found[number] = new
    return found


def start_answers(context: "Context", system: CompoundSystem, inputs: Sequence[str]) -> list[dict]:
    """The start decodes greedily and its adapters add nothing yet: one measurement serves every seed."""
    if "start" not in context.shared:
        context.shared["start"] = answers_of(context, "prompted", system, inputs, seed=0)
    return context.shared["start"]


def score(x: str, answer: dict, chosen: str, start: dict | None) -> dict:
    """All metrics of one held-out record."""
    record = restaurants.parse(x)
    verdict = restaurants.judge(record, answer["refine"])
    found = {
        "task_score": verdict.score,
        "validity": float(verdict.valid and not answer["truncated"]),
        "words": float(verdict.words),
        "draft_score": restaurants.judge(record, answer["draft"]).score,
        "wr_chosen": restaurants.compare(record, answer["refine"], chosen),
    }
    if start is not None:
        found["wr_prompted"] = restaurants.compare(record, answer["refine"], start["refine"])
    return found


def margin_accuracy(context: "Context", system: CompoundSystem, pairs: Pairs, seed: int) -> list[float]:
    """1, 1/2 or 0 for each held-out pair: is the Sampling margin positive?"""
    from sysdpo_lab import training

    out = training.margins(
        system, pairs, objective_of(context, "joint"), torch.Generator().manual_seed(3000 + seed), context.settings["batch"]
    )
    return [evaluation.win(margin, 0.0) if margin == margin else 0.5 for margin in out.margin.tolist()]


def run_row(context: "Context", row: str, seed: int, pairs, heldout: Pairs, starts: list[dict] | None) -> list[dict]:
    """Build, train and measure one row of the table; records one a held-out input."""
    folder = context.out / f"seed-{seed}" / row.replace(":", "-")

    def make() -> list[dict]:
        context.say(f"seed {seed}, {row}")
        system = build_system(context)
        trained = row not in ("prompted", "best-of-n")
        if trained:
            train_row(context, row, system, pairs(), seed, folder)
            system.save(folder / "system")
        inputs = [pair.inputs["x"] for pair in heldout]
        answers = start_answers(context, system, inputs) if row == "prompted" else answers_of(context, row, system, inputs, seed)
        records = []
        for item, (pair, answer) in enumerate(zip(heldout, answers)):
            start = starts[item] if starts else None
            numbers = score(pair.inputs["x"], answer, str(pair.chosen), start)
            records.append({"seed": seed, "system": row, "item": item, "x": pair.inputs["x"], **answer, **numbers})
        if trained:
            for record, right in zip(records, margin_accuracy(context, system, heldout, seed)):
                record["margin_accuracy"] = right
        return records

    return context.cached_records(folder, make)


def rows_of(settings: dict) -> list[str]:
    """The rows of the table, in order.

    Raises:
        UnknownOptionError: an unknown or repeated row, or one before the start.

    >>> rows_of({"rows": "prompted, only:draft"})
    ['prompted', 'only:draft']
    """
    rows = [row.strip() for row in settings["rows"].split(",") if row.strip()]
    for row in rows:
        errors.check_option("row", row, ROWS)
    if rows[:1] != ["prompted"] or len(set(rows)) < len(rows):
        raise errors.UnknownOptionError(
            f"rows must begin with 'prompted', the start that the others are compared with, and name each row once; found {rows}"
        )
    return rows


def check(settings: dict) -> None:
    """Refuse settings that no run can have.

    Raises:
        UnknownOptionError: an option that does not exist, or a number out of range.
    """
    rows_of(settings)
    for name, allowed in CHOICES.items():
        errors.check_option(name, settings[name], allowed)
    whole(1, **{name: settings[name] for name in COUNTS})
    whole(0, warmup=settings["warmup"])
    positive(math.ulp(0.0), **{name: settings[name] for name in ("lr", "beta")})
    positive(0.0, **{name: settings[name] for name in ("min_gap", "diversity_penalty")})
    stored = restaurants.STORED["heldout"]
    if settings["heldout"] > stored:
        raise errors.UnknownOptionError(f"heldout must be at most {stored}, as many as are stored; found {settings['heldout']}")


def run_seed(context: "Context", seed: int) -> list[dict]:
    """Records of one seed, row after row; the start comes first, since the others are compared with it."""
    heldout = restaurants.stored_pairs("heldout")[: context.settings["heldout"]]
    made: dict[int, Pairs] = {}

    def pairs() -> Pairs:  # made when the first row needs them: a resumed run may need none
        if seed not in made:
            made[seed] = training_pairs(context, seed)
        return made[seed]

    records, starts = [], None
    for row in rows_of(context.settings):
        found = run_row(context, row, seed, pairs, heldout, starts)
        starts = starts or found
        records += found
    return records


# --- what people see ----------------------------------------------------------------------------------------------------


def figures(context: "Context", summary: dict, records: list[dict]) -> dict:
    """Graph, win rates, scores, and the last row's training curves and shares (first seed)."""
    from sysdpo_lab import figures as draw

    pictures = {"graph": (draw.draw_graph(build_system(context)), "the graph: x feeds draft and refine, draft feeds refine")}
    for metric in ("wr_prompted", "task_score"):
        if any(row["metric"] == metric for row in summary["rows"]):
            alt = f"{metric} of each system with its 95 % interval"
            pictures[metric] = (draw.plot_rows(summary["rows"], metric), alt)
    history = read_history(context)
    if history:
        window = max(1, len(history) // 20)
        pictures["training"] = (
            draw.plot_training(history, window=window), "loss, margin and accuracy of joint training against the step"
        )
        pictures["shares"] = (
            draw.plot_shares(history, window=window), "each component's share of the log-ratio gap against the step"
        )
    return pictures


def read_history(context: "Context") -> list[dict]:
    """The logged steps of the joint row of the first seed."""
    from sysdpo_lab.experiments.runner import read_records

    found = sorted(context.out.glob("seed-*/joint/history.jsonl"))
    return read_records(found[0]) if found else []


def prose(context: "Context") -> str:
    """What the report says above the table."""
    options = context.settings
    return (
        f"Two LoRA adapters on one base ({context.profile.model}): draft writes a first sentence about a restaurant's facts, "
        f"refine sees the facts and the draft and writes the final one. Only finals are compared. SysDPO-Sampling with "
        f"{options['sampler']}, k = {options['k']}, beta = {options['beta']}, {options['steps']} steps of {options['batch']} "
        "pairs. Every component decodes greedily in the evaluation. wr_prompted: share of held-out records on which the exact "
        "judge scores the system above the prompted start (ties count one half); wr_chosen: the same against the data's chosen "
        "answer; words: mean length of the answers; margin_accuracy: share of held-out pairs with a positive margin."
        + (f" best-of-n: the best of {options['best_of']} samples of the start by the judge itself, so it knows what it is "
           "measured with." if "best-of-n" in rows_of(options) else "")
        + (" separate: each component with its own DPO loss; the drafter as if its drafts were finals, the refiner given a "
           "draft of the start." if "separate" in rows_of(options) else "")
    )


def samples(context: "Context", records: list[dict]) -> list[dict]:
    """Before and after, side by side, for the first held-out records of the first seed."""
    first = records[0]["seed"]
    mine = {(r["system"], r["item"]): r for r in records if r["seed"] == first}
    last = [r["system"] for r in records][-1]
    shown = []
    for item in range(min(6, len({item for _, item in mine}))):
        before, after = mine["prompted", item], mine[last, item]
        shown.append(
            {
                "x": before["x"], "draft before": before["draft"], "final before": before["refine"],
                "draft after": after["draft"], "final after": after["refine"],
                "score": f"{before['task_score']:.2f} -> {after['task_score']:.2f}",
            }
        )  # fmt: skip
    return shown
