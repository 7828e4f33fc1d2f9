"""A client ends a request: that one, and no other whose id only begins alike.

SGLang's scheduler looks for ids that *start with* the one it is given, so ending ``job-1`` also ends ``job-10``. Its
HTTP server already sends exact ids only, also for batches and for several answers to one prompt, each of which has an
id of its own, and its own timeouts do the same. So nothing needs the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nexus_sglang.sglang_plugin.installer import Hook

SCREENS = ("\0", "\1")
"""What an id is hidden behind: the first, or the second from those who ask for ids that begin with the first."""


def abort_exactly(original: Callable[[Any, Any], None], scheduler: Any, recv_req: Any) -> None:
    """AROUND ``Scheduler.abort_request``: the id names one request, unless all are to be ended.

    The requests whose ids only begin like it are renamed while SGLang looks.

    Args:
        original: looks through all queues and ends what it finds.
        scheduler: SGLang's ``Scheduler``.
        recv_req: SGLang's ``AbortReq``.
    """
    rid = recv_req.rid
    if recv_req.abort_all:
        return original(scheduler, recv_req)
    if not rid:
        return None  # names nobody; SGLang would end everybody
    others = [(req, req.rid) for req in known(scheduler) if req.rid != rid and req.rid.startswith(rid)]
    screen = SCREENS[rid[0] == SCREENS[0]]
    try:
        for req, name in others:
            req.rid = screen + name
        return original(scheduler, recv_req)
    finally:
        for req, name in others:
            req.rid = name


def known(scheduler: Any) -> Iterator[Any]:
    """Every request in the hands of a scheduler, some more than once.

    Args:
        scheduler: SGLang's ``Scheduler``, of a kind that a policy can serve with.
    """
    yield from filter(None, [scheduler.chunked_req])
    yield from scheduler.waiting_queue
    yield from scheduler.grammar_manager.grammar_queue
    yield from scheduler.collect_inflight_reqs()
    yield from getattr(scheduler.mm_receiver, "waiting_list", ())


HOOKS = (Hook("managers.scheduler.Scheduler.abort_request", "around", abort_exactly),)
