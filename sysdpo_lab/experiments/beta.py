"""`run beta`: one knob turned on exact tables. What beta does to the distance from the start, the win rate, the gap, the
beta that can be read off the trained system, and the time that training takes.

System: x -> y -> z with x -> z, from two kinds of start. "ring" is that of `run toy`: its marginal p_ref(z|x) is uniform.
"uneven" has random tables, so that the start keeps speaking through the trained system (theory of the lessons, S1.2, S6.2).
Both have the same judges at every beta.

All betas, both starts and all systems are trained as one system with many inputs: their tables have no number in common,
and Adam treats every number by itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sysdpo_lab import alignment, errors, evaluation, exact
from sysdpo_lab.components import Categorical
from sysdpo_lab.experiments import beta_figures, toy
from sysdpo_lab.options import positive, whole
from sysdpo_lab.system import CompoundSystem

if TYPE_CHECKING:
    from sysdpo_lab.experiments.runner import Context

TITLE = "Beta: distance, win rate and time against one number"
STARTS = ("ring", "uneven")
METRICS = ("gap", "gap_unadjusted", "kl", "wr_prompted", "beta_hat", "beta_hat_adjusted", "steps", "steps_slow")
TOLERANCE = 1e-3  # nats: from this reference-adjusted gap on training counts as done


@dataclass(frozen=True)
class Sweep:
    """Systems of every beta side by side, as one system with many inputs; a *group* is one system at one beta.

    Attributes:
        system: x -> y -> z with x -> z.
        reward: r(x, z) of the judges.
        betas: the beta of each input.
        inputs: how many inputs a group has.
    """

    system: CompoundSystem
    reward: Float[Tensor, "X Z"]
    betas: Float[Tensor, " X"]
    inputs: int

    @property
    def preference_logits(self) -> Float[Tensor, "X Z Z"]:
        """[x, i, j] = logit pref(i > j | x) = r(x, i) - r(x, j) (E2)."""
        return self.reward[:, :, None] - self.reward[:, None, :]


def draw(generator: torch.Generator, start: str, systems: int, inputs: int, drafts: int, outputs: int) -> toy.Case:
    """`systems` times `inputs` inputs with judges r ~ N(0, 1); the same generator gives both starts the same judges.

    >>> ring, uneven = (draw(torch.Generator().manual_seed(0), start, 2, 3, 4, 4) for start in STARTS)
    >>> ring.reward.equal(uneven.reward), exact.marginal(uneven.system)[0].std().item() > 0.01
    (True, True)
    """
    errors.check_option("start", start, STARTS)
    case = toy.draw_case(generator, systems * inputs, drafts, outputs, beta=1.0)
    if start == "ring":
        return case
    parents = {"x": systems * inputs, "y": drafts}
    y = Categorical("y", {"x": systems * inputs}, drafts, _random_table(generator, systems * inputs, drafts))
    z = Categorical("z", parents, outputs, _random_table(generator, *parents.values(), outputs))
    return exact.Case(CompoundSystem([y, z], output="z"), 1.0, case.reward)


def _random_table(generator: torch.Generator, *shape: int) -> Float[Tensor, "..."]:
    return torch.softmax(torch.randn(*shape, generator=generator, dtype=torch.float64), -1)


def sweep(cases: Sequence[toy.Case], betas: Sequence[float], inputs: int) -> Sweep:
    """Every case at every beta, the case slowest, then beta, then the inputs.

    >>> case = draw(torch.Generator().manual_seed(0), "ring", 2, 3, 4, 4)
    >>> found = sweep([case], [0.5, 1.0], 3)
    >>> found.betas.tolist() == [0.5] * 6 + [1.0] * 6, found.system["y"].probabilities().shape
    (True, torch.Size([12, 4]))
    """
    systems, rewards, found = [], [], []
    for case in cases:
        for beta in betas:
            systems.append(case.system)
            rewards.append(case.reward)
            found.append(torch.full((len(case.reward),), float(beta), dtype=torch.float64))
    tables = {name: torch.cat([system[name].probabilities() for system in systems]).detach() for name in ("y", "z")}
    total, drafts, outputs = tables["z"].shape
    y = Categorical("y", {"x": total}, drafts, tables["y"])
    z = Categorical("z", {"x": total, "y": drafts}, outputs, tables["z"])
    return Sweep(CompoundSystem([y, z], output="z"), torch.cat(rewards), torch.cat(found), inputs)


# --- training -----------------------------------------------------------------------------------------------------------


class Arrivals:
    """Sees each step of a training run and keeps the tables of each group as they were when it arrived.

    A group has arrived when its reference-adjusted gap falls below `TOLERANCE` for the first time. It is measured there:
    later steps add nothing, and where gradients have all but vanished Adam's rescaling can throw a system back out, by more
    the larger beta is.

    Attributes:
        steps: (G,) after how many steps each group arrived; -1 where it has not.
    """

    def __init__(self, swept: Sweep, objective: exact.Objective):
        self.swept, self.objective = swept, objective
        pairs, judge = objective.pairs, swept.preference_logits
        self.wanted = judge[:, pairs.first, pairs.second]
        self.steps: Int[Tensor, " G"] = torch.full((len(swept.betas) // swept.inputs,), -1)
        self.kept = {name: swept.system[name].logits.detach().clone() for name in ("y", "z")}

    def scaled(self) -> Float[Tensor, "X Z"]:
        """beta log p/p_ref of each output, nats."""
        return self.swept.betas[:, None] * self.objective.log_ratio()

    def loss(self) -> Tensor:
        """The population loss of all groups, each with its own beta: beta is a factor of the log-ratios."""
        return self.objective.pairs.losses(self.scaled(), 1.0).sum()

    def gaps(self) -> Float[Tensor, " G"]:
        """The reference-adjusted gap of each group: the largest error of a margin."""
        with torch.no_grad():
            scaled, pairs = self.scaled(), self.objective.pairs
        margin = scaled[:, pairs.first] - scaled[:, pairs.second]
        return (self.wanted - margin).abs().amax(1).reshape(-1, self.swept.inputs).amax(1)

    def look(self, step: int) -> None:
        """Note who arrives now."""
        self._keep((self.gaps() < TOLERANCE) & (self.steps < 0), step)

    def _keep(self, new: Bool[Tensor, " G"], step: int) -> None:
        self.steps[new] = step
        rows = new.repeat_interleave(self.swept.inputs)
        for name, logits in self.kept.items():
            logits[rows] = self.swept.system[name].logits.detach()[rows]

    def restore(self, steps: int) -> None:
        """Put every group back to where it arrived; one that has not stays as it is and counts `steps` + 1."""
        self._keep(self.steps < 0, steps + 1)
        for name, logits in self.kept.items():
            with torch.no_grad():
                self.swept.system[name].logits.copy_(logits)


def train(swept: Sweep, steps: int, lr: float) -> Int[Tensor, " G"]:
    """Adam from the start on SysDPO-Sampling's population loss with every intermediate in A, in place.

    Returns:
        the number of steps after which the gap of each group is below `TOLERANCE`, where the group is left; steps + 1 where
        it does not get there.
    """
    objective = exact.sampling(swept.system, swept.preference_logits, 1.0, systems=len(swept.betas))
    arrivals = Arrivals(swept, objective)
    exact.train(swept.system, arrivals.loss, steps, lr, watch=arrivals.look)
    arrivals.restore(steps)
    return arrivals.steps


# --- measuring ----------------------------------------------------------------------------------------------------------


def measure(swept: Sweep) -> list[dict]:
    """One record a group: reference-adjusted and plain gap, KL from the start (nats) and exact win rate against it (means
    over inputs), and the fitted beta without and with log p_ref as a second regressor."""
    p, reference = (exact.marginal(swept.system, flag).detach() for flag in (False, True))
    judge = swept.preference_logits
    means = {"kl": exact.kl(p, reference), "wr_prompted": exact.win_rate(p, reference, judge)}
    records = []
    for first in range(0, len(p), swept.inputs):
        mine, beta = slice(first, first + swept.inputs), swept.betas[first].item()
        laws = p[mine], judge[mine]
        records.append({
            "gap": alignment.gap(*laws, beta, p_reference=reference[mine]),
            "gap_unadjusted": alignment.gap(*laws, beta),
            **{name: values[mine].mean().item() for name, values in means.items()},
            "beta_hat": alignment.fit_beta(*laws)[0],
            "beta_hat_adjusted": alignment.fit_beta(*laws, p_reference=reference[mine])[0],
        })  # fmt: skip
    return records


def measure_start(case: toy.Case, inputs: int) -> list[dict]:
    """One record a system before training: its adjusted gap is the judge's largest logit, whatever beta is."""
    largest = case.preference_logits.abs().amax((1, 2)).reshape(-1, inputs).amax(1)
    return [{"gap": gap, "kl": 0.0, "wr_prompted": 0.5} for gap in largest.tolist()]


