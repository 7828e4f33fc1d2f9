"""SGLang's allocator interface over the page table."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from nexus_sglang.errors import IntegrityError

from .prefill_budget import NexusPrefillBudget
from .pressure import relieve
from .runtime import NexusRuntime


class NexusAllocator(BaseTokenToKVPoolAllocator):
    """Hands out virtual ids; the pool behind it is addressed through :meth:`translate_write_loc`.

    ``size`` is the virtual capacity, so SGLang's own leak checks count virtual ids. ``available_size`` is the smaller
    of both spaces: what an allocation can really get.

    Args:
        runtime: owner of the page table; everything of SGLang's that holds this allocator finds it here.
        dtype: type of keys and values.
        device: where the pool is.
        kvcache: SGLang's KV pool.
        need_sort: as for SGLang's allocators.
    """

    def __init__(self, runtime: NexusRuntime, dtype: torch.dtype, device: Any, kvcache: Any, need_sort: bool):
        super().__init__(runtime.table.virtual_size, 1, dtype, device, kvcache, need_sort)
        self.runtime = runtime
        self.table = runtime.table
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
        """SGLang flushed its cache."""
        self.free_group = None
        self.table.clear()
        self.runtime.reset()

    def available_size(self) -> int:
        """Tokens that can be allocated now."""
        return self.table.available

    def get_all_free_pages(self) -> torch.Tensor:
        """int64, virtual ids that are free."""
        return self.table.free_virtual

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """int64 ``[need_size]``, virtual ids with a physical slot behind each; None where either space is short."""
        ids = self.table.allocate(need_size)
        if ids is not None:
            self.runtime.ledger.forget(ids)
        return ids

    def free(self, free_index: torch.Tensor) -> None:
        """Take back virtual ids; within a group of SGLang's, when the group ends.

        Args:
            free_index: int ``[n]``, distinct.
        """
        if free_index.numel() == 0:
            return
        if self.free_group is None:
            self.table.free(free_index)
        else:
            self.free_group.append(self._copy_for_free_group(free_index))

    def translate_write_loc(self, virtual: torch.Tensor) -> torch.Tensor:
        """Physical slots behind the ids that a forward pass writes.

        Args:
            virtual: int, any shape.
        """
        return self.table.translate(virtual)

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> NexusPrefillBudget:
        """What the scheduler asks for each prefill pass; arguments as of :class:`NexusPrefillBudget`."""
        return NexusPrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        """SGLang needs room: thin cold cached nodes first, then let it drop whole leaves.

        Args:
            tree_cache: SGLang's ``UnifiedRadixCache``.
            num_tokens: tokens that are to be allocated.
        """
        runtime = self.runtime
        shortfall = num_tokens - self.table.free_slots
        if shortfall > 0:
            relieve(runtime, shortfall)
        before = self.table.free_ids
        result = super().evict_to_free_tokens(tree_cache, num_tokens)
        runtime.counters.tokens_dropped_with_leaves += self.table.free_ids - before
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
            self.runtime.evictor.catch_up()
        except IntegrityError as err:
            return [f"nexus: {err}"]
        self._verified = tuple(map(weakref.ref, lists))  # no second copy of them is kept alive
        return []

    def resize(self, config: Any) -> None:
        """Never called: ``carrier.publish`` switches it off."""
        raise RuntimeError("the KV pool was resized after start; unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")
