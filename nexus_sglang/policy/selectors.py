"""From weights to an order of blocks. All work in logs: with weights of about 1/N, u**(1/w) underflows.

Every selector returns float64 ``[N]``, larger is kept first; the evictor drops from the lowest up.
"""

from __future__ import annotations

import math

import torch


def exponential_keys(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Weighted reservoir sampling: log of mean_i u_i**(1/w) (arXiv 2606.23961; n = 1 is Efraimidis-Spirakis 2006).

    Args:
        weights: float ``[N]``, non-negative; a zero weight ranks last.
        u: float64 ``[n, N]`` in (0, 1).
    """
    w = weights.double()
    log_keys = torch.logsumexp(u.log() / w.clamp_min(1e-300), dim=0) - math.log(u.shape[0])
    return torch.where(w > 0, log_keys, torch.full_like(log_keys, -math.inf))


def sequential_poisson(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Sequential Poisson (priority) sampling, w / u in logs (Ohlsson 1998; Duffield, Lund, Thorup 2007).

    Blocks above the sampling threshold are kept for certain, the tail in proportion to its weight.

    Args:
        weights: float ``[N]``, non-negative; a zero weight ranks last.
        u: float64 ``[1, N]`` in (0, 1); only the first draw is used.
    """
    return weights.double().log() - u[0].log()


def core_then(priority: torch.Tensor, weights: torch.Tensor, core: int, candidates: torch.Tensor) -> torch.Tensor:
    """Keep the ``core`` heaviest candidates for certain and leave the rest to ``priority``.

    Args:
        priority: float64 ``[N]`` of any selector.
        weights: float ``[N]``.
        core: how many candidates are certain.
        candidates: bool ``[N]``.
    """
    if core <= 0:
        return priority
    ranked = torch.where(candidates, weights.double(), torch.full_like(weights.double(), -math.inf))
    order = torch.argsort(ranked.flip(0), descending=True, stable=True)
    sure = (len(ranked) - 1 - order)[: min(core, int(candidates.sum()))]
    out = priority.clone()
    out[sure] = math.inf
    return out


def sharpen(weights: torch.Tensor, beta: float) -> torch.Tensor:
    """``w**beta`` scaled to a largest value of 1 (beta = 1 is the paper's law, beta to infinity is top-K)."""
    w = weights.double()
    return (w / w.max().clamp_min(1e-300)) ** beta
