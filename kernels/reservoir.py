"""The weighted reservoir, for a batch of requests: random draws, a priority per block, and the blocks' ranks.

A reservoir of K blocks is the K blocks of the highest priority. The server runs it in these two steps: a policy asks
for :data:`priorities`, and the evictor for the :data:`ranks` of what the policy returned. It keeps the first K and
evicts the rest. Nothing here waits for the device.

Draws are the same bits on torch and on Triton, on any device, and so are the ranks of given values. Priorities go
through a logarithm, and libraries differ in its last bits. Two devices can therefore rank two blocks differently only
where their priorities agree to about 13 digits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .dispatch import dispatch

LAWS = ("exponential-keys", "sequential-poisson")
"""Sampling laws of :data:`priorities`."""
_LOW = 0xFFFFFFFF
_TILE = 256
_RANK_TILE = 64


def _draw_torch(seed: int, identity: torch.Tensor, events: torch.Tensor, draws: int) -> torch.Tensor:
    """Uniform numbers strictly inside (0, 1): Philox 4x32-10 (Salmon et al., SC 2011), first word.

    Args:
        seed: the key, 64 bits.
        identity: int64 ``[B, N]``, a hash of each block's tokens and position: counter words 0 and 1.
        events: int64 ``[B]``, each sequence's length at this event in tokens: word 2.
        draws: n, numbers per block; the draw's number is word 3.

    Returns:
        float64 ``[B, n, N]``, ``(word + 0.5) / 2**32``: the same bits everywhere.
    """
    number = torch.arange(draws, dtype=torch.int64, device=identity.device)[None, :, None]
    words = (identity[:, None] & _LOW, (identity[:, None] >> 32) & _LOW, events[:, None, None] & _LOW, number)
    c0, c1, c2, c3 = torch.broadcast_tensors(*words)
    k0 = seed & _LOW
    k1 = (seed >> 32) & _LOW
    for _ in range(10):
        # The products wrap in int64, but their 64 bits are those of the unsigned products.
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0 = ((p1 >> 32) & _LOW) ^ c1 ^ k0
        c2 = ((p0 >> 32) & _LOW) ^ c3 ^ k1
        c1 = p1 & _LOW
        c3 = p0 & _LOW
        k0 = (k0 + 0x9E3779B9) & _LOW
        k1 = (k1 + 0xBB67AE85) & _LOW
    return (c0.double() + 0.5) * 2.0**-32


def _priorities_torch(
    weights: torch.Tensor,
    identity: torch.Tensor,
    events: torch.Tensor,
    lengths: torch.Tensor,
    seed: int,
    law: str,
    draws: int = 1,
    beta: float = 1.0,
) -> torch.Tensor:
    """Priorities of weighted sampling without replacement, in logs; the largest are kept.

    ``exponential-keys``: log of the mean over the draws of ``u**(1/w)`` (arXiv 2606.23961; one draw is
    Efraimidis-Spirakis 2006). ``sequential-poisson``: log of ``w**beta / u`` (Ohlsson 1998; Duffield, Lund, Thorup
    2007).

    Args:
        weights: float ``[B, N]``, non-negative.
        identity: int64 ``[B, N]``, as for :data:`draw`.
        events: int64 ``[B]``, as for :data:`draw`.
        lengths: int ``[B]``, blocks of each request; the rest is padding.
        seed: 64 bits, as for :data:`draw`.
        law: one of :data:`LAWS`.
        draws: uniform numbers per block that exponential keys average; sequential Poisson takes the first.
        beta: sharpness of sequential Poisson.

    Returns:
        float64 ``[B, N]``; -inf for a zero weight (sequential Poisson with beta 0 excepted) and for padding.

    Raises:
        ValueError: an unknown law.
    """
    _check_law(law)
    w = weights.double()
    log_u = _draw_torch(seed, identity, events, draws if law == "exponential-keys" else 1).log()
    if law == "exponential-keys":
        keys = torch.logsumexp(log_u / w.clamp_min(1e-300)[:, None], dim=1) - math.log(draws)
        keys = torch.where(w > 0, keys, -torch.inf)
    else:
        # 0 * -inf would be NaN
        keys = (beta * w.log() if beta else torch.zeros_like(w)) - log_u[:, 0]
    return torch.where(torch.arange(w.shape[1], device=w.device) < lengths[:, None], keys, -torch.inf)


def _ranks_torch(values: torch.Tensor, eligible: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Place of each eligible block in descending order; among equals the newer (higher index) comes first.

    Args:
        values: float64 ``[B, N]``, no NaN.
        eligible: bool ``[B, N]``; other blocks take no place.
        lengths: int ``[B]``, blocks of each request; the rest is padding.

    Returns:
        int32 ``[B, N]``, from 0; N where a block is not eligible or padding.
    """
    n = values.shape[1]
    index = torch.arange(n, device=values.device)
    eligible = eligible & (index < lengths[:, None])
    order = torch.argsort(values.flip(1), dim=1, descending=True, stable=True)
    outside = ~eligible.flip(1).gather(1, order)
    order = order.gather(1, torch.argsort(outside, dim=1, stable=True))
    ranks = torch.empty((len(values), n), dtype=torch.int32, device=values.device)
    ranks.scatter_(1, n - 1 - order, index.to(torch.int32).expand(len(values), n))
    return torch.where(eligible, ranks, n)


