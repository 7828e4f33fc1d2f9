"""At any density the logits equal dense attention with exactly the evicted keys masked."""

from __future__ import annotations

import pytest

from tests.support.oracle import DenseMasked, worst_gap
from tests.support.server import nexus_of, output_ids, text_ids

pytestmark = pytest.mark.server
TOLERANCE = 1e-3  # float32, log-probabilities
ASK = {"return_logprob": True, "top_logprobs_num": 20, "custom": {"kv_trace": True}}


@pytest.fixture(scope="module")
def dense(model_path):
    return DenseMasked(model_path)


def test_after_prefill_eviction_and_extend_on_it(ours, dense, tokenizer):
    prompt = text_ids(tokenizer, 1500, seed=1)
    first = ours.generate(prompt, 32, **ASK)
    held = nexus_of(first)
    assert held["events"] >= 1 and held["evicted"] > 1000
    whole = prompt + output_ids(first)
    reference = dense.logprobs(whole[:-1], held["trace"], 32, start=len(prompt) - 1)
    assert worst_gap(first, reference) < TOLERANCE

    # Many new tokens at once on a prefix with holes; their positions are those in the whole text.
    second_prompt = whole + text_ids(tokenizer, 150, seed=2)
    second = ours.generate(second_prompt, 32, **ASK)
    assert second["meta_info"]["cached_tokens"] == len(whole) - 1
    events = held["trace"] + nexus_of(second)["trace"]
    longer = second_prompt + output_ids(second)
    reference = dense.logprobs(longer[:-1], events, 32, start=len(second_prompt) - 1)
    assert worst_gap(second, reference) < TOLERANCE


def test_after_many_decode_evictions(ours, dense, tokenizer):
    prompt = text_ids(tokenizer, 300, seed=3)
    answer = ours.generate(prompt, 700, **ASK)
    held = nexus_of(answer)
    decode_events = [e for e in held["trace"] if e["length"] > len(prompt)]
    assert len(decode_events) >= 20
    assert held["peak_resident"] <= max(held["budget"] + 32, len(prompt))
    whole = prompt + output_ids(answer)
    reference = dense.logprobs(whole[:-1], held["trace"], 32, start=len(prompt) - 1)
    assert worst_gap(answer, reference) < TOLERANCE
    # The kept set moves on; decoded blocks are evicted too.
    assert any(b * 32 >= len(prompt) for e in decode_events for b in e["blocks"])


def test_chunked_prefill_without_eviction_between_chunks(ours, dense, tokenizer):
    prompt = text_ids(tokenizer, 2600, seed=4)
    answer = ours.generate(prompt, 16, **ASK)
    held = nexus_of(answer)
    assert [e["length"] for e in held["trace"]] == [len(prompt)]
    whole = prompt + output_ids(answer)
    reference = dense.logprobs(whole[:-1], held["trace"], 32, start=len(prompt) - 1)
    assert worst_gap(answer, reference) < TOLERANCE
