"""The offline evaluation: tasks, choosing, references, grading, report. No model is loaded."""

import math

import pytest
import torch

from benchmarks.offline.choosing import describe_blocks, keep_tokens
from benchmarks.offline.experiment import grade
from benchmarks.offline.references import ada_rooms, pyramid_rooms
from benchmarks.offline.tables import (
    difference,
    ranking,
    tables,
)
from benchmarks.offline.wilson import wilson
from nexus_sglang.config import NexusConfig, TokenAmount
from nexus_sglang.evaluation.recall import RECALL_TASKS
from nexus_sglang.evidence.measure import expected_attention, measure
from nexus_sglang.evidence.query_window import LayerShape, QueryWindow
from nexus_sglang.kernels.distinctiveness import token_distinctiveness
from nexus_sglang.kv_slots.kv_buffers import KVBuffers
from nexus_sglang.kv_slots.resident_row import ResidentRow
from nexus_sglang.policy import Evidence, make_policy
from nexus_sglang.policy.base import Policy

PINNED = ("Once the shops had closed, a quiet tailor walked slowly alon", [" 46465", " 57599", " 97396"])


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("task", sorted(RECALL_TASKS))
def test_tasks_are_fixed_by_their_seed_and_hold_their_answers(task):
    sample = RECALL_TASKS[task](7, 800, words)
    assert sample == RECALL_TASKS[task](7, 800, words) != RECALL_TASKS[task](8, 800, words)
    assert 790 < words(sample.passage) < 830
    for question in sample.questions:
        assert question.answer.strip() in sample.passage
        place = sample.passage.index(question.answer.strip()) / len(sample.passage)
        assert 0.03 < place < 0.97


def test_a_passage_is_pinned():
    """Another text under the same seed would make results.json stale."""
    sample = RECALL_TASKS["multi-key"](100_000, 60, words)
    assert (sample.passage[:60], [q.answer for q in sample.questions]) == PINNED


@pytest.mark.parametrize("recent", [64, 0.25, 0])
@pytest.mark.parametrize("length, share", [(2050, 0.2), (2048, 0.5), (300, 0.1)])
def test_forced_blocks_and_budget_are_the_evictors(recent, length, share):
    config = NexusConfig("random", TokenAmount(share), recent_tokens=TokenAmount(recent))
    budget = config.budget_tokens(length)
    n = math.ceil(length / 32)
    blocks = describe_blocks(length, torch.arange(n), config, budget, 0)
    newest = length - config.recent_length(budget)
    assert [int(i) for i in blocks.index[blocks.forced]] == [i for i in range(n) if i == 0 or (i + 1) * 32 > newest]
    kept = keep_tokens(make_policy("random", {}), Evidence(), blocks, config, budget)
    assert budget - 32 < len(kept) <= budget and blocks.forced.sum() * 32 <= len(kept) + 31
    assert set(range(32)) <= set(kept.tolist()) and int(kept[-1]) == length - 1


def test_grade():
    logits = torch.tensor([[9.0, 0, 0], [0, 0, 9.0]])
    assert grade(logits, [0, 2])[0] and not grade(logits, [0, 1])[0]
    assert grade(torch.zeros(2, 3), [1, 2])[1] == pytest.approx(-math.log(3))


def test_pyramid_rooms_fall_and_keep_the_mean():
    rooms = pyramid_rooms(200, 30, 2000)
    assert rooms == sorted(rooms, reverse=True) and rooms[-1] == 10 and abs(sum(rooms) / 30 - 200) < 0.5
    flat = pyramid_rooms(1500, 30, 2000)
    assert flat[0] == 2000 and abs(sum(flat) / 30 - 1500) < 0.5


def test_ada_rooms_follow_need_and_keep_a_floor():
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0], [0.01] * 10])
    assert ada_rooms(scores, 5) == [8, 2]  # 9 and 1 of the joint top ten, softened by a fifth


def test_wilson():
    assert wilson(0, 40) == pytest.approx((0, 0.0876), abs=1e-3)
    assert wilson(20, 40) == pytest.approx((0.352, 0.648), abs=1e-3)


def record(seed, exact, task="needle"):
    cells = {"0.1": {label: [right, -1.0 + right, 0.1] for label, right in exact.items()}}
    return {"task": task, "seed": seed, "tokens": 2000, "full": [1, -0.1, 1.0], "visible": cells, "hidden": cells}


def test_tables_rank_pair_and_do_not_depend_on_the_order_of_records():
    records = [record(s, {"nexus": 1, "snapkv": int(s < 5), "random": 0}) for s in range(20)]
    assert ranking(records, "visible") == [("nexus", 1.0), ("snapkv", 0.25), ("random", 0.0)]
    mean, half = difference(records, "hidden", "nexus", "snapkv")
    assert mean == 0.75 and half == pytest.approx(1.96 * math.sqrt(0.75 * 0.25 / 19), abs=1e-3)
    assert tables(list(reversed(records))) == tables(records)
    assert "| **nexus** | 1.00 (0.84-1.00) 0.00 |" in tables(records)


def test_expected_attention_and_distinctiveness_against_loops():
    g = torch.Generator().manual_seed(0)
    q = torch.randn(4, 4, 8, generator=g)
    k = torch.randn(6, 2, 8, generator=g)
    v = torch.randn(6, 2, 8, generator=g)
    ordinal = torch.tensor([0, 0, 1, 1, 1, 2])
    out = expected_attention(q, k, v, torch.bincount(ordinal, minlength=3), 0.3)
    assert out.shape == (1, 4, 3)
    for head in range(4):
        mu = q[:, head].mean(dim=0)
        spread = torch.cov(q[:, head].T, correction=0)
        keys = k[:, head // 2]
        logits = 0.3 * keys @ mu + 0.09 * ((keys @ spread) * keys).sum(dim=1) / 2
        worth = torch.softmax(logits, dim=0) * v[:, head // 2].norm(dim=1)
        expected = torch.stack([worth[ordinal == b].sum() for b in range(3)])
        assert torch.allclose(out[0, head], expected, rtol=1e-4)
    same = torch.ones(5, 2, 8)
    assert torch.allclose(token_distinctiveness(same), torch.zeros(5), atol=1e-6)
    same[3] = -1
    assert token_distinctiveness(same).argmax() == 3


class Asks(Policy):
    name = "asks"
    source = "test"
    head_reduction = "max"
    needs_values = needs_keys = needs_expected = needs_distinct_values = True

    def weigh(self, evidence, blocks):
        raise NotImplementedError


def test_measure_gives_everything_that_is_asked_for():
    g = torch.Generator().manual_seed(1)
    window = QueryWindow({0: LayerShape(4, 8, 0.3), 1: LayerShape(4, 8, 0.3)}, 1, 4, torch.float32, "cpu")
    for ring in window.rings.values():
        ring.copy_(torch.randn(ring.shape, generator=g))
    pools = {layer: torch.randn(70, 2, 8, generator=g) for layer in (0, 1)}
    slots = torch.arange(70).flip(0)
    positions = torch.arange(70)
    row = ResidentRow.of(0, 70, 0, 32, 3, positions, slots, positions)
    out = measure(Asks(), window, KVBuffers(pools.__getitem__, pools.__getitem__), row)
    assert out.attention.shape == (4, 3)
    for term in (out.value_norm, out.key_distinctiveness, out.expected, out.value_distinctiveness):
        assert term.shape == (3,) and torch.isfinite(term).all()
    assert torch.allclose(out.key_distinctiveness, out.value_distinctiveness)  # keys and values are one pool here
