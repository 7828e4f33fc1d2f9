"""Servers are expensive to start: each set of flags is started once per session, one at a time."""

from __future__ import annotations

import pytest

from .harness import Server

POOL = ("--max-total-tokens", "16384", "--chunked-prefill-size", "1024", "--max-running-requests", "8")


@pytest.fixture(scope="session")
def model_path() -> str:
    from nexus_sglang.models import ensure_model

    return str(ensure_model("smollm2-135m"))


@pytest.fixture(scope="session")
def tokenizer(model_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def _server(model_path, *flags, env=None):
    server = Server(model_path, *flags, env=env)
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def nexus32(model_path):
    """Nexus at budget 0.2, float32, invariants checked after every pass."""
    flags = ("--kv-policy", "nexus", "--kv-budget", "0.2", "--dtype", "float32", *POOL)
    yield from _server(model_path, *flags, env={"NEXUS_SGLANG_DEBUG": "1"})


@pytest.fixture(scope="module")
def stock32(model_path):
    """SGLang with the package installed and no policy, float32."""
    yield from _server(model_path, "--dtype", "float32", *POOL)


@pytest.fixture(scope="module")
def small_pool(model_path):
    """Nexus at budget 0.2, bf16, on a pool of 4,096 slots, everything checked."""
    flags = ("--kv-policy", "nexus", "--kv-budget", "0.2", "--max-total-tokens", "4096",
             "--chunked-prefill-size", "512", "--max-running-requests", "4")  # fmt: skip
    yield from _server(model_path, *flags, env={"NEXUS_SGLANG_DEBUG": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2"})
