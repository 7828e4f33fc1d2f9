"""The radix tree's core with what eviction has to know about its nodes.

SGLang's Python tree core, registered as the backend ``nexus``. A node additionally remembers whether a prompt runs
through it (``carries_prompt``), which tells a shared prefix from a conversation whose answer was tokenised anew, and
how many physical slots are behind it (``resident``). A duplicate that is about to be freed first fills the holes of the
copy that stays.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from nexus_sglang.device import download, upload
from nexus_sglang.errors import IntegrityError

from .prefix_space import space_of
from .runtime import runtime_of

FULL = ComponentType.FULL


class NexusTreeCore(UnifiedTreeCore):
    """``UnifiedTreeCore`` plus readers, physical sizes and healing.

    Args:
        params: SGLang's ``CacheInitParams``, whose allocator is a ``NexusAllocator``.
        components: as for ``UnifiedTreeCore``.
    """

    def __init__(self, params: Any, components: dict[ComponentType, Any]):
        runtime = runtime_of(params)
        self.table = runtime.table
        self.counters = runtime.counters
        self.debug = runtime.config.debug
        self._healed = False
        super().__init__(params, components)

    def take_healed(self) -> bool:
        """Whether evicted tokens of the tree have become resident again since this was last asked."""
        healed = self._healed
        self._healed = False
        return healed

    def _split_node(self, key: Any, child: Any, split_len: int) -> tuple[Any, Any]:
        """The new upper half carries a prompt where the node did; what is resident is counted anew for both."""
        node, action = super()._split_node(key, child, split_len)
        node.carries_prompt = getattr(child, "carries_prompt", False)
        return node, action

    def _insert_overlap_step(self, state: Any) -> None:
        """Tokens that are in the tree already come a second time: the copy that stays takes what it lacks."""
        start = max(0, state.params.prev_prefix_len - state.total_prefix_length)
        end = state.overlap_prefix_len
        node = state.overlap_node
        if start < end:
            kept = node.component_data[FULL].value[start:end]
            filled = self.table.adopt(kept, state.value[start:end].to(kept.dtype))
            self.counters.holes_healed += filled
            self._healed = self._healed or filled > 0
            node.resident = None
        super()._insert_overlap_step(state)

    def mark_prompt(self, node_id: int, prompt_tokens: int) -> None:
        """Remember which nodes of the path to a node hold tokens of a prompt.

        Args:
            node_id: the last node of the sequence.
            prompt_tokens: length of its prompt.
        """
        node = self.node_by_id(node_id)
        end = self.depth(node)
        while node is not self.root_node:
            end -= len(node.key)
            if end < prompt_tokens:
                node.carries_prompt = True
            node = node.parent

    def shared_length(self, node_id: int) -> int:
        """Leading tokens of the path to a node that other readers use too.

        A node is shared when another running request holds it (its lock count is above one), or when at least two
        prompts continue below it. At the last node the asking request itself counts as one of them.

        Args:
            node_id: the last node of the asking request.
        """
        node = self.node_by_id(node_id)
        own_continuation = 1
        end = self.depth(node)
        while node is not self.root_node:
            prompts = sum(getattr(child, "carries_prompt", False) for child in node.children.values())
            if node.component_data[FULL].lock_ref > 1 or prompts + own_continuation > 1:
                return end
            end -= len(node.key)
            own_continuation = 0
            node = node.parent
        return 0

    def shared_resident(self, node_id: int) -> int:
        """Physical slots behind the leading tokens that other readers use."""
        shared = self.shared_length(node_id)
        path = self._path(node_id)
        ends = accumulate(len(node.key) for node in path)  # the shared part ends with a node
        return self._resident([node for node, end in zip(path, ends, strict=True) if end <= shared])

    def resident_on_path(self, node_id: int) -> int:
        """Physical slots behind the path to ``node_id``."""
        return self._resident(self._path(node_id))

    def recount(self, node_id: int) -> None:
        """Tokens on the path to ``node_id`` were evicted: its nodes are counted anew when somebody asks."""
        for node in self._path(node_id):
            node.resident = None

    def _path(self, node_id: int) -> list[Any]:
        """Nodes from below the root to ``node_id``."""
        nodes = []
        node = self.node_by_id(node_id)
        while node is not self.root_node:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def _resident(self, nodes: list[Any]) -> int:
        """Physical slots behind these nodes.

        A node's count is kept with it, so the host waits for the device only for nodes that are new or have changed:
        scheduling asks at every step while requests wait.

        Raises:
            IntegrityError: in debug mode, a kept count is wrong.
        """
        values = {node: node.component_data[FULL].value for node in nodes}
        stale = [node for node in nodes if (getattr(node, "resident", None) or (None,))[0] is not values[node]]
        if stale:
            mapped = self.table.mapped(torch.cat([values[node] for node in stale]))
            ends = upload(list(accumulate(len(values[node]) for node in stale)), mapped.device)
            before = 0
            for node, total in zip(stale, download(mapped.cumsum(0)[ends - 1]).tolist(), strict=True):
                node.resident = (values[node], total - before)
                before = total
        count = sum(node.resident[1] for node in nodes)
        if self.debug and nodes:
            real = self.table.resident(torch.cat(list(values.values())))
            if count != real:
                raise IntegrityError(
                    f"tree: {count} physical slots are counted behind {len(nodes)} nodes, {real} are mapped"
                )
        return count

    def resident_evictable(self) -> int:
        """Physical slots behind nodes that no running request locks."""
        return self._resident(
            [
                node
                for node in self._node_arena.values()
                if node is not self.root_node and node.component_data[FULL].lock_ref == 0
            ]
        )

    def cold_nodes(self, shared: bool) -> list[Any]:
        """Nodes that no running request holds and that may be thinned, least recently used first (SGLang's order).

        Args:
            shared: True for those below which several prompts continue, False for the others.
        """
        nodes = [
            node
            for node in self._node_arena.values()
            if node is not self.root_node
            and node.component_data[FULL].lock_ref == 0
            and space_of(node.key.extra_key).evict
            and (sum(getattr(c, "carries_prompt", False) for c in node.children.values()) > 1) == shared
        ]
        return sorted(nodes)

    def depth(self, node: Any) -> int:
        """Tokens from the root to the end of this node."""
        total = 0
        while node is not self.root_node:
            total += len(node.key)
            node = node.parent
        return total
