"""Two ranks over gloo on the CPU serve what one process serves: same tokens, same evictions, same cached prefixes.

Debug mode compares the ranks after every event, and a rank that differs ends the server.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.server import STRICT, Server, nexus_of, output_ids

pytestmark = [pytest.mark.server, pytest.mark.slow]
FLAGS = (
    "--kv-policy nexus --dtype float32 --max-total-tokens 8192 --chunked-prefill-size 512 "
    "--max-running-requests 4 --skip-tokenizer-init"
).split()


@pytest.fixture(scope="module")
def eight_heads(tmp_path_factory) -> str:
    """A small Llama with random weights whose heads can be split: 8 of queries, 4 of keys (SmolLM2 has 9 and 3)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        initializer_range=0.25,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("eight-heads")
    LlamaForCausalLM(shape).save_pretrained(folder)
    return str(folder)


def prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(tokens)]


def session(server: Server) -> list[tuple]:
    """Two turns each of two conversations: tokens, evictions and cached tokens of every answer."""
    seen = []
    for length in (1200, 700):
        ids = prompt(length, seed=length)
        for more in (120, 60):
            answer = server.generate(ids, more, custom={"kv_trace": True})
            seen.append((output_ids(answer), nexus_of(answer)["trace"], answer["meta_info"]["cached_tokens"]))
            ids = ids + output_ids(answer) + prompt(40, seed=more)
    return seen


def test_two_ranks_serve_what_one_serves(eight_heads):
    with Server(eight_heads, *FLAGS, env=STRICT) as one:
        wanted = session(one)
    assert [cached > 0 for _, _, cached in wanted] == [False, True, False, True]
    assert all(trace for _, trace, _ in wanted)
    cores = sorted(os.sched_getaffinity(0))
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}  # SGLang wants to know each rank's cores
    with Server(eight_heads, *FLAGS, "--tp-size", "2", env={**STRICT, **bind}) as two:
        assert session(two) == wanted
        # Side by side, with a prefix in common, and more than the pool holds at once.
        asked = [prompt(300, seed=9) + prompt(length, seed=length) for length in (900, 2500, 1400, 600, 2000)]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda ids: two.generate(ids, 80), asked))
        assert all(len(output_ids(answer)) == 80 and nexus_of(answer)["evicted"] > 0 for answer in answers)
        assert "Scheduler hit an exception" not in two.text()
