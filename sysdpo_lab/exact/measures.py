"""What can be read off a discrete system exactly: posteriors, divergences, rewards and win rates (E10 without sampling)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.alignment import check_preference
from sysdpo_lab.exact.tables import cardinality, input_sizes, joint_marginal, known_sizes, log_table, marginal
from sysdpo_lab.exact.tilting import check_reward
from sysdpo_lab.system import CompoundSystem


def posterior(
    system: CompoundSystem, names: Sequence[str] | None = None, reference: bool = False
) -> Float[Tensor, "X ..."]:
    """p(names | x, z): which intermediates explain an output (the weights w_a(z) of theory S3.1, with every a in A).

    Args:
        names: hidden components, default all.
        reference: the frozen start instead of the policy.

    Returns:
        (X, one axis a name, Z); sums to 1 over the names' axes, 0 where z is impossible.

    >>> from sysdpo_lab.components import Categorical
    >>> y, z = Categorical("y", {"x": 1}, 2), Categorical("z", {"y": 2}, 2, [[0.9, 0.1], [0.3, 0.7]])
    >>> [[round(p, 4) for p in row] for row in posterior(CompoundSystem([y, z]))[0].tolist()]
    [[0.75, 0.125], [0.25, 0.875]]
    """
    names = list(system.hidden if names is None else names)
    joint = joint_marginal(system, [*names, system.output], reference)
    total = joint.sum(tuple(range(1, joint.dim() - 1)), keepdim=True) if names else joint
    return joint / torch.where(total > 0, total, 1.0)


def kl(p: Float[Tensor, "X N"], q: Float[Tensor, "X N"]) -> Float[Tensor, " X"]:
    """KL(p || q) of each row, nats; 0 log 0 = 0; inf where q is 0 and p is not.

    >>> kl(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))
    tensor([0.6931])
    """
    used = p > 0
    return torch.where(used, p * (torch.where(used, p, 1.0).log() - q.log()), 0.0).sum(-1)


def kl_marginal(system: CompoundSystem) -> Float[Tensor, " X"]:
    """KL(p(z|x) || p_ref(z|x)), nats: how far the output has moved."""
    with torch.no_grad():
        return kl(marginal(system), marginal(system, reference=True))


def kl_joint(system: CompoundSystem) -> Float[Tensor, " X"]:
    """KL(p(s|x) || p_ref(s|x)), nats: how far the whole system has moved; at least `kl_marginal` (theory S2.5).

    By the chain rule a sum over components of their KL given their parents, so that nothing is enumerated.

    >>> from sysdpo_lab.components import Categorical
    >>> y = Categorical("y", {"x": 1}, 2, [[1.0, 0.0]], reference=[[0.5, 0.5]])
    >>> z = Categorical("z", {"y": 2}, 2)
    >>> round(kl_joint(CompoundSystem([y, z])).item(), 4), round(kl_marginal(CompoundSystem([y, z])).item(), 4)
    (0.6931, 0.0)
    """
    sizes = known_sizes(system, system.order)
    inputs = input_sizes(system)
    with torch.no_grad():
        total = torch.zeros(inputs, dtype=torch.float64).flatten()
        for name in system.order:
            log_p, log_q = (log_table(system, name, flag, sizes) for flag in (False, True))
            used = torch.isfinite(log_p)
            own = torch.where(used, log_p.exp() * (torch.where(used, log_p, 0.0) - torch.where(used, log_q, 0.0)), 0.0).sum(-1)
            total = total + _mean_over_parents(system, name, own, inputs)
    return total


def _mean_over_parents(system: CompoundSystem, name: str, values: Tensor, inputs: tuple[int, ...]) -> Float[Tensor, " X"]:
    """E[values(parents) | x] under the policy: (X,)."""
    hidden = [parent for parent in system.parents(name) if parent not in system.inputs]
    given = [parent for parent in system.inputs if parent in system.parents(name)]
    order = [system.parents(name).index(parent) for parent in (*given, *hidden)]
    values = values.permute(order)
    shape = [values.shape[given.index(parent)] if parent in given else 1 for parent in system.inputs]
    values = values.reshape(*shape, -1).expand(*inputs, -1)
    weights = joint_marginal(system, hidden).reshape(*inputs, -1)
    mass = torch.where(weights > 0, weights * values, 0.0)  # an infinite KL that is never met counts nothing
    return mass.sum(-1).flatten()


def expected_reward(p_z: Float[Tensor, "X Z"], reward: Float[Tensor, "X Z"]) -> Float[Tensor, " X"]:
    """E_p r(x, z) of each input, in the reward's unit.

    >>> expected_reward(torch.tensor([[0.25, 0.75]]).double(), torch.tensor([[0.0, 2.0]])).tolist()
    [1.5]
    """
    return (p_z * check_reward(reward, *p_z.shape)).sum(-1)


def decoded(system: CompoundSystem, decoding: str = "sampled", reference: bool = False) -> Float[Tensor, "X Z"]:
    """p(z | x) of the answers a user gets.

    Args:
        decoding: "sampled" = `marginal`; "greedy" = every component decodes its most likely value given its parents, so
            each row holds a single 1 (ties: the smaller value).
        reference: the frozen start instead of the policy.
    """
    errors.check_option("decoding", decoding, ("sampled", "greedy"))
    with torch.no_grad():
        if decoding == "sampled":
            return marginal(system, reference)
        inputs = input_sizes(system)
        grid = torch.cartesian_prod(*(torch.arange(size) for size in inputs)).reshape(-1, len(inputs))
        columns = {name: grid[:, i] for i, name in enumerate(system.inputs)}
        if reference:
            with system.reference():
                answers = system.generate(columns)[system.output]
        else:
            answers = system.generate(columns)[system.output]
    return torch.nn.functional.one_hot(torch.as_tensor(answers), cardinality(system, system.output)).double()


def win_rate(
    p_z: Float[Tensor, "X Z"], opponent: Float[Tensor, "X Z"], preference_logits: Float[Tensor, "X Z Z"]
) -> Float[Tensor, " X"]:
    """Probability that the judge prefers the system's answer to the opponent's, of each input; equal answers count 1/2.

    Args:
        p_z, opponent: p(z|x) of the two, see `decoded`; the opponent may be a law of chosen answers.
        preference_logits: [x, i, j] = logit pref(i > j | x).

    >>> logits = torch.tensor([[[0.0, -100.0], [100.0, 0.0]]]).double()  # the second answer always wins
    >>> win_rate(torch.tensor([[0.0, 1.0]]).double(), torch.tensor([[0.5, 0.5]]).double(), logits).tolist()
    [0.75]
    """
    judge = torch.sigmoid(check_preference(preference_logits, p_z.shape[1]))
    return torch.einsum("xi,xj,xij->x", p_z.double(), opponent.double(), judge)
