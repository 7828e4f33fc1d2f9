"""Attention of a few queries over many keys, summed per block.

:func:`block_attention` keeps every head (torch). :func:`block_attention_rows` reads the keys through a paged pool,
reduces over heads and layers, all layers at once: torch reference and Triton kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .dispatch import dispatch, interpreted
from .layers import layer_pool, layer_table, same_layout

REDUCTIONS = ("max", "sum")
"""How heads and layers become one row. The mean is ``sum`` divided by the number of (layer, head) pairs."""
MAX_BLOCK_SIZE = 128
"""Tokens per block the kernel takes; a block's scores are one tile."""
_TILE, _SPLIT, _SPLITS = 64, 512, 64  # tokens per step; fewest per program of the log-sum-exp pass, and most programs
_ROWS = 64  # (query, head) pairs per program
_APART = 2**24  # numbers stored before layers are joined; with more, a program takes several layers


def _scores(q: torch.Tensor, k: torch.Tensor, query_positions, key_positions, scale: float) -> torch.Tensor:
    """float32 ``[Hkv, W, Hq / Hkv, T]``: scaled dot products, -inf where the key is newer than the query."""
    window, heads, dim = q.shape
    group = heads // k.shape[1]
    grouped = q.view(window, k.shape[1], group, dim).permute(1, 0, 2, 3).reshape(k.shape[1], window * group, dim)
    scores = torch.bmm(grouped, k.permute(1, 2, 0)).mul_(scale)
    scores = scores.view(k.shape[1], window, group, -1)
    return scores.masked_fill_(key_positions[None, None, None, :] > query_positions[None, :, None, None], -torch.inf)


def _sum_blocks(probs: torch.Tensor, cells: torch.Tensor, blocks: int, block_size: int) -> torch.Tensor:
    """``[Hkv, W, G, T]`` to float32 ``[W, Hkv * G, N]``."""
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
        queries: ``[W, Hq, D]``. keys: ``[T, Hkv, D]``, Hq a multiple of Hkv; both as cached (rotary applied).
        query_positions: int64 ``[W]``. key_positions: int64 ``[T]``, ascending.
        cells: int64 ``[T]``, distinct: ordinal of the key's block times ``block_size`` plus its place in the block.
        blocks: N. scale: factor on the dot products.

    Returns:
        float32 ``[W, Hq, N]``; each row sums to 1.
    """
    probs = torch.softmax(_scores(queries.float(), keys.float(), query_positions, key_positions, scale), dim=-1)
    return _sum_blocks(probs, cells, blocks, block_size)


def log_sum_exp(
    queries: torch.Tensor, keys: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """float32 ``[W, Hq]``: natural log-sum-exp of each query's scaled scores over the keys up to its own position, -inf where
    there is none. Torch; arguments as for :func:`block_attention`."""
    scores = _scores(queries.float(), keys.float(), query_positions, key_positions, scale)
    return scores.logsumexp(dim=-1).permute(1, 0, 2).reshape(queries.shape[:2])


def block_starts(ordinal: torch.Tensor, blocks: int) -> torch.Tensor:
    """int32 ``[N + 1]``: where in ascending ``ordinal`` each block begins, and its length at the end."""
    edges = torch.arange(blocks + 1, dtype=ordinal.dtype, device=ordinal.device)
    return torch.searchsorted(ordinal.contiguous(), edges, out_int32=True)


def _check_rows(queries, key_pools, blocks: int, block_size: int, out: torch.Tensor, reduction: str) -> None:
    """Raise ValueError naming the argument that does not fit."""
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
        queries: ``[L, W, Hq, D]``. key_pools: per layer ``[physical slots, Hkv, D]``, Hq a multiple of Hkv, all of one
            layout; rotary applied.
        slots: int ``[T]``, where each resident token's key is. query_positions: int64 ``[W]``.
        key_positions: int ``[T]``, ascending; a query sees keys up to its own position.
        ordinal: int ``[T]``, ascending: which of the N blocks a key is in. A block holds at most ``block_size``
            keys, all of one run of positions aligned to it.
        blocks: N. block_size: tokens, up to 128. scale: factor on the dot products.
        out: float32 ``[W, N]``, contiguous; zeros, or what layers of another shape have left there.
        reduction: ``max`` or ``sum``, over layers, heads and what ``out`` holds.
        lse: float ``[L, W, Hq]``, log-sum-exp of all visible scaled scores, where the attention kernel left it:
            saves reading the keys twice.
        starts: :func:`block_starts` of ``ordinal``, where the caller has it.

    Returns:
        ``out``. A query that sees no key adds nothing.

    Raises:
        ValueError: layers, heads, block size, reduction or ``out`` do not fit.
    """
    _check_rows(queries, key_pools, blocks, block_size, out, reduction)
    same_layout(key_pools)
    cells = ordinal.long() * block_size + key_positions.long() % block_size
    for layer, pool in enumerate(key_pools):
        scores = _scores(queries[layer].float(), pool[slots].float(), query_positions, key_positions, scale)
        if lse is None:
            probs = torch.softmax(scores, dim=-1)  # as block_attention, bit for bit
        else:
            total = lse[layer].float().view(scores.shape[1], scores.shape[0], -1).permute(1, 0, 2)[..., None]
            probs = torch.exp(scores - total)
        # Where nothing is visible there is 0 / 0, or -inf minus -inf.
        probs = probs.masked_fill_(scores == -torch.inf, 0)
        per_head = _sum_blocks(probs, cells, blocks, block_size)
        if reduction == "max":
            torch.maximum(out, per_head.amax(dim=1), out=out)
        else:
            out.add_(per_head.sum(dim=1))
    return out


