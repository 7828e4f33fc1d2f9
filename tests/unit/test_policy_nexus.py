"""The default policy: its parts, each alone, and the shares of the room they get."""

import math

import pytest
import torch
from test_policy_methods import blocks_of, evidence_of, top

from nexus_sglang.policy import make_policy
from nexus_sglang.policy.reductions import flatness, reduce_window
from nexus_sglang.policy.walk import normalise_rows, recency, walk


def test_named_parts():
    policy = make_policy("nexus", {})
    for part in ("walk_steps", "walk_weight", "sampled_share", "sharpness", "value_tilt"):
        assert hasattr(policy, part)


def test_attention_part_is_window_mean_plus_walk_on_the_candidates():
    evidence, blocks = evidence_of(30), blocks_of(30, (0, 29))
    rows = normalise_rows(evidence.attention, blocks.candidates)
    expected = rows.mean(dim=0) + 0.5 * walk(rows, 3) + recency(blocks.index, 1e-6)
    assert torch.equal(make_policy("nexus", {"value_tilt": 0}).weigh(evidence, blocks).weights, expected)
    # A sink that takes nearly all attention changes nothing.
    heavy = evidence.attention.clone()
    heavy[:, 0] = 100
    again = make_policy("nexus", {"value_tilt": 0}).weigh(evidence._replace(attention=heavy), blocks).weights
    assert torch.allclose(again, expected)


def test_without_walk_and_draws_it_is_top_k_of_the_window_mean():
    evidence, blocks = evidence_of(30), blocks_of(30, (0, 29))
    plain = make_policy("nexus", {"value_tilt": 0, "walk_weight": 0, "sampled_share": 0, "recency_eps": 0})
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


@pytest.mark.parametrize("tilt", [0.5, 1.0])
def test_tilt_multiplies_by_the_standardised_value_direction(tilt):
    evidence, blocks = evidence_of(300), blocks_of(300, (0, 298, 299))
    plain = make_policy("nexus", {"value_tilt": 0}).weigh(evidence, blocks).weights
    policy = make_policy("nexus", {"value_tilt": tilt})
    tilted = policy.weigh(evidence, blocks).weights
    free = evidence.value_distinctiveness.double()[blocks.candidates]
    z = (free - free.mean()) / free.std(correction=0)
    flat = float(flatness(plain, blocks.candidates))
    assert 0.5 < flat < 1
    assert torch.allclose((tilted / plain)[blocks.candidates], torch.exp(tilt * flat**4 * z))
    assert policy.needs_distinct_values and not make_policy("nexus", {"value_tilt": 0}).needs_distinct_values
    # What forced blocks hold changes nothing, and values that are all alike tilt nothing.
    other = evidence.value_distinctiveness.clone()
    other[blocks.forced] = 50
    again = policy.weigh(evidence._replace(value_distinctiveness=other), blocks).weights
    assert torch.allclose(again[blocks.candidates], tilted[blocks.candidates])
    alike = policy.weigh(evidence._replace(value_distinctiveness=torch.ones(300)), blocks).weights
    assert torch.allclose(alike, plain)


def test_sampled_share_is_drawn_and_the_core_is_certain():
    evidence, blocks, keep = evidence_of(300), blocks_of(300, (0, 298, 299)), 40
    policy = make_policy("nexus", {"sampled_share": 0.25, "sharpness": 1.0})
    weights = policy.weigh(evidence, blocks).weights
    core, seen = set(top(weights, 30, blocks)), set()
    for event in range(20):
        priority = policy.prioritise(weights, blocks._replace(event=event), keep)
        kept = set(top(priority, keep, blocks))
        assert core <= kept and int((priority == math.inf).sum()) == 30
        seen |= kept - core
    assert len(seen) > 40
