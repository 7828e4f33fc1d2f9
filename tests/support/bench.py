"""The evictor on a small pool with random keys, for tests of several rooms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from nexus_sglang.config import NexusConfig, TokenAmount
from nexus_sglang.eviction.evictor import Evictor
from nexus_sglang.eviction.request_plan import RequestPlan
from nexus_sglang.eviction.sequence import RunningSequence
from nexus_sglang.evidence.query_window import LayerShape, QueryWindow
from nexus_sglang.kv_slots.block_ledger import BlockLedger
from nexus_sglang.kv_slots.compact_rows import CompactRows
from nexus_sglang.kv_slots.kv_buffers import KVBuffers
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.policy import Policy, make_policy

BLOCK = 8
SINK = 8


@dataclass
class Bench:
    """An evictor over a page table with layers of two heads. Keys depend on position only, the same in all layers.

    Attributes:
        policy: chooses.
        config: of the evictor.
        largest_budget: tokens.
        device: where everything lives.
        layers: how many.
        with_lse: whether queries come with their log-sum-exp.
    """

    policy: Policy
    config: NexusConfig
    largest_budget: int = 900
    device: str | torch.device = "cpu"
    layers: int = 1
    with_lse: bool = False

    def __post_init__(self) -> None:
        device = self.device
        self.table = PageTable(4096, 1024, device)
        self.req_to_token = torch.zeros((6, 600), dtype=torch.int32, device=device)
        self.rows = CompactRows(self.req_to_token, self.table)
        self.ledger = BlockLedger(4096, self.policy.state_width, device)
        shapes = dict.fromkeys(range(self.layers), LayerShape(2, 8, 0.35))
        self.window = QueryWindow(shapes, 6, self.config.window, torch.float32, device, self.with_lse)
        self.pool = torch.zeros(1025, 1, 8, device=device)
        noise = torch.Generator().manual_seed(5)
        self.keys = torch.randn(600, 1, 8, generator=noise).to(device)
        self.queries = torch.randn(600, 2, 8, generator=noise).to(device)
        self.evictor = Evictor(
            self.config,
            self.policy,
            self.largest_budget,
            self.table,
            self.rows,
            self.ledger,
            self.window,
            KVBuffers(lambda layer: self.pool, lambda layer: self.pool),
        )

    def sequence(self, row: int, length: int, budget: int | None, pinned: int = 0, **fields: Any) -> RunningSequence:
        """A request of ``length`` prompt tokens takes a row; ``budget`` None for one that is not evicted from."""
        seq = RunningSequence(
            rid=f"r{row}",
            row=row,
            final=600,
            plan=RequestPlan(budget, pinned, trace=True),
            token_ids=lambda: [7 * i % 101 for i in range(self.rows.length[row])],
            **fields,
        )
        self.window.begin(row, 0)
        self.grow(row, length)
        return seq

    def grow(self, row: int, length: int) -> None:
        """The row's sequence is computed up to ``length`` tokens."""
        before = self.rows.length[row]
        ids = self.table.allocate(length - before)
        assert ids is not None, "the bench's pool is full"
        self.req_to_token[row, before:length] = ids.int()
        self.rows.extend_to(row, length)
        resident = self.rows.resident[row]
        slots = self.rows.slots[row, :resident].long()
        positions = self.rows.positions[row, :resident].long()
        self.pool[slots] = self.keys[positions]
        plan = self.window.plan_extend([row], [before], [length - before], self.device)
        lse = self.log_sum_exp(row, before, length) if self.with_lse else None
        for layer in range(self.layers):
            self.window.capture(layer, self.queries[before:length], plan, lse)

    def log_sum_exp(self, row: int, before: int, length: int) -> torch.Tensor:
        """float32 ``[length - before, 2]``, to base 2: of each new query over what its row holds up to it."""
        positions = self.rows.positions[row, : self.rows.resident[row]].long()
        scores = 0.35 * torch.einsum("wgd,tod->wgt", self.queries[before:length], self.keys[positions])
        newer = positions > torch.arange(before, length, device=self.device)[:, None, None]
        return scores.masked_fill(newer, -torch.inf).logsumexp(-1) / math.log(2)

    def blocks(self, row: int) -> list[int]:
        """Numbers of the row's resident blocks."""
        positions = self.rows.positions[row, : self.rows.resident[row]].cpu()
        return torch.unique(positions // BLOCK).tolist()


def bench(
    policy: str = "nexus",
    device: str | torch.device = "cpu",
    layers: int = 1,
    with_lse: bool = False,
    **fields: Any,
) -> Bench:
    """A bench with small blocks.

    Args:
        policy: name of a registered policy.
        device: where everything lives.
        layers: how many.
        with_lse: whether queries come with their log-sum-exp.
        fields: of the policy.
    """
    config = NexusConfig(
        policy, block_size=BLOCK, window=4, sink_tokens=SINK, recent_tokens=TokenAmount(16), min_tokens=32
    )
    return Bench(make_policy(policy, fields), config, device=device, layers=layers, with_lse=with_lse)
