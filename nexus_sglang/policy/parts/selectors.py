"""From weights to an order of blocks. All work in logs: with weights of about 1/N, u**(1/w) underflows.

Every selector returns float64 ``[N]``, larger is kept first; the evictor drops from the lowest up.
"""

from __future__ import annotations

import math

import torch

from nexus_sglang.kernels import reservoir
from nexus_sglang.policy.base import Blocks


def sampling_priorities(
    law: str,
    weights: torch.Tensor,
    blocks: Blocks,
    draws: int = 1,
    beta: float = 1.0,
) -> torch.Tensor:
    """Weighted sampling without replacement with the blocks' own draws, in one launch on a GPU.

    ``exponential-keys`` is the log of the mean over the draws of ``u**(1/w)`` (arXiv 2606.23961; one draw is
    Efraimidis-Spirakis 2006). ``sequential-poisson`` is the log of ``w**beta / u`` (Ohlsson 1998; Duffield, Lund,
    Thorup 2007): blocks above the sampling threshold are kept for certain, the tail in proportion to its weight.

    Args:
        law: ``exponential-keys`` or ``sequential-poisson``.
        weights: float ``[N]``, non-negative; a zero weight ranks last.
        blocks: whose identity, event and seed the draws depend on.
        draws: uniform numbers per block that exponential keys average; sequential Poisson takes one.
        beta: sharpness of sequential Poisson; 1 samples in proportion to the weight, towards infinity it is top-K.

    Returns:
        float64 ``[N]``, -inf for a zero weight (but for sequential Poisson with beta 0, a uniform sample).
    """
    event, length = (
        torch.full((1,), n, dtype=torch.int64, device=weights.device) for n in (blocks.event, len(weights))
    )
    identity = blocks.identity[None]
    return reservoir.priorities(weights[None], identity, event, length, blocks.seed, law, draws, beta)[0]


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
    blocks: Blocks,
    keep: int,
    draws: int = 1,
    sharpness: float = 1.0,
    sampled_share: float = 0.0,
) -> torch.Tensor:
    """A selector by name.

    Args:
        kind: one of :data:`SELECTORS`. ``core-sampled`` takes all but ``sampled_share`` of ``keep`` from the top and
            draws the rest by sequential Poisson.
        weights: float ``[N]``, non-negative.
        blocks: the blocks weighed.
        keep: candidates that will stay.
        draws: uniform numbers per block that exponential keys average.
        sharpness: beta of ``w**beta`` before a draw.
        sampled_share: share of ``keep`` that ``core-sampled`` draws, in [0, 1].

    Returns:
        float64 ``[N]``, larger is kept first.
    """
    if kind == "top-k":
        return weights.double()
    if kind == "exponential-keys":
        sharp = sharpen(weights * blocks.candidates, sharpness) if sharpness != 1 else weights
        return sampling_priorities(kind, sharp, blocks, draws)
    drawn = sampling_priorities("sequential-poisson", weights, blocks, beta=sharpness)
    if kind == "sequential-poisson":
        return drawn
    return core_then(drawn, weights, keep - round(sampled_share * keep), blocks.candidates)
