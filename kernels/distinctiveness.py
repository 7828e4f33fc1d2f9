"""How unusual the directions of a block's keys or values are, read through the paged pool, all layers at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .block_attention import MAX_BLOCK_SIZE
from .dispatch import dispatch
from .layers import layer_pool, layer_table, same_layout

_TILE = 64
"""Tokens a program takes per step."""
_SPLIT = 512
"""Fewest tokens per program of the first pass."""
_SPLITS = 64
"""Most programs of the first pass, per head and layer."""
_AT_ONCE = 2**26
"""Numbers the reference turns into single precision at a time: long sequences go by heads."""


def token_distinctiveness(vectors: torch.Tensor) -> torch.Tensor:
    """How much each token's vector differs in direction from the mean direction (arXiv 2504.15364, there of keys).

    Args:
        vectors: ``[T, Hkv, D]``, keys or values.

    Returns:
        float32 ``[T]`` in [0, 2]: 1 - cos(vector, mean of unit vectors), mean over heads.
    """
    tokens, heads, dim = vectors.shape
    alike = torch.zeros(tokens, dtype=torch.float32, device=vectors.device)
    for part in vectors.split(max(1, _AT_ONCE // max(tokens * dim, 1)), dim=1):
        unit = torch.nn.functional.normalize(part.float(), dim=-1)
        anchor = torch.nn.functional.normalize(unit.mean(dim=0, keepdim=True), dim=-1)
        alike = alike + (unit * anchor).sum(dim=-1).sum(dim=-1)
    return 1 - alike / heads


def block_sums(per_token: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sum what tokens have over their blocks, in order and without atomics.

    Args:
        per_token: float ``[T, ..]``, block after block.
        tokens: int64 ``[N]``, how many of them each block has.

    Returns:
        float ``[N, ..]``.
    """
    return torch.segment_reduce(per_token, "sum", lengths=tokens, axis=0, unsafe=True)  # unsafe: lengths go unchecked


def _distinctiveness_torch(
    pools: Sequence[torch.Tensor], slots: torch.Tensor, starts: torch.Tensor, block_size: int
) -> torch.Tensor:
    """:func:`token_distinctiveness` of the resident tokens, mean over each block, per layer.

    Args:
        pools: per layer ``[KV slots, Hkv, D]``, keys or values, all of one layout.
        slots: int ``[T]``, each resident token's KV slot.
        starts: int32 ``[N + 1]``, where in ``slots`` each block begins, and T.
        block_size: most tokens of a block.

    Returns:
        float32 ``[L, N]``; 0 for a block without tokens.

    Raises:
        ValueError: layers of different layouts.
    """
    same_layout(pools)
    tokens = starts.long().diff()
    slots = slots.long()
    sums = [block_sums(token_distinctiveness(pool[slots]), tokens) for pool in pools]
    return torch.stack(sums) / tokens.clamp_min(1)


@triton.jit
def _load_vectors(pool_ptr, slots_ptr, t, inside, head, stride_s, stride_h, DIM: tl.constexpr, DIM_P: tl.constexpr):
    """float32 ``[len(t), DIM_P]`` of one head, zeros outside, and their norms (never 0)."""
    d = tl.arange(0, DIM_P)
    slot = tl.load(slots_ptr + t, mask=inside, other=0).to(tl.int64)
    there = inside[:, None] & (d < DIM)[None, :]
    x = tl.load(pool_ptr + (slot * stride_s + head * stride_h)[:, None] + d[None, :], mask=there, other=0.0).to(
        tl.float32
    )
    return x, tl.maximum(tl.sqrt(tl.sum(x * x, axis=1)), 1e-12)


