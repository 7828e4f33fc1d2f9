"""Budget 1.0 in bf16: where a greedy token differs from stock, the two candidates were a near-tie (issue 2)."""

from __future__ import annotations

import pytest

from .harness import Server, output_ids, text_ids

pytestmark = [pytest.mark.server, pytest.mark.slow]
NEAR_TIE = 0.25  # logits of this model reach 32, where neighbouring bf16 numbers are 0.25 apart


def test_differences_are_near_ties(small_pool, model_path, tokenizer):
    lengths = [5, 17, 31, 32, 33, 64, 100, 128, 200, 257, 300, 400, 511, 600, 700, 801, 900, 1024, 1100, 1400]
    ask = {"return_logprob": True, "top_logprobs_num": 5}
    differing, pool = 0, ("--max-total-tokens", "8192", "--chunked-prefill-size", "512", "--max-running-requests", "4")
    with Server(model_path, *pool, env={"SGLANG_PLUGINS": "nexus-cpu"}) as stock:
        for i, n in enumerate(lengths):
            prompt = text_ids(tokenizer, n, seed=100 + i)
            mine = output_ids(small_pool.generate(prompt, 16, custom={"kv_budget": 1.0}))
            answer = stock.generate(prompt, 16, **ask)
            theirs = output_ids(answer)
            if mine == theirs:
                continue
            differing += 1
            at = next(j for j in range(16) if mine[j] != theirs[j])
            top = {token: logprob for logprob, token, _ in answer["meta_info"]["output_top_logprobs"][at]}
            assert top[theirs[at]] - top[mine[at]] <= NEAR_TIE, f"prompt {i}, token {at}"
    print(f"{20 - differing} of 20 identical, {differing} differ at a near-tie")
    assert differing < 10