# --- the experiment -----------------------------------------------------------------------------------------------------


def betas_of(settings: dict) -> list[float]:
    """The betas of a run, rising, from the setting `betas`: numbers with commas between.

    >>> betas_of({"betas": "1, 0.5,0.5"})
    [0.5, 1.0]

    Raises:
        UnknownOptionError: something else than numbers > 0.
    """
    try:
        found = sorted({float(word) for word in settings["betas"].split(",")})
    except ValueError:
        raise errors.UnknownOptionError(
            f"betas must be numbers with commas between, found {settings['betas']!r}"
        ) from None
    if not all(0 < beta < math.inf for beta in found):
        raise errors.UnknownOptionError(f"betas must be > 0 and finite, found {settings['betas']!r}")
    return found


def starts_of(settings: dict) -> list[str]:
    """The starts of a run, from the setting `starts`.

    >>> starts_of({"starts": "ring, uneven"})
    ['ring', 'uneven']
    """
    return list(dict.fromkeys(word.strip() for word in settings["starts"].split(",")))


def check(settings: dict) -> None:
    """Refuse settings that no run can have.

    Raises:
        UnknownOptionError: a number out of range, an unknown start, or betas that are no numbers.
    """
    betas_of(settings)
    for start in starts_of(settings):
        errors.check_option("starts", start, STARTS)
    whole(1, **{name: settings[name] for name in ("systems", "inputs", "steps", "steps_slow")})
    whole(2, **{name: settings[name] for name in ("drafts", "outputs")})
    positive(math.ulp(0.0), **{name: settings[name] for name in ("lr", "lr_slow")})
    if "ring" in starts_of(settings) and not (settings["drafts"] == settings["outputs"] <= len(toy.RING)):
        raise errors.UnknownOptionError(
            f"drafts = {settings['drafts']} and outputs = {settings['outputs']}: the ring needs as many drafts as outputs, "
            f"2 to {len(toy.RING)}; or set starts=uneven"
        )


