"""What SGLang shows of eviction: ``meta_info``, ``/server_info``, the log, and its own accounting of the pool."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from nexus_sglang.sglang_plugin.installer import Hook

from . import telemetry
from .admission import reclaimable
from .runtime import runtime_of

logger = logging.getLogger(__name__)


def streamer_class(original: Callable[[Any], type], scheduler: Any) -> type:
    """AROUND ``Scheduler.get_output_streamer_class``: finished requests report in ``meta_info['nexus']``.

    Args:
        original: gives SGLang's class of output streamers.
        scheduler: SGLang's ``Scheduler``.

    Returns:
        A subclass of it.
    """
    return reporting(original(scheduler))


def reporting(base: type) -> type:
    """A subclass of an output streamer that adds what each finished request holds.

    Args:
        base: SGLang's ``SchedulerOutputStreamer``, or a subclass of it.
    """

    class NexusOutputStreamer(base):
        """``base`` plus the key ``nexus``: per request a list of one report, or an empty one while it runs."""

        __slots__ = ()
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            info = super().build_additional_customized_info(reqs)
            info["nexus"] = [_reports(req) for req in reqs]
            return info

    return NexusOutputStreamer


def _reports(req: Any) -> list[dict[str, Any]]:
    """The report of a finished request."""
    sequence = getattr(req, "nexus_sequence", None) if req.finished() else None
    return [sequence.report] if sequence is not None and sequence.report else []


def show_state(result: Any, controller: Any, state: dict[str, Any]) -> None:
    """AFTER ``SchedulerInternalStateController._add_memory_usage``: ``/server_info`` shows the counters.

    Args:
        result: None.
        controller: SGLang's ``SchedulerInternalStateController``.
        state: the answer; gains the key ``nexus``.
    """
    runtime = runtime_of(controller.scheduler)
    runtime.evictor.catch_up()
    state["nexus"] = {**telemetry.snapshot(runtime), "recent_requests": dict(runtime.log.recent)}


def log_batch(result: Any, reporter: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``report_prefill_stats`` and ``report_decode_stats``: our line, every decode interval.

    Args:
        result: None.
        reporter: SGLang's ``SchedulerMetricsReporter``.
        args: as for the hooked function.
        kwargs: as for the hooked function.
    """
    runtime = runtime_of(reporter.scheduler)
    runtime.batches += 1
    if runtime.batches % max(1, reporter.decode_log_interval) == 0 and reporter.is_stats_logging_rank:
        logger.info(telemetry.log_line(runtime))


def count_virtual_ids(original: Callable[[Any], Any], observer: Any) -> Any:
    """AROUND ``SchedulerPoolStatsObserver._get_token_info``: SGLang's accounting is in virtual ids.

    Args:
        original: counts with the allocator's numbers, which are the smaller of both spaces.
        observer: SGLang's ``SchedulerPoolStatsObserver``.

    Returns:
        Its statistics, in virtual ids; usage is that of the physical slots.
    """
    stats = original(observer)
    runtime = runtime_of(observer)
    free = runtime.table.free_ids
    return dataclasses.replace(
        stats,
        full_available_size=free,
        full_num_used=observer.max_total_num_tokens - free - stats.full_evictable_size,
        # What the operator watches is memory, so usage is physical: mapped and not evictable.
        full_token_usage=max(0.0, 1 - reclaimable(runtime) / runtime.table.physical_size),
    )


METRICS = "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"

HOOKS = (
    Hook("managers.scheduler.Scheduler.get_output_streamer_class", "around", streamer_class),
    Hook(
        "managers.scheduler_components.internal_state.SchedulerInternalStateController._add_memory_usage",
        "after",
        show_state,
    ),
    Hook(f"{METRICS}.report_prefill_stats", "after", log_batch),
    Hook(f"{METRICS}.report_decode_stats", "after", log_batch),
    Hook(
        "managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver._get_token_info",
        "around",
        count_virtual_ids,
    ),
)
