"""Kernels compiled and run on a GPU equal their torch references on the CPU."""

import pytest
import torch
from nexus_sglang.kernels import cases, check, dispatch, page_table, reservoir

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here (torch.cuda.is_available() is false)"),
    pytest.mark.skipif(dispatch.interpreted(), reason="TRITON_INTERPRET is set: kernels would not be compiled"),
]


@pytest.mark.parametrize("name", cases.KERNELS)
def test_equals_reference(name):
    for seed, shape in enumerate(check.SMALL[name] + check.LARGE[name]):
        outcome = cases.KERNELS[name]("cuda", seed, **shape)
        assert outcome.ok, (shape, outcome)


def test_cuda_tensors_take_triton():
    assert dispatch.uses_triton(torch.zeros(1, device="cuda")) and not dispatch.uses_triton(torch.zeros(1))


def test_nothing_waits_for_the_device():
    b, n = 4, 1000
    weights, identity = torch.rand(b, n, device="cuda"), torch.arange(b * n, device="cuda").view(b, n)
    lengths, keep = torch.full((b,), n, device="cuda"), torch.full((b,), 200, device="cuda")
    candidates = torch.ones(b, n, dtype=torch.bool, device="cuda")
    v2p, freed = torch.arange(n, device="cuda"), torch.zeros(n, dtype=torch.int64, device="cuda")
    arguments = (weights, identity, lengths, lengths, candidates, keep, 1, "sequential-poisson", 1, 4.0, keep // 2)
    reservoir.reservoir(*arguments)  # compiles
    page_table.unmap(v2p.clone(), v2p, freed)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        reservoir.reservoir(*arguments)
        page_table.unmap(v2p.clone(), v2p, freed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
