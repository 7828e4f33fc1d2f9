"""Attention over compact rows in plain PyTorch: what SGLang's backend torch_native does here, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from nexus_sglang.evidence.query_window import CapturePlan
from nexus_sglang.sglang_plugin.installer import Hook

from .backends import NATIVE


def extend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: list[torch.Tensor],
    extend_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """Causal attention of each request's new tokens over its resident ones.

    Only the new rows are computed (SGLang's own CPU backend computes a square of the whole length).

    Args:
        query: ``[tokens, Hq, D]``, requests back to back.
        keys: pool buffer ``[slots, Hkv, D]``.
        values: pool buffer ``[slots, Hkv, Dv]``.
        slots: per request, int64 ``[resident]`` physical slots in order, the new tokens last.
        extend_lens: new tokens per request.
        scale: factor of the scores.

    Returns:
        ``[tokens, Hq, Dv]``.
    """
    out = query.new_empty((query.shape[0], query.shape[1], values.shape[2]))
    begin = 0
    for ids, n in zip(slots, extend_lens, strict=True):
        q = query[begin : begin + n].transpose(0, 1).unsqueeze(0)
        k = _expand(keys[ids], q)
        v = _expand(values[ids], q)
        before = len(ids) - n
        if before:
            mask = torch.ones(n, len(ids), dtype=torch.bool, device=q.device).tril_(diagonal=before)
            result = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        else:
            result = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        out[begin : begin + n] = result[0].transpose(0, 1)
        begin += n
    return out


def _expand(kv: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """``[T, Hkv, D]`` to ``[1, Hq, T, D]`` in the query's dtype: a key head once for each query head of its group."""
    group = query.shape[1] // kv.shape[1]
    kv = kv.to(query.dtype).transpose(0, 1).contiguous()
    return kv[:, None].expand(-1, group, -1, -1).reshape(1, query.shape[1], *kv.shape[1:])


def decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: list[torch.Tensor], scale: float
) -> torch.Tensor:
    """Attention of one new token per request over its resident tokens, itself included.

    Args:
        query: ``[batch, Hq, D]``.
        keys: pool buffer ``[slots, Hkv, D]``.
        values: pool buffer ``[slots, Hkv, Dv]``.
        slots: per request, int64 ``[resident]`` physical slots in order, the new token last.
        scale: factor of the scores.

    Returns:
        ``[batch, Hq, Dv]``.
    """
    out = query.new_empty((query.shape[0], query.shape[1], values.shape[2]))
    for i, ids in enumerate(slots):
        k = keys[ids].to(query.dtype).transpose(0, 1)
        v = values[ids].to(query.dtype).transpose(0, 1)
        q = query[i].view(k.shape[0], -1, query.shape[2])
        # The query heads of a group become rows of one query: no copy of the keys per head.
        out[i] = scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)[0].reshape(query.shape[1], -1)
    return out


class ReadPlan(NamedTuple):
    """What every layer of one forward pass reads.

    Attributes:
        slots: per request, int64 ``[resident]`` physical slots.
        extend_lens: new tokens per request.
        capture: which queries enter the window.
    """

    slots: list[torch.Tensor]
    extend_lens: list[int]
    capture: CapturePlan


def read_plan(runtime: Any, forward_batch: Any) -> ReadPlan:
    """The plan of a forward pass, made at its first layer and kept with the batch.

    Args:
        runtime: the ``NexusRuntime``.
        forward_batch: SGLang's batch of the pass.
    """
    plan = getattr(forward_batch, "_nexus_plan", None)
    if plan is None:
        rows = forward_batch.req_pool_indices.tolist()
        slots = [runtime.rows.slots[row, : runtime.rows.resident[row]].long() for row in rows]
        if forward_batch.forward_mode.is_extend():
            new = [int(n) for n in forward_batch.extend_seq_lens_cpu]
            prefix = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
            capture = runtime.window.plan_extend(rows, prefix, new, runtime.table.device)
        else:
            new = [1] * len(rows)
            capture = runtime.window.plan_decode(forward_batch.req_pool_indices, forward_batch.positions)
        plan = ReadPlan(slots, new, capture)
        forward_batch._nexus_plan = plan
    return plan


def attend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    """AROUND ``TorchNativeAttnBackend.forward_extend`` and ``forward_decode``: store, keep the queries, attend.

    Args:
        original: not called.
        backend: SGLang's ``TorchNativeAttnBackend``.
        q: queries of the new tokens, ``[tokens, Hq * D]``.
        k: keys of the new tokens, ``[tokens, Hkv, D]``, or None where they are stored already.
        v: values of the new tokens, ``[tokens, Hkv, Dv]``, or None where they are stored already.
        layer: SGLang's ``RadixAttention``.
        forward_batch: the batch of the pass.
        save_kv_cache: False where keys and values are stored already.
        kwargs: as for the hooked function.

    Returns:
        ``[tokens, Hq * Dv]``.
    """
    runtime = backend.nexus_runtime
    pool = backend.token_to_kv_pool
    if save_kv_cache and k is not None and v is not None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc  # not needed where torch_native does not serve

        # SGLang has translated out_cache_loc to physical slots already (see build.translate_writes).
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
    plan = read_plan(runtime, forward_batch)
    queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    runtime.window.capture(layer.layer_id, queries, plan.capture)
    keys = pool.get_key_buffer(layer.layer_id)
    values = pool.get_value_buffer(layer.layer_id)
    if forward_batch.forward_mode.is_extend():
        out = extend(queries, keys, values, plan.slots, plan.extend_lens, layer.scaling)
    else:
        out = decode(queries, keys, values, plan.slots, layer.scaling)
    return out.reshape(queries.shape[0], layer.tp_q_head_num * layer.v_head_dim)


HOOKS = tuple(
    Hook(f"layers.attention.torch_native_backend.{NATIVE}.{method}", "around", attend)
    for method in ("forward_extend", "forward_decode")
)
