"""Lesson 04: shares of the margin, the loss of whole traces, the tilted drafter, its posterior, cross ratios, one edge more."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from sysdpo_lab import CompoundSystem, exact
from sysdpo_lab.components import Categorical
from sysdpo_lab.coursework.checks.core import Check, Mistake
from sysdpo_lab.coursework.checks.lesson_00 import draws, table
from sysdpo_lab.coursework.checks.lesson_02 import rewards

Tokens = Mapping[str, Float[Tensor, "B T"]]
Shares = Mapping[str, Float[Tensor, " B"]]

# --- shares of the log-ratio gap --------------------------------------------------------------------------------------


def component_shares(
    policy_chosen: Tokens, policy_rejected: Tokens, reference_chosen: Tokens, reference_rejected: Tokens
) -> dict[str, Float[Tensor, " B"]]:
    """{component: its log-ratio of the chosen trace minus that of the rejected one}, nats, summed over tokens (E6)."""
    chosen, rejected = _log_ratios(policy_chosen, reference_chosen), _log_ratios(policy_rejected, reference_rejected)
    return {name: chosen[name] - rejected[name] for name in chosen}


def _log_ratios(policy: Tokens, reference: Tokens, reduce: Callable = Tensor.sum) -> dict[str, Float[Tensor, " B"]]:
    return {name: reduce(policy[name] - reference[name], -1) for name in policy}


def _token_log_probs() -> list[tuple]:
    """Two systems; components' texts have different lengths, and a short text is filled up with 0."""
    g, cases = draws(40), []
    for lengths in ({"draft": (2, 1), "refine": (1, 3)}, {"plan": (3, 2), "write": (4, 7), "check": (1, 2)}):
        sides = []
        for _ in range(4):
            tokens = {n: torch.rand(len(k), max(k), generator=g, dtype=torch.float64) for n, k in lengths.items()}
            tokens = {n: (-3 * t).round(decimals=2) for n, t in tokens.items()}
            sides.append(
                {n: t * (torch.arange(t.shape[1]) < torch.tensor(lengths[n])[:, None]) for n, t in tokens.items()}
            )
        cases.append(tuple(sides))
    return cases


def _each(combine: Callable) -> Callable:
    """A mistake made alike for each component: combine(pc, pr, rc, rr) of its four sides."""
    return lambda pc, pr, rc, rr: {name: combine(pc[name], pr[name], rc[name], rr[name]) for name in pc}


def _of_sums(combine: Callable) -> Callable:
    return _each(lambda *sides: combine(*(side.sum(-1) for side in sides)))


def _total(*sides: Tokens) -> Float[Tensor, " B"]:
    return sum(component_shares(*sides).values())


check_component_shares = Check(
    cases=_token_log_probs,
    right=component_shares,
    mistakes=[
        Mistake(
            "mean instead of sum",
            _each(lambda pc, pr, rc, rr: (pc - pr - rc + rr).mean(-1)),
            "a mean over the tokens; a text's log-probability is the sum of its tokens', in every component",
        ),
        Mistake(
            "reference forgotten",
            _of_sums(lambda pc, pr, rc, rr: pc - pr),
            "the reference is missing: a share says how far the component has moved from its start",
        ),
        Mistake(
            "reference added",
            _of_sums(lambda pc, pr, rc, rr: (pc - pr) + (rc - rr)),
            "the reference's gap is added; a log-ratio subtracts it",
        ),
        Mistake(
            "chosen and rejected swapped",
            _of_sums(lambda pc, pr, rc, rr: (pr - rr) - (pc - rc)),
            "the sign is flipped: a share is positive when the component favours the chosen trace",
        ),
        Mistake(
            "chosen side only",
            _of_sums(lambda pc, pr, rc, rr: pc - rc),
            "only the chosen trace counts here; subtract the rejected trace's log-ratio",
        ),
        Mistake(
            "log-ratios added",
            _of_sums(lambda pc, pr, rc, rr: (pc - rc) + (pr - rr)),
            "the two log-ratios are added; the gap is chosen *minus* rejected",
        ),
        Mistake(
            "components added up",
            _total,
            "this is the whole log-ratio gap; return one entry for each component before they are added",
        ),
        Mistake(
            "gap split evenly",
            lambda *sides: {name: _total(*sides) / len(sides[0]) for name in sides[0]},
            "every component gets the same part; compute each one's own log-ratio",
        ),
        Mistake(
            "normalised to 1",
            lambda *sides: {name: share / _total(*sides) for name, share in component_shares(*sides).items()},
            "the shares are divided by their sum; they are nats, can be negative, and add up to the gap",
        ),
        Mistake(
            "probabilities instead of logs",
            _of_sums(lambda pc, pr, rc, rr: (pc - rc).exp() - (pr - rr).exp()),
            "these are differences of probability ratios; the shares of a log-ratio gap stay in logs",
        ),
        Mistake(
            "summed over the batch",
            _each(lambda pc, pr, rc, rr: (pc - pr - rc + rr).sum()),
            "all pairs are added up; return one number for each pair, shape (B,)",
        ),
        Mistake(
            "tokens not summed",
            _each(lambda pc, pr, rc, rr: pc - pr - rc + rr),
            "this has one number a token; a share is their sum",
        ),
    ],
)


