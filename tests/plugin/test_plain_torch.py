"""Attention and block attention against naive float64 formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus_sglang.kernels.head_attention import block_attention
from nexus_sglang.sglang_plugin.attention.plain_torch import decode, extend


def naive(q, k, v, key_positions, query_positions, scale):
    """``[W, Hq, D]``, one head and one query at a time."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    probs = torch.zeros(q.shape[0], q.shape[1], k.shape[0], dtype=torch.float64)
    for w in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = k[:, h // group].double() @ q[w, h].double() * scale
            scores[key_positions > query_positions[w]] = -torch.inf
            probs[w, h] = torch.softmax(scores, 0)
            out[w, h] = probs[w, h] @ v[:, h // group].double()
    return out, probs


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8]),
    before=st.integers(0, 40),
    new=st.integers(1, 12),
    seed=st.integers(0, 2**20),
)
def test_extend_and_decode(heads, group, before, new, seed):
    g = torch.Generator().manual_seed(seed)
    pool_k, pool_v = (torch.randn(100, heads, 16, generator=g) for _ in range(2))
    slots = [torch.randperm(99, generator=g)[: before + new] + 1, torch.randperm(99, generator=g)[:new] + 1]
    q = torch.randn(2 * new, heads * group, 16, generator=g)
    out = extend(q, pool_k, pool_v, slots, [new, new], 0.3)
    for i, ids in enumerate(slots):
        positions = torch.arange(len(ids))
        part = q[i * new : (i + 1) * new]
        want, _ = naive(part, pool_k[ids], pool_v[ids], positions, positions[len(ids) - new :], 0.3)
        torch.testing.assert_close(out[i * new : (i + 1) * new].double(), want, atol=1e-5, rtol=1e-4)
    last = torch.stack([q[new - 1], q[2 * new - 1]])
    one = decode(last, pool_k, pool_v, slots, 0.3)
    torch.testing.assert_close(one, torch.stack([out[new - 1], out[2 * new - 1]]), atol=1e-5, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 2),
    group=st.sampled_from([1, 3]),
    blocks=st.integers(1, 6),
    size=st.sampled_from([1, 4, 8]),
    window=st.integers(1, 5),
    seed=st.integers(0, 2**20),
)
def test_block_attention_with_holes(heads, group, blocks, size, window, seed):
    g = torch.Generator().manual_seed(seed)
    n = blocks * size
    resident = torch.rand(n, generator=g) < 0.7
    resident[-1] = True
    positions = torch.nonzero(resident).squeeze(1)
    index, ordinal = torch.unique_consecutive(positions // size, return_inverse=True)
    k = torch.randn(len(positions), heads, 8, generator=g)
    queries = positions[-window:]
    q = torch.randn(len(queries), heads * group, 8, generator=g)
    got = block_attention(q, k, queries, positions, ordinal * size + positions % size, len(index), size, 0.5)
    _, probs = naive(q, k, k, positions, queries, 0.5)
    want = torch.zeros(len(queries), heads * group, len(index), dtype=torch.float64)
    want.index_add_(2, ordinal, probs)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got.sum(-1), torch.ones(len(queries), heads * group))


def test_averaging_heads_first_is_another_thing():
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 8, generator=g)
    k = torch.randn(16, 2, 8, generator=g)
    positions = torch.arange(16)
    cells = torch.arange(16)
    args = (torch.tensor([14, 15]), positions, cells, 4, 4, 0.5)
    averaged = block_attention(*(x.mean(dim=1, keepdim=True) for x in (q, k)), *args)
    assert averaged.shape == (2, 1, 4)
    per_head = block_attention(q, k, *args)
    assert not torch.allclose(averaged[:, 0], per_head.mean(1), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_near(dtype):
    g = torch.Generator().manual_seed(1)
    k, v, q = (torch.randn(64, 2, 16, generator=g) for _ in range(3))
    q = q.repeat(1, 3, 1)[:5]
    slots = [torch.arange(30)]
    exact = extend(q, k, v, slots, [5], 0.25)
    low = extend(q.to(dtype), k.to(dtype), v.to(dtype), slots, [5], 0.25)
    assert low.dtype == dtype
    torch.testing.assert_close(low.float(), exact, atol=0.03, rtol=0.03)
