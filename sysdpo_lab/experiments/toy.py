"""`run toy`: on tables everything can be computed, so every row of E9 is measured exactly.

System: x -> y -> z with x -> z; the start has a uniform marginal (y uniform, z's rows doubly stochastic), so the optimum
is beta-perfect (E4) although y and z both have something to learn (theory of the lessons: "uniform marginal").

Several systems are trained as one, with an input for each system and each of its own: the tables of different inputs have
no number in common, and Adam treats every number by itself.
"""

import math
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import alignment, errors, evaluation, exact, losses
from sysdpo_lab.components import Categorical
from sysdpo_lab.exact import Case, Objective, all_pairs
from sysdpo_lab.exact import population_loss as population_loss  # with `margins`, the loss of the row `joint`
from sysdpo_lab.options import positive, whole
from sysdpo_lab.system import CompoundSystem

if TYPE_CHECKING:
    from sysdpo_lab.experiments.runner import Context

TITLE = "Toy: a chain with a skip, aligned exactly"
METRICS = ("gap", "wr_prompted", "margin_accuracy", "kl")
ROWS = ("before", "separate", "only:y", "only:z", "joint")
RING = (0.55, 0.2, 0.15, 0.1)


def draw_case(generator: torch.Generator, inputs: int, drafts: int, outputs: int, beta: float) -> Case:
    """A random judge r ~ N(0, 1) over a system whose start has a uniform marginal.

    >>> case = draw_case(torch.Generator().manual_seed(0), 2, 4, 4, 0.5)
    >>> [round(p, 9) for p in exact.marginal(case.system)[0].tolist()]
    [0.25, 0.25, 0.25, 0.25]
    """
    ring = torch.zeros(outputs, dtype=torch.float64)
    ring[: min(outputs, len(RING))] = torch.tensor(RING[:outputs], dtype=torch.float64)
    ring = ring / ring.sum()
    rows = torch.stack([ring.roll(shift) for shift in range(drafts)])
    z = Categorical("z", {"x": inputs, "y": drafts}, outputs, rows.expand(inputs, -1, -1).clone())
    system = CompoundSystem([Categorical("y", {"x": inputs}, drafts), z], inputs=("x",), output="z")
    reward = torch.randn(inputs, outputs, generator=generator, dtype=torch.float64)
    return Case(system, beta, reward)


def margins(case: Case) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
    """Sampling margins (E7) of all comparisons with every intermediate in A, and the judge's logits."""
    x, i, j = all_pairs(*case.reward.shape)
    drafts = {"y": torch.arange(case.system["y"].cardinality).expand(len(x), -1)}
    out = losses.sampling_loss(case.system, {"x": x}, i, j, drafts, beta=case.beta)
    return out.margin, case.preference_logits[x, i, j]


def objective(case: Case, row: str) -> Objective:
    """The population loss of a row: Separate-DPO with finals only, or SysDPO-Sampling with every intermediate in A.

    It is summed over inputs, so that Adam's epsilon acts alike, however many there are.
    """
    options = {"systems": len(case.reward)}
    if row == "separate":  # drafts and outputs share their names here
        return exact.separate(case.system, case.preference_logits, case.beta, answers=["y"], **options)
    return exact.sampling(case.system, case.preference_logits, case.beta, **options)


def separate_loss(case: Case) -> Tensor:
    """Separate-DPO with finals only (E9): the refiner on (z^w, z^l) given a draft of the reference, the drafter as if its
    values were answers, each with its own sigmoid; mean over comparisons."""
    return objective(case, "separate")() / len(case.reward)


def train(case: Case, row: str, steps: int, lr: float) -> None:
    """Train one row of the table in place: Adam from the reference on the population loss."""
    errors.check_option("row", row, ROWS[1:])
    only = row.removeprefix("only:") if row.startswith("only:") else None
    exact.train(case.system, objective(case, row), steps, lr, only=only)


