"""Block attention through the pool equals its reference; cases.py states error and tolerance."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nexus_sglang.kernels import block_attention
from nexus_sglang.kernels import check_cases as cases
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
    queries = torch.randn(2, window, 4, 64, generator=g)
    pools = list(torch.randn(2, tokens + 1, 2, 64, generator=g))
    positions = torch.arange(tokens)
    query_positions = torch.arange(tokens - window, tokens) if position is None else torch.full((window,), position)
    blocks = -(-tokens // block_size)
    return queries, pools, positions + 1, query_positions, positions, positions // block_size, blocks, block_size, 0.125


@pytest.mark.parametrize("run", [block_attention_rows.reference, block_attention_rows.kernel])
def test_a_query_that_sees_no_key_adds_nothing(run):
    before = torch.rand(3, 5)
    for reduction in ("max", "sum"):
        assert torch.equal(run(*arguments(position=-1), before.clone(), reduction), before)


@pytest.mark.parametrize("run", [block_attention_rows.reference, block_attention_rows.kernel])
def test_keys_after_the_query_do_not_count(run):
    out = run(*arguments(position=19), torch.zeros(3, 5), "sum")
    assert torch.allclose(out.sum(dim=1), torch.full((3,), 8.0)) and bool((out[:, 3:] == 0).all())


def test_strided_pool_and_queries():
    queries, pools, *rest = arguments()
    wide = torch.randn(2, len(pools[0]), 5, 64)
    wide[:, :, 1:3] = torch.stack(pools)
    strided = queries.transpose(0, 2).contiguous().transpose(0, 2)
    got = block_attention_rows.kernel(strided, list(wide[:, :, 1:3]), *rest, torch.zeros(3, 5), "max")
    assert torch.allclose(
        got, block_attention_rows.reference(queries, pools, *rest, torch.zeros(3, 5), "max"), atol=1e-6
    )


@pytest.mark.parametrize("apart", [1, 20, 40, 1000])
def test_layers_share_a_program_where_their_rows_would_take_too_much_room(apart, monkeypatch):
    g = torch.Generator().manual_seed(4)
    queries = torch.randn(5, 3, 4, 64, generator=g)
    pools = list(torch.randn(5, 41, 2, 64, generator=g))
    rest = arguments()[2:]
    monkeypatch.setattr(block_attention, "_APART", apart)
    for reduction in ("max", "sum"):
        got = block_attention_rows.kernel(queries, pools, *rest, torch.zeros(3, 5), reduction)
        wanted = block_attention_rows.reference(queries, pools, *rest, torch.zeros(3, 5), reduction)
        assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("offset", [0, 1])
def test_pools_at_any_address(offset):
    """The kernel reads 16 bytes at a time only where every layer's address allows it."""
    queries, pools, *rest = arguments()
    moved = [torch.cat((torch.zeros(offset), pool.flatten()))[offset:].view(pool.shape) for pool in pools]
    assert (moved[0].data_ptr() % 16 == 0) == (offset == 0)
    got = block_attention_rows.kernel(queries, moved, *rest, torch.zeros(3, 5), "max")
    assert torch.allclose(
        got, block_attention_rows.reference(queries, pools, *rest, torch.zeros(3, 5), "max"), atol=1e-6
    )


@pytest.mark.parametrize("run", [block_attention_rows.reference, block_attention_rows.kernel])
def test_refuses_what_does_not_fit(run):
    with pytest.raises(ValueError, match="reduction 'mean' is not one of max, sum"):
        run(*arguments(), torch.zeros(3, 5), "mean")
    with pytest.raises(ValueError, match="out is torch.float32"):
        run(*arguments(), torch.zeros(3, 6), "max")
    with pytest.raises(ValueError, match="block_size 200"):
        run(*arguments()[:7], 200, 0.1, torch.zeros(3, 5), "max")
    queries, pools, *rest = arguments()
    with pytest.raises(ValueError, match="3 query heads"):
        run(queries[:, :, :3], pools, *rest, torch.zeros(3, 5), "max")
    with pytest.raises(ValueError, match="queries of 2 layers for 1 key pools"):
        run(queries, pools[:1], *rest, torch.zeros(3, 5), "max")
    with pytest.raises(ValueError, match="pools: layer 1 is laid out as"):
        run(queries, [pools[0], pools[1].double()], *rest, torch.zeros(3, 5), "max")
