"""`run toy`: on tables everything can be computed, so every row of E9 is measured exactly.

System: x -> y -> z with x -> z. The setting `family` says which: in "ring" the start has a uniform marginal (y uniform, z's
rows doubly stochastic), so the optimum is beta-perfect (E4) although y and z both have something to learn (theory of the
lessons: "uniform marginal"); the others are those of `worlds.answer_chains`, whose rows are the lessons' credit table.

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
from sysdpo_lab.worlds import answer_chains

if TYPE_CHECKING:
    from sysdpo_lab.experiments.runner import Context

TITLE = "Toy: a chain with a skip, aligned exactly"
METRICS = ("gap", "wr_prompted", "margin_accuracy", "kl", "wr_chosen", "J", "reward")
FAMILIES = ("ring", *answer_chains.FAMILIES)
ROWS = ("before", "separate", "only:y", "only:z", "joint")
RING = (0.55, 0.2, 0.15, 0.1)
MOST_ANSWERS = 20


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


def make_case(generator: torch.Generator, settings: dict) -> Case:
    """The systems of a run's settings, side by side: `systems` times `inputs` inputs.

    >>> sizes = {"systems": 3, "inputs": 2, "drafts": 4, "outputs": 4, "beta": 0.5}
    >>> case = make_case(torch.Generator().manual_seed(0), {"family": "blind", **sizes})
    >>> case.system.parents("z"), tuple(case.reward.shape)
    (('member', 'y'), (6, 4))
    """
    sizes = {key: settings[key] for key in ("drafts", "outputs", "beta")}
    if settings["family"] == "ring":
        return draw_case(generator, settings["systems"] * settings["inputs"], **sizes)
    drawn = answer_chains.draw(
        settings["family"], settings["systems"], generator, settings["inputs"], settings["outputs"]
    )
    return drawn.case(settings["beta"])


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
    """One record a system of `inputs` inputs: its gap, and means over its inputs of what `per_input` gives."""
    p, reference = exact.marginal(case.system).detach(), exact.marginal(case.system, reference=True).detach()
    logits, means = case.preference_logits, per_input(case)
    records = []
    for start in range(0, len(p), inputs):
        mine = slice(start, start + inputs)
        gap = alignment.gap(p[mine], logits[mine], case.beta, p_reference=reference[mine])
        records.append({"gap": gap, **{name: values[mine].mean().item() for name, values in means.items()}})
    return records


def per_input(case: Case) -> dict[str, Float[Tensor, " X"]]:
    """The metrics of each input: the exact win rate against the start (by the judge's own preferences) and KL from the start
    (nats); on the ring margin accuracy too; on answer chains WR-chosen, the expected reward and J = E r - beta KL."""
    p, reference = exact.marginal(case.system).detach(), exact.marginal(case.system, reference=True).detach()
    found = {"wr_prompted": exact.win_rate(p, reference, case.preference_logits), "kl": exact.kl_marginal(case.system)}
    if case.name not in answer_chains.FAMILIES:
        return {**found, "margin_accuracy": margin_accuracy(case)}
    reward = exact.expected_reward(p, case.reward)
    chosen = answer_chains.wr_chosen(case)
    return {**found, "wr_chosen": chosen, "reward": reward, "J": reward - case.beta * found["kl"]}


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
        UnknownOptionError: no such family, a number out of range, or drafts that cannot stand for outputs.
    """
    errors.check_option("family", settings["family"], FAMILIES)
    whole(1, **{name: settings[name] for name in ("systems", "inputs", "steps")})
    positive(math.ulp(0.0), **{name: settings[name] for name in ("beta", "lr")})
    most = len(RING) if settings["family"] == "ring" else MOST_ANSWERS
    if settings["drafts"] != settings["outputs"] or not 2 <= settings["outputs"] <= most:
        raise errors.UnknownOptionError(
            f"drafts = {settings['drafts']} and outputs = {settings['outputs']} must be the same number, 2 to {most}: "
            "Separate-DPO trains the drafter as if its values were answers"
        )


def run_seed(context: "Context", seed: int) -> list[dict]:
    """Records of one seed: `systems` random judges, every row of the table."""
    options = context.settings

    def make() -> list[dict]:
        context.say(f"seed {seed}")
        found = []
        for row in ROWS:
            generator = torch.Generator().manual_seed(seed)  # the same judges for every row
            case = make_case(generator, options)
            if row != "before":
                train(case, row, options["steps"], options["lr"])
            records = measure(case, options["inputs"])
            found += [{"seed": seed, "system": row, "item": item, **record} for item, record in enumerate(records)]
        return found

    return context.cached_records(context.out / f"seed-{seed}", make)


def figures(context: "Context", summary: dict, records: list[dict]) -> dict:
    """The gap and the win rate of each row."""
    from sysdpo_lab import figures as draw

    family = context.settings["family"]
    pictures = {
        metric: (draw.plot_rows(summary["rows"], metric), f"{metric} of each row with its 95 % interval")
        for metric in ("gap", "wr_prompted" if family == "ring" else "wr_chosen")
    }
    feeds = "x and y feed z" if family != "blind" else "y feeds z, which does not see x"
    return {"graph": (draw.draw_graph(one_system(family)), f"the graph: x feeds y; {feeds}"), **pictures}


def one_system(family: str) -> CompoundSystem:
    """A small system with the graph of the family.

    >>> one_system("blind").parents("z"), one_system("ring").parents("z")
    (('y',), ('x', 'y'))
    """
    generator = torch.Generator().manual_seed(0)
    if family == "ring":
        return draw_case(generator, 2, 2, 2, 0.5).system
    drawn = answer_chains.draw(family, 1, generator)
    return answer_chains.chain(drawn.p_y[0], drawn.p_z[0])


EXACT = "Every number is computed, not sampled: the reference-adjusted gap of E3 (0 = the optimum of DPO), "
RING_PROSE = (
    "the win rate against the start under the judge's own preferences, and KL from the start in nats. Joint SysDPO-Sampling "
    "with all intermediates reaches the optimum; so does only:z here, because z sees x and is unrestricted; only:y cannot. "
    "Separate counts the reward twice: it wins more often than joint, but by moving further from the start (KL) than its beta "
    "allows, and misses the optimum. It is over-optimised, not better aligned."
)
CHAINS_PROSE = (
    "the win rate against chosen answers drawn from softmax(2 r), a tie counting one half, and J = expected reward - beta KL "
    "from the start (nats), which the optimum of DPO alone maximises. A higher win rate with a lower J is over-optimised, not "
    "better aligned. Separate-DPO trains the drafter as if draft number i were answer number i."
)


def prose(context: "Context") -> str:
    """What the report says above the table."""
    family = context.settings["family"]
    if family == "ring":
        return EXACT + RING_PROSE
    return f"Answer chains, {answer_chains.WORDS[family]}. {EXACT}{CHAINS_PROSE}"


def samples(context: "Context", records: list[dict]) -> list[dict]:
    """Tables have no texts to show."""
    return []
