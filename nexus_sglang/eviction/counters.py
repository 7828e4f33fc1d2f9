"""What happened since the server started, one number each. Several rooms count into one object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """What happened since the server started; ``/server_info`` and the log line show it.

    Where nobody is named, the evictor counts.

    Attributes:
        sequences: requests that took a row; one that returns after a retraction is not counted again (the runtime).
        sequences_over_budget: those that ever held more than they may.
        eviction_events: times a sequence was evicted from.
        blocks_evicted: blocks these events took.
        tokens_evicted: tokens these events took.
        events_by_recency: events at which the policy's answer could not be used, because it was NaN for a candidate or
            because of what ``policy_errors`` counts: the newest blocks were kept. The device counts the NaN; this
            number is brought up to date at events that wait for the device anyway, at idle, and for ``/server_info``.
        policy_errors: those of them at which the policy raised, or returned what does not fit.
        chunk_evictions: events between two chunks of one prompt.
        holes_healed: evicted tokens of the radix tree that became resident again (the tree).
        budget_held_by_shared: events at which a protected prefix let a sequence hold more than its budget.
        protection_clipped: events at which the protected prefix was larger than the pool can grant.
        nodes_thinned: cached nodes that memory pressure took tokens from (thinning).
        tokens_thinned: tokens it took (thinning).
        tokens_dropped_with_leaves: tokens that went with whole leaves of the radix tree (the allocator).
        retractions: requests that SGLang took back from the running batch (the scheduler's hooks).
        decode_seconds: time in decode passes; counted with ``NEXUS_SGLANG_TIMING=1`` only.
        decode_eviction_seconds: time in the evictions after them; counted with ``NEXUS_SGLANG_TIMING=1`` only.
    """

    sequences: int = 0
    sequences_over_budget: int = 0
    eviction_events: int = 0
    blocks_evicted: int = 0
    tokens_evicted: int = 0
    events_by_recency: int = 0
    policy_errors: int = 0
    chunk_evictions: int = 0
    holes_healed: int = 0
    budget_held_by_shared: int = 0
    protection_clipped: int = 0
    nodes_thinned: int = 0
    tokens_thinned: int = 0
    tokens_dropped_with_leaves: int = 0
    retractions: int = 0
    decode_seconds: float = 0.0
    decode_eviction_seconds: float = 0.0
