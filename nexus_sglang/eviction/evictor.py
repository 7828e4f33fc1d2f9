"""When to evict, how much, and from which blocks. Joins policy, evidence and KV slots; knows no scheduler.

Whether a sequence loses tokens, and how many, is decided from host numbers; which blocks go is decided on the device.
The host waits for the device only where it does not know a row's blocks (``block_map.py``): at the first event after a
prefill, and after others have changed the row. Such an event waits twice, for the positions of the row's tokens and for
how past events went. Where blocks are not whole, because the eviction of another sequence has cut
through them, the host also waits for their order. All other events, hence nearly all of decode, wait for nothing.

A policy whose answer cannot be used does not stop a server. Where it says NaN, raises, or returns what does not fit,
that event keeps the newest blocks and leaves no mark on the ledger. Such events are counted, and the first is logged.

An event that clips the protected prefix rebuilds all rows. With tensor parallelism the ranks exchange scores once per
kind of evidence, and in debug mode they compare their choice over the CPU.
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
from nexus_sglang.policy.base import Blocks, Evidence, Policy
from nexus_sglang.policy.streaming_llm import StreamingLLM

from .block_map import BlockMap
from .choice import Choice, choose, forced_blocks
from .counters import Counters
from .sequence import RunningSequence

logger = logging.getLogger(__name__)

RECENCY = StreamingLLM()
"""In place of a policy that raised."""


class Evictor:
    """Applies one policy to the page table.

    Args:
        config: block size, forced parts, floors, seed, debug.
        policy: weighs the blocks.
        largest_budget: most tokens any sequence may hold once it has been evicted from; what the pool can grant.
        table: unmaps what goes.
        rows: resident tokens of each request row; on the table's device.
        ledger: what is remembered about blocks; on the table's device.
        window: the queries that judge; on the table's device.
        buffers: keys and values of all layers.
        group: ranks that hold the other heads of the same sequences; they must call the same methods in the same order.
        counters: where events are counted, beside what other rooms count; None for counters of its own.
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
        self.config = config
        self.policy = policy
        self.largest_budget = largest_budget
        self.table = table
        self.rows = rows
        self.ledger = ledger
        self.window = window
        self.buffers = buffers
        self.group = group
        self.counters = Counters() if counters is None else counters
        # Events by recency since the start, counted where they are found out.
        self._by_recency = torch.zeros(1, dtype=torch.int64, device=table.device)
        self._nan_logged = False

    def warm_up(self) -> None:
        """Do on padding what an event does on the device, so that no kernel is compiled while requests wait.

        Changes nothing. What a policy makes of padding is dropped; what it cannot digest is logged.
        """
        size = self.config.block_size
        length = max(4, -(-self.config.window // size)) * size
        positions = torch.arange(length, device=self.table.device)
        padding = positions * 0
        row = ResidentRow.of(0, length, 0, size, length // size, padding, padding, positions)
        try:
            state = self.ledger.read(row.first_ids)
            blocks = Blocks(row.numbers, row.numbers < 0, row.numbers, state, length, self.config.seed)
            for seen_from in (0, length):  # with the log-sum-exp of the queries, where there is one, and without
                seen = row._replace(seen_from=seen_from)
                evidence = measure(self.policy, self.window, self.buffers, seen, self.group)
                choose(self.policy, evidence, blocks, row.blocks, size, size)
        except Exception as err:
            logger.warning("nexus: warm-up without effect (%s: %s)", type(err).__name__, err)
        self.window.warm_up()
        self.table.evict(padding[:1], mapped=0)

    def after_prefill(self, seq: RunningSequence, protected: int, room: int) -> None:
        """A prefill pass of this sequence ran.

        Args:
            seq: the sequence.
            protected: leading tokens that other readers share.
            room: physical slots the rest of its prompt may still take. Where it needs more, the prompt is evicted from
                between its chunks, down to its budget, before the question at its end is seen.
        """
        if seq.prefill_left == 0:
            # A request that returns goes on where it was, in decode: what it kept must not depend on having been away.
            self.enforce(seq, protected, slack=self.config.block_size - 1 if seq.returned else 0)
        elif seq.evicted_in_prefill or seq.prefill_left > room:
            seq.evicted_in_prefill = True  # once begun, the budget holds after every chunk
            self.counters.chunk_evictions += self.enforce(seq, protected, slack=0)

    def after_decode(self, seq: RunningSequence, protected: Callable[[], int]) -> None:
        """One token was decoded; a block goes each time one block has been gained.

        Args:
            seq: the sequence.
            protected: says how many leading tokens other readers share; asked only where a block may have to go.
        """
        if seq.evictable and self.rows.resident[seq.row] >= max(seq.budget, seq.floor) + self.config.block_size:
            self.enforce(seq, protected(), slack=self.config.block_size - 1)

    def enforce(self, seq: RunningSequence, protected: int, slack: int) -> bool:
        """Evict this sequence down to its budget if it holds more than budget + ``slack`` tokens.

        Where the protected prefix alone fills the budget, the sequence keeps ``NexusConfig.private_floor`` tokens of
        its own beside it.

        Args:
            seq: the sequence.
            protected: leading tokens that other readers share. They, and those that are pinned, are rounded up to whole
                blocks here; callers need not.
            slack: tokens above the budget that are let pass.

        Returns:
            Whether an event took place.
        """
        resident = self.rows.resident[seq.row]
        if not seq.evictable or resident <= seq.budget + slack:
            return False
        wanted = self.config.whole_blocks(max(protected, seq.pinned))
        sinks = self.config.sink_length
        block_map = BlockMap.refreshed(
            seq.block_map, self.rows, seq.row, self.config.block_size, head_end=max(wanted, sinks)
        )
        was_read = block_map is not seq.block_map
        seq.block_map = block_map
        granted = self._grant_protection(seq, block_map, wanted)
        target = max(seq.budget, seq.floor)
        if target > seq.budget:
            self.counters.budget_held_by_shared += 1
        if resident <= target + slack:
            return False
        if not seq.over_budget:
            seq.over_budget = True
            self.counters.sequences_over_budget += 1
        check = was_read or not seq.evictions
        freed = self._evict(seq, block_map, resident - target, max(granted, sinks), check)
        if granted < wanted:
            # A clipped protection may have cost a token that other rows hold: none may list a slot that is gone.
            self.rows.rebuild_all()
        else:
            self.rows.rebuild(seq.row, resident - freed)
        if self.config.debug:
            seq.block_map.check_integrity(self.rows.resident_positions(seq.row))
        return True

    def _grant_protection(self, seq: RunningSequence, block_map: BlockMap, wanted: int) -> int:
        """Set the sequence's floor from its protected prefix, clipped to what the pool can grant.

        Args:
            seq: the sequence.
            block_map: knows all blocks of the prefix.
            wanted: position at which the prefix ends that should be protected, in whole blocks.

        Returns:
            The position at which the prefix ends that is protected: ``wanted`` or earlier.
        """
        private = self.config.private_floor(seq.budget)
        granted = wanted
        tokens = block_map.resident_before(wanted)
        if tokens > self.largest_budget - private:
            self.counters.protection_clipped += 1
            granted = block_map.head_end_within(self.largest_budget - private)
            tokens = block_map.resident_before(granted)
        seq.floor = tokens + private if tokens else 0
        return granted

    def _evict(self, seq: RunningSequence, block_map: BlockMap, excess: int, head_end: int, check: bool) -> int:
        """One event: measure, choose, unmap, record. The caller rebuilds the rows.

        Args:
            seq: the sequence.
            block_map: of its row.
            excess: tokens that have to go, as far as there are candidates.
            head_end: no block that begins before this position goes.
            check: wait to see how events went.

        Returns:
            Tokens evicted.
        """
        size = self.config.block_size
        recent_start = self.rows.length[seq.row] - self.config.recent_length(seq.budget)
        candidates, whole = block_map.candidates(head_end, recent_start)
        if candidates == 0:
            return 0
        if not whole and block_map.unknown:
            block_map = seq.block_map = BlockMap.read(self.rows, seq.row, size)
        row = self.rows.resident_row(seq.row, size, block_map.blocks)
        if self.config.debug:
            require_lse(self.window, self.buffers, row)
        blocks = self._describe(seq, row, head_end, recent_start)
        evidence = measure(self.policy, self.window, self.buffers, row, self.group)
        choice = self._choose(evidence, blocks, candidates, excess, None if whole else block_map.tokens)
        self._by_recency += choice.by_recency
        if check:
            self.catch_up()
        if choice.on_host is None:
            places = row.tokens_of_whole(choice.ordinals)
            block_map.remove_some(head_end, recent_start, len(choice.ordinals))
        else:
            places = upload(block_map.remove(choice.on_host), row.virtual.device)
        # A forced block has not been judged: its state starts when it becomes a candidate. A void verdict judges none.
        judged = blocks.candidates & ~choice.by_recency
        self.ledger.write(row.virtual, row.ordinal, *choice.weighing, judged=judged[row.ordinal])
        self.table.evict(row.virtual[places], mapped=len(places))
        self._record(seq, row.length, row.numbers[choice.ordinals], len(places))
        return len(places)

    def _describe(self, seq: RunningSequence, row: ResidentRow, head_end: int, recent_start: int) -> Blocks:
        """Blocks as a policy sees them: sinks, shared or pinned prefix, and the recent window are forced.

        Args:
            seq: the sequence.
            row: its resident tokens.
            head_end: blocks that begin before this position are forced.
            recent_start: blocks that end after this position are forced.
        """
        forced = forced_blocks(row.numbers, row.block_size, head_end, recent_start)
        identity = seq.identities(row.length // row.block_size + 1, row.block_size, row.numbers.device)[row.numbers]
        return Blocks(row.numbers, forced, identity, self.ledger.read(row.first_ids), row.length, self.config.seed)

    def _choose(
        self, evidence: Evidence, blocks: Blocks, candidates: int, excess: int, tokens: list[int] | None
    ) -> Choice:
        """Ask the policy which blocks go, and keep the newest where it fails. Arguments are those of ``choose``."""
        size = self.config.block_size
        try:
            return choose(self.policy, evidence, blocks, candidates, excess, size, tokens)
        except PolicyError as err:
            self.counters.policy_errors += 1
            if self.counters.policy_errors == 1:
                logger.warning(
                    "nexus: %s. This event keeps the newest blocks instead. policy_errors counts such events; no other "
                    "is logged.",
                    err,
                    exc_info=err,
                )
        choice = choose(RECENCY, evidence, blocks, candidates, excess, size, tokens)
        return choice._replace(by_recency=torch.ones_like(choice.by_recency))

    def catch_up(self) -> None:
        """Ask the device, and wait, how past events went: count those by recency, and log the first NaN.

        Raises:
            IntegrityError: an event has freed another number of slots than the host had counted.
        """
        by_recency, miscounted = download(torch.cat((self._by_recency, self.table.miscounted))).tolist()
        self.table.require_counted(miscounted)
        self.counters.events_by_recency = by_recency
        if by_recency > self.counters.policy_errors and not self._nan_logged:
            self._nan_logged = True
            logger.warning(
                "nexus: policy %r said NaN of blocks it had to choose among. Such events keep the newest blocks "
                "instead. events_by_recency counts them; no other is logged.",
                self.policy.name,
            )

    def _record(self, seq: RunningSequence, length: int, blocks: torch.Tensor, tokens: int) -> None:
        """Note an event with the sequence and the counters; in debug mode compare it between ranks.

        Args:
            seq: the sequence.
            length: its tokens when it happened.
            blocks: int64 ``[k]`` on the device, numbers of the blocks that went.
            tokens: how many tokens went with them.
        """
        seq.record(length, blocks, tokens, keep=seq.trace or self.config.debug)
        self.counters.eviction_events += 1
        self.counters.blocks_evicted += len(blocks)
        self.counters.tokens_evicted += tokens
        if self.config.debug:
            self.group.require_same(f"what was evicted from row {seq.row} at token {length}", str(seq.events[-1]))
