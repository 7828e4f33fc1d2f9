"""How the defaults of ``nexus`` were chosen: which variants keep the block that a question needs.

No answers are decoded, so it is cheap; seeds are apart from those of the table (run.py). Three situations: question
visible, question hidden (one event each, at 10 %, 20 %, 50 %), and a stream: the passage is read 128 tokens at a time
and cut to 20 % of its final length after each step, with no question in sight.

    python -m benchmarks.policies.pilot [--passages 5]     print the table and write pilot.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.offline.choosing import describe_blocks, keep_blocks
from benchmarks.offline.experiment import Contestant
from benchmarks.offline.reader import Prefix, Reader
from benchmarks.policies.common import SHARES, open_reader
from nexus_sglang.config import NexusConfig, TokenAmount
from nexus_sglang.evaluation.recall import RECALL_TASKS, RecallQuestion, RecallSample
from nexus_sglang.evidence.measure import NEEDS
from nexus_sglang.policy import Evidence, make_policy

FIRST_SEED = 600_000
BLOCK = 32
STEP = 128
HEADS = ("top", "mean")
DRAWS = 8
OUT = Path(__file__).with_name("pilot.json")


def variants() -> dict[str, Contestant]:
    """Label to policy; a label of ``nexus`` says what differs from values 0.6, walk 0.5, nothing drawn, 64 recent."""

    def nexus(recent: float = 64, **fields: Any) -> Contestant:
        return Contestant(make_policy("nexus", {"sampled_share": 0, **fields}), TokenAmount(recent))

    out = {f"nexus, values {v}": nexus(value_share=v) for v in (0, 0.3, 0.6, 1.0)}
    out |= {
        f"nexus, {h} over heads, values {v}": nexus(head_reduction=h, value_share=v) for h in HEADS for v in (0, 0.6)
    }
    out |= {f"nexus, walk {w}, values {v}": nexus(walk_weight=w, value_share=v) for w in (0, 2.0) for v in (0, 0.6)}
    for share in (0.1, 0.25, 0.5, 1.0):
        for beta in (1.0, 4.0, 8.0):
            out[f"nexus, {share:.0%} drawn, sharpness {beta:g}"] = nexus(sampled_share=share, sharpness=beta)
    out |= {f"nexus, recent {r:.0%} of budget": nexus(r) for r in (0.25, 0.5)}
    for window in ("max", "last"):
        out[f"max over heads, {window} of window"] = Contestant(
            make_policy("composed", {"head_reduction": "max", "window": window})
        )
    out["max over heads, mean, x key"] = Contestant(make_policy("composed", {"head_reduction": "max", "term": "key"}))
    names = ("nexus-paper", "streaming-llm", "snapkv", "h2o", "keydiff", "defensive", "expected-attention", "random")
    return out | {name: Contestant(make_policy(name, {})) for name in names}


def probe(kind: str) -> SimpleNamespace:
    """Asks for everything under one head reduction."""
    return SimpleNamespace(head_reduction=kind, **dict.fromkeys(NEEDS, True))


def needed_blocks(reader: Reader, sample: RecallSample, question: RecallQuestion) -> set[int]:
    """Numbers of the blocks that hold the answer where the passage gives it to this question."""
    answer = question.answer.strip()
    lead = question.text.split(". ")[-1].split("? ")[-1]  # the words of the fact up to the answer
    at = sample.passage.index(f"{lead} {answer}.") + len(lead) + 1
    offsets = reader.tokenizer(sample.passage, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    return {i // BLOCK for i, (start, end) in enumerate(offsets) if end > at and start < at + len(answer)}


def draws(entry: Contestant) -> Iterator[int]:
    """Seeds to average over: several for what draws, one for what does not."""
    random = getattr(entry.policy, "sampled_share", 0) or entry.policy.name in ("nexus-paper", "random")
    return iter(range(DRAWS if random else 1))


def one_event(prefix: Prefix, entries: dict[str, Contestant], needed: list[set[int]]) -> dict[str, list[float]]:
    """Label -> per share, the share of (question, draw) whose blocks stay."""
    length = len(prefix.ids)
    evidence: dict[str, Evidence] = {}
    identities = prefix.identities(BLOCK)
    out: dict[str, list[float]] = {}
    for label, entry in entries.items():
        kind = entry.policy.head_reduction
        if kind not in evidence:
            evidence[kind] = prefix.measure(probe(kind), BLOCK)
        out[label] = []
        for share in SHARES:
            hits = []
            for seed in draws(entry):
                config = NexusConfig("nexus", TokenAmount(share), recent_tokens=entry.recent, seed=seed)
                budget = config.budget_tokens(length)
                blocks = describe_blocks(length, identities, config, budget, entry.policy.state_width)
                kept, _ = keep_blocks(entry.policy, evidence[kind], blocks, length - budget, BLOCK)
                hits += [blocks_of <= set(kept.tolist()) for blocks_of in needed]
            out[label].append(sum(hits) / len(hits))
    return out


class Stream:
    """One variant reading a passage in steps, evicting after each.

    Args:
        entry: the variant.
        length: of the whole passage, in tokens.
        seed: of the draws.
    """

    def __init__(self, entry: Contestant, length: int, seed: int) -> None:
        self.policy = entry.policy
        self.config = NexusConfig("nexus", TokenAmount(0.2), recent_tokens=entry.recent, seed=seed)
        self.budget = self.config.budget_tokens(length)
        self.resident = torch.zeros(0, dtype=torch.int64)
        self.state = torch.full((-(-length // BLOCK), entry.policy.state_width), math.nan)

    def step(self, prefix: Prefix, identities: torch.Tensor) -> None:
        """Take in what was read since the last step, and evict down to the budget.

        Args:
            prefix: everything read so far.
            identities: int64, one per block of it.
        """
        length = len(prefix.ids)
        seen = int(self.resident[-1]) + 1 if len(self.resident) else 0
        self.resident = torch.cat((self.resident, torch.arange(seen, length)))
        if len(self.resident) <= self.budget:
            return
        blocks = describe_blocks(length, identities, self.config, self.budget, 0, self.resident)
        blocks = blocks._replace(state=self.state[blocks.index])
        evidence = prefix.measure(self.policy, BLOCK, self.resident)
        kept, verdict = keep_blocks(self.policy, evidence, blocks, len(self.resident) - self.budget, BLOCK)
        if verdict.state is not None:
            self.state[blocks.index] = verdict.state.float()
        self.resident = self.resident[torch.isin(self.resident // BLOCK, kept)]


STREAMED = (
    "nexus, values 0", "nexus, values 0.6", "nexus, 10% drawn, sharpness 4", "nexus, 10% drawn, sharpness 8",
    "nexus, 25% drawn, sharpness 4", "nexus, recent 25% of budget", "nexus-paper", "snapkv", "h2o", "keydiff", "random",
)  # fmt: skip


def stream(reader: Reader, ids: list[int], entries: dict[str, Contestant], needed: list[set[int]]) -> dict[str, float]:
    """Label -> share of (question, draw) whose blocks are left at the end."""
    runs = {label: [Stream(entries[label], len(ids), seed) for seed in (0, 1)] for label in STREAMED}
    prefix = None
    for start in range(0, len(ids), STEP):
        prefix = reader.read(ids[start : start + STEP], prefix)
        identities = prefix.identities(BLOCK)
        for pair in runs.values():
            for run in pair:
                run.step(prefix, identities)
    left = {label: [set((run.resident // BLOCK).tolist()) for run in pair] for label, pair in runs.items()}
    return {
        label: sum(want <= have for have in sets for want in needed) / (len(sets) * len(needed))
        for label, sets in left.items()
    }


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=5, help="per task")
    args = parser.parse_args(argv)
    reader = open_reader()
    entries = variants()
    rows: dict[str, dict[str, list]] = {label: {"visible": [], "hidden": [], "stream": []} for label in entries}
    for i in range(args.passages):
        for t, task in enumerate(("multi-key", "variables")):
            sample = RECALL_TASKS[task](FIRST_SEED + 100 * t + i, 1950, lambda text: len(reader.ids(text)))
            passage = reader.read(reader.ids(sample.passage))
            needed = [needed_blocks(reader, sample, question) for question in sample.questions]
            for question, want in zip(sample.questions, needed, strict=True):
                prompt = reader.read(reader.ids(question.text), passage)
                for label, hits in one_event(prompt, entries, [want]).items():
                    rows[label]["visible"].append(hits)
            for label, hits in one_event(passage, entries, needed).items():
                rows[label]["hidden"].append(hits)
            for label, hits in stream(reader, passage.ids, entries, needed).items():
                rows[label]["stream"].append([hits])
            report(rows)
    return 0


def report(rows: dict[str, dict[str, list]]) -> None:
    """Write pilot.json and print it: mean hit rate per share; passages weigh the same, whatever they ask."""

    def mean(hits: list[list[float]]) -> list[float]:
        return [round(sum(column) / len(hits), 3) for column in zip(*hits, strict=True)]

    table = {label: {kind: mean(hits) for kind, hits in kinds.items() if hits} for label, kinds in rows.items()}
    OUT.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in table.items()) + "\n}\n")
    print(OUT.read_text(), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
