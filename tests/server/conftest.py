"""Servers that several tests share.

They are expensive to start and hold 3 to 4 GB each: one serves a whole module, ``ours`` the session, and at most
three are up at a time (``tests/conftest.py``).
"""

from __future__ import annotations

import pytest

from tests.support.server import STRICT, WIDE, Server


@pytest.fixture(scope="session")
def model_path() -> str:
    from nexus_sglang.harness.models import ensure_model

    return str(ensure_model("smollm2-135m"))


@pytest.fixture(scope="session")
def tokenizer(model_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="session")
def ours(model_path):
    """Nexus at budget 0.2, float32, 16,384 slots, everything checked."""
    with Server(model_path, "--kv-policy", "nexus", *WIDE, env=STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def stock(model_path):
    """The same SGLang with only the CPU platform of this package."""
    with Server(model_path, *WIDE, env={"SGLANG_PLUGINS": "nexus-cpu"}) as server:
        yield server


def _pool(model_path: str, slots: int, chunk: int):
    flags = ("--max-total-tokens", str(slots), "--chunked-prefill-size", str(chunk), "--max-running-requests", "4")
    with Server(model_path, "--kv-policy", "nexus", *flags, env=STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def small_pool(model_path):
    """bf16, 4,096 slots in chunks of 512, everything checked."""
    yield from _pool(model_path, 4096, 512)


@pytest.fixture(scope="module")
def tight(model_path):
    """bf16, 2,048 slots in chunks of 256, everything checked."""
    yield from _pool(model_path, 2048, 256)
