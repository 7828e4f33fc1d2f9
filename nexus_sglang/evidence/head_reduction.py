"""How the attention of many heads, layers and ranks becomes one row per query."""

from __future__ import annotations

import torch

from nexus_sglang.kernels.block_attention import MAX_BLOCK_SIZE, block_attention_rows
from nexus_sglang.kernels.head_attention import block_attention
from nexus_sglang.kv_slots.resident_row import ResidentRow

from .query_window import WindowQueries
from .score_group import ScoreGroup

TOP_HEADS = 8
"""How many of the strongest (layer, head) pairs the ``top`` reduction averages."""

_FUSED = {"max": "max", "mean": "sum"}
"""Head reductions of this package that ``block_attention_rows`` does while it reads the keys."""


class HeadReduction:
    """Running reduction of per-head rows over heads and layers, and at the end over ranks.

    Args:
        kind: one of ``policy.base.HEAD_REDUCTIONS``.
        group: ranks that hold the other heads.
    """

    def __init__(self, kind: str, group: ScoreGroup):
        self.kind = kind
        self._group = group
        self._total: torch.Tensor | None = None
        self._heads = 0

    def add(self, per_head: torch.Tensor) -> None:
        """Take in float ``[w, heads, N]``, the rows of one layer."""
        if self.kind == "max":
            rows = per_head.amax(dim=1)
            self._total = rows if self._total is None else torch.maximum(self._total, rows)
        elif self.kind == "top":
            pool = per_head if self._total is None else torch.cat((self._total, per_head), dim=1)
            self._total = pool.topk(min(TOP_HEADS, pool.shape[1]), dim=1).values
        else:
            rows = per_head.sum(dim=1)
            self._total = rows if self._total is None else self._total + rows
        self._heads += per_head.shape[1]

    def attend(self, judging: WindowQueries, key_pools: list[torch.Tensor], row: ResidentRow) -> None:
        """Take in the attention of layers of one shape: fused where the kernel can, else layer by layer.

        Args:
            judging: the layers' queries.
            key_pools: per layer ``[physical slots, Hkv, D]``.
            row: the resident tokens they attend to.
        """
        if self.kind in _FUSED and row.block_size <= MAX_BLOCK_SIZE:
            self._attend_fused(judging, key_pools, row)
            return
        cells = row.ordinal * row.block_size + row.positions % row.block_size
        for query, pool in zip(judging.queries, key_pools, strict=True):
            keys = pool[row.slots]
            if self.kind == "qk":
                # Heads are averaged before the softmax, so ranks have to be as well.
                query = self._group.average(query.float().mean(dim=1, keepdim=True))
                keys = self._group.average(keys.float().mean(dim=1, keepdim=True))
            self.add(
                block_attention(
                    query,
                    keys,
                    judging.positions,
                    row.positions,
                    cells,
                    row.blocks,
                    row.block_size,
                    judging.shape.scale,
                )
            )

    def _attend_fused(self, judging: WindowQueries, key_pools: list[torch.Tensor], row: ResidentRow) -> None:
        layers, window, heads, _ = judging.queries.shape
        if self._total is None:
            self._total = torch.zeros((window, row.blocks), dtype=torch.float32, device=row.slots.device)
        block_attention_rows(
            judging.queries,
            key_pools,
            row.slots,
            judging.positions,
            row.positions,
            row.ordinal,
            row.blocks,
            row.block_size,
            judging.shape.scale,
            self._total,
            _FUSED[self.kind],
            judging.lse,
            row.starts,
        )
        self._heads += layers * heads

    def result(self) -> torch.Tensor:
        """float ``[w, N]``, the same on every rank.

        Raises:
            ValueError: nothing was taken in.
        """
        if self._total is None:
            raise ValueError("no layer was measured")
        if self.kind == "max":
            return self._group.largest(self._total)
        if self.kind == "top":
            pool = torch.cat(tuple(self._group.gather(self._total)), dim=1)
            return pool.topk(min(TOP_HEADS, pool.shape[1]), dim=1).values.mean(dim=1)
        if self.kind == "qk":  # queries and keys were averaged over ranks: every rank has computed the same rows
            return self._total / self._heads
        return self._group.total(self._total) / (self._heads * self._group.world)