def row_name(start: str, beta: float | None = None) -> str:
    """What a row is called; of the ring only beta is said.

    >>> row_name("ring", 0.5), row_name("uneven", 5.0), row_name("ring"), row_name("uneven")
    ('joint[beta=0.5]', 'joint[beta=5,uneven]', 'before', 'before[uneven]')
    """
    words = [*([f"beta={beta:g}"] if beta is not None else []), *([start] if start != "ring" else [])]
    name = "before" if beta is None else "joint"
    return f"{name}[{','.join(words)}]" if words else name


def run_seed(context: "Context", seed: int) -> list[dict]:
    """Records of one seed: every start, every beta, `systems` judges."""
    context.note("steps", f"first step with a reference-adjusted gap below {TOLERANCE:g}, where the system is measured")
    return context.cached_records(context.out / f"seed-{seed}", lambda: _records(context, seed))


def _records(context: "Context", seed: int) -> list[dict]:
    options = context.settings
    context.say(f"seed {seed}")
    starts, betas, count = starts_of(options), betas_of(options), options["systems"]
    sizes = [options[name] for name in ("systems", "inputs", "drafts", "outputs")]
    cases = [draw(torch.Generator().manual_seed(seed), start, *sizes) for start in starts]
    swept, slow = (sweep(cases, betas, options["inputs"]) for _ in range(2))
    fast_steps = train(swept, options["steps"], options["lr"]).tolist()
    slow_steps = train(slow, options["steps_slow"], options["lr_slow"]).tolist()
    rows = [row_name(start, beta) for start in starts for beta in betas for _ in range(count)]
    taken = {"steps": fast_steps, "steps_slow": slow_steps}
    late = {name: sum(number > options[name] for number in numbers) for name, numbers in taken.items()}
    if any(late.values()):  # a mean over them is a lower bound only
        counted = ", ".join(f"{number} of {len(rows)} by {name}" for name, number in late.items())
        context.note(f"not arrived, seed {seed}", f"{counted}: they count as the limit + 1, so that mean steps are lower bounds")
    found = []
    for start, case in zip(starts, cases):
        for item, record in enumerate(measure_start(case, options["inputs"])):
            found.append({"seed": seed, "system": row_name(start), "item": item, **record})
    for number, (row, record) in enumerate(zip(rows, measure(swept))):
        steps = {"steps": fast_steps[number], "steps_slow": slow_steps[number]}
        found.append({"seed": seed, "system": row, "item": number % count, **record, **steps})
    return found


def summarise(records: list[dict], seeds: list[int]) -> tuple[list[dict], list[dict]]:
    """Rows, and paired differences between each beta and the next smaller one of the same start."""
    names = list(dict.fromkeys(record["system"] for record in records))
    trained = [name for name in names if name.startswith("joint")]
    pairs = [(b, a) for a, b in zip(trained, trained[1:]) if beta_figures.start_of(a) == beta_figures.start_of(b)]
    return evaluation.summarise(records, METRICS, seeds, pairs)


def figures(context: "Context", summary: dict, records: list[dict]) -> dict:
    """KL, win rate, fitted beta, gap and steps against beta, and the graph."""
    from sysdpo_lab import figures as draw_figures

    context.shared["summary"] = summary  # the prose says what was found
    small = draw(torch.Generator().manual_seed(0), "uneven", 1, 2, 2, 2).system
    graph = draw_figures.draw_graph(small), "the graph: x feeds y; x and y feed z"
    return {"graph": graph, **beta_figures.report_figures(summary)}


def prose(context: "Context") -> str:
    """What the report says above the table, from the numbers of this run."""
    return "\n\n".join(beta_figures.findings(context.shared["summary"]))


def samples(context: "Context", records: list[dict]) -> list[dict]:
    """Tables have no texts to show."""
    return []
