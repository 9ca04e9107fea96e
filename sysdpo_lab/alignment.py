"""How far a system is from beta-perfect alignment (the paper's Definition 1, E3)."""

import torch
from jaxtyping import Float
from torch import Tensor

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
    p = _check_probabilities(p_z, "p_z")
    logits = check_preference(preference_logits, p.shape[1])
    _check_inputs(p, logits)
    log_p = p.log()
    skip = torch.zeros_like(p, dtype=torch.bool)
    bad = p == 0
    if p_reference is not None:
        reference = _check_probabilities(p_reference, "p_reference")
        if reference.shape != p.shape:
            raise errors.CardinalityError(f"p_reference has shape {tuple(reference.shape)}, p_z {tuple(p.shape)}")
        skip = (p == 0) & (reference == 0)
        bad = (p == 0) ^ (reference == 0)
        log_p = log_p - reference.log()
    if p.shape[1] > 1 and bool(bad.any()):
        compared = (~skip).sum(1, keepdim=True) > 1
        if bool((bad & compared).any()):
            return float("inf")
    log_p = torch.where(skip | bad, 0.0, log_p)
    difference = (logits - beta * (log_p[:, :, None] - log_p[:, None, :])).abs()
    usable = ~(skip | bad)
    pairs = usable[:, :, None] & usable[:, None, :] & ~torch.eye(p.shape[1], dtype=torch.bool)
    return difference[pairs].max().item() if bool(pairs.any()) else 0.0


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


def fit_beta(p_z: Float[Tensor, "X Z"], preference_logits: Float[Tensor, "X Z Z"]) -> tuple[float, float]:
    """Least-squares beta of L_ij = beta * log p_i/p_j, pooled over x and i < j, without intercept (theory S6.1).

    Returns:
        (beta_hat, rms residual): the residual is the alignment gap in mean-square form. A negative beta_hat means
        anti-aligned. Where p is uniform every beta fits equally well and the smallest, 0, is returned (S6.4). Pairs with
        an impossible output are left out; both numbers are NaN when nothing is left.

    >>> p = torch.softmax(torch.tensor([[0.0, 1.0, 2.0]]).double() / 0.5, -1)
    >>> r = torch.tensor([[0.0, 1.0, 2.0]]).double()
    >>> [round(v, 6) for v in fit_beta(p, r[:, :, None] - r[:, None, :])]
    [0.5, 0.0]
    """
    p = _check_probabilities(p_z, "p_z")
    logits = check_preference(preference_logits, p.shape[1])
    _check_inputs(p, logits)
    i, j = _pairs(p.shape[1])
    odds, wanted = _log_odds(p)[:, i, j].reshape(-1), logits[:, i, j].reshape(-1)
    usable = torch.isfinite(odds) & torch.isfinite(wanted)
    odds, wanted = odds[usable], wanted[usable]
    if not len(odds):
        return float("nan"), float("nan")
    square = (odds * odds).sum()
    beta = (wanted * odds).sum() / square if bool(square > 0) else torch.zeros_like(square)
    return beta.item(), (wanted - beta * odds).pow(2).mean().sqrt().item()


def cycle_residual(preference_logits: Float[Tensor, "X Z Z"]) -> float:
    """rms over x, i < j of the cyclic part of a preference: > 0 means that no system can be beta-perfect (theory S6.3).

    L = grad phi + C with phi_i = mean_j L_ij (Hodge decomposition on the complete graph); the rms gap of every system
    at every beta is at least rms(C).

    >>> rock = torch.log(torch.tensor(4.0)) * torch.tensor([[[0.0, 1, -1], [-1, 0, 1], [1, -1, 0]]])
    >>> round(cycle_residual(rock), 4)  # rock-paper-scissors at 0.8: log 4
    1.3863
    """
    logits = check_preference(preference_logits)
    if not bool(torch.isfinite(logits).all()):
        raise errors.NonFiniteError("preference_logits holds an infinity; a certain judge has no finite decomposition")
    phi = logits.mean(2)
    cyclic = logits - (phi[:, :, None] - phi[:, None, :])
    i, j = _pairs(logits.shape[1])
    return cyclic[:, i, j].pow(2).mean().sqrt().item() if logits.shape[1] > 1 else 0.0
