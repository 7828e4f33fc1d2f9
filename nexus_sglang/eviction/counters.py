"""What happened since the server started, one number each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """What happened since the server started (``/server_info`` and the log line show them).

    The seconds are counted with ``NEXUS_SGLANG_TIMING=1`` only.
    """

    sequences: int = 0
    sequences_over_budget: int = 0
    eviction_events: int = 0
    blocks_evicted: int = 0
    tokens_evicted: int = 0
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
