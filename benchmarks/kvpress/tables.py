"""The rows of results.json, and the tables of docs/results/kvpress.md made from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.offline.wilson import wilson
from nexus_sglang.evaluation.intervals import mean_and_error

Z = 1.959964


class Pair(NamedTuple):
    """A line of the two main tables.

    Attributes:
        name: as shown.
        kvpress: its system.
        ours: our system.
    """

    name: str
    kvpress: str
    ours: str


PAIRS = (
    Pair("SnapKV as shipped", "snapkv", "snapkv"),
    Pair("SnapKV, window 16 on both", "snapkv, window 16", "snapkv"),
    Pair("TOVA", "tova", "tova"),
    Pair("StreamingLLM", "streaming-llm", "streaming-llm"),
)
FULL_CACHE = Pair("full cache", "full", "full")
SIDES = ("kvpress", "ours")
GROUPS = {"needle": ("needle",), "multi-key": ("multi-key",)}
"""Tasks shown on their own; all others are questions on documents of ``evaluation.documents``."""


class Answers:
    """The rows of a result file by (side, system, budget), each in the order of the prompts.

    Args:
        result: the file.
    """

    def __init__(self, result: dict[str, Any]) -> None:
        self.prompts = result["prompts"]
        rows = {(r["side"], r["system"], r["budget"], r["id"]): r for r in result["rows"]}
        keys = dict.fromkeys(key[:3] for key in rows)
        self.rows = {key: [rows[(*key, p["id"])] for p in self.prompts] for key in keys}

    def of(self, side: str, system: str, budget: float) -> list[dict[str, Any]]:
        """Rows in the order of the prompts."""
        return self.rows[side, system, budget]

    def right(self, side: str, system: str, budget: float) -> list[bool]:
        """Whether each prompt was answered; every question has one answer, so scores are 0 or 1."""
        return [r["score"] == 1.0 for r in self.of(side, system, budget)]

    def share(self, side: str, system: str, budget: float) -> float:
        """Share right."""
        right = self.right(side, system, budget)
        return sum(right) / len(right)

    def kept(self, side: str, system: str, budget: float) -> float:
        """Mean over the prompts of tokens kept / prompt tokens."""
        shares = [r["kept"] / p["length"] for r, p in zip(self.of(side, system, budget), self.prompts, strict=True)]
        return sum(shares) / len(shares)

    def cell(self, side: str, system: str, budget: float) -> str:
        """Share right with its interval, as text."""
        right = self.right(side, system, budget)
        low, high = wilson(sum(right), len(right))
        return f"{sum(right) / len(right):.2f} ({low:.2f}-{high:.2f})"

    def pair(self, pair: Pair, budget: float) -> tuple[list[bool], list[bool]]:
        """Whether kvpress and ours answered each prompt."""
        return self.right("kvpress", pair.kvpress, budget), self.right("ours", pair.ours, budget)

    def gap(self, pair: Pair, budget: float) -> str:
        """Ours minus kvpress over the same prompts, with its 95 % interval."""
        gaps = [b - a for a, b in zip(*self.pair(pair, budget), strict=True)]
        mean, error = mean_and_error(gaps, range(len(gaps)))
        return f"{mean:+.2f} ± {Z * error:.2f}"

    def same(self, one: tuple[str, str, float], other: tuple[str, str, float]) -> int:
        """Prompts with the same text from both."""
        return sum(a["text"] == b["text"] for a, b in zip(self.rows[one], self.rows[other], strict=True))


def sign_test(one: int, other: int) -> float:
    """Two-sided exact probability of a split this uneven or more, were both sides equally good."""
    n = one + other
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(one, other) + 1)) / 2**n)


def probability(one: int, other: int) -> str:
    """The sign test as text."""
    p = sign_test(one, other)
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def table(head: list[str], body: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table; the first column is text, the others numbers."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in body)]


def _lines(budgets: list[float]) -> list[tuple[str, Pair, float]]:
    return [(FULL_CACHE.name, FULL_CACHE, 1.0), *((f"{p.name}, {b:g}", p, b) for p in PAIRS for b in budgets)]


def accuracy(answers: Answers, budgets: list[float]) -> list[str]:
    """Share right, the difference, and tokens kept, by method and budget."""
    body = []
    for name, pair, budget in _lines(budgets):
        where = (("kvpress", pair.kvpress, budget), ("ours", pair.ours, budget))
        kept = [f"{answers.kept(*at):.3f}" for at in where]
        body.append([name, *(answers.cell(*at) for at in where), answers.gap(pair, budget), *kept])
    return table(["method and budget", "kvpress", "ours", "ours - kvpress", "kept, kvpress", "kept, ours"], body)


def agreement(answers: Answers, budgets: list[float]) -> list[str]:
    """How many prompts both, one or neither side got right."""
    body = []
    for name, pair, budget in _lines(budgets):
        pairs = list(zip(*answers.pair(pair, budget), strict=True))
        counts = [pairs.count(both) for both in ((True, True), (True, False), (False, True), (False, False))]
        same = answers.same(("kvpress", pair.kvpress, budget), ("ours", pair.ours, budget))
        body.append([name, *counts, probability(counts[1], counts[2]), same])
    return table(["method and budget", "both right", "only kvpress", "only ours", "neither", "p", "same text"], body)


def by_task(answers: Answers, budgets: list[float]) -> list[str]:
    """Right answers by task."""
    named = {task for tasks in GROUPS.values() for task in tasks}
    groups = {**GROUPS, "documents": tuple({p["task"] for p in answers.prompts} - named)}
    at = {name: [i for i, p in enumerate(answers.prompts) if p["task"] in tasks] for name, tasks in groups.items()}
    body = []
    for name, pair, budget in _lines(budgets):
        sides = answers.pair(pair, budget)
        body.append(
            [name, *(" / ".join(str(sum(side[i] for i in places)) for side in sides) for places in at.values())]
        )
    return table(["right, kvpress / ours", *(f"{name} (of {len(places)})" for name, places in at.items())], body)


class Control(NamedTuple):
    """A line of the table of controls.

    Attributes:
        name: as shown.
        side: where its rows are.
        system: where its rows are.
        unit: what is kept or evicted as a whole.
        choice: what one choice is made for.
        queries: how many judge.
    """

    name: str
    side: str
    system: str
    unit: str
    choice: str
    queries: str


HEAD = "layer and KV head"
LAYER = "layer"
SHARED = "all layers"
"""What one choice of tokens or blocks is made for."""
CONTROLS = (
    Control("kvpress SnapKV", "kvpress", "snapkv", "token", HEAD, "64"),
    Control("kvpress SnapKV, our window", "kvpress", "snapkv, window 16", "token", HEAD, "16"),
    Control("kvpress ChunkKV on SnapKV", "kvpress", "snapkv, chunks of 32", "32 tokens", LAYER, "64"),
    Control(
        "kvpress ChunkKV on SnapKV, our window", "kvpress", "snapkv, window 16, chunks of 32", "32 tokens", LAYER, "16"
    ),
    Control("ours `snapkv`, blocks of 1", "offline", "snapkv, blocks of 1", "token", SHARED, "16"),
    Control("**ours `snapkv`**", "ours", "snapkv", "32 tokens", SHARED, "16"),
    Control("ours `snapkv`, their window", "offline", "snapkv, window 64", "32 tokens", SHARED, "64"),
    Control("ours `snapkv`, maximum over heads", "offline", "snapkv, maximum over heads", "32 tokens", SHARED, "16"),
    Control("kvpress TOVA", "kvpress", "tova", "token", LAYER, "1"),
    Control("kvpress ChunkKV on TOVA", "kvpress", "tova, chunks of 32", "32 tokens", LAYER, "1"),
    Control("ours `tova`, blocks of 1", "offline", "tova, blocks of 1", "token", SHARED, "1"),
    Control("**ours `tova`**", "ours", "tova", "32 tokens", SHARED, "1"),
    Control("ours `tova`, maximum over heads", "offline", "tova, maximum over heads", "32 tokens", SHARED, "1"),
    Control("kvpress StreamingLLM", "kvpress", "streaming-llm", "token", SHARED, "none"),
    Control("ours `streaming-llm`, blocks of 1", "offline", "streaming-llm, blocks of 1", "token", SHARED, "none"),
    Control("**ours `streaming-llm`**", "ours", "streaming-llm", "32 tokens", SHARED, "none"),
)


def controls(answers: Answers, budget: float) -> list[str]:
    """One setting changed at a time."""
    body = []
    for c in CONTROLS:
        at = (c.side, c.system, budget)
        body.append([c.name, c.unit, c.choice, c.queries, answers.cell(*at), f"{answers.kept(*at):.3f}"])
    return table([f"at budget {budget:g}", "unit", "one choice for", "queries", "right", "kept"], body)


def partial(answers: Answers, side: str, system: str, budget: float) -> str:
    """Of the numbers that the full cache got right and this one wrong: how many begin with two right digits."""
    begun = wrong = 0
    whole = zip(answers.prompts, answers.right("kvpress", "full", 1.0), strict=True)
    for (prompt, known), r in zip(whole, answers.of(side, system, budget), strict=True):
        answer = prompt["answers"][0]
        if known and answer.isdigit() and r["score"] < 1:
            wrong += 1
            begun += r["text"].strip().startswith(answer[:2])
    return f"{begun} of {wrong}"
