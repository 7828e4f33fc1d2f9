"""A request comes in: its hints are read, what cannot be served is refused, and its answer is fitted to the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nexus_sglang.errors import ConfigError
from nexus_sglang.eviction.request_plan import RequestPlan
from nexus_sglang.sglang_plugin.installer import Hook

from .admission import room_without_eviction
from .hints import Hints, read_hints, require_room
from .prefix_space import PrefixSpace
from .runtime import NexusRuntime, runtime_of

logger = logging.getLogger(__name__)


def accept_request(req: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER ``Scheduler._create_generation_req``: read the request's hints and resolve its plan, ``req.nexus_plan``.

    Args:
        req: the request SGLang has made; changed in place.
        scheduler: SGLang's ``Scheduler``.
        recv_req: what arrived (``TokenizedGenerateReqInput``).
        args: as for the hooked function.
        kwargs: as for the hooked function.

    Returns:
        ``req``; one that asks for what cannot be is set to finish with an error.
    """
    runtime = runtime_of(scheduler)
    # SGLang has glued key and adapter together: two pairs may give one string, and a client may write what we would.
    space = PrefixSpace(recv_req.extra_key or None, recv_req.lora_id)
    req.extra_key = space.name()
    prompt = min(len(req.origin_input_ids), scheduler.max_req_input_len)  # SGLang may yet truncate it to that
    try:
        hints = read_hints(req.sampling_params.custom_params, recv_req.kv_hints)
        if not hints.evict:
            require_room(prompt, room_without_eviction(runtime))
    except ConfigError as err:
        req.set_finish_with_abort(str(err))
        req.nexus_plan = plan_of(runtime, len(req.origin_input_ids), Hints())
        # SGLang goes on to compare these with the prompt, which is one token now, and would answer with that instead.
        recv_req.logprob_start_len = -1
        recv_req.routed_experts_start_len = 0
        return req
    req.nexus_plan = plan_of(runtime, prompt, hints)
    start = recv_req.logprob_start_len
    if recv_req.return_logprob and start is not None and 0 <= start < prompt - 1:
        logger.warning("rid %s: input logprobs over an evicted prefix are those of the reduced cache", req.rid)
    req.extra_key = space._replace(budget=req.nexus_plan.own_budget, evict=req.nexus_plan.evict).name()
    return req


def plan_of(runtime: NexusRuntime, prompt_tokens: int, hints: Hints) -> RequestPlan:
    """What a request may keep on this pool.

    Args:
        runtime: whose settings and pool.
        prompt_tokens: length of its prompt.
        hints: what it asks for.
    """
    return RequestPlan.resolve(
        runtime.config,
        runtime.largest_budget,
        prompt_tokens,
        budget=hints.budget,
        evict=hints.evict,
        pin=hints.pin,
        trace=hints.trace,
        ignored=hints.ignored,
    )


def fit_request(result: Any, scheduler: Any, req: Any) -> None:
    """AFTER ``Scheduler.init_req_max_new_tokens``: an answer that is not evicted from has to fit the pool.

    Args:
        result: None.
        scheduler: SGLang's ``Scheduler``.
        req: the request; the length of its answer is clipped in place.
    """
    if req.nexus_plan.evict:
        return
    params = req.sampling_params
    room = room_without_eviction(runtime_of(scheduler)) - len(req.origin_input_ids)
    params.max_new_tokens = min(params.max_new_tokens, max(0, room))
    params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)


def refuse_beams(original: Callable[..., Any], coordinator: Any, req: Any, recv_req: Any) -> str:
    """AROUND ``BeamCoordinator.validate_and_init``: beams share and rewrite rows behind the page table's back.

    Args:
        original: not called.
        coordinator: SGLang's ``BeamCoordinator``.
        req: the request with beams.
        recv_req: what arrived.

    Returns:
        SGLang's error message for the client.
    """
    return "beam_width above 1 does not work with --kv-policy: beams rewrite shared KV rows. Use beam_width 1."


def count_retraction(result: Any, *, token_to_kv_pool_allocator: Any, **kwargs: Any) -> None:
    """AFTER ``release_req``, which takes a request back: for want of memory, for one of higher priority, at a pause.

    Args:
        result: None.
        token_to_kv_pool_allocator: a ``NexusAllocator``.
        kwargs: as for the hooked function.
    """
    token_to_kv_pool_allocator.runtime.counters.retractions += 1


HOOKS = (
    Hook("managers.scheduler.Scheduler._create_generation_req", "after", accept_request),
    Hook("managers.scheduler.Scheduler.init_req_max_new_tokens", "after", fit_request),
    Hook("beam_search.coordinator.BeamCoordinator.validate_and_init", "around", refuse_beams),
    Hook("managers.schedule_batch.release_req", "after", count_retraction),
)
