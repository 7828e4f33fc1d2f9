"""300 mixed requests on a pool of 4,096 slots, every invariant checked at every step."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.support.server import nexus_of, output_ids, text_ids

pytestmark = pytest.mark.server


def test_three_hundred_mixed_requests(small_pool, tokenizer):
    rng = random.Random(7)
    shared = [text_ids(tokenizer, n, seed=n) for n in (200, 900, 1500)]
    short = [text_ids(tokenizer, 20, seed=s) for s in range(20)]

    def one(i: int) -> str:
        kind = rng.choice(["short"] * 4 + ["shared"] * 3 + ["long"] + ["abort"] * 2)
        ids = rng.choice(short)[: rng.randint(1, 20)]
        if kind == "shared":
            ids = rng.choice(shared) + ids
        elif kind == "long":
            ids = text_ids(tokenizer, rng.randint(1500, 2800), seed=1000 + i)
        tokens = rng.choice([1, 4, 8, 24])
        if kind != "abort":
            answer = small_pool.generate(ids, tokens)
            assert len(output_ids(answer)) == tokens
            return "answered"
        body = {
            "input_ids": rng.choice(shared) + ids,
            "stream": rng.random() < 0.5,
            "sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True},
        }
        try:
            requests.post(small_pool.url + "/generate", json=body, timeout=rng.uniform(0.01, 0.6), stream=True).close()
        except requests.RequestException:
            pass
        return "aborted"

    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(one, range(300)))
    assert outcomes.count("answered") > 200 and outcomes.count("aborted") > 20

    small_pool.flush()
    info = small_pool.info()
    assert info["physical_free"] == 4096 and info["resident"] == 0
    assert info["virtual_free"] == info["virtual_capacity"]
    assert info["eviction_events"] > 20
    assert nexus_of(small_pool.generate(shared[1], 4))["resident"] > 0, "alive"
    log = small_pool.text()
    assert "memory leak" not in log and "hit an exception" not in log
