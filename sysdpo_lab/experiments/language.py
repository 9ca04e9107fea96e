"""What all language-model experiments share: the base, the data, the rows of the table (E9) and their measures (E10).

An experiment says which nodes there are and what feeds what; a world says what is asked, how a prompt reads and who
judges. Everything else is here, once.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sysdpo_lab import atomic, diversity, errors, evaluation, preferences, samplers
from sysdpo_lab.components.base import Batch, take_rows
from sysdpo_lab.components.completion import Completion
from sysdpo_lab.components.prompts import is_conversation, joined
from sysdpo_lab.optimisation import SCHEDULES
from sysdpo_lab.options import positive, whole
from sysdpo_lab.preferences import Pair, Pairs
from sysdpo_lab.system import CompoundSystem
from sysdpo_lab.worlds import registry

if TYPE_CHECKING:
    from sysdpo_lab.experiments.runner import Context

SMALL_MODEL = "smollm2-135m-instruct"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHOICES = {
    "world": registry.WORLDS,
    "data": ("on-policy", "written"),
    "dtype": ("auto", *DTYPES),
    "sampler": ("diverse_beam", "monte_carlo", "gumbel_top_k"),
    "schedule": SCHEDULES,
    "base": ("shared", "separate", "tied"),
}
COUNTS = (
    "pairs", "heldout", "candidates", "steps", "batch", "k", "rank", "max_new_tokens", "best_of", "checkpoint_every",
    "eval_batch",
)  # fmt: skip
UNTRAINED = ("prompted", "best-of-n", "prompted-edge")
PROBES = 4  # samples a held-out input for the diversity of drafts and for KL


@dataclass(frozen=True)
class LanguageExperiment:
    """A system of language models on one base, an adapter each; the runner calls its methods.

    Args:
        title: heading of the report.
        parents: {node: its parents}, in topological order; the last node is the output.
        roles: {node: the world's prompt for it}; default: the node's own name.
        about: first sentence of the report.
        extra_rows: rows besides the common ones: "direct" (whole traces, E6), "direct-edge" (the same with `edge`) and
            "prompted-edge" (the start of direct-edge, which is another system than the prompted one).
        edge: (from, to), the edge that rows "...-edge" add.
    """

    title: str
    parents: Mapping[str, tuple[str, ...]]
    roles: Mapping[str, str]
    about: str
    extra_rows: tuple[str, ...] = ()
    edge: tuple[str, str] | None = None

    # --- names ----------------------------------------------------------------------------------------------------------

    @property
    def TITLE(self) -> str:
        return self.title

    @property
    def nodes(self) -> tuple[str, ...]:
        """All components; the last one makes the output."""
        return tuple(self.parents)

    @property
    def output(self) -> str:
        """The component whose answers are compared."""
        return self.nodes[-1]

    @property
    def hidden(self) -> tuple[str, ...]:
        """The components whose values the judge never sees."""
        return self.nodes[:-1]

    @property
    def METRICS(self) -> tuple[str, ...]:
        """Metrics of a record."""
        drafts = tuple(f"{name}_score" for name in self.hidden)
        common = ("wr_prompted", "wr_chosen", "task_score", "validity", "words")
        return (*common, *drafts, "margin_accuracy", "effective_number", "distinct_2", "self_bleu", "kl")

    @property
    def rows(self) -> tuple[str, ...]:
        """Every row that the table can have, in order."""
        return (
            "prompted",
            "best-of-n",
            "separate",
            *(f"only:{name}" for name in self.nodes),
            *self.extra_rows,
            "joint",
        )

    # --- the system -----------------------------------------------------------------------------------------------------

    def build_system(self, context: "Context", edge: bool = False) -> CompoundSystem:
        """A fresh system: the prompted start, with untrained adapters.

        The setting `base`: "shared", one frozen base and an adapter a node; "separate", a copy of the base for each node;
        "tied", one adapter too, which all nodes train. The adapters start the same for every seed; a training seed changes
        the data, their order and the draws.
        """
        from sysdpo_lab.components import CausalLM

        model, tokenizer = load_base(context, tuple(self.roles.get(name, name) for name in self.nodes))
        options, shared = context.settings, fresh_copy(model)
        templates = world_of(context).PROMPTS["tiny" if context.profile.name == "tiny" else "chat"]
        components: list[CausalLM] = []
        for name in self.nodes:
            own = copy.deepcopy(model) if options["base"] == "separate" else shared
            tied = components[0] if components and options["base"] == "tied" else None
            components.append(
                CausalLM(
                    name, self._parents(name, edge), own, tokenizer, self._template(templates, name, edge),
                    adapter=tied or options["rank"], max_new_tokens=options["max_new_tokens"],
                    diversity_penalty=options["diversity_penalty"],
                )
            )  # fmt: skip
        return CompoundSystem(components, inputs=("x",), output=self.output)

    def _parents(self, name: str, edge: bool) -> list[str]:
        added = [self.edge[0]] if edge and self.edge and self.edge[1] == name else []
        return [*self.parents[name], *added]

    def _template(self, templates: Mapping[str, Any], name: str, edge: bool) -> Any:
        role = self.roles.get(name, name)
        return (
            templates[f"{role}-seeing"] if len(self._parents(name, edge)) > len(self.parents[name]) else templates[role]
        )

    # --- data -----------------------------------------------------------------------------------------------------------

    def training_pairs(self, context: "Context", seed: int) -> Pairs:
        """Preference pairs of the training split: written (references against faults) or sampled from the start and judged."""
        options = context.settings
        if options["data"] == "written":
            generator = torch.Generator().manual_seed(1000 + seed)
            return world_of(context).preference_pairs(options["pairs"], generator, "train")
        path = context.out / f"seed-{seed}" / "pairs.jsonl"
        if not path.is_file():
            preferences.save(path, finals_of(self._sampled(context, seed), self.output))
        # read back even when they are new: a resumed run, on another number of threads perhaps, must train on the same pairs
        return preferences.load(path, on_error="raise", duplicates="keep")[0]

    def training_traces(self, context: "Context", seed: int) -> Pairs:
        """The same on-policy comparisons as whole traces, for SysDPO-Direct."""
        path = context.out / f"seed-{seed}" / "traces.json"
        if not path.is_file():
            atomic.write_json(path, [_written(pair) for pair in self._sampled(context, seed)])
        return Pairs([_read(row) for row in json.loads(path.read_text(encoding="utf-8"))], str(path))

    def _sampled(self, context: "Context", seed: int) -> list[Pair]:
        """Of each record's sampled traces, the one with the judge's best final against that with its worst; drawn once."""
        key = f"sampled pairs of seed {seed}"
        if key not in context.shared:
            context.shared[key] = self._draw_pairs(context, seed)
        return context.shared[key]

    def _draw_pairs(self, context: "Context", seed: int) -> list[Pair]:
        options, world = context.settings, world_of(context)
        generator = torch.Generator().manual_seed(1000 + seed)
        system = self.build_system(context)
        records = world.records(generator, options["pairs"], "train")
        inputs = [world.render(record) for record in records]
        traces: list[list[dict[str, Completion]]] = [[] for _ in inputs]
        for _ in range(options["candidates"]):
            for trace, rows in in_batches(system.sample, inputs, options["eval_batch"], generator):
                for row, values in zip(rows, zip(*(trace[name] for name in self.nodes))):
                    traces[row].append(dict(zip(self.nodes, values)))
        answers = [[trace[self.output] for trace in mine] for mine in traces]
        pairs, ties = world.pairs_from_candidates(inputs, answers, generator, options["min_gap"])
        context.note(f"pairs of seed {seed}", f"{len(pairs)} kept, {ties} records without a clear pair")
        whole = {id(trace[self.output]): trace for mine in traces for trace in mine}
        return [
            Pair(p.inputs, {**p.inputs, **whole[id(p.chosen)]}, {**p.inputs, **whole[id(p.rejected)]}, p.meta)
            for p in pairs
        ]

    # --- training -------------------------------------------------------------------------------------------------------

    def objective_of(self, context: "Context", row: str):
        """What a row of the table trains with."""
        from sysdpo_lab import training

        options = context.settings
        if row == "separate":
            return training.separate(options["beta"])
        if row.startswith("direct"):
            return training.direct(options["beta"])
        extra = {"diversity_penalty": options["diversity_penalty"]} if options["sampler"] == "diverse_beam" else {}
        return training.sampling(options["beta"], getattr(samplers, options["sampler"]), options["k"], **extra)

    def train_row(self, context: "Context", row: str, system: CompoundSystem, pairs: Pairs, seed: int, folder: Path):
        """Train one row; freezes what the row does not train. Returns the history."""
        from sysdpo_lab import training

        options = context.settings
        if row.startswith("only:"):
            for name in self.nodes:
                if row != f"only:{name}":
                    system.freeze(name)
        return training.train(
            system, pairs, self.objective_of(context, row), steps=options["steps"], lr=options["lr"],
            generator=torch.Generator().manual_seed(seed), out=folder, resume=True, batch_size=options["batch"],
            accumulate=options.get("accumulate", 1),
            warmup=options["warmup"], schedule=options["schedule"], checkpoint_every=options["checkpoint_every"],
            progress=context.progress,
        )  # fmt: skip

    # --- measuring ------------------------------------------------------------------------------------------------------

    def answers_of(
        self, context: "Context", row: str, system: CompoundSystem, inputs: Sequence[str], seed: int
    ) -> list[dict]:
        """Every node's text for every held-out input: greedy for every component, or the best of n samples."""
        options, found = context.settings, [{} for _ in inputs]
        if row != "best-of-n":
            for trace, rows in in_batches(system.generate, inputs, options["eval_batch"]):
                for place, number in enumerate(rows):
                    found[number] = self._texts(trace, place)
            return found
        world, generator = world_of(context), torch.Generator().manual_seed(2000 + seed)
        for _ in range(options["best_of"]):
            for trace, rows in in_batches(system.sample, inputs, options["eval_batch"], generator):
                for place, number in enumerate(rows):
                    new, old = self._texts(trace, place), found[number]
                    record = world.parse(inputs[number])
                    if not old or world.compare(record, new[self.output], old[self.output]) == 1:
                        found[number] = new
        return found

    def _texts(self, trace: Mapping[str, Batch], place: int) -> dict[str, Any]:
        texts = {name: trace[name][place].text for name in self.nodes}
        return {**texts, "truncated": trace[self.output][place].truncated}

    def start_answers(self, context: "Context", system: CompoundSystem, inputs: Sequence[str]) -> list[dict]:
        """The start decodes greedily and its adapters add nothing yet: one measurement serves every seed."""
        if "start" not in context.shared:
            context.shared["start"] = self.answers_of(context, "prompted", system, inputs, seed=0)
        return context.shared["start"]

    def score(self, world: Any, x: Any, answer: dict) -> dict:
        """The metrics that one answer has by itself; without an exact judge only its length, and whether it is complete."""
        text = answer[self.output]
        if not hasattr(world, "judge"):
            return {
                "validity": float(bool(text.strip()) and not answer["truncated"]),
                "words": float(len(text.split())),
            }
        record = world.parse(x)
        verdict = world.judge(record, text)
        found = {
            "task_score": verdict.score,
            "validity": float(verdict.valid and not answer["truncated"]),
            "words": float(verdict.words),
        }
        return found | {f"{name}_score": world.judge(record, answer[name]).score for name in self.hidden}

    def win_rates(self, context: "Context", heldout: Pairs, answers: list[dict], starts: list | None) -> list[dict]:
        """wr_chosen and, but for the start itself, wr_prompted of every record."""
        judge, inputs = judge_of(context), [pair.inputs["x"] for pair in heldout]
        texts = [answer[self.output] for answer in answers]
        against = {"wr_chosen": [str(pair.chosen) for pair in heldout]}
        if starts is not None:
            against["wr_prompted"] = [start[self.output] for start in starts]
        values = {metric: judge.compare(inputs, texts, others) for metric, others in against.items()}
        if hasattr(judge, "report"):
            context.note("judge", json.dumps(judge.report()))
        return [dict(zip(values, row)) for row in zip(*values.values())]

    def margin_numbers(
        self, context: "Context", system: CompoundSystem, pairs: Pairs, seed: int
    ) -> list[dict[str, float]]:
        """For each held-out pair: 1, 1/2 or 0 (is the Sampling margin positive?), and the effective number of intermediates."""
        from sysdpo_lab import training

        out = training.margins(
            system,
            pairs,
            self.objective_of(context, "joint"),
            torch.Generator().manual_seed(3000 + seed),
            context.settings["batch"],
        )
        return [
            {"margin_accuracy": evaluation.win(margin, 0.0), "effective_number": number}
            if margin == margin
            else {
                "margin_accuracy": 0.5,
                "effective_number": 1.0,
            }  # no intermediate can produce a side: nothing to tell
            for margin, number in zip(out.margin.tolist(), out.effective.tolist())
        ]

    def probe(
        self, context: "Context", system: CompoundSystem, inputs: Sequence[str], seed: int
    ) -> list[dict[str, float]]:
        """Diversity of sampled drafts and KL(policy || start) of whole traces, from a few ancestral samples an input.

        kl: mean over the samples of log p - log p_ref, nats a trace; each sample is unbiased and may be negative.
        distinct_2 and self_bleu: over an input's sampled values of the hidden nodes (see `diversity`).
        """
        generator = torch.Generator().manual_seed(4000 + seed)
        kl, drafts = [0.0] * len(inputs), [[] for _ in inputs]
        for _ in range(PROBES):
            for trace, rows in in_batches(system.sample, inputs, context.settings["eval_batch"], generator):
                for place, (number, ratio) in enumerate(zip(rows, log_ratios(system, trace))):
                    kl[number] += ratio / PROBES
                    drafts[number] += [trace[name][place].text for name in self.hidden]
        return [
            {"kl": value, "distinct_2": diversity.distinct_n(texts), "self_bleu": diversity.self_bleu(texts)}
            for value, texts in zip(kl, drafts)
        ]

    def run_row(
        self, context: "Context", row: str, seed: int, pairs: Callable, heldout: Pairs, starts: list | None
    ) -> list[dict]:
        """Build, train and measure one row of the table; records one a held-out input."""
        folder = context.out / f"seed-{seed}" / row.replace(":", "-")

        def make() -> list[dict]:
            context.say(f"seed {seed}, {row}")
            system = self.build_system(context, edge=row.endswith("-edge"))
            if row not in UNTRAINED:
                data = self.training_traces(context, seed) if row.startswith("direct") else pairs()
                self.train_row(context, row, system, data, seed, folder)
                system.save(folder / "system")
            return self.measured(context, row, system, heldout, starts, seed)

        return context.cached_records(folder, make)

    def measured(
        self, context: "Context", row: str, system: CompoundSystem, heldout: Pairs, starts, seed: int
    ) -> list[dict]:
        """The records of a row."""
        world, inputs = world_of(context), [pair.inputs["x"] for pair in heldout]
        known = row == "prompted"
        answers = (
            self.start_answers(context, system, inputs)
            if known
            else self.answers_of(context, row, system, inputs, seed)
        )
        records = []
        for item, (x, answer, wins) in enumerate(
            zip(inputs, answers, self.win_rates(context, heldout, answers, starts))
        ):
            records.append(
                {"seed": seed, "system": row, "item": item, "x": x, **answer, **self.score(world, x, answer), **wins}
            )
        extras = [self.margin_numbers(context, system, heldout, seed)] if row not in UNTRAINED else []
        if context.settings["probe"] and row != "best-of-n":
            extras.append(self.probe(context, system, inputs, seed))
        for extra in extras:
            for record, numbers in zip(records, extra):
                record.update(numbers)
        return records

    def run_seed(self, context: "Context", seed: int) -> list[dict]:
        """Records of one seed, row after row; the start comes first, since the others are compared with it."""
        heldout = world_of(context).stored_pairs("heldout")[: context.settings["heldout"]]
        made: dict[int, Pairs] = {}

        def pairs() -> Pairs:  # made when the first row needs them: a resumed run may need none
            if seed not in made:
                made[seed] = self.training_pairs(context, seed)
            return made[seed]

        records, starts = [], None
        for row in self.rows_of(context.settings):
            found = self.run_row(context, row, seed, pairs, heldout, starts)
            starts = starts or found
            records += found
        return records

    # --- settings -------------------------------------------------------------------------------------------------------

    def rows_of(self, settings: Mapping[str, Any]) -> list[str]:
        """The rows of the table, in order; "all" stands for every one.

        Raises:
            UnknownOptionError: an unknown or repeated row, or one before the start.
        """
        if settings["rows"].strip() == "all":
            return list(self.rows)
        rows = [row.strip() for row in settings["rows"].split(",") if row.strip()]
        for row in rows:
            errors.check_option("row", row, self.rows)
        if rows[:1] != ["prompted"] or len(set(rows)) < len(rows):
            raise errors.UnknownOptionError(
                "rows must begin with 'prompted', the start that the others are compared with, and name each row once; "
                f"found {rows}"
            )
        return rows

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings that no run can have.

        Raises:
            UnknownOptionError: an option that does not exist, or a number out of range.
        """
        rows = self.rows_of(settings)
        for name, allowed in CHOICES.items():
            errors.check_option(name, settings[name], allowed)
        whole(1, **{name: settings[name] for name in COUNTS})
        whole(1, accumulate=settings.get("accumulate", 1))
        whole(0, warmup=settings["warmup"], longest=settings.get("longest", 0))
        positive(math.ulp(0.0), **{name: settings[name] for name in ("lr", "beta")})
        positive(0.0, **{name: settings[name] for name in ("min_gap", "diversity_penalty")})
        self._check_judge(settings, rows)
        if settings["base"] == "tied" and (only := [row for row in rows if row.startswith("only:")]):
            raise errors.UnknownOptionError(f"base=tied trains all nodes as one; {', '.join(only)} cannot freeze the others")
        stored = registry.find(settings["world"]).STORED["heldout"]
        if settings["heldout"] > stored:
            raise errors.UnknownOptionError(
                f"heldout must be at most {stored}, as many as are stored; found {settings['heldout']}"
            )
        if settings["data"] == "written" and any(row.startswith("direct") for row in rows):
            raise errors.UnknownOptionError(
                "written pairs hold finals only; rows direct need whole traces: --set data=on-policy"
            )

    def _check_judge(self, settings: Mapping[str, Any], rows: Sequence[str]) -> None:
        kind = settings["judge"].partition(":")[0]
        errors.check_option("judge", kind, ("exact", "similarity", "local", "openai"))
        if registry.has_exact_judge(settings["world"]):
            return
        asked = {
            "judge=exact": kind == "exact",
            "data=on-policy": settings["data"] == "on-policy",
            "row best-of-n": "best-of-n" in rows,
        }
        if any(asked.values()):
            needing = " and ".join(name for name, is_so in asked.items() if is_so)
            raise errors.UnknownOptionError(
                f"the world {settings['world']!r} has no exact judge, which {needing} needs; choose judge=similarity, "
                "local:MODEL or openai:MODEL@URL, data=written, and rows without best-of-n"
            )

    # --- what people see ------------------------------------------------------------------------------------------------

    def figures(self, context: "Context", summary: dict, records: list[dict]) -> dict:
        """Graph, win rates, scores, and the joint row's training curves and shares (first seed)."""
        from sysdpo_lab import figures as draw

        edges = "; ".join(f"{' and '.join(parents)} feed {name}" for name, parents in self.parents.items())
        pictures = {"graph": (draw.draw_graph(self.build_system(context)), f"the graph: {edges}")}
        for metric in ("wr_prompted", "task_score"):
            if any(row["metric"] == metric for row in summary["rows"]):
                pictures[metric] = (
                    draw.plot_rows(summary["rows"], metric),
                    f"{metric} of each system with its 95 % interval",
                )
        history = read_history(context)
        if history:
            window = max(1, len(history) // 20)
            pictures["training"] = (
                draw.plot_training(history, window=window),
                "loss, margin and accuracy of joint training against the step",
            )
            pictures["shares"] = (
                draw.plot_shares(history, window=window),
                "each component's share of the log-ratio gap against the step",
            )
        return pictures

    def prose(self, context: "Context") -> str:
        """What the report says above the table."""
        options = context.settings
        rows = self.rows_of(options)
        told = [
            f"{self.about} World: {options['world']}; judge: {options['judge']}; base: {context.profile.model}, one "
            "LoRA adapter a node. Only finals are "
            f"compared. Joint: SysDPO-Sampling with {options['sampler']}, k = {options['k']}, beta = {options['beta']}, "
            f"{options['steps']} steps of {options['batch'] * options.get('accumulate', 1)} pairs. Every component decodes "
            "greedily in the evaluation. "
            "wr_prompted: share of held-out records on which the judge puts the system above the prompted start (ties "
            "count one half); wr_chosen: the same against the data's chosen answer; words: mean length of the answers; "
            "margin_accuracy: share of held-out pairs with a positive margin; kl: nats a trace from the start; distinct_2 and "
            f"self_bleu: of {PROBES} sampled sets of drafts."
        ]
        if "best-of-n" in rows:
            told.append(
                f"best-of-n: the best of {options['best_of']} samples of the start by the judge itself, so it knows what it is "
                "measured with."
            )
        if "separate" in rows:
            told.append(
                "separate: each component with its own DPO loss; a hidden node as if its values were finals, the output node "
                "given drafts of the start."
            )
        if any(row.startswith("direct") for row in rows):
            told.append(
                "direct: SysDPO-Direct on the sampled traces themselves; direct-edge: with one more edge between the nodes; "
                "prompted-edge: its start, another system than the prompted one, which all rows are compared with."
            )
        return " ".join(told)

    def samples(self, context: "Context", records: list[dict]) -> list[dict]:
        """Before and after, side by side, for the first held-out records of the first seed."""
        first, last = records[0]["seed"], [record["system"] for record in records][-1]
        mine = {(r["system"], r["item"]): r for r in records if r["seed"] == first}
        shown = []
        for item in range(min(6, len({item for _, item in mine}))):
            before, after = mine["prompted", item], mine[last, item]
            x = joined(before["x"]) if is_conversation(before["x"]) else before["x"]
            texts = {
                f"{name} {when}": row[name]
                for when, row in (("before", before), ("after", after))
                for name in self.nodes
            }
            shown.append({"x": x, **texts, "against the start": f"{after.get('wr_prompted', 0.5):.1f}"})
            if "task_score" in before:
                shown[-1]["score"] = f"{before['task_score']:.2f} -> {after['task_score']:.2f}"
        return shown


# --- base and batches ---------------------------------------------------------------------------------------------------


def world_of(context: "Context") -> Any:
    """The world that a run is about, opened once a run."""
    if "world" not in context.shared:
        context.shared["world"] = registry.opened(context.settings)
    return context.shared["world"]


def judge_of(context: "Context") -> Any:
    """Who compares answers: the world's exact judge, or the one that the setting `judge` names.

    "exact" - "similarity" (to the data's chosen answer) - "local:SOURCE", a language model in this process -
    "openai:MODEL" or "openai:MODEL@URL", one behind an endpoint. Replies of the last two are kept in the run's folder.
    """
    if "judge" not in context.shared:
        context.shared["judge"] = _judge(context, world_of(context))
    return context.shared["judge"]


def _judge(context: "Context", world: Any) -> Any:
    from sysdpo_lab import judges, sentences

    kind, _, rest = context.settings["judge"].partition(":")
    if kind == "exact":
        return judges.exact(lambda x, answer: world.judge(world.parse(x), answer).score)
    if kind == "similarity":
        chosen = {_key(pair.inputs["x"]): str(pair.chosen) for pair in world.stored_pairs("heldout")}
        return judges.similarity(sentences.load_sentence_encoder(), lambda x: chosen[_key(x)])
    name, _, url = rest.partition("@")
    model = judges.LocalModel(rest) if kind == "local" else judges.OpenAIModel(name, url or None)
    return judges.PairwiseJudge(model, context.out / "judge.jsonl", budget=context.settings["judge_budget"] or None)


def _key(x: Any) -> str:
    return json.dumps(x, sort_keys=True)


def load_base(context: "Context", roles: tuple[str, ...] = ("draft", "refine")) -> tuple[Any, Any]:
    """Model and tokenizer of the profile, loaded once a run; a tiny model has been trained for some roles only."""
    if "base" not in context.shared:
        load = {"tiny": _load_tiny, "small": _load_small}.get(context.profile.name, _load_named)
        model, tokenizer = load(context, roles) if load is _load_tiny else load(context)
        context.shared["base"] = model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer
        context.note("dtype", str(model.dtype).removeprefix("torch."))
    return context.shared["base"]


def _load_tiny(context: "Context", roles: tuple[str, ...]) -> tuple[Any, Any]:
    model, tokenizer = world_of(context).load_tiny(roles)
    return model.to(DTYPES.get(context.settings["dtype"], torch.float32)), tokenizer


def _load_small(context: "Context") -> tuple[Any, Any]:
    from sysdpo_lab import loading

    found = loading.load_causal_lm(SMALL_MODEL, dtype=DTYPES.get(context.settings["dtype"], torch.bfloat16))
    if context.settings["dtype"] == "auto" and measured_dtype(context, found[0]) != torch.bfloat16:
        found = loading.load_causal_lm(SMALL_MODEL, dtype=torch.float32)  # not .to(): bf16 has rounded the weights
    return found


def _load_named(context: "Context") -> tuple[Any, Any]:
    """The profile's model from the hub, or the one that `--set model=` names: a hub id or a folder."""
    from sysdpo_lab import loading

    options = context.settings
    dtype = DTYPES.get(options["dtype"], torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    source = options["model"] or context.profile.model
    model, tokenizer = loading.load_causal_lm(source, dtype=dtype, revision=options["revision"] or None)
    if options.get("checkpointing"):
        enable = getattr(model, "activation_checkpointing_enable", None)  # its name from transformers 5 on
        (enable or model.gradient_checkpointing_enable)()
    commit = getattr(model.config, "_commit_hash", None)
    context.note("model", f"{source}, commit {commit}" if commit else source)
    return model, tokenizer


def measured_dtype(context: "Context", model: Any) -> torch.dtype:
    """The quicker of fp32 and bf16 on this machine; a resumed run keeps what it began with."""
    from sysdpo_lab import loading

    path = context.out / "dtype.json"
    if context.resume and path.is_file():
        return DTYPES[json.loads(path.read_text(encoding="utf-8"))["dtype"]]
    dtype, seconds = loading.measure_dtype(model)
    context.say(f"precision: {dtype} (one-second measurement: {seconds})")
    atomic.write_json(path, {"dtype": str(dtype).removeprefix("torch."), "seconds": seconds})
    return dtype


def fresh_copy(model: Any) -> Any:
    """The base without adapters of an earlier row; its frozen weights are shared, not copied."""
    memo = {id(parameter): parameter for parameter in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo)


def in_batches(run: Callable, inputs: Sequence[str], size: int, generator: torch.Generator | None = None):
    """Traces of `run` (system.sample or system.generate) over batches of inputs, with their row numbers."""
    for start in range(0, len(inputs), size):
        rows = list(range(start, min(start + size, len(inputs))))
        batch = {"x": take_rows(inputs, rows)}
        yield (run(batch) if generator is None else run(batch, generator=generator)), rows


@torch.no_grad()
def log_ratios(system: CompoundSystem, trace: Mapping[str, Batch]) -> list[float]:
    """log p - log p_ref of whole traces, nats."""
    policy = system.log_prob(trace)
    with system.reference():
        return (policy - system.log_prob(trace)).tolist()


def finals_of(pairs: Sequence[Pair], output: str) -> Pairs:
    """Pairs of finals from pairs of whole traces."""
    return Pairs(
        [Pair(pair.inputs, pair.chosen[output], pair.rejected[output], pair.meta) for pair in pairs], "sampled answers"
    )


def _written(pair: Pair) -> dict[str, Any]:
    """A pair of traces as JSON."""

    def plain(trace: Mapping[str, Any]) -> dict[str, Any]:
        return {
            n: {"text": v.text, "token_ids": list(v.token_ids), "truncated": v.truncated}
            for n, v in trace.items()
            if n != "x"
        }

    return {"x": pair.inputs["x"], "chosen": plain(pair.chosen), "rejected": plain(pair.rejected), "meta": pair.meta}


def _read(row: Mapping[str, Any]) -> Pair:
    def trace(side: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: Completion(v["text"], tuple(v["token_ids"]), v["truncated"]) for name, v in side.items()}
        return {"x": row["x"], **values}

    return Pair({"x": row["x"]}, trace(row["chosen"]), trace(row["rejected"]), row["meta"])


def read_history(context: "Context") -> list[dict]:
    """The logged steps of the joint row of the first seed."""
    from sysdpo_lab.experiments.runner import read_records

    found = sorted(context.out.glob("seed-*/joint/history.jsonl"))
    return read_records(found[0]) if found else []
