"""Which tokens of a cold cached node to give up when memory runs out: pure tensors, no tree. Waits for the device."""

from __future__ import annotations

import torch

from .choice import fewest


def thin(
    positions: torch.Tensor, weights: torch.Tensor, keep: int, block_size: int, head: int, tail: int
) -> torch.Tensor:
    """Pick whole blocks to drop, by the weights remembered from their last eviction event.

    Args:
        positions: int64 ``[T]``, positions in the sequence of the node's resident tokens, ascending.
        weights: float ``[T]``, the ledger's weight of each token's block; NaN where no event judged it. Such
            blocks count as the median of the judged ones: neither proven useful nor useless.
        keep: resident tokens that shall remain.
        head: positions below this stay (sinks). tail: positions from this on stay (the node's newest).

    Returns:
        bool ``[T]``: tokens to drop; at most one block more than asked for, fewer when head and tail are all.
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
    free = (block * block_size >= head) & ((block + 1) * block_size <= tail)
    # Ascending; the older of two equals goes first.
    order = torch.argsort(weight, stable=True)
    order = order[free[order]]
    if len(order) == 0:
        return drop
    gone = torch.zeros(len(block), dtype=torch.bool, device=positions.device)
    gone[fewest(order, tokens, excess)] = True
    return gone[ordinal]
