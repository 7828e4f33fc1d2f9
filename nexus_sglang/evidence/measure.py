"""Evidence for one sequence at one event: block attention and the optional value and key terms, over all layers."""

from __future__ import annotations

import torch

from nexus_sglang.errors import IntegrityError
from nexus_sglang.kernels.distinctiveness import block_distinctiveness, block_sums
from nexus_sglang.kernels.head_attention import log_sum_exp
from nexus_sglang.kv_slots.kv_buffers import KVBuffers
from nexus_sglang.kv_slots.resident_row import ResidentRow
from nexus_sglang.policy.base import NOT_MEASURED, Evidence, Policy

from .head_reduction import HeadReduction
from .query_window import QueryWindow
from .score_group import ALONE, ScoreGroup

NEEDS = ("needs_attention", "needs_values", "needs_keys", "needs_expected", "needs_distinct_values")
"""What a policy may ask for."""
LSE_TOLERANCE = 0.02
"""How far a log-sum-exp of half-precision scores may be off: two hundredths are two per cent of the attention."""


def expected_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention that queries like these are expected to pay, times the value norm (arXiv 2510.00636).

    Gaussian queries of mean mu and covariance S give ``exp(k mu s + k S k s**2 / 2)``; both moments are those of the
    window's queries as rotated for their own positions, where the paper takes them before rotation and rotates for
    the next 512 positions.

    Args:
        queries: ``[w, Hq, D]``.
        keys: ``[T, Hkv, D]``.
        values: ``[T, Hkv, D]``.
        tokens: int64 ``[N]``, resident tokens per block.
        scale: s, factor on the scores before the softmax.

    Returns:
        float32 ``[1, Hq, N]``.
    """
    window, heads, dim = queries.shape
    groups = keys.shape[1]
    grouped = queries.float().view(window, groups, heads // groups, dim)
    logits = torch.einsum("wgid,tgd->wgit", grouped, keys.float()) * scale
    expected = torch.softmax(logits.mean(dim=0) + logits.var(dim=0, unbiased=False) / 2, dim=-1)
    worth = (expected * values.float().norm(dim=-1).T[:, None, :]).view(heads, -1)
    return block_sums(worth.T.contiguous(), tokens).T[None]


def measure(
    policy: Policy, window: QueryWindow, buffers: KVBuffers, row: ResidentRow, group: ScoreGroup = ALONE
) -> Evidence:
    """Measure what ``policy`` asks for. Nothing here waits for the device.

    Args:
        policy: says what to measure, and how heads become one row.
        window: the queries that judge.
        buffers: keys and values of all layers.
        row: T resident tokens in N blocks.
        group: ranks that hold the other heads; all of them must measure the same event.

    Returns:
        Evidence on the device of ``row``, the same bits on every rank of ``group``.
    """
    if not any(getattr(policy, need) for need in NEEDS):
        return Evidence()
    tokens = row.starts.long().diff()
    attention = HeadReduction(policy.head_reduction, group)
    expected = HeadReduction("mean" if policy.head_reduction == "qk" else policy.head_reduction, group)
    norms: list[torch.Tensor] = []
    distinct_keys: list[torch.Tensor] = []
    distinct_values: list[torch.Tensor] = []
    for layer_group in window.groups:
        judging = window.read(layer_group, row, with_lse=policy.needs_attention)
        keys = [buffers.keys_of(layer) for layer in layer_group.layers]
        values = [buffers.values_of(layer) for layer in layer_group.layers]
        if policy.needs_attention:
            attention.attend(judging, keys, row)
        if policy.needs_keys:
            distinct_keys.append(block_distinctiveness(keys, row.slots, row.starts, row.block_size))
        if policy.needs_distinct_values:
            distinct_values.append(block_distinctiveness(values, row.slots, row.starts, row.block_size))
        if not (policy.needs_values or policy.needs_expected):
            continue
        for query, key_pool, value_pool in zip(judging.queries, keys, values, strict=True):
            resident = value_pool[row.slots]
            if policy.needs_values:
                norms.append(resident.float().norm(dim=-1).mean(dim=-1))
            if policy.needs_expected:
                expected.add(expected_attention(query, key_pool[row.slots], resident, tokens, layer_group.shape.scale))
    if norms:  # per token so far
        norms = [block_sums(torch.stack(norms, dim=1), tokens).T / tokens.clamp_min(1)]
    return Evidence(
        attention=attention.result() if policy.needs_attention else NOT_MEASURED,
        value_norm=_mean(norms, group) if policy.needs_values else NOT_MEASURED,
        key_distinctiveness=_mean(distinct_keys, group) if policy.needs_keys else NOT_MEASURED,
        expected=expected.result()[0] if policy.needs_expected else NOT_MEASURED,
        value_distinctiveness=_mean(distinct_values, group) if policy.needs_distinct_values else NOT_MEASURED,
    )


def _mean(terms: list[torch.Tensor], group: ScoreGroup) -> torch.Tensor:
    """float ``[N]``: mean of terms ``[L, N]`` over layers and ranks."""
    return group.average(torch.cat(terms).mean(dim=0))


def lse_error(window: QueryWindow, buffers: KVBuffers, row: ResidentRow) -> float:
    """How far the log-sum-exp that :func:`measure` would use is from that of the row's keys. Waits for the device.

    Args:
        window: the queries and what was reported of them.
        buffers: the keys.
        row: the resident tokens.

    Returns:
        The largest difference over queries, heads and layers. NaN counts as infinite; 0 where none would be used.
    """
    worst: list[torch.Tensor] = []
    for group in window.groups:
        judging = window.read(group, row)
        if judging.lse is None:
            continue
        for layer, queries, reported in zip(group.layers, judging.queries, judging.lse, strict=True):
            keys = buffers.keys_of(layer)[row.slots]
            right = log_sum_exp(queries, keys, judging.positions, row.positions, group.shape.scale)
            worst.append((reported - right).abs().nan_to_num(torch.inf).max())
    return float(torch.stack(worst).max()) if worst else 0.0


def require_lse(window: QueryWindow, buffers: KVBuffers, row: ResidentRow) -> None:
    """Check the log-sum-exp that :func:`measure` would use. Waits for the device; arguments as there.

    Raises:
        IntegrityError: the attention backend reported another one than that of the row's keys.
    """
    error = lse_error(window, buffers, row)
    if error > LSE_TOLERANCE:
        raise IntegrityError(
            f"row {row.row}: the log-sum-exp that the attention backend reported is off by {error:.3f}"
        )
