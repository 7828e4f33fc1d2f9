"""Attention of a few queries over many keys, summed per block: the reference on torch."""

from __future__ import annotations

import torch


def block_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    cells: torch.Tensor,
    blocks: int,
    block_size: int,
    scale: float,
    average_heads: bool = False,
) -> torch.Tensor:
    """Softmax attention of one layer, per head, causal by position, summed over the tokens of each block.

    Args:
        queries: ``[W, Hq, D]``. keys: ``[T, Hkv, D]``, Hq a multiple of Hkv; both as cached (rotary applied).
        query_positions: int64 ``[W]``. key_positions: int64 ``[T]``, ascending.
        cells: int64 ``[T]``, distinct: ordinal of the key's block times ``block_size`` plus its place in the block.
        blocks: N. scale: factor on the dot products.
        average_heads: average queries and keys over heads before the softmax (arXiv 2606.23961 as written).

    Returns:
        float32 ``[W, Hq, N]`` (``[W, 1, N]`` when averaging heads); each row sums to 1.
    """
    q, k = queries.float(), keys.float()
    if average_heads:
        q, k = q.mean(dim=1, keepdim=True), k.mean(dim=1, keepdim=True)
    window, heads, dim = q.shape
    group = heads // k.shape[1]
    grouped = q.view(window, k.shape[1], group, dim).permute(1, 0, 2, 3).reshape(k.shape[1], window * group, dim)
    scores = torch.bmm(grouped, k.permute(1, 2, 0)).mul_(scale)
    scores = scores.view(k.shape[1], window, group, -1)
    scores.masked_fill_(key_positions[None, None, None, :] > query_positions[None, :, None, None], -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    grid = probs.new_zeros((*probs.shape[:-1], blocks * block_size))
    grid[..., cells] = probs
    per_block = grid.view(*probs.shape[:-1], blocks, block_size).sum(dim=-1)
    return per_block.permute(1, 0, 2, 3).reshape(window, heads, blocks)
