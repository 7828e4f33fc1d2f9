"""A tool-using agent over seven turns, and what the KV cache held in each.

    python examples/multi_turn_agent.py --url http://127.0.0.1:30000

Works with any SGLang server; columns a server does not report show ``-``. Flags worth starting it with:
``--enable-cache-report`` (cached tokens) and ``--enable-metrics`` (decode speed). The tool calls are
scripted, because a small model does not make them reliably; the answers are the model's own.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from openai import OpenAI, OpenAIError
from service_log import service_log

SYSTEM = "You are an operations assistant. You can call read_log and read_runbook. Answer in one short sentence."


class Turn(NamedTuple):
    """What the agent gets in one turn.

    Attributes:
        question: what the user says.
        fact: what a good answer contains, or None.
        tool: name of the tool that was called before the question, or None.
        argument: of that call.
        result: of that call.
    """

    question: str
    fact: str | None = None
    tool: str | None = None
    argument: str | None = None
    result: str | None = None


TURNS = (
    Turn("The shop has been slow since nine this morning. What will you look at first?"),
    Turn("That was the log. Which disk is full?", "/data", "read_log", "checkout", service_log()),
    Turn("Who rolled back release 4.2?", "Lindqvist"),
    Turn("Which gateway has a certificate that expires on Friday?", "Osprey"),
    Turn(
        "Which extension should I call?", "5512", "read_runbook", "disk full",
        "Runbook 'disk full': stop the writers, call the storage team on extension 5512, then delete old snapshots.",
    ),
    Turn("On which node is the disk full?", "node-7"),
    Turn("Write the incident report in two sentences."),
)  # fmt: skip


def ask(client: OpenAI, model: str, messages: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """One chat completion.

    Returns:
        The numbers this program shows, the reply, and the token ids of prompt and reply.
    """
    response = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        # SGLang: meta_info arrives in choices[0].meta_info, token ids beside it.
        extra_body={"return_meta_info": True, "return_prompt_token_ids": True, "return_token_ids": True},
    )
    choice = response.choices[0].model_dump()
    meta = choice.get("meta_info") or {}
    held = (meta.get("nexus") or [{}])[0]
    details = response.usage.prompt_tokens_details
    return {
        "prompt_tokens": response.usage.prompt_tokens,
        "completion_tokens": response.usage.completion_tokens,
        "cached_tokens": details.cached_tokens if details else None,
        "decode_tokens_per_s": meta.get("decode_throughput"),
        **{key: held.get(key) for key in ("logical", "resident", "evicted", "peak_resident", "budget", "events")},
        "reply": choice["message"]["content"] or "",
        "prompt_ids": choice.get("prompt_token_ids"),
        "reply_ids": choice.get("response_token_ids"),
        "finish_reason": choice["finish_reason"],
    }


def remember(url: str, recorded: dict[str, Any]) -> None:
    """Put a recorded turn into the server's cache, as if the server had written that reply itself."""
    ids = recorded["prompt_ids"] + recorded["reply_ids"]
    if recorded["finish_reason"] == "length":
        ids.pop()  # the last token of a reply that was cut off is never computed, so never cached
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        response.read()


def play(url: str, model: str, max_tokens: int, recording: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The whole session.

    Args:
        url: of the server, without ``/v1``.
        model: name to ask for.
        max_tokens: longest reply.
        recording: turns of an earlier session. Its replies go into the conversation (and the server's cache)
            in place of the ones this server writes, so that both servers see the same prompts.
    """
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    played = []
    for number, turn in enumerate(TURNS, start=1):
        if turn.tool:
            call = {"name": turn.tool, "arguments": json.dumps({"name": turn.argument})}
            messages[-1]["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": call}]
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": turn.result})
        messages.append({"role": "user", "content": turn.question})
        numbers = ask(client, model, messages, max_tokens)
        found = None if turn.fact is None else turn.fact.lower() in numbers["reply"].lower()
        played.append({"turn": number, "question": turn.question, "fact": turn.fact, "fact_found": found, **numbers})
        reply = numbers["reply"]
        if recording:
            remember(url, recording[number - 1])
            reply = recording[number - 1]["reply"]
        messages.append({"role": "assistant", "content": reply})
        print(f"turn {number}  user:  {turn.question}", file=sys.stderr)
        print(f"        agent: {' '.join(numbers['reply'].split())}", file=sys.stderr, flush=True)
    return played


COLUMNS = (
    ("turn", "turn"),
    ("prompt", "prompt_tokens"),
    ("cached", "cached_tokens"),
    ("logical", "logical"),
    ("resident", "resident"),
    ("evicted", "evicted"),
    ("decode tok/s", "decode_tokens_per_s"),
    ("fact found", "fact_found"),
)


def cell(value: Any) -> str:
    """A table cell: ``-`` where the server said nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def table(turns: list[dict[str, Any]]) -> str:
    """One line per turn."""
    rows = [[title for title, _ in COLUMNS]] + [[cell(turn.get(key)) for _, key in COLUMNS] for turn in turns]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def main(argv: list[str] | None = None) -> int:
    """Play the session and print its table."""
    parser = argparse.ArgumentParser(description="Play a seven-turn agent session and show what the KV cache held.")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="SGLang server (default %(default)s)")
    parser.add_argument("--model", default="default", help="model name to ask for (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="longest reply (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers and replies there")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="keep to the replies of this earlier --json FILE")
    args = parser.parse_args(argv)
    url = args.url.rstrip("/").removesuffix("/v1")
    try:
        recording = json.loads(args.replay.read_text())["turns"] if args.replay else None
        turns = play(url, args.model, args.max_tokens, recording)
    except (OpenAIError, OSError, ValueError) as err:
        print(f"multi_turn_agent: {url}: {err}", file=sys.stderr)
        return 1
    print(table(turns))
    if args.json:
        args.json.write_text(json.dumps({"url": url, "turns": turns}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
