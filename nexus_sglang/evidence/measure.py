"""Evidence for one sequence at one event: block attention and the optional value and key terms, over all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nexus_sglang.kernels.block_attention import MAX_BLOCK_SIZE, block_attention, block_attention_rows, log_sum_exp
from nexus_sglang.kernels.distinctiveness import block_distinctiveness, block_sums
from nexus_sglang.policy.base import Evidence, Policy

from .query_window import QueryWindow
from .score_group import ALONE, ScoreGroup

TOP_HEADS = 8
"""How many of the strongest (layer, head) pairs the ``top`` reduction averages."""
NEEDS = ("needs_attention", "needs_values", "needs_keys", "needs_expected", "needs_distinct_values")
"""What a policy may ask for."""


_FUSED = {"max": "max", "mean": "sum"}
"""Head reductions of this package that ``block_attention_rows`` does while it reads the keys."""


class _HeadReduction:
    """Running reduction of ``[W, H, N]`` per-head rows over heads and layers, and at the end over ranks."""

    def __init__(self, kind: str, group: ScoreGroup):
        self.kind, self.group, self.total, self.heads = kind, group, None, 0

    def add(self, per_head: torch.Tensor) -> None:
        if self.kind == "max":
            rows = per_head.amax(dim=1)
            self.total = rows if self.total is None else torch.maximum(self.total, rows)
        elif self.kind == "top":
            pool = per_head if self.total is None else torch.cat((self.total, per_head), dim=1)
            self.total = pool.topk(min(TOP_HEADS, pool.shape[1]), dim=1).values
        else:
            rows = per_head.sum(dim=1)
            self.total = rows if self.total is None else self.total + rows
        self.heads += per_head.shape[1]

    def result(self) -> torch.Tensor:
        """``[W, N]``, the same on every rank."""
        if self.kind == "max":
            return self.group.largest(self.total)
        if self.kind == "top":
            pool = torch.cat(tuple(self.group.gather(self.total)), dim=1)
            return pool.topk(min(TOP_HEADS, pool.shape[1]), dim=1).values.mean(dim=1)
        return self.group.total(self.total) / (self.heads * self.group.world)


def expected_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention that queries like these are expected to pay, times the value norm (arXiv 2510.00636).

    Gaussian queries of mean mu and covariance S give ``exp(k mu s + k S k s**2 / 2)``; both moments are those of the
    window's queries as rotated for their own positions, where the paper takes them before rotation and rotates for
    the next 512 positions.

    Args:
        queries: ``[W, Hq, D]``. keys, values: ``[T, Hkv, D]``. tokens: int64 ``[N]``, per block. scale: s.

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


def _attend(
    reduction: _HeadReduction, queries, key_pools, slots, at, positions, ordinal, starts, blocks, size, scale, lse
) -> None:  # fmt: skip
    """Add the attention of layers of one shape to ``reduction``: fused where the kernel can, else layer by layer."""
    if reduction.kind in _FUSED and size <= MAX_BLOCK_SIZE:
        if reduction.total is None:
            reduction.total = torch.zeros((queries.shape[1], blocks), dtype=torch.float32, device=queries.device)
        block_attention_rows(
            queries, key_pools, slots, at, positions, ordinal, blocks, size, scale, reduction.total, _FUSED[reduction.kind],
            lse, starts,
        )  # fmt: skip
        reduction.heads += queries.shape[0] * queries.shape[2]
        return
    cells = ordinal * size + positions % size
    for query, pool in zip(queries, key_pools, strict=True):
        keys = pool[slots]
        if reduction.kind == "qk":
            # Heads are averaged before the softmax, so ranks have to be as well.
            query, keys = (reduction.group.average(x.float().mean(dim=1, keepdim=True)) for x in (query, keys))
        reduction.add(block_attention(query, keys, at, positions, cells, blocks, size, scale))


def lse_error(
    window: QueryWindow, keys_of: Callable[[int], torch.Tensor], row: int, length: int, slots: torch.Tensor,
    positions: torch.Tensor, changed: int,
) -> float:  # fmt: skip
    """Largest difference between the window's log-sum-exp and that of the row's keys, over queries, heads and layers; NaN
    counts as infinite, and it is 0 where :func:`measure` would not use it. Waits for the device. Arguments as there."""
    at, worst = window.positions(row, length), []
    if window.first_position(row, length) < changed:
        return 0.0
    for group in window.groups:
        if (told := window.lse(group, row, at)) is None:
            continue
        for layer, queries, lse in zip(group.layers, window.queries(group.ring, row, at), told, strict=True):
            right = log_sum_exp(queries, keys_of(layer)[slots], at, positions, group.shape.scale)
            worst.append((lse - right).abs().nan_to_num(torch.inf).max())
    return float(torch.stack(worst).max()) if worst else 0.0


def measure(
    policy: Policy,
    window: QueryWindow,
    keys_of: Callable[[int], torch.Tensor],
    values_of: Callable[[int], torch.Tensor],
    row: int,
    length: int,
    slots: torch.Tensor,
    positions: torch.Tensor,
    ordinal: torch.Tensor,
    starts: torch.Tensor,
    block_size: int,
    group: ScoreGroup = ALONE,
    changed: int = 0,
) -> Evidence:
    """Measure what ``policy`` asks for. Nothing here waits for the device.

    Args:
        keys_of, values_of: layer id -> pool buffer ``[physical slots, Hkv, D]``.
        row, length: request row and its tokens so far.
        slots: int64 ``[T]``, physical slots of the resident tokens. positions: int64 ``[T]``, ascending.
        ordinal: int64 ``[T]``, which of the N blocks each token is in. starts: int32 ``[N + 1]``, where they begin, and T.
        group: ranks that hold the other heads; all of them must measure the same event.
        changed: queries from this position on have seen these keys, and no others that are gone (``CompactRows.changed``).
            Where that is all of them, the log-sum-exp the window may have of them still holds, and keys are read once.

    Returns:
        Evidence on the device of ``slots``, the same bits on every rank of ``group``.
    """
    if not any(getattr(policy, need) for need in NEEDS):
        return Evidence()
    at = window.positions(row, length)
    tokens, blocks = starts.long().diff(), len(starts) - 1
    attention = _HeadReduction(policy.head_reduction, group)
    expected = _HeadReduction("mean" if policy.head_reduction == "qk" else policy.head_reduction, group)
    norms, distinct_keys, distinct_values = [], [], []
    holds = window.first_position(row, length) >= changed
    for layer_group in window.groups:
        shape, layers, ring, _ = layer_group
        queries = window.queries(ring, row, at)
        keys, values = [keys_of(layer) for layer in layers], [values_of(layer) for layer in layers]
        if policy.needs_attention:
            lse = window.lse(layer_group, row, at) if holds else None
            _attend(attention, queries, keys, slots, at, positions, ordinal, starts, blocks, block_size, shape.scale,
                    lse)  # fmt: skip
        if policy.needs_keys:
            distinct_keys.append(block_distinctiveness(keys, slots, starts, block_size))
        if policy.needs_distinct_values:
            distinct_values.append(block_distinctiveness(values, slots, starts, block_size))
        if not (policy.needs_values or policy.needs_expected):
            continue
        for query, key_pool, value_pool in zip(queries, keys, values, strict=True):
            held = value_pool[slots]
            if policy.needs_values:
                norms.append(held.float().norm(dim=-1).mean(dim=-1))
            if policy.needs_expected:
                expected.add(expected_attention(query, key_pool[slots], held, tokens, shape.scale))
    if attention.kind == "qk":
        attention.group = ALONE  # every rank has computed the same rows
    if norms:  # per token so far
        norms = [block_sums(torch.stack(norms, dim=1), tokens).T / tokens.clamp_min(1)]
    mean = lambda terms: group.average(torch.cat(terms).mean(dim=0)) if terms else None  # noqa: E731
    return Evidence(
        attention.result() if policy.needs_attention else None,
        mean(norms),
        mean(distinct_keys),
        expected.result()[0] if policy.needs_expected else None,
        mean(distinct_values),
    )
