"""SGLang's triton and flashinfer backends: they plan from compact rows, and the queries they attend with are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nexus_sglang.errors import ShadowError
from nexus_sglang.evidence.query_window import CapturePlan
from nexus_sglang.sglang_plugin.installer import Hook

from .backends import FLASHINFER, TRITON
from .flashinfer_lse import LogSumExp
from .shadow_batch import shadow_batch

logger = logging.getLogger(__name__)


def plan_resident(original: Callable[..., Any], backend: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``init_forward_metadata`` and ``init_forward_metadata_out_graph`` of the paged backends.

    Both run outside CUDA graphs, before every pass, so host numbers may be used. Captures and warm-ups have no request
    behind them: they plan with their own lengths over rows whose content does not matter.

    Args:
        original: plans a pass.
        backend: SGLang's attention backend.
        forward_batch: the batch of the pass, or the view of it from which a CUDA graph is replayed.
        args: as for the hooked function.
        kwargs: as for the hooked function.

    Raises:
        ShadowError: in debug mode, the batch is of other rows than the pass.
    """
    runtime = backend.nexus_runtime
    if runtime.batch_rows:
        if runtime.config.debug:
            _require_rows(forward_batch.req_pool_indices.tolist(), runtime.batch_rows)
        padding = backend.get_cuda_graph_seq_len_fill_value()
        forward_batch = shadow_batch(forward_batch, runtime.batch_rows, runtime.rows.resident, padding)
    return original(backend, forward_batch, *args, **kwargs)


def _require_rows(planned: list[int], batch_rows: list[int]) -> None:
    """Rows of a batch, padding included, begin with those of the pass."""
    if planned[: len(batch_rows)] != batch_rows:
        raise ShadowError(f"rows {planned} for requests in rows {batch_rows}")


def keep_queries(
    original: Callable[..., Any],
    backend: Any,
    q: Any,
    k: Any,
    v: Any,
    layer: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND ``forward_extend`` and ``forward_decode`` of the paged backends: attend as they do, then keep the queries.
    With FlashInfer their log-sum-exp is kept as well.

    A decode pass may be recorded into a CUDA graph. What is recorded follows ``req_pool_indices`` and ``positions``,
    the graph's own input buffers. The plan is made anew at the first layer of every pass and never kept with the batch:
    a recorded pass runs its Python code more than once over one batch, and only the last time is in the graph.

    Args:
        original: attends.
        backend: SGLang's attention backend.
        q: queries of the new tokens, ``[tokens, query heads * head dim]``.
        k: keys of the new tokens, or None.
        v: values of the new tokens, or None.
        layer: SGLang's ``RadixAttention``.
        forward_batch: the batch of the pass.
        args: as for the hooked function.
        kwargs: as for the hooked function.

    Returns:
        What ``original`` returns.
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
    """What hears the log-sum-exp that this pass's FlashInfer wrappers return."""
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
    prefix = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
    extend = [int(n) for n in forward_batch.extend_seq_lens_cpu]
    return runtime.window.plan_extend(runtime.batch_rows, prefix, extend, runtime.table.device)


HOOKS = tuple(
    Hook(f"layers.attention.{module}.{cls}.{method}", "around", function)
    for module, cls in (("triton_backend", TRITON), ("flashinfer_backend", FLASHINFER))
    for method, function in (
        ("init_forward_metadata", plan_resident),
        ("init_forward_metadata_out_graph", plan_resident),
        ("forward_extend", keep_queries),
        ("forward_decode", keep_queries),
    )
)
