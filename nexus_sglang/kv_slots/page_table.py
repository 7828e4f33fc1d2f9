"""Virtual slot ids over a smaller physical pool.

SGLang names KV slots in request rows and radix-tree nodes. Those names are *virtual* here and stay valid for
as long as the token is part of a sequence; a *physical* slot stands behind a name only while the token's keys
and values are resident. Evicting a token takes the physical slot away and leaves the name.

    virtual id   free -> allocated (mapped) -> evicted (allocated, unmapped) -> free
    physical id  free -> mapped                                              -> free

Id 0 of both spaces is SGLang's padding slot: never handed out, always mapped to itself, and what an evicted
id translates to, so that a stray write lands in padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nexus_sglang.device import download
from nexus_sglang.errors import IntegrityError
from nexus_sglang.kernels import page_table as kernels


class TableCounts(NamedTuple):
    """Slots by state; each pair sums to its capacity."""

    virtual_free: int
    virtual_held: int
    physical_free: int
    physical_mapped: int


class PageTable:
    """Free lists and the map v2p.

    Args:
        virtual_size: virtual ids 1..virtual_size can be handed out.
        physical_size: physical slots 1..physical_size exist in the pool.
        device: where the ids live.

    Attributes:
        miscounted: int64 ``[1]`` on the device, evictions that were told a wrong number.
    """

    MISCOUNTED = "physical: {} evictions freed another number of slots than they had said"

    def __init__(self, virtual_size: int, physical_size: int, device: str | torch.device = "cpu"):
        if virtual_size < physical_size:
            raise ValueError(f"virtual size {virtual_size} is smaller than physical size {physical_size}")
        self.virtual_size, self.physical_size, self.device = virtual_size, physical_size, device
        self.clear()

    def clear(self) -> None:
        """Free everything."""
        ids = lambda n: torch.arange(1, n + 1, dtype=torch.int64, device=self.device)  # noqa: E731
        self.free_virtual, self.free_physical = ids(self.virtual_size), ids(self.physical_size)
        self.v2p = torch.zeros(self.virtual_size + 1, dtype=torch.int64, device=self.device)
        self.miscounted = torch.zeros(1, dtype=torch.int64, device=self.device)

    @property
    def available(self) -> int:
        """Tokens that can be allocated now: both spaces must have room."""
        return min(len(self.free_virtual), len(self.free_physical))

    def counts(self) -> TableCounts:
        virtual_free, physical_free = len(self.free_virtual), len(self.free_physical)
        return TableCounts(
            virtual_free, self.virtual_size - virtual_free, physical_free, self.physical_size - physical_free
        )

    def allocate(self, n: int) -> torch.Tensor | None:
        """Hand out n mapped virtual ids (int64 ``[n]``), or None when either space is short."""
        if n > self.available:
            return None
        virtual, self.free_virtual = self.free_virtual[:n], self.free_virtual[n:]
        physical, self.free_physical = self.free_physical[:n], self.free_physical[n:]
        self.v2p[virtual] = physical
        return virtual

    def free(self, virtual: torch.Tensor) -> int:
        """Give ids back, and the physical slots of those still mapped.

        Returns:
            Physical slots freed.
        """
        freed = self.evict(virtual)
        self.free_virtual = torch.cat((self.free_virtual, virtual.to(torch.int64)))
        return freed

    def evict(self, virtual: torch.Tensor, mapped: int | None = None) -> int:
        """Unmap ids and keep them allocated. Already evicted ids are passed over.

        Args:
            virtual: int ``[n]``, distinct. mapped: how many of them are mapped; None asks the device and waits. A wrong
                number is found by :meth:`check_integrity`.

        Returns:
            Physical slots freed.
        """
        mapped = self.resident(virtual) if mapped is None else mapped
        # Zeros: were the number too large, padding would be handed out and found, not a place outside of the pool.
        freed = torch.zeros(mapped, dtype=torch.int64, device=self.device)
        self.miscounted += kernels.unmap(self.v2p, virtual, freed) != mapped
        self.free_physical = torch.cat((self.free_physical, freed))
        return mapped

    def adopt(self, hole: torch.Tensor, donor: torch.Tensor) -> int:
        """Move physical slots from mapped donors to evicted ids, pairwise, where that fills a hole.

        Args:
            hole, donor: int64 ``[n]`` virtual ids of the same tokens; a donor is about to be freed.

        Returns:
            Holes filled.
        """
        here, there = self.translate(hole), self.translate(donor)
        fills = (here == 0) & (there > 0)
        self.v2p[hole] = torch.where(fills, there, here)
        self.v2p[donor] = torch.where(fills, 0, there)
        return int(download(fills.sum()))

    def translate(self, virtual: torch.Tensor) -> torch.Tensor:
        """Physical ids (int64, 0 where evicted) for virtual ids of any shape."""
        return kernels.translate(self.v2p, virtual)

    def resident(self, virtual: torch.Tensor) -> int:
        """How many of these ids in use are mapped; waits for the device, unless nothing is evicted anywhere."""
        counts = self.counts()
        if counts.virtual_held == counts.physical_mapped:
            return len(virtual)
        return int(download((self.translate(virtual) > 0).sum()))

    def check_integrity(self) -> TableCounts:
        """Verify conservation and injectivity.

        Raises:
            IntegrityError: with the numbers that do not add up.
        """
        counts = self.counts()
        mapped = self.v2p[self.v2p > 0]
        if self.v2p[0] != 0:
            raise IntegrityError(f"padding id 0 is mapped to physical {int(self.v2p[0])}")
        if miscounted := int(self.miscounted):
            raise IntegrityError(self.MISCOUNTED.format(miscounted))
        if len(mapped) + counts.physical_free != self.physical_size:
            raise IntegrityError(
                f"physical: {counts.physical_free} free + {len(mapped)} mapped != {self.physical_size} slots"
            )
        holders = torch.bincount(torch.cat((mapped, self.free_physical)), minlength=self.physical_size + 1)
        if int(holders.max()) > 1:
            raise IntegrityError(f"physical: slots {torch.nonzero(holders > 1).squeeze(1).tolist()[:8]} are held twice")
        if counts.virtual_free and int(torch.bincount(self.free_virtual).max()) > 1:
            raise IntegrityError("virtual: an id is in the free list twice")
        if counts.virtual_free and bool((self.v2p[self.free_virtual] > 0).any()):
            raise IntegrityError("virtual: a free id still owns a physical slot")
        return counts
