"""Compact rows: per running request, the physical slots of its resident tokens, in order.

Attention reads these instead of SGLang's logical rows. Keys are cached with their rotary position applied, so
leaving evicted tokens out of the list is exact: positions are never renumbered.
"""

from __future__ import annotations

import torch

from .page_table import IntegrityError, PageTable


class CompactRows:
    """One row per request slot of SGLang's ``ReqToTokenPool``.

    Attributes:
        slots: int32 ``[rows, width]``, physical slot of the i-th resident token; row 0 is padding.
        positions: int32 ``[rows, width]``, that token's position in the sequence.
        live: list of ints, resident tokens per row (host).
        length: list of ints, tokens of the sequence so far per row (host); 0 when the row is free.
    """

    def __init__(self, req_to_token: torch.Tensor, table: PageTable):
        rows, width = req_to_token.shape
        self.req_to_token, self.table = req_to_token, table
        self.slots = torch.zeros((rows, width), dtype=torch.int32, device=req_to_token.device)
        self.positions = torch.zeros_like(self.slots)
        self.clear()

    def clear(self) -> None:
        """Forget every row."""
        rows = self.slots.shape[0]
        self.live, self.length = [0] * rows, [0] * rows

    @property
    def active(self) -> list[int]:
        """Rows in use."""
        return [row for row, n in enumerate(self.length) if n]

    def virtual(self, row: int) -> torch.Tensor:
        """int64 ``[length]``: the row's virtual ids."""
        return self.req_to_token[row, : self.length[row]].to(torch.int64)

    def extend_to(self, row: int, length: int) -> None:
        """The row's sequence now has ``length`` tokens, all written to ``req_to_token``."""
        grown = length - self.length[row]
        if grown == 1:
            end = self.live[row]
            self.slots[row, end] = self.table.v2p[self.req_to_token[row, length - 1]]
            self.positions[row, end] = length - 1
            self.live[row], self.length[row] = end + 1, length
            return
        self.length[row] = length
        self.rebuild(row)

    def rebuild(self, row: int) -> int:
        """Read the row anew through the page table; returns its resident tokens."""
        physical = self.table.v2p[self.virtual(row)]
        positions = torch.nonzero(physical > 0).squeeze(1)
        n = len(positions)
        self.slots[row, :n] = physical[positions].to(torch.int32)
        self.positions[row, :n] = positions.to(torch.int32)
        self.live[row] = n
        return n

    def rebuild_all(self) -> None:
        """Read every row anew."""
        for row in self.active:
            self.rebuild(row)

    def free(self, row: int) -> None:
        """The request is gone."""
        self.live[row] = self.length[row] = 0

    def check_integrity(self) -> None:
        """Each row equals its virtual row through the page table, evicted dropped, order kept.

        Raises:
            IntegrityError: naming the row and the counts.
        """
        for row in self.active:
            physical = self.table.v2p[self.virtual(row)]
            positions = torch.nonzero(physical > 0).squeeze(1)
            n = self.live[row]
            same = n == len(positions) and torch.equal(self.positions[row, :n].long(), positions)
            if not same or not torch.equal(self.slots[row, :n].long(), physical[positions]):
                raise IntegrityError(
                    f"row {row}: {n} compact entries, but {len(positions)} of {self.length[row]} tokens are mapped"
                )
