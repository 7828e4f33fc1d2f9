"""Block attention through the pool equals its reference; cases.py states error and tolerance."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nexus_sglang.kernels import cases
from nexus_sglang.kernels.block_attention import block_attention_rows

TOKENS = 4096
SHAPE = {
    "seed": st.integers(0, 10_000),
    "window": st.integers(1, 24),
    "kv_heads": st.integers(1, 3),
    "group": st.integers(1, 8),
    "dim": st.sampled_from((64, 128)),
    "blocks": st.one_of(st.integers(1, 24), st.integers(1, TOKENS)),
    "block_size": st.integers(1, 40),
    "dtype": st.sampled_from(tuple(cases.DTYPES)),
    "reduction": st.sampled_from(("max", "sum")),
    "given_lse": st.booleans(),
}
MANY = {"seed": 1, "window": 4, "kv_heads": 1, "group": 2, "dim": 64, "block_size": 1, "dtype": "bf16"}


@settings(max_examples=10)
@given(**SHAPE)
@example(**MANY, blocks=4096, reduction="max", given_lse=False)
@example(**MANY, blocks=600, reduction="sum", given_lse=True)
def test_equals_reference(**shape):
    shape["block_size"] = min(shape["block_size"], TOKENS // shape["blocks"])
    outcome = cases.attention("cpu", **shape)
    assert outcome.ok, outcome


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("dim", [64, 128])
def test_every_group_and_head_size(group, dim):
    """Each with one dtype, reduction and source of the log-sum-exp; together all of them, on windows of every phase."""
    number = group + 8 * (dim == 128)
    shape = {"dtype": ("bf16", "fp16", "fp32")[number % 3], "reduction": ("max", "sum")[number // 2 % 2]}
    outcome = cases.attention("cpu", number, 1 + number, 2, group, dim, 5, 16, given_lse=number % 2 == 0, **shape)
    assert outcome.ok, outcome


def arguments(window=3, tokens=40, block_size=8, position=None):
    g = torch.Generator().manual_seed(0)
    queries, pool = torch.randn(window, 4, 64, generator=g), torch.randn(tokens + 1, 2, 64, generator=g)
    positions = torch.arange(tokens)
    query_positions = torch.arange(tokens - window, tokens) if position is None else torch.full((window,), position)
    blocks = -(-tokens // block_size)
    return queries, pool, positions + 1, query_positions, positions, positions // block_size, blocks, block_size, 0.125


@pytest.mark.parametrize("run", [block_attention_rows.reference, block_attention_rows.kernel])
def test_a_query_that_sees_no_key_adds_nothing(run):
    before = torch.rand(3, 5)
    for reduction in ("max", "sum"):
        assert torch.equal(run(*arguments(position=-1), before.clone(), reduction), before)


@pytest.mark.parametrize("run", [block_attention_rows.reference, block_attention_rows.kernel])
def test_keys_after_the_query_do_not_count(run):
    out = run(*arguments(position=19), torch.zeros(3, 5), "sum")
    assert torch.allclose(out.sum(dim=1), torch.full((3,), 4.0)) and bool((out[:, 3:] == 0).all())


def test_strided_pool_and_queries():
    queries, pool, *rest = arguments()
    wide = torch.randn(len(pool), 5, 64)
    wide[:, 1:3] = pool
    strided = queries.transpose(0, 1).contiguous().transpose(0, 1)
    got = block_attention_rows.kernel(strided, wide[:, 1:3], *rest, torch.zeros(3, 5), "max")
    assert torch.allclose(got, block_attention_rows.reference(queries, pool, *rest, torch.zeros(3, 5), "max"), atol=1e-6)


@pytest.mark.parametrize("run", [block_attention_rows.reference, block_attention_rows.kernel])
def test_refuses_what_does_not_fit(run):
    with pytest.raises(ValueError, match="reduction 'mean' is not one of max, sum"):
        run(*arguments(), torch.zeros(3, 5), "mean")
    with pytest.raises(ValueError, match="out is torch.float32"):
        run(*arguments(), torch.zeros(3, 6), "max")
    with pytest.raises(ValueError, match="block_size 200"):
        run(*arguments()[:7], 200, 0.1, torch.zeros(3, 5), "max")
    queries, pool, *rest = arguments()
    with pytest.raises(ValueError, match="3 query heads"):
        run(queries[:, :3], pool, *rest, torch.zeros(3, 5), "max")
