"""Attention of a few queries over many keys, summed per block and reduced over heads and layers.

:func:`block_attention_rows` reads the keys through a paged pool, all layers at once, in two passes: the log-sum-exp
of each query's scores (:mod:`.log_sum_exp`), then block sums. Given the log-sum-exp it makes the second pass only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .dispatch import dispatch
from .head_attention import scaled_scores, sum_blocks
from .layers import layer_pool, layer_table, same_layout
from .log_sum_exp import TILE, Keys, launch_log_sum_exp, launch_sizes, load_queries, tile_scores

REDUCTIONS = ("max", "sum")
"""How heads and layers become one row. The mean is ``sum`` divided by the number of (layer, head) pairs."""
MAX_BLOCK_SIZE = 128
"""Tokens per block the kernel takes; a block's scores are one tile."""
_APART = 2**24
"""Numbers stored before layers are joined; with more, a program takes several layers."""


def block_starts(ordinal: torch.Tensor, blocks: int) -> torch.Tensor:
    """Where each block begins among the resident tokens.

    Args:
        ordinal: int ``[T]``, ascending: which block each token is in, counted from 0.
        blocks: N.

    Returns:
        int32 ``[N + 1]``, and T at the end.
    """
    edges = torch.arange(blocks + 1, dtype=ordinal.dtype, device=ordinal.device)
    return torch.searchsorted(ordinal.contiguous(), edges, out_int32=True)


def _check_rows(
    queries: torch.Tensor,
    key_pools: Sequence[torch.Tensor],
    blocks: int,
    block_size: int,
    out: torch.Tensor,
    reduction: str,
) -> None:
    """Arguments as for :data:`block_attention_rows`. Raises ValueError naming the one that does not fit."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is not one of {', '.join(REDUCTIONS)}")
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size {block_size} is not from 1 to {MAX_BLOCK_SIZE}")
    layers, window, heads, _ = queries.shape
    if len(key_pools) != layers or not layers:
        raise ValueError(f"queries of {layers} layers for {len(key_pools)} key pools")
    kv_heads = key_pools[0].shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key heads")
    if tuple(out.shape) != (window, blocks) or out.dtype != torch.float32 or not out.is_contiguous():
        wanted = f"contiguous float32 {(window, blocks)}"
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)} of strides {out.stride()}, not {wanted}")


def _rows_torch(
    queries: torch.Tensor,
    key_pools: Sequence[torch.Tensor],
    slots: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    ordinal: torch.Tensor,
    blocks: int,
    block_size: int,
    scale: float,
    out: torch.Tensor,
    reduction: str,
    lse: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention per layer and head, summed per block, reduced over heads and layers, accumulated into ``out``.

    Args:
        queries: float ``[L, W, Hq, D]``, as the model uses them (rotary applied).
        key_pools: per layer float ``[KV slots, Hkv, D]``, as cached, all of one layout; Hq a multiple of Hkv.
        slots: int ``[T]``, the KV slot of each resident token.
        query_positions: int64 ``[W]``; a query sees keys up to its own position.
        key_positions: int ``[T]``, ascending.
        ordinal: int ``[T]``, ascending: which of the N blocks each token is in, counted from 0. A block holds at most
            ``block_size`` tokens, all of one run of positions that is aligned to it.
        blocks: N.
        block_size: tokens, up to :data:`MAX_BLOCK_SIZE`.
        scale: factor on the dot products.
        out: float32 ``[W, N]``, contiguous; zeros, or what layers of another shape have left there.
        reduction: ``max`` or ``sum``, over layers, heads and what ``out`` holds.
        lse: float ``[L, W, Hq]``, natural log-sum-exp of each query's scaled scores, where the attention backend has
            left it. It saves reading the keys twice.
        starts: int32 ``[N + 1]``, :func:`block_starts` of ``ordinal``, where the caller has it.

    Returns:
        ``out``. A query that sees no key adds nothing.

    Raises:
        ValueError: layers, heads, block size, reduction or ``out`` do not fit.
    """
    _check_rows(queries, key_pools, blocks, block_size, out, reduction)
    same_layout(key_pools)
    cells = ordinal.long() * block_size + key_positions.long() % block_size
    for layer, pool in enumerate(key_pools):
        scores = scaled_scores(queries[layer].float(), pool[slots].float(), query_positions, key_positions, scale)
        if lse is None:
            probs = torch.softmax(scores, dim=-1)  # as block_attention, bit for bit
        else:
            total = lse[layer].float().view(scores.shape[1], scores.shape[0], -1).permute(1, 0, 2)[..., None]
            probs = torch.exp(scores - total)
        # Where nothing is visible there is 0 / 0, or -inf minus -inf.
        probs = probs.masked_fill_(scores == -torch.inf, 0)
        per_head = sum_blocks(probs, cells, blocks, block_size)
        if reduction == "max":
            torch.maximum(out, per_head.amax(dim=1), out=out)
        else:
            out.add_(per_head.sum(dim=1))
    return out


