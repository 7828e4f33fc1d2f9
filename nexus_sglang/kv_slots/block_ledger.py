"""What is remembered about a block, kept per virtual slot so that it follows the token through splits and shares."""

from __future__ import annotations

import torch


class BlockLedger:
    """Per-slot state of policies.

    A block's record is written on every slot of the block, so a radix-tree node that is split in the middle
    of a block leaves both halves with it.

    Attributes:
        state: float32 ``[virtual_size + 1, width]``; NaN where no event has judged the token.
        weight: float32 ``[virtual_size + 1]``, the block's weight at its last event; NaN before that.
    """

    def __init__(self, virtual_size: int, width: int, device: str | torch.device = "cpu"):
        self.state = torch.full((virtual_size + 1, width), torch.nan, device=device)
        self.weight = torch.full((virtual_size + 1,), torch.nan, device=device)

    def clear(self) -> None:
        self.state.fill_(torch.nan)
        self.weight.fill_(torch.nan)

    def forget(self, virtual: torch.Tensor) -> None:
        """These ids name new tokens now."""
        # Not by indexing: on a GPU that makes a number on the CPU and waits for its copy, at every allocation.
        self.state.index_fill_(0, virtual, torch.nan)
        self.weight.index_fill_(0, virtual, torch.nan)

    def read(self, first: torch.Tensor) -> torch.Tensor:
        """float32 ``[N, width]`` for the blocks whose first resident slot is ``first`` (int64 ``[N]``)."""
        return self.state[first]

    def write(
        self,
        slots: torch.Tensor,
        block: torch.Tensor,
        weights: torch.Tensor,
        state: torch.Tensor | None,
        judged: torch.Tensor,
    ):
        """Record an event.

        Args:
            slots: int64 ``[T]``, virtual ids of the resident tokens, distinct.
            block: int64 ``[T]``, row of ``weights`` each belongs to.
            weights: float ``[N]``. state: float32 ``[N, width]`` or None.
            judged: bool ``[T]``; other tokens keep their record.
        """
        self.weight[slots] = torch.where(judged, weights.float()[block], self.weight[slots])
        if state is not None:
            self.state[slots] = torch.where(judged[:, None], state.float()[block], self.state[slots])
