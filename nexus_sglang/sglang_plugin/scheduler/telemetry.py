"""Counters for ``/server_info``, the log line, and each finished request."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

from nexus_sglang.eviction.sequence import RunningSequence

RECENT = 256
"""Finished requests remembered for ``/server_info``."""
PROBES = "HEALTH_CHECK"
"""How the ids of SGLang's own ``/health`` requests begin; they would displace what people asked."""


class RequestLog:
    """What the last finished requests held, by request id."""

    def __init__(self) -> None:
        self.recent: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def add(self, rid: str, report: dict[str, Any]) -> None:
        """Remember a report, and forget the oldest.

        Args:
            rid: request id.
            report: see :func:`request_report`.
        """
        if rid.startswith(PROBES):
            return
        self.recent[rid] = report
        while len(self.recent) > RECENT:
            self.recent.popitem(last=False)


def snapshot(runtime: Any) -> dict[str, Any]:
    """Plain numbers, in tokens unless said otherwise.

    Args:
        runtime: the ``NexusRuntime``.

    Returns:
        ``logical`` counts the virtual ids in use (of rows and cache), ``resident`` the physical slots behind them;
        ``evictable`` and ``protected`` split the cache into what no request holds and what one does.
    """
    config = runtime.config
    counts = runtime.table.counts()
    return {
        "policy": config.policy,
        "budget": config.budget.value,
        "block_size": config.block_size,
        "seed": config.seed,
        "virtual_capacity": runtime.table.virtual_size,
        "physical_capacity": runtime.table.physical_size,
        "logical": counts.virtual_held,
        "resident": counts.physical_mapped,
        "virtual_free": counts.virtual_free,
        "physical_free": counts.physical_free,
        "evictable": runtime.tree.evictable_size(),
        "protected": runtime.tree.protected_size(),
        "evictable_resident": runtime.tree.resident_evictable(),
        "largest_budget": runtime.largest_budget,
        "query_window_bytes": runtime.window.bytes,
        **dataclasses.asdict(runtime.counters),
    }


def log_line(runtime: Any) -> str:
    """One line beside SGLang's own batch lines; says so when nothing was ever evicted.

    Args:
        runtime: the ``NexusRuntime``.
    """
    s = snapshot(runtime)
    ran = (
        f"events {s['eviction_events']}, evicted {s['tokens_evicted']}"
        if s["eviction_events"]
        else "nothing evicted yet"
    )
    return (
        f"nexus [{s['policy']}] {ran}, over budget {s['sequences_over_budget']}/{s['sequences']} sequences, "
        f"logical {s['logical']}, resident {s['resident']}, free physical {s['physical_free']}, "
        f"free virtual {s['virtual_free']}, evictable {s['evictable']}, protected {s['protected']}"
    )


def request_report(seq: RunningSequence, resident: int, length: int) -> dict[str, Any]:
    """What one request holds: goes into its ``meta_info`` and the recent list.

    Args:
        seq: the request's sequence.
        resident: its resident tokens.
        length: all its tokens.
    """
    report = {
        "logical": length,
        "resident": resident,
        "evicted": length - resident,
        "peak_resident": seq.peak,
        "budget": seq.budget,
        "pinned": min(seq.pinned, length),
        "events": seq.evictions,
        "tokens_evicted": seq.tokens_evicted,
    }
    for note in ("clipped", "ignored"):
        if noted := getattr(seq.plan, note):
            report[note] = list(noted)
    if seq.trace:
        report["trace"] = [{"length": e.length, "blocks": e.blocks, "tokens": e.tokens} for e in seq.events]
    return report
