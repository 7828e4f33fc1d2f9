"""Replay multi-turn sessions against stock SGLang and nexus at the same pool; write JSON and a plot.

    python -m benchmarks.sessions.run generated --sessions 6 --turns 6 --first 1500 --step 200
    python -m benchmarks.sessions.run hashes TRACE.json [TRACE.json ...] --scale 0.05
    python -m benchmarks.sessions.run chats DIALOGUES.jsonl

SGLang checks its own accounting after every pass of both systems (``STRICT``); what it found goes into the result.
Times are of one machine and one run: compare their ratios only.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from benchmarks.sessions.workloads import Session, from_chats, from_hash_trace, generated
from nexus_sglang.harness.models import ensure_model
from nexus_sglang.harness.server import Server
from nexus_sglang.prefixes import common_prefix

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2"}


def ask(server: Server, prompt: list[int], tokens: int) -> dict[str, Any]:
    """One streamed greedy request: prompt and cached tokens, seconds to the first token, retractions."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "stream": True, "sampling_params": sampling}
    begin = time.monotonic()
    first = None
    last: dict[str, Any] = {}
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=900) as answer:
        if answer.status_code != 200:
            return {"error": answer.text[:200], "prompt": len(prompt)}
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                first = first or time.monotonic() - begin
                last = json.loads(line[6:])
    if "meta_info" not in last:
        return {"error": str(last.get("error", last))[:200], "prompt": len(prompt)}
    meta = last["meta_info"]
    held = (meta.get("nexus") or [{}])[-1]
    return {
        "prompt": len(prompt),
        "cached": meta["cached_tokens"],
        "ttft": first,
        "retractions": meta.get("num_retractions", 0),
        "resident": held.get("resident"),
    }


def memory_check(log: str) -> dict[str, Any]:
    """What SGLang's own accounting said in a server log: passes checked while busy, and complaints."""
    complaints = re.findall(r"Mem Leak Detected|memory leak detected|hit an exception", log, re.IGNORECASE)
    return {"environment": STRICT, "checks": log.count("[Mem Check (BUSY)]"), "violations": len(complaints)}


