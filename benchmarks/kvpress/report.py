"""docs/results/kvpress.md from results.json alone: same file, same bytes."""

from __future__ import annotations

import math
import textwrap
from typing import Any, NamedTuple

from benchmarks.offline.wilson import wilson
from nexus_sglang.evaluation.intervals import mean_and_error

Z = 1.959964


class Pair(NamedTuple):
    """A line of the two main tables: kvpress's system and ours."""

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
    """The rows of a result file by (side, system, budget), each in the order of the prompts."""

    def __init__(self, result: dict[str, Any]):
        self.prompts = result["prompts"]
        rows = {(r["side"], r["system"], r["budget"], r["id"]): r for r in result["rows"]}
        keys = dict.fromkeys(key[:3] for key in rows)
        self.rows = {key: [rows[(*key, p["id"])] for p in self.prompts] for key in keys}

    def of(self, side: str, system: str, budget: float) -> list[dict[str, Any]]:
        return self.rows[side, system, budget]

    def right(self, side: str, system: str, budget: float) -> list[bool]:
        """Whether each prompt was answered; every question has one answer, so scores are 0 or 1."""
        return [r["score"] == 1.0 for r in self.of(side, system, budget)]

    def share(self, side: str, system: str, budget: float) -> float:
        right = self.right(side, system, budget)
        return sum(right) / len(right)

    def kept(self, side: str, system: str, budget: float) -> float:
        """Mean over the prompts of tokens kept / prompt tokens."""
        shares = [r["kept"] / p["length"] for r, p in zip(self.of(side, system, budget), self.prompts, strict=True)]
        return sum(shares) / len(shares)

    def cell(self, side: str, system: str, budget: float) -> str:
        right = self.right(side, system, budget)
        low, high = wilson(sum(right), len(right))
        return f"{sum(right) / len(right):.2f} ({low:.2f}-{high:.2f})"

    def pair(self, pair: Pair, budget: float) -> tuple[list[bool], list[bool]]:
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
    p = sign_test(one, other)
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def table(head: list[str], body: list[list[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in body)]


def _lines(budgets: list[float]) -> list[tuple[str, Pair, float]]:
    return [(FULL_CACHE.name, FULL_CACHE, 1.0), *((f"{p.name}, {b:g}", p, b) for p in PAIRS for b in budgets)]


def accuracy(answers: Answers, budgets: list[float]) -> list[str]:
    body = []
    for name, pair, budget in _lines(budgets):
        where = (("kvpress", pair.kvpress, budget), ("ours", pair.ours, budget))
        kept = [f"{answers.kept(*at):.3f}" for at in where]
        body.append([name, *(answers.cell(*at) for at in where), answers.gap(pair, budget), *kept])
    return table(["method and budget", "kvpress", "ours", "ours - kvpress", "kept, kvpress", "kept, ours"], body)


def agreement(answers: Answers, budgets: list[float]) -> list[str]:
    body = []
    for name, pair, budget in _lines(budgets):
        pairs = list(zip(*answers.pair(pair, budget), strict=True))
        counts = [pairs.count(both) for both in ((True, True), (True, False), (False, True), (False, False))]
        same = answers.same(("kvpress", pair.kvpress, budget), ("ours", pair.ours, budget))
        body.append([name, *counts, probability(counts[1], counts[2]), same])
    return table(["method and budget", "both right", "only kvpress", "only ours", "neither", "p", "same text"], body)


def by_task(answers: Answers, budgets: list[float]) -> list[str]:
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
    """A line of the table of controls: where its rows are, and what was chosen how."""

    name: str
    side: str
    system: str
    unit: str
    choice: str
    queries: str


HEAD, LAYER, SHARED = "layer and KV head", "layer", "all layers"
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


def para(text: str, first: str = "", rest: str = "") -> str:
    """One paragraph, or one item of a list, wrapped."""
    words = " ".join(text.split())
    return textwrap.fill(
        words, 120, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def items(*texts: str) -> str:
    return "\n".join(para(text, "- ", "  ") for text in texts)


def render(result: dict[str, Any]) -> str:
    """The page as Markdown.

    Args:
        result: what run.py wrote.
    """
    answers = Answers(result)
    budgets = sorted({r["budget"] for r in result["rows"]} - {1.0})
    low, theirs, ours = budgets[0], result["kvpress"]["versions"], result["ours"]["versions"]
    parts = [
        "# Beside NVIDIA's kvpress",
        *_setting(result, answers, theirs, ours),
        "## What was found",
        _findings(answers, budgets),
        "## Accuracy",
        para("""Share right with its 95 % Wilson interval; the difference over the same prompts with its 95 % interval;
            mean share of the prompt's tokens in the cache after the cut, as measured on both sides."""),
        "\n".join(accuracy(answers, budgets)),
        para("""The same prompts side by side. p: exact two-sided sign test on the prompts that only one side got right.
            Same text: prompts whose whole generated text is the same."""),
        "\n".join(agreement(answers, budgets)),
        "\n".join(by_task(answers, budgets)),
        "## Where the differences come from",
        _about_controls(answers, low),
        "\n".join(controls(answers, low)),
        *_differences(answers, low, result["dtype"]),
        "## Doing it again",
        *_again(result, theirs, ours),
    ]
    return "\n\n".join(parts) + "\n"


def _setting(result: dict[str, Any], answers: Answers, theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    lengths = [p["length"] for p in answers.prompts]
    counts = {task: sum(p["task"] == task for p in answers.prompts) for task in GROUPS}
    return [
        para(f"""SnapKV, TOVA and StreamingLLM exist in [kvpress](https://github.com/NVIDIA/kvpress), an independent
            implementation on Hugging Face Transformers, and here. Both got the same {len(lengths)} prompts as the same
            token ids, the same weights ({result["model"]}, {result["dtype"]}, CPU) and the same budgets, and answered
            greedily. kvpress {theirs["kvpress"]} with transformers {theirs["transformers"]} and torch
            {theirs["torch"]}; ours through real servers, SGLang {ours["sglang"]} with torch {ours["torch"]}."""),
        para(f"""The prompts are {min(lengths):,} to {max(lengths):,} tokens long and end with the question, so it is
            visible when the cache is cut: {counts["needle"]} `needle` and {counts["multi-key"]} `multi-key` passages of
            the project's tasks, and {len(lengths) - sum(counts.values())} documents of the evaluation suite with one
            question each (`benchmarks/kvpress/prompts.py`; every prompt has a passage of its own). On both sides the
            cut comes after the whole prompt was read: the answer's first token still has the full cache behind it, the
            others what is left. For numbers that first token is a space; for the four answers that are names of towns
            it is the name's beginning. Right: the expected string is in the answer."""),
    ]


def _findings(answers: Answers, budgets: list[float]) -> str:
    low, high = budgets
    n = len(answers.prompts)
    same = answers.same(("kvpress", "full", 1.0), ("ours", "full", 1.0))

    def both(pair: Pair, budget: float) -> str:
        return " and ".join(str(sum(side)) for side in answers.pair(pair, budget))

    shipped, windowed, tova, streaming = PAIRS
    kept = [f"{answers.kept(side, 'tova', low):.3f}" for side in ("ours", "kvpress")]
    return items(
        f"**Without eviction the two stacks agree**: the same text for {same} of {n} prompts.",
        f"""**SnapKV as shipped is not one setting**: kvpress looks at the last 64 queries, we at the last 16. With
            questions of 18 to 27 tokens that decides it: {both(shipped, low)} of {n} right (kvpress and ours) at
            {low:g}, {both(shipped, high)} at {high:g}.""",
        f"""**With 16 queries on both sides no difference shows**: {both(windowed, low)} at {low:g},
            {both(windowed, high)} at {high:g}. TOVA: {both(tova, low)}, and {both(tova, high)}. {n} prompts cannot tell
            these from chance. Ours hold fewer tokens: {kept[0]} of the prompt against {kept[1]} at {low:g}.""",
        f"""**StreamingLLM is nominally behind here**: {both(streaming, low)} at {low:g}, {both(streaming, high)} at
            {high:g}. Whole blocks leave it fewer recent tokens; on single tokens the two are the same.""",
        """**Our `snapkv` is not the best form of SnapKV**: chunks of 32 chosen per layer, and one choice by the maximum
            over heads instead of the mean, both get more right (below).""",
    )


def _about_controls(answers: Answers, budget: float) -> str:
    texts = [
        f"{answers.same(('offline', system, budget), ('ours', system, budget))} (`{system}`)"
        for system in ("snapkv", "tova", "streaming-llm")
    ]
    return para(f"""One setting changed at a time. kvpress's ChunkKV wraps another press and keeps whole chunks, one
        choice for all heads of a layer. Rows in bold are the servers'; our others were chosen offline by the same
        policy and selection code (`benchmarks/kvpress/controls.py`). Where both exist, offline and server wrote the
        same text for {", ".join(texts)} of {len(answers.prompts)} prompts.""")


def _differences(answers: Answers, budget: float, dtype: str) -> list[str]:
    def against(one: tuple[str, str], other: tuple[str, str]) -> str:
        """Right answers of both and the sign test between them."""
        pairs = list(zip(answers.right(*one, budget), answers.right(*other, budget), strict=True))
        p = probability(pairs.count((True, False)), pairs.count((False, True)))
        return (
            f"{sum(a for a, _ in pairs)} against {sum(b for _, b in pairs)} (p {p if p.startswith('<') else '= ' + p})"
        )

    k, s, o = (lambda system, side=side: (side, system) for side in ("kvpress", "ours", "offline"))
    window, chunks, single = k("snapkv, window 16"), k("snapkv, window 16, chunks of 32"), o("snapkv, blocks of 1")
    n = len(answers.prompts)
    streaming = answers.same((*o("streaming-llm, blocks of 1"), budget), (*k("streaming-llm"), budget))
    return [
        para(f"""Each comparison: right answers of {n}, and p of the sign test. {len(CONTROLS)} rows are compared with
            each other, so a single p of 0.03 proves little."""),
        items(
            f"""**How many queries judge** matters most. 64 instead of 16 adds some 40 queries from the filler before
                the question, and their mean drowns the question's: kvpress {against(k("snapkv"), window)}, ours
                {against(o("snapkv, window 64"), o("snapkv"))}. Longer questions, or other text after the question, may
                want more queries; that was not measured.""",
            f"""**Tokens or blocks of 32.** On single tokens a number survives in part. Of the numbers that the full
                cache got right and SnapKV with 16 queries got wrong, {partial(answers, *window, budget)} begin with two
                right digits in kvpress and {partial(answers, *s("snapkv"), budget)} in ours. Whole blocks do no worse
                although they hold fewer tokens: in kvpress, chunks against tokens, SnapKV with 16 queries
                {against(chunks, window)}, TOVA {against(k("tova, chunks of 32"), k("tova"))}; in ours, blocks of 32
                against blocks of 1, `snapkv` {against(o("snapkv"), single)}, `tova`
                {against(o("tova"), o("tova, blocks of 1"))}. The price is room: a
                sequence is cut to at most its budget in whole blocks, and the forced blocks are whole as well.""",
            f"""**A choice per layer or one for all.** SGLang's cache has one table for all layers, so what one layer
                needs has to stay in all. SnapKV pays for that: chunks per layer against ours
                {against(chunks, s("snapkv"))}; tokens per layer and head against ours on tokens
                {against(window, single)}. TOVA does not, as far as this shows: chunks
                {against(k("tova, chunks of 32"), s("tova"))}, tokens {against(k("tova"), o("tova, blocks of 1"))}.""",
            f"""**Mean or maximum over heads.** kvpress's SnapKV averages the 3 query heads of a KV head and its TOVA
                the 9 of a layer; our `snapkv` and `tova` average all 270 of the model, which hides the few that
                retrieve. With the maximum in its place `snapkv` gets
                {against(o("snapkv, maximum over heads"), s("snapkv"))}, near the form per layer, and `tova`
                {against(o("tova, maximum over heads"), s("tova"))}. `nexus` uses maxima for this reason
                ([design/policies.md](../design/policies.md)).""",
            f"""**What stays in any case.** Ours: the first block of 32 and every block that reaches into the newest 64
                tokens. kvpress: SnapKV its window, TOVA the last token, StreamingLLM the first 4. That explains
                StreamingLLM: with blocks of 1 ours has 4 sinks as well, {streaming} of {n} answers are kvpress's word
                for word, and {against(o("streaming-llm, blocks of 1"), k("streaming-llm"))} are
                right. Neither side rotates keys anew.""",
            """**Pooling.** kvpress's SnapKV averages scores over 5 neighbouring tokens; in ours the sum over a block
                takes its place. This was not varied on its own.""",
            """**Smallest budget.** Ours never cuts below 128 tokens. At these lengths every budget is larger.""",
            f"""**Rounding.** kvpress scores in {dtype}, ours in float32 from {dtype} queries and keys. Close calls fall
                differently, also between our server and our offline form, whose passes differ in the last bits.""",
        ),
        para("""One small model, one length, short answers, the question always at the end: differences under 0.15 are
            noise here. Hidden questions are another matter ([policies.md](policies.md))."""),
    ]


def _again(result: dict[str, Any], theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    torch = theirs["torch"].partition("+")[0]
    install = f"kvpress=={theirs['kvpress']} transformers=={theirs['transformers']} torch=={torch}"
    prompts, reference, run = result["commands"].values()
    return [
        para(f"""kvpress {theirs["kvpress"]} needs transformers below 5.3 and SGLang {ours["sglang"]} pins transformers
            {ours["transformers"]}: they cannot share an environment, so there is no `kvpress` extra. It gets an
            environment of its own, in which `reference.py` runs; that file imports nothing of this project. `FOLDER` is
            what `nexus-sglang model smollm2-135m` prints."""),
        "\n".join(
            f"    {line}"
            for line in (
                "python3.11 -m venv kvpress-venv",
                f"kvpress-venv/bin/pip install {install}",
                prompts,
                f"kvpress-venv/bin/{reference}",
                run,
            )
        ),
        para(f"""A press does not change the pass it is applied in, so `reference.py` reads each prompt once for all
            presses; for the first {result["kvpress"]["checked_alone"]} prompts it also applied every press alone, as
            kvpress documents it, and required the same answers. Attention is `{result["kvpress"]["attention"]}`: the
            presses compute the window's attention themselves. Both sides ran on one thread. `python -m benchmarks.pages
            kvpress.md` writes this page from `benchmarks/kvpress/results.json`."""),
    ]