def _check_law(law: str) -> None:
    """Raise ValueError for a law that is none of :data:`LAWS`."""
    if law not in LAWS:
        raise ValueError(f"law {law!r} is not one of {', '.join(LAWS)}")


@triton.jit
def _uniform(identity, event, number, k0, k1):
    """float64 in (0, 1). Words are kept in 64 bits, so products are exact and high halves are shifts."""
    low = tl.full((), 0xFFFFFFFF, tl.uint64)
    bits = identity.to(tl.uint64)
    c0 = bits & low
    c1 = bits >> 32
    c2 = (event.to(tl.uint64) & low) + c0 * 0
    c3 = number.to(tl.uint64) + c0 * 0
    k0 = k0.to(tl.uint64) & low
    k1 = k1.to(tl.uint64) & low
    for _ in tl.static_range(10):
        p0 = c0 * tl.full((), 0xD2511F53, tl.uint64)
        p1 = c2 * tl.full((), 0xCD9E8D57, tl.uint64)
        c0 = (p1 >> 32) ^ c1 ^ k0
        c2 = (p0 >> 32) ^ c3 ^ k1
        c1 = p1 & low
        c3 = p0 & low
        k0 = (k0 + tl.full((), 0x9E3779B9, tl.uint64)) & low
        k1 = (k1 + tl.full((), 0xBB67AE85, tl.uint64)) & low
    return (c0.to(tl.float64) + 0.5) * tl.full((), 2.3283064365386963e-10, tl.float64)  # 2**-32


@triton.jit(do_not_specialize=["blocks", "draws", "k0", "k1"])
def _draw_kernel(identity_ptr, events_ptr, out_ptr, blocks, draws, k0, k1, TILE: tl.constexpr):
    """One draw of one tile of a request's blocks."""
    b = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    n = tl.program_id(2) * TILE + tl.arange(0, TILE)
    identity = tl.load(identity_ptr + b * blocks + n, mask=n < blocks, other=0)
    u = _uniform(identity, tl.load(events_ptr + b), number, k0, k1)
    tl.store(out_ptr + (b * draws + number) * blocks + n, u, mask=n < blocks)


