"""The last W queries of every running request, per layer, as the model computed them (after rotary embedding).

Beside each query may stand the log-sum-exp of its scores, where the attention backend reports it (FlashInfer).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from nexus_sglang.device import upload
from nexus_sglang.kernels.query_ring import keep_queries
from nexus_sglang.kv_slots.resident_row import ResidentRow


class LayerShape(NamedTuple):
    """What is alike in layers that are measured together.

    Attributes:
        heads: query heads on this rank.
        head_dim: numbers per head.
        scale: factor on the scores before the softmax.
    """

    heads: int
    head_dim: int
    scale: float


class LayerGroup(NamedTuple):
    """Layers of one shape, which are measured together.

    Attributes:
        shape: of each of them.
        layers: their L ids, in the order they run.
        ring: ``[L, rows, W, heads, head_dim]``, their queries.
        lse: float32 ``[L, rows, W, heads]``, log-sum-exp to base 2; None where no backend reports it.
    """

    shape: LayerShape
    layers: list[int]
    ring: torch.Tensor
    lse: torch.Tensor | None


class CapturePlan(NamedTuple):
    """Which tokens of a forward pass enter the window; the same for every layer.

    Attributes:
        tokens: int64 ``[n]``, index of the token in the batch; None for all of them, in order.
        rows: int64 ``[n]``, its request row.
        places: int64 ``[n]``, its place in the ring (position mod W).
    """

    tokens: torch.Tensor | None
    rows: torch.Tensor
    places: torch.Tensor


class WindowQueries(NamedTuple):
    """The queries that judge one row at one event, in the L layers of one group.

    Attributes:
        shape: of each layer.
        queries: ``[L, w, heads, head_dim]``, oldest first; ``w`` is at most W.
        positions: int64 ``[w]``, ascending, where each stands in the sequence.
        lse: float32 ``[L, w, heads]``, natural log-sum-exp of each query's scores over today's resident tokens up to
            its own position; None where nobody has computed that.
    """

    shape: LayerShape
    queries: torch.Tensor
    positions: torch.Tensor
    lse: torch.Tensor | None


class QueryWindow:
    """A ring per request row; the query at position p stands at place p mod W.

    Real memory: layers x rows x W x heads x head_dim elements, and with ``with_lse`` a float32 for each query of each
    head; :attr:`bytes` says how much that is.

    Args:
        layers: layer id -> its shape, in the order the layers run.
        rows: request rows.
        size: W, queries kept per row.
        dtype: of the queries kept.
        device: where the rings are.
        with_lse: whether the attention backend reports the log-sum-exp of each query.

    Attributes:
        layers: as given.
        size: as given.
        device: as given.
        groups: layers of one shape share a tensor.
        rings: layer id -> its part of that tensor, ``[rows, W, heads, head_dim]``.
        lse_rings: layer id -> float32 ``[rows, W, heads]``; empty where no backend reports it.
        first_layer: id of the layer that runs first; None without layers.
    """

    def __init__(
        self,
        layers: dict[int, LayerShape],
        rows: int,
        size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        with_lse: bool = False,
    ):
        self.layers = layers
        self.size = size
        self.device = device
        self.groups: list[LayerGroup] = []
        self.rings: dict[int, torch.Tensor] = {}
        self.lse_rings: dict[int, torch.Tensor] = {}
        for shape in dict.fromkeys(layers.values()):
            ids = [layer for layer, other in layers.items() if other == shape]
            ring = torch.zeros((len(ids), rows, size, shape.heads, shape.head_dim), dtype=dtype, device=device)
            self.rings.update(zip(ids, ring, strict=True))
            lse = None
            if with_lse:
                lse = torch.zeros(ring.shape[:-1], dtype=torch.float32, device=device)
                self.lse_rings.update(zip(ids, lse, strict=True))
            self.groups.append(LayerGroup(shape, ids, ring, lse))
        self.first_layer = next(iter(layers), None)
        self._begun_at = [0] * rows

    @property
    def bytes(self) -> int:
        """Memory of the rings."""
        return sum(group.ring.nbytes + (group.lse.nbytes if group.lse is not None else 0) for group in self.groups)

    def begin(self, row: int, position: int) -> None:
        """A request takes the row.

        Args:
            row: request row.
            position: of the first token the request computes itself.
        """
        self._begun_at[row] = position

    def plan_extend(
        self, rows: list[int], prefix: list[int], extend: list[int], device: str | torch.device
    ) -> CapturePlan:
        """Plan for a prefill batch.

        Args:
            rows: request row of each request.
            prefix: tokens of each before this pass.
            extend: tokens of each in it.
            device: where the plan is needed.
        """
        tokens: list[int] = []
        owners: list[int] = []
        places: list[int] = []
        offset = 0
        for row, before, n in zip(rows, prefix, extend, strict=True):
            for i in range(max(0, n - self.size), n):
                tokens.append(offset + i)
                owners.append(row)
                places.append((before + i) % self.size)
            offset += n
        return CapturePlan(*upload([tokens, owners, places], device))

    def plan_decode(self, rows: torch.Tensor, positions: torch.Tensor) -> CapturePlan:
        """Plan for a decode batch. Padding requests have row 0, which belongs to no request.

        Computed from these tensors alone, so a CUDA graph that records it follows them when it is replayed.

        Args:
            rows: int ``[batch]``, request rows.
            positions: int ``[batch]``, where the tokens stand.
        """
        return CapturePlan(None, rows.long(), positions.long() % self.size)

    def capture(self, layer: int, queries: torch.Tensor, plan: CapturePlan, lse: torch.Tensor | None = None) -> None:
        """Store the queries of one layer.

        Args:
            layer: its id.
            queries: ``[tokens, heads, head_dim]``, of the whole batch.
            plan: which of them to keep, and where.
            lse: float32 ``[tokens, heads]``, their log-sum-exp to base 2, where the backend reports it.
        """
        ring = self.rings[layer]
        lse_ring = self.lse_rings[layer] if lse is not None else None
        keep_queries(ring, queries.to(ring.dtype), plan.rows, plan.places, plan.tokens, lse_ring, lse)

    def warm_up(self) -> None:
        """Store zeros in row 0, which is no request's, as a prefill pass stores queries: its kernel is compiled."""
        plan = self.plan_extend([0], [0], [self.size], self.device)
        for group in self.groups:
            lse = torch.zeros(self.size, group.shape.heads, device=self.device) if group.lse is not None else None
            self.capture(group.layers[0], torch.zeros_like(group.ring[0, 0]), plan, lse)

    def forget_lse(self) -> None:
        """The backend does not report it after all. A CUDA graph may write to the rings all the same, so they stay."""
        self._retired = self.lse_rings
        self.groups = [group._replace(lse=None) for group in self.groups]
        self.lse_rings = {}

    def first_position(self, row: int, length: int) -> int:
        """The oldest position whose query the ring of this row holds, of a sequence of ``length`` tokens."""
        return max(self._begun_at[row], length - self.size, 0)

    def positions(self, row: int, length: int) -> torch.Tensor:
        """int64 ``[w]``, ascending: positions whose queries the ring of this row holds; ``w`` is at most W."""
        return torch.arange(self.first_position(row, length), length, dtype=torch.int64, device=self.device)

    def queries(self, ring: torch.Tensor, row: int, positions: torch.Tensor) -> torch.Tensor:
        """Queries at these positions.

        Args:
            ring: ``[L, rows, W, heads, head_dim]``, that of a group.
            row: request row.
            positions: int64 ``[w]``.

        Returns:
            ``[L, w, heads, head_dim]``.
        """
        return ring[:, row].index_select(1, positions % self.size)

    def lse(self, group: LayerGroup, row: int, positions: torch.Tensor) -> torch.Tensor | None:
        """The log-sum-exp that stands beside these queries.

        Args:
            group: the layers.
            row: request row.
            positions: int64 ``[w]``.

        Returns:
            float32 ``[L, w, heads]``, natural, over the keys each query saw; None where no backend reports it.
        """
        return None if group.lse is None else group.lse[:, row].index_select(1, positions % self.size) * math.log(2)

    def read(self, group: LayerGroup, row: ResidentRow, with_lse: bool = True) -> WindowQueries:
        """The queries that judge this row. Waits for nothing.

        If every query in the window is recent enough to have attended to exactly today's resident tokens, the
        log-sum-exp stored beside it is valid, and the keys need be read only once.

        Args:
            group: the layers.
            row: the resident tokens they judge.
            with_lse: whether the log-sum-exp is wanted, where it is valid.
        """
        positions = self.positions(row.row, row.length)
        valid = self.first_position(row.row, row.length) >= row.seen_from
        return WindowQueries(
            group.shape,
            self.queries(group.ring, row.row, positions),
            positions,
            self.lse(group, row.row, positions) if valid and with_lse else None,
        )
