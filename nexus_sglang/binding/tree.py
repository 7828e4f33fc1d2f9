"""The radix tree's core with what eviction has to know about its nodes.

SGLang's Python tree core, registered as the backend ``nexus``: a node additionally remembers whether a prompt
runs through it, which tells a shared prefix from a conversation whose answer was tokenised anew, and a
duplicate that is about to be freed first fills the holes of the copy that stays.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from .request_params import WHOLE

FULL = ComponentType.FULL


class NexusTreeCore(UnifiedTreeCore):
    """``UnifiedTreeCore`` plus readers, physical sizes and healing. ``table`` and ``counters`` are set by the runtime."""

    table = None
    counters = None

    def _split_node(self, key, child, split_len):
        node, action = super()._split_node(key, child, split_len)
        node.carries_prompt = getattr(child, "carries_prompt", False)
        return node, action

    def _insert_overlap_step(self, state) -> None:
        start = max(0, state.params.prev_prefix_len - state.total_prefix_length)
        node, end = state.overlap_node, state.overlap_prefix_len
        if self.table is not None and start < end:
            kept = node.component_data[FULL].value[start:end]
            self.counters.holes_healed += self.table.adopt(kept, state.value[start:end].to(kept.dtype))
        super()._insert_overlap_step(state)

    def mark_prompt(self, node_id: int, prompt_tokens: int) -> None:
        """Remember which nodes of the path to ``node_id`` hold tokens of a prompt of this length."""
        node = self.node_by_id(node_id)
        end = self.depth(node)
        while node is not self.root_node:
            end -= len(node.key)
            if end < prompt_tokens:
                node.carries_prompt = True
            node = node.parent

    def shared_length(self, node_id: int) -> int:
        """Leading tokens of the path to ``node_id`` that other readers use.

        A node is shared when another running request holds it (its lock count is above one), or when two
        prompts go on from it: for the last node one, since the asking request goes on as well.
        """
        node = self.node_by_id(node_id)
        own_continuation, end = 1, self.depth(node)
        while node is not self.root_node:
            prompts = sum(getattr(child, "carries_prompt", False) for child in node.children.values())
            if node.component_data[FULL].lock_ref > 1 or prompts + own_continuation > 1:
                return end
            end -= len(node.key)
            own_continuation, node = 0, node.parent
        return 0

    def shared_resident(self, node_id: int) -> int:
        """Physical slots behind the leading tokens that other readers use."""
        shared = self.shared_length(node_id)
        return self.table.resident(self._path_values(node_id)[:shared]) if shared else 0

    def resident_on_path(self, node_id: int) -> int:
        """Physical slots behind the path to ``node_id``."""
        return self.table.resident(self._path_values(node_id))

    def _path_values(self, node_id: int) -> torch.Tensor:
        return self.collect_full_device_indices(node_id, self.root_node.id)

    def resident_evictable(self) -> int:
        """Physical slots behind nodes that no running request locks."""
        values = [
            node.component_data[FULL].value
            for node in self._node_arena.values()
            if node is not self.root_node and node.component_data[FULL].lock_ref == 0
        ]
        return self.table.resident(torch.cat(values)) if values else 0

    def cold_nodes(self, shared: bool) -> list:
        """Unlocked nodes that hold physical slots, least recently used first; ``shared`` picks those that two
        prompts go on from, or the others."""
        nodes = [
            node
            for node in self._node_arena.values()
            if node is not self.root_node
            and node.component_data[FULL].lock_ref == 0
            and not (node.key.extra_key or "").endswith(WHOLE)
            and (sum(getattr(c, "carries_prompt", False) for c in node.children.values()) > 1) == shared
        ]
        return sorted(nodes)

    def depth(self, node) -> int:
        """Tokens from the root to the end of this node."""
        total = 0
        while node is not self.root_node:
            total += len(node.key)
            node = node.parent
        return total
