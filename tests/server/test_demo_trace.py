"""The demo's agent session gives up the blocks that it gave up when the record was made.

``demo_trace.json`` holds each turn's reply and its eviction events, in float32, on x86-64 with one thread. Record anew
only what was meant to change.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import requests

from tests.support.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.server]

RECORD = Path(__file__).with_name("demo_trace.json")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
POOL = ("--max-total-tokens", "16384", "--chunked-prefill-size", "4096", "--max-running-requests", "4")
POLICY = ("--kv-policy", "nexus", "--kv-budget", "0.2", "--kv-block-size", "32")


@pytest.fixture
def agent(monkeypatch):
    """The example as a module; it runs as a script, so its folder has to be on the path."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("multi_turn_agent")


def ask(url: str, messages: list[dict]) -> dict:
    """One turn, as it stands in the record."""
    body = {"model": "default", "messages": messages, "max_tokens": 48, "temperature": 0}
    body |= {"return_meta_info": True, "custom_params": {"kv_trace": True}}
    answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    held = choice["meta_info"]["nexus"][0]
    fields = ("logical", "resident", "evicted", "trace")
    return {"reply": choice["message"]["content"], **{name: held[name] for name in fields}}


def play(url: str, agent) -> list[dict]:
    """The session of ``examples/multi_turn_agent.py``, with every event traced."""
    messages: list[dict] = [{"role": "system", "content": agent.SYSTEM}]
    played = []
    for number, turn in enumerate(agent.TURNS, start=1):
        if turn.tool:
            call = {"name": turn.tool, "arguments": json.dumps({"name": turn.argument})}
            messages[-1]["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": call}]
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": turn.result})
        messages.append({"role": "user", "content": turn.question})
        played.append({"turn": number, **ask(url, messages)})
        messages.append({"role": "assistant", "content": played[-1]["reply"]})
    return played


def test_the_demo_gives_up_the_recorded_blocks(model_path, agent):
    recorded = json.loads(RECORD.read_text())
    with Server(model_path, "--dtype", "float32", *POOL, *POLICY) as server:
        played = play(server.url, agent)
    assert [turn["trace"] for turn in played] == [turn["trace"] for turn in recorded]
    assert played == recorded
