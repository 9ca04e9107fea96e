"""How far a system is from beta-perfect alignment (the paper's Definition 1, E3)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from sysdpo_lab import errors


def check_preference(preference_logits: Float[Tensor, "X Z Z"], outputs: int | None = None) -> Float[Tensor, "X Z Z"]:
    """float64 logits [x, i, j] = logit pref(i > j | x), antisymmetric, or a named error.

    >>> check_preference(torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]])).shape
    torch.Size([1, 2, 2])
    """
    logits = torch.as_tensor(preference_logits, dtype=torch.float64)
    if logits.dim() != 3 or logits.shape[1] != logits.shape[2] or (outputs is not None and logits.shape[1] != outputs):
        raise errors.CardinalityError(
            f"preference_logits has shape {tuple(logits.shape)}, expected (X, {outputs or 'Z'}, {outputs or 'Z'})"
        )
    if bool(torch.isnan(logits).any()):
        raise errors.NonFiniteError(f"preference_logits holds NaN at {tuple(torch.isnan(logits).nonzero()[0].tolist())}")
    mirrored = -logits.transpose(1, 2)
    # the tolerance lets logits through that were computed in float32 from probabilities near 0 and 1
    right = (logits == mirrored) | ((logits - mirrored).abs() <= 1e-3 * (1 + mirrored.abs()))
    infinite = torch.isinf(logits) | torch.isinf(mirrored)
    wrong = ~torch.where(infinite, logits == mirrored, right)
    if bool(wrong.any()):
        x, i, j = wrong.nonzero()[0].tolist()
        raise errors.ValueRangeError(
            f"preference_logits[{x}, {i}, {j}] = {logits[x, i, j]:.6g} and [{x}, {j}, {i}] = {logits[x, j, i]:.6g} "
            "must be each other's negative: pref(i > j) = 1 - pref(j > i)"
        )
    return logits


def _log_odds(p: Float[Tensor, "X Z"]) -> Float[Tensor, "X Z Z"]:
    """log p_i - log p_j with 0 - 0 read as NaN (impossible under p)."""
    log_p = torch.as_tensor(p, dtype=torch.float64).log()
    return log_p[:, :, None] - log_p[:, None, :]


def gap(
    p_z: Float[Tensor, "X Z"],
    preference_logits: Float[Tensor, "X Z Z"],
    beta: float,
    p_reference: Float[Tensor, "X Z"] | None = None,
) -> float:
    """max over x, i, j of |L - beta * log p(i|x)/p(j|x)|: 0 iff beta-perfect (E3).

    With `p_reference` the log-ratio log p/p_ref takes the place of log p: 0 iff p is the optimum of DPO (E4).

    Args:
        p_z: p(z|x), rows sum to 1.
        preference_logits: [x, i, j] = logit pref(i > j | x).
        beta: > 0, rationality of the judge; a larger beta makes the same odds count more.
        p_reference: the reference's p(z|x).

    Returns:
        a float, never NaN; inf where exactly one of p, p_ref is 0 (without p_reference: where p is 0). Outputs that are
        impossible under both are skipped.

    >>> p = torch.tensor([[0.8, 0.2]])
    >>> logits = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]]) * torch.log(torch.tensor(4.0))
    >>> gap(p, logits, beta=1.0) < 1e-6
    True
    """
    beta = errors.check_beta(beta)
    p, logits, log_ratio, skip, bad = _log_ratios(p_z, preference_logits, p_reference)
    if p.shape[1] > 1 and bool((bad & ((~skip).sum(1, keepdim=True) > 1)).any()):
        return float("inf")
    difference = (logits - beta * (log_ratio[:, :, None] - log_ratio[:, None, :])).abs()
    return _largest(difference, ~(skip | bad))


def probability_gap(
    p_z: Float[Tensor, "X Z"],
    preference_logits: Float[Tensor, "X Z Z"],
    beta: float,
    p_reference: Float[Tensor, "X Z"] | None = None,
) -> float:
    """max over x, i, j of |pref(i > j) - p(i|x)^beta / (p(i|x)^beta + p(j|x)^beta)|: E3 in probabilities, 0 to 1.

    A logit gap far out, between preferences that are both almost certain, counts little here. With `p_reference` p/p_ref
    takes the place of p.

    Args:
        p_z, preference_logits, beta, p_reference: as in `gap`.

    Returns:
        a float, never NaN. Outputs that are impossible under both p and p_ref are skipped; two that only p makes
        impossible count as even odds.

    >>> p = torch.tensor([[0.5, 0.5]])
    >>> logits = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]]) * torch.log(torch.tensor(4.0))  # the judge says 0.8
    >>> round(probability_gap(p, logits, beta=1.0), 4)
    0.3
    """
    beta = errors.check_beta(beta)
    _, logits, log_ratio, skip, _ = _log_ratios(p_z, preference_logits, p_reference, finite=False)
    odds = torch.where(skip, 0.0, log_ratio)
    odds = odds[:, :, None] - odds[:, None, :]
    difference = (torch.sigmoid(logits) - torch.sigmoid(beta * torch.nan_to_num(odds, nan=0.0))).abs()
    return _largest(difference, ~skip)


def _largest(difference: Float[Tensor, "X Z Z"], usable: Bool[Tensor, "X Z"]) -> float:
    pairs = usable[:, :, None] & usable[:, None, :] & ~torch.eye(usable.shape[1], dtype=torch.bool)
    return difference[pairs].max().item() if bool(pairs.any()) else 0.0


def _log_ratios(p_z: Tensor, preference_logits: Tensor, p_reference: Tensor | None, finite: bool = True):
    """Checked p and logits, log p or log p/p_ref, which outputs to skip, and where exactly one of p, p_ref is 0.

    With `finite` the log-ratios at skipped and one-sided outputs are replaced by 0.
    """
    p = _check_probabilities(p_z, "p_z")
    logits = check_preference(preference_logits, p.shape[1])
    _check_inputs(p, logits)
    log_ratio, skip, bad = p.log(), torch.zeros_like(p, dtype=torch.bool), p == 0
    if p_reference is not None:
        reference = _check_reference(p_reference, p)
        skip, bad = (p == 0) & (reference == 0), (p == 0) ^ (reference == 0)
        log_ratio = log_ratio - reference.log()
    if finite:
        log_ratio = torch.where(skip | bad, 0.0, log_ratio)
    return p, logits, log_ratio, skip, bad


def _check_reference(p_reference: Tensor, p: Tensor) -> Float[Tensor, "X Z"]:
    reference = _check_probabilities(p_reference, "p_reference")
    if reference.shape != p.shape:
        raise errors.CardinalityError(f"p_reference has shape {tuple(reference.shape)}, p_z {tuple(p.shape)}")
    return reference


def _check_probabilities(p: Tensor, name: str) -> Float[Tensor, "X Z"]:
    p = torch.as_tensor(p, dtype=torch.float64).detach()
    if p.dim() != 2:
        raise errors.CardinalityError(f"{name} has shape {tuple(p.shape)}, expected (X, Z)")
    if bool(torch.isnan(p).any()):
        raise errors.NonFiniteError(f"{name} holds NaN at {tuple(torch.isnan(p).nonzero()[0].tolist())}")
    if bool((p < 0).any()) or bool(((p.sum(1) - 1).abs() > 1e-6).any()):
        row = int(((p < 0).any(1) | ((p.sum(1) - 1).abs() > 1e-6)).nonzero()[0])
        total, smallest = p[row].sum().item(), p[row].min().item()
        raise errors.TableError(f"{name}: row {row} is no distribution (sum {total:.6g}, smallest {smallest:.6g})")
    return p


def _check_inputs(p: Tensor, logits: Tensor) -> None:
    if logits.shape[0] != p.shape[0]:
        raise errors.CardinalityError(f"preference_logits has {logits.shape[0]} inputs, p_z has {p.shape[0]}")


def _pairs(size: int) -> tuple[Tensor, Tensor]:
    first, second = torch.triu_indices(size, size, offset=1)
    return first, second


def fit_beta(
    p_z: Float[Tensor, "X Z"],
    preference_logits: Float[Tensor, "X Z Z"],
    p_reference: Float[Tensor, "X Z"] | None = None,
) -> tuple[float, ...]:
    """Least-squares beta of L_ij = beta * log p_i/p_j, pooled over x and i < j, without intercept (theory S6.1).

    With `p_reference` log p_ref,i/p_ref,j is a second regressor (S6.2): a system that DPO has aligned perfectly has the
    coefficients (beta, -beta), whatever its reference; without it such a system can look badly aligned.

    Returns:
        (beta_hat, rms residual), or with `p_reference` (beta_hat, coefficient of log p_ref, rms residual). The residual is
        the alignment gap in mean-square form. A negative beta_hat means anti-aligned. Where the regressors leave a choice
        (p uniform, p = p_ref) the smallest coefficients are returned (S6.4: 0). Pairs with an impossible output are left
        out; all numbers are NaN when nothing is left.

    >>> r, p_ref = torch.tensor([[0.0, 1.0, 2.0]]).double(), torch.tensor([[0.6, 0.3, 0.1]]).double()
    >>> logits = r[:, :, None] - r[:, None, :]
    >>> [round(abs(v), 6) for v in fit_beta(torch.softmax(r / 0.5, -1), logits)]
    [0.5, 0.0]
    >>> aligned = torch.softmax(p_ref.log() + r / 0.5, -1)
    >>> [round(v, 3) for v in fit_beta(aligned, logits)], [round(v, 3) for v in fit_beta(aligned, logits, p_ref)[:2]]
    ([0.896, 0.149], [0.5, -0.5])
    """
    p = _check_probabilities(p_z, "p_z")
    logits = check_preference(preference_logits, p.shape[1])
    _check_inputs(p, logits)
    laws = [p] if p_reference is None else [p, _check_reference(p_reference, p)]
    i, j = _pairs(p.shape[1])
    odds = torch.stack([_log_odds(law)[:, i, j].reshape(-1) for law in laws], 1)
    wanted = logits[:, i, j].reshape(-1)
    usable = torch.isfinite(odds).all(1) & torch.isfinite(wanted)
    if not bool(usable.any()):
        return (float("nan"),) * (len(laws) + 1)
    odds, wanted = odds[usable], wanted[usable]
    found = torch.linalg.lstsq(odds, wanted[:, None], driver="gelsd").solution[:, 0]
    return (*found.tolist(), (wanted - odds @ found).pow(2).mean().sqrt().item())


def hodge_split(preference_logits: Float[Tensor, "X Z Z"]) -> tuple[Float[Tensor, "X Z"], Float[Tensor, "X Z Z"]]:
    """L = grad phi + C: the part of a preference that a reward explains, and the cyclic rest (theory S6.3).

    Hodge decomposition on the complete graph with equal weights: phi_i = mean_j L_ij, and C is orthogonal to every
    gradient. C = 0 iff L_ij + L_jk = L_ik for all triples; then p = softmax(phi / beta) is beta-perfect for each beta.

    Returns:
        phi (X, Z), mean 0, in nats; C (X, Z, Z), antisymmetric.

    >>> phi, cycle = hodge_split(torch.tensor([[[0.0, 2.0], [-2.0, 0.0]]]))
    >>> phi.tolist(), cycle.abs().max().item()  # two outputs have no cycle
    ([[1.0, -1.0]], 0.0)
    """
    logits = _check_finite(preference_logits)
    phi = logits.mean(2)
    return phi, logits - (phi[:, :, None] - phi[:, None, :])


def _check_finite(preference_logits: Tensor) -> Float[Tensor, "X Z Z"]:
    logits = check_preference(preference_logits)
    if not bool(torch.isfinite(logits).all()):
        raise errors.NonFiniteError("preference_logits holds an infinity; a certain judge has no finite decomposition")
    return logits


def cycle_residual(preference_logits: Float[Tensor, "X Z Z"]) -> float:
    """rms over x, i < j of the cyclic part of a preference: > 0 means that no system can be beta-perfect (theory S6.3).

    L = grad phi + C with phi_i = mean_j L_ij (Hodge decomposition on the complete graph); the rms gap of every system
    at every beta is at least rms(C).

    >>> rock = torch.log(torch.tensor(4.0)) * torch.tensor([[[0.0, 1, -1], [-1, 0, 1], [1, -1, 0]]])
    >>> round(cycle_residual(rock), 4)  # rock-paper-scissors at 0.8: log 4
    1.3863
    """
    cyclic = hodge_split(preference_logits)[1]
    i, j = _pairs(cyclic.shape[1])
    return cyclic[:, i, j].pow(2).mean().sqrt().item() if cyclic.shape[1] > 1 else 0.0


def best_gap(preference_logits: Float[Tensor, "X Z Z"]) -> tuple[float, Float[Tensor, "X Z"]]:
    """The smallest `gap` that any system can have with a judge, and a potential that reaches it; the same for every beta.

    min over phi of max_ij |L_ij - (phi_i - phi_j)| = the largest mean of L along a cycle, since potentials cancel on cycles
    (the dual of the linear programme; computed by Karp 1978, "A characterization of the minimum cycle mean in a digraph").

    Returns:
        (gap, phi (X, Z)) in nats; p = softmax(phi / beta), or p_ref times it for the reference-adjusted gap, reaches it.

    >>> rock = torch.log(torch.tensor(4.0)) * torch.tensor([[[0.0, 1, -1], [-1, 0, 1], [1, -1, 0]]])
    >>> round(best_gap(rock)[0], 4)
    1.3863
    """
    logits = _check_finite(preference_logits)
    mean = _largest_cycle_mean(logits)
    slack = logits - mean[:, None, None]  # phi_i - phi_j >= slack_ij: no cycle of it is positive, so longest walks exist
    phi = torch.zeros(logits.shape[:2], dtype=torch.float64)
    for _ in range(logits.shape[1]):
        phi = torch.maximum(phi, (slack + phi[:, None, :]).amax(2))
    return mean.max().item(), phi - phi.mean(1, keepdim=True)


def _largest_cycle_mean(weights: Float[Tensor, "X Z Z"]) -> Float[Tensor, " X"]:
    """max over v of min over k of (d_n(v) - d_k(v)) / (n - k), d_k the heaviest walk of k edges from node 0."""
    inputs, size = weights.shape[:2]
    walks = [torch.full((inputs, size), -torch.inf, dtype=torch.float64)]
    walks[0][:, 0] = 0.0
    for _ in range(size):
        walks.append((walks[-1][:, :, None] + weights).amax(1))
    rises = torch.stack([(walks[size] - walks[k]) / (size - k) for k in range(size)])
    return rises.amin(0).amax(1).clamp(min=0.0)  # the loops i -> i have mean 0


def logistic_potential(
    preference_logits: Float[Tensor, "X Z Z"], weights: Float[Tensor, "X Z Z"] | None = None, steps: int = 100
) -> Float[Tensor, "X Z"]:
    """The potential that DPO's population loss finds: Bradley-Terry fitted to the preference by Newton's method.

    Where the preference has cycles it differs from the least-squares phi of `hodge_split` (theory S6.4).

    Args:
        weights: how often each pair is compared (its two orders are added), default equally often. Parts of the comparison
            graph that no pair connects are each centred on 0.
        steps: largest number of Newton steps.

    Returns:
        phi (X, Z), nats: p = p_ref softmax(phi / beta) minimises DPO's loss.

    >>> judge = torch.tensor([[[0.0, 2.0], [-2.0, 0.0]]])
    >>> logistic_potential(judge).round(decimals=6).tolist()
    [[1.0, -1.0]]
    """
    logits = _check_finite(preference_logits)
    counts = torch.ones_like(logits) if weights is None else torch.as_tensor(weights, dtype=torch.float64)
    counts = counts + counts.transpose(1, 2)
    wanted = torch.sigmoid(logits)
    phi = torch.zeros(logits.shape[:2], dtype=torch.float64)
    for _ in range(steps):
        got = torch.sigmoid(phi[:, :, None] - phi[:, None, :])
        slope = (counts * (wanted - got)).sum(2)
        curvature = counts * got * (1 - got)
        hessian = torch.diag_embed(curvature.sum(2)) - curvature
        step = (torch.linalg.pinv(hessian, hermitian=True) @ slope[:, :, None])[..., 0]
        phi = phi + step / max(1.0, step.abs().max().item())  # at most 1 nat: far out the curvature vanishes
        if step.abs().max() < 1e-14:
            break
    return phi


def excess_loss(
    p_z: Float[Tensor, "X Z"],
    preference_logits: Float[Tensor, "X Z Z"],
    beta: float,
    p_reference: Float[Tensor, "X Z"] | None = None,
    weights: Float[Tensor, "X Z Z"] | None = None,
) -> float:
    """DPO's population loss minus its smallest conceivable value, nats: mean over pairs of KL(judge || system's odds).

    0 iff every compared pair has the judge's odds; the excess of the best system is what a cyclic judge costs (S6.4).

    Args:
        p_z, preference_logits, beta, p_reference: as in `gap`; inf where an output that is compared is impossible.
        weights: how often each pair is compared (its two orders are added), default equally often.

    >>> rock = torch.log(torch.tensor(4.0)) * torch.tensor([[[0.0, 1, -1], [-1, 0, 1], [1, -1, 0]]])
    >>> round(excess_loss(torch.ones(1, 3) / 3, rock, beta=0.5), 4)
    0.1927
    """
    beta = errors.check_beta(beta)
    p, logits, log_ratio, skip, bad = _log_ratios(p_z, preference_logits, p_reference)
    counts = torch.ones_like(logits) if weights is None else torch.as_tensor(weights, dtype=torch.float64)
    i, j = _pairs(p.shape[1])
    counts = (counts + counts.transpose(1, 2))[:, i, j] * ~(skip[:, i] | skip[:, j])
    if bool(((bad[:, i] | bad[:, j]) & (counts > 0)).any()):
        return float("inf")
    if not bool(counts.sum() > 0):
        return 0.0
    judge, margin = logits[:, i, j], beta * (log_ratio[:, i] - log_ratio[:, j])
    pref = torch.sigmoid(judge)
    own = torch.where(torch.isfinite(judge), judge, 0.0)
    entropy = torch.where(torch.isfinite(judge), -logsigmoid(-own) - pref * own, 0.0)
    excess = -logsigmoid(-margin) - pref * margin - entropy
    return ((counts * excess).sum() / counts.sum()).clamp(min=0.0).item()
