"""Memory pressure: thin cold cached nodes block by block before whole leaves go.

The order is SGLang's, with one step before it: thin, then drop leaves (SGLang's own), then retract. A
conversation that comes back finds its prefix thinner, not gone.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from nexus_sglang.eviction.thinning import thin

FULL = ComponentType.FULL


def relieve(runtime, shortfall: int) -> int:
    """Free up to ``shortfall`` physical slots by thinning; returns how many were freed."""
    freed = 0
    groups = (False, True) if runtime.config.thin_shared else (False,)
    for shared in groups:
        for share in runtime.config.thin_to:
            for node in runtime.tree.cold_nodes(shared):
                if freed >= shortfall:
                    return freed
                freed += thin_node(runtime, node, share, shortfall - freed)
    return freed


def thin_node(runtime, node, share: float, wanted: int) -> int:
    """Thin one node towards ``share`` of its tokens, but free no more than about ``wanted`` slots."""
    tree, table, config = runtime.tree, runtime.table, runtime.config
    virtual = node.component_data[FULL].value
    here = torch.nonzero(table.v2p[virtual] > 0).squeeze(1)
    keep = max(int(share * len(virtual)), len(here) - wanted)
    if len(here) <= keep:
        return 0
    end = tree.depth(node)
    tail = end - config.block_size if not node.children else end + config.block_size
    drop = thin(
        here + end - len(virtual), runtime.ledger.weight[virtual[here]], keep, config.block_size,
        config.sink_length, tail,
    )  # fmt: skip
    freed = table.evict(virtual[here[drop]])
    node.resident = None
    counters = runtime.evictor.counters
    counters.nodes_thinned += freed > 0
    counters.tokens_thinned += freed
    return freed
