"""What a request costs while SGLang decides whether to admit it. Imports SGLang: half a minute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nexus_sglang.config import NexusConfig
from nexus_sglang.eviction.request_plan import RequestPlan
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.sglang_plugin.scheduler import passes
from nexus_sglang.sglang_plugin.scheduler.admission import steady_size
from nexus_sglang.sglang_plugin.scheduler.runtime import NexusRuntime


def alone(shared: int, resident: int) -> NexusRuntime:
    """A runtime in whose tree this much of every path is shared, and of that this much resident."""
    runtime = NexusRuntime(NexusConfig("nexus"), PageTable(8192, 4096), chunk=256, overlap=False)
    runtime.attach_rows(torch.zeros((4, 5000), dtype=torch.int32))
    tree = SimpleNamespace(
        shared_length=lambda node: shared,
        shared_resident=lambda node: resident,
        resident_on_path=lambda node: resident,
        resident_evictable=lambda: 0,
    )
    runtime.attach_tree(tree, waiting=tuple)
    return runtime


def request(runtime: NexusRuntime, prompt: int, answered: int = 0) -> SimpleNamespace:
    plan = RequestPlan.resolve(runtime.config, runtime.largest_budget, prompt)
    return SimpleNamespace(
        rid="r",
        last_node=0,
        nexus_plan=plan,
        origin_input_ids=list(range(prompt)),
        output_ids=list(range(answered)),
        sampling_params=SimpleNamespace(max_new_tokens=1000),
        prefix_len=0,
    )


def test_the_whole_block_in_which_readers_part_is_priced():
    """145 shared tokens protect five blocks of 32: what is left of the prefix, and 15 tokens that are not shared."""
    runtime = alone(shared=145, resident=64)
    assert steady_size(runtime, request(runtime, 400)) == 64 + 15 + runtime.config.private_floor(128)
    runtime = alone(shared=0, resident=0)
    assert steady_size(runtime, request(runtime, 400)) == 128


@pytest.mark.parametrize("answered", [0, 900])
def test_a_retracted_request_costs_the_budget_it_has(answered):
    """A share of the prompt, as its sequence has it; not of prompt and answer so far, which SGLang computes again."""
    from nexus_sglang.sglang_plugin.scheduler.prefill_budget import NexusPrefillBudget

    runtime = alone(shared=0, resident=0)
    req = request(runtime, 2000, answered)
    cache = SimpleNamespace(evictable_size=lambda: 0, supports_mamba=lambda: False)
    allocator = SimpleNamespace(runtime=runtime, page_size=1, available_size=lambda: runtime.table.available)
    budget = NexusPrefillBudget(allocator, cache)
    budget.candidate = req
    runtime.table.allocate(2200)  # others hold it: the prompt has to be evicted from between its chunks
    admitted, _ = budget.check_prefill(
        extend_input_len=2000 + answered,
        total_tokens=2000 + answered,
        max_new_tokens=1000 - answered,
        input_tokens=2000 + answered,
        swa_host_hit_length=0,
        chunk_limit=256,
    )
    assert admitted
    budget.reserve(256, 1000 - answered)
    vars(runtime)["window"] = SimpleNamespace(begin=lambda row, prefix: None)
    passes.bind(runtime, req, row=1)
    assert runtime.sequences[1].budget == 400
    assert budget.physical_offset == runtime.sequences[1].budget + runtime.chunk_room
