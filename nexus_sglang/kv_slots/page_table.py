"""Virtual ids over a smaller pool of KV slots.

SGLang refers to KV slots from request rows and from nodes of the radix tree. What it holds there are *virtual ids*: a
virtual id stays valid for as long as its token is part of a sequence. A *physical slot* of the pool stands behind it
only while the token's keys and values are resident. Evicting a token takes the physical slot away and leaves the
virtual id.

    virtual id     free -> allocated (mapped) -> evicted (allocated, unmapped) -> free
    physical slot  free -> mapped                                              -> free

Number 0 of both spaces is SGLang's padding slot. It is never handed out and is always mapped to itself. An evicted id
translates to it, so that a stray write lands in padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nexus_sglang.device import download
from nexus_sglang.errors import IntegrityError
from nexus_sglang.kernels import page_table as kernels


class TableCounts(NamedTuple):
    """How many virtual ids and physical slots are in which state.

    Attributes:
        virtual_free: ids that can be handed out.
        virtual_held: ids in use, resident or evicted; with ``virtual_free`` the table's ``virtual_size``.
        physical_free: slots that can be handed out.
        physical_mapped: slots behind an id; with ``physical_free`` the table's ``physical_size``.
    """

    virtual_free: int
    virtual_held: int
    physical_free: int
    physical_mapped: int


class PageTable:
    """Free lists and the map from virtual ids to physical slots.

    Args:
        virtual_size: virtual ids 1 to ``virtual_size`` can be handed out.
        physical_size: physical slots 1 to ``physical_size`` exist in the pool.
        device: where the ids are.

    Attributes:
        v2p: int64 ``[virtual_size + 1]``, the physical slot behind each virtual id, 0 where there is none.
        free_virtual: int64 ``[free_ids]``, virtual ids that can be handed out.
        free_physical: int64 ``[free_slots]``, physical slots that can be handed out.
        miscounted: int64 ``[1]`` on the device: how many calls of :meth:`evict` were given a wrong count.

    Raises:
        ValueError: fewer virtual ids than physical slots.
    """

    def __init__(self, virtual_size: int, physical_size: int, device: str | torch.device = "cpu"):
        if virtual_size < physical_size:
            raise ValueError(f"virtual size {virtual_size} is smaller than physical size {physical_size}")
        self.virtual_size = virtual_size
        self.physical_size = physical_size
        self.device = device
        self.clear()

    def clear(self) -> None:
        """Free everything."""
        self.free_virtual = torch.arange(1, self.virtual_size + 1, dtype=torch.int64, device=self.device)
        self.free_physical = torch.arange(1, self.physical_size + 1, dtype=torch.int64, device=self.device)
        self.v2p = torch.zeros(self.virtual_size + 1, dtype=torch.int64, device=self.device)
        self.miscounted = torch.zeros(1, dtype=torch.int64, device=self.device)

    @property
    def free_ids(self) -> int:
        """Virtual ids that can be handed out now; known to the host."""
        return len(self.free_virtual)

    @property
    def free_slots(self) -> int:
        """Physical slots that can be handed out now; known to the host."""
        return len(self.free_physical)

    @property
    def available(self) -> int:
        """Tokens that can be allocated now: both spaces must have room."""
        return min(self.free_ids, self.free_slots)

    def counts(self) -> TableCounts:
        """Ids and slots by state; known to the host."""
        return TableCounts(
            self.free_ids,
            self.virtual_size - self.free_ids,
            self.free_slots,
            self.physical_size - self.free_slots,
        )

    def allocate(self, n: int) -> torch.Tensor | None:
        """Hand out virtual ids with a physical slot behind each.

        Args:
            n: how many.

        Returns:
            int64 ``[n]``, or None when either space is short.
        """
        if n > self.available:
            return None
        virtual = self.free_virtual[:n]
        physical = self.free_physical[:n]
        self.free_virtual = self.free_virtual[n:]
        self.free_physical = self.free_physical[n:]
        self.v2p[virtual] = physical
        return virtual

    def free(self, virtual: torch.Tensor) -> int:
        """Give ids back, and the physical slots of those still mapped.

        Args:
            virtual: int ``[n]``, distinct.

        Returns:
            Physical slots freed.
        """
        freed = self.evict(virtual)
        self.free_virtual = torch.cat((self.free_virtual, virtual.to(torch.int64)))
        return freed

    def evict(self, virtual: torch.Tensor, mapped: int | None = None) -> int:
        """Unmap ids and keep them allocated. Ids that are evicted already are passed over.

        Args:
            virtual: int ``[n]``, distinct.
            mapped: how many of them are mapped; None asks the device and waits. A wrong number is noted in
                :attr:`miscounted` and found by :meth:`check_integrity`.

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
        """Move physical slots from mapped donors to evicted ids, pair by pair, where that fills a hole.

        Args:
            hole: int64 ``[n]``, virtual ids of some tokens.
            donor: int64 ``[n]``, other virtual ids of the same tokens, about to be freed.

        Returns:
            Holes filled.
        """
        here = self.translate(hole)
        there = self.translate(donor)
        fills = (here == 0) & (there > 0)
        self.v2p[hole] = torch.where(fills, there, here)
        self.v2p[donor] = torch.where(fills, 0, there)
        return int(download(fills.sum()))

    def translate(self, virtual: torch.Tensor) -> torch.Tensor:
        """Physical slots behind virtual ids.

        Args:
            virtual: int, any shape.

        Returns:
            int64 of the same shape; 0 where evicted.
        """
        return kernels.translate(self.v2p, virtual)

    def mapped(self, virtual: torch.Tensor) -> torch.Tensor:
        """Which of these virtual ids have a physical slot behind them: bool, of the same shape."""
        return self.translate(virtual) > 0

    def resident(self, virtual: torch.Tensor) -> int:
        """How many of these ids in use are mapped; waits for the device, unless nothing is evicted anywhere."""
        counts = self.counts()
        if counts.virtual_held == counts.physical_mapped:
            return len(virtual)
        return int(download(self.mapped(virtual).sum()))

    @staticmethod
    def require_counted(miscounted: int) -> None:
        """Complain about evictions that were given a wrong count.

        Args:
            miscounted: :attr:`miscounted`, on the host. The caller fetches it, together with what else it waits for.

        Raises:
            IntegrityError: it is not 0.
        """
        if miscounted:
            raise IntegrityError(f"physical: {miscounted} evictions freed another number of slots than they had said")

    def check_integrity(self) -> TableCounts:
        """Check that every slot is free or behind exactly one id, and that free ids have none. Waits for the device.

        Returns:
            The counts that were found right.

        Raises:
            IntegrityError: with the numbers that do not add up.
        """
        counts = self.counts()
        mapped = self.v2p[self.v2p > 0]
        if self.v2p[0] != 0:
            raise IntegrityError(f"padding id 0 is mapped to physical {int(self.v2p[0])}")
        self.require_counted(int(self.miscounted))
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
