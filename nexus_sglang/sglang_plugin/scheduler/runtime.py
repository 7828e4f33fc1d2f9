"""One object per scheduler process that owns the parts and knows which request sits in which row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import torch

from nexus_sglang.config import NexusConfig, TokenAmount
from nexus_sglang.eviction.evictor import Evictor
from nexus_sglang.eviction.sequence import RunningSequence
from nexus_sglang.evidence.query_window import LayerShape, QueryWindow
from nexus_sglang.evidence.score_group import ALONE, ScoreGroup
from nexus_sglang.kv_slots.block_ledger import BlockLedger
from nexus_sglang.kv_slots.capacity import chunk_room, largest_budget, require_pool
from nexus_sglang.kv_slots.compact_rows import CompactRows
from nexus_sglang.kv_slots.kv_buffers import KVBuffers
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.policy import make_policy

from . import hints as request_params
from . import telemetry

logger = logging.getLogger(__name__)


WAITING_LOOKED_AT = 64
"""Requests at the head of the queue that are compared with a sequence about to be thinned."""


def awaited_length(req, waiting: Sequence) -> int:
    """Leading tokens of ``req`` that requests in the queue start with as well.

    Agents that start together share a prompt that the radix tree has not seen shared yet.
    """
    mine, longest = np.asarray(req.origin_input_ids), 0
    for other in islice(waiting, WAITING_LOOKED_AT):
        if other is req or other.extra_key != req.extra_key or other.cache_salt != req.cache_salt:
            continue
        theirs = np.asarray(other.origin_input_ids)
        n = min(len(mine), len(theirs))
        differs = np.flatnonzero(mine[:n] != theirs[:n])
        longest = max(longest, int(differs[0]) if len(differs) else n)
    return longest


class NexusRuntime:
    """Built in three steps, as SGLang builds its own parts: table, then rows, then layers and tree.

    Also the auxiliary cache of SGLang's ``ReqToTokenPool`` (``dense_capacity``, ``alloc_to_lengths``,
    ``free``, ``clear``, ``reset_allocator``), which is told when a row grows or goes.
    """

    def __init__(self, config: NexusConfig, table: PageTable, chunk: int, overlap: bool):
        self.config, self.table = config, table
        self.policy = make_policy(config.policy, config.policy_config)
        self.ledger = BlockLedger(table.virtual_size, self.policy.state_width, table.device)
        self.chunk, self.chunk_room = chunk, chunk_room(chunk, overlap)
        self.largest_budget = largest_budget(table.physical_size, config, chunk, overlap)
        require_pool(table.physical_size, config, chunk, overlap)
        self.sequences: dict[int, RunningSequence] = {}
        self.batch_rows: list[int] = []
        self.rows: CompactRows | None = None
        self.window: QueryWindow | None = None
        self.evictor: Evictor | None = None
        self.tree = None
        self.waiting: Callable[[], Sequence] = tuple
        self.log = telemetry.RequestLog()
        self.batches = 0
        self.healed = 0

    def attach_rows(self, req_to_token_pool) -> None:
        """SGLang's request pool exists: follow its rows."""
        self.rows = CompactRows(req_to_token_pool.req_to_token, self.table)
        req_to_token_pool.attach_aux_cache(self)

    def attach_layers(
        self, layers: dict[int, LayerShape], dtype: torch.dtype, pool, group: ScoreGroup = ALONE, with_lse: bool = False
    ) -> None:  # fmt: skip
        """Model and KV pool exist: set up query rings and the evictor.

        Args:
            group: ranks that hold the other heads. with_lse: the attention backend tells queries' log-sum-exp.
        """
        rows = self.rows.slots.shape[0]
        self.window = QueryWindow(layers, rows, self.config.window, dtype, self.table.device, with_lse)
        self.evictor = Evictor(
            self.config, self.policy,
            self.largest_budget, self.table, self.rows, self.ledger, self.window,
            KVBuffers(pool.get_key_buffer, pool.get_value_buffer), group,
        )  # fmt: skip

    def attach_tree(self, tree_core) -> None:
        """The prefix cache exists."""
        self.tree = tree_core
        tree_core.table, tree_core.counters, tree_core.debug = self.table, self.evictor.counters, self.config.debug

    # -- the auxiliary cache of ReqToTokenPool ---------------------------------------------------------

    @property
    def dense_capacity(self) -> int:
        """Tokens the scheduler may plan with: the virtual capacity."""
        return self.table.virtual_size

    def alloc_to_lengths(self, *, req_pool_indices_cpu: torch.Tensor, target_seq_lens_cpu: torch.Tensor) -> None:
        """Rows grew; their virtual ids are written already."""
        self.rows.extend(req_pool_indices_cpu.tolist(), target_seq_lens_cpu.tolist())

    def free(self, row: int) -> None:
        seq = self.sequences.pop(row, None)
        if seq is not None:
            seq.report = telemetry.request_report(seq, self.rows.resident[row], self.rows.length[row])
            self.log.add(seq.rid, seq.report)
        self.rows.free(row)

    def clear(self) -> None:
        self.rows.clear()
        self.sequences.clear()

    def reset_allocator(self) -> None:
        """SGLang flushed the cache; the allocator's own ``clear`` has reset the table."""
        self.reset()

    def reset(self) -> None:
        if self.rows is not None:
            self.clear()
        self.ledger.clear()

    # -- around a forward pass -------------------------------------------------------------------------

    def before_forward(self, batch) -> None:
        """Bind requests to rows; called on the stream of the forward pass, before it.

        ``lanes`` names the rows of the pass, in the order of its batch, until :meth:`after_forward`.
        """
        if batch is None or batch.forward_mode.is_idle():
            return
        self.batch_rows = batch.req_pool_indices_cpu.tolist()
        extend = batch.forward_mode.is_extend()
        for req in batch.reqs:
            row = req.kv.req_pool_idx
            if row not in self.sequences:
                self._bind(req, row)
            if extend:
                self.sequences[row].prefill_left = len(req.full_untruncated_fill_ids) - req.extend_end

    def after_forward(self, batch) -> None:
        """Evict what the pass left over budget."""
        self.batch_rows = []
        if batch is None or batch.forward_mode.is_idle():
            return
        extend = batch.forward_mode.is_extend()
        for req in batch.reqs:
            seq = self.sequences.get(req.kv.req_pool_idx)
            if seq is None:
                continue
            seq.peak = max(seq.peak, self.rows.resident[seq.row])
            evictions = seq.evictions
            if extend:
                room = self.reclaimable() - self.expected_growth(besides=seq) if seq.prefill_left else 0
                self.evictor.after_prefill(seq, self.shared_length(req), room)
            else:
                self.evictor.after_decode(seq, lambda req=req: self.shared_length(req))
            if seq.evictions > evictions and self.tree is not None:
                self.tree.recount(req.last_node)
        if self.config.debug:
            self.table.check_integrity()
            self.rows.check_integrity()

    def _bind(self, req, row: int) -> None:
        prompt = len(req.origin_input_ids)
        hints = request_params.hints_of(req)
        budget = self.budget_of(req, prompt)
        pin = self.pin_of(req, budget)
        sequence = self.sequences[row] = RunningSequence(
            rid=req.rid,
            row=row,
            final=self.final_length(req),
            budget=budget,
            token_ids=lambda req=req: req.origin_input_ids + req.output_ids,
            pinned=pin,
            evictable=hints.evict,
            budget_clipped=hints.evict and budget < self._asked(hints, prompt),
            pin_clipped=pin < hints.pin,
            trace=hints.trace,
        )
        self.window.begin(row, req.prefix_len)
        if (before := getattr(req, "nexus_sequence", None)) is not None:  # retracted, and admitted again
            sequence.carry_over(before)
        else:
            self.evictor.counters.sequences += 1
        req.nexus_sequence = sequence

    def shared_length(self, req) -> int:
        """Leading tokens of this request that other readers use too, or are waiting to, in whole blocks: the block
        in which readers part is kept whole anyway, and where exactly they part must not matter."""
        held = self.tree.shared_length(req.last_node) if self.tree is not None else 0
        return self.config.whole_blocks(max(held, awaited_length(req, self.waiting())))

    def row_rewritten(self, req) -> None:
        """The tree took the row's tokens: its ids may be the tree's copies now, and holes of others may be filled."""
        if self.healed != self.evictor.counters.holes_healed:
            self.healed = self.evictor.counters.holes_healed
            self.rows.rebuild_all()
        elif self.rows.length[req.kv.req_pool_idx]:
            self.rows.rebuild(req.kv.req_pool_idx)

    # -- what admission asks ---------------------------------------------------------------------------

    def budget_of(self, req, prompt_tokens: int) -> int:
        """Tokens this request may keep, after the pool's clip; all it can grow to when it is not to be evicted."""
        hints = request_params.hints_of(req)
        if not hints.evict:
            return self.final_length(req)
        return min(self._asked(hints, prompt_tokens), self.largest_budget)

    def _asked(self, hints: request_params.Hints, prompt_tokens: int) -> int:
        amount = TokenAmount(hints.budget) if hints.budget is not None else None
        return self.config.budget_tokens(prompt_tokens, amount)

    def pin_of(self, req, budget: int) -> int:
        """Leading tokens pinned, in whole blocks, after the pool's clip: what is pinned must fit beside the private
        floor."""
        size, room = self.config.block_size, self.largest_budget - self.config.private_floor(budget)
        return min(self.config.whole_blocks(request_params.hints_of(req).pin), room // size * size)

    @staticmethod
    def final_length(req) -> int:
        """Tokens this request can grow to."""
        return len(req.origin_input_ids) + (req.sampling_params.max_new_tokens or 0)

    def steady_size(self, req, prompt_tokens: int) -> int:
        """Tokens this request holds at most once it is evicted from: its budget, or a protected prefix plus the
        private floor, whichever is more."""
        budget = self.budget_of(req, prompt_tokens)
        shared = self.tree.shared_length(req.last_node)
        parting = self.config.whole_blocks(shared) - shared  # its own tokens in the block in which readers part
        protected = max(self.pin_of(req, budget), self.tree.shared_resident(req.last_node) + parting)
        held = max(budget, protected + self.config.private_floor(budget) if protected else 0)
        return min(held, self.largest_budget) if self.can_thin(req) else held

    def can_thin(self, req) -> bool:
        """Whether this request's prompt may be evicted from between its chunks."""
        return request_params.hints_of(req).evict

    def room_without_eviction(self) -> int:
        """Tokens a request that must not be evicted from can have in all."""
        return self.table.physical_size - self.config.block_size

    def reclaimable(self) -> int:
        """Physical slots free or behind unlocked cache."""
        free = len(self.table.free_physical)
        return free + (self.tree.resident_evictable() if self.tree is not None else 0)

    def expected_growth(self, besides: RunningSequence | None = None) -> int:
        """Physical slots the running requests may still take."""
        block = self.config.block_size
        total = 0
        for row, seq in self.sequences.items():
            if seq is besides:
                continue
            live = self.rows.resident[row]
            steady = min(seq.final, max(seq.budget, seq.floor) + block)
            total += max(0, steady - live, min(seq.prefill_left, self.chunk_room))
        return total
