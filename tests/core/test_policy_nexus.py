"""The default policy: its parts, each alone, and the shares of the room they get."""

import math

import pytest
import torch

from nexus_sglang.policy import make_policy
from nexus_sglang.policy.parts.reductions import flatness, reduce_window
from nexus_sglang.policy.parts.walk import normalise_rows
from tests.support import oracles_policy
from tests.support.evidence import blocks_of, evidence_of, top


def test_named_parts():
    policy = make_policy("nexus", {})
    for part in ("walk_steps", "walk_weight", "sampled_share", "sharpness", "value_share"):
        assert hasattr(policy, part)


def test_attention_part_is_window_mean_plus_walk_on_the_candidates():
    evidence = evidence_of(30)
    blocks = blocks_of(30, (0, 29))
    expected = oracles_policy.window_weights(evidence.attention, blocks.candidates, 3, 0.5, 1e-6)
    assert torch.equal(make_policy("nexus", {"value_share": 0}).weigh(evidence, blocks).weights, expected)
    # A sink that takes nearly all attention changes nothing.
    heavy = evidence.attention.clone()
    heavy[:, 0] = 100
    again = make_policy("nexus", {"value_share": 0}).weigh(evidence._replace(attention=heavy), blocks).weights
    assert torch.allclose(again, expected)


def test_without_walk_and_draws_it_is_top_k_of_the_window_mean():
    evidence = evidence_of(30)
    blocks = blocks_of(30, (0, 29))
    plain = make_policy("nexus", {"value_share": 0, "walk_weight": 0, "sampled_share": 0, "recency_eps": 0})
    weights = plain.weigh(evidence, blocks).weights
    mean = reduce_window(normalise_rows(evidence.attention, blocks.candidates), "mean", blocks.candidates)
    assert torch.equal(weights, mean)
    assert top(plain.prioritise(weights, blocks, 8), 8, blocks) == top(mean, 8, blocks)


def test_flatness():
    everywhere = torch.ones(6, dtype=torch.bool)
    assert float(flatness(torch.full((6,), 0.3), everywhere)) == pytest.approx(1)
    assert float(flatness(torch.tensor([0.0, 0, 0, 7, 0, 0]), everywhere)) == 0
    half = flatness(torch.tensor([1.0, 1, 0, 0, 99, 99]), torch.tensor([True] * 4 + [False] * 2))
    assert float(half) == pytest.approx(0.5)


def with_flatness(target: float, n: int = 302):
    """Evidence over ``n`` blocks, ends forced, whose attention part has about this flatness."""
    blocks = blocks_of(n, (0, n - 1))
    noise = torch.rand(n, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    low = 0.0
    high = 60.0
    for _ in range(60):
        power = (low + high) / 2
        attention = (noise**power).expand(4, n)
        weights = (
            make_policy("nexus", {"value_share": 0}).weigh(evidence_of(n)._replace(attention=attention), blocks).weights
        )
        low, high = (power, high) if float(flatness(weights, blocks.candidates)) > target else (low, power)
    return evidence_of(n)._replace(attention=attention), blocks, weights


@pytest.mark.parametrize(
    "flat, share", [(0.99, 0.6), (0.951, 0.6), (0.925, 0.3), (0.91, 0.12), (0.899, 0.0), (0.5, 0.0)]
)
def test_values_get_their_share_of_the_room_as_far_as_attention_is_flat(flat, share):
    evidence, blocks, attention = with_flatness(flat)
    policy = make_policy("nexus", {"sampled_share": 0})
    kept = set(top(policy.weigh(evidence, blocks).weights, 100, blocks))
    values = evidence.value_distinctiveness
    # Each order has its best in, as many as its share gives; blocks that are in both make room for a few more.
    assert set(top(values, round(100 * share) - 2, blocks)) <= kept if share else True
    assert set(top(attention, round(100 * (1 - share)) - 2, blocks)) <= kept
    assert len(set(top(values, 100, blocks)) & kept) < 100 * share + 60
    if share == 0:
        assert kept == set(top(attention, 100, blocks))


def test_what_forced_blocks_hold_takes_no_place():
    evidence, blocks, _ = with_flatness(0.97)
    policy = make_policy("nexus", {})
    other = evidence.value_distinctiveness.clone()
    other[blocks.forced] = 50
    weights, again = (
        policy.weigh(e, blocks).weights for e in (evidence, evidence._replace(value_distinctiveness=other))
    )
    assert torch.equal(weights[blocks.candidates], again[blocks.candidates])
    assert policy.needs_distinct_values and not make_policy("nexus", {"value_share": 0}).needs_distinct_values


def test_sampled_share_is_drawn_and_the_core_is_certain():
    evidence = evidence_of(300)
    blocks = blocks_of(300, (0, 298, 299))
    keep = 40
    policy = make_policy("nexus", {"sampled_share": 0.25, "sharpness": 1.0})
    weights = policy.weigh(evidence, blocks).weights
    core = set(top(weights, 30, blocks))
    seen = set()
    for event in range(20):
        priority = policy.prioritise(weights, blocks._replace(event=event), keep)
        kept = set(top(priority, keep, blocks))
        assert core <= kept and int((priority == math.inf).sum()) == 30
        seen |= kept - core
    assert len(seen) > 40
