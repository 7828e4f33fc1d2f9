"""Policies on a real server: a stranger's own file, and (slow) every registered one through shares and retractions."""

from __future__ import annotations

import os

import pytest

from nexus_sglang.policy import POLICIES
from tests.support.server import STRICT, Server, healthy, nexus_of, output_ids, text_ids

pytestmark = pytest.mark.server
POOL = ("--max-total-tokens", "4096", "--chunked-prefill-size", "512", "--max-running-requests", "4")

STRANGER = '''
"""Keep the blocks that most heads looked at lately, with a memory of how often."""

from dataclasses import dataclass

import torch

from nexus_sglang.policy.base import Blocks, Evidence, Policy, Weighing


@dataclass(frozen=True)
class Popular(Policy):
    """Running sum of window attention, forgetting by ``decay`` per event."""

    name = "popular"
    source = "a file outside the package"
    head_reduction = "mean"
    state_width = 1

    decay: float = 0.5

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        past = torch.nan_to_num(blocks.state[:, 0])
        score = evidence.attention.mean(dim=0) + self.decay * past
        return Weighing(score, score[:, None])
'''


FAILING = '''
"""NaN after the third event, an exception after the fifth."""

import torch

from nexus_sglang.policy import Policy, Weighing

EVENTS = []


class Failing(Policy):
    name = "failing"
    source = "a file outside the package"

    def weigh(self, evidence, blocks):
        weights = evidence.attention.sum(0)
        if blocks.event < 1000:  # the trial at start pretends to be longer
            EVENTS.append(blocks.event)
        if len(EVENTS) > 5:
            raise ValueError("enough")
        return Weighing(weights * torch.nan if len(EVENTS) > 3 else weights)
'''


def play(server: Server, tokenizer, block: int = 32) -> None:
    """A long answer, a shared prefix that splits it, and the first conversation again."""
    prompt = text_ids(tokenizer, 900, seed=400)
    first = server.generate(prompt, 70, custom={"kv_trace": True})
    held = nexus_of(first)
    assert held["events"] >= 2 and held["resident"] <= held["budget"] + block
    assert all(0 not in event["blocks"] for event in held["trace"])
    branch = server.generate(prompt[:500] + [77] + text_ids(tokenizer, 300, seed=401), 40)
    assert branch["meta_info"]["cached_tokens"] == 500
    again = server.generate(prompt + output_ids(first) + text_ids(tokenizer, 40, seed=402), 40)
    assert again["meta_info"]["cached_tokens"] == 969
    together = server.generate([text_ids(tokenizer, 600, seed=410 + i) for i in range(4)], 40)
    assert all(len(output_ids(answer)) == 40 for answer in together)
    server.flush()
    info = server.info()
    assert info["resident"] == 0 and info["virtual_free"] == info["virtual_capacity"]
    assert "hit an exception" not in server.text()


def test_a_strangers_policy_is_served(model_path, tokenizer, tmp_path):
    (tmp_path / "stranger_policy.py").write_text(STRANGER)
    env = {**STRICT, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    flags = ("--kv-policy", "stranger_policy:Popular", "--kv-policy-config", '{"decay": 0.8}')
    with Server(model_path, *flags, *POOL, env=env) as server:
        play(server, tokenizer)
        assert server.info()["policy"] == "stranger_policy:Popular"


def test_a_policy_that_fails_while_it_serves_ends_no_server(model_path, tokenizer, tmp_path):
    (tmp_path / "failing_policy.py").write_text(FAILING)
    env = {**STRICT, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with Server(model_path, "--kv-policy", "failing_policy:Failing", *POOL, env=env) as server:
        before = server.info()
        assert (before["events_by_recency"], before["policy_errors"]) == (0, 0)
        for i in range(3):
            answer = server.generate(text_ids(tokenizer, 500, seed=420 + i), 80)
            held = nexus_of(answer)
            assert len(output_ids(answer)) == 80 and held["events"] >= 2 and held["resident"] <= held["budget"] + 32
        info = server.info()
        assert info["eviction_events"] > 7
        assert info["events_by_recency"] == info["eviction_events"] - 3
        assert info["policy_errors"] == info["eviction_events"] - 5
        log = server.text()
        assert log.count("'failing' said NaN") == 1 and log.count("policy_errors counts") == 1
        healthy(server)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_through_shares_and_retractions(name, model_path, tokenizer):
    env = {**STRICT, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "15"}
    with Server(model_path, "--kv-policy", name, *POOL, env=env) as server:
        play(server, tokenizer)
        assert server.info()["retractions"] > 0
