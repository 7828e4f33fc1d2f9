"""``NEXUS_SGLANG_TIMING=1``: wall time of decode passes and of what follows them. Nothing here compares durations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nexus_sglang.config import NexusConfig
from nexus_sglang.eviction.counters import Counters
from nexus_sglang.sglang_plugin.launcher import flags
from nexus_sglang.sglang_plugin.scheduler import passes


@pytest.mark.parametrize("timing, decode", [(True, True), (True, False), (False, True)])
def test_only_decode_passes_are_clocked_and_only_when_asked(timing, decode):
    calls = []
    counters = Counters()
    rows = SimpleNamespace(resident=[])
    config = NexusConfig("nexus", timing=timing)
    runtime = SimpleNamespace(config=config, counters=counters, table=SimpleNamespace(device="cpu"), rows=rows)
    runner = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(runtime=runtime))
    mode = SimpleNamespace(is_decode=lambda: decode, is_extend=lambda: not decode, is_idle=lambda: False)
    batch = SimpleNamespace(forward_mode=mode, reqs=[], req_pool_indices_cpu=torch.tensor([3, 1]))

    def forward(*args):
        calls.append(runtime.batch_rows)
        return 7

    assert passes.run_forward(forward, SimpleNamespace(model_runner=runner), batch) == 7
    assert calls == [[3, 1]]
    assert runtime.batch_rows == []
    seconds = counters.decode_seconds, counters.decode_eviction_seconds
    assert all(s > 0 for s in seconds) if timing and decode else seconds == (0, 0)


def test_the_environment_asks_for_it(monkeypatch):
    monkeypatch.setenv("NEXUS_SGLANG_TIMING", "1")
    config = flags.config_from({"kv_policy": "nexus"})
    assert config.timing and not config.debug and NexusConfig.from_json(config.to_json()).timing
