"""What SGLang's output streamer, its log and ``/server_info`` are given. Imports SGLang: half a minute."""

from __future__ import annotations

from types import SimpleNamespace

from nexus_sglang.eviction.request_plan import RequestPlan
from nexus_sglang.eviction.sequence import RunningSequence
from nexus_sglang.sglang_plugin.scheduler import reports, telemetry


def request(finished: bool, report: dict | None) -> SimpleNamespace:
    return SimpleNamespace(finished=lambda: finished, nexus_sequence=SimpleNamespace(report=report))


def test_finished_requests_report_beside_what_sglang_reports():
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    class Streamer(SchedulerOutputStreamer):
        def build_additional_customized_info(self, reqs):
            return {"theirs": [1] * len(reqs)}

    done = request(True, {"resident": 7})
    others = [request(False, {"resident": 7}), request(True, None), SimpleNamespace(finished=lambda: True)]
    for base, theirs in ((SchedulerOutputStreamer, {}), (Streamer, {"theirs": [1] * 4})):
        streamer = reports.streamer_class(lambda scheduler, base=base: base, None)
        assert issubclass(streamer, base)
        assert streamer.has_additional_customized_info
        info = streamer.build_additional_customized_info(object.__new__(streamer), [done, *others])
        assert info == {**theirs, "nexus": [[{"resident": 7}], [], [], []]}


def test_a_report_says_what_was_clipped():
    plan = RequestPlan(400, pinned=64, clipped=("kv_budget",))
    seq = RunningSequence("r", row=1, final=900, plan=plan, token_ids=list, peak=500)
    report = telemetry.request_report(seq, resident=400, length=50)
    assert report["budget"] == 400
    assert report["pinned"] == 50
    assert report["clipped"] == ["kv_budget"]
    assert "ignored" not in report
    assert "trace" not in report


def test_only_every_so_many_batches_are_logged(caplog, monkeypatch):
    monkeypatch.setattr(telemetry, "log_line", lambda runtime: "our line")
    caplog.set_level("INFO")
    runtime = SimpleNamespace(batches=0)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(runtime=runtime))
    for rank, lines in ((True, 2), (False, 2)):
        reporter = SimpleNamespace(scheduler=scheduler, decode_log_interval=3, is_stats_logging_rank=rank)
        for _ in range(6):
            reports.log_batch(None, reporter)
        assert caplog.text.count("our line") == lines
