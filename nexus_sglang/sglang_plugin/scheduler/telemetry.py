"""Counters for ``/server_info``, the log line, and each finished request."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from typing import Any

logger = logging.getLogger(__name__)

RECENT = 256
"""Finished requests remembered for ``/server_info``."""
PROBES = "HEALTH_CHECK"
"""How the ids of SGLang's own ``/health`` requests begin; they would displace what people asked."""


class RequestLog:
    """What the last finished requests held, by request id."""

    def __init__(self) -> None:
        self.recent: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def add(self, rid: str, report: dict[str, Any]) -> None:
        if rid.startswith(PROBES):
            return
        self.recent[rid] = report
        while len(self.recent) > RECENT:
            self.recent.popitem(last=False)


def snapshot(runtime) -> dict[str, Any]:
    """Plain numbers, in tokens unless said otherwise.

    ``logical`` counts names in use (rows and cache), ``resident`` the physical slots behind them;
    ``evictable`` and ``protected`` split the cache into what no request holds and what one does.
    """
    config, counts = runtime.config, runtime.table.counts()
    evictable = runtime.tree.evictable_size() if runtime.tree is not None else 0
    protected = runtime.tree.protected_size() if runtime.tree is not None else 0
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
        "evictable": evictable,
        "protected": protected,
        "evictable_resident": runtime.tree.resident_evictable() if runtime.tree is not None else 0,
        "largest_budget": runtime.largest_budget,
        "query_window_bytes": runtime.window.bytes,
        **dataclasses.asdict(runtime.evictor.counters),
    }


def log_line(runtime) -> str:
    """One line beside SGLang's own batch lines; says so when nothing was ever evicted."""
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


def request_report(seq, live: int, length: int) -> dict[str, Any]:
    """What one request holds: goes into its ``meta_info`` and the recent list."""
    report = {
        "logical": length,
        "resident": live,
        "evicted": length - live,
        "peak_resident": seq.peak,
        "budget": seq.budget,
        "pinned": min(seq.pinned, length),
        "events": seq.evictions,
        "tokens_evicted": seq.tokens_evicted,
    }
    for clip in ("budget_clipped", "pin_clipped"):
        if getattr(seq, clip):
            report[clip] = True
    if seq.trace:
        report["trace"] = [{"length": e.length, "blocks": e.blocks, "tokens": e.tokens} for e in seq.events]
    return report
