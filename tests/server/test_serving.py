"""The promises of serving: equal to stock where nothing is evicted, shared prefixes, slots that come back, refusals."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.support.server import WIDE, Server, nexus_of, output_ids, text_ids

pytestmark = pytest.mark.server


def prompts(tokenizer) -> list[list[int]]:
    """20 varied prompts of 5 to 1,400 tokens."""
    lengths = [5, 17, 31, 32, 33, 64, 100, 128, 200, 257, 300, 400, 511, 600, 700, 801, 900, 1024, 1100, 1400]
    return [text_ids(tokenizer, n, seed=100 + i) for i, n in enumerate(lengths)]


def test_budget_one_is_stock_token_for_token(ours, stock, tokenizer):
    whole = {"custom": {"kv_budget": 1.0}}
    for first in prompts(tokenizer):
        mine = ours.generate(first, 16, **whole)
        theirs = stock.generate(first, 16)
        assert output_ids(mine) == output_ids(theirs)
        assert nexus_of(mine)["evicted"] == 0
        follow = first + output_ids(theirs) + text_ids(tokenizer, 20, seed=len(first))
        mine = ours.generate(follow, 16, **whole)
        theirs = stock.generate(follow, 16)
        assert output_ids(mine) == output_ids(theirs)
        assert mine["meta_info"]["cached_tokens"] == theirs["meta_info"]["cached_tokens"]


def test_cached_tokens_equal_stock_after_eviction(ours, stock, tokenizer):
    ours.flush()
    stock.flush()
    prompt = text_ids(tokenizer, 1200, seed=31)
    for turn in range(4):
        mine = ours.generate(prompt, 24)
        theirs = stock.generate(prompt, 24)
        assert mine["meta_info"]["cached_tokens"] == theirs["meta_info"]["cached_tokens"]
        held = nexus_of(mine)
        # What is in flight when the budget is judged: the tokens that were not cached, at most a chunk of 512.
        in_flight = min(512, len(prompt) - mine["meta_info"]["cached_tokens"])
        assert held["peak_resident"] <= held["budget"] + 32 + in_flight or turn == 0
        assert held["resident"] <= held["budget"] + 32
        # Stock says something else: put our reply into its cache too, up to the token that is never stored.
        stock.generate(prompt + output_ids(mine)[:-1], 1)
        prompt = prompt + output_ids(mine) + text_ids(tokenizer, 60, seed=40 + turn)
    assert held["evicted"] > 800


def test_shared_prefix_is_matched_whole_and_stored_once(ours, tokenizer):
    ours.flush()
    prefix = text_ids(tokenizer, 1000, seed=50)
    one, two = (prefix + text_ids(tokenizer, 40, seed=s)[1:] for s in (51, 52))
    whole = {"custom": {"kv_evict": False}}
    ours.generate(one, 8, **whole)
    before = ours.info()
    second = ours.generate(two, 8, **whole)
    after = ours.info()
    assert second["meta_info"]["cached_tokens"] == 1000
    assert after["resident"] - before["resident"] == len(two) - 1000 + 7, "the prefix holds its slots once"


def test_evicted_slots_come_back_at_once(ours, tokenizer):
    """Each evicted token is a free KV slot, while its virtual id stays taken."""
    ours.flush()
    empty = ours.info()
    held = nexus_of(ours.generate(text_ids(tokenizer, 1300, seed=60), 8))
    after = ours.info()
    assert after["physical_free"] == empty["physical_free"] - held["resident"]
    assert after["virtual_free"] == empty["virtual_free"] - held["logical"]
    assert held["logical"] == held["resident"] + held["evicted"]


def test_sinks_stay(ours, tokenizer):
    """The first block of a sequence is never evicted."""
    for seed in range(70, 74):
        trace = nexus_of(ours.generate(text_ids(tokenizer, 900, seed), 40, custom={"kv_trace": True}))["trace"]
        assert trace and all(0 not in event["blocks"] for event in trace)


def test_cold_warm_and_flushed(ours, tokenizer):
    """Without eviction all three agree; with it, cold and flushed do.

    A warm request evicts from what the cold one kept.
    """
    prompt = text_ids(tokenizer, 700, seed=80)
    for custom, exact in (({"kv_evict": False}, True), ({"kv_trace": True}, False)):
        ours.flush()
        cold = ours.generate(prompt, 12, custom=custom)
        warm = ours.generate(prompt, 12, custom=custom)
        ours.flush()
        again = ours.generate(prompt, 12, custom=custom)
        assert [a["meta_info"]["cached_tokens"] for a in (cold, warm, again)] == [0, 699, 0]
        assert output_ids(cold) == output_ids(again)
        if exact:
            assert output_ids(warm) == output_ids(cold)
        else:
            assert nexus_of(cold)["trace"] == nexus_of(again)["trace"]


def test_alone_and_in_a_batch_keep_the_same_blocks(ours, tokenizer):
    batch = [text_ids(tokenizer, n, seed=90 + n) for n in (700, 820, 940, 1010)]
    trace = {"custom": {"kv_trace": True}}
    alone = []
    for ids in batch:
        ours.flush()
        alone.append(nexus_of(ours.generate(ids, 70, **trace))["trace"])
    ours.flush()
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda ids: nexus_of(ours.generate(ids, 70, **trace))["trace"], batch))
    assert together == alone
    assert all(len(t) >= 2 for t in alone), "prefill and decode evictions"


def test_counters_show_that_it_runs(ours, tokenizer):
    """The numbers are there, add up, and move when something is evicted."""
    before = ours.info()
    ours.generate(text_ids(tokenizer, 500, seed=95), 8)
    after = ours.info()
    assert after["eviction_events"] == before["eviction_events"] + 1
    assert after["sequences_over_budget"] == before["sequences_over_budget"] + 1
    assert after["tokens_evicted"] > before["tokens_evicted"]
    assert after["logical"] + after["virtual_free"] == after["virtual_capacity"]
    assert after["resident"] + after["physical_free"] == after["physical_capacity"] == 16384
    assert after["evictable"] + after["protected"] == after["logical"]
    assert 0 < after["evictable_resident"] <= after["resident"]
    assert "nexus [nexus]" in ours.text(), "the periodic log line"


def test_bad_hint_is_refused_and_nothing_is_lost(ours, tokenizer):
    import requests

    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 4, "custom_params": {"kv_budgets": 3}}}
    answer = requests.post(ours.url + "/generate", json=body, timeout=60)
    assert answer.status_code == 400 and "kv_budgets" in answer.text and "kv_budget" in answer.text
    assert output_ids(ours.generate(text_ids(tokenizer, 20, 1), 4))


def test_ratio_and_count_budgets_per_request(ours, tokenizer):
    """A share of the real length and a count of tokens are budgets; different budgets share no prefix."""
    ours.flush()
    prompt = text_ids(tokenizer, 1000, seed=97)
    for budget, tokens in ((0.5, 500), (300, 300), (0.2, 200)):
        answer = ours.generate(prompt, 4, custom={"kv_budget": budget})
        assert answer["meta_info"]["cached_tokens"] == 0
        held = nexus_of(answer)
        assert held["budget"] == tokens and tokens - 32 < held["resident"] <= tokens + 4


def test_without_a_policy_the_package_changes_nothing(model_path, tokenizer):
    """One server after the other: see ``tests/conftest.py``."""
    seen = []
    for env in ({}, {"SGLANG_PLUGINS": "nexus-cpu"}):
        with Server(model_path, *WIDE, env=env) as server:
            answers = [server.generate(ids, 12) for ids in prompts(tokenizer)[::4]]
            state = requests.get(server.url + "/server_info", timeout=60).json()["internal_states"][0]
            assert "RustUnifiedTreeCore" in server.text()
        assert "nexus" not in state and not any("nexus" in answer["meta_info"] for answer in answers)
        assert state["memory_usage"]["token_capacity"] == 16384
        seen.append([(output_ids(answer), answer["meta_info"]["cached_tokens"]) for answer in answers])
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--kv-policy", "nexus", "--speculative-algorithm", "NGRAM"], ["--speculative-algorithm", "Recipe: "]),
        (["--kv-policy", "nexis"], ["--kv-policy 'nexis'", "'nexus'"]),
        (
            ["--kv-policy", "nexus", "--max-total-tokens", "700", "--chunked-prefill-size", "512"],
            ["KV pool of 700 tokens", "2 x 512", "--chunked-prefill-size"],
        ),
    ],
)
def test_refused_at_start(model_path, flags, words):
    """One clear error, before anything is served."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model_path, *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode != 0
    for word in words:
        assert word in ended.stdout + ended.stderr
