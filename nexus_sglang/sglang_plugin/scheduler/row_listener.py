"""What SGLang's request pool tells when a row grows or goes."""

from __future__ import annotations

import torch

from .runtime import NexusRuntime


class RowListener:
    """The auxiliary cache of SGLang's ``ReqToTokenPool``, which calls these methods."""

    def __init__(self, runtime: NexusRuntime):
        self.runtime = runtime

    @property
    def dense_capacity(self) -> int:
        """Tokens that the scheduler may plan with: the virtual capacity."""
        return self.runtime.table.virtual_size

    def alloc_to_lengths(self, *, req_pool_indices_cpu: torch.Tensor, target_seq_lens_cpu: torch.Tensor) -> None:
        """Rows grew; their virtual ids are written already.

        Args:
            req_pool_indices_cpu: ``[n]``, request rows.
            target_seq_lens_cpu: ``[n]``, tokens of each.
        """
        self.runtime.rows.extend(req_pool_indices_cpu.tolist(), target_seq_lens_cpu.tolist())

    def free(self, row: int) -> None:
        """The request in this row is gone."""
        self.runtime.release(row)

    def clear(self) -> None:
        """All requests are gone."""
        self.runtime.clear_rows()

    def reset_allocator(self) -> None:
        """SGLang flushed its cache. The allocator's own ``clear`` has reset the table."""
        self.runtime.reset()
