"""When to evict, how much, and from which blocks. Joins policy, statistics and memory; knows no scheduler.

Whether a sequence loses tokens is decided from host numbers, so a pass without an event waits for nothing. An event, in
decode once per block gained, makes the host wait for the device twice: for the positions of the row's resident tokens
(``CompactRows.resident_positions``) and for the order of its blocks (``Evictor._order``). Some policies add a wait
of their own: ``nexus`` with a value tilt (a boolean mask in ``policy.reductions.flatness``) and ``keyformer`` (its
temperature). An event that clips the protection reads all rows anew, one wait more; a look that ends without an event,
because shared tokens hold the sequence above its budget, waits once. With tensor parallelism ranks exchange scores once
per kind of evidence, and in debug mode compare their choice over the CPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nexus_sglang.kernels import reservoir

from ..config import NexusConfig
from ..memory.ledger import BlockLedger
from ..memory.page_table import PageTable
from ..memory.rows import CompactRows
from ..policy.base import Blocks, Policy
from ..statistics.measure import measure
from ..statistics.parallel import ALONE, ScoreGroup
from ..statistics.query_window import QueryWindow
from ..transfer import download, upload
from .sequence import EvictionEvent, RunningSequence, block_identities

logger = logging.getLogger(__name__)


class PolicyError(RuntimeError):
    """A policy returned something that cannot be an order of blocks."""


@dataclass
class Counters:
    """What happened since the server started (``/server_info`` and the log line show them).

    The seconds are counted with ``NEXUS_SGLANG_TIMING=1`` only.
    """

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
    decode_seconds: float = 0.0
    decode_eviction_seconds: float = 0.0


class Evictor:
    """Applies one policy to the page table.

    Args:
        ceiling: most tokens any sequence may hold once it has been evicted from (the pool's largest budget).
        table, rows, ledger, window: all on one device.
        keys_of, values_of: layer id -> pool buffer ``[physical slots, kv heads, head dim]``.
        group: ranks that hold the other heads of the same sequences; they must call the same methods in the same order.
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
        group: ScoreGroup = ALONE,
    ):
        self.config, self.policy, self.ceiling = config, policy, ceiling
        self.table, self.rows, self.ledger, self.window = table, rows, ledger, window
        self.keys_of, self.values_of, self.group = keys_of, values_of, group
        self.counters = Counters()

    def warm_up(self) -> None:
        """Do on padding what an event does on the device, so that no kernel is compiled while requests wait.

        Changes nothing. Whatever a policy makes of padding is dropped; what it cannot digest is logged.
        """
        size, device = self.config.block_size, self.table.device
        blocks = max(4, -(-self.config.window // size))
        index, length = torch.arange(blocks, device=device), blocks * size
        where = torch.arange(length, device=device)
        padding = torch.zeros_like(where)
        names = Blocks(index, index < 0, index, self.ledger.read(padding[:blocks]), length, self.config.seed)
        try:
            evidence = measure(self.policy, self.window, self.keys_of, self.values_of, 0, length, padding, where, where // size,
                               blocks, size, self.group)  # fmt: skip
            weighing = self.policy.weigh(evidence, names)
            self._order(weighing.weights, self.policy.prioritise(weighing.weights, names, 1), names.candidates)
        except Exception as err:
            logger.warning("nexus: warm-up without effect (%s: %s)", type(err).__name__, err)
        self.table.evict(padding[:1], mapped=0)

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
        positions = self.rows.resident_positions(seq.row)
        protected, held = self._protect(positions, wished, self.ceiling - private)
        seq.floor = held + private if held else 0
        target = max(seq.budget, seq.floor)
        if target > seq.budget:
            self.counters.budget_held_by_shared += 1
        if live <= target + slack:
            return False
        if not seq.over_budget:
            seq.over_budget = True
            self.counters.sequences_over_budget += 1
        freed = self._evict(seq, positions, live - target, protected)
        # A clipped protection may have cost a token that other rows hold: none may list a slot that is gone.
        self.rows.rebuild_all() if protected < wished else self.rows.rebuild(seq.row, live - freed)
        return True

    def _protect(self, positions: torch.Tensor, protected: int, limit: int) -> tuple[int, int]:
        """Clip a protected prefix to what the pool can hold beside the private floor; ``positions`` are on the host.

        Returns:
            Leading tokens protected, and how many of them are resident.
        """
        held = int(torch.searchsorted(positions, protected)) if protected else 0
        if held <= limit:
            return protected, held
        self.counters.protection_clipped += 1
        return int(positions[limit]), limit

    def _evict(self, seq: RunningSequence, positions: torch.Tensor, excess: int, protected: int) -> int:
        """One event: measure, choose, unmap, record. The caller rebuilds the rows.

        Args:
            positions: int64 ``[T]`` on the host: the row's resident tokens.

        Returns:
            Tokens evicted.
        """
        size, row, device = self.config.block_size, seq.row, self.table.device
        length, live = self.rows.length[row], len(positions)
        index, ordinal, tokens = torch.unique_consecutive(positions // size, return_inverse=True, return_counts=True)
        forced = self._forced(index, length, seq.budget, protected)
        candidates = int((~forced).sum())
        if candidates == 0:
            return 0
        where, slots = (x[row, :live].long() for x in (self.rows.positions, self.rows.slots))
        virtual = self.rows.req_to_token[row, where].long()
        evidence = measure(
            self.policy, self.window, self.keys_of, self.values_of, row, length, slots, where, upload(ordinal, device),
            len(index), size, self.group,
        )  # fmt: skip
        first = upload(tokens.cumsum(0) - tokens, device)
        identity = torch.from_numpy(block_identities(seq.token_ids(), index.numpy(), size))
        views = (upload(x, device) for x in (index, forced, identity))
        blocks = Blocks(*views, self.ledger.read(virtual[first]), length, self.config.seed)
        weighing = self.policy.weigh(evidence, blocks)
        keep = candidates - min(candidates, math.ceil(excess / size))
        priority = self.policy.prioritise(weighing.weights, blocks, keep)
        order = self._order(weighing.weights, priority, blocks.candidates)[-candidates:]

        # Partly shared blocks hold fewer tokens than a whole one, so the cut counts tokens.
        gone = order[: int(torch.searchsorted(tokens[order].cumsum(0), excess)) + 1]
        dropped = torch.zeros(len(index), dtype=torch.bool, device="cpu")
        dropped[gone] = True
        leaves = torch.nonzero(dropped[ordinal]).squeeze(1)
        # A forced block has not been judged: its memory starts when it becomes a candidate.
        judged = torch.nonzero(~forced[ordinal]).squeeze(1)
        self.ledger.write(virtual[upload(judged, device)], upload(ordinal[judged], device), *weighing)
        freed = self.table.evict(virtual[upload(leaves, device)], mapped=len(leaves))
        self._record(seq, EvictionEvent(length, index[dropped].tolist(), freed))
        return freed

    def _record(self, seq: RunningSequence, event: EvictionEvent) -> None:
        seq.events.append(event)
        self.counters.eviction_events += 1
        self.counters.blocks_evicted += len(event.blocks)
        self.counters.tokens_evicted += event.tokens
        if self.config.debug:
            self.group.require_same(f"what was evicted from row {seq.row} at token {event.length}", str(event))

    def _order(self, weights: torch.Tensor, priority: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """int64 ``[N]`` on the host: blocks that are no candidates, then candidates, the first to go first; among equals
        the older goes first.

        Raises:
            PolicyError: a shape or a NaN.
        """
        blocks = len(candidates)
        named = {"weights": weights, "priorities": priority}
        for what, tensor in named.items():
            if tuple(tensor.shape) != (blocks,):
                self._blame(what, tensor, int(download(torch.isnan(tensor).sum())), blocks)
        places = reservoir.ranks(priority.double()[None], candidates[None], upload([blocks], candidates.device))[0].long()
        holes = [torch.isnan(tensor).sum()[None] for tensor in named.values()]
        *_, bad_weights, bad_priorities = seen = download(torch.cat((places, *holes)))
        for what, tensor, bad in zip(named, named.values(), (bad_weights, bad_priorities), strict=True):
            if bad:
                self._blame(what, tensor, int(bad), blocks)
        return torch.argsort(seen[:blocks], descending=True, stable=True)

    def _blame(self, what: str, tensor: torch.Tensor, nan: int, blocks: int) -> None:
        raise PolicyError(
            f"policy {self.policy.name!r} returned {what} of shape {tuple(tensor.shape)} with {nan} NaN, for {blocks} blocks"
        )

    def _forced(self, index: torch.Tensor, length: int, budget: int, protected: int) -> torch.Tensor:
        """bool ``[N]``: sinks, shared or pinned prefix, and the recent window, by position in the sequence."""
        size = self.config.block_size
        head = max(self.config.sink_length, protected)
        recent = self.config.recent_length(budget)
        return (index * size < head) | ((index + 1) * size > length - recent)
