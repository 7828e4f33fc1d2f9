"""An agent alone answers like among its siblings: the system prompt is pinned by itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.support.server import STRICT, WIDE, Server, healthy, prose, text_ids

pytestmark = pytest.mark.server
TOOL = {"type": "function", "function": {"name": "read_log", "description": "Reads a log.", "parameters": {}}}


def ask(server: Server, messages: list[dict], custom: dict | None = None, tokens: int = 40, **fields) -> dict:
    """A greedy chat completion: ``text``, ``ids``, ``prompt`` (tokens), ``cached`` (tokens), ``held`` (meta_info)."""
    body = {
        "model": "default",
        "messages": messages,
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_meta_info": True,
        "return_token_ids": True,
        **fields,
    }
    if custom:
        body["custom_params"] = custom
    answer = requests.post(server.url + "/v1/chat/completions", json=body, timeout=600)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    meta = choice["meta_info"]
    return {
        "text": choice["message"]["content"],
        "ids": choice["response_token_ids"],
        "held": meta["nexus"][0],
        "prompt": meta["prompt_tokens"],
        "cached": meta["cached_tokens"],
    }


def agent(system: str, number: int) -> list[dict]:
    """The shared system message and a history of its own, about 500 tokens."""
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Agent {number}, read this. {prose(250, seed=400 + number)}"},
        {"role": "assistant", "content": prose(60, seed=420 + number)},
        {"role": "user", "content": f"{prose(15, seed=440 + number)} What happened first?"},
    ]


def test_eight_agents_answer_alone_as_they_do_together(ours, tokenizer):
    ours.flush()
    system = tokenizer.decode(text_ids(tokenizer, 1500, seed=401))
    agents = [agent(system, i) for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda m: ask(ours, m, custom={"kv_trace": True}, tokens=80), agents))
    shared = together[0]["held"]["pinned"]
    assert 1500 <= shared <= 1600
    for answer in together:
        held = answer["held"]
        assert answer["prompt"] >= shared + 450, "over budget with its history alone"
        assert held["events"] >= 2 and held["pinned"] == shared, "prefill and decode evictions"
        assert min(b for e in held["trace"] for b in e["blocks"]) * 32 >= 1500, "the shared part stays whole"
    assert sum(a["cached"] >= 1500 for a in together) == 7, "computed once"
    floor = max(max(a["held"]["budget"] for a in together) // 4, 64 + 32)
    assert ours.info()["resident"] <= shared + 8 * (floor + 32 + 80), "the shared part holds its slots once"

    for messages, answer in zip(agents, together, strict=True):
        ours.flush()
        alone = ask(ours, messages, tokens=80)
        assert alone["cached"] == 0
        assert (alone["text"], alone["ids"]) == (answer["text"], answer["ids"])
        assert {k: alone["held"][k] for k in ("resident", "evicted", "events", "pinned")} == {
            k: answer["held"][k] for k in ("resident", "evicted", "events", "pinned")
        }
    healthy(ours)


def test_what_is_pinned_and_what_is_not(ours, tokenizer):
    ours.flush()
    system, *history = agent(tokenizer.decode(text_ids(tokenizer, 600, seed=402)), 9)
    pinned = ask(ours, [system, *history], tokens=4)["held"]["pinned"]
    assert 600 <= pinned <= 672
    assert ask(ours, history, tokens=4)["held"]["pinned"] == 0, "this template's own system message is not the client's"
    assert ask(ours, [system, *history], tokens=4, tools=[TOOL])["held"]["pinned"] >= pinned
    ours.flush()
    given_up = ask(ours, [system, *history], custom={"kv_pin_tokens": 0, "kv_trace": True}, tokens=4)["held"]
    assert given_up["pinned"] == 0 and min(b for e in given_up["trace"] for b in e["blocks"]) * 32 < 600
    answer = ours.generate(text_ids(tokenizer, 700, seed=403), 4)
    assert answer["meta_info"]["nexus"][0]["pinned"] == 0, "plain prompts have no system message"


def test_a_system_prompt_beyond_the_pool_is_clipped_and_said(tight, tokenizer):
    """2,048 slots: what is pinned leaves room for the private floor and the chunks in flight."""
    system, *history = agent(tokenizer.decode(text_ids(tokenizer, 2600, seed=404)), 10)
    held = ask(tight, [system, *history], tokens=8)["held"]
    assert "kv_pin_tokens" in held["clipped"] and held["resident"] <= tight.info()["largest_budget"] + 32
    healthy(tight)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_the_other_chat_endpoints_pin_what_chat_completions_pins(ours, tokenizer, path, stream):
    system = tokenizer.decode(text_ids(tokenizer, 600, seed=405))
    question = f"{prose(200, seed=406)} What happened first?"
    messages = [{"role": "user", "content": question}]
    wanted = ask(ours, [{"role": "system", "content": system}, *messages], tokens=4)["held"]
    assert wanted["pinned"] >= 600 and wanted["evicted"] > 0
    ours.flush()
    body = {
        "/v1/responses": {"instructions": system, "input": question, "max_output_tokens": 4},
        "/v1/messages": {"system": system, "messages": messages, "max_tokens": 4},
    }[path]
    before = set(ours.info()["recent_requests"])
    body["model"] = requests.get(ours.url + "/v1/models", timeout=60).json()["data"][0]["id"]
    answer = requests.post(ours.url + path, json={"temperature": 0, "stream": stream, **body}, timeout=600)
    answer.raise_for_status()
    (held,) = (report for rid, report in ours.info()["recent_requests"].items() if rid not in before)
    assert (held["pinned"], held["evicted"]) == (wanted["pinned"], wanted["evicted"])


@pytest.mark.slow
def test_the_first_user_message_is_pinned_where_the_server_says_so(model_path, tokenizer):
    """An agent's task stays whole to the end of a session that passes its budget several times; nothing else does."""
    task = {"role": "user", "content": f"Remember this. {prose(150, seed=431)}"}
    messages = [{"role": "system", "content": "You are an agent."}, task]
    flags = ["--kv-policy", "nexus", "--kv-budget", "300", "--kv-pin-first-user", "true", "--kv-pin-system", "false"]
    with Server(model_path, *flags, *WIDE, env=STRICT) as server:
        pins = set()
        gone = set()
        for turn in range(5):
            held = ask(server, messages, custom={"kv_trace": True}, tokens=40)["held"]
            pins.add(held["pinned"])
            gone |= {block for event in held["trace"] for block in event["blocks"]}
            messages += [
                {"role": "assistant", "content": "Go on."},
                {"role": "user", "content": prose(150, seed=440 + turn)},
            ]
        ends = len(tokenizer.encode(tokenizer.apply_chat_template(messages[:2], tokenize=False)))
        assert len(pins) == 1 and ends <= pins.pop() < ends + 2 * 32
        assert gone and min(gone) * 32 >= ends, "what follows the task goes"
