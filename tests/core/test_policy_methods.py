"""The named policies on evidence made by hand, and what all of them share."""

import dataclasses
import math

import pytest
import torch

from nexus_sglang.policy import POLICIES, Evidence, make_policy
from nexus_sglang.policy.parts.draws import uniforms
from tests.support.evidence import blocks_of, evidence_of, top


def judge(name, evidence, blocks, fields=None):
    return make_policy(name, fields or {}).weigh(evidence, blocks)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_is_pure_and_finite(name):
    policy = POLICIES[name]()
    evidence = evidence_of(40)
    for state in (None, torch.rand(40, policy.state_width)):
        blocks = blocks_of(40, (0, 38, 39), state, width=policy.state_width)
        first = policy.weigh(evidence, blocks)
        second = policy.weigh(evidence, blocks)
        assert torch.equal(first.weights, second.weights) and first.weights.shape == (40,)
        assert torch.isfinite(first.weights).all() and (first.weights >= 0).all()
        if policy.state_width:
            assert first.state.shape == (40, policy.state_width) and not first.state.isnan().any()
        for keep in (0, 5, 37):
            priority = policy.prioritise(first.weights, blocks, keep)
            assert priority.shape == (40,) and priority.dtype == torch.float64 and not priority.isnan().any()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_hundred_thousand_blocks(name):
    policy = POLICIES[name]()
    n = 100_000
    blocks = blocks_of(n, (0, n - 1), width=policy.state_width)
    weights = policy.weigh(evidence_of(n), blocks).weights
    priority = policy.prioritise(weights, blocks, n // 5)
    assert not priority.isnan().any() and not torch.isinf(priority[1:-1]).logical_and(priority[1:-1] < 0).any()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_say_where_they_come_from_and_refuse_nonsense(name):
    cls = POLICIES[name]
    assert cls.name == name and "\n" not in cls.source and (("arXiv" in cls.source) or name in ("random", "composed"))
    assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
    for field in dataclasses.fields(cls):
        with pytest.raises(ValueError, match=field.name):
            cls(**{field.name: "nonsense"})


def test_streaming_llm_keeps_the_newest():
    blocks = blocks_of(10, (0,))
    assert top(judge("streaming-llm", Evidence(), blocks).weights, 3, blocks) == [7, 8, 9]


def test_h2o_sums_from_event_to_event():
    rows = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]])
    state = torch.tensor([[math.nan], [3.0], [0.5]])
    out = judge("h2o", Evidence(rows), blocks_of(3, state=state))
    assert out.weights.tolist() == [1.0, 3.75, 0.75] and torch.equal(out.state[:, 0], out.weights)


def test_tova_looks_at_the_last_query_and_snapkv_at_the_mean():
    rows = torch.tensor([[0.9, 0.0, 0.1], [0.0, 0.3, 0.7]])
    assert judge("tova", Evidence(rows), blocks_of(3)).weights.tolist() == pytest.approx([0.0, 0.3, 0.7])
    assert judge("snapkv", Evidence(rows), blocks_of(3)).weights.tolist() == pytest.approx([0.45, 0.15, 0.4])


def test_morphkv_normalises_outside_the_forced_set():
    evidence = Evidence(torch.tensor([[0.8, 0.1, 0.1], [0.9, 0.02, 0.08]]))
    blocks = blocks_of(3, (0,))
    assert judge("morphkv", evidence, blocks).weights.tolist() == pytest.approx([0, 0.5, 0.8])
    assert judge("morphkv", evidence, blocks, {"fusion": "sum"}).weights.tolist() == pytest.approx([0, 0.7, 1.3])


def test_keyformer_adds_noise_that_depends_on_the_block_and_raises_tau():
    evidence = evidence_of(6, w=4)
    out = judge("keyformer", evidence, blocks_of(6, width=2))
    u = uniforms(3, torch.arange(6) * 7919 + 1, 640, 4)
    expected = torch.softmax(evidence.attention.double().log() - (-u.log()).log(), dim=1).sum(dim=0)
    assert torch.allclose(out.weights, expected) and out.state[:, 1].tolist() == [1] * 6
    # At the end of the ramp the temperature is 2, which flattens.
    late = torch.stack((torch.zeros(6), torch.full((6,), 64.0)), dim=1)
    flat = judge("keyformer", evidence, blocks_of(6, state=late)).weights
    assert flat.max() - flat.min() < out.weights.max() - out.weights.min()


def test_vase_reserves_a_quarter_for_large_values():
    n = 400
    keep = 40
    evidence = evidence_of(n, w=1)
    blocks = blocks_of(n, (0, 1))
    kept = set(top(judge("vase", evidence, blocks).weights, keep, blocks))
    values = evidence.value_norm.masked_fill(blocks.forced, 0)
    assert set(values.topk(keep // 4).indices.tolist()) <= kept
    rest = [j for j in kept if j not in set(values.topk(keep).indices.tolist())]
    attention = evidence.attention.mean(dim=0)
    assert len(rest) > keep // 2 and attention[rest].mean() > 2 * attention.mean()
    assert set(top(judge("vase", evidence, blocks._replace(seed=4)).weights, keep, blocks)) != kept


def test_keydiff_and_expected_attention_follow_their_evidence():
    evidence = evidence_of(20)
    blocks = blocks_of(20)
    assert torch.allclose(judge("keydiff", evidence, blocks).weights, evidence.key_distinctiveness.double())
    assert torch.allclose(judge("expected-attention", evidence, blocks).weights, evidence.expected.double())


def test_defensive_takes_the_worst_case_times_the_value():
    rows = torch.tensor([[0.0, 0.6, 0.4, 0.0], [0.0, 0.0, 0.9, 0.1]])
    evidence = Evidence(rows, value_norm=torch.tensor([1.0, 1.0, 1.0, 5.0]))
    # Row maxima .6 .9 .1 have the mean .533, which lifts the last; the mean value norm is 2.
    expected = [0.6 / 2, 0.9 / 2, (1.6 / 3) * 5 / 2]
    assert judge("defensive", evidence, blocks_of(4, (0,))).weights[1:].tolist() == pytest.approx(expected)
    assert POLICIES["defensive"].head_reduction == "max"


def test_random_is_uniform_and_new_at_each_event():
    a, b = (judge("random", Evidence(), blocks_of(50, event=e)).weights for e in (64, 96))
    assert not torch.equal(a, b) and 0.3 < a.mean() < 0.7


def test_composed_equals_the_named_policies():
    evidence = evidence_of(40)
    blocks = blocks_of(40, (0, 39), width=1)

    def order(name, fields=None):
        return judge(name, evidence, blocks, fields).weights[1:-1].argsort().tolist()

    assert order("composed", {"window": "max-floor", "term": "value"}) == order("defensive")
    assert order("composed", {"window": "max"}) == order("morphkv")
    nexus = {"value_share": 0, "recency_eps": 0}
    assert order("composed", {"walk_weight": 0.5}) == order("nexus", nexus)
    decayed = judge("composed", evidence, blocks._replace(state=torch.full((40, 1), 9.0)), {"window": "decaying-max"})
    assert decayed.weights.tolist() == pytest.approx([8.1] * 40)
    asks = make_policy("composed", {"term": "key"})
    assert asks.needs_keys and not asks.needs_values
