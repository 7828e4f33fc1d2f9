"""Which blocks go, against the rule in plain Python: lowest first, of equals the older, until enough are gone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus_sglang.errors import PolicyError
from nexus_sglang.eviction.choice import choose, forced_blocks
from nexus_sglang.policy import Policy, Weighing
from nexus_sglang.policy.base import Blocks, Evidence

SIZE = 4
PRIORITIES = st.sampled_from([0.0, 1.0, 2.0, -1.0, math.inf, -math.inf, math.nan])


class Given(Policy):
    """Ranks blocks by numbers it was given."""

    name = "given"
    source = "test"
    needs_attention = False
    numbers: list[float]
    asked: int

    @classmethod
    def of(cls, numbers: list[float]) -> Given:
        policy = cls()
        object.__setattr__(policy, "numbers", numbers)  # policies are frozen
        return policy

    def weigh(self, evidence, blocks):
        return Weighing(torch.tensor(self.numbers, dtype=torch.float64))

    def prioritise(self, weights, blocks, keep):
        object.__setattr__(self, "asked", keep)
        return weights


def blocks_with(forced: list[bool]) -> Blocks:
    index = torch.arange(len(forced))
    return Blocks(index, torch.tensor(forced), index, torch.empty(len(forced), 0), 100, 0)


def void(numbers: list[float], forced: list[bool]) -> bool:
    """Whether a candidate is NaN. What is said of forced blocks does not matter."""
    return any(math.isnan(x) and not held for x, held in zip(numbers, forced, strict=True))


def in_order(numbers: list[float], forced: list[bool]) -> list[int]:
    """Candidates, the first to go first: the oldest where the numbers are void."""
    value = [0.0] * len(numbers) if void(numbers, forced) else numbers
    return sorted((i for i, held in enumerate(forced) if not held), key=lambda i: (value[i], i))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_lowest_go_until_enough(data):
    n = data.draw(st.integers(1, 12))
    numbers = data.draw(st.lists(PRIORITIES, min_size=n, max_size=n))
    forced = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    tokens = data.draw(st.none() | st.lists(st.integers(1, SIZE), min_size=n, max_size=n))
    excess = data.draw(st.integers(-2, n * SIZE + 3))
    order = in_order(numbers, forced)
    gone = []
    while len(gone) < len(order) and sum((tokens or [SIZE] * n)[i] for i in gone) < excess:
        gone.append(order[len(gone)])
    policy = Given.of(numbers)
    choice = choose(policy, Evidence(), blocks_with(forced), len(order), excess, SIZE, tokens)
    assert choice.ordinals.tolist() == sorted(gone)
    assert choice.on_host == (None if tokens is None else sorted(gone))
    assert bool(choice.by_recency) == void(numbers, forced)
    assert policy.asked == len(order) - min(len(order), max(0, math.ceil(excess / SIZE)))


class Answers(Policy):
    """Answers what it was given, as weights, priorities and state."""

    name = "answers"
    source = "test"
    needs_attention = False
    state_width = 2
    answers: tuple

    @classmethod
    def of(cls, *answers: object) -> Answers:
        policy = cls()
        object.__setattr__(policy, "answers", answers)
        return policy

    def weigh(self, evidence, blocks):
        return Weighing(self.answers[0], self.answers[2])

    def prioritise(self, weights, blocks, keep):
        return self.answers[1]


THREE = torch.ones(3)


@pytest.mark.parametrize(
    "answers, message",
    [
        ((torch.ones(2), THREE, None), r"'answers' returned weights of shape \(2,\), for 3 blocks"),
        ((THREE, torch.ones(3, 1), None), r"priorities of shape \(3, 1\), for 3 blocks: \(3,\) is asked for"),
        ((THREE, THREE, torch.ones(3, 1)), r"state of shape \(3, 1\), for 3 blocks: \(3, 2\) is asked for"),
        (([1.0, 1.0, 1.0], THREE, None), "weights that are no tensor but list"),
        ((THREE, None, None), "priorities that are no tensor but NoneType"),
        ((THREE, THREE.to("meta"), None), "priorities on meta, for blocks on cpu"),
        ((THREE,), "'answers' failed: IndexError"),
    ],
)
def test_what_does_not_fit_is_named(answers, message):
    with pytest.raises(PolicyError, match=message):
        choose(Answers.of(*answers), Evidence(), blocks_with([False] * 3), 3, 4, SIZE)


def test_nan_in_the_priorities_alone_counts_too():
    choice = choose(Answers.of(THREE, THREE * math.nan, None), Evidence(), blocks_with([False] * 3), 3, 4, SIZE)
    assert choice.by_recency and choice.ordinals.tolist() == [0]


def test_memory_that_runs_out_is_not_the_policys_fault(monkeypatch):
    def weigh(self, evidence, blocks):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Answers, "weigh", weigh)
    with pytest.raises(torch.OutOfMemoryError):
        choose(Answers.of(), Evidence(), blocks_with([False] * 3), 3, 4, SIZE)


def test_forced_blocks_begin_before_the_head_ends_or_end_in_the_recent_window():
    index = torch.tensor([0, 1, 2, 4, 6, 7])
    assert forced_blocks(index, SIZE, 5, 27).tolist() == [True, True, False, False, True, True]
    assert forced_blocks(index, SIZE, 4, 28).tolist() == [True, False, False, False, False, True]