@triton.jit
def _load_queries(
    q_ptr, w, g, head, window, stride_w, stride_h, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr
):
    """``[rows, DIM_P]``: query w, head ``head * GROUP + g`` per row, zeros where there is none."""
    d = tl.arange(0, DIM_P)
    there = ((w < window) & (g < GROUP))[:, None] & (d < DIM)[None, :]
    return tl.load(q_ptr + (w * stride_w + (head * GROUP + g) * stride_h)[:, None] + d[None, :], mask=there, other=0.0)


@triton.jit
def _tile_scores(
    q, seen_to, pool_ptr, slots_ptr, key_positions_ptr, t, inside, head, stride_s, stride_h, scale,
    DIM: tl.constexpr, DIM_P: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """float32 ``[rows, len(t)]``: scaled scores against tokens ``t``, -inf where not inside or not visible."""
    d = tl.arange(0, DIM_P)
    slot = tl.load(slots_ptr + t, mask=inside, other=0).to(tl.int64)
    there = inside[None, :] & (d < DIM)[:, None]
    k = tl.load(pool_ptr + (slot * stride_s + head * stride_h)[None, :] + d[:, None], mask=there, other=0.0)
    if UPCAST:
        scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee")
    else:
        scores = tl.dot(q, k)
    position = tl.load(key_positions_ptr + t, mask=inside, other=0).to(tl.int64)
    visible = inside[None, :] & (position[None, :] <= seen_to[:, None])
    return tl.where(visible, scores * scale, float("-inf"))


@triton.jit(do_not_specialize=["tokens", "window", "window_tiles", "split_size", "layers"])
def _lse_kernel(
    q_ptr, pools_ptr, slots_ptr, query_positions_ptr, key_positions_ptr, partial_ptr, tokens, window, window_tiles,
    split_size, layers, scale, q_stride_l, q_stride_w, q_stride_h, pool_stride_s, pool_stride_h, HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr, WINDOW_TILE: tl.constexpr,
    TILE: tl.constexpr, UPCAST: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp over one split of the tokens, for one key head of one layer: float32 ``[splits, L, W, Hq]``."""
    head, split, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2) // window_tiles
    pool_ptr = layer_pool(pools_ptr, layer, DTYPE, ALIGNED)
    lane = tl.arange(0, WINDOW_TILE * GROUP_P)
    w, g = (tl.program_id(2) % window_tiles) * WINDOW_TILE + lane // GROUP_P, lane % GROUP_P
    q = _load_queries(
        q_ptr + layer.to(tl.int64) * q_stride_l, w, g, head, window, q_stride_w, q_stride_h, GROUP, DIM, DIM_P
    )
    seen_to = tl.load(query_positions_ptr + w, mask=w < window, other=-1)
    top = tl.full((WINDOW_TILE * GROUP_P,), float("-inf"), tl.float32)
    total = tl.zeros((WINDOW_TILE * GROUP_P,), tl.float32)
    for start in range(split * split_size, tl.minimum((split + 1) * split_size, tokens), TILE):
        t = start + tl.arange(0, TILE)
        scores = _tile_scores(
            q, seen_to, pool_ptr, slots_ptr, key_positions_ptr, t, t < tokens, head, pool_stride_s, pool_stride_h,
            scale, DIM, DIM_P, UPCAST,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(scores - shift[:, None]), axis=1)
        top = new_top
    result = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    place = ((split * layers + layer).to(tl.int64) * window + w) * HEADS + head * GROUP + g
    tl.store(partial_ptr + place, result, mask=(w < window) & (g < GROUP))


@triton.jit(do_not_specialize=["splits", "count"])
def _join_kernel(partial_ptr, out_ptr, splits, count, TILE: tl.constexpr):
    """Log-sum-exp over the splits: float32 ``[splits, count]`` to ``[count]``."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for split in range(splits):
        part = tl.load(partial_ptr + split * count + i, mask=i < count, other=float("-inf"))
        new_top = tl.maximum(top, part)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.exp(part - shift)
        top = new_top
    result = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(out_ptr + i, result, mask=i < count)


@triton.jit(do_not_specialize=["blocks", "window", "layers", "layers_each"])
def _rows_kernel(
    q_ptr, pools_ptr, slots_ptr, query_positions_ptr, key_positions_ptr, starts_ptr, lse_ptr, out_ptr, blocks, window,
    layers, layers_each, scale, q_stride_l, q_stride_w, q_stride_h, pool_stride_s, pool_stride_h, HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr, WINDOW_TILE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCKS_TILE: tl.constexpr, MAXIMUM: tl.constexpr, UPCAST: tl.constexpr, DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Block sums of a few blocks over all heads of a few layers: float32 ``[layer groups, W, N]``; no atomics."""
    lane = tl.arange(0, WINDOW_TILE * GROUP_P)
    w, g = tl.program_id(1) * WINDOW_TILE + lane // GROUP_P, lane % GROUP_P
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
            q = _load_queries(queries_ptr, w, g, head, window, q_stride_w, q_stride_h, GROUP, DIM, DIM_P)
            scores = _tile_scores(
                q, seen_to, pool_ptr, slots_ptr, key_positions_ptr, t, inside, head, pool_stride_s, pool_stride_h,
                scale, DIM, DIM_P, UPCAST,
            )  # fmt: skip
            total = tl.load(lse_ptr + (layer * window + w) * HEADS + head * GROUP + g, mask=real, other=0.0).to(
                tl.float32
            )
            # A query that sees nothing has -inf here, and -inf - -inf is NaN; lanes of no head must not win a maximum.
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


def _shapes(queries: torch.Tensor, pool: torch.Tensor) -> dict:
    """Compile-time sizes shared by both kernels."""
    _, window, heads, dim = queries.shape
    group = heads // pool.shape[1]
    group_p = triton.next_power_of_2(group)
    # Tensor cores take one dtype. The interpreter keeps bfloat16 as raw bits and would multiply those.
    mixed = queries.dtype != pool.dtype or queries.dtype == torch.float32
    rows = 16 if mixed else _ROWS  # single precision: registers and shared memory
    # Not below 16, so that a window that is not full yet takes the kernels compiled for a full one.
    tile = min(max(triton.next_power_of_2(window), 16), max(rows // group_p, 1))
    return {
        "HEADS": heads, "GROUP": group, "GROUP_P": group_p, "DIM": dim, "DIM_P": max(triton.next_power_of_2(dim), 16),
        "WINDOW_TILE": max(tile, 16 // group_p), "UPCAST": mixed or interpreted(),
        "num_warps": 4, "num_stages": 2,
    }  # fmt: skip


def _rows_triton(
    queries, key_pools, slots, query_positions, key_positions, ordinal, blocks, block_size, scale, out, reduction, lse=None,
    starts=None,
):  # fmt: skip
    _check_rows(queries, key_pools, blocks, block_size, out, reduction)
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    pool = key_pools[0]
    if pool.stride(-1) != 1:
        raise ValueError(f"key_pools of strides {pool.stride()}: a head's key must be contiguous")
    slots, query_positions, key_positions = (x.contiguous() for x in (slots, query_positions.long(), key_positions))
    pools, typed = layer_table(key_pools)
    shapes, tokens, (layers, window, heads, _) = _shapes(queries, pool) | typed, len(slots), queries.shape
    strides = (*queries.stride()[:3], pool.stride(0), pool.stride(1))
    window_tiles = triton.cdiv(window, shapes["WINDOW_TILE"])
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=out.device)  # noqa: E731
    if lse is None:
        split = _SPLIT * max(1, triton.cdiv(tokens, _SPLIT * _SPLITS))
        partial, lse = new(triton.cdiv(tokens, split), layers, window, heads), new(layers, window, heads)
        _lse_kernel[(pool.shape[1], len(partial), layers * window_tiles)](
            queries, pools, slots, query_positions, key_positions, partial, tokens, window, window_tiles, split, layers, scale,
            *strides, TILE=_TILE, **shapes,
        )  # fmt: skip
        _join_kernel[(triton.cdiv(lse.numel(), _ROWS),)](partial, lse, len(partial), lse.numel(), TILE=_ROWS)
    starts = block_starts(ordinal, blocks) if starts is None else starts
    block_p = triton.next_power_of_2(block_size)
    blocks_tile = max(_TILE // block_p, 1)
    each = triton.cdiv(layers, max(1, min(layers, _APART // max(window * blocks, 1))))
    apart = new(triton.cdiv(layers, each), window, blocks)
    _rows_kernel[(triton.cdiv(blocks, blocks_tile), window_tiles, len(apart))](
        queries, pools, slots, query_positions, key_positions, starts, lse.contiguous(), apart, blocks, window, layers, each,
        scale, *strides, BLOCK_P=block_p, BLOCKS_TILE=blocks_tile, MAXIMUM=reduction == "max", **shapes,
    )  # fmt: skip
    return torch.maximum(out, apart.amax(dim=0), out=out) if reduction == "max" else out.add_(apart.sum(dim=0))


block_attention_rows = dispatch(_rows_torch, _rows_triton)
