"""The resident tokens of one row as an eviction event sees them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nexus_sglang.kernels.block_attention import block_starts


class ResidentRow(NamedTuple):
    """T resident tokens of one sequence, in order, and the N blocks they are in. Tensors are on the pool's device.

    Attributes:
        row: request row.
        length: tokens of the sequence so far, evicted ones included.
        seen_from: first position whose query attended to exactly today's resident tokens (see ``CompactRows``).
        block_size: tokens per block.
        virtual: int64 ``[T]``, virtual ids.
        slots: int64 ``[T]``, physical slots.
        positions: int64 ``[T]``, ascending, positions in the sequence.
        ordinal: int64 ``[T]``, ascending, which of the N blocks each token is in.
        starts: int32 ``[N + 1]``, which token each block begins with, and T.
        numbers: int64 ``[N]``, ascending, each block's index in the sequence (position // block size).
    """

    row: int
    length: int
    seen_from: int
    block_size: int
    virtual: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    ordinal: torch.Tensor
    starts: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(
        cls,
        row: int,
        length: int,
        seen_from: int,
        block_size: int,
        blocks: int,
        virtual: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> ResidentRow:
        """Find the blocks these tokens are in, without waiting for the device.

        ``blocks`` is how many there are, as the host knows it. Every other argument is the attribute of its name.
        """
        block = positions // block_size
        ordinal = torch.nn.functional.pad((block[1:] != block[:-1]).cumsum(0), (1, 0))
        starts = block_starts(ordinal, blocks)
        numbers = block[starts[:-1].long()]
        return cls(row, length, seen_from, block_size, virtual, slots, positions, ordinal, starts, numbers)

    @property
    def blocks(self) -> int:
        """N, known to the host."""
        return len(self.numbers)

    @property
    def first_ids(self) -> torch.Tensor:
        """int64 ``[N]``, the virtual id each block begins with."""
        return self.virtual[self.starts[:-1].long()]

    def tokens_of_whole(self, blocks: torch.Tensor) -> torch.Tensor:
        """Tokens of blocks of which none has a hole.

        Args:
            blocks: int64 ``[k]``, ordinals.

        Returns:
            int64 ``[k * block_size]``, which of the T tokens they are.
        """
        within = torch.arange(self.block_size, device=blocks.device)
        return (self.starts[blocks].long()[:, None] + within).flatten()
