"""The evictor on a small pool with random keys, for tests of several rooms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nexus_sglang.config import NexusConfig
from nexus_sglang.eviction.evictor import Evictor
from nexus_sglang.eviction.sequence import RunningSequence
from nexus_sglang.evidence.query_window import LayerShape, QueryWindow
from nexus_sglang.kv_slots.block_ledger import BlockLedger
from nexus_sglang.kv_slots.compact_rows import CompactRows
from nexus_sglang.kv_slots.kv_buffers import KVBuffers
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.policy import Policy, make_policy

BLOCK, SINK = 8, 8


@dataclass
class Bench:
    """A page table with layers of two heads behind it; keys depend on position only, and are the same in all layers."""

    policy: Policy
    config: NexusConfig
    largest_budget: int = 900
    device: str | torch.device = "cpu"
    layers: int = 1
    with_lse: bool = False

    def __post_init__(self):
        device = self.device
        self.table = PageTable(4096, 1024, device)
        self.req_to_token = torch.zeros((6, 600), dtype=torch.int32, device=device)
        self.rows = CompactRows(self.req_to_token, self.table)
        self.ledger = BlockLedger(4096, self.policy.state_width, device)
        self.window = QueryWindow(
            dict.fromkeys(range(self.layers), LayerShape(2, 8, 0.35)), 6, self.config.window, torch.float32, device,
            self.with_lse,
        )  # fmt: skip
        self.pool = torch.zeros(1025, 1, 8, device=device)
        noise = torch.Generator().manual_seed(5)
        keys, queries = torch.randn(600, 1, 8, generator=noise), torch.randn(600, 2, 8, generator=noise)
        self.keys, self.queries = keys.to(device), queries.to(device)
        self.evictor = Evictor(self.config, self.policy, self.largest_budget, self.table, self.rows, self.ledger, self.window,
                               KVBuffers(lambda layer: self.pool, lambda layer: self.pool))  # fmt: skip

    def sequence(self, row: int, length: int, budget: int, **fields) -> RunningSequence:
        seq = RunningSequence(rid=f"r{row}", row=row, final=600, budget=budget, trace=True,
                              token_ids=lambda: [7 * i % 101 for i in range(self.rows.length[row])], **fields)  # fmt: skip
        self.window.begin(row, 0)
        self.grow(row, length)
        return seq

    def grow(self, row: int, length: int) -> None:
        before = self.rows.length[row]
        self.req_to_token[row, before:length] = self.table.allocate(length - before).int()
        self.rows.extend_to(row, length)
        live = self.rows.resident[row]
        slots, positions = self.rows.slots[row, :live].long(), self.rows.positions[row, :live].long()
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
        positions = self.rows.positions[row, : self.rows.resident[row]].cpu()
        return torch.unique(positions // BLOCK).tolist()


def bench(policy="nexus", device="cpu", layers=1, with_lse=False, **fields) -> Bench:
    settings = {"block_size": BLOCK, "window": 4, "sink_tokens": SINK, "recent_tokens": 16, "min_tokens": 32}
    return Bench(make_policy(policy, fields), NexusConfig(policy, **settings), device=device, layers=layers,
                 with_lse=with_lse)  # fmt: skip
