"""Serving on a GPU, stock SGLang beside nexus at one pool: decode speed, eviction's share of it, memory, largest batch.

    python -m benchmarks.gpu.serving --out benchmarks/gpu/results/serving.json

Needs no download: the model has the shape of an 8B Llama and random weights, which cost what trained ones cost. Both
servers get the same attention backend, pool and prompts. Without a GPU the script can only be rehearsed:
``--shape tiny --backend torch_native --pool 2048 --prompt 256 --decode 64 --batch 2 --crowd 12 --server-flags
"--chunked-prefill-size 256"``.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from nexus_sglang.harness.client import stream_generate
from nexus_sglang.harness.server import Server

SHAPES = {
    "llama-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128_256,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 2048,
    },
}


def make_model(shape: str, folder: str) -> dict[str, Any]:
    """Write a config of this shape for ``--load-format dummy``; returns it."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        max_position_embeddings=131_072, architectures=["LlamaForCausalLM"], dtype="bfloat16", **SHAPES[shape]
    )
    config.save_pretrained(folder)
    return config.to_dict()


def token_bytes(config: dict[str, Any]) -> int:
    """Bytes of keys and values of one token, bf16."""
    head = config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head


def answer(server: Server, prompt: list[int], tokens: int) -> dict[str, Any]:
    """One streamed request of exactly ``tokens`` tokens."""
    first, last, meta = stream_generate(server.url, prompt, max_new_tokens=tokens, ignore_eos=True)
    return {
        "first": first,
        "last": last,
        "tokens": meta["completion_tokens"],
        "retractions": meta.get("num_retractions", 0),
        "held": (meta.get("nexus") or [None])[0],
    }


def phase(server: Server, requests_: int, prompt: int, decode: int, vocabulary: int, seed: int) -> dict[str, Any]:
    """Distinct requests, all at once.

    Args:
        server: to ask.
        requests_: how many.
        prompt: tokens of each prompt.
        decode: tokens of each answer.
        vocabulary: size of the model's.
        seed: of the prompts.

    Returns:
        Among others ``decode_tokens_per_s``, the sum of what each request gains per second after its first token, None
        if they never all ran at once; and ``tokens_per_s`` of everything, prefill included.
    """
    server.flush()
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocabulary // 2, vocabulary - 1) for _ in range(prompt)] for _ in range(requests_)]
    seen = len(server.text())
    begin = time.monotonic()
    with ThreadPoolExecutor(requests_) as threads:
        answers = list(threads.map(lambda ids: answer(server, ids, decode), prompts))
    seconds = time.monotonic() - begin
    log = server.text()[seen:]
    together = max(a["first"] for a in answers) < min(a["last"] for a in answers)
    speed = sum((a["tokens"] - 1) / (a["last"] - a["first"]) for a in answers)
    held = [a["held"] for a in answers if a["held"]]
    result = {
        "requests": requests_,
        "prompt": prompt,
        "decode": decode,
        "decode_tokens_per_s": speed if together else None,
        "tokens_per_s": sum(a["tokens"] for a in answers) / seconds,
        "most_running": max(map(int, re.findall(r"#running-req: (\d+)", log)), default=0),
        "retractions": sum(a["retractions"] for a in answers),
    }
    if held:
        result["resident_tokens_per_sequence"] = sum(h["resident"] for h in held) / len(held)
        result["peak_resident_tokens_per_sequence"] = sum(h["peak_resident"] for h in held) / len(held)
    else:
        result["resident_tokens_per_sequence"] = result["peak_resident_tokens_per_sequence"] = prompt + decode
    return result


