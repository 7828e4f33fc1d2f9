"""The page table on the device: virtual ids to KV slots, and ids that lose their slots.

The host knows the counts, so nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dispatch import dispatch

TILE = 1024
"""Ids per program."""


def _translate_torch(v2p: torch.Tensor, virtual: torch.Tensor) -> torch.Tensor:
    """KV slots of virtual ids.

    Args:
        v2p: int64 ``[V + 1]``, the page table: 0 where an id has no slot. Id 0 is padding.
        virtual: int, any shape, virtual ids.

    Returns:
        int64 of that shape.
    """
    return v2p[virtual.long()]


def _unmap_torch(v2p: torch.Tensor, virtual: torch.Tensor, freed: torch.Tensor) -> torch.Tensor:
    """Take the KV slots of these ids away and list them, in the ids' order. Ids without a slot are passed over.

    Args:
        v2p: int64 ``[V + 1]``, the page table, changed in place.
        virtual: int ``[n]``, distinct virtual ids.
        freed: int64 ``[m]``, contiguous, written. The host knows m, how many of the ids have a slot.

    Returns:
        int64 scalar tensor on the device: how many had a slot. The caller compares it with m where it can afford to
        wait. Slots past m are lost; places past the count stay as they were.
    """
    physical = v2p[virtual.long()]
    physical = physical[physical > 0]
    v2p[virtual.long()] = 0
    n = min(len(physical), len(freed))
    freed[:n] = physical[:n]
    return torch.full((), len(physical), dtype=torch.int64, device=v2p.device)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["virtual_ptr"])
def _translate_kernel(v2p_ptr, virtual_ptr, out_ptr, count, TILE: tl.constexpr):
    """Look up one tile of ids."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    virtual = tl.load(virtual_ptr + i, mask=i < count, other=0)
    tl.store(out_ptr + i, tl.load(v2p_ptr + virtual, mask=i < count, other=0), mask=i < count)


@triton.jit(do_not_specialize=["width", "tiles"], do_not_specialize_on_alignment=["virtual_ptr"])
def count_mapped_kernel(v2p_ptr, virtual_ptr, lengths_ptr, counts_ptr, width, stride, tiles, TILE: tl.constexpr):
    """Ids with a slot, per tile of each row: int32 ``[R, tiles]``. Without lengths (None) rows are ``width`` long."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    length = width
    if lengths_ptr is not None:
        length = tl.minimum(tl.load(lengths_ptr + row).to(tl.int32), width)
    i = tile * TILE + tl.arange(0, TILE)
    virtual = tl.load(virtual_ptr + row * stride + i, mask=i < length, other=0)
    physical = tl.load(v2p_ptr + virtual, mask=i < length, other=0)
    tl.store(counts_ptr + row * tiles + tile, tl.sum((physical > 0).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["count", "room"], do_not_specialize_on_alignment=["virtual_ptr"])
def _unmap_kernel(v2p_ptr, virtual_ptr, ends_ptr, freed_ptr, count, room, TILE: tl.constexpr):
    """Unmap one tile. ``ends``: int64 ``[tiles]``, ids with a slot up to each tile's end."""
    tile = tl.program_id(0)
    i = tile * TILE + tl.arange(0, TILE)
    virtual = tl.load(virtual_ptr + i, mask=i < count, other=0)
    physical = tl.load(v2p_ptr + virtual, mask=i < count, other=0)
    mapped = (physical > 0).to(tl.int32)
    place = tl.load(ends_ptr + tile) - tl.sum(mapped, axis=0) + tl.cumsum(mapped, axis=0) - 1
    tl.store(freed_ptr + place, physical, mask=(physical > 0) & (place < room))
    tl.store(v2p_ptr + virtual, tl.zeros((TILE,), tl.int64), mask=(i < count) & (physical > 0))


def _translate_triton(v2p: torch.Tensor, virtual: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    virtual = virtual.contiguous()
    out = torch.empty(virtual.shape, dtype=v2p.dtype, device=v2p.device)
    _translate_kernel[(triton.cdiv(virtual.numel(), TILE),)](v2p, virtual, out, virtual.numel(), TILE=TILE)
    return out


def _unmap_triton(v2p: torch.Tensor, virtual: torch.Tensor, freed: torch.Tensor) -> torch.Tensor:
    """As the reference: count each tile, sum the counts, write."""
    virtual = virtual.contiguous()
    n = len(virtual)
    if n == 0:
        return torch.zeros((), dtype=torch.int64, device=v2p.device)
    tiles = triton.cdiv(n, TILE)
    counts = torch.empty(tiles, dtype=torch.int32, device=v2p.device)
    count_mapped_kernel[(1, tiles)](v2p, virtual, None, counts, n, 0, tiles, TILE=TILE)  # one row: no stride
    ends = counts.cumsum(0)
    _unmap_kernel[(tiles,)](v2p, virtual, ends, freed, n, len(freed), TILE=TILE)
    return ends[-1]


translate = dispatch(_translate_torch, _translate_triton)
unmap = dispatch(_unmap_torch, _unmap_triton)
