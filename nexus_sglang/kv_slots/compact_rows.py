"""Compact rows: per running request, the physical slots of its resident tokens, in order.

Attention reads these instead of SGLang's logical rows. Keys are cached with their rotary position applied, so leaving
evicted tokens out of the list is exact: positions are never renumbered.

A decode step only appends, which waits for nothing. A row that is rebuilt from the page table costs one wait for its
count, unless the caller knows it.
"""

from __future__ import annotations

import torch

from nexus_sglang.device import download, upload
from nexus_sglang.errors import IntegrityError
from nexus_sglang.kernels.compact_rows import compact_rows

from .page_table import PageTable
from .resident_row import ResidentRow


class CompactRows:
    """One compact row per request row of SGLang's ``ReqToTokenPool``; row 0 is padding.

    Args:
        req_to_token: int32 ``[rows, width]``, SGLang's own rows: the virtual id of each token.
        table: translates them.

    Attributes:
        slots: int32 ``[rows, width]``, physical slot of the i-th resident token.
        positions: int32 ``[rows, width]``, that token's position in the sequence.
        resident: resident tokens per row (host).
        length: tokens of the sequence so far per row, evicted ones included (host); 0 when the row is free.
        generations: generation number per row (host), raised when the row was rebuilt with an unknown count.
        seen_from: per row, first position whose query attended to exactly today's resident tokens up to its own (host).
            It stands here because rows alone know when they were rebuilt. What follows from it for a log-sum-exp is
            for ``evidence.query_window`` to say.
    """

    def __init__(self, req_to_token: torch.Tensor, table: PageTable):
        self.req_to_token = req_to_token
        self.table = table
        self.device = req_to_token.device
        self.slots = torch.zeros(req_to_token.shape, dtype=torch.int32, device=self.device)
        self.positions = torch.zeros_like(self.slots)
        self.generations = [0] * len(req_to_token)
        self.clear()

    def clear(self) -> None:
        """Forget every row."""
        rows = self.slots.shape[0]
        self.resident = [0] * rows
        self.length = [0] * rows
        self.seen_from = [0] * rows

    @property
    def active(self) -> list[int]:
        """Rows in use."""
        return [row for row, n in enumerate(self.length) if n]

    def virtual(self, row: int) -> torch.Tensor:
        """int64 ``[length]``: the row's virtual ids."""
        return self.req_to_token[row, : self.length[row]].to(torch.int64)

    def resident_positions(self, row: int) -> torch.Tensor:
        """int64 ``[resident]`` on the host: positions of the row's resident tokens; waits for the device."""
        return download(self.positions[row, : self.resident[row]]).long()

    def resident_row(self, row: int, block_size: int, blocks: int) -> ResidentRow:
        """The row's resident tokens and the blocks they are in. Waits for nothing.

        Args:
            row: request row.
            block_size: tokens per block.
            blocks: how many blocks the resident tokens are in, as the host knows it.
        """
        positions = self.positions[row, : self.resident[row]].long()
        slots = self.slots[row, : self.resident[row]].long()
        virtual = self.req_to_token[row, positions].long()
        return ResidentRow.of(row, self.length[row], self.seen_from[row], block_size, blocks, virtual, slots, positions)

    def extend_to(self, row: int, length: int) -> None:
        """The row's sequence now has ``length`` tokens, all written to ``req_to_token``."""
        self.extend([row], [length])

    def extend(self, rows: list[int], lengths: list[int]) -> None:
        """:meth:`extend_to` of several rows at once.

        A token that came alone was decoded just now, so it is mapped: it is appended, and nothing waits. Rows that got
        more are rebuilt, with one wait for all of them.

        Args:
            rows: request rows.
            lengths: tokens of each one's sequence now.
        """
        pairs = list(zip(rows, lengths, strict=True))
        grown_by_one = [(row, length - 1) for row, length in pairs if length - self.length[row] == 1]
        others = {row: self.length[row] for row, length in pairs if length - self.length[row] != 1}
        if grown_by_one:
            self._append(grown_by_one)
        for row, length in pairs:
            self.length[row] = length
        self._rebuild(list(others))
        for row, before in others.items():
            self.seen_from[row] = before  # the pass that computes these tokens reads the row as it is now

    def _append(self, tokens: list[tuple[int, int]]) -> None:
        """Append one mapped token each to some rows, given as (row, position)."""
        rows = [row for row, _ in tokens]
        ends = [self.resident[row] for row in rows]
        row, position, end = upload([rows, [position for _, position in tokens], ends], self.device)
        self.slots[row, end] = self.table.translate(self.req_to_token[row, position]).to(torch.int32)
        self.positions[row, end] = position.to(torch.int32)
        for changed in rows:
            self.resident[changed] += 1

    def rebuild(self, row: int, resident: int | None = None) -> int:
        """Read the row anew through the page table.

        Args:
            row: request row.
            resident: how many of its tokens are resident, where the caller knows; None asks the device and waits.

        Returns:
            Its resident tokens.
        """
        if resident is None:
            self._rebuild([row])
        else:
            self._rewrite(row)
            self.resident[row] = resident
        return self.resident[row]

    def rebuild_all(self) -> None:
        """Read every row anew."""
        self._rebuild(self.active)

    def _rebuild(self, rows: list[int]) -> None:
        """Rebuild these rows; one wait for all counts."""
        if not rows:
            return
        counts = download(torch.cat([self._rewrite(row) for row in rows])).tolist()
        for row, count in zip(rows, counts, strict=True):
            self.resident[row] = count
            self.generations[row] += 1

    def _rewrite(self, row: int) -> torch.Tensor:
        """Write the row from the page table; int64 ``[1]``, its resident tokens, on the device."""
        length = self.length[row]
        self.seen_from[row] = length
        here = slice(row, row + 1)
        return compact_rows(
            self.req_to_token[here],
            upload([length], self.device),
            self.table.v2p,
            self.slots[here],
            self.positions[here],
            length,
        )

    def free(self, row: int) -> None:
        """The request that held the row is gone."""
        self.resident[row] = 0
        self.length[row] = 0
        self.seen_from[row] = 0

    def check_integrity(self) -> None:
        """Check that each row equals its virtual row through the page table, evicted tokens left out, order kept.

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
