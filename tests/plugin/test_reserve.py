"""On a GPU, what is allocated beside the KV pool comes out of the pool's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nexus_sglang.config import NexusConfig
from nexus_sglang.errors import ConfigError
from nexus_sglang.kv_slots.capacity import affordable_requests, request_memory, side_memory, virtual_size
from nexus_sglang.sglang_plugin.scheduler import reserve

CELL = 131_072
CONTEXT = 32_768


def configurator(requests: int, device: str = "cuda"):
    """An 8B model: 32 layers of 32 query and 8 key heads."""
    model = SimpleNamespace(
        context_len=CONTEXT,
        num_hidden_layers=32,
        get_max_num_attention_heads=lambda: 32,
        head_dim=128,
        get_num_kv_heads=lambda ranks: 8 // ranks,
    )
    return SimpleNamespace(
        device=device,
        model_config=model,
        model_dtype=torch.bfloat16,
        resolve_max_num_reqs=lambda tokens: requests,
        config_from_budget=lambda size: SimpleNamespace(max_total_num_tokens=size // CELL),
        kv_cache_dtype=torch.bfloat16,
    )


@pytest.fixture(autouse=True)
def serving(monkeypatch):
    from sglang.srt import runtime_context

    monkeypatch.setattr(reserve.carrier, "current", lambda: NexusConfig("nexus"))
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=2))
    chosen = SimpleNamespace(max_running_requests=None)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: chosen)
    return chosen


def test_windows_and_rows_are_counted():
    free = 100 * 2**30
    left = reserve.reserve_memory(lambda *args: free, configurator(256), 0)
    ring = 16 * 32 * 16 * (128 * 2 + 4)
    ids = virtual_size(free // CELL, NexusConfig("nexus"), CONTEXT, 256)
    assert free - left == 257 * (ring + 8 * CONTEXT) + 24 * ids
    assert free - left == side_memory(256, request_memory(CONTEXT, 16, 32, 16, 128, 2), ids)


def test_the_estimate_covers_what_is_built():
    from nexus_sglang.evidence.query_window import LayerShape, QueryWindow
    from nexus_sglang.kv_slots.block_ledger import BlockLedger
    from nexus_sglang.kv_slots.compact_rows import CompactRows
    from nexus_sglang.kv_slots.page_table import PageTable

    table = PageTable(5000, 1000)
    rows = CompactRows(torch.zeros((9, 700), dtype=torch.int32), table)
    window = QueryWindow({i: LayerShape(4, 16, 1.0) for i in range(3)}, 9, 16, torch.float16, "cpu", with_lse=True)
    ledger = BlockLedger(5000, 1)
    held = (table.v2p, table.free_virtual, rows.slots, rows.positions, ledger.state, ledger.weight)
    built = window.bytes + sum(x.numel() * x.element_size() for x in held)
    assert side_memory(8, request_memory(700, 16, 3, 4, 16, 2), 5001) == built + 8


def test_too_many_requests_are_refused_with_the_arithmetic():
    with pytest.raises(
        ConfigError, match="no memory for the KV pool: .* of 1.00 GiB .* 4096 requests.*--max-running-requests"
    ):
        reserve.reserve_memory(lambda *args: 2**30, configurator(4096), 0)


def test_the_cpu_is_left_alone():
    assert reserve.reserve_memory(lambda *args: 5, configurator(4096, "cpu"), 0) == 5


def test_requests_are_limited_where_nobody_chose_how_many(serving):
    """SGLang's own number would give 17 GiB of windows to 4,096 requests of this model."""
    tokens = 100 * 2**30 // (CELL // 2)  # two ranks, half of the heads each
    per_request = request_memory(CONTEXT, 16, 32, 16, 128, 2)
    limit = reserve.limit_requests(4096, configurator(4096), tokens)
    assert limit == affordable_requests(tokens * CELL // 2, per_request) < 4096
    assert 0.9 < (limit + 1) * per_request / (100 * 2**30 / 16) <= 1
    assert reserve.limit_requests(200, configurator(200), tokens) == 200
    assert reserve.limit_requests(4096, configurator(4096, "cpu"), tokens) == 4096
    assert reserve.limit_requests(4096, configurator(4096), 1000) == 64, "a small pool still serves a batch"
    serving.max_running_requests = 4096
    assert reserve.limit_requests(4096, configurator(4096), tokens) == 4096
