"""Around a forward pass: before it requests get their rows, after it what is over budget is evicted.

With overlap scheduling there are two streams, and page table and rows are written on both: ids are given out, rows
grow and requests are freed on the scheduler's stream, evictions happen on the stream of the forward pass. What the host
does is one sequence, and the device has to follow it:

1. Step n+1 is allocated after step n was launched. By then eviction n is queued, and ``rows.resident`` holds its
   outcome.
2. The new token's slot is written to its compact row on the scheduler's stream. The forward stream waits for that
   stream (``Scheduler.run_batch``) before it plans step n+1 from rows and ``rows.resident``; then it runs and evicts.
3. After each launch the scheduler's stream waits for the whole forward stream (``Scheduler._apply_war_barrier``, made
   coarse by ``build.WHOLE_BARRIER``), so nothing it does next overtakes eviction n+1.

The waits of 2 and 3 are between streams. The host goes on, unless something it then does on the scheduler's stream
waits for the device. Without overlap there is one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from nexus_sglang.device import Stopwatch
from nexus_sglang.eviction.sequence import RunningSequence
from nexus_sglang.prefixes import common_prefix
from nexus_sglang.sglang_plugin.installer import Hook

from .admission import expected_growth, final_length, reclaimable
from .runtime import NexusRuntime, runtime_of

WAITING_LOOKED_AT = 64
"""Requests at the front of the queue that are compared with a sequence about to be evicted from."""


def run_forward(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``TpModelWorker.forward_batch_generation``, on the stream of the forward pass.

    Args:
        original: runs the pass.
        worker: SGLang's ``TpModelWorker``.
        batch: SGLang's ``ScheduleBatch``, or None.
        args: as for the hooked function.
        kwargs: as for the hooked function.

    Returns:
        What the pass returned.
    """
    runtime = runtime_of(worker.model_runner)
    if batch is None or batch.forward_mode.is_idle():
        return original(worker, batch, *args, **kwargs)
    clocked = runtime.config.timing and batch.forward_mode.is_decode()
    begin_pass(runtime, batch)
    watch = Stopwatch(runtime.counters, runtime.table.device) if clocked else None
    result = original(worker, batch, *args, **kwargs)
    if watch:
        watch.lap("decode_seconds")
    end_pass(runtime, batch)
    if watch:
        watch.lap("decode_eviction_seconds")
    return result


def begin_pass(runtime: NexusRuntime, batch: Any) -> None:
    """Bind requests that are new to their rows. ``runtime.batch_rows`` lists the rows of the pass until its end.

    Args:
        runtime: whose rows.
        batch: SGLang's ``ScheduleBatch``.
    """
    runtime.batch_rows = batch.req_pool_indices_cpu.tolist()
    extend = batch.forward_mode.is_extend()
    for req in batch.reqs:
        row = req.kv.req_pool_idx
        if row not in runtime.sequences:
            bind(runtime, req, row)
        if extend:
            runtime.sequences[row].prefill_left = len(req.full_untruncated_fill_ids) - req.extend_end


def bind(runtime: NexusRuntime, req: Any, row: int) -> None:
    """A request has got a row.

    Args:
        runtime: whose rows.
        req: SGLang's request, which was accepted (``nexus_plan``).
        row: its request row.
    """
    sequence = RunningSequence(
        rid=req.rid,
        row=row,
        final=final_length(req),
        plan=req.nexus_plan,
        token_ids=lambda: req.origin_input_ids + req.output_ids,
    )
    runtime.sequences[row] = sequence
    runtime.window.begin(row, req.prefix_len)
    before = getattr(req, "nexus_sequence", None)
    if before is None:
        runtime.counters.sequences += 1
    else:  # retracted, and admitted again
        sequence.carry_over(before)
    req.nexus_sequence = sequence


def end_pass(runtime: NexusRuntime, batch: Any) -> None:
    """Evict what the pass left over budget.

    Args:
        runtime: whose rows.
        batch: the batch that :func:`begin_pass` had.
    """
    runtime.batch_rows = []
    extend = batch.forward_mode.is_extend()
    for req in batch.reqs:
        seq = runtime.sequences.get(req.kv.req_pool_idx)
        if seq is None:
            continue
        seq.peak = max(seq.peak, runtime.rows.resident[seq.row])
        evictions = seq.evictions
        if extend:
            room = reclaimable(runtime) - expected_growth(runtime, besides=seq) if seq.prefill_left else 0
            runtime.evictor.after_prefill(seq, protected_length(runtime, req), room)
        else:
            runtime.evictor.after_decode(seq, partial(protected_length, runtime, req))
        if seq.evictions > evictions:
            runtime.tree.recount(req.last_node)
    if runtime.config.debug:
        runtime.table.check_integrity()
        runtime.rows.check_integrity()


def protected_length(runtime: NexusRuntime, req: Any) -> int:
    """Leading tokens of a request that others read too, or wait to read, in whole blocks.

    Rounded up, so that the result does not depend on where exactly inside a block the readers part.

    Args:
        runtime: whose tree and queue.
        req: SGLang's request.
    """
    shared = runtime.tree.shared_length(req.last_node)
    return runtime.config.whole_blocks(max(shared, awaited_length(req, runtime.waiting())))


def awaited_length(req: Any, waiting: Any) -> int:
    """Leading tokens of a request that requests in the queue start with as well.

    Agents that start together share a prompt that the radix tree has not seen shared yet.

    Args:
        req: SGLang's request.
        waiting: the queue, its front first.
    """
    mine = np.asarray(req.origin_input_ids)
    longest = 0
    for other in islice(waiting, WAITING_LOOKED_AT):
        if other is req or other.extra_key != req.extra_key or other.cache_salt != req.cache_salt:
            continue
        longest = max(longest, common_prefix(mine, other.origin_input_ids))
    return longest


def follow_tree(result: Any, tree: Any, req: Any, **kwargs: Any) -> None:
    """AFTER ``UnifiedRadixCache.checkpoint_into_tree``, which took over the tokens of a row after a pass.

    Args:
        result: None.
        tree: SGLang's ``UnifiedRadixCache``.
        req: the request whose tokens were inserted.
        kwargs: as for the hooked function.
    """
    if tree.disable or req.last_node is None:
        return
    runtime = runtime_of(tree)
    runtime.tree.mark_prompt(req.last_node, len(req.origin_input_ids))
    reread(runtime, req.kv.req_pool_idx)


def reread(runtime: NexusRuntime, row: int) -> None:
    """The tree took a row's tokens: read the row anew, and all rows where that filled holes.

    Its ids may be those of the tree's copies now. A hole that was filled may be in other rows too.

    Args:
        runtime: whose rows.
        row: the request row.
    """
    if runtime.tree.take_healed():
        runtime.rows.rebuild_all()
    elif runtime.rows.length[row]:
        runtime.rows.rebuild(row)


HOOKS = (
    Hook("managers.tp_worker.TpModelWorker.forward_batch_generation", "around", run_forward),
    Hook("mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree", "after", follow_tree),
)
