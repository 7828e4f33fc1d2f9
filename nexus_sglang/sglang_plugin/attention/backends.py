"""SGLang's attention backends over compact rows, and the capture of queries on the way."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from nexus_sglang.errors import ShadowError
from nexus_sglang.evidence.query_window import CapturePlan

from . import plain_torch as torch_native
from .flashinfer_lse import LogSumExp
from .shadow_batch import RowsPool, shadow_batch

logger = logging.getLogger(__name__)

FLASHINFER = "FlashInferAttnBackend"
NATIVE, PAGED = "TorchNativeAttnBackend", ("TritonAttnBackend", FLASHINFER)
"""Classes of SGLang's attention backends with a reader for compact rows; subclasses of them have none."""


def backends(runner: Any) -> list[Any]:
    """The runner's attention backends; both halves where prefill and decode use different ones."""
    found = []
    for backend in filter(None, (runner.attn_backend, runner.decode_attn_backend, *runner.decode_attn_backend_group)):
        halves = type(backend).__name__ == "HybridAttnBackend"
        found += [backend.prefill_backend, backend.decode_backend] if halves else [backend]
    return found


def reports_lse(runner: Any) -> bool:
    """Whether every backend of the runner is FlashInfer's, which tells the log-sum-exp of each query."""
    return all(type(backend).__name__ == FLASHINFER for backend in backends(runner))


def install_rows(runner: Any, runtime: Any) -> None:
    """Point everything that reads KV by request row at the compact rows. Once, before CUDA graphs are captured.

    Paged backends gather their indices from the translator's ``req_to_token``, as long as no id space reads through
    another table (``KVIndexTranslator._passthrough_table``).
    """
    for backend in backends(runner):
        backend.nexus_runtime = runtime
        if type(backend).__name__ in PAGED:
            runner.kv_index_translator.req_to_token = runtime.rows.slots
            backend.req_to_token_pool = RowsPool(backend.req_to_token_pool, runtime.rows.slots)
            if hasattr(backend, "req_to_token"):
                backend.req_to_token = runtime.rows.slots


def reads_compact_rows(backend: Any, runner: Any) -> bool:
    """Whether :func:`install_rows` reached this backend and it cannot read by logical row."""
    slots, name = runner.token_to_kv_pool_allocator.runtime.rows.slots, type(backend).__name__
    translator = runner.kv_index_translator
    return name == NATIVE or (
        name in PAGED
        and backend.kv_index_translator is translator
        and translator.req_to_token is slots
        and not translator.reads_are_translated
        and backend.req_to_token_pool.req_to_token is slots
        and getattr(backend, "req_to_token", slots) is slots
    )


def plan_resident(original, backend, forward_batch, *args, **kwargs):
    """AROUND ``init_forward_metadata`` and ``init_forward_metadata_out_graph`` of the paged backends.

    Both run outside CUDA graphs, before every pass, so host numbers may be used. Captures and warm-ups have no request
    behind them: they plan with their own lengths over rows whose content does not matter.
    """
    runtime = backend.nexus_runtime
    if runtime.batch_rows:
        if (
            runtime.config.debug
            and forward_batch.req_pool_indices[: len(runtime.batch_rows)].tolist() != runtime.batch_rows
        ):
            raise ShadowError(
                f"rows {forward_batch.req_pool_indices.tolist()} for requests in rows {runtime.batch_rows}"
            )
        padding = backend.get_cuda_graph_seq_len_fill_value()
        forward_batch = shadow_batch(forward_batch, runtime.batch_rows, runtime.rows.resident, padding)
    return original(backend, forward_batch, *args, **kwargs)


def keep_queries(original, backend, q, k, v, layer, forward_batch, *args, **kwargs):
    """AROUND ``forward_extend`` and ``forward_decode`` of the paged backends: attend as they do, then keep the queries, and
    with FlashInfer their log-sum-exp.

    A decode pass may be recorded into a CUDA graph. What is recorded follows ``req_pool_indices`` and ``positions``, the
    graph's own input buffers. The plan is made anew at the first layer of every pass and never kept with the batch: a
    recorded pass runs its Python code more than once over one batch, and only the last time is in the graph.
    """
    runtime = backend.nexus_runtime
    if layer.layer_id == runtime.window.first_layer:
        backend.nexus_capture = _capture_plan(runtime, forward_batch)
    listener = _listener(backend) if runtime.window.lse_rings else None
    out = original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    lse = listener.take() if listener else None
    if listener and lse is None:
        logger.warning(
            "nexus: FlashInfer's wrappers were passed by; the log-sum-exp of queries is computed here instead"
        )
        runtime.window.forget_lse()
    if backend.nexus_capture is not None:
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        runtime.window.capture(layer.layer_id, queries, backend.nexus_capture, lse)
    return out


def _listener(backend: Any) -> LogSumExp:
    """Of what this pass's FlashInfer wrappers return."""
    if not hasattr(backend, "nexus_listener"):
        backend.nexus_listener = LogSumExp()
    plan = backend.forward_metadata
    wrappers = getattr(plan, "decode_wrappers", None) or [*plan.prefill_wrappers, backend.prefill_wrapper_ragged]
    backend.nexus_listener.listen(wrappers)
    return backend.nexus_listener


def _capture_plan(runtime: Any, forward_batch: Any) -> CapturePlan | None:
    """Queries of this pass to keep; None for a prefill without requests (a capture or a warm-up)."""
    if not forward_batch.forward_mode.is_extend():
        return runtime.window.plan_decode(forward_batch.req_pool_indices, forward_batch.positions)
    if not runtime.batch_rows:
        return None
    prefix, extend = ([int(n) for n in lens] for lens in
                      (forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu))  # fmt: skip
    return runtime.window.plan_extend(runtime.batch_rows, prefix, extend, runtime.table.device)


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
        slots = [runtime.rows.slots[row, : runtime.rows.resident[row]].long() for row in rows]
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
