"""The parts of a scheduler process are built in order, and a use before its time is an error that says so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nexus_sglang.config import NexusConfig
from nexus_sglang.errors import SelfCheckError
from nexus_sglang.eviction.request_plan import RequestPlan
from nexus_sglang.evidence.query_window import LayerShape
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.sglang_plugin.scheduler import requests
from nexus_sglang.sglang_plugin.scheduler.runtime import NexusRuntime, runtime_of


def made(**settings) -> NexusRuntime:
    return NexusRuntime(NexusConfig("nexus", **settings), PageTable(8192, 4096), chunk=256, overlap=False)


def test_parts_are_built_in_order():
    runtime = made()
    layers = {0: LayerShape(2, 8, 1.0)}
    pool = SimpleNamespace(get_key_buffer=None, get_value_buffer=None)
    with pytest.raises(SelfCheckError, match="runtime.rows is used before build.translate_writes"):
        runtime.attach_layers(layers, torch.float32, pool)
    runtime.attach_rows(torch.zeros((4, 100), dtype=torch.int32))
    with pytest.raises(SelfCheckError, match="runtime.evictor is used before build.adopt_layers"):
        _ = runtime.evictor
    runtime.attach_layers(layers, torch.float32, pool)
    assert runtime.evictor.counters is runtime.counters
    with pytest.raises(SelfCheckError, match="runtime.tree is used before build.scheduler_ready"):
        _ = runtime.tree
    runtime.attach_tree(SimpleNamespace(), waiting=tuple)
    with pytest.raises(SelfCheckError, match="runtime.rows is set already"):
        runtime.attach_rows(torch.zeros((4, 100), dtype=torch.int32))


class Request:
    """As much of SGLang's ``Req`` as a request that comes in has."""

    def __init__(self, prompt: int, params: dict | None = None, **fields):
        self.rid = "r"
        self.origin_input_ids = list(range(prompt))
        self.sampling_params = SimpleNamespace(custom_params=params, max_new_tokens=50, min_new_tokens=0)
        self.extra_key = None
        self.error = None
        vars(self).update(fields)

    def set_finish_with_abort(self, message: str) -> None:
        self.error = message
        self.origin_input_ids = [0]


def accepted(prompt: int, params: dict | None = None, **fields) -> Request:
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(runtime=made()), max_req_input_len=5000)
    request = Request(prompt, params, **fields)
    received = SimpleNamespace(
        logprob_start_len=-1,
        return_logprob=False,
        routed_experts_start_len=0,
        extra_key=request.extra_key,
        lora_id=None,
        kv_hints=None,
    )
    assert requests.accept_request(request, scheduler, received) is request
    requests.fit_request(None, scheduler, request)
    return request


def test_a_plan_is_made_where_a_request_is_accepted():
    request = accepted(2000, {"kv_budget": 0.5, "kv_pin_tokens": 40, "kv_trace": True}, extra_key="tenant")
    assert request.nexus_plan == RequestPlan(1000, 64, True, own_budget=0.5)
    assert request.extra_key == '[true, 0.5, null, "tenant"]'
    assert accepted(2000).extra_key is None


def test_a_prompt_that_sglang_will_truncate_is_planned_as_it_will_be():
    assert accepted(9000).nexus_plan.budget == 1000


def test_a_request_that_asks_for_nonsense_is_answered_and_has_a_plan_meanwhile():
    request = accepted(2000, {"kv_budgets": 1})
    assert "kv_budgets" in request.error
    assert request.nexus_plan.budget == 128


def test_an_answer_that_is_kept_whole_is_fitted_to_the_pool():
    request = accepted(4040, {"kv_evict": False})
    assert request.sampling_params.max_new_tokens == 4096 - 32 - 4040
    assert "does not fit the KV pool" in accepted(4064, {"kv_evict": False}).error


def test_the_runtime_is_found_behind_the_allocator():
    runtime = object()
    assert runtime_of(SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(runtime=runtime))) is runtime
