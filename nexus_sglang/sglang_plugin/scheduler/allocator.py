"""SGLang's allocator interface over the page table."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from nexus_sglang.errors import IntegrityError
from nexus_sglang.kv_slots.page_table import PageTable

from .prefill_budget import NexusPrefillBudget
from .pressure import relieve


class NexusAllocator(BaseTokenToKVPoolAllocator):
    """Hands out virtual ids; the pool behind it is addressed through :meth:`translate_write_loc`.

    ``size`` is the virtual capacity, so SGLang's own leak checks count names. ``available_size`` is the
    smaller of both spaces: what an allocation can really get.
    """

    def __init__(self, table: PageTable, dtype: torch.dtype, device, kvcache, need_sort: bool):
        super().__init__(table.virtual_size, 1, dtype, device, kvcache, need_sort)
        self.table = table
        self.runtime = None  # set by the runtime once rows and layers exist
        self._verified: tuple[Callable[[], Any], ...] = ()

    @property
    def free_pages(self) -> torch.Tensor:
        """Free virtual ids; SGLang's invariant checker reads them."""
        return self.table.free_virtual

    @free_pages.setter
    def free_pages(self, value) -> None:
        if value is not None:
            raise AttributeError("free ids belong to the page table")

    def clear(self) -> None:
        self.free_group = None
        self.table.clear()
        if self.runtime is not None:
            self.runtime.reset()

    def available_size(self) -> int:
        return self.table.available

    def get_all_free_pages(self) -> torch.Tensor:
        return self.table.free_virtual

    def alloc(self, need_size: int) -> torch.Tensor | None:
        ids = self.table.allocate(need_size)
        if ids is not None and self.runtime is not None:
            self.runtime.ledger.forget(ids)
        return ids

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if self.free_group is None:
            self.table.free(free_index)
        else:
            self.free_group.append(self._copy_for_free_group(free_index))

    def translate_write_loc(self, virtual: torch.Tensor) -> torch.Tensor:
        """Physical slots behind the ids a forward pass writes."""
        return self.table.translate(virtual)

    def create_prefill_budget(self, tree_cache, *, num_mixed_decode_tokens: int = 0) -> NexusPrefillBudget:
        return NexusPrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def evict_to_free_tokens(self, tree_cache, num_tokens: int) -> bool | None:
        """SGLang needs room: thin cold cache first, then let it drop whole leaves."""
        runtime = self.runtime
        shortfall = num_tokens - len(self.table.free_physical)
        if shortfall > 0 and runtime.tree is not None:
            relieve(runtime, shortfall)
        held = self.table.counts().virtual_held
        result = super().evict_to_free_tokens(tree_cache, num_tokens)
        runtime.evictor.counters.tokens_dropped_with_leaves += held - self.table.counts().virtual_held
        return result

    def verify_byte_accounting(self) -> list[str]:
        """SGLang asks at idle, over and over; what is returned is raised as a leak.

        Free lists are replaced whenever ids change hands, so what has been verified is not looked at again.
        """
        lists = (self.table.free_virtual, self.table.free_physical)
        if self._verified and all(now is before() for now, before in zip(lists, self._verified, strict=True)):
            return []
        try:
            self.table.check_integrity()
            self.runtime.rows.check_integrity()
        except IntegrityError as err:
            return [f"nexus: {err}"]
        self._verified = tuple(map(weakref.ref, lists))  # no second copy of them is kept alive
        return []

    def resize(self, config) -> None:
        raise RuntimeError("the KV pool was resized after start; unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")
