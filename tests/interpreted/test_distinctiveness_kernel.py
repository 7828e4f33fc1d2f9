"""Directions through the pool equal their reference; cases.py states error and tolerance."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nexus_sglang.kernels import check_cases as cases
from nexus_sglang.kernels.distinctiveness import block_distinctiveness


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    kv_heads=st.integers(1, 4),
    dim=st.sampled_from((64, 80, 128)),
    blocks=st.integers(1, 60),
    block_size=st.integers(1, 128),
    dtype=st.sampled_from(tuple(cases.DTYPES)),
)
@example(seed=1, kv_heads=1, dim=64, blocks=4096, block_size=1, dtype="bf16")
def test_equals_reference(**shape):
    outcome = cases.directions("cpu", **shape)
    assert outcome.ok, outcome


def test_opposite_equal_and_empty():
    """One vector against three: the odd one is as far away as can be, and an empty block is 0."""
    pool = torch.ones(9, 2, 64)
    pool[4] = -1
    starts = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
    for run in (block_distinctiveness.kernel, block_distinctiveness.reference):
        got = run([pool, pool + 0], torch.tensor([1, 2, 3, 4]), starts, 4)
        assert torch.allclose(got, torch.tensor([[0.0, 0.0, 1.0]] * 2), atol=1e-6)


def test_a_block_too_large_for_the_kernel_is_left_to_torch():
    outcome = cases.directions("cpu", seed=3, kv_heads=2, dim=64, blocks=3, block_size=300, dtype="fp32")
    assert outcome.error == 0