def measure(case: Case, inputs: int) -> list[dict]:
    """One record a system of `inputs` inputs: its gap, and means over its inputs of the exact win rate against the start
    (by the judge's own preferences), of margin accuracy, and of KL from the start (nats)."""
    p, reference = exact.marginal(case.system).detach(), exact.marginal(case.system, reference=True).detach()
    logits = case.preference_logits
    wins, kl = exact.win_rate(p, reference, logits), exact.kl_marginal(case.system)
    right = margin_accuracy(case)
    records = []
    for start in range(0, len(p), inputs):
        mine = slice(start, start + inputs)
        gap = alignment.gap(p[mine], logits[mine], case.beta, p_reference=reference[mine])
        means = {"wr_prompted": wins, "margin_accuracy": right, "kl": kl}
        records.append({"gap": gap, **{name: values[mine].mean().item() for name, values in means.items()}})
    return records


def margin_accuracy(case: Case) -> Float[Tensor, " X"]:
    """Share of each input's comparisons in which the margin has the judge's sign; a margin of 0 counts one half."""
    with torch.no_grad():
        margin, logit = margins(case)
    margin = torch.where(margin.abs() < 1e-9, 0.0, margin)
    right = [evaluation.win(m, 0.0) for m in (margin * logit.sign()).tolist()]
    return torch.tensor(right, dtype=torch.float64).reshape(len(case.reward), -1).mean(1)


def check(settings: dict) -> None:
    """Refuse settings that no run can have.

    Raises:
        UnknownOptionError: a number out of range, or drafts that cannot stand for outputs.
    """
    whole(1, **{name: settings[name] for name in ("systems", "inputs", "steps")})
    positive(math.ulp(0.0), **{name: settings[name] for name in ("beta", "lr")})
    if settings["drafts"] != settings["outputs"] or not 2 <= settings["outputs"] <= len(RING):
        raise errors.UnknownOptionError(
            f"drafts = {settings['drafts']} and outputs = {settings['outputs']} must be the same number, 2 to {len(RING)}: "
            "Separate-DPO trains the drafter as if its values were answers"
        )


def run_seed(context: "Context", seed: int) -> list[dict]:
    """Records of one seed: `systems` random judges, every row of the table."""
    options = context.settings
    sizes = {key: options[key] for key in ("drafts", "outputs", "beta")}

    def make() -> list[dict]:
        context.say(f"seed {seed}")
        found = []
        for row in ROWS:
            generator = torch.Generator().manual_seed(seed)  # the same judges for every row
            case = draw_case(generator, options["systems"] * options["inputs"], **sizes)
            if row != "before":
                train(case, row, options["steps"], options["lr"])
            records = measure(case, options["inputs"])
            found += [{"seed": seed, "system": row, "item": item, **record} for item, record in enumerate(records)]
        return found

    return context.cached_records(context.out / f"seed-{seed}", make)


def figures(context: "Context", summary: dict, records: list[dict]) -> dict:
    """The gap and the win rate of each row."""
    from sysdpo_lab import figures as draw

    pictures = {
        metric: (draw.plot_rows(summary["rows"], metric), f"{metric} of each row with its 95 % interval")
        for metric in ("gap", "wr_prompted")
    }
    case = draw_case(torch.Generator().manual_seed(0), 2, 2, 2, 0.5)
    return {"graph": (draw.draw_graph(case.system), "the graph: x feeds y and z, y feeds z"), **pictures}


def prose(context: "Context") -> str:
    """What the report says above the table."""
    return (
        "Every number is computed, not sampled: the reference-adjusted gap of E3 (0 = the optimum of DPO), the win rate "
        "against the start under the judge's own preferences, and KL from the start in nats. Joint SysDPO-Sampling with all "
        "intermediates reaches the optimum; so does only:z here, because z sees x and is unrestricted; only:y cannot. Separate "
        "counts the reward twice: it wins more often than joint, but by moving further from the start (KL) than its beta "
        "allows, and misses the optimum. It is over-optimised, not better aligned."
    )


def samples(context: "Context", records: list[dict]) -> list[dict]:
    """Tables have no texts to show."""
    return []