def measure(server: Server, config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Decode speed at a fixed batch, then a crowd for the largest batch.

    Args:
        server: to ask.
        config: of the model.
        options: the command line.
    """
    phase(server, 1, options.prompt, 64, config["vocab_size"], seed=0)  # what is compiled or allocated once

    def run(requests_: int, decode: int) -> dict[str, Any]:
        return phase(server, requests_, options.prompt, decode, config["vocab_size"], seed=1)

    result: dict[str, Any] = {"decode": [run(options.batch, decode) for decode in options.decode]}
    result["crowd"] = run(options.crowd, min(options.decode))
    for part in (*result["decode"], result["crowd"]):
        part["kv_bytes_per_sequence"] = part["resident_tokens_per_sequence"] * token_bytes(config)
    return result


def evicting_share(server: Server, config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Of the time of decode passes and what follows them, how much is eviction (``NEXUS_SGLANG_TIMING=1``)."""
    phase(server, 1, options.prompt, 64, config["vocab_size"], seed=0)
    before = server.info()
    phase(server, options.batch, options.prompt, min(options.decode), config["vocab_size"], seed=1)
    after = server.info()
    spent = {k: after[k] - before[k] for k in ("decode_seconds", "decode_eviction_seconds", "eviction_events")}
    share = spent["decode_eviction_seconds"] / (spent["decode_seconds"] + spent["decode_eviction_seconds"])
    return {**spent, "share": share, "requests": options.batch, "decode": min(options.decode)}


def ratios(nexus: dict[str, Any], stock: dict[str, Any]) -> dict[str, float | None]:
    """nexus divided by stock; None where either could not be measured."""

    def over(ours: float | None, theirs: float | None) -> float | None:
        return ours / theirs if ours and theirs else None

    result = {
        f"decode_tokens_per_s_{ours['decode']}": over(ours["decode_tokens_per_s"], theirs["decode_tokens_per_s"])
        for ours, theirs in zip(nexus["decode"], stock["decode"], strict=True)
    }
    for name, key in (("crowd_tokens_per_s", "tokens_per_s"), ("largest_batch", "most_running")):
        result[name] = over(nexus["crowd"][key], stock["crowd"][key])
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--backend", default="flashinfer", help="attention backend of both servers")
    parser.add_argument("--pool", type=int, default=400_000, help="KV slots of both servers")
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--policy", default="nexus")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--decode", type=int, nargs="+", default=[4096, 32_768])
    parser.add_argument("--batch", type=int, default=8, help="requests at once, for decode speed")
    parser.add_argument("--crowd", type=int, default=160, help="requests at once, for the largest batch")
    parser.add_argument("--server-flags", default="", help="more flags for both servers")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for, and write it."""
    options = parse(argv)
    if options.backend != "torch_native" and not torch.cuda.is_available():
        print("without a GPU only --backend torch_native runs, as a rehearsal", file=sys.stderr)
        return 2
    folder = tempfile.mkdtemp(prefix="nexus-shape-")
    config = make_model(options.shape, folder)
    flags = (
        *("--load-format", "dummy"),
        "--skip-tokenizer-init",
        *("--attention-backend", options.backend),
        *("--max-total-tokens", str(options.pool)),
        *("--max-running-requests", str(options.crowd)),
        *("--decode-log-interval", "8"),
        *shlex.split(options.server_flags),
    )
    ours = ("--kv-policy", options.policy, "--kv-budget", options.budget)
    rehearsal = f"{platform.machine()}, CPU (a rehearsal)"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else rehearsal
    result: dict[str, Any] = {
        "command": "python -m benchmarks.gpu.serving " + shlex.join(sys.argv[1:] if argv is None else argv),
        "device": device,
        "kv_bytes_per_token": token_bytes(config),
        "systems": {},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:  # what is there, should it be cut short
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    for name, own in {"stock": (), "nexus": ours}.items():
        with Server(folder, *flags, *own) as server:
            result["systems"][name] = measure(server, config, options)
            if name == "nexus":
                counters = server.info()
                counters.pop("recent_requests")
                result["systems"][name]["counters"] = counters
                result["query_window_bytes_per_request"] = counters["query_window_bytes"] // (options.crowd + 1)
        save()
    result["nexus_to_stock"] = ratios(*(result["systems"][name] for name in ("nexus", "stock")))
    save()
    with Server(folder, *flags, *ours, env={"NEXUS_SGLANG_TIMING": "1"}) as server:
        result["eviction_in_decode"] = evicting_share(server, config, options)
    save()
    print(json.dumps(result["nexus_to_stock"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
