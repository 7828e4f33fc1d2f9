"""From the rows of a result file to the numbers and tables of the report: same rows, same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .conversations import JUDGED, PINS
from .documents import FAMILIES
from .intervals import mean_and_error, student
from .plan import FULL, SETTINGS

Row = dict[str, Any]
FEWEST = 6
"""Documents below which even differences that all have one sign happen by chance in more than one of twenty cells."""
SOLVED = 0.25
"""A task that the full cache solves less often than this says little about eviction."""


class Cell(NamedTuple):
    """A mean with its interval. As text, fewer than three values have none: it would be wider than the scale.

    Attributes:
        mean: of the values.
        half: half the 95 % interval of the mean.
        n: how many independent values there were; those of one document or conversation count as one.
    """

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        return self.text(2)

    def text(self, digits: int) -> str:
        """With so many digits after the point."""
        interval = f" ±{self.half:.{digits}f}" if self.n > 2 else ""
        return f"{self.mean:.{digits}f}{interval}"


def cell(values: Sequence[float], groups: Sequence[object]) -> Cell | None:
    """A cell, or None without values.

    Args:
        values: scores.
        groups: which of them belong to one document or conversation.
    """
    if not values:
        return None
    mean, error = mean_and_error(values, groups)
    n = len(set(groups))
    return Cell(mean, student(n) * error, n)


def table(head: Iterable[str], body: Iterable[Iterable[object]]) -> list[str]:
    """A Markdown table; the first column is text, the others numbers, None is a dash."""
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return [*lines, *("| " + " | ".join("–" if x is None else str(x) for x in row) + " |" for row in body)]


class Rows:
    """The rows of one file, with what they range over.

    Args:
        rows: of the result file.

    Attributes:
        policies: the full cache first, then ``nexus``, then the others by name.
        evicting: the same without the full cache.
        budgets: ascending.
    """

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        names = {row["policy"] for row in rows}
        first = [name for name in (FULL, "nexus", "nexus-paper") if name in names]
        self.policies = [*first, *sorted(names - set(first))]
        self.evicting = [policy for policy in self.policies if policy != FULL]
        self.budgets = sorted({row["budget"] for row in rows if row["policy"] != FULL})

    def where(self, **wanted: Any) -> list[Row]:
        """Rows whose fields have these values."""
        return [row for row in self.rows if all(row[name] == value for name, value in wanted.items())]

    def documents(self) -> list[tuple[str, int]]:
        """Settings and lengths that were run, in order."""
        seen = {(row["what"], row["length"]) for row in self.where(kind="document")}
        return sorted(seen, key=lambda pair: (SETTINGS.index(pair[0]), pair[1]))

    def tasks(self, setting: str, length: int) -> list[str]:
        """Families that were asked in these documents, in order."""
        seen = {task for row in self.where(kind="document", what=setting, length=length) for task in row["scores"]}
        return [task for task in FAMILIES if task in seen]

    def of(self, setting: str, length: int, policy: str, budget: float) -> list[Row]:
        """Rows of the documents of one policy and budget; the full cache answers for every budget."""
        share = 1.0 if policy == FULL else budget
        return self.where(kind="document", what=setting, length=length, policy=policy, budget=share)

    def task_cell(self, setting: str, length: int, policy: str, budget: float, task: str) -> Cell | None:
        """Mean score of one family."""
        rows = [row for row in self.of(setting, length, policy, budget) if task in row["scores"]]
        return cell([row["scores"][task] for row in rows], [row["seed"] for row in rows])

    def mean_cell(self, setting: str, length: int, policy: str, budget: float, tasks: list[str]) -> Cell | None:
        """Mean score over several families."""
        rows = self.of(setting, length, policy, budget)
        pairs = [(row["scores"][task], row["seed"]) for row in rows for task in tasks if task in row["scores"]]
        return cell([score for score, _ in pairs], [seed for _, seed in pairs])

    def has_full(self, setting: str) -> bool:
        """Whether the full cache was asked in this setting; without it nothing is known of what it solves."""
        return bool(self.where(kind="document", what=setting, policy=FULL))

    def solved(self, setting: str, length: int) -> list[str]:
        """Tasks that the full cache solves often enough to lose something, or that it was not asked."""
        means = {task: self.task_cell(setting, length, FULL, 1.0, task) for task in self.tasks(setting, length)}
        return [task for task, found in means.items() if found is None or found.mean >= SOLVED]

    def difference(
        self, setting: str, length: int, budget: float, tasks: list[str], first: str, second: str
    ) -> Cell | None:
        """Mean of ``first`` less ``second`` over these families of the documents that both answered."""

        def scores(policy: str) -> dict[tuple[int, str], float]:
            rows = self.of(setting, length, policy, budget)
            return {(row["seed"], task): row["scores"][task] for row in rows for task in tasks if task in row["scores"]}

        one = scores(first)
        other = scores(second)
        pairs = sorted(one.keys() & other.keys())
        return cell([one[pair] - other[pair] for pair in pairs], [seed for seed, _ in pairs])


def residency(data: Rows) -> list[str]:
    """How much stayed, and how often eviction ran: a cell without eviction is a control."""
    others = [kind for kind in ("conversation", "fidelity", "data") if data.where(kind=kind)]
    kinds = [*data.documents(), *((kind, 0) for kind in others)]
    body = []
    for policy in data.policies:
        for budget in (1.0,) if policy == FULL else data.budgets:
            line: list[object] = [f"{policy} {budget:g}" if policy != FULL else policy]
            for what, length in kinds:
                chosen = {"kind": "document", "what": what, "length": length} if length else {"kind": what}
                rows = data.where(policy=policy, budget=budget, **chosen)
                line.append(_held(rows) if rows else None)
            body.append(line)
    names = [f"{what} {length}" if length else what for what, length in kinds]
    return table(["policy and budget", *names], body)


def _held(rows: list[Row]) -> str:
    share = sum(row["resident"] for row in rows) / len(rows)
    evicted = sum(row["evicted"] for row in rows)
    requests = sum(row["requests"] for row in rows)
    return f"{share:.2f} ({evicted}/{requests})" if evicted else f"{share:.2f} (control)"


def means(data: Rows, setting: str) -> list[str]:
    """Mean over :meth:`Rows.solved` tasks, per policy; columns are length and budget."""
    lengths = [length for what, length in data.documents() if what == setting]
    columns = [(length, budget) for length in lengths for budget in data.budgets]
    body = [
        [policy, *(data.mean_cell(setting, length, policy, b, data.solved(setting, length)) for length, b in columns)]
        for policy in data.policies
    ]
    return table(["policy", *(f"{length} @ {budget:g}" for length, budget in columns)], body)


def leads(data: Rows, setting: str, champion: str) -> list[str]:
    """The champion's mean less each other policy's on the same documents.

    How hard a document is cancels, so the intervals are narrower than those of :func:`means`.
    """
    lengths = [length for what, length in data.documents() if what == setting]
    columns = [(length, budget) for length in lengths for budget in data.budgets]
    body = [
        [rival, *(data.difference(setting, n, b, data.solved(setting, n), champion, rival) for n, b in columns)]
        for rival in data.policies
        if rival != champion
    ]
    return table([f"{champion} less", *(f"{length} @ {budget:g}" for length, budget in columns)], body)


def per_task(data: Rows, setting: str, length: int, budget: float) -> list[str]:
    """Every task, every policy, at one budget."""
    tasks = data.tasks(setting, length)
    body = [[task, *(data.task_cell(setting, length, p, budget, task) for p in data.policies)] for task in tasks]
    counts = [len(data.of(setting, length, p, budget)) for p in data.policies]
    return table(["task", *data.policies], [*body, ["documents", *counts]])


def wins(data: Rows, champion: str) -> list[str]:
    """In how many cells the champion is better or worse than each other policy, beyond the 95 % interval.

    A cell is a setting, length, budget and family; those of fewer than :data:`FEWEST` documents are left out.
    """
    body = []
    for rival in data.policies:
        if rival == champion:
            continue
        counts = {"better": 0, "worse": 0, "no difference": 0}
        for setting, length in data.documents():
            for budget in data.budgets:
                for task in data.tasks(setting, length):
                    gap = data.difference(setting, length, budget, [task], champion, rival)
                    if gap is None or gap.n < FEWEST:
                        continue
                    sure = abs(gap.mean) > gap.half and gap.mean != 0
                    counts["no difference" if not sure else "better" if gap.mean > 0 else "worse"] += 1
        body.append([rival, *counts.values()])
    return table([f"{champion} against", "better", "worse", "no difference seen"], body)


def conversations(data: Rows) -> list[str]:
    """Every conversation task; ``rule`` is split into its halves; what is pinned stands behind the name."""
    columns: list[tuple[str, str, str, slice]] = []
    kinds = {row["what"] for row in data.where(kind="conversation")}
    for kind, tasks in JUDGED.items():
        for pin in ("", *PINS[kind]):
            what = f"{kind} {pin}".strip()
            if what in kinds:
                suffix = f" ({pin})" if pin else ""
                halves = [(" 1-5", slice(0, 5)), (" 6-10", slice(5, None))] if kind == "rule" else [("", slice(None))]
                columns += [(what, task, task + name + suffix, part) for task in tasks for name, part in halves]

    def one(policy: str, budget: float, what: str, task: str, part: slice) -> Cell | None:
        rows = data.where(kind="conversation", what=what, policy=policy, budget=budget)
        pairs = [(score, row["seed"]) for row in rows for score in row["scores"][task][part]]
        return cell([score for score, _ in pairs], [seed for _, seed in pairs])

    def line(policy: str, budget: float) -> list[Cell | None]:
        return [one(policy, budget, what, task, part) for what, task, _, part in columns]

    return _by_budget(data, [name for *_, name, _ in columns], line)


def _by_budget(data: Rows, names: list[str], line: Callable[[str, float], Sequence[object]]) -> list[str]:
    """A table with a line per policy and budget; lines without any number are left out."""
    body = []
    for policy in data.policies:
        for budget in (1.0,) if policy == FULL else data.budgets:
            numbers = line(policy, budget)
            if any(number is not None for number in numbers):
                body.append([f"{policy} {budget:g}" if policy != FULL else policy, *numbers])
    return table(["policy and budget", *names], body)


def fidelity(data: Rows) -> list[str]:
    """KL, top-1 agreement and perplexity against the full cache of the same server."""

    def line(policy: str, budget: float) -> list[str | None]:
        rows = data.where(kind="fidelity", policy=policy, budget=budget)
        if not rows:
            return [None] * 4
        seeds = [row["seed"] for row in rows]
        kl = cell([row["kl"] for row in rows], seeds)
        top1 = cell([row["top1"] for row in rows], seeds)
        nll = sum(row["nll"] for row in rows) / len(rows)
        full = sum(row["nll_full"] for row in rows) / len(rows)
        assert kl is not None, "there are rows"
        return [kl.text(3), str(top1), f"{math.exp(nll):.1f}", f"{math.exp(full):.1f}"]

    return _by_budget(data, ["KL, nats", "top-1 agreement", "perplexity", "perplexity, full"], line)


def own_data(data: Rows) -> list[str]:
    """The user's own conversations."""

    def line(policy: str, budget: float) -> list[Cell | None]:
        rows = data.where(kind="data", policy=policy, budget=budget)
        return [cell([row["score"] for row in rows], [row["seed"] for row in rows])]

    return _by_budget(data, ["expected strings found"], line)
