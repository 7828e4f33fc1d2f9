"""Long answers that together outgrow the pool, stock SGLang beside nexus: retractions, prefill done again, speed.

    python -m benchmarks.sessions.pressure --out benchmarks/sessions/results/pressure.json

Three phases on one server: a few answers that fit (before), many long ones at once (during), the first phase again with
other prompts (after). SGLang admits a request by an estimate of its answer, so it has to take requests back once
answers are as long as they may be. Lengths are fixed with ``min_new_tokens``: with ``ignore_eos`` SGLang would not
estimate.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.sessions.run import STRICT, memory_check
from benchmarks.sessions.workloads import text
from nexus_sglang.harness.client import stream_generate
from nexus_sglang.harness.models import ensure_model
from nexus_sglang.harness.server import Server


def cpu_seconds(server: Server) -> float:
    """CPU time the server's processes have used so far: unlike the clock, it does not count what others do."""
    root = psutil.Process(server.process.pid)
    times = [p.cpu_times() for p in (root, *root.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def answer(server: Server, prompt: list[int], tokens: int) -> dict[str, Any]:
    """One streamed request of exactly ``tokens`` tokens: times of its first and last token, retractions."""
    first, last, meta = stream_generate(server.url, prompt, max_new_tokens=tokens, min_new_tokens=tokens)
    return {
        "first": first,
        "last": last,
        "tokens": meta["completion_tokens"],
        "retractions": meta.get("num_retractions", 0),
    }


def phase(server: Server, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """All prompts at once.

    Args:
        server: to ask.
        prompts: token ids of each.
        tokens: of each answer.

    Returns:
        Counts from answers and log; ``tokens_per_s`` from the first token of any to the last of all, and
        ``cpu_s_per_token`` over the whole phase, its prefill included.
    """
    seen = len(server.text())
    before = cpu_seconds(server)
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda ids: answer(server, ids, tokens), prompts))
    cpu = cpu_seconds(server) - before
    log = server.text()[seen:]
    prefilled = sum(map(int, re.findall(r"Prefill batch.*?#new-token: (\d+)", log)))
    made = sum(a["tokens"] for a in answers)
    seconds = max(a["last"] for a in answers) - min(a["first"] for a in answers)
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": made,
        "prefilled_tokens": prefilled,
        "recomputed_tokens": prefilled - sum(map(len, prompts)),
        "retractions": sum(a["retractions"] for a in answers),
        "requests_retracted": sum(a["retractions"] > 0 for a in answers),
        "retractions_logged": sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log))),
        "most_running": max(map(int, re.findall(r"Decode batch.*?#running-req: (\d+)", log)), default=0),
        "tokens_per_s": (made - len(answers)) / seconds,
        "cpu_s_per_token": cpu / made,
    }


def distinct(tokenizer: Any, count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing, so that whatever is prefilled beyond their length was computed before."""
    rngs = [random.Random(f"{seed}-{i}") for i in range(count)]
    return [[1000 + 100 * seed + i, *tokenizer.encode(text(rng, length))[: length - 1]] for i, rng in enumerate(rngs)]


def measure(server: Server, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Before, during and after pressure.

    Args:
        server: to ask.
        tokenizer: of its model.
        options: the command line.

    Returns:
        The three phases, and ratios between them.
    """
    calm = (options.calm, options.first, options.calm_output)
    many = (options.sessions, options.first, options.output)
    phases = {}
    answer(server, distinct(tokenizer, 1, options.first, 9)[0], 8)  # what is compiled or allocated once
    for seed, (name, (count, length, tokens)) in enumerate({"before": calm, "during": many, "after": calm}.items()):
        print(f"  {name}: {count} requests of {length} + {tokens} tokens", flush=True)
        phases[name] = phase(server, distinct(tokenizer, count, length, seed), tokens)
    ratios = {}
    for name in ("during", "after"):
        ratios[f"tokens_per_s_{name}_to_before"] = round(
            phases[name]["tokens_per_s"] / phases["before"]["tokens_per_s"], 3
        )
        spent = phases[name]["cpu_s_per_token"] / phases["before"]["cpu_s_per_token"]
        ratios[f"cpu_per_token_{name}_to_before"] = round(spent, 3)
    return {"phases": phases, "ratios": ratios}


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pool", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--policy", default="nexus")
    parser.add_argument("--sessions", type=int, default=6, help="requests under pressure, all at once")
    parser.add_argument("--first", type=int, default=150, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=600, help="tokens of an answer under pressure")
    parser.add_argument("--conservativeness", default="1.0", help="SGLang's --schedule-conservativeness, for both")
    parser.add_argument("--calm", type=int, default=2, help="requests before and after")
    parser.add_argument("--calm-output", type=int, default=150, help="tokens of their answers")
    options = parser.parse_args(argv)

    from transformers import AutoTokenizer

    model = str(ensure_model("smollm2-135m"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    flags = (
        *("--max-total-tokens", str(options.pool)),
        *("--chunked-prefill-size", str(options.chunk)),
        *("--max-running-requests", str(options.sessions)),
        *("--schedule-conservativeness", options.conservativeness),
    )
    systems = {"stock": (), "nexus": ("--kv-policy", options.policy, "--kv-budget", options.budget)}
    result: dict[str, Any] = {
        "command": "python -m benchmarks.sessions.pressure " + shlex.join(sys.argv[1:] if argv is None else argv),
        "workload": "pressure",
        "pool": options.pool,
        "budget": options.budget,
        "policy": options.policy,
        "sessions": options.sessions,
        "first": options.first,
        "output": options.output,
        "conservativeness": options.conservativeness,
        "machine": f"{platform.machine()}, CPU",
        "systems": {},
    }
    for name, own in systems.items():
        print(f"{name}: starting", flush=True)
        with Server(model, *flags, *own, env=STRICT) as server:
            measured = measure(server, tokenizer, options)
            measured["memory_check"] = memory_check(server.text())
            if name == "nexus":
                measured["counters"] = server.info()
                measured["counters"].pop("recent_requests")
            result["systems"][name] = measured
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({n: {**s["phases"]["during"], **s["ratios"]} for n, s in result["systems"].items()}, indent=1))
    return int(any(s["memory_check"]["violations"] for s in result["systems"].values()))


if __name__ == "__main__":
    sys.exit(main())
