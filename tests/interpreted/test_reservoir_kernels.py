"""Draws and ranks bit for bit, priorities to the last places, and the same ranks from the same seed."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nexus_sglang.kernels import check_cases as cases
from nexus_sglang.kernels import reservoir

SEED = st.integers(0, 10_000)
BATCH = st.integers(1, 4)
BLOCKS = st.integers(1, 600)
LAW = st.sampled_from(reservoir.LAWS)


@settings(max_examples=8)
@given(seed=SEED, batch=BATCH, blocks=BLOCKS, count=st.integers(1, 5))
@example(seed=3, batch=1, blocks=4096, count=1)
def test_draws(**shape):
    outcome = cases.draws("cpu", **shape)
    assert outcome.ok, outcome


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**63 + 5, 2**64 - 1])
def test_draws_of_extreme_keys(seed):
    identity = torch.tensor([[0, 1, -1, 2**63 - 1, -(2**63), 2**32]])
    event = torch.tensor([2**32 - 1])
    assert torch.equal(
        reservoir.draw.kernel(seed, identity, event, 2), reservoir.draw.reference(seed, identity, event, 2)
    )


@settings(max_examples=10)
@given(seed=SEED, batch=BATCH, blocks=BLOCKS, law=LAW, count=st.integers(1, 5), beta=st.sampled_from((0.0, 1.0, 4.0)))
@example(seed=4, batch=1, blocks=4096, law="exponential-keys", count=5, beta=1.0)
def test_priorities(**shape):
    outcome = cases.priorities("cpu", **shape)
    assert outcome.ok, outcome


@settings(max_examples=8)
@given(seed=SEED, batch=BATCH, blocks=BLOCKS, levels=st.integers(1, 50))
@example(seed=5, batch=1, blocks=4096, levels=100)
def test_ranks(**shape):
    outcome = cases.ranks("cpu", **shape)
    assert outcome.ok, outcome


@pytest.mark.parametrize("law", reservoir.LAWS)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_ranks_the_same_blocks_first(law, seed):
    """Bit for bit, no exception for close priorities: on random weights none is that close."""
    g = torch.Generator().manual_seed(seed)
    weights, identity, events, lengths, candidates = cases.random_blocks(g, 3, 500)
    drawn = (weights, identity, events, lengths, 2**40 + seed, law, 5, 2.0)
    ranks = [
        reservoir.ranks.reference(reservoir.priorities.reference(*drawn), candidates, lengths),
        reservoir.ranks.kernel(reservoir.priorities.kernel(*drawn), candidates, lengths),
    ]
    assert torch.equal(*ranks)
    assert (
        (ranks[0] < 80).sum(dim=1) == (candidates & (torch.arange(500) < lengths[:, None])).sum(dim=1).clamp(max=80)
    ).all()


def test_a_request_draws_and_ranks_alike_alone_and_in_a_batch():
    g = torch.Generator().manual_seed(1)
    weights, identity, events, lengths, candidates = cases.random_blocks(g, 4, 300)
    keep = torch.tensor([20, 5, 0, 7])
    priority = reservoir.priorities.kernel(weights, identity, events, lengths, 9, "exponential-keys", 2)
    ranks = reservoir.ranks.kernel(priority, candidates, lengths)
    for b, n in enumerate(lengths.tolist()):
        one = [x[b : b + 1, :n] for x in (weights, identity)]
        alone = reservoir.priorities.kernel(*one, events[b : b + 1], lengths[b : b + 1], 9, "exponential-keys", 2)
        assert torch.equal(alone[0], priority[b, :n])
        rank = reservoir.ranks.kernel(alone, candidates[b : b + 1, :n], lengths[b : b + 1])
        assert torch.equal(rank[0] < keep[b], ranks[b, :n] < keep[b])


def test_no_underflow_at_many_blocks():
    n = 10_000
    weights = torch.full((1, n), 1.5 / n)
    length = torch.tensor([n])
    identity = torch.arange(n)[None]
    values = reservoir.priorities.kernel(weights, identity, torch.tensor([1]), length, 3, "exponential-keys", 1)
    assert bool(values.isfinite().all()) and len(values.unique()) == n


@pytest.mark.parametrize("run", [reservoir.priorities.reference, reservoir.priorities.kernel])
def test_an_unknown_law_is_refused(run):
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="law 'top-k' is not one of exponential-keys, sequential-poisson"):
        run(one, one.long(), torch.ones(1).long(), torch.ones(1).long(), 0, "top-k")
