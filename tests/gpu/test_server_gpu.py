"""Whole servers on a GPU, with CUDA graphs and overlap scheduling.

Answers of an evicted sequence against dense attention with the evicted keys masked, and of an untouched one against
stock SGLang. The weights are random, so nothing is downloaded.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.oracle import DenseMasked, worst_gap
from tests.support.server import STRICT, Server, nexus_of, output_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.server,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here (torch.cuda.is_available() is false)"),
]
BACKENDS = ("flashinfer", "triton")
SHARED = (
    "--dtype bfloat16 --max-total-tokens 16384 --chunked-prefill-size 512 --max-running-requests 16 "
    "--skip-tokenizer-init --cuda-graph-max-bs-decode 16"
).split()
OURS = ("--kv-policy", "nexus", "--kv-budget", "0.2")
NEAR_TIE = 0.05
ASK = {"return_logprob": True, "top_logprobs_num": 20}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """Four layers, 8 query and 2 key heads of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.06,
    )
    folder = tmp_path_factory.mktemp("small")
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2000) for _ in range(count)]


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request, small):
    """A nexus server with every check on and a stock server, on the same backend."""
    backend = ("--attention-backend", request.param)
    with Server(small, *SHARED, *OURS, *backend, env=STRICT) as ours, Server(small, *SHARED, *backend) as stock:
        yield ours, stock


def test_what_is_not_evicted_equals_stock(pair):
    """Or differs first where stock itself was undecided."""
    ours, stock = pair
    for i, n in enumerate((5, 33, 200, 700, 1500)):
        mine = ours.generate(tokens(n, i), 40, custom={"kv_evict": False})
        answer = stock.generate(tokens(n, i), 40, **ASK)
        assert nexus_of(mine)["evicted"] == 0
        both = list(zip(output_ids(mine), output_ids(answer), answer["meta_info"]["output_top_logprobs"], strict=True))
        if (at := next((j for j, (a, b, _) in enumerate(both) if a != b), None)) is not None:
            a, b, top = both[at]
            logprobs = {token: logprob for logprob, token, _ in top}
            assert logprobs[b] - logprobs[a] <= NEAR_TIE, f"prompt of {n}, token {at}"


def test_evicted_logits_equal_dense_attention_without_the_evicted_keys(pair, small):
    """Prefill eviction, many decode evictions inside CUDA graphs, then many tokens at once on what is left."""
    ours, _ = pair
    dense = DenseMasked(small)
    prompt = tokens(1000, seed=7)
    gaps = {}
    for name, custom in (("full", {"kv_evict": False, "kv_trace": True}), ("evicted", {"kv_trace": True})):
        first = ours.generate(prompt, 200, custom=custom, **ASK)
        whole = prompt + output_ids(first)
        reference = dense.logprobs(whole[:-1], nexus_of(first)["trace"], 32, start=len(prompt) - 1)
        longer = whole + tokens(150, seed=8)
        second = ours.generate(longer, 20, custom=custom, **ASK)
        assert second["meta_info"]["cached_tokens"] == len(whole) - 1
        events = nexus_of(first)["trace"] + nexus_of(second)["trace"]
        again = dense.logprobs((longer + output_ids(second))[:-1], events, 32, start=len(longer) - 1)
        gaps[name] = worst_gap(first, reference), worst_gap(second, again)
        decode = [e for e in nexus_of(first)["trace"] if e["length"] > len(prompt)]
        assert len(decode) >= (5 if name == "evicted" else 0)
    print(f"largest difference of a top-20 log-probability: {gaps}")
    for evicted, full in zip(gaps["evicted"], gaps["full"], strict=True):
        assert evicted < max(2 * full, 0.1)


def test_a_ragged_batch_stays_within_its_budgets(pair):
    """Sixteen at once, so that graphs of several sizes with padding rows are replayed; every invariant is checked."""
    ours, _ = pair
    ours.flush()
    prompts = [tokens(150 + 90 * i, seed=20 + i) for i in range(16)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda ids: ours.generate(ids, 60 + len(ids) // 20), prompts))
    for answer in answers:
        held = nexus_of(answer)
        assert held["events"] >= 1 and held["resident"] <= held["budget"] + 32
    counters = ours.info()
    assert counters["physical_free"] + counters["resident"] == counters["physical_capacity"]
    assert "IntegrityError" not in ours.text()
