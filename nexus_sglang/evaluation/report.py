"""The Markdown report and the plots of one result file; the same file gives the same bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from . import tables
from .plan import FULL
from .tables import FEWEST, SOLVED, Row, Rows


class Report(NamedTuple):
    """What was written.

    Attributes:
        summary: the short form, for the terminal.
        files: report and plots.
    """

    summary: str
    files: list[Path]


SETTING_TEXTS = {
    "hidden": "The document is read and evicted from before any question is known; every question is then a branch "
    "of what is left, as in a later turn or a fork.",
    "visible": "Document and question are one prompt; it is evicted from when the question has been read.",
}


def write_report(folder: Path, head: dict[str, Any], rows: list[Row], document: Path | None = None) -> Report:
    """Write the plots that the rows allow, and the report.

    Args:
        folder: of the result file; the plots go there.
        head: of the result file.
        rows: of the result file.
        document: file of the report; None is report.md in the folder.
    """
    data = Rows(rows)
    path = document or folder / "report.md"
    plots = draw(data, folder)
    links = [Path(os.path.relpath(plot, path.parent)).as_posix() for plot in plots]
    path.write_text(render(head, data, links), encoding="utf-8")
    return Report("\n".join(summary(data)), [path, *plots])


def draw(data: Rows, folder: Path) -> list[Path]:
    """Draw the plots; none when matplotlib is not installed or no documents were run.

    Args:
        data: what was measured.
        folder: for the plots.

    Returns:
        The files.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    from . import plots

    panels = data.documents()
    if not panels or not data.budgets:
        return []
    middle = data.budgets[len(data.budgets) // 2]
    drawn = [plots.accuracy(data, folder / "accuracy.png")]
    if any(setting == "hidden" for setting, _ in panels):
        drawn.append(plots.heat_map(data, middle, folder / "depth.png"))
    setting, length = max(panels, key=lambda p: (len(data.where(kind="document", what=p[0], length=p[1])), p[1]))
    drawn.append(plots.task_bars(data, setting, length, middle, folder / "tasks.png"))
    return drawn


def summary(data: Rows) -> list[str]:
    """The short form of the report, for the terminal."""
    lines = ["What stayed in the cache (requests that saw eviction / requests)", "", *tables.residency(data)]
    for setting in dict.fromkeys(setting for setting, _ in data.documents()):
        lines += ["", f"Recall, question {setting}: mean over {_averaged(data, setting)}", ""]
        lines += tables.means(data, setting)
    for title, kind, make in (
        ("Conversations", "conversation", tables.conversations),
        ("Fidelity to the full cache", "fidelity", tables.fidelity),
        ("Your data", "data", tables.own_data),
    ):
        if data.where(kind=kind):
            lines += ["", title, "", *make(data)]
    return lines


def _averaged(data: Rows, setting: str) -> str:
    if data.has_full(setting):
        return f"the tasks that the full cache solves at {SOLVED:.0%} or better"
    return "all tasks; the full cache was not asked"


def render(head: dict[str, Any], data: Rows, plots: list[str]) -> str:
    """The report as Markdown.

    Args:
        head: of the result file.
        data: its rows.
        plots: links to the plots, as they stand in the report.
    """
    lines = [
        "# Quality under eviction",
        "",
        f"Model {head['model']}, SGLang {head['sglang']}, Python {head['python']}, {head['machine']}; everything",
        "through a real server, greedy. Written by `nexus-sglang eval --report` from a result file; the commands that",
        "filled it are at the end.",
        "",
        f"`{FULL}` is SGLang without eviction. A budget is a share of the prompt, above 1 a count. Scores are in [0,",
        "1]: RULER's string match, and for `rule` whether a word of the language was used.",
        "± is half a 95 % interval (Student's) over documents or conversations; answers about one document count",
        "as one. Fewer than three have no interval.",
        "",
        "## Did eviction run, and what stayed",
        "",
        "Mean share of a sequence's tokens that was resident at its end, and in how many of the requests eviction had",
        "taken place. A cell without any eviction is a control.",
        "",
        *tables.residency(data),
        "",
    ]
    if plots:
        lines += [*(f"![{Path(name).stem}]({name})" for name in plots), ""]
    lines += _documents(data)
    if data.where(kind="conversation"):
        lines += [
            "## Conversations",
            "",
            "`question-1` is visible when the document is first evicted from, 2 and 3 are asked of what is left.",
            "`rule`: a system message asks for a language, ten rounds, halves apart. `fact`: told in the first turn,",
            "asked for after eight tool results. `pinned`: the same with the system message pinned (`kv_pin_tokens`);",
            "`opening`: with the first user message pinned as well, as `--kv-pin-first-user` does.",
            "",
            *tables.conversations(data),
            "",
        ]
    if data.where(kind="fidelity"):
        lines += [
            "## Fidelity to the full cache",
            "",
            "The second half of a text is streamed in steps of 64 tokens, evicted from after each. KL is a lower bound",
            "(50 likeliest tokens, the rest as one outcome).",
            "",
            *tables.fidelity(data),
            "",
        ]
    if data.where(kind="data"):
        lines += ["## Your data", "", *tables.own_data(data), ""]
    return "\n".join([*lines, *_limits(head), *_commands(head)]) + "\n"


def _documents(data: Rows) -> list[str]:
    panels = data.documents()
    lines: list[str] = []
    for setting in dict.fromkeys(setting for setting, _ in panels):
        lines += [f"## Recall, question {setting}", "", SETTING_TEXTS[setting], ""]
        lines += [f"Mean over {_averaged(data, setting)}:", ""]
        lines += [*tables.means(data, setting), ""]
        if "nexus" in data.policies and len(data.policies) > 1:
            lines += [
                "How much better `nexus` is on the same documents:",
                "",
                *tables.leads(data, setting, "nexus"),
                "",
            ]
        for what, length in panels:
            if what != setting:
                continue
            lost = [task for task in data.tasks(setting, length) if task not in data.solved(setting, length)]
            for budget in data.budgets:
                lines += [f"### {length} tokens, budget {budget:g}, question {setting}", ""]
                lines += [*tables.per_task(data, setting, length, budget), ""]
            if lost:
                lines += [f"Hardly solved with the full cache, so these rows say little: {', '.join(lost)}.", ""]
    if panels and "nexus" in data.policies and len(data.policies) > 1:
        lines += [
            "## Wins and losses",
            "",
            "Every task, length, budget and setting above, the same documents: in how many cells `nexus` is better or",
            f"worse beyond the 95 % interval. Cells with fewer than {FEWEST} documents are left out. Where policies do",
            "not differ, about one cell in forty is still expected on either side.",
            "",
            *tables.wins(data, "nexus"),
            "",
        ]
    return lines


def _limits(head: dict[str, Any]) -> list[str]:
    lines = [
        "## What this does not show",
        "",
        f"- One model, {head['model']}; others may rank policies differently.",
        "- Documents are generated text that carries the material of all tasks at once, so each task's facts distract",
        "  the others; scores are lower than RULER's, which makes one context per task.",
        "- Cells with few documents have wide intervals; the number is in the last line of each table.",
        "- Nothing about speed.",
    ]
    return lines


def _commands(head: dict[str, Any]) -> list[str]:
    """The runs that filled the result file, each of which went on where the one before it stopped."""
    return ["", "## Made by", "", *(f"    {command}" for command in head["commands"])]
