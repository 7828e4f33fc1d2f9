"""The evictor on a GPU chooses what it chooses on the CPU, and a decode step waits for nothing."""

import pytest
import torch

from nexus_sglang.kernels import dispatch
from nexus_sglang.policy import POLICIES
from tests.support.bench import bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here (torch.cuda.is_available() is false)"),
    pytest.mark.skipif(dispatch.interpreted(), reason="TRITON_INTERPRET is set: kernels would not be compiled"),
]


def history(policy: str, device: str) -> tuple:
    b = bench(policy, device=device)
    seq = b.sequence(1, 400, budget=80)
    b.evictor.after_prefill(seq, protected=30, room=0)
    for length in range(401, 450):
        b.grow(1, length)
        b.evictor.after_decode(seq, lambda: 30)
    b.table.check_integrity()
    b.rows.check_integrity()
    return seq.events, b.rows.slots.tolist(), b.table.free_physical.tolist()


@pytest.mark.parametrize("policy", ["nexus", "nexus-paper", "snapkv", "h2o", "expected-attention", "keydiff", "vase"])
def test_same_choices_as_on_the_cpu(policy):
    assert history(policy, "cuda") == history(policy, "cpu")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_decode_waits_for_nothing(policy):
    """With events and without. The first event after the prefill reads the row, and everything is compiled by then."""
    b = bench(policy, device="cuda")
    seq = b.sequence(1, 400, budget=80)
    b.evictor.after_prefill(seq, protected=30, room=0)
    length = 400
    while seq.evictions < 3:
        length += 1
        b.grow(1, length)
        b.evictor.after_decode(seq, lambda: 30)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for longer in range(length + 1, length + 41):
            b.grow(1, longer)
            b.evictor.after_decode(seq, lambda: 30)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seq.evictions > 6
    b.table.check_integrity()
    b.rows.check_integrity()
