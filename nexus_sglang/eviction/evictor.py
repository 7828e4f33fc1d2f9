"""When to evict, how much, and from which blocks. Joins policy, statistics and memory; knows no scheduler.

Whether a sequence loses tokens, and how many, is decided from host numbers; which blocks go is decided on the device. The
host waits for the device when it does not know a row's blocks (``block_map.py``): at the first event after a prefill, and
after others have changed the row. Such an event waits twice, for the row's positions and for a word on whether the
policy's numbers were any good. Where blocks are not whole, because another reader's eviction has cut through them, the
host also needs their order. All other events wait for nothing. An event that clips the protection reads all rows anew.
With tensor parallelism ranks exchange scores once per kind of evidence, and in debug mode compare their choice over the
CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from nexus_sglang.config import NexusConfig
from nexus_sglang.device import download, upload
from nexus_sglang.errors import PolicyError
from nexus_sglang.evidence.measure import measure, require_lse
from nexus_sglang.evidence.query_window import QueryWindow
from nexus_sglang.evidence.score_group import ALONE, ScoreGroup
from nexus_sglang.kv_slots.block_ledger import BlockLedger
from nexus_sglang.kv_slots.compact_rows import CompactRows
from nexus_sglang.kv_slots.kv_buffers import KVBuffers
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.kv_slots.resident_row import ResidentRow
from nexus_sglang.policy.base import Blocks, Policy

from .block_map import BlockMap
from .choice import choose, forced_blocks
from .counters import Counters
from .sequence import RunningSequence

logger = logging.getLogger(__name__)


class Evictor:
    """Applies one policy to the page table.

    Args:
        largest_budget: most tokens any sequence may hold once it has been evicted from (the pool's largest budget).
        table, rows, ledger, window: all on one device.
        buffers: the pool's keys and values.
        group: ranks that hold the other heads of the same sequences; they must call the same methods in the same order.
        counters: where its events are counted, beside what others count; None for counters of its own.
    """

    def __init__(
        self,
        config: NexusConfig,
        policy: Policy,
        largest_budget: int,
        table: PageTable,
        rows: CompactRows,
        ledger: BlockLedger,
        window: QueryWindow,
        buffers: KVBuffers,
        group: ScoreGroup = ALONE,
        counters: Counters | None = None,
    ):
        self.config, self.policy, self.largest_budget = config, policy, largest_budget
        self.table, self.rows, self.ledger, self.window = table, rows, ledger, window
        self.buffers, self.group = buffers, group
        self.counters = Counters() if counters is None else counters
        self._nan = torch.zeros(2, dtype=torch.int64, device=table.device)

    def warm_up(self) -> None:
        """Do on padding what an event does on the device, so that no kernel is compiled while requests wait.

        Changes nothing. Whatever a policy makes of padding is dropped; what it cannot digest is logged.
        """
        size, device = self.config.block_size, self.table.device
        length = max(4, -(-self.config.window // size)) * size
        where = torch.arange(length, device=device)
        row = ResidentRow.of(0, length, 0, size, length // size, where * 0, where * 0, where)
        try:
            blocks = Blocks(
                row.index, row.index < 0, row.index, self.ledger.read(row.index * 0), length, self.config.seed
            )
            for seen_from in (0, length):  # with the log-sum-exp of the queries, where there is one, and without
                evidence = measure(
                    self.policy, self.window, self.buffers, row._replace(seen_from=seen_from), self.group
                )
                choose(self.policy, evidence, blocks, row.blocks, size, size)
        except Exception as err:
            logger.warning("nexus: warm-up without effect (%s: %s)", type(err).__name__, err)
        self._nan.zero_()
        self.window.warm_up()
        self.table.evict(where[:1] * 0, mapped=0)

    def after_prefill(self, seq: RunningSequence, protected: int, room: int) -> None:
        """A prefill pass of this sequence ran.

        Args:
            protected: leading tokens that other readers share.
            room: physical tokens the rest of its prompt may still take; with less than it needs, the
                prompt is thinned to its budget between chunks, question unseen.
        """
        if seq.prefill_left == 0:
            # A request that returns goes on where it was, in decode: what it kept must not depend on having been away.
            self.enforce(seq, protected, slack=self.config.block_size - 1 if seq.returned else 0)
        elif seq.thinned_in_prefill or seq.prefill_left > room:
            seq.thinned_in_prefill = True  # once begun, the budget holds after every chunk
            self.counters.chunk_evictions += self.enforce(seq, protected, slack=0)

    def after_decode(self, seq: RunningSequence, protected: Callable[[], int]) -> None:
        """One token was decoded; a block goes each time one block has been gained."""
        if seq.evictable and self.rows.resident[seq.row] >= max(seq.budget, seq.floor) + self.config.block_size:
            self.enforce(seq, protected(), slack=self.config.block_size - 1)

    def enforce(self, seq: RunningSequence, protected: int, slack: int) -> bool:
        """Evict this sequence down to its budget if it holds more than budget + ``slack`` tokens.

        Where the protected prefix alone fills the budget, the sequence keeps ``NexusConfig.private_floor``
        tokens of its own.

        Returns:
            Whether an event took place.
        """
        live = self.rows.resident[seq.row]
        if not seq.evictable or live <= seq.budget + slack:
            return False
        private = self.config.private_floor(seq.budget)
        wished = self.config.whole_blocks(max(protected, seq.pinned))
        block_map, news = self._block_map(seq, max(wished, self.config.sink_length))
        protected, held = wished, block_map.held(wished)
        if held > self.largest_budget - private:
            self.counters.protection_clipped += 1
            protected = block_map.fit(self.largest_budget - private)
            held = block_map.held(protected)
        seq.floor = held + private if held else 0
        target = max(seq.budget, seq.floor)
        if target > seq.budget:
            self.counters.budget_held_by_shared += 1
        if live <= target + slack:
            return False
        if not seq.over_budget:
            seq.over_budget = True
            self.counters.sequences_over_budget += 1
        freed = self._evict(
            seq, block_map, live - target, max(protected, self.config.sink_length), news or not seq.evictions
        )
        # A clipped protection may have cost a token that other rows hold: none may list a slot that is gone.
        self.rows.rebuild_all() if protected < wished else self.rows.rebuild(seq.row, live - freed)
        if self.config.debug:
            seq.block_map.check_integrity(self.rows.resident_positions(seq.row))
        return True

    def _block_map(self, seq: RunningSequence, head: int) -> tuple[BlockMap, bool]:
        """What the host knows of the row, its blocks before position ``head`` included; and whether it had to ask."""
        row, rows = seq.row, self.rows
        if seq.block_map is not None and seq.block_map.generation == rows.generations[row]:
            seq.block_map.grow(rows.length[row])
            if seq.block_map.knows(head) and seq.block_map.resident == rows.resident[row]:
                return seq.block_map, False
        return self._read(seq), True

    def _read(self, seq: RunningSequence) -> BlockMap:
        row, rows = seq.row, self.rows
        seq.block_map = BlockMap(
            rows.resident_positions(row), self.config.block_size, rows.length[row], rows.generations[row]
        )
        return seq.block_map

    def _evict(self, seq: RunningSequence, block_map: BlockMap, excess: int, head: int, check: bool) -> int:
        """One event: measure, choose, unmap, record. The caller rebuilds the rows.

        Args:
            head: no block that begins before this position goes. check: wait to see whether the policy's numbers are good.

        Returns:
            Tokens evicted.
        """
        size, length = self.config.block_size, self.rows.length[seq.row]
        recent = length - self.config.recent_length(seq.budget)
        candidates, whole = block_map.candidates(head, recent)
        if candidates == 0:
            return 0
        if not whole and block_map.hidden:
            block_map = self._read(seq)
        row = self.rows.resident_row(seq.row, size, block_map.blocks)
        if self.config.debug:
            require_lse(self.window, self.buffers, row)
        blocks = self._describe(seq, row, head, recent)
        evidence = measure(self.policy, self.window, self.buffers, row, self.group)
        choice = choose(self.policy, evidence, blocks, candidates, excess, size, None if whole else block_map.tokens)
        self._nan += choice.nan
        if check:
            self._require_numbers()
        gone = choice.ordinals
        if choice.on_host is None:
            places = row.tokens_of_whole(gone)
            block_map.hide(head, recent, len(gone))
        else:
            places = upload(block_map.drop(choice.on_host), gone.device)
        freed = len(places)
        # A forced block has not been judged: its state starts when it becomes a candidate.
        self.ledger.write(row.virtual, row.ordinal, *choice.weighing, judged=blocks.candidates[row.ordinal])
        self.table.evict(row.virtual[places], mapped=freed)
        self._record(seq, length, row.index[gone], freed)
        return freed

    def _describe(self, seq: RunningSequence, row: ResidentRow, head: int, recent: int) -> Blocks:
        """Blocks as a policy sees them: sinks, shared or pinned prefix, and the recent window are forced."""
        forced = forced_blocks(row.index, row.block_size, head, recent)
        identity = seq.identities(row.length // row.block_size + 1, row.block_size, row.index.device)[row.index]
        return Blocks(row.index, forced, identity, self.ledger.read(row.first_ids), row.length, self.config.seed)

    def _require_numbers(self) -> None:
        """Wait for the device.

        Raises:
            PolicyError: the policy has returned NaN since this was last asked.
            IntegrityError: an event has freed another number of slots than the host had counted.
        """
        weights, priorities, miscounted = download(torch.cat((self._nan, self.table.miscounted))).tolist()
        self.table.require_counted(miscounted)
        if weights or priorities:
            self._nan.zero_()
            raise PolicyError(
                f"policy {self.policy.name!r} returned {weights} weights and {priorities} priorities that are NaN "
                "since this was last checked"
            )

    def _record(self, seq: RunningSequence, length: int, blocks: torch.Tensor, tokens: int) -> None:
        seq.record(length, blocks, tokens, keep=seq.trace or self.config.debug)
        self.counters.eviction_events += 1
        self.counters.blocks_evicted += len(blocks)
        self.counters.tokens_evicted += tokens
        if self.config.debug:
            self.group.require_same(f"what was evicted from row {seq.row} at token {length}", str(seq.events[-1]))
