"""Attention over compact rows on plain torch, for the CPU."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


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
        query: ``[tokens, Hq, D]``, requests back to back. keys, values: pool buffers ``[slots, Hkv, D]``.
        slots: per request, int64 ``[resident]`` physical slots in order, the new tokens last.
        extend_lens: new tokens per request.

    Returns:
        ``[tokens, Hq, Dv]``.
    """
    out = query.new_empty((query.shape[0], query.shape[1], values.shape[2]))
    begin = 0
    for ids, n in zip(slots, extend_lens, strict=True):
        q = query[begin : begin + n].transpose(0, 1).unsqueeze(0)
        k, v = _expand(keys[ids], q), _expand(values[ids], q)
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
    """``[T, Hkv, D]`` to ``[1, Hq, T, D]`` in the query's dtype; heads of a group share memory."""
    group = query.shape[1] // kv.shape[1]
    kv = kv.to(query.dtype).transpose(0, 1).contiguous()
    return kv[:, None].expand(-1, group, -1, -1).reshape(1, query.shape[1], *kv.shape[1:])


def decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: list[torch.Tensor], scale: float
) -> torch.Tensor:
    """Attention of one new token per request over its resident tokens, itself included.

    Args:
        query: ``[batch, Hq, D]``. Others as in :func:`extend`.

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
