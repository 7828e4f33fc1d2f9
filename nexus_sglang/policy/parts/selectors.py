"""Selectors: from weights to priorities.

Every selector returns float64 ``[N]``; the highest are kept. Those that draw work in logs, since with weights of about
1/N ``u**(1/w)`` underflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nexus_sglang.kernels import reservoir
from nexus_sglang.policy.base import Blocks

SELECTORS = ("top-k", "exponential-keys", "sequential-poisson", "core-sampled")
"""What :func:`select` knows."""


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
    event = torch.full((1,), blocks.event, dtype=torch.int64, device=weights.device)
    length = torch.full((1,), len(weights), dtype=torch.int64, device=weights.device)
    identity = blocks.identity[None]
    return reservoir.priorities(weights[None], identity, event, length, blocks.seed, law, draws, beta)[0]


def core_then(priority: torch.Tensor, weights: torch.Tensor, core: int, candidates: torch.Tensor) -> torch.Tensor:
    """Keep the ``core`` heaviest candidates for certain and leave the rest to ``priority``.

    Args:
        priority: float64 ``[N]`` of any selector.
        weights: float ``[N]``; among equals the newer is in the core.
        core: how many candidates are certain; all of them where that is more than there are.
        candidates: bool ``[N]``.

    Returns:
        float64 ``[N]``, inf in the core.
    """
    if core <= 0:
        return priority
    place = _places(weights[None], candidates)[0]
    return torch.where((place < core) & candidates, math.inf, priority)


def sharpen(weights: torch.Tensor, beta: float) -> torch.Tensor:
    """Raise the weights to a power, scaled to a largest value of 1.

    Args:
        weights: float ``[N]``, non-negative.
        beta: the power; 1 leaves their proportions, towards infinity only the largest is left.

    Returns:
        float64 ``[N]`` in [0, 1].
    """
    w = weights.double()
    return (w / w.max().clamp_min(1e-300)) ** beta


def interleave(
    orders: Sequence[torch.Tensor],
    shares: Sequence[float | torch.Tensor],
    candidates: torch.Tensor,
) -> torch.Tensor:
    """Join several orders into one: however many blocks are kept, each order has its best among them, by its share.

    Block j stands at ``min_i rank_i(j) / share_i``, ranks counted from 1. A block near the top of two orders is counted
    once.

    Args:
        orders: float ``[N]`` each, larger is better, among equals the newer.
        shares: one number per order, not negative, not all 0; floats or scalar tensors.
        candidates: bool ``[N]``; other blocks take no place in any order.

    Returns:
        float64 ``[N]`` in [0, 1], ``1 / standing``, scaled.
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
    """Each candidate's place in each order.

    Args:
        orders: float ``[k, N]``.
        candidates: bool ``[N]``.

    Returns:
        int32 ``[k, N]``: 0 for the largest, among equals the newer; N for blocks that are no candidates.
    """
    lengths = torch.full((len(orders),), orders.shape[1], dtype=torch.int64, device=orders.device)
    return reservoir.ranks(orders.double(), candidates.expand(orders.shape), lengths)


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
