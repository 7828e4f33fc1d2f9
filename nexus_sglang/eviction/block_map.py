"""What the host knows of a row's resident blocks without asking the device.

Which blocks an event takes is decided on the device; how many, and how many tokens they hold, on the host. The host can
say so as long as it knows that all blocks in question are whole. It reads a row's blocks once. After an event it no
longer knows which of the blocks that were up for eviction are left, but it knows how many, and that all of them are
whole: they are *hidden*. Sinks, protected prefix and recent window were never up for eviction, so they stay known.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import torch

from nexus_sglang.errors import IntegrityError


class BlockMap:
    """Blocks of one row.

    Attributes:
        reading: ``CompactRows.generations`` of the row when it was read; another number means it changed otherwise.
        index, tokens: known blocks, ascending, and how many resident tokens each has.
        hidden: whole blocks of which only the number is known.
        head: hidden blocks stand at this position (in tokens) or later, and before the known blocks that do too.
        length: tokens of the sequence it describes.
    """

    def __init__(self, positions: torch.Tensor, block_size: int, length: int, generation: int):
        """``positions``: int64 ``[T]`` on the host, the row's resident tokens."""
        index, tokens = torch.unique_consecutive(positions // block_size, return_counts=True)
        self.size, self.length, self.generation = block_size, length, generation
        self.index: list[int] = index.tolist()
        self.tokens: list[int] = tokens.tolist()
        self.hidden = self.head = 0

    @property
    def blocks(self) -> int:
        """Blocks with resident tokens, N."""
        return len(self.index) + self.hidden

    @property
    def resident(self) -> int:
        """Resident tokens."""
        return sum(self.tokens) + self.hidden * self.size

    def grow(self, length: int) -> None:
        """Tokens up to ``length`` were decoded; all of them are resident."""
        while self.length < length:
            block = self.length // self.size
            end = min(length, (block + 1) * self.size)
            if self.index and self.index[-1] == block:
                self.tokens[-1] += end - self.length
            else:
                self.index.append(block)
                self.tokens.append(end - self.length)
            self.length = end

    def knows(self, head: int) -> bool:
        """Whether all blocks that begin before position ``head`` are known."""
        return not self.hidden or head <= self.head

    def held(self, head: int) -> int:
        """Resident tokens in blocks that begin before position ``head``."""
        return sum(self.tokens[: self._first(head)])

    def fit(self, limit: int) -> int:
        """Where the leading blocks end that hold at most ``limit`` tokens together: a position, of a known block."""
        total = 0
        for block, tokens in zip(self.index, self.tokens, strict=True):
            total += tokens
            if total > limit:
                return block * self.size
        return self.length

    def candidates(self, head: int, recent: int) -> tuple[int, bool]:
        """Blocks from position ``head`` to ``recent`` (whole blocks within), and whether each of them is whole."""
        free = slice(self._first(head), bisect_left(self.index, recent // self.size))
        tokens = self.tokens[free]
        return len(tokens) + self.hidden, all(n == self.size for n in tokens)

    def hide(self, head: int, recent: int, gone: int) -> None:
        """``gone`` of :meth:`candidates`, all whole, were evicted; which, the host does not know."""
        free = slice(self._first(head), bisect_left(self.index, recent // self.size))
        self.hidden += len(self.index[free]) - gone
        del self.index[free], self.tokens[free]
        self.head = head

    def drop(self, ordinals: list[int]) -> list[int]:
        """These blocks were evicted. Only where no block is hidden.

        Args:
            ordinals: ascending, places in :attr:`index`.

        Returns:
            Which of the row's resident tokens they held, ascending, counted before they went.
        """
        ends = list(accumulate(self.tokens))
        places = [place for i in ordinals for place in range(ends[i] - self.tokens[i], ends[i])]
        gone = set(ordinals)
        left = [i for i in range(len(self.index)) if i not in gone]
        self.index, self.tokens = [self.index[i] for i in left], [self.tokens[i] for i in left]
        return places

    def check_integrity(self, positions: torch.Tensor) -> None:
        """Compare with ``positions`` (int64 ``[T]`` on the host), the row's resident tokens.

        Raises:
            IntegrityError: with what is known and what is there.
        """
        there = BlockMap(positions, self.size, self.length, self.generation)
        real, known = (dict(zip(x.index, x.tokens, strict=True)) for x in (there, self))
        rest = {block: tokens for block, tokens in real.items() if block not in known}
        hidden = all(tokens == self.size and block * self.size >= self.head for block, tokens in rest.items())
        if not known.items() <= real.items() or len(rest) != self.hidden or not hidden:
            raise IntegrityError(
                f"block map at {self.length} tokens: known {known} and {self.hidden} hidden blocks of {self.size} "
                f"from position {self.head} on, but the row has {real}"
            )

    def _first(self, head: int) -> int:
        """Place of the first known block that begins at position ``head`` or later."""
        return bisect_left(self.index, -(-head // self.size))
