"""Admission priced in physical slots.

SGLang prices a request by its logical length, which refuses prompts longer than the pool and counts evicted
prefixes as reclaimable memory. Here a request costs what it will hold: its prompt while it is prefilled whole,
or its budget plus the chunks in flight when it has to be thinned between chunks.
"""

from __future__ import annotations

from sglang.srt.mem_cache.prefill_budget import PrefillBudget


class NexusPrefillBudget(PrefillBudget):
    """One prefill pass. ``total_offset`` and ``current_offset`` count names, ``physical_offset`` slots.

    Attributes:
        candidate: the request being judged, set by the admission hook before each ``check_prefill``.
    """

    def __init__(self, allocator, tree_cache, *, num_mixed_decode_tokens: int = 0):
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self.runtime = allocator.runtime
        self.physical_offset = num_mixed_decode_tokens + self.runtime.expected_growth()
        self.candidate = None
        self._candidate_cost = 0

    def _available_and_evictable(self) -> int:
        return len(self.allocator.table.free_virtual) + self.tree_cache.evictable_size()

    @property
    def remaining_physical(self) -> int:
        """Slots free, or held by unlocked cache, and not yet promised."""
        return self.runtime.reclaimable() - self.physical_offset

    def has_capacity(self) -> bool:
        return super().has_capacity() and self.remaining_physical > 0

    def check_prefill(self, *, extend_input_len, total_tokens, max_new_tokens, input_tokens, swa_host_hit_length,
                      chunk_limit, auxiliary_swa_host_hit_length=0):  # fmt: skip
        if total_tokens >= self.remaining_total:
            return False, None
        runtime = self.runtime
        steady = runtime.steady_size(self.candidate, input_tokens)
        decoded = min(extend_input_len + max_new_tokens, steady + runtime.config.block_size)
        whole = max(extend_input_len, decoded) + 1
        room = self.remaining_physical
        if whole <= room:
            self._candidate_cost = whole
            return True, chunk_limit
        if chunk_limit is None or not runtime.can_thin(self.candidate):
            return False, None
        # Thinned between chunks: what it will hold beyond its cached prefix, plus the chunks in flight.
        held = runtime.tree.resident_on_path(self.candidate.last_node)
        thinned = max(0, steady - held) + runtime.chunk_room
        # With nothing else to wait for, whatever room there is must do.
        alone = not runtime.sequences and self.physical_offset == 0 and room >= runtime.config.block_size
        if thinned > room and not alone:
            return False, None
        self._candidate_cost = min(thinned, room)
        return True, min(chunk_limit, runtime.chunk, room)

    def can_allocate_prefill(self, *, paged_input, extend_input_len, max_new_tokens, chunk_limit) -> bool:
        return paged_input <= min(self.remaining_current, self.remaining_total, self.remaining_physical)

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        # The continuing request's own future growth is part of physical_offset; its next chunk may use it.
        room = min(self.runtime.reclaimable(), int(self.remaining_total))
        take = min(chunk_limit, room)
        # Crumbs are worth waiting for others to finish, unless there are none.
        enough = 1 if len(self.runtime.sequences) <= 1 else min(chunk_limit, self.runtime.config.block_size)
        return take if take >= enough else None

    def reserve(self, extend_input_len, max_new_tokens, *, extra_tokens=0, chunk_limit=None,
                is_chunked_continuation=False) -> None:  # fmt: skip
        super().reserve(extend_input_len, max_new_tokens, extra_tokens=extra_tokens, chunk_limit=chunk_limit)
        block = self.runtime.config.block_size
        self.physical_offset += extend_input_len + block if is_chunked_continuation else self._candidate_cost
