"""What a run of the suite consists of: settings, jobs and the rows they leave in the result file."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nexus_sglang.config import TokenAmount
from nexus_sglang.errors import ConfigError

from .conversations import KINDS, PINS
from .documents import SMALLEST, TASKS
from .fidelity import STEP

FULL = "full"
"""The policy name of stock SGLang without eviction."""
SETTINGS = ("hidden", "visible")
"""Whether the question is known when the document is first evicted from."""
SAME = ("model", "sglang", "first_seed")
"""What all rows of one result file share."""
INPUTS = ("tasks", "text")
"""What the runs into one result file share once one of them has used it; a job does not name it."""


class Job(NamedTuple):
    """One unit of work and one row of the result file, identified by :attr:`key`.

    Attributes:
        kind: ``document``, ``conversation``, ``fidelity`` or ``data``. what: setting, conversation kind, ... of that kind.
        policy, budget: which server and what it may keep; 1.0 is everything.
        length: tokens of the document or text. seed: which one.
    """

    kind: str
    what: str
    policy: str
    budget: float
    length: int
    seed: int

    @property
    def key(self) -> str:
        return "/".join(str(part) for part in self)


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        policies: :data:`FULL` or registered policies. budgets: shares of the prompt or token counts.
        samples: documents per length, by length. visible_samples: the same for the question-visible setting.
        tasks: RULER families to ask.
        conversations: samples per kind. kinds: which. conversation_tokens: length of the document of ``questions``.
        texts, text_tokens, text_file: for fidelity. first_seed: of every kind.
    """

    policies: tuple[str, ...]
    budgets: tuple[float, ...]
    samples: dict[int, int]
    visible_samples: dict[int, int]
    tasks: tuple[str, ...] = TASKS
    conversations: int = 0
    kinds: tuple[str, ...] = KINDS
    conversation_tokens: int = 1024
    texts: int = 0
    text_tokens: int = 2048
    text_file: str | None = None
    first_seed: int = 1000

    def __post_init__(self) -> None:
        for budget in self.budgets:
            TokenAmount.parse(budget, "--budgets")
        if self.texts and self.text_tokens < 2 * STEP:
            raise ConfigError(
                f"--text-tokens {self.text_tokens} leaves no step of {STEP} tokens: use {2 * STEP} or more"
            )
        for length in (*self.samples, *self.visible_samples):
            if length < SMALLEST:
                raise ConfigError(f"--lengths {length} is too short for thirteen tasks: use {SMALLEST} or more")
        for name, given, known in (("--tasks", self.tasks, TASKS), ("--conversation-kinds", self.kinds, KINDS)):
            for value in given:
                if value not in known:
                    raise ConfigError(f"{name} {value!r} is not known: use some of {', '.join(known)}")

    def budgets_of(self, policy: str) -> tuple[float, ...]:
        return (1.0,) if policy == FULL else self.budgets

    def jobs(self, policy: str) -> Iterator[Job]:
        """Jobs of one policy: by seed first, so that a run that stops early is balanced over the cells."""
        for setting, samples in (("hidden", self.samples), ("visible", self.visible_samples)):
            for length, count in samples.items():
                for seed in range(self.first_seed, self.first_seed + count):
                    for budget in self.budgets_of(policy):
                        yield Job("document", setting, policy, budget, length, seed)
        for seed in range(self.first_seed, self.first_seed + self.conversations):
            for kind in self.kinds:
                length = self.conversation_tokens if kind == "questions" else 0
                for budget in self.budgets_of(policy):
                    yield Job("conversation", kind, policy, budget, length, seed)
                    for pin in PINS[kind] if policy != FULL else ():
                        yield Job("conversation", f"{kind} {pin}", policy, budget, length, seed)
        for seed in range(self.texts):
            for budget in self.budgets_of(policy):
                if policy != FULL:
                    yield Job("fidelity", "stream", policy, budget, self.text_tokens, seed)


class Results:
    """A JSON-lines file: a head, then one row per finished job. Appending makes a run resumable and extensible.

    Args:
        head: what every row has in common (:data:`SAME`, :data:`INPUTS`), and ``commands``, to which this run's is added.

    Raises:
        ConfigError: the file belongs to another model, SGLang or first seed, or to other tasks or texts.
    """

    def __init__(self, path: Path, head: dict[str, Any]):
        self.path, self.rows, self._lock = path, {}, threading.Lock()
        if path.exists() and path.stat().st_size:
            old, self.rows = read_results(path)
            for name in (*SAME, *INPUTS):
                unused = name in INPUTS and None in (old.get(name), head.get(name))
                if not unused and old.get(name) != head.get(name):
                    raise ConfigError(
                        f"--out {path.parent} holds results with {name} {old.get(name)!r}, this run has {head.get(name)!r}: "
                        "use another --out to keep both"
                    )
            known = {name: value for name, value in old.items() if value is not None}
            head = {**head, **known, "commands": list(dict.fromkeys([*old["commands"], *head["commands"]]))}
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".new")
        whole.write_text("".join(map(_line, (head, *self.rows.values()))), encoding="utf-8")
        whole.replace(path)

    def add(self, job: Job, row: dict[str, Any]) -> None:
        """Keep one finished job."""
        row = {**job._asdict(), **row}
        with self._lock, self.path.open("a", encoding="utf-8") as f:
            self.rows[job.key] = row
            f.write(_line(row))


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n"


def read_results(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Head and rows by key; a last line that was cut off is dropped.

    Raises:
        ConfigError: there is no result file, or it has no head.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        head = json.loads(lines[0])
    except (OSError, IndexError, json.JSONDecodeError):
        raise ConfigError(f"--out {path.parent} has no readable {path.name}: run without --report first") from None
    rows = {}
    for number, line in enumerate(lines[1:], start=2):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                continue
            raise ConfigError(f"{path}, line {number} is not JSON: remove the line") from None
        job = Job(*(row[name] for name in Job._fields))
        rows[job.key] = row
    return head, rows
