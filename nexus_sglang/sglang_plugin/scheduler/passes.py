"""Around a forward pass: before it requests get their rows, after it what is over budget is evicted.

With overlap scheduling there are two streams, and page table and rows are written on both: ids are given out, rows grow
and requests are freed on the scheduler's stream, evictions happen on the stream of the forward pass. What the host does
is one sequence, and the device has to follow it:

1. Step n+1 is allocated after step n was launched. By then eviction n is queued and ``rows.resident`` holds its outcome.
2. The new token's slot is written to its compact row on the scheduler's stream. The forward stream waits for that stream
   (``Scheduler.run_batch``) before it plans step n+1 from rows and ``rows.resident``; then it runs and evicts.
3. After each launch the scheduler's stream waits for the whole forward stream (``Scheduler._apply_war_barrier``, made
   coarse by ``build.WHOLE_BARRIER``), so nothing it does next overtakes eviction n+1.

The waits of 2 and 3 are between streams. The host goes on, unless something it then does on the scheduler's stream waits
for the device. Without overlap there is one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nexus_sglang.device import Stopwatch
from nexus_sglang.sglang_plugin.installer import Hook


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
    runtime = worker.model_runner.token_to_kv_pool_allocator.runtime
    runtime.before_forward(batch)
    clocked = runtime.config.timing and batch is not None and batch.forward_mode.is_decode()
    watch = Stopwatch(runtime.evictor.counters, runtime.table.device) if clocked else None
    result = original(worker, batch, *args, **kwargs)
    if watch:
        watch.lap("decode_seconds")
    runtime.after_forward(batch)
    if watch:
        watch.lap("decode_eviction_seconds")
    return result


def follow_tree(result: Any, tree: Any, req: Any, **kwargs: Any) -> None:
    """AFTER ``UnifiedRadixCache.checkpoint_into_tree``: the row may name the tree's copies of its tokens now.

    Args:
        result: None.
        tree: SGLang's ``UnifiedRadixCache``.
        req: the request whose tokens were inserted.
        kwargs: as for the hooked function.
    """
    if tree.disable or req.last_node is None:
        return
    tree.tree_core.mark_prompt(req.last_node, len(req.origin_input_ids))
    tree.token_to_kv_pool_allocator.runtime.row_rewritten(req)


HOOKS = (
    Hook("managers.tp_worker.TpModelWorker.forward_batch_generation", "around", run_forward),
    Hook("mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree", "after", follow_tree),
)
