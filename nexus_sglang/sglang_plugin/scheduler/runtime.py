"""The parts that evict in one scheduler process, and which request sits in which row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from nexus_sglang.config import NexusConfig
from nexus_sglang.errors import SelfCheckError
from nexus_sglang.eviction.counters import Counters
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

from . import telemetry

T = TypeVar("T")


class Part(Generic[T]):
    """An attribute of the runtime that one step of ``build`` sets, once. Before that step reading it is an error."""

    def __init__(self, step: str):
        """``step``: the function of ``build`` that sets it."""
        self.step = step

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, runtime: Any, owner: type | None = None) -> T:
        if runtime is None:
            return self
        if self.name not in vars(runtime):
            raise SelfCheckError(f"runtime.{self.name} is used before build.{self.step} has run")
        return vars(runtime)[self.name]

    def __set__(self, runtime: Any, value: T) -> None:
        if self.name in vars(runtime):
            raise SelfCheckError(f"runtime.{self.name} is set already: build.{self.step} has run twice")
        vars(runtime)[self.name] = value


class NexusRuntime:
    """Owner of the page table and all that is built over it, one per scheduler process.

    Built in four steps, as SGLang builds what each part needs (see ``build``): this constructor, then
    :meth:`attach_rows`, :meth:`attach_layers` and :meth:`attach_tree`. Other code finds it by :func:`runtime_of`.

    Args:
        config: the server's settings.
        table: page table over the KV pool.
        chunk: tokens of a prefill chunk.
        overlap: whether SGLang prepares a pass while the one before it runs.

    Attributes:
        counters: what happened since the server started; everybody counts here.
        chunk_room: tokens that chunks in flight take beside what is resident.
        largest_budget: largest budget that one request can be granted on this pool, in tokens.
        sequences: the running sequence of each request row in use.
        batch_rows: request rows of the running pass, in the order of its batch; empty between passes.
        log: what the last finished requests held.
        batches: batches that SGLang has logged.
        rows: compact rows of SGLang's request pool.
        window: recent queries.
        evictor: evicts.
        tree: core of SGLang's radix cache, a ``NexusTreeCore``.
        waiting: gives the requests that wait to be admitted.

    Raises:
        ConfigError: the pool is too small for the budget.
    """

    rows: Part[CompactRows] = Part("translate_writes")
    window: Part[QueryWindow] = Part("adopt_layers")
    evictor: Part[Evictor] = Part("adopt_layers")
    tree: Part[Any] = Part("scheduler_ready")
    waiting: Part[Callable[[], Sequence[Any]]] = Part("scheduler_ready")

    def __init__(self, config: NexusConfig, table: PageTable, chunk: int, overlap: bool):
        require_pool(table.physical_size, config, chunk, overlap)
        self.config = config
        self.table = table
        self.counters = Counters()
        self.policy = make_policy(config.policy, config.policy_config)
        self.ledger = BlockLedger(table.virtual_size, self.policy.state_width, table.device)
        self.chunk = chunk
        self.chunk_room = chunk_room(chunk, overlap)
        self.largest_budget = largest_budget(table.physical_size, config, chunk, overlap)
        self.sequences: dict[int, RunningSequence] = {}
        self.batch_rows: list[int] = []
        self.log = telemetry.RequestLog()
        self.batches = 0

    def attach_rows(self, req_to_token: torch.Tensor) -> None:
        """Second step: SGLang's request pool exists.

        Args:
            req_to_token: int32 ``[rows, width]``, virtual id of each token of each request row.
        """
        self.rows = CompactRows(req_to_token, self.table)

    def attach_layers(
        self,
        layers: dict[int, LayerShape],
        dtype: torch.dtype,
        pool: Any,
        group: ScoreGroup = ALONE,
        with_lse: bool = False,
    ) -> None:
        """Third step: model and KV pool exist.

        Args:
            layers: shapes of the attention layers, by layer id, ascending.
            dtype: type of queries.
            pool: SGLang's KV pool, from which keys and values of a layer are read.
            group: ranks that hold the other heads.
            with_lse: whether the attention backend gives the log-sum-exp of queries.
        """
        rows = self.rows.slots.shape[0]
        self.window = QueryWindow(layers, rows, self.config.window, dtype, self.table.device, with_lse)
        self.evictor = Evictor(
            self.config,
            self.policy,
            self.largest_budget,
            self.table,
            self.rows,
            self.ledger,
            self.window,
            KVBuffers(pool.get_key_buffer, pool.get_value_buffer),
            group,
            self.counters,
        )

    def attach_tree(self, tree: Any, waiting: Callable[[], Sequence[Any]]) -> None:
        """Fourth step: the scheduler and its prefix cache exist.

        Args:
            tree: core of the radix cache, a ``NexusTreeCore``.
            waiting: gives the requests that wait to be admitted.
        """
        self.tree = tree
        self.waiting = waiting

    def release(self, row: int) -> None:
        """The request in this row is done, or was taken back: write its report and free the row."""
        seq = self.sequences.pop(row, None)
        if seq is not None:
            seq.report = telemetry.request_report(seq, self.rows.resident[row], self.rows.length[row])
            self.log.add(seq.rid, seq.report)
        self.rows.free(row)

    def clear_rows(self) -> None:
        """No request is running any more."""
        self.rows.clear()
        self.sequences.clear()

    def reset(self) -> None:
        """SGLang flushed its cache: no token is in use any more."""
        self.clear_rows()
        self.ledger.clear()


def runtime_of(owner: Any) -> NexusRuntime:
    """The runtime behind an object of SGLang's.

    Args:
        owner: whatever holds the KV allocator: a ``ModelRunner``, a ``Scheduler``, a ``UnifiedRadixCache``, ...
    """
    return owner.token_to_kv_pool_allocator.runtime