def replay(server: Server, sessions: list[Session], parallel: int) -> list[dict[str, Any]]:
    """Sessions take turns, ``parallel`` requests at a time: every turn of depth d comes before any of depth d + 1."""
    rows = []
    for depth in range(max(map(len, sessions))):
        due = [(i, s) for i, s in enumerate(sessions) if depth < len(s)]
        turns = [session[depth] for _, session in due]
        with ThreadPoolExecutor(parallel) as threads:
            answers = threads.map(lambda turn: ask(server, turn.prompt, turn.output), turns)
            for (i, session), answer in zip(due, answers, strict=True):
                seen = common_prefix(session[depth - 1].prompt, session[depth].prompt) if depth else 0
                rows.append({"session": i, "depth": depth, "seen": seen, **answer})
        print(f"  depth {depth}: {len(due)} requests", flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Hit rate by depth, tokens computed again, retractions, median time to first token after the first turn."""
    good = [r for r in rows if "error" not in r]
    by_depth: dict[int, list[float]] = defaultdict(list)
    for r in good:
        by_depth[r["depth"]].append(r["cached"] / r["prompt"])
    later = [r["ttft"] for r in good if r["depth"]]
    again = sum(max(0, r["seen"] - r["cached"]) for r in good)
    return {
        "requests": len(rows),
        "refused": len(rows) - len(good),
        "hit_rate_by_depth": {d: round(statistics.mean(v), 4) for d, v in sorted(by_depth.items())},
        "recomputed_tokens": again,
        "prompt_tokens": sum(r["prompt"] for r in good),
        "recomputed_share": round(again / max(1, sum(r["prompt"] for r in good)), 4),
        "retractions": sum(r["retractions"] for r in good),
        "median_ttft_after_first_turn": round(statistics.median(later), 3) if later else None,
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Hit rate by turn, both systems.

    Args:
        result: what was measured.
        path: of the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, system in result["systems"].items():
        rates = system["summary"]["hit_rate_by_depth"]
        axes.plot([int(d) + 1 for d in rates], list(rates.values()), marker="o", label=name)
    axes.set(xlabel="turn", ylabel="cached share of the prompt", ylim=(-0.02, 1.02))
    axes.set_title(f"{result['workload']}, pool {result['pool']} tokens")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def read_workload(options: argparse.Namespace, tokenizer: Any) -> list[Session]:
    """The sessions that the command line names."""
    if options.kind == "generated":
        return generated(
            tokenizer, options.sessions, options.turns, options.first, options.step, options.seed, options.output
        )
    if options.kind == "chats":
        return from_chats(options.paths[0], tokenizer, options.limit, options.longest)
    return [
        session
        for path in options.paths
        for session in from_hash_trace(path, tokenizer, options.scale, options.limit, options.longest)
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["generated", "hashes", "chats"])
    parser.add_argument("paths", nargs="*", type=Path, help="recorded sessions (hashes, chats)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; the plot goes beside it")
    parser.add_argument("--pool", type=int, default=4096, help="KV slots of both systems")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--policy", default="nexus")
    parser.add_argument("--parallel", type=int, default=2, help="requests in flight")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--first", type=int, default=1500, help="tokens of the first turn")
    parser.add_argument("--output", type=int, default=8, help="tokens generated a turn (generated sessions)")
    parser.add_argument("--step", type=int, default=200, help="tokens a turn adds at most")
    parser.add_argument("--scale", type=float, default=0.05, help="trace tokens to tokens here")
    parser.add_argument("--limit", type=int, default=12, help="requests (chats: dialogues) read per file")
    parser.add_argument("--longest", type=int, default=3500, help="longer prompts are left out")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Replay on both systems and write results and plot."""
    options = parse(argv)

    from transformers import AutoTokenizer

    model = str(ensure_model("smollm2-135m"))
    sessions = read_workload(options, AutoTokenizer.from_pretrained(model))
    pool = (
        *("--max-total-tokens", str(options.pool)),
        *("--chunked-prefill-size", str(options.chunk)),
        *("--max-running-requests", "4"),
    )
    systems = {"stock": (), "nexus": ("--kv-policy", options.policy, "--kv-budget", options.budget)}
    names = [p.name for p in options.paths]
    read = {str(p): p.name for p in options.paths}
    arguments = [read.get(str(Path(a)), a) for a in (sys.argv[1:] if argv is None else argv)]
    result: dict[str, Any] = {
        "command": "python -m benchmarks.sessions.run " + shlex.join(arguments),
        "workload": options.kind if not names else f"{options.kind}: {', '.join(names)}",
        "pool": options.pool,
        "budget": options.budget,
        "policy": options.policy,
        "sessions": len(sessions),
        "longest_prompt": max(len(t.prompt) for s in sessions for t in s),
        "machine": f"{platform.machine()}, CPU",
        "systems": {},
    }
    for name, flags in systems.items():
        print(f"{name}: starting", flush=True)
        with Server(model, *pool, *flags, env=STRICT) as server:
            rows = replay(server, sessions, options.parallel)
            checked = memory_check(server.text())
            result["systems"][name] = {"summary": summary(rows), "memory_check": checked, "rows": rows}
            if name == "nexus":
                info = server.info()
                info.pop("recent_requests")
                result["systems"][name]["counters"] = info
    stock, ours = (result["systems"][n]["summary"] for n in ("stock", "nexus"))
    if stock["median_ttft_after_first_turn"] and ours["median_ttft_after_first_turn"]:
        ratio = ours["median_ttft_after_first_turn"] / stock["median_ttft_after_first_turn"]
        result["ttft_ratio_nexus_to_stock"] = round(ratio, 3)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    plot(result, options.out.with_suffix(".png"))
    print(json.dumps({n: s["summary"] for n, s in result["systems"].items()}, indent=1))
    return int(any(s["memory_check"]["violations"] for s in result["systems"].values()))


if __name__ == "__main__":
    sys.exit(main())
