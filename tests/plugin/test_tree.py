"""The radix tree's core with readers, healing and thinning, on SGLang's structures. Imports SGLang: half a minute."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch

from nexus_sglang.config import NexusConfig
from nexus_sglang.eviction.counters import Counters
from nexus_sglang.kv_slots.block_ledger import BlockLedger
from nexus_sglang.kv_slots.page_table import PageTable


class Forest:
    """A tree over a page table, without requests."""

    def __init__(self):
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components.full import FullComponent

        from nexus_sglang.sglang_plugin.scheduler.tree import FULL, NexusTreeCore

        self.table = PageTable(2000, 1000)
        runtime = SimpleNamespace(table=self.table, counters=Counters(), config=NexusConfig("nexus"))
        params = CacheInitParams(False, None, SimpleNamespace(runtime=runtime, device="cpu"), 1)
        cache = SimpleNamespace(enable_session_radix_cache=False)
        self.core = NexusTreeCore(params, {FULL: FullComponent(cache, params)})

    def insert(self, tokens: list[int], prompt: int, known: int = 0, ids: torch.Tensor | None = None, **space):
        """Insert a sequence of which ``known`` tokens came from the tree; returns (last node, ids of the tree).

        ``space`` may be ``extra_key`` and ``cache_salt``.
        """
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV

        if ids is None:
            ids = torch.cat((self.match(tokens[:known], **space)[1], self.table.allocate(len(tokens) - known)))
        params = InsertParams(key=RadixKey(array("q", tokens), **space), value=ids, prev_prefix_len=known)
        step = self.core.begin_insert(params)
        while True:
            for action in step.actions:
                assert isinstance(action, FreeDeviceKV)
                for indices in action.indices:
                    self.table.free(indices)
            if step.result is not None:
                break
            step = self.core.resume_insert()
        for action in self.core.end_insert():
            for indices in action.indices:
                self.table.free(indices)
        node = step.result.last_device_node
        self.core.mark_prompt(node, prompt)
        return node, self.core.collect_full_device_indices(node, self.core.root_node.id)

    def match(self, tokens: list[int], **space):
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        result = self.core.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), **space)))
        ids = self.core.collect_full_device_indices(result.last_device_node, self.core.root_node.id)
        return result.last_device_node, ids


@pytest.fixture
def forest():
    return Forest()


SYSTEM = list(range(100))


def test_one_conversation_shares_nothing(forest):
    node, _ = forest.insert(SYSTEM + [201] * 20, prompt=110)
    assert forest.core.shared_length(node) == 0
    node, _ = forest.insert(SYSTEM + [201] * 20 + [202] * 30, prompt=140, known=120)
    assert forest.core.shared_length(node) == 0


def test_an_answer_tokenised_anew_is_not_a_second_reader(forest):
    """Turn 2 repeats the answer of turn 1 with other tokens at its end: two children, one conversation."""
    forest.insert(SYSTEM, prompt=100)  # SGLang inserts the prompt after its prefill, the answer at the end
    forest.insert(SYSTEM + [300] * 10 + [301] * 10, prompt=100, known=100)
    node, _ = forest.match(SYSTEM + [300] * 10 + [302] * 40)
    assert forest.core.shared_length(node) == 0
    node, _ = forest.insert(SYSTEM + [300] * 10 + [302] * 40, prompt=150, known=110)
    assert forest.core.shared_length(node) == 0


def test_two_prompts_share_what_they_have_in_common(forest):
    forest.insert(SYSTEM + [400] * 30, prompt=130)
    node, _ = forest.match(SYSTEM + [500] * 30)
    assert forest.core.shared_length(node) == 100, "the first prompt goes on from where the second starts"
    node, _ = forest.insert(SYSTEM + [500] * 30, prompt=130, known=100)
    assert forest.core.shared_length(node) == 100


def test_a_running_reader_protects_its_whole_path(forest):
    node, _ = forest.insert(SYSTEM + [600] * 20, prompt=120)
    mine = forest.core.inc_lock_ref(node)
    other = forest.core.inc_lock_ref(node)
    assert forest.core.shared_length(node) == 120
    forest.core.dec_lock_ref(node, other.to_dec_params())
    assert forest.core.shared_length(node) == 0
    forest.core.dec_lock_ref(node, mine.to_dec_params())


def test_a_duplicate_heals_the_copy_that_stays(forest):
    _, first = forest.insert(SYSTEM, prompt=100)
    forest.table.evict(first[20:60])
    duplicate = forest.table.allocate(100)
    forest.table.evict(duplicate[50:60])
    _, kept = forest.insert(SYSTEM, prompt=100, ids=duplicate)
    assert torch.equal(kept, first), "the row is repointed to the tree's names"
    assert forest.table.resident(kept) == 90 and forest.core.counters.holes_healed == 30
    assert [forest.core.take_healed() for _ in range(2)] == [True, False]
    assert forest.table.counts().virtual_held == 100 and forest.table.counts().physical_mapped == 90
    forest.table.check_integrity()


def test_holes_travel_through_splits(forest):
    node, ids = forest.insert(SYSTEM, prompt=100)
    forest.table.evict(ids[40:50])
    half, front = forest.match(SYSTEM[:45] + [9999])
    assert torch.equal(front, ids[:45]) and forest.core.resident_on_path(half) == 40
    assert forest.core.resident_on_path(node) == 90 == forest.core.resident_evictable()
    held = forest.core.inc_lock_ref(half)
    assert forest.core.resident_evictable() == 50
    forest.core.dec_lock_ref(half, held.to_dec_params())


def test_the_device_is_asked_once_per_change(forest, monkeypatch):
    """Scheduling asks at every step while requests wait; debug mode checks each answer against the table."""
    from nexus_sglang.sglang_plugin.scheduler import tree

    asked = []
    monkeypatch.setattr(tree, "download", lambda counts: asked.append(len(counts)) or counts)
    core = forest.core
    forest.core.debug = True
    node, ids = forest.insert(SYSTEM, prompt=100)
    other, _ = forest.insert([7000 + i for i in range(50)], prompt=50)
    assert [core.resident_evictable() for _ in range(5)] == [150] * 5 and asked == [2]
    held = core.inc_lock_ref(node)
    assert core.resident_evictable() == 50 and core.resident_on_path(node) == 100 and asked == [2]
    forest.table.evict(ids[40:50])
    with pytest.raises(tree.IntegrityError, match="100 physical slots are counted behind 1 nodes, 90 are mapped"):
        core.resident_on_path(node)
    core.recount(node)
    assert core.resident_on_path(node) == 90 and asked == [2, 1]
    core.dec_lock_ref(node, held.to_dec_params())
    half, _ = forest.match(SYSTEM[:45] + [9999])
    assert core.resident_on_path(half) == 40 and core.resident_evictable() == 140 and asked[2:] == [1, 1], "both halves"
    forest.insert(SYSTEM, prompt=100)  # a second copy fills the holes of both halves
    assert core.resident_evictable() == 150 and asked[4:] == [2]
    assert core.shared_resident(half) == 45 and core.resident_on_path(other) == 50 and len(asked) == 5


def test_cold_nodes_are_thinned_oldest_first(forest):
    from nexus_sglang.sglang_plugin.scheduler.pressure import relieve

    old, old_ids = forest.insert([1000 + i for i in range(100)], prompt=100)
    new, new_ids = forest.insert([2000 + i for i in range(100)], prompt=100)
    running, running_ids = forest.insert([3000 + i for i in range(100)], prompt=100)
    forest.core.inc_lock_ref(running)
    ledger = BlockLedger(2000, 0)
    ledger.weight[old_ids] = torch.arange(100).float() // 10
    runtime = SimpleNamespace(
        tree=forest.core,
        table=forest.table,
        ledger=ledger,
        config=NexusConfig("nexus", block_size=10, sink_tokens=10),
        counters=forest.core.counters,
    )
    assert forest.core.cold_nodes(shared=True) == []
    forest.core.debug = True
    assert forest.core.resident_evictable() == 200
    assert relieve(runtime, 30) == 30
    assert forest.core.resident_evictable() == 170
    assert forest.table.resident(old_ids) == 70 and forest.table.resident(new_ids) == 100
    assert (forest.table.v2p[old_ids[:10]] > 0).all(), "sinks stay, though lightest"
    assert (forest.table.v2p[old_ids[10:40]] == 0).all(), "the lightest blocks went"
    relieve(runtime, 1000)
    assert forest.table.resident(old_ids) == forest.table.resident(new_ids) == 20, "sinks and the newest block"
    assert forest.table.resident(running_ids) == 100, "what a request holds is not touched"
    node, ids = forest.match([1000 + i for i in range(100)])
    assert node == old and len(ids) == 100, "thinner, not gone"
    forest.table.check_integrity()