@triton.jit(do_not_specialize=["tokens", "split_size", "layers"])
def _directions_kernel(
    pools_ptr,
    slots_ptr,
    partial_ptr,
    tokens,
    split_size,
    layers,
    stride_s,
    stride_h,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Sum of unit vectors over a split of the tokens, for a head of a layer: float32 ``[splits, L, Hkv, DIM_P]``."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    layer = tl.program_id(2)
    pool_ptr = layer_pool(pools_ptr, layer, DTYPE, ALIGNED)
    total = tl.zeros((DIM_P,), tl.float32)
    for start in range(split * split_size, tl.minimum((split + 1) * split_size, tokens), TILE):
        t = start + tl.arange(0, TILE)
        x, norm = _load_vectors(pool_ptr, slots_ptr, t, t < tokens, head, stride_s, stride_h, DIM, DIM_P)
        total += tl.sum(x / norm[:, None], axis=0)
    place = ((split * layers + layer) * HEADS + head).to(tl.int64) * DIM_P
    tl.store(partial_ptr + place + tl.arange(0, DIM_P), total)


@triton.jit(do_not_specialize=["splits", "tokens", "vectors"])
def _anchor_kernel(partial_ptr, anchor_ptr, splits, tokens, vectors, DIM_P: tl.constexpr):
    """Mean direction of one head as a unit vector: float32 ``[L, Hkv, DIM_P]``, ``vectors`` of them."""
    place = tl.program_id(0) * DIM_P + tl.arange(0, DIM_P)
    total = tl.zeros((DIM_P,), tl.float32)
    for split in range(splits):
        total += tl.load(partial_ptr + split * vectors * DIM_P + place)
    mean = total / tokens
    tl.store(anchor_ptr + place, mean / tl.maximum(tl.sqrt(tl.sum(mean * mean, axis=0)), 1e-12))


@triton.jit(do_not_specialize=["blocks"])
def _distinctiveness_kernel(
    pools_ptr,
    slots_ptr,
    starts_ptr,
    anchor_ptr,
    out_ptr,
    blocks,
    stride_s,
    stride_h,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCKS_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Means of a few blocks over all heads of one layer: float32 ``[L, N]``."""
    layer = tl.program_id(1)
    pool_ptr = layer_pool(pools_ptr, layer, DTYPE, ALIGNED)
    place = tl.arange(0, BLOCKS_TILE * BLOCK_P)
    n = tl.program_id(0) * BLOCKS_TILE + place // BLOCK_P
    t = tl.load(starts_ptr + n, mask=n < blocks, other=0) + place % BLOCK_P
    inside = t < tl.load(starts_ptr + n + 1, mask=n < blocks, other=0)
    alike = tl.zeros((BLOCKS_TILE * BLOCK_P,), tl.float32)
    for head in range(HEADS):
        anchor = tl.load(anchor_ptr + (layer * HEADS + head) * DIM_P + tl.arange(0, DIM_P))
        x, norm = _load_vectors(pool_ptr, slots_ptr, t, inside, head, stride_s, stride_h, DIM, DIM_P)
        alike += tl.sum(x * anchor[None, :], axis=1) / norm
    apart = tl.where(inside, 1 - alike / HEADS, 0.0)
    count = tl.sum(tl.reshape(inside.to(tl.float32), (BLOCKS_TILE, BLOCK_P)), axis=1)
    mean = tl.sum(tl.reshape(apart, (BLOCKS_TILE, BLOCK_P)), axis=1) / tl.maximum(count, 1.0)
    n = tl.program_id(0) * BLOCKS_TILE + tl.arange(0, BLOCKS_TILE)
    tl.store(out_ptr + layer.to(tl.int64) * blocks + n, mean, mask=n < blocks)


def _distinctiveness_triton(
    pools: Sequence[torch.Tensor], slots: torch.Tensor, starts: torch.Tensor, block_size: int
) -> torch.Tensor:
    """As the reference, in three passes: sums of unit vectors per split, mean directions, means per block."""
    if block_size > MAX_BLOCK_SIZE:  # a block is one tile
        return _distinctiveness_torch(pools, slots, starts, block_size)
    pool = pools[0]
    table, typed = layer_table(pools)
    if pool.stride(-1) != 1:
        raise ValueError(f"pools of strides {pool.stride()}: a head's vector must be contiguous")
    layers = len(pools)
    tokens = len(slots)
    blocks = len(starts) - 1
    _, heads, dim = pool.shape
    dim_p = triton.next_power_of_2(dim)
    block_p = triton.next_power_of_2(block_size)
    split = _SPLIT * max(1, triton.cdiv(tokens, _SPLIT * _SPLITS))
    new = functools.partial(torch.empty, dtype=torch.float32, device=pool.device)
    partial = new((triton.cdiv(tokens, split), layers, heads, dim_p))
    anchor = new((layers, heads, dim_p))
    out = new((layers, blocks))
    slots = slots.contiguous()
    strides = (pool.stride(0), pool.stride(1))
    sizes = {"HEADS": heads, "DIM": dim, "DIM_P": dim_p, **typed}
    _directions_kernel[(heads, len(partial), layers)](
        table, slots, partial, tokens, split, layers, *strides, TILE=_TILE, **sizes
    )
    _anchor_kernel[(layers * heads,)](partial, anchor, len(partial), tokens, layers * heads, DIM_P=dim_p)
    tile = max(_TILE // block_p, 1)
    _distinctiveness_kernel[(triton.cdiv(blocks, tile), layers)](
        table, slots, starts, anchor, out, blocks, *strides, BLOCK_P=block_p, BLOCKS_TILE=tile, **sizes
    )
    return out


block_distinctiveness = dispatch(_distinctiveness_torch, _distinctiveness_triton)
