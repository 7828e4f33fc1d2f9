"""A whole server on SGLang's triton and flashinfer attention backends: the tokens and evictions of torch_native.

Triton's kernels run in Triton's interpreter, and plain PyTorch stands in for FlashInfer's wrappers. No GPU is needed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.server import STRICT, Server, nexus_of, output_ids

pytestmark = [pytest.mark.server, pytest.mark.slow]
FLAGS = (
    "--kv-budget 64 --kv-min-tokens 32 --kv-block-size 8 --kv-window 6 --kv-recent-tokens 16 --dtype float32 "
    "--max-total-tokens 1024 --chunked-prefill-size 64 --max-running-requests 4 --skip-tokenizer-init"
).split()
BACKENDS = {
    "triton": ("--attention-backend", "triton"),
    "flashinfer": ("--attention-backend", "flashinfer"),
    "mixed": ("--prefill-attention-backend", "torch_native", "--decode-attention-backend", "triton"),
}
STAND_IN = {"FLASHINFER_STAND_IN": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """Two layers with random weights: the interpreter takes a second for each decode step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.15,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(shape).save_pretrained(folder)
    return str(folder)


def session(server: Server) -> list[tuple]:
    """Two turns of a conversation: tokens, evictions and cached tokens of every answer."""
    rng = random.Random(5)
    seen = []
    ids = [rng.randrange(3, 500) for _ in range(130)]  # the last chunk is shorter than the query window
    for more in (20, 6):
        answer = server.generate(ids, more, custom={"kv_trace": True})
        seen.append((output_ids(answer), nexus_of(answer)["trace"], answer["meta_info"]["cached_tokens"]))
        ids = ids + output_ids(answer) + [7, 8, 9]
    return seen


@pytest.fixture(scope="module")
def wanted(tiny):
    with Server(tiny, *FLAGS, "--kv-policy", "nexus", env=STRICT) as server:
        return session(server)  # stopped before the next one starts: each holds 3 to 4 GB


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_paged_backend_serves_what_torch_native_serves(tiny, wanted, backend):
    assert [len(trace) > 0 for _, trace, _ in wanted] == [True, True] and wanted[1][2] == 130 + 20 - 1
    policy = "nexus"
    env = {**STRICT, "TRITON_INTERPRET": "1"}
    if backend == "flashinfer":
        policy = "tests.support.flashinfer_stand_in:Nexus"
        env = {**env, **STAND_IN}
    with Server(tiny, *FLAGS, "--kv-policy", policy, *BACKENDS[backend], env=env) as server:
        assert session(server) == wanted
        log = server.text()
    assert "Scheduler hit an exception" not in log
    if backend == "flashinfer":  # and each that was given was checked (STRICT)
        assert "passed by" not in log and "log-sum-exp given" in log and "log-sum-exp computed" in log
