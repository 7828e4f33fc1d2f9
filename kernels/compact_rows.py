"""Compact rows of many requests at once: the KV slots of their resident tokens, in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dispatch import dispatch
from .page_table import TILE, count_mapped_kernel


def _compact_torch(
    virtual: torch.Tensor,
    lengths: torch.Tensor,
    v2p: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    longest: int | None = None,
) -> torch.Tensor:
    """KV slots and positions of each row's resident tokens.

    Args:
        virtual: int ``[R, width]``, virtual ids per row.
        lengths: int ``[R]``, tokens per row; what stands behind them is ignored.
        v2p: int64 ``[V + 1]``, the page table: a virtual id's KV slot, 0 where evicted.
        slots: int32 ``[R, width]``, contiguous, written from the left; the rest stays as it was.
        positions: int32 ``[R, width]``, contiguous, likewise: each resident token's position in its row.
        longest: a bound of the lengths that the host knows, in tokens; the smaller, the less is launched. None: width.

    Returns:
        int64 ``[R]``: entries written per row.
    """
    counts = []
    for row, length in enumerate(lengths.tolist()):
        physical = v2p[virtual[row, :length].long()]
        mapped = torch.nonzero(physical > 0).squeeze(1)
        slots[row, : len(mapped)] = physical[mapped].to(slots.dtype)
        positions[row, : len(mapped)] = mapped.to(positions.dtype)
        counts.append(len(mapped))
    return torch.tensor(counts, dtype=torch.int64, device="cpu").to(v2p.device)


@triton.jit(
    do_not_specialize=["width", "tiles"], do_not_specialize_on_alignment=["virtual_ptr", "slots_ptr", "positions_ptr"]
)
def _compact_kernel(
    v2p_ptr, virtual_ptr, lengths_ptr, ends_ptr, slots_ptr, positions_ptr, width, stride, tiles, TILE: tl.constexpr
):
    """Write one tile of one row. ``ends``: int64 ``[R, tiles]``, resident tokens of the row up to each tile's end."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    i = tile * TILE + tl.arange(0, TILE)
    virtual = tl.load(virtual_ptr + row * stride + i, mask=i < length, other=0)
    physical = tl.load(v2p_ptr + virtual, mask=i < length, other=0)
    mapped = (physical > 0).to(tl.int32)
    place = tl.load(ends_ptr + row * tiles + tile) - tl.sum(mapped, axis=0) + tl.cumsum(mapped, axis=0) - 1
    tl.store(slots_ptr + row * width + place, physical.to(tl.int32), mask=physical > 0)
    tl.store(positions_ptr + row * width + place, i, mask=physical > 0)


def _compact_triton(
    virtual: torch.Tensor,
    lengths: torch.Tensor,
    v2p: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    longest: int | None = None,
) -> torch.Tensor:
    """As the reference: count each tile, sum the counts, write."""
    rows, width = virtual.shape
    if virtual.stride(1) != 1 or not (slots.is_contiguous() and positions.is_contiguous()):
        raise ValueError("a row of virtual ids must be contiguous, and so must slots and positions")
    tiles = triton.cdiv(width if longest is None else min(longest, width), TILE)
    if rows == 0 or tiles == 0:
        return torch.zeros(rows, dtype=torch.int64, device=v2p.device)
    counts = torch.empty((rows, tiles), dtype=torch.int32, device=v2p.device)
    lengths = lengths.contiguous()
    stride = virtual.stride(0)
    count_mapped_kernel[(rows, tiles)](v2p, virtual, lengths, counts, width, stride, tiles, TILE=TILE)
    ends = counts.cumsum(1)
    _compact_kernel[(rows, tiles)](v2p, virtual, lengths, ends, slots, positions, width, stride, tiles, TILE=TILE)
    return ends[:, -1].contiguous()


compact_rows = dispatch(_compact_torch, _compact_triton)
