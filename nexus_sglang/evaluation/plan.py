"""What a run consists of: the plan, its jobs, and the result file with one row per finished job."""

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
from .documents import FAMILIES, SMALLEST
from .fidelity import STEP

FULL = "full"
"""The policy name of stock SGLang without eviction."""
SETTINGS = ("hidden", "visible")
"""Settings of a document: whether the question is known when the document is first evicted from."""
SAME = ("model", "sglang", "first_seed")
"""What all rows of one result file share."""
INPUTS = ("tasks", "text")
"""What the runs into one result file share once one of them has used it; a job does not name it."""


class Job(NamedTuple):
    """One unit of work and one row of the result file, identified by :attr:`key`.

    Attributes:
        kind: ``document``, ``conversation``, ``fidelity`` or ``data``.
        what: the setting of a document, the kind of a conversation with what is pinned, ``stream`` for fidelity.
        policy: which server.
        budget: what it may keep, as a share or a count; 1.0 is everything.
        length: tokens of the document or text; 0 where the job has a length of its own.
        seed: which document, conversation or text; the line of a user's file.
    """

    kind: str
    what: str
    policy: str
    budget: float
    length: int
    seed: int

    @property
    def key(self) -> str:
        """All fields in one text, unique in a result file."""
        return "/".join(str(part) for part in self)


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        policies: :data:`FULL` or registered policies.
        budgets: shares of the prompt or token counts.
        samples: number of documents by length in tokens, question hidden.
        visible_samples: number of documents by length in tokens, question visible.
        tasks: RULER families to ask.
        conversations: number of conversations of each kind.
        kinds: kinds of conversations.
        conversation_tokens: length of the document of the kind ``questions``, in tokens.
        texts: number of texts streamed for fidelity.
        text_tokens: length of such a text, in tokens.
        text_file: file the texts are cut from; None takes CPython's documentation.
        first_seed: of documents and conversations.
    """

    policies: tuple[str, ...]
    budgets: tuple[float, ...]
    samples: dict[int, int]
    visible_samples: dict[int, int]
    tasks: tuple[str, ...] = FAMILIES
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
        for name, given, known in (("--tasks", self.tasks, FAMILIES), ("--conversation-kinds", self.kinds, KINDS)):
            for value in given:
                if value not in known:
                    raise ConfigError(f"{name} {value!r} is not known: use some of {', '.join(known)}")

    def budgets_of(self, policy: str) -> tuple[float, ...]:
        """The budgets that this policy is measured at; the full cache has one."""
        return (1.0,) if policy == FULL else self.budgets

    def jobs(self, policy: str) -> Iterator[Job]:
        """Jobs of one policy: by seed first, so that a run that stops early is balanced over the cells."""
        for setting, samples in zip(SETTINGS, (self.samples, self.visible_samples), strict=True):
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
        path: of the file; created with its folder if it is not there.
        head: what every row has in common (:data:`SAME`, :data:`INPUTS`), and ``commands``, to which this run's is
            added.

    Raises:
        ConfigError: the file belongs to another model, SGLang or first seed, or to other tasks or texts.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        if path.exists() and path.stat().st_size:
            old, self.rows = read_results(path)
            for name in (*SAME, *INPUTS):
                unused = name in INPUTS and None in (old.get(name), head.get(name))
                if not unused and old.get(name) != head.get(name):
                    raise ConfigError(
                        f"--out {path.parent} holds results with {name} {old.get(name)!r}, "
                        f"this run has {head.get(name)!r}: use another --out to keep both"
                    )
            known = {name: value for name, value in old.items() if value is not None}
            head = {**head, **known, "commands": list(dict.fromkeys([*old["commands"], *head["commands"]]))}
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".new")
        whole.write_text("".join(map(_line, (head, *self.rows.values()))), encoding="utf-8")
        whole.replace(path)

    def add(self, job: Job, row: dict[str, Any]) -> None:
        """Append one finished job."""
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
