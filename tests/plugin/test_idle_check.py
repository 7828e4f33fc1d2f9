"""SGLang asks in a loop while it is idle whether slots are lost; what nobody touched is looked at once."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.sglang_plugin.scheduler.allocator import NexusAllocator


def test_slots_are_counted_again_only_after_they_changed_hands(monkeypatch):
    table = PageTable(64, 16)
    looks = []
    check = table.check_integrity
    monkeypatch.setattr(table, "check_integrity", lambda: looks.append(1) or check())
    runtime = SimpleNamespace(
        table=table,
        rows=SimpleNamespace(check_integrity=lambda: None),
        evictor=SimpleNamespace(catch_up=lambda: None),
        ledger=SimpleNamespace(forget=lambda ids: None),
    )
    allocator = NexusAllocator(runtime, torch.float32, "cpu", None, False)

    def ask():
        return allocator.verify_byte_accounting(), len(looks)

    assert [ask(), ask()] == [([], 1), ([], 1)]
    ids = allocator.alloc(5)
    assert [ask(), ask()] == [([], 2), ([], 2)]
    allocator.free(ids)
    assert ask() == ([], 3)
    table.v2p[table.allocate(2)] = 0  # two slots lost
    assert "physical" in ask()[0][0]
    assert ask()[1] == 5, "a fault is said every time"
