"""What a policy's parts must compute, written once more from the formulas: for one sequence, with the draws given."""

from __future__ import annotations

import math

import torch


def exponential_keys(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Weighted reservoir sampling: log of mean_i u_i**(1/w) (arXiv 2606.23961; n = 1 is Efraimidis-Spirakis 2006).

    Args:
        weights: float ``[N]``, non-negative.
        u: float64 ``[n, N]`` in (0, 1).

    Returns:
        float64 ``[N]``, -inf for a zero weight.
    """
    w = weights.double()
    log_keys = torch.logsumexp(u.log() / w.clamp_min(1e-300), dim=0) - math.log(u.shape[0])
    return torch.where(w > 0, log_keys, torch.full_like(log_keys, -math.inf))


def sequential_poisson(weights: torch.Tensor, u: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    """Sequential Poisson (priority) sampling: log of w**beta / u (Ohlsson 1998; Duffield, Lund, Thorup 2007).

    Args:
        weights: float ``[N]``, non-negative.
        u: float64 ``[n, N]`` in (0, 1); only the first draw is used.
        beta: sharpness.

    Returns:
        float64 ``[N]``, -inf for a zero weight unless beta is 0.
    """
    log_weights = weights.double().log()
    # 0 * -inf would be NaN
    return (beta * log_weights if beta else torch.zeros_like(log_weights)) - u[0].log()


def walk(rows: torch.Tensor, steps: int) -> torch.Tensor:
    """The walk of arXiv 2606.23961 over the newest rows.

    Args:
        rows: float64 ``[W, N]``, each summing to 1, oldest first.
        steps: how many rows it takes.

    Returns:
        float64 ``[N]``.
    """
    state = torch.zeros(rows.shape[1], dtype=torch.float64)
    if steps <= 0:
        return state
    for row in rows[-steps:]:
        state = state + (1 + torch.dot(row, state)) * row
    return state / state.sum().clamp_min(1e-300)


def recency(blocks: int, eps: float) -> torch.Tensor:
    """A tie-break in favour of the newer: ``eps * j / (N - 1)`` for the j-th block in order, float64 ``[N]``."""
    return eps * torch.arange(blocks, dtype=torch.float64) / max(blocks - 1, 1)


def window_weights(
    rows: torch.Tensor, candidates: torch.Tensor, steps: int, walk_weight: float, eps: float
) -> torch.Tensor:
    """Mean of the rows, plus walk, plus recency.

    Args:
        rows: float ``[W, N]``, oldest first; normalised here over the candidates.
        candidates: bool ``[N]``.
        steps: rows the walk takes.
        walk_weight: factor of the walk.
        eps: what the newest block gains.

    Returns:
        float64 ``[N]``.
    """
    masked = rows.double() * candidates
    normal = masked / masked.sum(dim=1, keepdim=True).clamp_min(1e-300)
    return normal.mean(dim=0) + walk_weight * walk(normal, steps) + recency(rows.shape[1], eps)
