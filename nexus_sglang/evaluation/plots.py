"""PNG plots of the report: accuracy against budget, heat map of depth and length, bars per task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .plan import FULL
from .tables import Rows

DEPTHS = 5
"""Bins of the heat map."""


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    return path


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def accuracy(data: Rows, path: Path) -> Path:
    """Mean over solvable tasks against the budget, one panel per setting and length."""
    plt = _pyplot()
    panels = data.documents()
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), squeeze=False, sharey=True)
    for axis, (setting, length) in zip(axes[0], panels, strict=True):
        tasks = data.solved(setting, length) or data.tasks(setting, length)
        for policy in data.evicting:
            cells = [data.mean_cell(setting, length, policy, budget, tasks) for budget in data.budgets]
            known = [(budget, found) for budget, found in zip(data.budgets, cells, strict=True) if found]
            axis.errorbar(
                [budget for budget, _ in known],
                [found.mean for _, found in known],
                [found.half if found.n > 2 else 0.0 for _, found in known],
                marker="o",
                markersize=3,
                capsize=2,
                linewidth=1,
                label=policy,
            )
        full = data.mean_cell(setting, length, FULL, 1.0, tasks)
        if full:
            axis.axhline(full.mean, color="black", linestyle="--", linewidth=1, label=FULL)
        axis.set(title=f"question {setting}, {length} tokens", xlabel="budget, share of the prompt", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("score, mean over tasks")
    axes[0][-1].legend(fontsize=7)
    _save(figure, path)
    plt.close(figure)
    return path


def heat_map(data: Rows, budget: float, path: Path) -> Path:
    """Score by depth of the asked fact and length of the document, one panel per policy (question hidden)."""
    plt = _pyplot()
    lengths = [length for setting, length in data.documents() if setting == "hidden"]
    figure, axes = plt.subplots(
        2, -(-len(data.policies) // 2), figsize=(11, 5.2), squeeze=False, sharex=True, sharey=True
    )
    for axis, policy in zip(axes.flat, data.policies, strict=False):
        grid = [[_depth_score(data, length, policy, budget, i) for length in lengths] for i in range(DEPTHS)]
        axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for i, line in enumerate(grid):
            for j, value in enumerate(line):
                axis.text(j, i, "" if value != value else f"{value:.2f}", ha="center", va="center", fontsize=7)
        axis.set_title(policy, fontsize=9)
        axis.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7)
        axis.set_yticks(range(DEPTHS), [f"{i / DEPTHS:.1f}-{(i + 1) / DEPTHS:.1f}" for i in range(DEPTHS)], fontsize=7)
    for axis in list(axes.flat)[len(data.policies) :]:
        axis.axis("off")
    figure.supylabel("depth of the fact", fontsize=9)
    figure.supxlabel(f"tokens of the document; budget {budget:g}, question hidden", fontsize=9)
    _save(figure, path)
    plt.close(figure)
    return path


def _depth_score(data: Rows, length: int, policy: str, budget: float, depth: int) -> float:
    found = [
        row["scores"][task]
        for row in data.of("hidden", length, policy, budget)
        for task, at in row["depths"].items()
        if min(int(at * DEPTHS), DEPTHS - 1) == depth
    ]
    return sum(found) / len(found) if found else float("nan")


def task_bars(data: Rows, setting: str, length: int, budget: float, path: Path) -> Path:
    """Bars per task and policy at one length and budget."""
    plt = _pyplot()
    tasks = data.tasks(setting, length)
    figure, axis = plt.subplots(figsize=(11, 3.6))
    width = 0.8 / len(data.policies)
    for i, policy in enumerate(data.policies):
        cells = [data.task_cell(setting, length, policy, budget, task) for task in tasks]
        heights = [found.mean if found else 0.0 for found in cells]
        color = "0.3" if policy == FULL else f"C{i}"
        axis.bar([t + i * width for t in range(len(tasks))], heights, width, label=policy, color=color)
    axis.set_xticks([t + 0.4 for t in range(len(tasks))], tasks, rotation=30, ha="right", fontsize=8)
    axis.set(ylim=(0, 1), ylabel="score", title=f"question {setting}, {length} tokens, budget {budget:g}")
    axis.legend(fontsize=7, ncols=4)
    _save(figure, path)
    plt.close(figure)
    return path
