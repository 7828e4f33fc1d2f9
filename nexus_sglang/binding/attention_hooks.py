"""SGLang's attention backends over compact rows, and the capture of queries on the way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..attention import torch_native
from ..statistics.query_window import CapturePlan


class ReadPlan(NamedTuple):
    """What every layer of one forward pass reads.

    Attributes:
        slots: per request, int64 ``[resident]`` physical slots. extend_lens: new tokens per request.
        capture: which queries enter the window.
    """

    slots: list[torch.Tensor]
    extend_lens: list[int]
    capture: CapturePlan


def read_plan(runtime, forward_batch: Any) -> ReadPlan:
    """The plan of this forward pass, made at its first layer and kept with the batch."""
    plan = getattr(forward_batch, "_nexus_plan", None)
    if plan is None:
        rows = forward_batch.req_pool_indices.tolist()
        slots = [runtime.rows.slots[row, : runtime.rows.live[row]].long() for row in rows]
        if forward_batch.forward_mode.is_extend():
            extend = [int(n) for n in forward_batch.extend_seq_lens_cpu]
            prefix = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
            capture = runtime.window.plan_extend(rows, prefix, extend, runtime.table.device)
        else:
            extend = [1] * len(rows)
            capture = runtime.window.plan_decode(forward_batch.req_pool_indices, forward_batch.positions)
        plan = forward_batch._nexus_plan = ReadPlan(slots, extend, capture)
    return plan


def torch_native_forward(original, backend, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
    """AROUND ``TorchNativeAttnBackend.forward_extend`` and ``forward_decode``: store, capture, attend."""
    runtime, pool = backend.nexus_runtime, backend.token_to_kv_pool
    if save_kv_cache and k is not None and v is not None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        # SGLang has translated out_cache_loc to physical slots already (see hooks.translate_writes).
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
    plan = read_plan(runtime, forward_batch)
    queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    runtime.window.capture(layer.layer_id, queries, plan.capture)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    if forward_batch.forward_mode.is_extend():
        out = torch_native.extend(queries, keys, values, plan.slots, plan.extend_lens, layer.scaling)
    else:
        out = torch_native.decode(queries, keys, values, plan.slots, layer.scaling)
    return out.reshape(queries.shape[0], layer.tp_q_head_num * layer.v_head_dim)
