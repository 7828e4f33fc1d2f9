"""Which blocks each policy gives up in one fixed history. A change to the code must not change them unless it means to.

``python -m tests.core.test_pinned_choices`` writes the record anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nexus_sglang.policy import POLICIES
from tests.support.bench import bench

RECORD = Path(__file__).with_name("pinned_choices.json")


def history(policy: str) -> dict[str, list]:
    """A long prompt evicted from between chunks, a prompt with a shared prefix, and decode of both; every event."""
    b = bench(policy, layers=2)
    chunked = b.sequence(1, 200, budget=64)
    chunked.prefill_left = 180
    b.evictor.after_prefill(chunked, protected=0, room=10)
    b.grow(1, 380)
    chunked.prefill_left = 0
    b.evictor.after_prefill(chunked, protected=0, room=10)
    shared = b.sequence(2, 400, budget=80, pinned=21)
    b.evictor.after_prefill(shared, protected=30, room=0)
    for step in range(1, 49):
        for seq, start, protected in ((chunked, 380, 0), (shared, 400, 30)):
            b.grow(seq.row, start + step)
            b.evictor.after_decode(seq, lambda protected=protected: protected)
    return {seq.rid: [[e.length, list(e.blocks), e.tokens] for e in seq.events] for seq in (chunked, shared)}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_blocks_go_as_ever(policy):
    assert history(policy) == json.loads(RECORD.read_text())[policy]


if __name__ == "__main__":
    lines = [f"{json.dumps(policy)}: {json.dumps(history(policy))}" for policy in sorted(POLICIES)]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
