"""The evictor on a GPU chooses what it chooses on the CPU, and a decode step without an event waits for nothing."""

import pytest
import torch
from nexus_sglang.kernels import dispatch
from test_evictor import bench

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
    b.table.check_integrity(), b.rows.check_integrity()
    return seq.events, b.rows.slots.tolist(), b.table.free_physical.tolist()


@pytest.mark.parametrize("policy", ["nexus", "nexus-paper", "snapkv", "h2o", "expected-attention", "keydiff", "vase"])
def test_same_choices_as_on_the_cpu(policy):
    assert history(policy, "cuda") == history(policy, "cpu")


def test_decode_without_an_event_waits_for_nothing():
    b = bench(device="cuda")
    seq = b.sequence(1, 78, budget=80)
    b.evictor.after_prefill(seq, protected=0, room=0)
    b.grow(1, 79), b.evictor.after_decode(seq, lambda: 0)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for length in range(80, 88):
            b.grow(1, length)
            b.evictor.after_decode(seq, lambda: 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not seq.events
    b.grow(1, 88), b.evictor.after_decode(seq, lambda: 0)
    assert len(seq.events) == 1
