"""When to evict, how much, and from which blocks. Joins policy, statistics and memory; knows no scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..config import NexusConfig
from ..memory.ledger import BlockLedger
from ..memory.page_table import PageTable
from ..memory.rows import CompactRows
from ..policy.base import Blocks, Policy
from ..statistics.measure import measure
from ..statistics.query_window import QueryWindow
from .sequence import EvictionEvent, RunningSequence, block_identities


class PolicyError(RuntimeError):
    """A policy returned something that cannot be an order of blocks."""


@dataclass
class Counters:
    """What happened since the server started (``/server_info`` and the log line show them)."""

    sequences: int = 0
    sequences_over_budget: int = 0
    eviction_events: int = 0
    blocks_evicted: int = 0
    tokens_evicted: int = 0
    chunk_evictions: int = 0
    holes_healed: int = 0
    budget_held_by_shared: int = 0
    protection_clipped: int = 0
    nodes_thinned: int = 0
    tokens_thinned: int = 0
    tokens_dropped_with_leaves: int = 0
    retractions: int = 0


class Evictor:
    """Applies one policy to the page table.

    Args:
        ceiling: most tokens any sequence may hold once it has been evicted from (the pool's largest budget).
        keys_of, values_of: layer id -> pool buffer ``[physical slots, kv heads, head dim]``.
    """

    def __init__(
        self,
        config: NexusConfig,
        policy: Policy,
        ceiling: int,
        table: PageTable,
        rows: CompactRows,
        ledger: BlockLedger,
        window: QueryWindow,
        keys_of: Callable[[int], torch.Tensor],
        values_of: Callable[[int], torch.Tensor],
    ):
        self.config, self.policy, self.ceiling = config, policy, ceiling
        self.table, self.rows, self.ledger, self.window = table, rows, ledger, window
        self.keys_of, self.values_of = keys_of, values_of
        self.counters = Counters()

    def after_prefill(self, seq: RunningSequence, protected: int, room: int) -> None:
        """A prefill pass of this sequence ran.

        Args:
            protected: leading tokens that other readers share.
            room: physical tokens the rest of its prompt may still take; with less than it needs, the
                prompt is thinned to its budget between chunks, question unseen.
        """
        if seq.prefill_left == 0:
            self.enforce(seq, protected, slack=0)
        elif seq.thinned_in_prefill or seq.prefill_left > room:
            seq.thinned_in_prefill = True  # once begun, the budget holds after every chunk
            self.counters.chunk_evictions += self.enforce(seq, protected, slack=0)

    def after_decode(self, seq: RunningSequence, protected: Callable[[], int]) -> None:
        """One token was decoded; a block goes each time one block has been gained."""
        if seq.evictable and self.rows.live[seq.row] >= max(seq.budget, seq.floor) + self.config.block_size:
            self.enforce(seq, protected(), slack=self.config.block_size - 1)

    def enforce(self, seq: RunningSequence, protected: int, slack: int) -> bool:
        """Evict this sequence down to its budget if it holds more than budget + ``slack`` tokens.

        Where the protected prefix alone fills the budget, the sequence keeps ``NexusConfig.private_floor``
        tokens of its own.

        Returns:
            Whether an event took place.
        """
        live = self.rows.live[seq.row]
        if not seq.evictable or live <= seq.budget + slack:
            return False
        private = self.config.private_floor(seq.budget)
        wished = max(protected, seq.pinned)
        protected, held = self._protect(seq.row, wished, self.ceiling - private)
        seq.floor = held + private if held else 0
        target = max(seq.budget, seq.floor)
        if target > seq.budget:
            self.counters.budget_held_by_shared += 1
        if live <= target + slack:
            return False
        if not seq.over_budget:
            seq.over_budget = True
            self.counters.sequences_over_budget += 1
        self._evict(seq, live - target, protected)
        # A clipped protection may have cost a token that other rows hold: none may list a slot that is gone.
        self.rows.rebuild_all() if protected < wished else self.rows.rebuild(seq.row)
        return True

    def _protect(self, row: int, protected: int, limit: int) -> tuple[int, int]:
        """Clip a protected prefix to what the pool can hold beside the private floor.

        Returns:
            Leading tokens protected, and how many of them are resident.
        """
        positions = self.rows.positions[row, : self.rows.live[row]].contiguous()
        held = int(torch.searchsorted(positions, protected)) if protected else 0
        if held <= limit:
            return protected, held
        self.counters.protection_clipped += 1
        return int(positions[limit]), limit

    def _evict(self, seq: RunningSequence, excess: int, protected: int) -> None:
        """One event: measure, choose, unmap, record. The caller rebuilds the rows."""
        size, row = self.config.block_size, seq.row
        live, length = self.rows.live[row], self.rows.length[row]
        positions = self.rows.positions[row, :live].long()
        slots = self.rows.slots[row, :live].long()
        virtual = self.rows.req_to_token[row, positions].long()
        index, ordinal, tokens = torch.unique_consecutive(positions // size, return_inverse=True, return_counts=True)
        forced = self._forced(index, length, seq.budget, protected)
        candidates = int((~forced).sum())
        if candidates == 0:
            return

        evidence = measure(
            self.policy, self.window, self.keys_of, self.values_of, row, length, slots, positions, ordinal,
            len(index), size,
        )  # fmt: skip
        first = torch.cat((torch.zeros(1, dtype=torch.long), tokens.cumsum(0)[:-1]))
        identity = torch.from_numpy(block_identities(seq.token_ids(), index.numpy(), size))
        blocks = Blocks(index, forced, identity, self.ledger.read(virtual[first]), length, self.config.seed)
        weighing = self.policy.weigh(evidence, blocks)
        keep = candidates - min(candidates, math.ceil(excess / size))
        priority = self.policy.prioritise(weighing.weights, blocks, keep)
        self._check(weighing.weights, priority, len(index))

        # Ascending; among equals the older goes first. Partly shared blocks hold fewer tokens than a whole one.
        order = torch.argsort(priority.double(), stable=True)
        order = order[~forced[order]]
        gone = order[: int(torch.searchsorted(tokens[order].cumsum(0), excess)) + 1]
        dropped = torch.zeros(len(index), dtype=torch.bool)
        dropped[gone] = True
        # A forced block has not been judged: its memory starts when it becomes a candidate.
        judged = ~forced[ordinal]
        self.ledger.write(virtual[judged], ordinal[judged], weighing.weights, weighing.memory)
        freed = self.table.evict(virtual[dropped[ordinal]])
        seq.events.append(EvictionEvent(length, index[dropped].tolist(), freed))
        self.counters.eviction_events += 1
        self.counters.blocks_evicted += len(gone)
        self.counters.tokens_evicted += freed

    def _forced(self, index: torch.Tensor, length: int, budget: int, protected: int) -> torch.Tensor:
        """bool ``[N]``: sinks, shared or pinned prefix, and the recent window, by position in the sequence."""
        size = self.config.block_size
        head = max(self.config.sink_length, protected)
        recent = self.config.recent_length(budget)
        return (index * size < head) | ((index + 1) * size > length - recent)

    def _check(self, weights: torch.Tensor, priority: torch.Tensor, blocks: int) -> None:
        for what, tensor in (("weights", weights), ("priorities", priority)):
            if tuple(tensor.shape) != (blocks,) or bool(torch.isnan(tensor).any()):
                raise PolicyError(
                    f"policy {self.policy.name!r} returned {what} of shape {tuple(tensor.shape)} with "
                    f"{int(torch.isnan(tensor).sum())} NaN, for {blocks} blocks"
                )