# --- the loss of whole traces -----------------------------------------------------------------------------------------


def traces_loss(shares: Shares, beta: float) -> Float[Tensor, ""]:
    """-log sigmoid(beta x sum of the shares), mean over pairs (E5, E6)."""
    return -logsigmoid(beta * torch.stack(list(shares.values())).sum(0)).mean()


def _shares() -> list[tuple]:
    g = draws(41)
    sizes = (({"draft": 4, "refine": 4}, 0.5), ({"plan": 3, "write": 3, "check": 3}, 0.2))
    return [
        ({name: 3 * torch.randn(n, generator=g, dtype=torch.float64) for name, n in names.items()}, b)
        for names, b in sizes
    ]


def _gap(shares: Shares) -> Float[Tensor, " B"]:
    return sum(shares.values())


check_traces_loss = Check(
    cases=_shares,
    right=traces_loss,
    mistakes=[
        Mistake(
            "log sigmoid of a mean",
            lambda shares, beta: -logsigmoid((beta * _gap(shares)).mean()),
            "the margins are averaged before the log sigmoid; take each pair's loss, then the mean",
        ),
        Mistake(
            "beta forgotten",
            lambda shares, beta: -logsigmoid(_gap(shares)).mean(),
            "beta is missing: the margin is beta times the sum of the shares",
        ),
        Mistake(
            "divided by beta",
            lambda shares, beta: -logsigmoid(_gap(shares) / beta).mean(),
            "the gap is divided by beta; it is multiplied",
        ),
        Mistake(
            "a sigmoid for each component",
            lambda shares, beta: sum(-logsigmoid(beta * share).mean() for share in shares.values()),
            "each component has a sigmoid of its own: that is Separate-DPO (lesson 07). Add the shares first, then one sigmoid",
        ),
        Mistake(
            "mean over components",
            lambda shares, beta: -logsigmoid(beta * _gap(shares) / len(shares)).mean(),
            "the shares are averaged over components; log-probabilities of a chain of components are added",
        ),
        Mistake(
            "sign flipped",
            lambda shares, beta: -logsigmoid(-beta * _gap(shares)).mean(),
            "the sign of the margin is flipped: the loss must fall when the shares grow",
        ),
        Mistake(
            "sum over the batch",
            lambda shares, beta: -logsigmoid(beta * _gap(shares)).sum(),
            "a sum over pairs; the loss is a mean, so that it does not grow with the batch",
        ),
        Mistake(
            "one loss a pair",
            lambda shares, beta: -logsigmoid(beta * _gap(shares)),
            "this has one loss a pair; return their mean, a scalar",
        ),
        Mistake(
            "log-likelihood",
            lambda shares, beta: logsigmoid(beta * _gap(shares)).mean(),
            "this is the log-likelihood, which grows; the loss is its negative",
        ),
        Mistake(
            "log forgotten",
            lambda shares, beta: -torch.sigmoid(beta * _gap(shares)).mean(),
            "the log is missing: minus the *log* sigmoid",
        ),
        Mistake(
            "last component only",
            lambda shares, beta: -logsigmoid(beta * list(shares.values())[-1]).mean(),
            "only the last component counts here; all shares are added",
        ),
    ],
)


# --- the optimum's drafter --------------------------------------------------------------------------------------------


def chain(p_y: Float[Tensor, "X Y"], p_z: Float[Tensor, "X Y Z"]) -> CompoundSystem:
    """x -> y -> z with x -> z."""
    (inputs, drafts), outputs = p_y.shape, p_z.shape[-1]
    y = Categorical("y", {"x": inputs}, drafts, p_y)
    return CompoundSystem([y, Categorical("z", {"x": inputs, "y": drafts}, outputs, p_z)], output="z")


def _tilted(p_y: Tensor, p_z: Tensor, reward: Tensor, beta: float) -> Float[Tensor, "X Y Z"]:
    return exact.tilted_joint(chain(p_y, p_z), reward, beta).reshape(p_z.shape)


