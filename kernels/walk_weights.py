"""Weights from the window's rows, for a batch of requests: their mean, a walk, a tie-break (arXiv 2606.23961)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dispatch import dispatch

_CELLS = 2048
"""Numbers of double precision in a program's tile: 16 per thread."""
_TINY = 1e-300
"""What a row is divided by where its sum is 0."""


def normalise_rows(rows: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Scale each row to sum 1 over the blocks of ``mask``.

    Args:
        rows: float ``[W, N]``, non-negative.
        mask: bool ``[N]``, the blocks that take part, or None for all of them.

    Returns:
        float64 ``[W, N]``, 0 for the other blocks. A row without mass stays 0.
    """
    rows = rows.double()
    if mask is not None:
        rows = rows * mask
    return rows / rows.sum(dim=1, keepdim=True).clamp_min(_TINY)


def walk(rows: torch.Tensor, steps: int) -> torch.Tensor:
    """The walk term of arXiv 2606.23961: blocks that successive queries agree on gain.

    ``C(0) = 0; C <- C + (1 + <r, C>) r`` over the newest ``steps`` rows, newest last, then ``C / |C|_1``. The paper
    does not say which rows.

    Args:
        rows: float64 ``[W, N]``, each row summing to 1, oldest first.
        steps: rows to take, H in the paper; 0 gives zeros.

    Returns:
        float64 ``[N]`` summing to 1, or 0 where ``steps`` is 0 or the rows have no mass.
    """
    state = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for row in rows[max(len(rows) - steps, 0) :]:
        state = state + (1 + torch.dot(row, state)) * row
    return state / state.sum().clamp_min(_TINY)


def _walk_torch(
    rows: torch.Tensor,
    windows: torch.Tensor,
    lengths: torch.Tensor,
    candidates: torch.Tensor,
    steps: int,
    walk_weight: float,
    recency_eps: float,
) -> torch.Tensor:
    """Weights of a batch of requests: mean of the normalised rows + ``walk_weight`` * :func:`walk` + a tie-break.

    The tie-break for the newer is ``recency_eps * j / (N - 1)`` for the j-th of N blocks.

    Args:
        rows: float ``[B, W, N]``, block attention of each window's queries, oldest first.
        windows: int ``[B]``, rows of each request, from 1; the rest is padding.
        lengths: int ``[B]``, blocks of each request; the rest is padding.
        candidates: bool ``[B, N]``, the blocks decided about; other blocks take no part in rows and walk.
        steps: rows the walk takes, H in the paper.
        walk_weight: factor of the walk, lambda in the paper.
        recency_eps: what the newest block gains, eps in the paper.

    Returns:
        float64 ``[B, N]``; padding is 0.
    """
    out = torch.zeros((rows.shape[0], rows.shape[2]), dtype=torch.float64, device=rows.device)
    for b, (window, n) in enumerate(zip(windows.tolist(), lengths.tolist(), strict=True)):
        normal = normalise_rows(rows[b, :window, :n], candidates[b, :n])
        ramp = torch.arange(n, dtype=torch.float64, device=rows.device)
        recency = recency_eps * ramp / max(n - 1, 1)
        out[b, :n] = normal.mean(dim=0) + walk_weight * walk(normal, steps) + recency
    return out


@triton.jit
def _load_tile(rows_ptr, candidates_ptr, b, w, n, window, length, width, blocks):
    """float64 ``[W_P, TILE]`` of request b; 0 for padding and for blocks that are no candidates."""
    allowed = tl.load(candidates_ptr + b * blocks + n, mask=n < length, other=0) != 0
    there = (w < window)[:, None] & allowed[None, :]
    return tl.load(rows_ptr + (b * width + w)[:, None] * blocks + n[None, :], mask=there, other=0.0).to(tl.float64)


@triton.jit(do_not_specialize=["width", "blocks"])
def _walk_kernel(
    rows_ptr,
    windows_ptr,
    lengths_ptr,
    candidates_ptr,
    out_ptr,
    width,
    blocks,
    W_P: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    WALK_WEIGHT: tl.constexpr,
    EPS: tl.constexpr,
):
    """One program per request. C is a combination of rows, so only its coefficients are kept, never C itself."""
    b = tl.program_id(0).to(tl.int64)
    window = tl.load(windows_ptr + b).to(tl.int32)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    w = tl.arange(0, W_P)
    lane = tl.arange(0, TILE)
    tiny = tl.full((), 1e-300, tl.float64)
    sums = tl.zeros((W_P,), tl.float64)
    for start in range(0, length, TILE):
        tile = _load_tile(rows_ptr, candidates_ptr, b, w, start + lane, window, length, width, blocks)
        sums += tl.sum(tile, axis=1)
    divisor = tl.maximum(sums, tiny)

    gamma = tl.zeros((W_P,), tl.float64)
    for q in range(tl.maximum(window - STEPS, 0), window):
        inner = tl.full((), 0.0, tl.float64)
        for start in range(0, length, TILE):
            tile = _load_tile(rows_ptr, candidates_ptr, b, w, start + lane, window, length, width, blocks)
            tile = tile / divisor[:, None]
            state = tl.sum(tile * gamma[:, None], axis=0)
            row = tl.sum(tl.where((w == q)[:, None], tile, 0.0), axis=0)
            inner += tl.sum(row * state, axis=0)
        gamma = tl.where(w == q, 1.0 + inner, gamma)

    scale = tl.full((), WALK_WEIGHT, tl.float64) / tl.maximum(tl.sum(gamma * (sums / divisor), axis=0), tiny)
    share = (w < window).to(tl.float64) / window.to(tl.float64) + gamma * scale
    ramp = tl.full((), EPS, tl.float64) / tl.maximum(length - 1, 1).to(tl.float64)
    for start in range(0, length, TILE):
        n = start + lane
        tile = _load_tile(rows_ptr, candidates_ptr, b, w, n, window, length, width, blocks)
        weights = tl.sum(tile / divisor[:, None] * share[:, None], axis=0) + ramp * n.to(tl.float64)
        tl.store(out_ptr + b * blocks + n, weights, mask=n < length)


def _walk_triton(
    rows: torch.Tensor,
    windows: torch.Tensor,
    lengths: torch.Tensor,
    candidates: torch.Tensor,
    steps: int,
    walk_weight: float,
    recency_eps: float,
) -> torch.Tensor:
    """As the reference."""
    batch, width, blocks = rows.shape
    out = torch.zeros((batch, blocks), dtype=torch.float64, device=rows.device)
    rows_p = max(triton.next_power_of_2(width), 16)
    # Floats go in as constants: as arguments Triton would pass them in single precision. W_P is not below 16, so that a
    # window that is not full yet takes the kernel compiled for a full one.
    _walk_kernel[(batch,)](
        rows.contiguous(),
        windows,
        lengths,
        candidates.contiguous(),
        out,
        width,
        blocks,
        W_P=rows_p,
        TILE=max(_CELLS // rows_p, 4),
        STEPS=int(steps),
        WALK_WEIGHT=float(walk_weight),
        EPS=float(recency_eps),
        num_warps=4,
    )
    return out


walk_weights = dispatch(_walk_torch, _walk_triton)
