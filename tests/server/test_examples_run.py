"""The examples against real servers: the offline engine, a frontend program with forks, an OpenAI client, a policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import Server, nexus_of, text_ids

pytestmark = pytest.mark.server
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / name), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_offline_engine(model_path):
    out = run("offline_engine.py", "--model-path", model_path)
    assert "at length " in out and ": evicted " in out


def test_frontend_program(small_pool):
    events = small_pool.info()["eviction_events"]
    out = run("frontend_program.py", "--url", small_pool.url)
    assert len(out.splitlines()) >= 3
    assert small_pool.info()["eviction_events"] > events


def test_multi_turn_agent(small_pool):
    lines = run("multi_turn_agent.py", "--url", small_pool.url).splitlines()
    assert len(lines) == 8, "a header and seven turns"
    cached = [int(line.split()[2].replace(",", "")) for line in lines[1:]]
    assert all(later > 0 for later in cached[1:])


def test_custom_policy(model_path, tokenizer):
    """As the README says: the folder on PYTHONPATH, the class by module and name, a field in JSON."""
    flags = ("--kv-policy", "custom_policy:Passages", "--kv-policy-config", '{"spill": 0.5}')
    pool = ("--max-total-tokens", "4096", "--chunked-prefill-size", "512", "--max-running-requests", "4")
    with Server(model_path, *flags, *pool, env={"PYTHONPATH": str(EXAMPLES), "NEXUS_SGLANG_DEBUG": "1"}) as server:
        assert server.info()["policy"] == "custom_policy:Passages"
        held = nexus_of(server.generate(text_ids(tokenizer, 1200, 3), 40))
    assert held["evicted"] > 0 and held["resident"] <= held["budget"] + 32
