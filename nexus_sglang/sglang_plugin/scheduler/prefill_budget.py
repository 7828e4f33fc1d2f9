"""Admission priced in physical slots.

SGLang prices a request by its logical length. That refuses prompts longer than the pool, and counts evicted prefixes as
memory that could be reclaimed. Here a request costs what it will hold: its prompt where that is prefilled whole, or its
budget plus the chunks in flight where it has to be evicted from between its chunks.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from .admission import expected_growth, reclaimable, steady_size
from .runtime import NexusRuntime


class NexusPrefillBudget(PrefillBudget):
    """The memory of one prefill pass, and what was promised of it.

    Args:
        allocator: the ``NexusAllocator``.
        tree_cache: SGLang's ``UnifiedRadixCache``.
        num_mixed_decode_tokens: tokens that decode in the same pass.

    Attributes:
        total_offset: virtual ids promised, answers included (SGLang's).
        current_offset: virtual ids promised for this pass (SGLang's).
        physical_offset: physical slots promised.
        candidate: the request being judged, set by ``admission.note_candidate`` before each :meth:`check_prefill`.
    """

    def __init__(self, allocator: Any, tree_cache: Any, *, num_mixed_decode_tokens: int = 0):
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self.runtime: NexusRuntime = allocator.runtime
        self.physical_offset = num_mixed_decode_tokens + expected_growth(self.runtime)
        self.candidate: Any = None
        self._candidate_cost = 0

    def _available_and_evictable(self) -> int:
        return self.runtime.table.free_ids + self.tree_cache.evictable_size()

    @property
    def remaining_physical(self) -> int:
        """Physical slots free, or behind cached nodes that no request holds, and not yet promised."""
        return reclaimable(self.runtime) - self.physical_offset

    def has_capacity(self) -> bool:
        """Whether anything is left in both spaces."""
        return super().has_capacity() and self.remaining_physical > 0

    def check_prefill(
        self,
        *,
        extend_input_len: int,
        total_tokens: int,
        max_new_tokens: int,
        input_tokens: int,
        swa_host_hit_length: int,
        chunk_limit: int | None,
        auxiliary_swa_host_hit_length: int = 0,
    ) -> tuple[bool, int | None]:
        """Whether :attr:`candidate` can be admitted, and how large its next chunk may be.

        Args:
            extend_input_len: tokens to be prefilled.
            total_tokens: those and what SGLang expects of the answer.
            max_new_tokens: tokens it may still decode.
            input_tokens: prompt and, after a retraction, the answer so far. Not looked at: the plan follows the prompt.
            swa_host_hit_length: not looked at, of sliding windows.
            chunk_limit: largest chunk SGLang would take; None where it does not cut prompts.
            auxiliary_swa_host_hit_length: not looked at, of sliding windows.
        """
        if total_tokens >= self.remaining_total:
            return False, None
        runtime = self.runtime
        steady = steady_size(runtime, self.candidate)
        decoded = min(extend_input_len + max_new_tokens, steady + runtime.config.block_size)
        whole = max(extend_input_len, decoded) + 1
        room = self.remaining_physical
        if whole <= room:
            self._candidate_cost = whole
            return True, chunk_limit
        if chunk_limit is None or not self.candidate.nexus_plan.evict:
            return False, None
        # Evicted from between chunks: what it will hold beyond its cached prefix, plus the chunks in flight.
        held = runtime.tree.resident_on_path(self.candidate.last_node)
        in_chunks = max(0, steady - held) + runtime.chunk_room
        # With nothing else to wait for, whatever room there is must do.
        alone = not runtime.sequences and self.physical_offset == 0 and room >= runtime.config.block_size
        if in_chunks > room and not alone:
            return False, None
        self._candidate_cost = min(in_chunks, room)
        return True, min(chunk_limit, runtime.chunk, room)

    def can_allocate_prefill(
        self, *, paged_input: int, extend_input_len: int, max_new_tokens: int, chunk_limit: int | None
    ) -> bool:
        """Whether a chunk of ``paged_input`` tokens fits both spaces; the other arguments are not looked at."""
        return paged_input <= min(self.remaining_current, self.remaining_total, self.remaining_physical)

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """Tokens of the next chunk of a prompt that has begun; None where it has to wait.

        Args:
            chunk_limit: largest chunk SGLang would take.
        """
        # The continuing request's own future growth is part of physical_offset; its next chunk may use it.
        room = min(reclaimable(self.runtime), int(self.remaining_total))
        take = min(chunk_limit, room)
        # Where little is left, others may finish and leave more; where nobody else runs, one token is progress.
        enough = 1 if len(self.runtime.sequences) <= 1 else min(chunk_limit, self.runtime.config.block_size)
        return take if take >= enough else None

    def reserve(
        self,
        extend_input_len: int,
        max_new_tokens: int,
        *,
        extra_tokens: int = 0,
        chunk_limit: int | None = None,
        is_chunked_continuation: bool = False,
    ) -> None:
        """Promise memory to a request that was admitted.

        Args:
            extend_input_len: tokens of this pass.
            max_new_tokens: tokens it may still decode.
            extra_tokens: as for SGLang's.
            chunk_limit: as for SGLang's.
            is_chunked_continuation: whether this is a later chunk of its prompt, which was not judged again.
        """
        super().reserve(extend_input_len, max_new_tokens, extra_tokens=extra_tokens, chunk_limit=chunk_limit)
        block = self.runtime.config.block_size
        self.physical_offset += extend_input_len + block if is_chunked_continuation else self._candidate_cost
