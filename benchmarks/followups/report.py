"""docs/results/followups.md from results.json alone: same file, same bytes."""

from __future__ import annotations

from typing import Any


def render(result: dict[str, Any]) -> str:
    """The page as Markdown.

    Args:
        result: what run.py wrote.
    """
    rows = result["rows"]
    tokens = rows["full"][0]["prompt"]
    lines = [
        "# Several questions on one document",
        "",
        f"{result['samples']} documents of about {tokens:,} tokens with three facts, three questions in turn,",
        f"through a real server (SmolLM2-135M, {result['machine']}). Once question 1 is read, the document is cut to",
        "its budget with that question in view; questions 2 and 3 read what is left. The right answer goes into the",
        "conversation after each turn, so that turns can be compared. Exact match; with so few documents,",
        "differences under 0.2 are noise.",
        "",
        f"    {result['command']}",
        "",
        f"| budget (`{result['policy']}`) | resident after the last turn | question 1 | question 2 | question 3 |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, turns in result["exact_match"].items():
        last = [row["resident_share"] for row in rows[name] if row["turn"] == 3]
        cells = " | ".join(f"{share:.2f}" for share in turns.values())
        lines.append(f"| {name} | {sum(last) / len(last):.2f} | {cells} |")
    return "\n".join(lines) + "\n"
