"""Compact rows: per running request, the physical slots of its resident tokens, in order.

Attention reads these instead of SGLang's logical rows. Keys are cached with their rotary position applied, so
leaving evicted tokens out of the list is exact: positions are never renumbered.

A decode step only appends, which waits for nothing. A row that is read anew from the page table costs one wait for its
count, unless the caller knows it.
"""

from __future__ import annotations

import torch

from nexus_sglang.device import download, upload
from nexus_sglang.errors import IntegrityError
from nexus_sglang.kernels.compact_rows import compact_rows

from .page_table import PageTable


class CompactRows:
    """One row per request slot of SGLang's ``ReqToTokenPool``.

    Attributes:
        slots: int32 ``[rows, width]``, physical slot of the i-th resident token; row 0 is padding.
        positions: int32 ``[rows, width]``, that token's position in the sequence.
        resident: list of ints, resident tokens per row (host).
        length: list of ints, tokens of the sequence so far per row (host); 0 when the row is free.
        generations: list of ints, how often each row was read anew without anyone knowing its outcome (host).
        seen_from: list of ints: queries from this position on have seen the row as it is now, but for tokens that came after
            them (host).
    """

    def __init__(self, req_to_token: torch.Tensor, table: PageTable):
        rows, width = req_to_token.shape
        self.req_to_token, self.table, self.device = req_to_token, table, req_to_token.device
        self.generations = [0] * rows
        self.slots = torch.zeros((rows, width), dtype=torch.int32, device=req_to_token.device)
        self.positions = torch.zeros_like(self.slots)
        self.clear()

    def clear(self) -> None:
        """Forget every row."""
        rows = self.slots.shape[0]
        self.resident, self.length, self.seen_from = [0] * rows, [0] * rows, [0] * rows

    @property
    def active(self) -> list[int]:
        """Rows in use."""
        return [row for row, n in enumerate(self.length) if n]

    def virtual(self, row: int) -> torch.Tensor:
        """int64 ``[length]``: the row's virtual ids."""
        return self.req_to_token[row, : self.length[row]].to(torch.int64)

    def resident_positions(self, row: int) -> torch.Tensor:
        """int64 ``[live]`` on the host: positions of the row's resident tokens; waits for the device."""
        return download(self.positions[row, : self.resident[row]]).long()

    def extend_to(self, row: int, length: int) -> None:
        """The row's sequence now has ``length`` tokens, all written to ``req_to_token``."""
        self.extend([row], [length])

    def extend(self, rows: list[int], lengths: list[int]) -> None:
        """:meth:`extend_to` of several rows at once. A token that came alone was decoded just now, so it is mapped."""
        pairs = list(zip(rows, lengths, strict=True))
        one = [(row, length - 1) for row, length in pairs if length - self.length[row] == 1]
        more = {row: self.length[row] for row, length in pairs if length - self.length[row] != 1}
        if one:
            row, position, end = upload(
                [[r for r, _ in one], [p for _, p in one], [self.resident[r] for r, _ in one]], self.device
            )
            self.slots[row, end] = self.table.translate(self.req_to_token[row, position]).to(torch.int32)
            self.positions[row, end] = position.to(torch.int32)
        for row, length in pairs:
            self.resident[row] += length - self.length[row] == 1
            self.length[row] = length
        self._read(list(more))
        for row, before in more.items():
            self.seen_from[row] = before

    def rebuild(self, row: int, live: int | None = None) -> int:
        """Read the row anew through the page table.

        Args:
            live: how many of its tokens are resident, where the caller knows; None asks the device and waits.

        Returns:
            Its resident tokens.
        """
        if live is None:
            self._read([row])
        else:
            self._launch(row)
            self.resident[row] = live
        return self.resident[row]

    def rebuild_all(self) -> None:
        """Read every row anew."""
        self._read(self.active)

    def _read(self, rows: list[int]) -> None:
        """Rebuild these rows; one wait for all counts."""
        if rows:
            for row, count in zip(rows, download(torch.cat([self._launch(row) for row in rows])).tolist(), strict=True):
                self.resident[row] = count
                self.generations[row] += 1

    def _launch(self, row: int) -> torch.Tensor:
        """Write the row; int64 ``[1]``, its resident tokens, on the device."""
        here, length = slice(row, row + 1), self.length[row]
        self.seen_from[row] = length
        lengths = upload([length], self.device)
        return compact_rows(
            self.req_to_token[here], lengths, self.table.v2p, self.slots[here], self.positions[here], length
        )

    def free(self, row: int) -> None:
        """The request is gone."""
        self.resident[row] = self.length[row] = self.seen_from[row] = 0

    def check_integrity(self) -> None:
        """Each row equals its virtual row through the page table, evicted dropped, order kept.

        Raises:
            IntegrityError: naming the row and the counts.
        """
        for row in self.active:
            physical = self.table.v2p[self.virtual(row)]
            positions = torch.nonzero(physical > 0).squeeze(1)
            n = self.resident[row]
            same = n == len(positions) and torch.equal(self.positions[row, :n].long(), positions)
            if not same or not torch.equal(self.slots[row, :n].long(), physical[positions]):
                raise IntegrityError(
                    f"row {row}: {n} compact entries, but {len(positions)} of {self.length[row]} tokens are mapped"
                )
