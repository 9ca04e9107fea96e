"""Ablations in one run: rows joint[ARM] that differ in a few settings of their training, on the same pairs and start.

Each arm is trained and measured by the code of the row `joint`; only the settings that it reads are the arm's. So the
differences between arms are paired: same seeds, same training pairs, same held-out records.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sysdpo_lab import diversity, errors, evaluation, samplers
from sysdpo_lab.experiments.language import LanguageExperiment, in_batches
from sysdpo_lab.preferences import Pairs
from sysdpo_lab.system import CompoundSystem

if TYPE_CHECKING:
    from sysdpo_lab.experiments.runner import Context

Arms = dict[str, dict[str, Any]]  # {arm: the settings in which it differs}
SETS = ("set_distinct", "set_distinct_2", "set_self_bleu")


@dataclass(frozen=True)
class ArmsExperiment(LanguageExperiment):
    """The prompted start and one row joint[ARM] an arm.

    Args:
        arms: from the run's settings to the arms.
        columns: from an arm to its columns of a results table.
        rivals: from the arms' names to the pairs whose paired difference the summary holds, besides each with the start.
        pictures: from the table of a summary and its paired differences to {name: (figure, alt text)} of the report.
        findings: from the same to paragraphs of the report.
    """

    arms: Callable[[Mapping[str, Any]], Arms] = field(kw_only=True)
    columns: Callable[[str], dict[str, Any]] = field(kw_only=True)
    rivals: Callable[[Sequence[str]], list[tuple[str, str]]] = field(kw_only=True)
    pictures: Callable[[list[dict], list[dict]], dict] = field(kw_only=True)
    findings: Callable[[list[dict], list[dict]], list[str]] = field(kw_only=True)

    @property
    def METRICS(self) -> tuple[str, ...]:
        """Those of the row joint, and how different the drafts of one set are (under the arm's own sampler)."""
        return (*super().METRICS, *SETS)

    def rows_of(self, settings: Mapping[str, Any]) -> list[str]:
        """The start, then a row an arm."""
        return ["prompted", *map(row_name, self.arms(settings))]

    def columns_of(self, row: str) -> dict[str, Any]:
        """The columns of a results table that say which arm a row is; {} for the start."""
        return self.columns(arm_of(row)) if arm_of(row) else {}

    def table(self, summary: Mapping[str, Any]) -> list[dict]:
        """The arms' rows of a summary with their columns; the start is left out."""
        return [{**self.columns_of(row["system"]), **row} for row in summary["rows"] if arm_of(row["system"])]

    def settings_of(self, row: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in which a row differs from the run's; {} for the start."""
        return self.arms(settings)[arm_of(row)] if arm_of(row) else {}

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings that no run can have, those of every arm included.

        Raises:
            UnknownOptionError: no arm, an option that does not exist, or a number out of range.
        """
        arms = self.arms(settings)
        if not arms:
            raise errors.UnknownOptionError("an ablation needs at least one arm")
        for changed in arms.values():
            mine = {**settings, **changed}
            errors.check_option("repeats", mine["repeats"], ("drop", "count"))
            errors.check_option(
                f"weights of {mine['sampler']}", mine["weights"], WEIGHTS.get(mine["sampler"], ("none",))
            )
            super().check(mine)
            if mine["pairs"] > settings["pairs"]:
                raise errors.UnknownOptionError(
                    f"an arm trains on {mine['pairs']} pairs, the run makes {settings['pairs']}"
                )

    def objective_of(self, context: "Context", row: str):
        """SysDPO-Sampling with the arm's sampler, repeats and weights."""
        from sysdpo_lab import training

        options = context.settings
        return training.sampling(
            options["beta"],
            getattr(samplers, options["sampler"]),
            options["k"],
            options["repeats"],
            **sampler_options(options),
        )

    def run_row(
        self, context: "Context", row: str, seed: int, pairs: Callable, heldout: Pairs, starts: list | None
    ) -> list[dict]:
        """The row under its own settings."""
        changed = self.settings_of(row, context.settings)
        mine = replace(context, settings={**context.settings, **changed})
        return super().run_row(mine, row, seed, pairs, heldout, starts)

    def train_row(
        self, context: "Context", row: str, system: CompoundSystem, pairs: Pairs, seed: int, folder: Path
    ) -> Any:
        """Train on the first `pairs` of the run's pairs: as many as the arm says."""
        return super().train_row(context, row, system, pairs[: context.settings["pairs"]], seed, folder)

    def measured(
        self, context: "Context", row: str, system: CompoundSystem, heldout: Pairs, starts: list | None, seed: int
    ) -> list[dict]:
        """The records of a row, with the diversity of the sets that its sampler draws once it is trained."""
        records = super().measured(context, row, system, heldout, starts, seed)
        if arm_of(row):
            inputs = [pair.inputs["x"] for pair in heldout]
            for record, found in zip(records, drawn_sets(system, inputs, context.settings, 5000 + seed)):
                record.update(set_measures(found[self.hidden[0]]))
        return records

    def summarise(self, records: list[dict], seeds: list[int]) -> tuple[list[dict], list[dict]]:
        """Rows, and paired differences: each arm with the start, then the rivals."""
        arms = [arm_of(row) for row in dict.fromkeys(record["system"] for record in records) if arm_of(row)]
        pairs = [(row_name(arm), "prompted") for arm in arms]
        pairs += [(row_name(a), row_name(b)) for a, b in self.rivals(arms)]
        return evaluation.summarise(records, self.METRICS, seeds, pairs)

    def figures(self, context: "Context", summary: dict, records: list[dict]) -> dict:
        """Those of every language experiment, and the ablation's own."""
        context.shared["summary"] = summary  # the prose says what was found
        return {
            **super().figures(context, summary, records),
            **self.pictures(self.table(summary), summary["differences"]),
        }

    def prose(self, context: "Context") -> str:
        """What was run and, from the numbers of this run, what was found."""
        about = (
            "Rows joint[...] differ from this only in what their names say; all are trained on the same pairs from the same "
            "start. set_distinct: different drafts in a set that the row's sampler draws after training; set_distinct_2 and "
            "set_self_bleu: of the texts of such a set; effective_number: of the intermediates of a held-out pair."
        )
        summary = context.shared["summary"]
        return "\n\n".join([super().prose(context), about, *self.findings(self.table(summary), summary["differences"])])


WEIGHTS = {"monte_carlo": ("none", "importance"), "gumbel_top_k": ("none", "horvitz_thompson")}


def row_name(arm: str) -> str:
    """The row of an arm.

    >>> row_name("dbs-2")
    'joint[dbs-2]'
    """
    return f"joint[{arm}]"


def arm_of(row: str) -> str:
    """The arm of a row; "" for the start.

    >>> arm_of("joint[beta=0.5]"), arm_of("prompted")
    ('beta=0.5', '')
    """
    return row[len("joint[") : -1] if row.startswith("joint[") else ""


def names_in(text: str) -> list[str]:
    """Names with commas between, each once, in order.

    >>> names_in("dbs-2, mc-2,dbs-2")
    ['dbs-2', 'mc-2']
    """
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def sampler_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the sampler of some settings takes besides k.

    >>> sampler_options({"sampler": "diverse_beam", "diversity_penalty": 20.0, "weights": "none"})
    {'diversity_penalty': 20.0}
    """
    if settings["sampler"] == "diverse_beam":
        return {"diversity_penalty": settings["diversity_penalty"]}
    return {"weights": settings["weights"]} if settings.get("weights", "none") != "none" else {}


def drawn_sets(system: CompoundSystem, inputs: Sequence[str], settings: Mapping[str, Any], seed: int) -> list[dict]:
    """The set A(x) of each input: {hidden component: its k completions}, drawn from the current policy."""
    draw, generator = getattr(samplers, settings["sampler"]), torch.Generator().manual_seed(seed)

    def run(batch: dict, generator: torch.Generator) -> dict:
        return draw(system, batch, settings["k"], generator=generator, **sampler_options(settings)).values

    found: list[dict] = []
    for values, rows in in_batches(run, inputs, settings["eval_batch"], generator):
        found += [{name: values[name][place] for name in values} for place in range(len(rows))]
    return found


def set_measures(completions: Sequence[Any]) -> dict[str, float]:
    """How different the drafts of one set are.

    set_distinct: number of different token sequences, 1 to k. set_distinct_2, set_self_bleu: see `diversity`; not for k = 1.

    >>> from sysdpo_lab.components.completion import Completion
    >>> set_measures([Completion("a b", (1, 2)), Completion("a b", (1, 2)), Completion("a c", (1, 3))])["set_distinct"]
    2.0
    """
    texts = [completion.text for completion in completions]
    found = {"set_distinct": float(len({completion.token_ids for completion in completions}))}
    if len(texts) > 1:
        found |= {"set_distinct_2": diversity.distinct_n(texts), "set_self_bleu": diversity.self_bleu(texts)}
    return found
