"""Every estimator of the Sampling loss (E7) on tables as one thing: a weight for each draft, 0 outside the set.

P_A(z) = sum_y weight(y) p(y) p(z|y), so that sixteen numbers a system say which drafts a sampler took, whether repeats
count, and how they are re-weighed; weight 1 everywhere is the exact loss. All systems and all draws are one batch, and the
gradient is the closed form of theory S3.1, so that thousands of losses cost a few matrix operations.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.exact import PairLaw, final_pairs
from sysdpo_lab.options import whole
from sysdpo_lab.samplers.gumbel import log_inclusion
from sysdpo_lab.worlds.draft_laws import BETA, Systems

ESTIMATORS = ("dbs", "mc", "mc-count", "mc-importance", "gumbel", "gumbel-ht", "exact")
RANDOM = ESTIMATORS[1:-1]

# --- which drafts, with which weight ------------------------------------------------------------------------------------


def weights(
    estimator: str,
    p_y: Float[Tensor, "S Y"],
    k: int,
    draws: int,
    generator: torch.Generator,
    meaning: Int[Tensor, " Y"] | None = None,
) -> Float[Tensor, "D S Y"]:
    """The weight of each draft in P_A, for `draws` independent sets of each system; 0 for a draft outside the set.

    dbs: 1 for the k most likely drafts, the best one of each meaning first. mc: 1 for what k draws contain. mc-count: how
    often each was drawn. mc-importance: that over k p(y), unbiased. gumbel: 1 for k drawn without replacement. gumbel-ht: 1 /
    inclusion probability for those (Horvitz-Thompson), unbiased. exact: 1 everywhere.

    Args:
        estimator: one of `ESTIMATORS`.
        p_y: the policy's p(y), rows sum to 1.
        k: size of the set, 1..Y.
        draws: D; "dbs" and "exact" are not random and give one.
        generator: source of all randomness; the three kinds of mc draw the same sets from the same generator.
        meaning: which meaning a draft has; default one each.

    >>> p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    >>> weights("dbs", p, 2, 1, torch.Generator())[0].tolist()
    [[1.0, 1.0, 0.0]]
    >>> weights("dbs", p, 2, 1, torch.Generator(), torch.tensor([0, 0, 1]))[0].tolist()
    [[1.0, 0.0, 1.0]]
    """
    errors.check_option("estimator", estimator, ESTIMATORS)
    whole(1, k=k, draws=draws)
    if k > p_y.shape[1]:
        raise errors.UnknownOptionError(f"k={k}: there are only {p_y.shape[1]} drafts")
    p_y = p_y.detach()
    if estimator == "exact":
        return torch.ones_like(p_y)[None]
    if estimator == "dbs":
        return _most_likely(p_y, k, meaning)[None]
    if estimator.startswith("gumbel"):
        return _without_replacement(p_y, k, draws, generator, inverse=estimator == "gumbel-ht")
    times = _times_drawn(p_y, k, draws, generator)
    if estimator == "mc":
        return (times > 0).double()
    return times if estimator == "mc-count" else times / (k * p_y)


def _most_likely(p_y: Float[Tensor, "S Y"], k: int, meaning: Int[Tensor, " Y"] | None) -> Float[Tensor, "S Y"]:
    """1 for the first k drafts: all best ones of a meaning before any second one, the more likely first."""
    better = p_y[:, None, :] > p_y[:, :, None]
    same = torch.eye(p_y.shape[1]).bool() if meaning is None else meaning[:, None] == meaning[None, :]
    score = p_y - (better & same).sum(-1)  # a probability is at most 1: a place within its meaning weighs more
    return torch.zeros_like(p_y).scatter_(1, score.topk(k, dim=1).indices, 1.0)


def _times_drawn(p_y: Float[Tensor, "S Y"], k: int, draws: int, generator: torch.Generator) -> Float[Tensor, "D S Y"]:
    drawn = torch.multinomial(p_y, draws * k, replacement=True, generator=generator).reshape(len(p_y), draws, k)
    times = torch.zeros(len(p_y), draws, p_y.shape[1], dtype=torch.float64)
    return times.scatter_add_(2, drawn, torch.ones_like(drawn, dtype=torch.float64)).transpose(0, 1)


def _without_replacement(
    p_y: Float[Tensor, "S Y"], k: int, draws: int, generator: torch.Generator, inverse: bool
) -> Float[Tensor, "D S Y"]:
    """Gumbel top-k; with `inverse` 1 / probability that a draft beats the (k+1)-th perturbed one (Kool et al. 2019)."""
    log_p = p_y.log()
    noise = torch.empty(draws, *p_y.shape, dtype=torch.float64).exponential_(generator=generator).log()
    perturbed = log_p - noise
    top = perturbed.topk(min(k + 1, p_y.shape[1]), dim=2)
    inside = torch.zeros_like(perturbed).scatter_(2, top.indices[..., :k], 1.0)
    if not inverse or k == p_y.shape[1]:  # with every draft inside each is included for certain
        return inside
    threshold = top.values[..., k].reshape(-1)
    included = log_inclusion(log_p.expand_as(perturbed).reshape(len(threshold), -1), threshold)
    return inside * (-included).exp().reshape(perturbed.shape)


# --- loss and gradient --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shift:
    """What training adds to the reference's logits, nats; a refiner that shares its shift over drafts has Y' = 1.

    Attributes:
        y: added to the logits of p(y).
        z: added to the logits of p(z | y).
    """

    y: Float[Tensor, "S Y"]
    z: Float[Tensor, "S Y2 Z"]

    @staticmethod
    def none(systems: Systems, shared: bool = False) -> "Shift":
        """No shift: the policy is the reference."""
        z = systems.log_z[:, :1] if shared else systems.log_z
        return Shift(torch.zeros_like(systems.log_y), torch.zeros_like(z))

    @staticmethod
    def random(systems: Systems, scale: float, generator: torch.Generator) -> "Shift":
        """N(0, scale^2) on every logit."""
        y, z = (
            scale * torch.randn(table.shape, generator=generator, dtype=torch.float64)
            for table in (systems.log_y, systems.log_z)
        )
        return Shift(y, z)

    def policy(self, systems: Systems) -> tuple[Float[Tensor, "S Y"], Float[Tensor, "S Y Z"]]:
        """p(y) and p(z | y) of the shifted systems."""
        return torch.softmax(systems.log_y + self.y, -1), torch.softmax(systems.log_z + self.z, -1)

    def marginal(self, systems: Systems) -> Float[Tensor, "S Z"]:
        """p(z) of the shifted systems."""
        p_y, p_z = self.policy(systems)
        return torch.einsum("sy,syz->sz", p_y, p_z)


def pair_law(systems: Systems) -> PairLaw:
    """Every comparison of two answers equally often, for each system; the judge's preferences as probabilities."""
    return final_pairs(systems.preference_logits, input_law=torch.ones(len(systems), dtype=torch.float64))


