"""What the host knows of a row's resident blocks without asking the device.

Which blocks an event takes is decided on the device; how many, and how many tokens they hold, on the host. The host
can say so as long as it knows that all candidates are whole. It reads a row's blocks once. After an event it no longer
knows which candidates are left, but it knows how many, and that all of them are whole: they are *unknown* blocks.
Sinks, protected prefix and recent window were no candidates, so they stay known.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import torch

from nexus_sglang.errors import IntegrityError
from nexus_sglang.kv_slots.compact_rows import CompactRows


class BlockMap:
    """Resident blocks of one row.

    Args:
        positions: int64 ``[T]`` on the host, ascending, positions of the row's resident tokens.
        block_size: tokens per block.
        length: tokens of the sequence.
        generation: the row's number in ``CompactRows.generations``.

    Attributes:
        block_size: as given.
        length: tokens of the sequence this describes.
        generation: as given; where the row has another number, others have changed it.
        index: numbers of the known blocks, ascending.
        tokens: resident tokens of each known block.
        unknown: how many more blocks there are, all whole.
        head_end: position in tokens. Unknown blocks lie between it and the first known block after it.
    """

    def __init__(self, positions: torch.Tensor, block_size: int, length: int, generation: int):
        index, tokens = torch.unique_consecutive(positions // block_size, return_counts=True)
        self.block_size = block_size
        self.length = length
        self.generation = generation
        self.index: list[int] = index.tolist()
        self.tokens: list[int] = tokens.tolist()
        self.unknown = 0
        self.head_end = 0

    @classmethod
    def read(cls, rows: CompactRows, row: int, block_size: int) -> BlockMap:
        """Ask the device, and wait, for the blocks of a request row."""
        return cls(rows.resident_positions(row), block_size, rows.length[row], rows.generations[row])

    @classmethod
    def refreshed(cls, known: BlockMap | None, rows: CompactRows, row: int, block_size: int, head_end: int) -> BlockMap:
        """A map of the row as it is now, in which all blocks before ``head_end`` are known.

        Args:
            known: an earlier map of this row, if there is one; it learns of tokens decoded since.
            rows: the rows.
            row: request row.
            block_size: tokens per block.
            head_end: position in tokens.

        Returns:
            ``known`` where that is still right, which waits for nothing; else another, read from the device.
        """
        if known is not None and known.generation == rows.generations[row]:
            known.grow(rows.length[row])
            if known.resident == rows.resident[row] and known.knows(head_end):
                return known
        return cls.read(rows, row, block_size)

    @property
    def blocks(self) -> int:
        """N, blocks with resident tokens."""
        return len(self.index) + self.unknown

    @property
    def resident(self) -> int:
        """T, resident tokens."""
        return sum(self.tokens) + self.unknown * self.block_size

    def grow(self, length: int) -> None:
        """Tokens up to ``length`` were decoded; all of them are resident."""
        while self.length < length:
            block = self.length // self.block_size
            end = min(length, (block + 1) * self.block_size)
            if self.index and self.index[-1] == block:
                self.tokens[-1] += end - self.length
            else:
                self.index.append(block)
                self.tokens.append(end - self.length)
            self.length = end

    def knows(self, head_end: int) -> bool:
        """Whether all blocks that begin before position ``head_end`` are known."""
        return not self.unknown or head_end <= self.head_end

    def resident_before(self, head_end: int) -> int:
        """Resident tokens in blocks that begin before position ``head_end``, all of which must be known."""
        return sum(self.tokens[: self._first_from(head_end)])

    def head_end_within(self, most: int) -> int:
        """How far leading blocks reach that hold at most ``most`` tokens together.

        Returns:
            The position, in tokens, at which the first known block begins that is too much; the length of the sequence
            where none is.
        """
        total = 0
        for block, tokens in zip(self.index, self.tokens, strict=True):
            total += tokens
            if total > most:
                return block * self.block_size
        return self.length

    def candidates(self, head_end: int, recent_start: int) -> tuple[int, bool]:
        """The blocks that are not forced.

        Args:
            head_end: position in tokens; blocks that begin before it are forced.
            recent_start: position in tokens; blocks that end after it are forced.

        Returns:
            How many candidates there are, and whether all of them are whole.
        """
        tokens = self.tokens[self._known_candidates(head_end, recent_start)]
        return len(tokens) + self.unknown, all(n == self.block_size for n in tokens)

    def remove_some(self, head_end: int, recent_start: int, count: int) -> None:
        """``count`` of :meth:`candidates`, all whole, were evicted; which, the host does not know."""
        candidates = self._known_candidates(head_end, recent_start)
        self.unknown += len(self.index[candidates]) - count
        del self.index[candidates]
        del self.tokens[candidates]
        self.head_end = head_end

    def remove(self, ordinals: list[int]) -> list[int]:
        """These blocks were evicted. Only where no block is unknown.

        Args:
            ordinals: ascending, places in :attr:`index`.

        Returns:
            Which of the row's T resident tokens they held, ascending.
        """
        ends = list(accumulate(self.tokens))
        places = [place for i in ordinals for place in range(ends[i] - self.tokens[i], ends[i])]
        for i in reversed(ordinals):
            del self.index[i]
            del self.tokens[i]
        return places

    def check_integrity(self, positions: torch.Tensor) -> None:
        """Compare with the row.

        Args:
            positions: int64 ``[T]`` on the host, ascending, positions of the row's resident tokens.

        Raises:
            IntegrityError: with what is known and what is there.
        """
        there = BlockMap(positions, self.block_size, self.length, self.generation)
        real = dict(zip(there.index, there.tokens, strict=True))
        known = dict(zip(self.index, self.tokens, strict=True))
        others = {block: tokens for block, tokens in real.items() if block not in known}
        in_place = all(block * self.block_size >= self.head_end for block in others)
        whole = all(tokens == self.block_size for tokens in others.values())
        if not known.items() <= real.items() or len(others) != self.unknown or not in_place or not whole:
            raise IntegrityError(
                f"block map at {self.length} tokens: known {known} and {self.unknown} unknown blocks of "
                f"{self.block_size} from position {self.head_end} on, but the row has {real}"
            )

    def _first_from(self, position: int) -> int:
        """Place in :attr:`index` of the first known block that begins at this position or later."""
        return bisect_left(self.index, -(-position // self.block_size))

    def _known_candidates(self, head_end: int, recent_start: int) -> slice:
        """Where the known candidates stand in :attr:`index`."""
        return slice(self._first_from(head_end), bisect_left(self.index, recent_start // self.block_size))
