"""The log-sum-exp of a few queries' scores over many keys, read through a paged pool, all layers at once.

This is the first of the two passes of :mod:`.block_attention`, and what both passes share. Its reference is
:func:`.head_attention.log_sum_exp`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .dispatch import interpreted
from .layers import layer_pool

TILE = 64
"""Tokens a program takes per step."""
ROWS = 64
"""(query, head) pairs per program."""
_SPLIT = 512
"""Fewest tokens per program."""
_SPLITS = 64
"""Most programs per head and layer."""


@triton.jit
def load_queries(
    q_ptr, w, g, head, window, stride_w, stride_h, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr
):
    """``[rows, DIM_P]``: in each row query w of head ``head * GROUP + g``, zeros where there is none."""
    d = tl.arange(0, DIM_P)
    there = ((w < window) & (g < GROUP))[:, None] & (d < DIM)[None, :]
    return tl.load(q_ptr + (w * stride_w + (head * GROUP + g) * stride_h)[:, None] + d[None, :], mask=there, other=0.0)


@triton.jit
def tile_scores(
    q,
    seen_to,
    pool_ptr,
    slots_ptr,
    key_positions_ptr,
    t,
    inside,
    head,
    stride_s,
    stride_h,
    scale,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """float32 ``[rows, len(t)]``: the queries' scaled scores against tokens ``t``, -inf where there is none to see."""
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
    q_ptr,
    pools_ptr,
    slots_ptr,
    query_positions_ptr,
    key_positions_ptr,
    partial_ptr,
    tokens,
    window,
    window_tiles,
    split_size,
    layers,
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
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Log-sum-exp over one split of the tokens, for one key head of one layer: float32 ``[splits, L, W, Hq]``."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    layer = tl.program_id(2) // window_tiles
    pool_ptr = layer_pool(pools_ptr, layer, DTYPE, ALIGNED)
    lane = tl.arange(0, WINDOW_TILE * GROUP_P)
    w = (tl.program_id(2) % window_tiles) * WINDOW_TILE + lane // GROUP_P
    g = lane % GROUP_P
    q = load_queries(
        q_ptr + layer.to(tl.int64) * q_stride_l, w, g, head, window, q_stride_w, q_stride_h, GROUP, DIM, DIM_P
    )
    seen_to = tl.load(query_positions_ptr + w, mask=w < window, other=-1)
    top = tl.full((WINDOW_TILE * GROUP_P,), float("-inf"), tl.float32)
    total = tl.zeros((WINDOW_TILE * GROUP_P,), tl.float32)
    for start in range(split * split_size, tl.minimum((split + 1) * split_size, tokens), TILE):
        t = start + tl.arange(0, TILE)
        scores = tile_scores(
            q,
            seen_to,
            pool_ptr,
            slots_ptr,
            key_positions_ptr,
            t,
            t < tokens,
            head,
            pool_stride_s,
            pool_stride_h,
            scale,
            DIM,
            DIM_P,
            UPCAST,
        )
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


class Keys(NamedTuple):
    """Where a launch finds the keys of the resident tokens.

    Attributes:
        pools: int64 ``[L]``, the addresses of the layers' pools (``layers.layer_table``).
        slots: int ``[T]``, each token's KV slot, contiguous.
        query_positions: int64 ``[W]``, contiguous.
        key_positions: int ``[T]``, contiguous.
        strides: of the pools, per slot and per head, in numbers.
    """

    pools: torch.Tensor
    slots: torch.Tensor
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    strides: tuple[int, int]

    @classmethod
    def of(
        cls,
        pools: torch.Tensor,
        pool: torch.Tensor,
        slots: torch.Tensor,
        query_positions: torch.Tensor,
        key_positions: torch.Tensor,
    ) -> Keys:
        """The same with tensors laid out as a launch needs them.

        Args:
            pools: int64 ``[L]``, the addresses of the layers' pools.
            pool: ``[KV slots, Hkv, D]``, one of them; all are of one layout.
            slots: int ``[T]``.
            query_positions: int ``[W]``.
            key_positions: int ``[T]``.
        """
        strides = (pool.stride(0), pool.stride(1))
        at = query_positions.long().contiguous()
        return cls(pools, slots.contiguous(), at, key_positions.contiguous(), strides)


def launch_sizes(queries: torch.Tensor, pool: torch.Tensor) -> dict[str, Any]:
    """Compile-time sizes that both passes share.

    Args:
        queries: ``[L, W, Hq, D]``.
        pool: ``[KV slots, Hkv, D]``, of one layer.
    """
    _, window, heads, dim = queries.shape
    group = heads // pool.shape[1]
    group_p = triton.next_power_of_2(group)
    # Tensor cores take one dtype. The interpreter keeps bfloat16 as raw bits and would multiply those.
    mixed = queries.dtype != pool.dtype or queries.dtype == torch.float32
    rows = 16 if mixed else ROWS  # single precision: registers and shared memory
    # Not below 16, so that a window that is not full yet takes the kernels compiled for a full one.
    tile = min(max(triton.next_power_of_2(window), 16), max(rows // group_p, 1))
    return {
        "HEADS": heads,
        "GROUP": group,
        "GROUP_P": group_p,
        "DIM": dim,
        "DIM_P": max(triton.next_power_of_2(dim), 16),
        "WINDOW_TILE": max(tile, 16 // group_p),
        "UPCAST": mixed or interpreted(),
        "num_warps": 4,
        "num_stages": 2,
    }


def launch_log_sum_exp(queries: torch.Tensor, keys: Keys, scale: float, sizes: dict[str, Any]) -> torch.Tensor:
    """Log-sum-exp of each query's scaled scores over the keys up to its own position.

    Args:
        queries: ``[L, W, Hq, D]``, contiguous in D.
        keys: of the resident tokens.
        scale: factor on the dot products.
        sizes: of :func:`launch_sizes`, and what the layer table adds.

    Returns:
        float32 ``[L, W, Hq]``, natural logarithm, -inf where a query sees no key.
    """
    layers, window, heads, _ = queries.shape
    tokens = len(keys.slots)
    window_tiles = triton.cdiv(window, sizes["WINDOW_TILE"])
    split = _SPLIT * max(1, triton.cdiv(tokens, _SPLIT * _SPLITS))
    new = functools.partial(torch.empty, dtype=torch.float32, device=queries.device)
    partial = new((triton.cdiv(tokens, split), layers, window, heads))
    lse = new((layers, window, heads))
    _lse_kernel[(heads // sizes["GROUP"], len(partial), layers * window_tiles)](
        queries,
        keys.pools,
        keys.slots,
        keys.query_positions,
        keys.key_positions,
        partial,
        tokens,
        window,
        window_tiles,
        split,
        layers,
        scale,
        *queries.stride()[:3],
        *keys.strides,
        TILE=TILE,
        **sizes,
    )
    _join_kernel[(triton.cdiv(lse.numel(), ROWS),)](partial, lse, len(partial), lse.numel(), TILE=ROWS)
    return lse
