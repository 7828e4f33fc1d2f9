"""The last W queries of every running request, per layer, as the model computed them (after rotary embedding)."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LayerShape(NamedTuple):
    """One attention layer: query heads on this rank, head size, softmax scale."""

    heads: int
    head_dim: int
    scale: float


class CapturePlan(NamedTuple):
    """Which tokens of a forward pass enter the window; the same for every layer.

    Attributes:
        tokens: int64 ``[n]``, index of the token in the batch.
        rows: int64 ``[n]``, its request row. slots: int64 ``[n]``, where in the ring (position mod W).
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor


class QueryWindow:
    """A ring per request row; the query at position p sits in slot p mod W.

    Real memory: layers x rows x W x heads x head_dim elements, reported as :attr:`bytes`.
    """

    def __init__(self, layers: dict[int, LayerShape], rows: int, window: int, dtype: torch.dtype, device):
        self.layers, self.window = layers, window
        self.rings = {
            layer: torch.zeros((rows, window, shape.heads, shape.head_dim), dtype=dtype, device=device)
            for layer, shape in layers.items()
        }
        self.first = [0] * rows

    @property
    def bytes(self) -> int:
        return sum(ring.numel() * ring.element_size() for ring in self.rings.values())

    def begin(self, row: int, position: int) -> None:
        """A request takes the row; ``position`` is the first token it computes itself."""
        self.first[row] = position

    def plan_extend(self, rows: list[int], prefix: list[int], extend: list[int], device) -> CapturePlan:
        """Plan for a prefill batch: per request, its row, tokens before this pass and tokens in it."""
        tokens, owners, slots, offset = [], [], [], 0
        for row, before, n in zip(rows, prefix, extend, strict=True):
            for i in range(max(0, n - self.window), n):
                tokens.append(offset + i)
                owners.append(row)
                slots.append((before + i) % self.window)
            offset += n
        as_ids = lambda ids: torch.tensor(ids, dtype=torch.int64, device=device)  # noqa: E731
        return CapturePlan(as_ids(tokens), as_ids(owners), as_ids(slots))

    def plan_decode(self, rows: torch.Tensor, positions: torch.Tensor) -> CapturePlan:
        """Plan for a decode batch: int64 ``[batch]`` each."""
        tokens = torch.arange(len(rows), dtype=torch.int64, device=rows.device)
        return CapturePlan(tokens, rows.long(), positions.long() % self.window)

    def capture(self, layer: int, queries: torch.Tensor, plan: CapturePlan) -> None:
        """Store queries ``[tokens, heads, head_dim]`` of one layer."""
        self.rings[layer][plan.rows, plan.slots] = queries[plan.tokens]

    def positions(self, row: int, length: int) -> torch.Tensor:
        """int64 ``[w]``, ascending: positions whose queries the ring of this row holds; ``w`` <= W."""
        return torch.arange(max(self.first[row], length - self.window, 0), length, dtype=torch.int64)

    def queries(self, layer: int, row: int, positions: torch.Tensor) -> torch.Tensor:
        """``[w, heads, head_dim]`` at these positions."""
        return self.rings[layer][row, positions % self.window]