@dataclass(frozen=True)
class Gradients:
    """Losses and their gradients in the logits, for D sets of each of S systems.

    Attributes:
        loss: (D, S) the Sampling loss, nats, mean over comparisons.
        y, z: its gradient in the logits of p(y) and of p(z | y).
    """

    loss: Float[Tensor, "D S"]
    y: Float[Tensor, "D S Y"]
    z: Float[Tensor, "D S Y Z"]

    def flat(self) -> Float[Tensor, "D S P"]:
        """The gradient as one vector a set."""
        return torch.cat([self.y, self.z.flatten(2)], -1)


def gradients(
    systems: Systems,
    policy: tuple[Float[Tensor, "S Y"], Float[Tensor, "S Y Z"]],
    weight: Float[Tensor, "D S Y"],
    law: PairLaw,
    beta: float = BETA,
) -> Gradients:
    """Sampling loss and gradient for sets given by their weights (E7; theory S3.1).

    grad log P_A(z) = sum_y w_y(z) [grad log p(y) + grad log p(z|y)], w_y(z) the posterior within A. With c_z = d loss / d
    log P_A(z), which sums to 0 over z, the gradient is sum_z c_z w_y(z) in the logit of y, and c_z w_y(z) - p(z|y) sum_z'
    c_z' w_y(z') in the logit of z given y.

    Args:
        systems: the references and the judge.
        policy: p(y) and p(z | y), see `Shift.policy`.
        weight: see `weights`.
        law: see `pair_law`; repeated D times here.
        beta: > 0.

    >>> from sysdpo_lab.worlds import draft_laws
    >>> systems = draft_laws.draw("zipf", 2, torch.Generator().manual_seed(0))
    >>> start = Shift.none(systems)
    >>> found = gradients(systems, start.policy(systems), torch.ones(1, 2, 16), pair_law(systems))
    >>> [round(loss, 4) for loss in found.loss[0].tolist()]  # log 2 at the reference, whatever the set
    [0.6931, 0.6931]
    """
    p_y, p_z = policy
    joint = (weight * p_y)[..., None] * p_z
    total = joint.sum(2)
    reference = torch.einsum("dsy,syz->dsz", weight.double() * systems.log_y.exp(), systems.log_z.exp())
    ratio = (total.log() - reference.log()).flatten(0, 1).requires_grad_(True)
    with torch.enable_grad():
        losses = law.repeated(len(weight)).losses(ratio, beta)
        (slope,) = torch.autograd.grad(losses.sum(), ratio)
    pull = joint * (slope.reshape(total.shape) / total)[:, :, None]
    along = pull.sum(-1)
    return Gradients(losses.detach().reshape(weight.shape[:2]), along, pull - p_z * along[..., None])


