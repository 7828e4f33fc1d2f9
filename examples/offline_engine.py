"""``sgl.Engine`` with eviction and no server.

    python examples/offline_engine.py --model-path $(nexus-sglang model smollm2-135m)

The ``--kv-*`` flags of the server are keywords here: ``kv_policy``, ``kv_budget``, and so on.
"""

from __future__ import annotations

import argparse
import sys

import sglang as sgl
from service_log import service_log


def main(argv: list[str] | None = None) -> int:
    """Generate once; exit status 0 when something was evicted."""
    parser = argparse.ArgumentParser(description="Generate with sgl.Engine under a KV budget.")
    parser.add_argument("--model-path", required=True, help="Hugging Face folder or name")
    parser.add_argument("--kv-budget", default="0.2", help="share of the prompt, or tokens (default %(default)s)")
    args = parser.parse_args(argv)
    with sgl.Engine(
        model_path=args.model_path,
        kv_policy="nexus",
        kv_budget=args.kv_budget,
        max_total_tokens=8192,
        chunked_prefill_size=512,
        max_running_requests=4,
    ) as engine:
        out = engine.generate(
            f"{service_log()}\n\nQuestion: Which disk is full?\nAnswer:",
            {"max_new_tokens": 48, "temperature": 0, "custom_params": {"kv_trace": True}},
        )
    print(f"answer: {' '.join(out['text'].split())}")
    held = out["meta_info"]["nexus"][0]
    print(f"logical {held['logical']}, resident {held['resident']}, evicted {held['evicted']}, budget {held['budget']}")
    for event in held["trace"]:
        print(f"at length {event['length']}: evicted {event['tokens']} tokens in {len(event['blocks'])} blocks")
    return 0 if held["evicted"] else 1


if __name__ == "__main__":  # the engine starts processes that import this file
    sys.exit(main())
