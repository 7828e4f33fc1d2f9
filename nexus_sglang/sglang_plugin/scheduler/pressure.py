"""Memory pressure: cached nodes that nobody uses lose tokens block by block, before whole leaves go.

The order is SGLang's, with one step before it: thin, then drop leaves (SGLang's own), then retract. A conversation that
comes back finds its prefix thinner, not gone.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from nexus_sglang.eviction.thinning import thin

from .runtime import NexusRuntime

FULL = ComponentType.FULL


def relieve(runtime: NexusRuntime, shortfall: int) -> int:
    """Free physical slots by thinning: each cold node to the first share, then each to the next.

    Args:
        runtime: whose tree.
        shortfall: slots wanted.

    Returns:
        How many were freed; fewer where there is no more to take.
    """
    freed = 0
    groups = (False, True) if runtime.config.thin_shared else (False,)
    for shared in groups:
        for share in runtime.config.thin_to:
            for node in runtime.tree.cold_nodes(shared):
                if freed >= shortfall:
                    return freed
                freed += thin_node(runtime, node, share, shortfall - freed)
    return freed


def thin_node(runtime: NexusRuntime, node: Any, share: float, wanted: int) -> int:
    """Thin one node.

    Args:
        runtime: whose tree.
        node: the node of the radix tree.
        share: of its tokens, resident or not, what it is to keep.
        wanted: physical slots that are enough.

    Returns:
        Slots freed: about ``wanted``, fewer where the share is reached.
    """
    tree = runtime.tree
    config = runtime.config
    virtual = node.component_data[FULL].value
    here = torch.nonzero(runtime.table.mapped(virtual)).squeeze(1)
    keep = max(int(share * len(virtual)), len(here) - wanted)
    if len(here) <= keep:
        return 0
    end = tree.depth(node)
    tail = end - config.block_size if not node.children else end + config.block_size
    positions = here + end - len(virtual)
    weights = runtime.ledger.weight[virtual[here]]
    drop = thin(positions, weights, keep, config.block_size, config.sink_length, tail)
    freed = runtime.table.evict(virtual[here[drop]])
    node.resident = None
    runtime.counters.nodes_thinned += freed > 0
    runtime.counters.tokens_thinned += freed
    return freed
