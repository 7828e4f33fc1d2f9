"""What is remembered about a block, kept with virtual ids so that it follows the tokens through splits and shares."""

from __future__ import annotations

import torch


class BlockLedger:
    """What past events found about blocks, for each virtual id.

    A block's record is written on every token of the block, so a radix-tree node that is split in the middle of a block
    leaves both halves with it.

    Args:
        virtual_size: virtual ids 1 to ``virtual_size`` exist.
        width: floats of state the policy keeps per block.
        device: where the records are.

    Attributes:
        state: float32 ``[virtual_size + 1, width]``, the policy's state; NaN where no event has judged the token.
        weight: float32 ``[virtual_size + 1]``, the block's weight at its last event; NaN before that.
    """

    def __init__(self, virtual_size: int, width: int, device: str | torch.device = "cpu"):
        self.state = torch.full((virtual_size + 1, width), torch.nan, device=device)
        self.weight = torch.full((virtual_size + 1,), torch.nan, device=device)

    def clear(self) -> None:
        """Forget everything."""
        self.state.fill_(torch.nan)
        self.weight.fill_(torch.nan)

    def forget(self, virtual: torch.Tensor) -> None:
        """These ids (int64 ``[n]``) stand for new tokens now."""
        # Not by indexing: on a GPU that makes a number on the CPU and waits for its copy, at every allocation.
        self.state.index_fill_(0, virtual, torch.nan)
        self.weight.index_fill_(0, virtual, torch.nan)

    def read(self, first: torch.Tensor) -> torch.Tensor:
        """The state of some blocks.

        Args:
            first: int64 ``[N]``, the virtual id of each block's first resident token.

        Returns:
            float32 ``[N, width]``.
        """
        return self.state[first]

    def write(
        self,
        virtual: torch.Tensor,
        block: torch.Tensor,
        weights: torch.Tensor,
        state: torch.Tensor | None,
        judged: torch.Tensor,
    ) -> None:
        """Record an event.

        Args:
            virtual: int64 ``[T]``, distinct, virtual ids of the resident tokens.
            block: int64 ``[T]``, which of the N blocks each is in.
            weights: float ``[N]``, the blocks' weights.
            state: float32 ``[N, width]``, the policy's state; None leaves it as it is.
            judged: bool ``[T]``; other tokens keep their record.
        """
        self.weight[virtual] = torch.where(judged, weights.float()[block], self.weight[virtual])
        if state is not None:
            self.state[virtual] = torch.where(judged[:, None], state.float()[block], self.state[virtual])