# --- training -----------------------------------------------------------------------------------------------------------


def train(
    systems: Systems,
    estimator: str,
    k: int,
    steps: int,
    sets: int,
    generator: torch.Generator,
    *,
    lr: float = 0.05,
    beta: float = BETA,
    shared: bool = False,
    only_y: bool = False,
) -> Shift:
    """Adam from the reference on the Sampling loss; A is drawn anew from the current policy at each step.

    Args:
        systems: trained side by side: no two share a number, so that each trains as if alone.
        estimator, k: see `weights`.
        steps, sets: number of steps, and of sets that each step averages over.
        lr: Adam's step size, nats of a logit; larger moves faster.
        beta: > 0; larger stays closer to the reference.
        shared: the refiner learns one shift u(z) for all drafts instead of one a draft.
        only_y: train psi1 alone.

    Returns:
        what was learned.

    >>> from sysdpo_lab.worlds import draft_laws
    >>> systems = draft_laws.draw("zipf", 2, torch.Generator().manual_seed(0))
    >>> train(systems, "mc", 1, 5, 1, torch.Generator().manual_seed(0)).y.abs().max().item()  # one draft teaches psi1 nothing
    0.0
    """
    whole(0, steps=steps)
    shift, law = Shift.none(systems, shared), pair_law(systems)
    optimizer = torch.optim.Adam([shift.y] if only_y else [shift.y, shift.z], lr=lr)
    for _ in range(steps):
        policy = shift.policy(systems)
        weight = weights(estimator, policy[0], k, sets, generator, systems.meaning)
        found = gradients(systems, policy, weight, law, beta)
        # what cancels in exact arithmetic must not reach Adam, which blows any 1e-18 up to a full step
        alone = ((weight > 0).sum(-1, keepdim=True) == 1).expand_as(found.y)
        shift.y.grad = found.y.masked_fill(alone, 0.0).mean(0)
        shift.z.grad = found.z.mean(0).sum(1, keepdim=True) if shared else found.z.mean(0)
        optimizer.step()
    return shift
