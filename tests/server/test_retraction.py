"""Answers that together outgrow the pool.

Where stock SGLang retracts requests, nexus retracts fewer; and those that it retracts say the same in the end.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.server import STRICT, Server, healthy, output_ids, text_ids

pytestmark = pytest.mark.server

FLAGS = (
    "--max-total-tokens 1024 --chunked-prefill-size 128 --max-running-requests 4 --schedule-conservativeness 0.3"
).split()
"""Low conservativeness: all four are admitted at once, their answers then need 1,480 slots of 1,024."""


def retracted(server: Server, prompts: list[list[int]], tokens: int) -> int:
    """Retractions the log tells of while all ``prompts`` are answered at length.

    The length is fixed by a minimum: with ``ignore_eos`` SGLang reserves the whole answer instead of an estimate.
    """
    seen = len(server.text())
    whole = {"sampling_params": {"temperature": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}}
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda ids: server.generate(ids, **whole), prompts))
    assert all(len(output_ids(a)) == tokens for a in answers), "all finish, retracted or not"
    return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", server.text()[seen:])))


def test_fewer_retractions_than_stock_on_the_same_pool(model_path, tokenizer):
    prompts = [text_ids(tokenizer, 150, seed=360 + i) for i in range(4)]
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2", "SGLANG_PLUGINS": "nexus-cpu"}
    with Server(model_path, *FLAGS, env=env) as stock:
        theirs = retracted(stock, prompts, 220)
    with Server(model_path, "--kv-policy", "nexus", *FLAGS, env=STRICT) as server:
        ours = retracted(server, prompts, 220)
        assert server.info()["retractions"] == ours
        healthy(server)
    assert theirs > 0, "the pool is under pressure"
    assert ours < theirs


def test_forced_retraction_gives_the_same_answers(model_path, tokenizer):
    """Retracted requests come back to the reduced cache and say the same."""
    flags = (
        "--kv-policy nexus --dtype float32 --max-total-tokens 8192 --chunked-prefill-size 128 --max-running-requests 4"
    ).split()
    prompts = [text_ids(tokenizer, 500, seed=330 + i) for i in range(4)]
    answers = []
    for forced in ("0", "1"):
        env = {**STRICT, "SGLANG_TEST_RETRACT": forced, "SGLANG_TEST_RETRACT_INTERVAL": "3"}
        with Server(model_path, *flags, env=env) as server:
            answers.append([output_ids(a) for a in server.generate(prompts, 20)])
            assert (server.info()["retractions"] > 0) == (forced == "1")
            healthy(server)
    assert answers[0] == answers[1]
