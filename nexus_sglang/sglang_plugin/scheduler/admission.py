"""What requests cost in physical slots, and how many there are, for SGLang's decision whom to admit.

The decision itself is ``prefill_budget``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nexus_sglang.eviction.sequence import RunningSequence
from nexus_sglang.sglang_plugin.installer import Hook

from .runtime import NexusRuntime


def final_length(req: Any) -> int:
    """Tokens that a request can grow to: prompt and answer."""
    return len(req.origin_input_ids) + (req.sampling_params.max_new_tokens or 0)


def steady_size(runtime: NexusRuntime, req: Any) -> int:
    """Tokens that a request holds at most once it is evicted from.

    That is its budget, or a protected prefix plus what it keeps of its own, whichever is more; everything, where it is
    not evicted from.

    Args:
        runtime: whose budgets and tree.
        req: a request that was accepted, with its match in the tree (``last_node``).
    """
    plan = req.nexus_plan
    if not plan.evict:
        return final_length(req)
    shared = runtime.tree.shared_length(req.last_node)
    parting = runtime.config.whole_blocks(shared) - shared  # its own tokens in the block in which readers part
    protected = max(plan.pinned, runtime.tree.shared_resident(req.last_node) + parting)
    floor = protected + runtime.config.private_floor(plan.budget) if protected else 0
    return min(max(plan.budget, floor), runtime.largest_budget)


def room_without_eviction(runtime: NexusRuntime) -> int:
    """Tokens that a request which must not be evicted from can have in all."""
    return runtime.table.physical_size - runtime.config.block_size


def reclaimable(runtime: NexusRuntime) -> int:
    """Physical slots that are free or behind cached nodes that no request holds."""
    return runtime.table.free_slots + runtime.tree.resident_evictable()


def expected_growth(runtime: NexusRuntime, besides: RunningSequence | None = None) -> int:
    """Physical slots that the running requests may still take.

    Args:
        runtime: whose requests.
        besides: a sequence that is left out.
    """
    block = runtime.config.block_size
    total = 0
    for row, seq in runtime.sequences.items():
        if seq is besides:
            continue
        steady = min(seq.final, max(seq.budget, seq.floor) + block)
        total += max(0, steady - runtime.rows.resident[row], min(seq.prefill_left, runtime.chunk_room))
    return total


def note_candidate(original: Callable[..., Any], adder: Any, req: Any, **kwargs: Any) -> Any:
    """AROUND ``PrefillAdder._check_prefill_budget``: the budget has to know whose price it computes.

    Args:
        original: asks the budget.
        adder: SGLang's ``PrefillAdder``.
        req: the request to be admitted.
        kwargs: as for the hooked function.

    Returns:
        What ``original`` says.
    """
    adder.memory_budget.candidate = req
    return original(adder, req, **kwargs)


HOOKS = (Hook("managers.schedule_policy.PrefillAdder._check_prefill_budget", "around", note_candidate),)
