"""What a request may keep: its hints against the pool's largest budget."""

from __future__ import annotations

import pytest

from nexus_sglang.config import NexusConfig, TokenAmount
from nexus_sglang.eviction.request_plan import RequestPlan
from nexus_sglang.eviction.sequence import RunningSequence

CONFIG = NexusConfig("nexus")
FLOOR = CONFIG.private_floor(128)


@pytest.mark.parametrize(
    "asked, room, pinned", [(40, 900, 64), (64, 900, 64), (65, 900, 96), (5000, 227, 224), (5000, 40, 32)]
)
def test_a_pin_is_whole_blocks_and_leaves_the_private_floor(asked, room, pinned):
    """A pin that ends inside a block would lose that block when protection is clipped."""
    plan = RequestPlan.resolve(CONFIG, room + FLOOR, 300, budget=TokenAmount(128), pin=asked)
    assert plan.pinned == pinned
    assert ("kv_pin_tokens" in plan.clipped) == (pinned < asked)


def test_without_hints_the_server_decides():
    plan = RequestPlan.resolve(CONFIG, 5000, 2000)
    assert plan == RequestPlan(400)
    assert plan.evict


def test_a_budget_is_clipped_to_the_pool_and_gets_its_own_prefixes():
    plan = RequestPlan.resolve(CONFIG, 900, 2000, budget=TokenAmount(0.5))
    assert (plan.budget, plan.clipped, plan.own_budget) == (900, ("kv_budget",), 0.5)
    plan = RequestPlan.resolve(CONFIG, 5000, 2000, budget=TokenAmount(0.2))
    assert (plan.budget, plan.clipped, plan.own_budget) == (400, (), None)


def test_a_pin_longer_than_the_prompt_is_clipped_to_it():
    plan = RequestPlan.resolve(CONFIG, 5000, 300, pin=1000)
    assert (plan.pinned, plan.clipped) == (320, ("kv_pin_tokens",))
    assert RequestPlan.resolve(CONFIG, 5000, 300, pin=300).clipped == ()


def test_who_is_not_evicted_from_keeps_all_it_can_grow_to():
    plan = RequestPlan.resolve(CONFIG, 900, 2000, budget=TokenAmount(0.5), evict=False, trace=True)
    assert not plan.evict
    assert plan.own_budget is None
    assert plan.trace
    assert not plan.clipped
    assert RunningSequence("r", row=1, final=2500, plan=plan, token_ids=list).budget == 2500
