"""What a request may pin of the pool's largest budget."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nexus_sglang.config import NexusConfig
from nexus_sglang.sglang_plugin.scheduler.runtime import NexusRuntime


@pytest.mark.parametrize(
    "asked, room, pinned", [(40, 900, 64), (64, 900, 64), (65, 900, 96), (5000, 227, 224), (5000, 20, 0)]
)
def test_a_pin_is_whole_blocks_and_leaves_the_private_floor(asked, room, pinned):
    """A pin that ends inside a block would lose that block when protection is clipped."""
    config = NexusConfig("nexus")
    budget = 400
    runtime = SimpleNamespace(config=config, largest_budget=room + config.private_floor(budget))
    request = SimpleNamespace(nexus_hints=SimpleNamespace(pin=asked))
    assert NexusRuntime.pin_of(runtime, request, budget) == pinned
