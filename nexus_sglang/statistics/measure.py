"""Evidence for one sequence at one event: block attention and the optional value and key terms, over all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nexus_sglang.kernels.block_attention import block_attention

from ..policy.base import Evidence, Policy
from .query_window import QueryWindow

TOP_HEADS = 8
"""How many of the strongest (layer, head) pairs the ``top`` reduction averages."""
NEEDS = ("needs_attention", "needs_values", "needs_keys", "needs_expected", "needs_distinct_values")
"""What a policy may ask for."""


class _HeadReduction:
    """Running reduction of ``[W, H, N]`` per-head rows over heads and layers."""

    def __init__(self, kind: str):
        self.kind, self.total, self.heads = kind, None, 0

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
        if self.kind == "top":
            return self.total.mean(dim=1)
        return self.total if self.kind == "max" else self.total / self.heads


def distinctiveness(vectors: torch.Tensor) -> torch.Tensor:
    """How much each token's vector differs in direction from the mean direction (arXiv 2504.15364, there of keys).

    Args:
        vectors: ``[T, Hkv, D]``, keys or values.

    Returns:
        float32 ``[T]`` in [0, 2]: 1 - cos(vector, mean of unit vectors), mean over heads.
    """
    unit = torch.nn.functional.normalize(vectors.float(), dim=-1)
    anchor = torch.nn.functional.normalize(unit.mean(dim=0, keepdim=True), dim=-1)
    return 1 - (unit * anchor).sum(dim=-1).mean(dim=-1)


def expected_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ordinal: torch.Tensor, blocks: int, scale: float
) -> torch.Tensor:
    """Attention that queries like these are expected to pay, times the value norm (arXiv 2510.00636).

    Gaussian queries of mean mu and covariance S give ``exp(k mu s + k S k s**2 / 2)``; both moments are those of the
    window's queries as rotated for their own positions, where the paper takes them before rotation and rotates for
    the next 512 positions.

    Args:
        queries: ``[W, Hq, D]``. keys, values: ``[T, Hkv, D]``. ordinal: int64 ``[T]``. scale: s.

    Returns:
        float32 ``[1, Hq, N]``.
    """
    window, heads, dim = queries.shape
    groups = keys.shape[1]
    grouped = queries.float().view(window, groups, heads // groups, dim)
    logits = torch.einsum("wgid,tgd->wgit", grouped, keys.float()) * scale
    expected = torch.softmax(logits.mean(dim=0) + logits.var(dim=0, unbiased=False) / 2, dim=-1)
    worth = (expected * values.float().norm(dim=-1).T[:, None, :]).view(heads, -1)
    return worth.new_zeros(heads, blocks).index_add_(1, ordinal.to(worth.device), worth)[None]


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
    blocks: int,
    block_size: int,
) -> Evidence:
    """Measure what ``policy`` asks for.

    Args:
        keys_of, values_of: layer id -> pool buffer ``[physical slots, Hkv, D]``.
        row, length: request row and its tokens so far.
        slots: int64 ``[T]``, physical slots of the resident tokens. positions: int64 ``[T]``.
        ordinal: int64 ``[T]``, which of the ``blocks`` blocks each token is in.
    """
    if not any(getattr(policy, need) for need in NEEDS):
        return Evidence()
    query_positions = window.positions(row, length).to(slots.device)
    cells = ordinal * block_size + positions % block_size
    attention, expected = _HeadReduction(policy.head_reduction), _HeadReduction(policy.head_reduction)
    norms, distinct_keys, distinct_values = [], [], []
    tokens_in = torch.bincount(ordinal, minlength=blocks).clamp_min(1)
    per_block = lambda x: torch.zeros(blocks).index_add_(0, ordinal.cpu(), x.float().cpu()) / tokens_in.cpu()  # noqa: E731
    for layer, shape in window.layers.items():
        keys, queries = keys_of(layer)[slots], window.queries(layer, row, query_positions)
        if policy.needs_attention:
            average = policy.head_reduction == "qk"
            attention.add(
                block_attention(queries, keys, query_positions, positions, cells, blocks, block_size, shape.scale, average)
            )
        if policy.needs_keys:
            distinct_keys.append(per_block(distinctiveness(keys)))
        if not (policy.needs_values or policy.needs_expected or policy.needs_distinct_values):
            continue
        values = values_of(layer)[slots]
        if policy.needs_values:
            norms.append(per_block(values.float().norm(dim=-1).mean(dim=-1)))
        if policy.needs_expected:
            expected.add(expected_attention(queries, keys, values, ordinal, blocks, shape.scale))
        if policy.needs_distinct_values:
            distinct_values.append(per_block(distinctiveness(values)))
    mean = lambda terms: torch.stack(terms).mean(dim=0).to(slots.device) if terms else None  # noqa: E731
    return Evidence(
        attention.result() if policy.needs_attention else None,
        mean(norms),
        mean(distinct_keys),
        expected.result()[0] if policy.needs_expected else None,
        mean(distinct_values),
    )
