"""Write the queries of a forward pass, and their log-sum-exp, into the rings of their requests. One launch per layer.

It is part of every decode step, and may be recorded into a CUDA graph: which places are written is read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dispatch import dispatch

TILE = 2048
"""Numbers of one query per program."""


def _check(ring: torch.Tensor, queries: torch.Tensor, lse_ring: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    """Arguments as for :data:`keep_queries`. Raises ValueError naming the one that does not fit."""
    if queries.shape[1:] != ring.shape[2:] or queries.dtype != ring.dtype:
        raise ValueError(
            f"queries {tuple(queries.shape)} of {queries.dtype} do not fit a ring {tuple(ring.shape)} of {ring.dtype}"
        )
    if not ring[0, 0].is_contiguous() or (lse_ring is not None and lse_ring.stride(-1) != 1):
        raise ValueError(f"ring of strides {ring.stride()}: a query's place in it must be contiguous")
    if (lse_ring is None) != (lse is None):
        raise ValueError("lse and lse_ring: give both or neither")
    if lse is None or lse_ring is None:
        return
    if lse.shape != queries.shape[:2] or lse_ring.shape != ring.shape[:3]:
        raise ValueError(f"lse {tuple(lse.shape)} and lse_ring {tuple(lse_ring.shape)} do not fit queries and ring")


def _keep_torch(
    ring: torch.Tensor,
    queries: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor | None = None,
    lse_ring: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Copy the queries of some tokens to ``ring[rows, places]``, and their log-sum-exp likewise.

    Args:
        ring: float ``[R, W, Hq, D]``, of one layer, written.
        queries: ``[T, Hq, D]`` of the same dtype.
        rows: int64 ``[n]``, the request row each query goes to.
        places: int64 ``[n]``, the place in that row's ring. A place that comes twice holds parts of either query.
        tokens: int64 ``[n]``, which of the T tokens they are; None: the first n.
        lse_ring: float32 ``[R, W, Hq]``, written; None where ``lse`` is.
        lse: float32 ``[T, Hq]``, log-sum-exp of each query's scaled scores, to any base, or None.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    _check(ring, queries, lse_ring, lse)
    chosen = slice(len(rows)) if tokens is None else tokens
    ring[rows, places] = queries[chosen]
    if lse is not None and lse_ring is not None:
        lse_ring[rows, places] = lse[chosen]


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "places_ptr", "tokens_ptr"])
def _keep_kernel(
    ring_ptr,
    queries_ptr,
    rows_ptr,
    places_ptr,
    tokens_ptr,
    lse_ring_ptr,
    lse_ptr,
    ring_stride_r,
    ring_stride_w,
    queries_stride,
    lse_ring_stride_r,
    lse_ring_stride_w,
    lse_stride_t,
    lse_stride_h,
    NUMBERS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_P: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy one tile of one query; the first tile takes the log-sum-exp along."""
    i = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(rows_ptr + i)
    place = tl.load(places_ptr + i)
    token = i.to(tl.int64)
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + i)
    at = tile * TILE + tl.arange(0, TILE)
    query = tl.load(queries_ptr + token * queries_stride + at, mask=at < NUMBERS)
    tl.store(ring_ptr + row * ring_stride_r + place * ring_stride_w + at, query, mask=at < NUMBERS)
    if lse_ptr is not None:
        head = tl.arange(0, HEADS_P)
        first = (tile == 0) & (head < HEADS)
        lse = tl.load(lse_ptr + token * lse_stride_t + head * lse_stride_h, mask=first)
        tl.store(lse_ring_ptr + row * lse_ring_stride_r + place * lse_ring_stride_w + head, lse, mask=first)


def _keep_triton(
    ring: torch.Tensor,
    queries: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor | None = None,
    lse_ring: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """As the reference."""
    _check(ring, queries, lse_ring, lse)
    heads, dim = queries.shape[1:]
    if queries.stride()[1:] != (dim, 1):
        queries = queries.contiguous()
    if len(rows) == 0:
        return
    lse_strides = (0, 0, 0, 0) if lse is None or lse_ring is None else (*lse_ring.stride()[:2], *lse.stride())
    tile = min(TILE, triton.next_power_of_2(heads * dim))
    _keep_kernel[(len(rows), triton.cdiv(heads * dim, tile))](
        ring,
        queries,
        rows,
        places,
        tokens,
        lse_ring,
        lse,
        *ring.stride()[:2],
        queries.stride(0),
        *lse_strides,
        NUMBERS=heads * dim,
        HEADS=heads,
        HEADS_P=triton.next_power_of_2(heads),
        TILE=tile,
    )


keep_queries = dispatch(_keep_torch, _keep_triton)