@triton.jit(do_not_specialize=["blocks", "window", "layers", "layers_each"])
def _rows_kernel(
    q_ptr,
    pools_ptr,
    slots_ptr,
    query_positions_ptr,
    key_positions_ptr,
    starts_ptr,
    lse_ptr,
    out_ptr,
    blocks,
    window,
    layers,
    layers_each,
    scale,
    q_stride_l,
    q_stride_w,
    q_stride_h,
    pool_stride_s,
    pool_stride_h,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCKS_TILE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    UPCAST: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Block sums of a few blocks over all heads of a few layers: float32 ``[layer groups, W, N]``; no atomics."""
    lane = tl.arange(0, WINDOW_TILE * GROUP_P)
    w = tl.program_id(1) * WINDOW_TILE + lane // GROUP_P
    g = lane % GROUP_P
    real = (w < window) & (g < GROUP)
    seen_to = tl.load(query_positions_ptr + w, mask=w < window, other=-1)
    place = tl.arange(0, BLOCKS_TILE * BLOCK_P)
    n = tl.program_id(0) * BLOCKS_TILE + place // BLOCK_P
    t = tl.load(starts_ptr + n, mask=n < blocks, other=0) + place % BLOCK_P
    inside = t < tl.load(starts_ptr + n + 1, mask=n < blocks, other=0)
    row = tl.zeros((WINDOW_TILE, BLOCKS_TILE), tl.float32)
    first = tl.program_id(2) * layers_each
    for layer in range(first, tl.minimum(first + layers_each, layers)):
        pool_ptr = layer_pool(pools_ptr, layer, DTYPE, ALIGNED)
        queries_ptr = q_ptr + tl.cast(layer, tl.int64) * q_stride_l
        for head in range(HEADS // GROUP):
            q = load_queries(queries_ptr, w, g, head, window, q_stride_w, q_stride_h, GROUP, DIM, DIM_P)
            scores = tile_scores(
                q,
                seen_to,
                pool_ptr,
                slots_ptr,
                key_positions_ptr,
                t,
                inside,
                head,
                pool_stride_s,
                pool_stride_h,
                scale,
                DIM,
                DIM_P,
                UPCAST,
            )
            total = tl.load(lse_ptr + (layer * window + w) * HEADS + head * GROUP + g, mask=real, other=0.0)
            total = total.to(tl.float32)
            # A query that sees nothing has -inf here, and -inf - -inf is NaN; places of no head must not win a maximum.
            shift = tl.where(total == float("-inf"), 0.0, total)
            probs = tl.where(real[:, None], tl.exp(scores - shift[:, None]), 0.0)
            sums = tl.sum(tl.reshape(probs, (WINDOW_TILE, GROUP_P, BLOCKS_TILE, BLOCK_P)), axis=3)
            if MAXIMUM:
                row = tl.maximum(row, tl.max(sums, axis=1))
            else:
                row += tl.sum(sums, axis=1)
    w = tl.program_id(1) * WINDOW_TILE + tl.arange(0, WINDOW_TILE)
    n = tl.program_id(0) * BLOCKS_TILE + tl.arange(0, BLOCKS_TILE)
    there = (w < window)[:, None] & (n < blocks)[None, :]
    group = tl.program_id(2).to(tl.int64) * window * blocks
    tl.store(out_ptr + group + w[:, None] * blocks + n[None, :], row, mask=there)


def _rows_triton(
    queries: torch.Tensor,
    key_pools: Sequence[torch.Tensor],
    slots: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    ordinal: torch.Tensor,
    blocks: int,
    block_size: int,
    scale: float,
    out: torch.Tensor,
    reduction: str,
    lse: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference."""
    _check_rows(queries, key_pools, blocks, block_size, out, reduction)
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    pool = key_pools[0]
    if pool.stride(-1) != 1:
        raise ValueError(f"key_pools of strides {pool.stride()}: a head's key must be contiguous")
    table, typed = layer_table(key_pools)
    sizes = launch_sizes(queries, pool) | typed
    keys = Keys.of(table, pool, slots, query_positions, key_positions)
    if lse is None:
        lse = launch_log_sum_exp(queries, keys, scale, sizes)
    starts = block_starts(ordinal, blocks) if starts is None else starts
    layers, window = queries.shape[:2]
    block_p = triton.next_power_of_2(block_size)
    blocks_tile = max(TILE // block_p, 1)
    each = triton.cdiv(layers, max(1, min(layers, _APART // max(window * blocks, 1))))
    apart = torch.empty((triton.cdiv(layers, each), window, blocks), dtype=torch.float32, device=out.device)
    grid = (triton.cdiv(blocks, blocks_tile), triton.cdiv(window, sizes["WINDOW_TILE"]), len(apart))
    _rows_kernel[grid](
        queries,
        keys.pools,
        keys.slots,
        keys.query_positions,
        keys.key_positions,
        starts,
        lse.contiguous(),
        apart,
        blocks,
        window,
        layers,
        each,
        scale,
        *queries.stride()[:3],
        *keys.strides,
        BLOCK_P=block_p,
        BLOCKS_TILE=blocks_tile,
        MAXIMUM=reduction == "max",
        **sizes,
    )
    if reduction == "max":
        return torch.maximum(out, apart.amax(dim=0), out=out)
    return out.add_(apart.sum(dim=0))


block_attention_rows = dispatch(_rows_torch, _rows_triton)
