"""``NEXUS_SGLANG_TIMING=1``: wall time of decode passes and of what follows them. Nothing here compares durations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nexus_sglang.config import NexusConfig
from nexus_sglang.eviction.evictor import Counters
from nexus_sglang.sglang_plugin.launcher import flags
from nexus_sglang.sglang_plugin.scheduler import passes


@pytest.mark.parametrize("timing, decode", [(True, True), (True, False), (False, True)])
def test_only_decode_passes_are_clocked_and_only_when_asked(timing, decode):
    calls, counters = [], Counters()
    runtime = SimpleNamespace(
        config=NexusConfig("nexus", timing=timing), evictor=SimpleNamespace(counters=counters),
        table=SimpleNamespace(device="cpu"), before_forward=lambda batch: calls.append("before"),
        after_forward=lambda batch: calls.append("after"),
    )  # fmt: skip
    runner = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(runtime=runtime))
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: decode))
    answer = passes.run_forward(lambda *a: calls.append("forward") or 7, SimpleNamespace(model_runner=runner), batch)
    assert answer == 7 and calls == ["before", "forward", "after"]
    seconds = counters.decode_seconds, counters.decode_eviction_seconds
    assert all(s > 0 for s in seconds) if timing and decode else seconds == (0, 0)


def test_the_environment_asks_for_it(monkeypatch):
    monkeypatch.setenv("NEXUS_SGLANG_TIMING", "1")
    config = flags.config_from({"kv_policy": "nexus"})
    assert config.timing and not config.debug and NexusConfig.from_json(config.to_json()).timing
