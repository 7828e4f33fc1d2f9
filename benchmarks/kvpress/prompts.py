"""Prompts for both sides: passage and question in one, as token ids, so that no tokenizer stands between them.

    python -m benchmarks.kvpress.prompts prompts.jsonl

One line each: ``id``, ``task``, ``seed``, ``ids``, ``answers``, ``tokens`` (most that the answer may take), ``score``
("all" or "part", see nexus_sglang/evaluation/scoring.py). Every prompt has a passage of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nexus_sglang.evaluation.documents import make_document
from nexus_sglang.evaluation.recall import RECALL_TASKS
from nexus_sglang.evaluation.scoring import match_all, match_part

TOKENS = 1024
FIRST_SEED = 310_000
SCORES = {"all": match_all, "part": match_part}
RECALL = {"needle": 12, "multi-key": 12}
"""Prompts per task of ``evaluation.recall``; of a passage with several questions one is asked."""
DOCUMENTS = ("single-number", "multi-key-prose", "multi-key-lines", "qa-one-passage")
DOCUMENTS_EACH = 4
"""Prompts per family of ``evaluation.documents``: four with one short answer."""

Encode = Callable[[str], list[int]]


def make_prompts(encode: Encode) -> Iterator[dict[str, Any]]:
    """All prompts in order; the same ``encode`` (text to token ids) gives the same ones."""

    def length(text: str) -> int:
        return len(encode(text))

    for task, count in RECALL.items():
        for seed in range(FIRST_SEED, FIRST_SEED + count):
            sample = RECALL_TASKS[task](seed, TOKENS, length)
            question = sample.questions[seed % len(sample.questions)]
            ids = encode(sample.passage) + encode(question.text)
            yield _prompt(task, seed, ids, [question.answer.strip()], length(question.answer), "all")
    for i, task in enumerate(DOCUMENTS):
        for seed in range(FIRST_SEED + 100 * (i + 1), FIRST_SEED + 100 * (i + 1) + DOCUMENTS_EACH):
            document = make_document(seed, TOKENS, length)
            asked = next(question for question in document.questions if question.task == task)
            score = next(name for name, function in SCORES.items() if function is asked.score)
            ids = encode(document.text) + encode(asked.text)
            yield _prompt(task, seed, ids, list(asked.answers), asked.tokens, score)


def _prompt(task: str, seed: int, ids: list[int], answers: list[str], tokens: int, score: str) -> dict[str, Any]:
    name = f"{task} {seed}"
    return {"id": name, "task": task, "seed": seed, "answers": answers, "tokens": tokens, "score": score, "ids": ids}


def digest(prompts: list[dict[str, Any]]) -> str:
    """SHA-256 over the prompts, the same for the same token ids, answers and lengths."""
    return hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest()


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """What this program wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(argv: list[str] | None = None) -> int:
    """Write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer: a folder or a name")
    options = parser.parse_args(argv)

    from transformers import AutoTokenizer

    from nexus_sglang.harness.models import ensure_model

    tokenizer = AutoTokenizer.from_pretrained(ensure_model(options.model))
    prompts = list(make_prompts(lambda text: tokenizer.encode(text, add_special_tokens=False)))
    options.out.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    sizes = [len(prompt["ids"]) for prompt in prompts]
    print(f"{len(prompts)} prompts of {min(sizes)} to {max(sizes)} tokens, sha256 {digest(prompts)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
