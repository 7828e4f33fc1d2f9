"""Attention of a few queries over many keys with every head kept apart. Torch only: nothing here is a kernel.

It is what :mod:`.block_attention` reduces over heads, and what runs where that kernel does not fit.
"""

from __future__ import annotations

import torch


def scaled_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Scaled dot products, -inf where the key is newer than the query.

    Args:
        queries: float32 ``[W, Hq, D]``.
        keys: float32 ``[T, Hkv, D]``, Hq a multiple of Hkv.
        query_positions: int64 ``[W]``.
        key_positions: int ``[T]``.
        scale: factor on the dot products.

    Returns:
        float32 ``[Hkv, W, Hq / Hkv, T]``.
    """
    window, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    grouped = queries.view(window, kv_heads, group, dim).permute(1, 0, 2, 3).reshape(kv_heads, window * group, dim)
    scores = torch.bmm(grouped, keys.permute(1, 2, 0)).mul_(scale)
    scores = scores.view(kv_heads, window, group, -1)
    return scores.masked_fill_(key_positions[None, None, None, :] > query_positions[None, :, None, None], -torch.inf)


def sum_blocks(probs: torch.Tensor, cells: torch.Tensor, blocks: int, block_size: int) -> torch.Tensor:
    """Sum probabilities over the tokens of each block.

    Args:
        probs: float32 ``[Hkv, W, Hq / Hkv, T]``.
        cells: int64 ``[T]``, as for :func:`block_attention`.
        blocks: N.
        block_size: tokens.

    Returns:
        float32 ``[W, Hq, N]``.
    """
    grid = probs.new_zeros((*probs.shape[:-1], blocks * block_size))
    grid[..., cells] = probs
    per_block = grid.view(*probs.shape[:-1], blocks, block_size).sum(dim=-1)
    return per_block.permute(1, 0, 2, 3).reshape(probs.shape[1], -1, blocks)


def block_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    cells: torch.Tensor,
    blocks: int,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """Softmax attention of one layer, per head, causal by position, summed over the tokens of each block.

    Args:
        queries: float ``[W, Hq, D]``, as the model uses them (rotary applied).
        keys: float ``[T, Hkv, D]``, as cached (rotary applied); Hq a multiple of Hkv.
        query_positions: int64 ``[W]``.
        key_positions: int64 ``[T]``, ascending.
        cells: int64 ``[T]``, distinct: the key's block, counted from 0, times ``block_size``, plus its place in it.
        blocks: N.
        block_size: tokens.
        scale: factor on the dot products.

    Returns:
        float32 ``[W, Hq, N]``; each row sums to 1.
    """
    scores = scaled_scores(queries.float(), keys.float(), query_positions, key_positions, scale)
    return sum_blocks(torch.softmax(scores, dim=-1), cells, blocks, block_size)


def log_sum_exp(
    queries: torch.Tensor,
    keys: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Log-sum-exp of each query's scaled scores over the keys up to its own position.

    Args:
        queries: as for :func:`block_attention`.
        keys: as for :func:`block_attention`.
        query_positions: int64 ``[W]``.
        key_positions: int64 ``[T]``, ascending.
        scale: factor on the dot products.

    Returns:
        float32 ``[W, Hq]``, natural logarithm, -inf where a query sees no key.
    """
    scores = scaled_scores(queries.float(), keys.float(), query_positions, key_positions, scale)
    return scores.logsumexp(dim=-1).permute(1, 0, 2).reshape(queries.shape[:2])
