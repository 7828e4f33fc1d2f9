"""Kernels compiled and run on a GPU equal their torch references on the CPU."""

import pytest
import torch

from nexus_sglang.kernels import (
    block_attention,
    check,
    compact_rows,
    dispatch,
    distinctiveness,
    page_table,
    query_ring,
    reservoir,
    walk_weights,
)
from nexus_sglang.kernels import (
    check_cases as cases,
)

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


def everything_once():
    """Call every kernel on made-up CUDA tensors; returns a function that does it again."""
    b = 4
    n = 1024
    ids = torch.arange(n, device="cuda")
    weights = torch.rand(b, n, device="cuda")
    identity = torch.arange(b * n, device="cuda").view(b, n)
    lengths = torch.full((b,), n, device="cuda")
    candidates = torch.ones(b, n, dtype=torch.bool, device="cuda")
    freed = torch.zeros(n, dtype=torch.int64, device="cuda")
    queries = torch.randn(2, 16, 8, 64, device="cuda")
    pools = [torch.randn(n, 2, 64, device="cuda") for _ in range(2)]
    starts = torch.arange(0, n + 1, 32, dtype=torch.int32, device="cuda")
    rows = torch.rand(b, 16, n, device="cuda")
    out = torch.zeros(16, n // 32, device="cuda")
    slots = ids.int().repeat(b, 1)
    windows = torch.full((b,), 16, device="cuda")
    positions = torch.zeros_like(slots)
    ring = torch.zeros(20, 16, 8, 64, device="cuda")
    lse_ring = torch.zeros(20, 16, 8, device="cuda")

    def again():
        block_attention.block_attention_rows(
            queries, pools, ids, ids[-16:], ids, ids // 32, n // 32, 32, 0.1, out, "max"
        )
        distinctiveness.block_distinctiveness(pools, ids, starts, 32)
        walk_weights.walk_weights(rows, windows, lengths, candidates, 3, 0.5, 1e-6)
        priority = reservoir.priorities(weights, identity, lengths, lengths, 1, "sequential-poisson", 1, 4.0)
        reservoir.ranks(priority, candidates, lengths)
        compact_rows.compact_rows(slots, lengths, ids, slots.clone(), positions)
        page_table.translate(ids, ids)
        page_table.unmap(ids.clone(), ids, freed)
        query_ring.keep_queries(ring, queries[0], ids[:16], ids[:16], None, lse_ring, queries[0, :, :, 0])

    again()
    return again


def test_nothing_waits_for_the_device():
    again = everything_once()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again()
    finally:
        torch.cuda.set_sync_debug_mode("default")
