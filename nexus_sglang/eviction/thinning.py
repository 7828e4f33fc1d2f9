"""Which tokens of a cold cached node to give up when memory runs out. Pure tensors, no tree. Waits for the device."""

from __future__ import annotations

import torch

from .choice import fewest


def thin(
    positions: torch.Tensor, weights: torch.Tensor, keep: int, block_size: int, head_end: int, tail_start: int
) -> torch.Tensor:
    """Pick whole blocks to drop, the lightest first, by the weights remembered from their last eviction event.

    Blocks that no event has judged count as the median of those that were: proven neither useful nor useless.

    Args:
        positions: int64 ``[T]``, ascending, positions in the sequence of the node's resident tokens.
        weights: float ``[T]``, the ledger's weight of each token's block; NaN where no event has judged it.
        keep: resident tokens that shall remain.
        block_size: tokens per block.
        head_end: position in tokens; blocks that begin before it stay (sinks).
        tail_start: position in tokens; blocks that end after it stay (the node's newest).

    Returns:
        bool ``[T]``: tokens to drop. At most one block more than asked for; fewer where head and tail are all.
    """
    drop = torch.zeros(len(positions), dtype=torch.bool, device=positions.device)
    excess = len(positions) - keep
    if excess <= 0:
        return drop
    block, ordinal, tokens = torch.unique_consecutive(positions // block_size, return_inverse=True, return_counts=True)
    first = tokens.cumsum(0) - tokens
    weight = weights[first].double()
    judged = weight[~torch.isnan(weight)]
    weight = torch.nan_to_num(weight, nan=judged.median().item() if len(judged) else 0.0)
    candidates = (block * block_size >= head_end) & ((block + 1) * block_size <= tail_start)
    order = torch.argsort(weight, stable=True)  # the older of two equals goes first
    order = order[candidates[order]]
    if len(order) == 0:
        return drop
    gone = torch.zeros(len(block), dtype=torch.bool, device=positions.device)
    gone[fewest(order, tokens, excess)] = True
    return gone[ordinal]