@triton.jit(do_not_specialize=["blocks", "k0", "k1"])
def _priorities_kernel(
    weights_ptr,
    identity_ptr,
    events_ptr,
    lengths_ptr,
    out_ptr,
    blocks,
    k0,
    k1,
    TILE: tl.constexpr,
    DRAWS: tl.constexpr,
    LOG_DRAWS: tl.constexpr,
    BETA: tl.constexpr,
    EXPONENTIAL: tl.constexpr,
):
    """Priorities of one tile of a request's blocks."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = n < tl.load(lengths_ptr + b)
    w = tl.load(weights_ptr + b * blocks + n, mask=there, other=1.0).to(tl.float64)
    identity = tl.load(identity_ptr + b * blocks + n, mask=there, other=0)
    event = tl.load(events_ptr + b)
    first = tl.full((), 0, tl.int32)
    if EXPONENTIAL:
        safe = tl.maximum(w, tl.full((), 1e-300, tl.float64))
        top = tl.log(_uniform(identity, event, first, k0, k1)) / safe
        for i in range(1, DRAWS):
            top = tl.maximum(top, tl.log(_uniform(identity, event, first + i, k0, k1)) / safe)
        total = tl.zeros((TILE,), tl.float64)
        # Drawing again costs less than keeping n draws.
        for i in range(DRAWS):
            total += tl.exp(tl.log(_uniform(identity, event, first + i, k0, k1)) / safe - top)
        keys = top + tl.log(total) - tl.full((), LOG_DRAWS, tl.float64)
        keys = tl.where(w > 0, keys, float("-inf"))
    else:
        keys = -tl.log(_uniform(identity, event, first, k0, k1))
        if BETA != 0:
            log_w = tl.log(tl.where(w > 0, w, 1.0))
            keys = tl.where(w > 0, tl.full((), BETA, tl.float64) * log_w + keys, float("-inf"))
    tl.store(out_ptr + b * blocks + n, tl.where(there, keys, float("-inf")), mask=n < blocks)


@triton.jit(do_not_specialize=["blocks"])
def _ranks_kernel(values_ptr, eligible_ptr, lengths_ptr, out_ptr, blocks, TILE: tl.constexpr):
    """Counts who comes before: N**2 comparisons in tiles, exact, no sort, no order between programs."""
    b = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    i = tl.program_id(1) * TILE + lane
    length = tl.load(lengths_ptr + b).to(tl.int32)
    mine = tl.load(values_ptr + b * blocks + i, mask=i < length, other=0.0)
    allowed = tl.load(eligible_ptr + b * blocks + i, mask=i < length, other=0) != 0
    rank = tl.zeros((TILE,), tl.int32)
    for start in range(0, length, TILE):
        j = start + lane
        other = tl.load(values_ptr + b * blocks + j, mask=j < length, other=0.0)
        counts = tl.load(eligible_ptr + b * blocks + j, mask=j < length, other=0) != 0
        newer = (other[None, :] == mine[:, None]) & (j[None, :] > i[:, None])
        before = counts[None, :] & ((other[None, :] > mine[:, None]) | newer)
        rank += tl.sum(before.to(tl.int32), axis=1)
    tl.store(out_ptr + b * blocks + i, tl.where(allowed, rank, blocks), mask=i < blocks)


def _draw_triton(seed: int, identity: torch.Tensor, events: torch.Tensor, draws: int) -> torch.Tensor:
    """As the reference."""
    batch, blocks = identity.shape
    out = torch.empty((batch, draws, blocks), dtype=torch.float64, device=identity.device)
    grid = (batch, draws, triton.cdiv(blocks, _TILE))
    keys = (seed & _LOW, (seed >> 32) & _LOW)
    _draw_kernel[grid](identity.contiguous(), events.contiguous(), out, blocks, draws, *keys, TILE=_TILE)
    return out


def _priorities_triton(
    weights: torch.Tensor,
    identity: torch.Tensor,
    events: torch.Tensor,
    lengths: torch.Tensor,
    seed: int,
    law: str,
    draws: int = 1,
    beta: float = 1.0,
) -> torch.Tensor:
    """As the reference."""
    _check_law(law)
    out = torch.empty(weights.shape, dtype=torch.float64, device=weights.device)
    # Floats go in as constants: as arguments Triton would pass them in single precision.
    _priorities_kernel[(len(weights), triton.cdiv(weights.shape[1], _TILE))](
        weights.contiguous(),
        identity.contiguous(),
        events.contiguous(),
        lengths.contiguous(),
        out,
        weights.shape[1],
        seed & _LOW,
        (seed >> 32) & _LOW,
        TILE=_TILE,
        DRAWS=draws,
        LOG_DRAWS=math.log(draws),
        BETA=float(beta),
        EXPONENTIAL=law == "exponential-keys",
    )
    return out


def _ranks_triton(values: torch.Tensor, eligible: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    out = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    grid = (len(values), triton.cdiv(values.shape[1], _RANK_TILE))
    values = values.contiguous()
    _ranks_kernel[grid](values, eligible.contiguous(), lengths.contiguous(), out, values.shape[1], TILE=_RANK_TILE)
    return out


draw = dispatch(_draw_torch, _draw_triton)
priorities = dispatch(_priorities_torch, _priorities_triton)
ranks = dispatch(_ranks_torch, _ranks_triton)
