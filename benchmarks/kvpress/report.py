"""docs/results/kvpress.md from results.json alone: same file, same bytes."""

from __future__ import annotations

import textwrap
from typing import Any

from benchmarks.kvpress.tables import (
    CONTROLS,
    GROUPS,
    PAIRS,
    Answers,
    Pair,
    accuracy,
    agreement,
    by_task,
    controls,
    partial,
    probability,
)

System = tuple[str, str]
"""Side and name of what answered."""


def para(text: str, first: str = "", rest: str = "") -> str:
    """One paragraph, or one item of a list, wrapped."""
    words = " ".join(text.split())
    return textwrap.fill(
        words, 120, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def items(*texts: str) -> str:
    """A list, each item wrapped."""
    return "\n".join(para(text, "- ", "  ") for text in texts)


def render(result: dict[str, Any]) -> str:
    """The page as Markdown.

    Args:
        result: what run.py wrote.
    """
    answers = Answers(result)
    budgets = sorted({r["budget"] for r in result["rows"]} - {1.0})
    low = budgets[0]
    theirs = result["kvpress"]["versions"]
    ours = result["ours"]["versions"]
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


class Comparisons:
    """Right answers of two systems and the sign test between them, at one budget.

    Args:
        answers: of all systems.
        budget: share of the prompt.
    """

    def __init__(self, answers: Answers, budget: float) -> None:
        self.answers = answers
        self.budget = budget

    def __call__(self, one: System, other: System) -> str:
        """The comparison as text."""
        rights = [self.answers.right(*system, self.budget) for system in (one, other)]
        pairs = list(zip(*rights, strict=True))
        p = probability(pairs.count((True, False)), pairs.count((False, True)))
        shown = p if p.startswith("<") else f"= {p}"
        return f"{sum(rights[0])} against {sum(rights[1])} (p {shown})"


def k(name: str) -> System:
    """A system of kvpress."""
    return "kvpress", name


def s(name: str) -> System:
    """A system of ours, through a server."""
    return "ours", name


def o(name: str) -> System:
    """A system of ours, offline."""
    return "offline", name


def _differences(answers: Answers, budget: float, dtype: str) -> list[str]:
    against = Comparisons(answers, budget)
    window = k("snapkv, window 16")
    chunks = k("snapkv, window 16, chunks of 32")
    single = o("snapkv, blocks of 1")
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
