"""`run samplers`: how the set A of SysDPO-Sampling is drawn, measured exactly on tables, under five laws of the drafts.

Two parts. Estimators: at a policy near the reference, how far each sampler's loss and gradient are from those with every
draft (rows such as `gumbel-2[zipf]`). Training: which systems the samplers lead to, decoded greedily and by sampling (rows
such as `dbs-2[zipf,long]`). The items are systems, new ones for every seed.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity, one_hot

from sysdpo_lab import errors, evaluation, exact
from sysdpo_lab.experiments import draft_sets, sampler_figures
from sysdpo_lab.experiments.draft_sets import Shift
from sysdpo_lab.options import positive, whole
from sysdpo_lab.worlds import draft_laws
from sysdpo_lab.worlds.draft_laws import LAWS, Systems

if TYPE_CHECKING:
    from sysdpo_lab.experiments.runner import Context

TITLE = "Samplers: how to draw a few intermediates"
ESTIMATES = ("loss_error", "bias", "variance", "cosine_single", "cosine_mean", "one_draft", "one_meaning")
OUTCOMES = ("wr_greedy", "wr_sampled", "gap", "reward")
METRICS = (*ESTIMATES, *OUTCOMES)
SIZES = (1, 2, 4, 5, 8, 16)
TRAININGS = ("long", "short")
VARIANTS = ("", "shared", "psi1")
ARMS = (
    ("dbs", 1), ("dbs", 2), ("dbs", 4), ("mc", 1), ("mc", 2), ("mc", 3), ("mc", 4), ("mc", 5), ("gumbel", 2), ("gumbel-ht", 2),
    ("exact", draft_laws.DRAFTS),
)  # fmt: skip
SHORTER = {"psi1": (("dbs", 2), ("mc", 2), ("exact", draft_laws.DRAFTS))}
RIVALS = (
    ("dbs-2", "mc-2"), ("dbs-2", "mc-3"), ("dbs-2", "mc-4"), ("dbs-2", "mc-5"), ("dbs-4", "dbs-2"), ("mc-5", "mc-2"),
    ("gumbel-2", "mc-2"), ("dbs-2", "gumbel-2"), ("exact", "dbs-2"),
)  # fmt: skip
SET_KINDS = ("dbs", "mc", "gumbel")  # the others weigh the same sets
LIMIT = "mc-count-limit"
DIGITS = 5  # of a number in the records


# --- what is run --------------------------------------------------------------------------------------------------------


def row_name(estimator: str, k: int, *where: str) -> str:
    """The name of a row: who draws, how many, under which law, in which training.

    >>> row_name("dbs", 2, "zipf", "long", ""), row_name("exact", 16, "zipf", "short", "shared")
    ('dbs-2[zipf,long]', 'exact[zipf,short,shared]')
    """
    arm = estimator if estimator == "exact" else f"{estimator}-{k}"
    return f"{arm}[{','.join(word for word in where if word)}]"


def training_runs(laws: Iterable[str] = LAWS) -> list[tuple[str, str, str]]:
    """(law, training, variant) of every training run: all laws; a shared refiner and psi1 alone where they tell most.

    >>> training_runs(["head"])
    [('head', 'long', ''), ('head', 'short', '')]
    """
    laws = list(laws)
    extra = [("zipf", "long", "shared"), ("tail", "long", "shared"), ("tail", "long", "psi1")]
    return [(law, mode, "") for law in laws for mode in TRAININGS] + [run for run in extra if run[0] in laws]


def arms(variant: str) -> tuple[tuple[str, int], ...]:
    """Who is trained in a variant: (estimator, k)."""
    return SHORTER.get(variant, ARMS)


def compared(systems: Iterable[str]) -> list[tuple[str, str]]:
    """Which rows are compared, item by item, among those that there are.

    >>> compared(["gumbel-2[zipf]", "mc-2[zipf]", "dbs-2[zipf,long]", "mc-2[zipf,long]"])
    [('gumbel-2[zipf]', 'mc-2[zipf]'), ('dbs-2[zipf,long]', 'mc-2[zipf,long]')]
    """
    rows = list(systems)
    wheres = dict.fromkeys(row[row.index("[") :] for row in rows)
    pairs = [(f"gumbel-{k}", f"{mc}-{k}") for k in SIZES[1:-1] for mc in ("mc", "mc-count")]
    pairs += [("dbs-2", "gumbel-2"), ("dbs-2", "mc-2"), ("dbs-2", "mc-5")]
    found = []
    for where in wheres:
        mine = RIVALS if any(mode in where for mode in TRAININGS) else pairs
        found += [(f"{a}{where}", f"{b}{where}") for a, b in mine]
    return [(a, b) for a, b in found if a in set(rows) and b in set(rows)]


def stream(seed: int, *words: str) -> torch.Generator:
    """A generator of its own for each use: what one row draws does not depend on which rows are run."""
    text = "/".join([str(seed), *words])
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


# --- part 1: estimators -------------------------------------------------------------------------------------------------


def estimate(found: draft_sets.Gradients, truth: draft_sets.Gradients) -> dict[str, Float[Tensor, " S"]]:
    """How far D sets of each system are from the loss with every draft.

    loss_error: mean |loss - exact|, nats. bias: |mean loss over the draws - exact|; with D draws it keeps noise of about
    sqrt(variance / D). variance: of the loss over the draws, nats squared.
    cosine_single: mean cosine of one set's gradient to the exact one; cosine_mean: cosine of the mean gradient.

    Args:
        found: losses and gradients of the sets.
        truth: those with every draft (D = 1).
    """
    error = found.loss - truth.loss
    single, goal = found.flat(), truth.flat()
    return {
        "loss_error": error.abs().mean(0),
        "bias": error.mean(0).abs(),
        "variance": error.var(0, correction=min(1, len(error) - 1)),
        "cosine_single": cosine_similarity(single, goal, dim=-1).mean(0),
        "cosine_mean": cosine_similarity(single.mean(0), goal[0], dim=-1),
    }


def coverage(weight: Float[Tensor, "D S Y"], systems: Systems) -> dict[str, Float[Tensor, " S"]]:
    """Share of the sets that hold one distinct draft (psi1 learns nothing, S3.2) and, where drafts share them, one meaning."""
    inside = (weight > 0).double()
    found = {"one_draft": (inside.sum(-1) == 1).double().mean(0)}
    if systems.law == "meanings":
        meanings = (inside @ one_hot(systems.meaning).double() > 0).sum(-1)
        found["one_meaning"] = (meanings == 1).double().mean(0)
    return found


def estimators(
    systems: Systems, policy: tuple[Tensor, Tensor], seed: int, draws: int, beta: float
) -> Iterator[tuple[str, dict[str, Float[Tensor, " S"]]]]:
    """(row, metrics) of every estimator at every size, all at the same policy; the three kinds of mc see the same draws."""
    law = draft_sets.pair_law(systems)

    def at(weight: Tensor) -> draft_sets.Gradients:
        return draft_sets.gradients(systems, policy, weight, law, beta)

    truth = at(torch.ones_like(policy[0])[None])
    for estimator in draft_sets.ESTIMATORS[:-1]:
        for k in SIZES:
            generator = stream(seed, systems.law, "sets", str(k))
            weight = draft_sets.weights(estimator, policy[0], k, draws, generator, systems.meaning)
            found = estimate(at(weight), truth)
            if estimator in SET_KINDS:
                found |= coverage(weight, systems)
            yield row_name(estimator, k, systems.law), found
    endless = policy[0][None]  # repeats counted, k -> infinity: each draft comes up k p(y) times
    yield f"{LIMIT}[{systems.law}]", estimate(at(endless), truth)


# --- part 2: training ---------------------------------------------------------------------------------------------------


def greedy_answers(systems: Systems, shift: Shift) -> Float[Tensor, "S Z"]:
    """The answer of greedy decoding, y first, then z given y, as a distribution with a single 1."""
    p_y, p_z = shift.policy(systems)
    best = p_z[torch.arange(len(systems)), p_y.argmax(-1)].argmax(-1)
    return one_hot(best, draft_laws.OUTPUTS).double()


def outcome(systems: Systems, shift: Shift, beta: float) -> dict[str, Float[Tensor, " S"]]:
    """Where a training led: win rates against the reference, decoded greedily and by sampling, both in the same way; the
    gap of E3 with p/p_ref; the expected reward."""
    start, judge = Shift.none(systems), systems.preference_logits
    found = reached(systems, shift.marginal(systems), beta)
    greedy = exact.win_rate(greedy_answers(systems, shift), greedy_answers(systems, start), judge)
    return {"wr_greedy": greedy, **found}


def reached(systems: Systems, p: Float[Tensor, "S Z"], beta: float) -> dict[str, Float[Tensor, " S"]]:
    """The outcomes that depend on p(z) alone."""
    reference, judge = Shift.none(systems).marginal(systems), systems.preference_logits
    ratio = (p / reference).log()
    gap = (judge - beta * (ratio[:, :, None] - ratio[:, None, :])).abs().amax((1, 2))
    return {
        "wr_sampled": exact.win_rate(p, reference, judge),
        "gap": gap,
        "reward": exact.expected_reward(p, systems.reward),
    }


def trainings(
    systems: Systems, mode: str, variant: str, seed: int, options: dict
) -> Iterator[tuple[str, dict[str, Float[Tensor, " S"]]]]:
    """(row, metrics) of every arm of one training; all arms draw from streams of the same seed."""
    where = (systems.law, mode, variant)
    for estimator, k in arms(variant):
        shift = draft_sets.train(
            systems, estimator, k, options[f"{mode}_steps"], options[f"{mode}_sets"], stream(seed, *where),
            lr=options["lr"], beta=options["beta"], shared=variant == "shared", only_y=variant == "psi1",
        )  # fmt: skip
        yield row_name(estimator, k, *where), outcome(systems, shift, options["beta"])


# --- the experiment -----------------------------------------------------------------------------------------------------


def check(settings: dict) -> None:
    """Refuse settings that no run can have.

    Raises:
        UnknownOptionError: a number out of range, or an unknown law.
    """
    names = ("systems", "draws", "long_steps", "long_sets", "short_steps", "short_sets")
    whole(1, **{name: settings[name] for name in names})
    positive(1e-9, **{name: settings[name] for name in ("beta", "lr", "scale")})
    for law in laws_of(settings):
        errors.check_option("laws", law, LAWS)


def laws_of(settings: dict) -> list[str]:
    """The laws of a run, from the setting `laws`: names with commas between.

    >>> laws_of({"laws": "zipf, tail"})
    ['zipf', 'tail']
    """
    return list(dict.fromkeys(word.strip() for word in settings["laws"].split(",")))


def rows_of(law: str, seed: int, options: dict) -> Iterator[tuple[str, dict[str, Float[Tensor, " S"]]]]:
    """(row, metrics) of everything that is measured under one law."""
    systems = draft_laws.draw(law, options["systems"], stream(seed, law, "systems"))
    policy = Shift.random(systems, options["scale"], stream(seed, law, "policy")).policy(systems)
    yield from estimators(systems, policy, seed, options["draws"], options["beta"])
    reference = Shift.none(systems).marginal(systems)
    yield f"target[{law}]", reached(systems, exact.tilt(reference, systems.reward, options["beta"]), options["beta"])
    for _, mode, variant in training_runs([law]):
        yield from trainings(systems, mode, variant, seed, options)


def run_seed(context: "Context", seed: int) -> list[dict]:
    """Records of one seed: `systems` systems a law; every estimator, every training."""

    def make() -> list[dict]:
        context.say(f"seed {seed}")
        found = []
        for law in laws_of(context.settings):
            for row, metrics in rows_of(law, seed, context.settings):
                found += as_records(seed, row, metrics)
        return found

    note = "95 % bootstrap over systems; every seed draws systems of its own, so that all count as one list of items"
    context.note("intervals", note)
    return context.cached_records(context.out / f"seed-{seed}", make)


def as_records(seed: int, row: str, metrics: dict[str, Float[Tensor, " S"]]) -> list[dict]:
    """One record a system; five digits, since there are very many.

    >>> as_records(0, "mc-2[zipf]", {"bias": torch.tensor([0.123456], dtype=torch.float64)})
    [{'seed': 0, 'system': 'mc-2[zipf]', 'item': 0, 'bias': 0.12346}]
    """
    columns = {name: [float(f"{value:.{DIGITS}g}") for value in values.tolist()] for name, values in metrics.items()}
    return [
        {"seed": seed, "system": row, "item": item, **dict(zip(columns, values))}
        for item, values in enumerate(zip(*columns.values()))
    ]


def summarise(records: list[dict], seeds: list[int]) -> tuple[list[dict], list[dict]]:
    """Rows and paired differences; the systems of all seeds are one list of items, since no two seeds share one."""
    size = 1 + max(record["item"] for record in records)
    place = {seed: number * size for number, seed in enumerate(seeds)}
    pooled = [{**record, "seed": 0, "item": place[record["seed"]] + record["item"]} for record in records]
    pairs = compared(dict.fromkeys(record["system"] for record in records))
    return evaluation.summarise(pooled, METRICS, [0], pairs)


def figures(context: "Context", summary: dict, records: list[dict]) -> dict:
    """Bias, variance and cosines against k; win rates; where the order of DBS and MC reverses."""
    context.shared["summary"] = summary  # the prose says what was found
    return sampler_figures.report_figures(summary, laws_of(context.settings))


def prose(context: "Context") -> str:
    """What the report says above the table, from the numbers of this run."""
    return "\n\n".join(sampler_figures.findings(context.shared["summary"], laws_of(context.settings)))


def samples(context: "Context", records: list[dict]) -> list[dict]:
    """Tables have no texts to show."""
    return []
