"""docs/results/sessions.md from the files of results/ alone: same files, same bytes."""

from __future__ import annotations

from typing import Any

SOURCES = {
    "recorded-agents": "The three files are recorded coding-agent sessions of callanjfox/kv-cache-tester (Apache-2.0): "
    "prompts as hashes of 64-token blocks. They are not in this repository. SHA-256: "
    "848987a2077f2988, 868a0cab70560a5a, cf97d5ab879ed437.",
    "tool-dialogues": "The file holds 16 customer-service dialogues with tool calls of sierra-research/tau-bench "
    '(MIT), one object `{"id": .., "messages": [{"role": .., "content": ..}]}` a line. It is not in this repository. '
    "SHA-256: aae2ae6d514fd4c7.",
}
"""Where recorded workloads come from."""


def section(result: dict[str, Any], name: str) -> list[str]:
    """One workload: what was run, the summary of both systems, hit rate by turn."""
    systems = result["systems"]
    lines = [
        f"## {name}",
        "",
        f"{result['sessions']} sessions, longest prompt {result['longest_prompt']:,} tokens, "
        f"pool {result['pool']:,} tokens, policy `{result['policy']}` at budget {result['budget']}. Command:",
        "",
        f"    {result['command']}",
        "",
        *([SOURCES[name], ""] if name in SOURCES else []),
        "| | " + " | ".join(systems) + " |",
        "| --- | " + " | ".join("---:" for _ in systems) + " |",
    ]
    labels = {
        "requests": "requests",
        "refused": "of them refused",
        "prompt_tokens": "prompt tokens",
        "recomputed_tokens": "prompt tokens computed a second time",
        "recomputed_share": "their share",
        "retractions": "retractions",
    }
    for key, label in labels.items():
        cells = [f"{s['summary'][key]:,}" for s in systems.values()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    rates = {n: s["summary"]["hit_rate_by_depth"] for n, s in systems.items()}
    for depth in sorted({int(d) for r in rates.values() for d in r}):
        cells = [f"{r[str(depth)]:.2f}" if str(depth) in r else "-" for r in rates.values()]
        lines.append(f"| cached share, turn {depth + 1} | " + " | ".join(cells) + " |")
    if "ttft_ratio_nexus_to_stock" in result:
        ratio = result["ttft_ratio_nexus_to_stock"]
        lines += ["", f"Median time to first token after the first turn, nexus to stock: {ratio}."]
    counters = systems["nexus"]["counters"]
    lines += [
        "",
        checks(systems),
        "",
        f"Nexus evicted {counters['tokens_evicted']:,} tokens in {counters['eviction_events']:,} events, thinned "
        f"{counters['tokens_thinned']:,} under pressure, "
        f"dropped {counters['tokens_dropped_with_leaves']:,} with leaves.",
        "",
        f"![{name}](../../benchmarks/sessions/results/{name}.png)",
        "",
    ]
    return lines


def checks(systems: dict[str, Any]) -> str:
    """What SGLang's own memory accounting said."""
    seen = {name: s["memory_check"] for name, s in systems.items()}
    said = "; ".join(
        f"{name}: {check['checks']:,} checks, {check['violations']} violations" for name, check in seen.items()
    )
    (setting,) = {f"{k}={v}" for check in seen.values() for k, v in check["environment"].items()}
    return f"SGLang's accounting, checked after each pass (`{setting}`): {said}."


def pressure(result: dict[str, Any], name: str) -> list[str]:
    """Answers that outgrow the pool: what was taken back, and the speed before, during and after."""
    systems = result["systems"]
    during = {name: s["phases"]["during"] for name, s in systems.items()}
    one = next(iter(during.values()))
    calm = next(iter(systems.values()))["phases"]["before"]
    lines = [
        f"## {name}",
        "",
        f"{one['requests']} prompts of {result['first']} tokens at once, answers of {result['output']} tokens each, "
        f"pool {result['pool']:,} tokens, policy `{result['policy']}` at budget {result['budget']}; before and after, "
        f"{calm['requests']} such prompts with answers of {calm['output_tokens'] // calm['requests']} tokens. Command:",
        "",
        f"    {result['command']}",
        "",
        "SGLang admits a request by an estimate of how long its answer becomes. Where answers are longer, it takes",
        "requests back (retracts them) and computes prompt and answer again. Nexus prices a request by what it can",
        f"hold. Both run with `--schedule-conservativeness {result.get('conservativeness', '1.0')}`, which scales the",
        "estimate (default 1.0).",
        "",
        "| under pressure | " + " | ".join(systems) + " |",
        "| --- | " + " | ".join("---:" for _ in systems) + " |",
    ]
    labels = {
        "retractions_logged": "retractions",
        "requests_retracted": "requests retracted at least once",
        "prompt_tokens": "prompt tokens",
        "prefilled_tokens": "tokens prefilled",
        "recomputed_tokens": "of them computed before",
        "most_running": "most requests running at once (log samples)",
    }
    for key, label in labels.items():
        lines.append(f"| {label} | " + " | ".join(f"{p[key]:,}" for p in during.values()) + " |")
    labels = {
        "cpu_per_token_during_to_before": "CPU time per token, during to before",
        "cpu_per_token_after_to_before": "CPU time per token, after to before",
    }
    for key, label in labels.items():
        lines.append(f"| {label} | " + " | ".join(f"{s['ratios'][key]:.2f}" for s in systems.values()) + " |")
    spent = {name: p["cpu_s_per_token"] for name, p in during.items()}
    speed = (
        f"CPU time per token under pressure, nexus to stock: {spent['nexus'] / spent['stock']:.2f}. CPU time of the "
        "server's processes, prefill included: the clock would count what else the machine did."
    )
    return [*lines, "", speed, "", checks(systems), ""]


def table_of_turns(result: dict[str, Any]) -> list[str]:
    """Cached tokens and seconds to the first token of every request, both systems side by side."""
    stock, ours = ({(r["depth"], r["session"]): r for r in result["systems"][n]["rows"]} for n in ("stock", "nexus"))
    lines = [
        "| turn | session | prompt | cached, stock | cached, nexus | first token s, stock | first token s, nexus |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key in sorted(stock):
        a = stock[key]
        b = ours[key]
        if "error" in a or "error" in b:
            lines.append(
                f"| {key[0] + 1} | {key[1]} | {a['prompt']:,} | {a.get('error', '')} | {b.get('error', '')} | | |"
            )
            continue
        lines.append(
            f"| {key[0] + 1} | {key[1]} | {a['prompt']:,} | {a['cached']:,} | {b['cached']:,} "
            f"| {a['ttft']:.2f} | {b['ttft']:.2f} |"
        )
    return [*lines, ""]


def render(results: dict[str, dict[str, Any]]) -> str:
    """The page as Markdown.

    Args:
        results: what run.py and pressure.py wrote, by the name of the workload.
    """
    lines = [
        "# Multi-turn sessions on a small pool",
        "",
        "Generated by `python -m benchmarks.pages sessions.md` from `benchmarks/sessions/results/`. SmolLM2-135M on a",
        "CPU; both systems replay the same prompts, each turn of a session after the one before. It shows what is",
        "matched, computed again and retracted. It says nothing of answer quality: prompts are recorded, not produced",
        "by the answers. Times are of one run on one machine that did other work as well. The counts repeat, up to the",
        "order in which parallel requests arrive; the times do not. Part of the difference in times is not eviction:",
        "on a prefix hit, the CPU attention of this package computes only the new rows, SGLang's a square of the whole",
        "length.",
        "",
    ]
    for name, result in results.items():
        if result["workload"] == "pressure":
            lines += pressure(result, name)
            continue
        lines += section(result, name)
        if name == "two-sessions":
            lines += table_of_turns(result)
    return "\n".join(lines).rstrip() + "\n"
