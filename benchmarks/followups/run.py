"""Three questions on one document, the first answered before eviction, through the real server.

    python -m benchmarks.followups.run --samples 20

Each question is a new turn on the conversation so far. What is evicted after question 1 was chosen with question 1
in view; questions 2 and 3 read what is left. One server serves every budget: requests ask for theirs.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

from nexus_sglang.evaluation.recall import RECALL_TASKS, RecallSample
from nexus_sglang.harness.models import ensure_model
from nexus_sglang.harness.server import Server

HERE = Path(__file__).resolve().parent


def converse(server: Server, tokenizer: Any, sample: RecallSample, hint: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask the sample's questions one after the other.

    Args:
        server: to ask.
        tokenizer: of its model.
        sample: passage and questions.
        hint: custom_params of every request.

    Returns:
        A row per question.
    """
    ids = tokenizer.encode(sample.passage)
    rows = []
    for turn, question in enumerate(sample.questions, start=1):
        ids = ids + tokenizer.encode(question.text)
        wanted = tokenizer.encode(question.answer)
        answer = server.generate(ids, len(wanted), custom=hint)
        held = answer["meta_info"]["nexus"][0]
        rows.append(
            {
                "seed": sample.seed,
                "turn": turn,
                "right": answer["output_ids"] == wanted,
                "prompt": len(ids),
                "cached": answer["meta_info"]["cached_tokens"],
                "resident_share": round(held["resident"] / held["logical"], 4),
            }
        )
        ids = ids + wanted  # the conversation goes on with the right answer, so that turns stay comparable
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--first-seed", type=int, default=7000)
    parser.add_argument("--policy", default="nexus")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    options = parser.parse_args(argv)

    from transformers import AutoTokenizer

    model = str(ensure_model("smollm2-135m"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    hints: dict[str, dict[str, Any]] = {
        "full": {"kv_evict": False},
        "0.5": {"kv_budget": 0.5},
        "0.2": {"kv_budget": 0.2},
        "0.1": {"kv_budget": 0.1},
    }
    systems: dict[str, list] = {name: [] for name in hints}
    flags = ("--kv-policy", options.policy, "--max-total-tokens", "16384", "--chunked-prefill-size", "4096")
    with Server(model, *flags, "--max-running-requests", "4") as server:
        for seed in range(options.first_seed, options.first_seed + options.samples):
            sample = RECALL_TASKS["multi-key"](seed, options.tokens, lambda text: len(tokenizer.encode(text)))
            for name, hint in hints.items():
                systems[name] += converse(server, tokenizer, sample, hint)
            server.flush()
            print(f"{seed - options.first_seed + 1}/{options.samples}", flush=True)
    table = {
        name: {
            f"question {turn}": sum(r["right"] for r in rows if r["turn"] == turn) / options.samples
            for turn in (1, 2, 3)
        }
        for name, rows in systems.items()
    }
    command = f"python -m benchmarks.followups.run --samples {options.samples} --tokens {options.tokens}"
    result = {
        "command": f"{command} --first-seed {options.first_seed} --policy {options.policy}",
        "policy": options.policy,
        "machine": f"{platform.machine()}, CPU",
        "samples": options.samples,
        "exact_match": table,
        "rows": systems,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
