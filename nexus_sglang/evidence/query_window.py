"""The last W queries of every running request, per layer, as the model computed them (after rotary embedding).

Beside each query may stand the log-sum-exp of its scores, where the attention backend tells it (FlashInfer).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from nexus_sglang.device import upload
from nexus_sglang.kernels.query_ring import keep_queries


class LayerShape(NamedTuple):
    """One attention layer: query heads on this rank, head size, softmax scale."""

    heads: int
    head_dim: int
    scale: float


class LayerGroup(NamedTuple):
    """Layers of one shape, which are measured together.

    Attributes:
        shape: of each. layers: their ids, in the order they run. ring: ``[L, rows, W, heads, head_dim]``.
        lse: float32 ``[L, rows, W, heads]``, log-sum-exp to base 2; None where no backend tells it.
    """

    shape: LayerShape
    layers: list[int]
    ring: torch.Tensor
    lse: torch.Tensor | None


class CapturePlan(NamedTuple):
    """Which tokens of a forward pass enter the window; the same for every layer.

    Attributes:
        tokens: int64 ``[n]``, index of the token in the batch; None: all of them, in order.
        rows: int64 ``[n]``, its request row. slots: int64 ``[n]``, where in the ring (position mod W).
    """

    tokens: torch.Tensor | None
    rows: torch.Tensor
    slots: torch.Tensor


class QueryWindow:
    """A ring per request row; the query at position p sits in slot p mod W. ``layers`` in the order they run.

    Real memory: layers x rows x W x heads x head_dim elements, and a float32 per query with ``with_lse``, reported as
    :attr:`bytes`.

    Attributes:
        groups: layers of the same shape share one tensor. rings: layer id -> its part of it ``[rows, W, heads, head_dim]``.
        lse_rings: layer id -> ``[rows, W, heads]``, empty without ``with_lse``.
    """

    def __init__(
        self, layers: dict[int, LayerShape], rows: int, window: int, dtype: torch.dtype, device, with_lse: bool = False
    ):
        self.layers, self.size, self.device = layers, window, device
        self.groups = []
        for shape in dict.fromkeys(layers.values()):
            ids = [layer for layer, other in layers.items() if other == shape]
            ring = torch.zeros((len(ids), rows, window, shape.heads, shape.head_dim), dtype=dtype, device=device)
            lse = torch.zeros(ring.shape[:-1], dtype=torch.float32, device=device) if with_lse else None
            self.groups.append(LayerGroup(shape, ids, ring, lse))
        self.rings = {
            layer: ring for group in self.groups for layer, ring in zip(group.layers, group.ring, strict=True)
        }
        self.lse_rings = {
            layer: lse for group in self.groups if with_lse for layer, lse in zip(group.layers, group.lse, strict=True)
        }
        self.first = [0] * rows
        self.first_layer = next(iter(layers), None)

    @property
    def bytes(self) -> int:
        return sum(group.ring.nbytes + (group.lse.nbytes if group.lse is not None else 0) for group in self.groups)

    def begin(self, row: int, position: int) -> None:
        """A request takes the row; ``position`` is the first token it computes itself."""
        self.first[row] = position

    def plan_extend(self, rows: list[int], prefix: list[int], extend: list[int], device) -> CapturePlan:
        """Plan for a prefill batch: per request, its row, tokens before this pass and tokens in it."""
        tokens, owners, slots, offset = [], [], [], 0
        for row, before, n in zip(rows, prefix, extend, strict=True):
            for i in range(max(0, n - self.size), n):
                tokens.append(offset + i)
                owners.append(row)
                slots.append((before + i) % self.size)
            offset += n
        return CapturePlan(*upload([tokens, owners, slots], device))

    def plan_decode(self, rows: torch.Tensor, positions: torch.Tensor) -> CapturePlan:
        """Plan for a decode batch: int64 ``[batch]`` each. Padding lanes have row 0, which belongs to no request.

        Computed from these tensors alone, so a CUDA graph that records it follows them when it is replayed.
        """
        return CapturePlan(None, rows.long(), positions.long() % self.size)

    def capture(self, layer: int, queries: torch.Tensor, plan: CapturePlan, lse: torch.Tensor | None = None) -> None:
        """Store queries ``[tokens, heads, head_dim]`` of one layer, and where the backend tells it, their log-sum-exp:
        float32 ``[tokens, heads]``, to base 2."""
        ring, lse_ring = self.rings[layer], self.lse_rings[layer] if lse is not None else None
        keep_queries(ring, queries.to(ring.dtype), plan.rows, plan.slots, plan.tokens, lse_ring, lse)

    def warm_up(self) -> None:
        """Store zeros in row 0, which is no request's, the way a prefill pass stores queries: its kernel is compiled."""
        plan = self.plan_extend([0], [0], [self.size], self.device)
        for group in self.groups:
            lse = torch.zeros(self.size, group.shape.heads, device=self.device) if group.lse is not None else None
            self.capture(group.layers[0], torch.zeros_like(group.ring[0, 0]), plan, lse)

    def forget_lse(self) -> None:
        """The backend does not tell it after all. A CUDA graph may write to the rings all the same, so they stay."""
        self._retired = self.lse_rings
        self.groups = [group._replace(lse=None) for group in self.groups]
        self.lse_rings = {}

    def first_position(self, row: int, length: int) -> int:
        """The oldest position whose query the ring of this row holds."""
        return max(self.first[row], length - self.size, 0)

    def positions(self, row: int, length: int) -> torch.Tensor:
        """int64 ``[w]``, ascending: positions whose queries the ring of this row holds; ``w`` <= W."""
        return torch.arange(self.first_position(row, length), length, dtype=torch.int64, device=self.device)

    def queries(self, ring: torch.Tensor, row: int, positions: torch.Tensor) -> torch.Tensor:
        """``[L, w, heads, head_dim]`` at these positions; ``ring`` is that of a group."""
        return ring[:, row].index_select(1, positions % self.size)

    def lse(self, group: LayerGroup, row: int, positions: torch.Tensor) -> torch.Tensor | None:
        """float32 ``[L, w, heads]``, natural log-sum-exp of these queries' scores over the keys they saw; None where no
        backend tells it."""
        return None if group.lse is None else group.lse[:, row].index_select(1, positions % self.size) * math.log(2)
