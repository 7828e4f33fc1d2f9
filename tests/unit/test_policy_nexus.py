"""The default policy: its parts, each alone, and the shares of the room they get."""

import math

import pytest
import torch
from test_policy_methods import blocks_of, evidence_of, top

from nexus_sglang.policy import make_policy
from nexus_sglang.policy.reductions import reduce_window
from nexus_sglang.policy.walk import normalise_rows, recency, walk


def test_named_parts():
    policy = make_policy("nexus", {})
    for part in ("walk_steps", "walk_weight", "sampled_share", "sharpness", "distinct_share"):
        assert hasattr(policy, part)


def test_attention_part_is_window_mean_plus_walk_on_the_candidates():
    evidence, blocks = evidence_of(30), blocks_of(30, (0, 29))
    rows = normalise_rows(evidence.attention, blocks.candidates)
    expected = rows.mean(dim=0) + 0.5 * walk(rows, 3) + recency(blocks.index, 1e-6)
    assert torch.equal(make_policy("nexus", {"distinct_share": 0}).weigh(evidence, blocks).weights, expected)
    # A sink that takes nearly all attention changes nothing.
    heavy = evidence.attention.clone()
    heavy[:, 0] = 100
    again = make_policy("nexus", {"distinct_share": 0}).weigh(evidence._replace(attention=heavy), blocks).weights
    assert torch.allclose(again, expected)


def test_without_walk_and_draws_it_is_top_k_of_the_window_mean():
    evidence, blocks = evidence_of(30), blocks_of(30, (0, 29))
    plain = make_policy("nexus", {"distinct_share": 0, "walk_weight": 0, "sampled_share": 0, "recency_eps": 0})
    weights = plain.weigh(evidence, blocks).weights
    mean = reduce_window(normalise_rows(evidence.attention, blocks.candidates), "mean", blocks.candidates)
    assert torch.equal(weights, mean)
    assert top(plain.prioritise(weights, blocks, 8), 8, blocks) == top(mean, 8, blocks)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_distinct_share_of_the_room_goes_to_unusual_values(share):
    evidence, blocks, keep = evidence_of(300), blocks_of(300, (0, 298, 299)), 40
    policy = make_policy("nexus", {"distinct_share": share, "sampled_share": 0})
    priority = policy.prioritise(policy.weigh(evidence, blocks).weights, blocks, keep)
    kept = set(top(priority, keep, blocks))
    assert set(top(evidence.value_distinctiveness, round(share * keep), blocks)) <= kept
    attention = make_policy("nexus", {"distinct_share": 0}).weigh(evidence, blocks).weights
    assert set(top(attention, round((1 - share) * keep), blocks)) <= kept
    assert policy.needs_distinct_values and not make_policy("nexus", {"distinct_share": 0}).needs_distinct_values


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
