"""Which requests an abort ends: SGLang's own loop over queues of stand-ins. Imports SGLang: half a minute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import scheduler
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler import Scheduler

from nexus_sglang.sglang_plugin.scheduler.aborts import abort_exactly

WHERE = ("chunked", "waiting", "grammar", "running")


@pytest.fixture(autouse=True)
def no_server_args(monkeypatch):
    """What SGLang sends back about an ended request asks for the server's arguments."""
    monkeypatch.setattr(scheduler, "_make_abort_req", lambda req, **kwargs: AbortReq(rid=req.rid))


class Request(SimpleNamespace):
    """As much of a request as an abort touches; hashed by identity, as SGLang's."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def request(rid: str) -> Request:
    return Request(
        rid=rid,
        grammar=None,
        to_finish=None,
        kv=SimpleNamespace(holds_mamba=False),
        finished=lambda: False,
        beam_group=None,
    )


class Desk(SimpleNamespace):
    """A scheduler with one chunked request and queues; ``ended`` lists the ids that were ended, by place."""

    def __init__(self, chunked: str, waiting: list[str], grammar: list[str], running: list[str]):
        super().__init__()
        self.ended: set[tuple[str, str]] = set()
        self.chunked_req = request(chunked)
        self._pending_chunked_abort_req = None
        self.waiting_queue = [request(rid) for rid in waiting]
        self.grammar_manager = SimpleNamespace(
            grammar_queue=[request(rid) for rid in grammar], abort_requests=self.abort_grammar
        )
        self.running = [request(rid) for rid in running]
        self.mm_receiver = None
        self.dllm_config = None
        self.disaggregation_mode = DisaggregationMode.NULL
        self.beam_coordinator = SimpleNamespace(retire_group=lambda req: None)

    def abort_grammar(self, recv_req):
        """As ``GrammarManager.abort_requests``."""
        for req in self.grammar_manager.grammar_queue:
            if recv_req.abort_all or req.rid.startswith(recv_req.rid):
                self.ended.add(("grammar", req.rid))

    def collect_inflight_reqs(self):
        return {self.chunked_req, *self.running}

    def _release_aborted_request(self, req):
        pass

    def send_abort_output(self, abort_req, req):
        assert abort_req.rid == req.rid
        self.ended.add(("waiting", req.rid))

    def abort(self, hooked: bool, **wanted) -> set[tuple[str, str]]:
        """What SGLang's own ``abort_request`` ends, with or without the hook."""
        original = getattr(Scheduler.abort_request, "__wrapped__", Scheduler.abort_request)
        names = self.names()
        if hooked:
            abort_exactly(original, self, AbortReq(**wanted))
        else:
            original(self, AbortReq(**wanted))
        if self._pending_chunked_abort_req:
            self.ended.add(("chunked", self._pending_chunked_abort_req.rid))
        self.ended |= {("running", req.rid) for req in self.running if req.to_finish}
        gone = {rid for place, rid in self.ended if place == "waiting"}
        assert self.names() == [rid for rid in names if rid not in gone], "every id is what it was"
        return self.ended

    def names(self) -> list[str]:
        queues = (self.waiting_queue, self.grammar_manager.grammar_queue, self.running, [self.chunked_req])
        return [req.rid for queue in queues for req in queue]


def desk(place: str, rid: str) -> Desk:
    """Requests whose ids begin alike in every place, and ``rid`` in one of them."""
    rids = {where: [f"{rid}{i}-{where}" for i in (0, 1)] for where in WHERE}
    if place == "chunked":
        rids["chunked"][0] = rid
    elif place:
        rids[place].insert(1, rid)
    return Desk(rids["chunked"][0], *(rids[where] for where in WHERE[1:]))


@pytest.mark.parametrize("rid", ["job-1", "\0odd", "\0", "\1"])
@pytest.mark.parametrize("place", WHERE)
def test_one_id_ends_one_request(place, rid):
    assert desk(place, rid).abort(True, rid=rid) == {(place, rid)}


def test_sglang_itself_ends_all_that_begin_alike():
    """What the hook is for. Once this fails, SGLang compares whole ids itself, and the hook can go."""
    assert len({rid for _, rid in desk("running", "job-1").abort(False, rid="job-1")}) > 1


def test_an_unknown_id_ends_nobody_and_an_empty_one_neither():
    assert desk("", "job-1").abort(True, rid="job-1") == set()
    assert desk("running", "job-1").abort(True, rid="") == set()


def test_all_are_ended_when_all_are_named():
    assert {place for place, _ in desk("running", "job-1").abort(True, rid="", abort_all=True)} == set(WHERE)


def test_ids_come_back_where_sglang_fails():
    here = desk("running", "job-1")
    names = here.names()

    def fails(scheduler, recv_req):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        abort_exactly(fails, here, AbortReq(rid="job-1"))
    assert here.names() == names
