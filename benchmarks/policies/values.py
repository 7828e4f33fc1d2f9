"""How large the share of unusual values in ``nexus`` should be: variants on the evaluation's documents and on filler.

Seeds are apart from those of the other results. Answers are graded as in run.py.

    python -m benchmarks.policies.values     run what values.json lacks (it is saved after every passage)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.offline.experiment import Contestant, Contestants, run_sample
from benchmarks.policies.common import SHARES, open_reader, save
from nexus_sglang.evaluation.documents import make_document
from nexus_sglang.evaluation.recall import RECALL_TASKS, RecallQuestion, RecallSample
from nexus_sglang.policy import make_policy

OUT = Path(__file__).with_name("values.json")
ASKED = ("single", "multi-key", "qa-one")
"""Beginnings of the families whose questions have one answer."""
PLAN = [("documents", 1024, 7300, 12), ("documents", 2048, 8300, 8), ("filler", 2000, 320_000, 4)]
"""(kind, tokens, first seed, passages or seeds)."""


def contestants() -> Contestants:
    """``nexus`` with several shares, and three policies beside it."""
    shares: Contestants = {
        f"nexus, values {v:g}": Contestant(make_policy("nexus", {"value_share": v})) for v in (0, 0.3, 0.6, 1.0)
    }
    return shares | {name: Contestant(make_policy(name, {})) for name in ("morphkv", "snapkv", "random")}


def samples(kind: str, tokens: int, seed: int, count: Callable[[str], int]) -> list[RecallSample]:
    """One document with its questions of one answer, or a passage of two tasks on filler."""
    if kind == "filler":
        return [RECALL_TASKS[task](seed, tokens, count) for task in ("needle", "multi-key")]
    document = make_document(seed, tokens, count)
    asked = [
        RecallQuestion(q.text, f" {q.answers[0]}")
        for q in document.questions
        if q.task.startswith(ASKED) and count(f" {q.answers[0]}") > 1
    ]
    return [RecallSample("document", seed, tokens, document.text, asked)]


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    records = json.loads(OUT.read_text()) if OUT.exists() else []
    reader = open_reader()
    for kind, tokens, first, passages in PLAN:
        name = f"{kind} of {tokens:,} tokens"
        for seed in range(first, first + passages):
            if not any((record["kind"], record["seed"]) == (name, seed) for record in records):
                for sample in samples(kind, tokens, seed, lambda text: len(reader.ids(text))):
                    records += [
                        {"kind": name, **record} for record in run_sample(reader, sample, contestants(), SHARES)
                    ]
                save(records, OUT)
                print(name, seed, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
