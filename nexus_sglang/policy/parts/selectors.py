"""From weights to an order of blocks. All work in logs: with weights of about 1/N, u**(1/w) underflows.

Every selector returns float64 ``[N]``, larger is kept first; the evictor drops from the lowest up.
"""

from __future__ import annotations

import math

import torch

from nexus_sglang.kernels import reservoir
from nexus_sglang.policy.base import Blocks


def sampling_priorities(
    law: str, weights: torch.Tensor, blocks: Blocks, draws: int = 1, beta: float = 1.0
) -> torch.Tensor:
    """:func:`exponential_keys` or :func:`sequential_poisson` (``law``) with the blocks' own draws, in one launch on a GPU."""
    event, length = (
        torch.full((1,), n, dtype=torch.int64, device=weights.device) for n in (blocks.event, len(weights))
    )
    identity = blocks.identity[None]
    return reservoir.priorities(weights[None], identity, event, length, blocks.seed, law, draws, beta)[0]


def exponential_keys(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Weighted reservoir sampling: log of mean_i u_i**(1/w) (arXiv 2606.23961; n = 1 is Efraimidis-Spirakis 2006).

    Args:
        weights: float ``[N]``, non-negative; a zero weight ranks last.
        u: float64 ``[n, N]`` in (0, 1).
    """
    w = weights.double()
    log_keys = torch.logsumexp(u.log() / w.clamp_min(1e-300), dim=0) - math.log(u.shape[0])
    return torch.where(w > 0, log_keys, torch.full_like(log_keys, -math.inf))


def sequential_poisson(weights: torch.Tensor, u: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    """Sequential Poisson (priority) sampling, w**beta / u in logs (Ohlsson 1998; Duffield, Lund, Thorup 2007).

    Blocks above the sampling threshold are kept for certain, the tail in proportion to its weight.

    Args:
        weights: float ``[N]``, non-negative; a zero weight ranks last.
        u: float64 ``[1, N]`` in (0, 1); only the first draw is used.
        beta: sharpness; 1 samples in proportion to the weight, towards infinity it is top-K.
    """
    log_weights = weights.double().log()
    # 0 * -inf would be NaN
    return (beta * log_weights if beta else torch.zeros_like(log_weights)) - u[0].log()


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
    place = _places(weights[None], candidates)[0]
    return torch.where((place < core) & candidates, math.inf, priority)  # fewer candidates than core: only those


def sharpen(weights: torch.Tensor, beta: float) -> torch.Tensor:
    """``w**beta`` scaled to a largest value of 1 (beta = 1 is the paper's law, beta to infinity is top-K)."""
    w = weights.double()
    return (w / w.max().clamp_min(1e-300)) ** beta


def interleave(
    orders: list[torch.Tensor], shares: list[float | torch.Tensor], candidates: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """One order out of several, so that whatever is kept holds each order's best in proportion to its share.

    Block j stands at ``min_i rank_i(j) / share_i`` (ranks from 1). A block near the top of two orders counts once and
    leaves its second place to the next.

    Args:
        orders: float ``[N]`` each, larger is better, ties in favour of the newer. shares: one number each, not negative and
            not all 0. candidates: bool ``[N]``; other blocks take no place in any order.

    Returns:
        float64 ``[N]`` in (0, 1], 1 / standing (scaled): larger is kept first.
    """
    total = sum(shares)
    ranks = _places(torch.stack([order.double() for order in orders]), candidates).double() + 1
    # A share may be on the device, where a 0 makes every standing infinite; in Python it would be an error.
    standing = [
        rank * (total / share)
        for rank, share in zip(ranks, shares, strict=True)
        if isinstance(share, torch.Tensor) or share > 0
    ]
    return 1 / torch.stack(standing).amin(dim=0)


def _places(orders: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """int32 ``[k, N]``: each candidate's place in each order (float ``[k, N]``), from 0 for the largest, among equals the
    newer first; N for other blocks."""
    lengths = torch.full((len(orders),), orders.shape[1], dtype=torch.int64, device=orders.device)
    return reservoir.ranks(orders.double(), candidates.expand(orders.shape), lengths)


SELECTORS = ("top-k", "exponential-keys", "sequential-poisson", "core-sampled")


def select(
    kind: str,
    weights: torch.Tensor,
    u: torch.Tensor,
    candidates: torch.Tensor,
    keep: int,
    sharpness: float,
    sampled_share: float,
) -> torch.Tensor:
    """A selector by name.

    Args:
        kind: one of :data:`SELECTORS`. ``core-sampled`` takes all but ``sampled_share`` of ``keep`` from the top and
            draws the rest by sequential Poisson.
        weights: float ``[N]``, non-negative. u: float64 ``[n, N]``. candidates: bool ``[N]``.
        keep: candidates that will stay. sharpness: beta of ``w**beta`` before a draw.
    """
    if kind == "top-k":
        return weights.double()
    if kind == "exponential-keys":
        return exponential_keys(sharpen(weights * candidates, sharpness) if sharpness != 1 else weights, u)
    drawn = sequential_poisson(weights, u, sharpness)
    if kind == "sequential-poisson":
        return drawn
    return core_then(drawn, weights, keep - round(sampled_share * keep), candidates)