def tilted_draft(
    p_y: Float[Tensor, "X Y"], p_z: Float[Tensor, "X Y Z"], reward: Float[Tensor, "X Z"], beta: float
) -> Float[Tensor, "X Y"]:
    """p*(y|x) = p_ref(y|x) h(x,y) / h(x), by summing the tilted joint (theory S2.2)."""
    return _tilted(p_y, p_z, reward, beta).sum(-1)


def _chains() -> list[tuple]:
    g = draws(42)
    sizes = ((1, 2, 3, 0.5), (2, 3, 4, 2.0), (3, 3, 3, 0.8))
    return [(table(x, y, generator=g), table(x, y, z, generator=g), 2 * rewards(x, z, g), b) for x, y, z, b in sizes]


def _h(p_z: Tensor, reward: Tensor, beta: float) -> Float[Tensor, "X Y"]:
    return (p_z * (reward / beta).exp()[:, None]).sum(-1)


def _rows(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


check_tilted_draft = Check(
    cases=_chains,
    right=tilted_draft,
    mistakes=[
        Mistake(
            "not divided by the parent's h",
            lambda y, z, r, beta: y * _h(z, r, beta),
            "the rows do not sum to 1: divide by h of what came before, here h(x)",
        ),
        Mistake(
            "reference forgotten",
            lambda y, z, r, beta: _rows(_h(z, r, beta)),
            "p_ref(y|x) is missing: a draft that the start hardly ever writes stays rare",
        ),
        Mistake(
            "this is h",
            lambda y, z, r, beta: _h(z, r, beta),
            "this is h(x, y); the step is p_ref(y|x) h(x, y) / h(x)",
        ),
        Mistake(
            "exp of the mean reward",
            lambda y, z, r, beta: _rows(y * ((z * r[:, None]).sum(-1) / beta).exp()),
            "the mean reward of a draft is exponentiated; h is the mean of exp(r / beta), which also pays for luck",
        ),
        Mistake(
            "mean reward as weight",
            lambda y, z, r, beta: _rows(y * (z * r[:, None]).sum(-1)),
            "the weights are mean rewards, which can be negative; h averages exp(r / beta)",
        ),
        Mistake(
            "best output only",
            lambda y, z, r, beta: _rows(
                y * torch.gather(z, 2, r.argmax(-1)[:, None, None].expand(-1, z.shape[1], 1))[..., 0]
            ),
            "only the best output counts here; h averages over all of them",
        ),
        Mistake(
            "multiplied by beta",
            lambda y, z, r, beta: _rows(y * _h(z, r, 1 / beta)),
            "beta works the wrong way round: a larger beta must stay closer to the start",
        ),
        Mistake(
            "beta forgotten",
            lambda y, z, r, beta: _rows(y * _h(z, r, 1.0)),
            "beta is missing; your step is right for beta = 1 only",
        ),
        Mistake(
            "normalised over inputs",
            lambda y, z, r, beta: y * _h(z, r, beta) / (y * _h(z, r, beta)).sum(0, keepdim=True),
            "the normalisation goes over the inputs; each row (one input) must sum to 1",
        ),
        Mistake(
            "normalised over everything",
            lambda y, z, r, beta: y * _h(z, r, beta) / (y * _h(z, r, beta)).sum(),
            "all inputs together sum to 1; each input has its own h(x)",
        ),
        Mistake(
            "start returned",
            lambda y, z, r, beta: y,
            "this is the start; it moves, unless the refiner ignores its draft",
        ),
    ],
)


# --- which draft was it? ----------------------------------------------------------------------------------------------


def aligned_posterior(
    p_y: Float[Tensor, "X Y"], p_z: Float[Tensor, "X Y Z"], reward: Float[Tensor, "X Z"], beta: float
) -> Float[Tensor, "X Y Z"]:
    """p*(y | x, z) of Direct's optimum, by Bayes' rule on the tilted joint (theory S2.1)."""
    joint = _tilted(p_y, p_z, reward, beta)
    return joint / joint.sum(1, keepdim=True)


def _posterior(y: Tensor, z: Tensor) -> Float[Tensor, "X Y Z"]:
    joint = y[..., None] * z
    return joint / joint.sum(1, keepdim=True)


check_aligned_posterior = Check(
    cases=_chains,
    right=aligned_posterior,
    mistakes=[
        Mistake(
            "tilted drafter, old refiner",
            lambda y, z, r, beta: _posterior(tilted_draft(y, z, r, beta), z),
            "the drafter is the optimum's, the refiner the start's; in the optimum both have moved, and the two moves cancel",
        ),
        Mistake(
            "old drafter, tilted refiner",
            lambda y, z, r, beta: _posterior(y, _rows(z * (r / beta).exp()[:, None])),
            "the refiner is the optimum's, the drafter the start's; in the optimum both have moved, and the two moves cancel",
        ),
        Mistake(
            "joint instead of posterior",
            _tilted,
            "this is p*(y, z | x); divide by p*(z | x)",
        ),
        Mistake(
            "normalised over outputs",
            lambda y, z, r, beta: _rows(_tilted(y, z, r, beta)),
            "this is p*(z | x, y), the refiner; for a given z the *drafts* sum to 1",
        ),
        Mistake(
            "drafts only",
            lambda y, z, r, beta: y[..., None].expand_as(z),
            "this is the start's p(y | x); the output tells something about the draft",
        ),
        Mistake(
            "tilted drafts only",
            lambda y, z, r, beta: tilted_draft(y, z, r, beta)[..., None].expand_as(z),
            "this is the optimum's p*(y | x); the output tells something about the draft",
        ),
        Mistake(
            "likelihood only",
            lambda y, z, r, beta: z / z.sum(1, keepdim=True),
            "p(y | x) is missing: a draft that is hardly ever written explains little",
        ),
        Mistake(
            "reward tilts the posterior",
            lambda y, z, r, beta: _posterior(y, z) * (r / beta).exp()[:, None],
            "the reward is put into the posterior once more; for a given z it is the same number for all drafts and cancels",
        ),
    ],
)


# --- does it factorise? -----------------------------------------------------------------------------------------------


def largest_log_cross_ratio(Z: Float[Tensor, "X A B"]) -> Float[Tensor, " X"]:
    """max over a, a', b, b' of log Z[a,b] Z[a',b'] / (Z[a,b'] Z[a',b]) for each x: 0 iff Z = a(y1) b(y2)."""
    log_z = Z.log()
    by_rows = log_z[:, :, None] - log_z[:, None]  # X, a, a', b
    return (by_rows.amax(-1) - by_rows.amin(-1)).flatten(1).amax(1)


def _partition_tables() -> list[tuple]:
    g = draws(43)
    product = table(2, 3, 1, generator=g) * table(2, 1, 3, generator=g)
    found = [
        7 * torch.rand(x, a, b, generator=g, dtype=torch.float64) + 0.2 for x, a, b in ((1, 2, 2), (3, 3, 2), (2, 3, 4))
    ]
    return [*((values,) for values in found), (product,)]


def _ratios(log_z: Tensor) -> Float[Tensor, "X A A B B"]:
    by_rows = log_z[:, :, None] - log_z[:, None]
    return by_rows[..., :, None] - by_rows[..., None, :]


def _corner(log_z: Tensor, i: int, j: int) -> Float[Tensor, " X"]:
    return log_z[:, 0, 0] + log_z[:, i, j] - log_z[:, 0, j] - log_z[:, i, 0]


check_largest_log_cross_ratio = Check(
    cases=_partition_tables,
    right=largest_log_cross_ratio,
    mistakes=[
        Mistake(
            "log forgotten",
            lambda Z: _ratios(Z.log()).flatten(1).amax(1).exp(),
            "this is the cross ratio itself; take its log, so that a product has 0",
        ),
        Mistake(
            "differences instead of ratios",
            lambda Z: _ratios(Z).flatten(1).amax(1),
            "this tests whether Z is a *sum* a(y1) + b(y2); for a product compare logs",
        ),
        Mistake(
            "determinant",
            lambda Z: (
                (Z[:, :, None, :, None] * Z[:, None, :, None] - Z[:, :, None, None] * Z[:, None, :, :, None])
                .flatten(1)
                .amax(1)
            ),
            "these are determinants: 0 for a product too, but they grow with Z, which may be any size; use the ratio",
        ),
        Mistake(
            "range of the logs",
            lambda Z: Z.log().flatten(1).amax(1) - Z.log().flatten(1).amin(1),
            "this is how far Z varies at all; a product may vary as much as it likes. Compare two rows in two columns",
        ),
        Mistake(
            "first corner only",
            lambda Z: _corner(Z.log(), 1, 1).abs(),
            "only the first two rows and columns are compared; take the largest over all of them",
        ),
        Mistake(
            "outer corner only",
            lambda Z: _corner(Z.log(), -1, -1).abs(),
            "only the four corners of the table are compared; take the largest over all rows and columns",
        ),
        Mistake(
            "smallest",
            lambda Z: _ratios(Z.log()).flatten(1).amin(1),
            "this is the smallest log cross ratio, minus the largest; swap two rows and the sign changes",
        ),
        Mistake(
            "mean",
            lambda Z: _ratios(Z.log()).abs().flatten(1).mean(1),
            "a mean over all rows and columns; one that fails is enough, so take the largest",
        ),
        Mistake(
            "one number",
            lambda Z: _ratios(Z.log()).amax(),
            "the largest over all inputs; return one number for each input, shape (X,)",
        ),
    ],
)


# --- an edge more -----------------------------------------------------------------------------------------------------


def repaired(p_y1: Float[Tensor, "X A"], p_y2: Float[Tensor, "X B"], p_z: Float[Tensor, "X A B Z"]) -> CompoundSystem:
    """The collider with the edge y1 -> y2, started where the collider starts (`exact.with_edge`)."""
    return exact.with_edge(_collider(p_y1, p_y2, p_z), "y1", "y2")


def _collider(p_y1: Tensor, p_y2: Tensor, p_z: Tensor, **other: Categorical) -> CompoundSystem:
    inputs, one, two, outputs = p_z.shape
    parts = {
        "y1": Categorical("y1", {"x": inputs}, one, p_y1),
        "y2": Categorical("y2", {"x": inputs}, two, p_y2),
        "z": Categorical("z", {"x": inputs, "y1": one, "y2": two}, outputs, p_z),
        **other,
    }
    return CompoundSystem(list(parts.values()), inputs=("x",), output="z")


def _reads_drafts(p_y1: Tensor, p_y2: Tensor, table: Tensor | None, x: bool = True) -> Categorical:
    parents = ({"x": len(p_y1)} if x else {}) | {"y1": p_y1.shape[1]}
    return Categorical("y2", parents, p_y2.shape[1], table)


def _reversed(p_y1: Tensor, p_y2: Tensor, p_z: Tensor) -> CompoundSystem:
    return exact.with_edge(_collider(p_y1, p_y2, p_z), "y2", "y1")


def _copied(p_y1: Tensor, p_y2: Tensor, p_z: Tensor) -> CompoundSystem:
    """y2 repeats y1, as far as it can."""
    same = torch.eye(p_y1.shape[1], p_y2.shape[1], dtype=torch.float64) + 1e-6
    return _collider(p_y1, p_y2, p_z, y2=_reads_drafts(p_y1, p_y2, _rows(same.expand(len(p_y1), -1, -1))))


def seen(system: CompoundSystem) -> tuple:
    """What a graph reads, and its start's and policy's joint laws: whatever the order of the parents is."""
    parents = {name: ", ".join(sorted(system.parents(name))) for name in ("y1", "y2", "z")}
    return parents, *(exact.joint_marginal(system, ["y1", "y2", "z"], start) for start in (True, False))


def _colliders() -> list[tuple]:
    g = draws(44)
    return [
        (table(x, a, generator=g), table(x, b, generator=g), table(x, a, b, z, generator=g))
        for x, a, b, z in ((1, 2, 2, 2), (2, 3, 2, 3), (3, 2, 4, 2))
    ]


check_repaired = Check(
    cases=_colliders,
    right=repaired,
    view=seen,
    mistakes=[
        Mistake(
            "no edge",
            _collider,
            "this is still the collider: y2 does not read y1",
        ),
        Mistake(
            "edge the other way round",
            _reversed,
            "here y1 reads y2; that would do as well, but the edge asked for is y1 -> y2",
        ),
        Mistake(
            "input dropped",
            lambda a, b, z: _collider(a, b, z, y2=_reads_drafts(a, b, b.mean(0).expand(a.shape[1], -1), x=False)),
            "y2 reads y1 but no longer x: an edge is added, none is taken away",
        ),
        Mistake(
            "uniform start",
            lambda a, b, z: _collider(a, b, z, y2=_reads_drafts(a, b, None)),
            "y2 starts uniform: without a table it does. It should start as before: the same row of p_y2 for every y1",
        ),
        Mistake(
            "drafts copied",
            _copied,
            "y2 starts as a copy of y1; at the start nothing should change, so that only the *graph* is different",
        ),
        Mistake(
            "second draft no longer read",
            lambda a, b, z: CompoundSystem(
                [
                    *(_collider(a, b, z)[name] for name in ("y1",)),
                    _reads_drafts(a, b, b[:, None].expand(-1, a.shape[1], -1)),
                    Categorical("z", {"x": len(a), "y2": b.shape[1]}, z.shape[-1], torch.einsum("xa,xabz->xbz", a, z)),
                ],
                inputs=("x",),
                output="z",
            ),
            "z no longer reads y1: its own edges stay as they are",
        ),
    ],
)
