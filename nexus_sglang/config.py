"""Everything a user can set, validated in one place before a model is loaded.

The command line, ``sgl.Engine(...)`` and per-request hints all end in :class:`NexusConfig`.
Nothing here imports SGLang.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nexus_sglang.errors import ConfigError


@dataclass(frozen=True)
class TokenAmount:
    """A number of tokens, given as a count (``512``) or as a share (``0.2``) of something.

    Attributes:
        value: a share in (0, 1], or a whole number of tokens above 1 (or 0).
    """

    value: float

    @property
    def is_fraction(self) -> bool:
        """Whether it is a share."""
        return 0 < self.value <= 1

    def of(self, total: int) -> int:
        """Tokens that are meant; shares round up.

        Args:
            total: what the share is of, in tokens.
        """
        return math.ceil(self.value * total - 1e-9) if self.is_fraction else int(self.value)

    @classmethod
    def parse(cls, raw: Any, flag: str, *, allow_zero: bool = False) -> TokenAmount:
        """Read a user's value.

        Args:
            raw: what the user gave: a number, or text.
            flag: name of the setting, for the message.
            allow_zero: whether 0 tokens is a legal amount.

        Raises:
            ConfigError: not a number, negative, or above 1 without being whole.
        """
        hint = "give a share in (0, 1] such as 0.2, or a whole number of tokens such as 512"
        if isinstance(raw, TokenAmount):
            raw = raw.value
        try:
            value = float(raw) if not isinstance(raw, bool) else math.nan
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
            raise ConfigError(f"{flag} {raw!r} is not usable: {hint}")
        if value > 1 and value != int(value):
            raise ConfigError(f"{flag} {raw!r} is neither a share nor a whole number: {hint}")
        return cls(value)

    def __str__(self) -> str:
        return f"{self.value:g}"


def _token_amount(raw: Any, flag: str) -> TokenAmount:
    return TokenAmount.parse(raw, flag)


def _token_amount_or_none(raw: Any, flag: str) -> TokenAmount:
    return TokenAmount.parse(raw, flag, allow_zero=True)


def _whole(low: int, example: int) -> Callable[[Any, str], int]:
    """A reader of whole numbers.

    Args:
        low: smallest legal value.
        example: a legal value, for the message.
    """

    def read(raw: Any, flag: str) -> int:
        try:
            value = int(raw)
            usable = not isinstance(raw, bool) and float(raw) == value and value >= low
        except (TypeError, ValueError, OverflowError):
            usable = False
        if not usable:
            raise ConfigError(f"{flag} {raw!r} is not usable: give a whole number of at least {low}, such as {example}")
        return value

    return read


def _truth(raw: Any, flag: str) -> bool:
    named = {"true": True, "false": False}
    value = named.get(raw.lower(), raw) if isinstance(raw, str) else raw
    if not isinstance(value, bool):
        raise ConfigError(f"{flag} {raw!r} is not usable: give true or false")
    return value


def _policy_name(raw: Any, flag: str) -> str:
    if not isinstance(raw, str) or not raw:
        raise ConfigError(f"{flag} {raw!r} is not a policy name: try 'nexus'")
    return raw


def _falling_shares(raw: Any, flag: str) -> tuple[float, ...]:
    hint = "give falling shares in (0, 1) such as 0.5,0.2,0.1, or none"
    if raw is None or raw == "none":
        return ()
    try:
        steps = tuple(float(step) for step in (raw.split(",") if isinstance(raw, str) else raw))
    except (TypeError, ValueError):
        raise ConfigError(f"{flag} {raw!r} is not usable: {hint}") from None
    falling = all(a > b for a, b in zip(steps, steps[1:], strict=False))
    if not falling or not all(0 < step < 1 for step in steps):
        raise ConfigError(f"{flag} {raw!r} is not usable: {hint}")
    return steps


def _json_object(raw: Any, flag: str) -> dict[str, Any]:
    example = "'{\"walk_weight\": 0.5}'"
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except json.JSONDecodeError as err:
            raise ConfigError(f"{flag} {raw!r} is not JSON ({err}): write {example}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{flag} {raw!r} is not a JSON object: write {example}")
    return raw


class Flag(NamedTuple):
    """One setting that a user can make on the command line or as a keyword of ``sgl.Engine``.

    Attributes:
        field: its name in :class:`NexusConfig`.
        read: turns what the user wrote into the field's value; gets the flag's name too, for its ConfigError.
        default: value where the user says nothing; for the policy, that none is on.
        metavar: stands for the value in ``--help``.
        help: what it means, without the default.
    """

    field: str
    read: Callable[[Any, str], Any]
    default: Any
    metavar: str
    help: str

    @property
    def keyword(self) -> str:
        """Keyword of ``sgl.Engine``, and where argparse puts the value."""
        return f"kv_{self.field}"

    @property
    def option(self) -> str:
        """On the command line."""
        return f"--{self.keyword.replace('_', '-')}"

    @property
    def default_text(self) -> str:
        """The default as a user would write it."""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, tuple):
            return ",".join(f"{share:g}" for share in self.default)
        return str(self.default)


FLAGS = (
    Flag(
        "policy", _policy_name, "none", "POLICY",
        "eviction policy: a name listed by `nexus-sglang policies`, `module:Class` for one of your own, or `none`",
    ),
    Flag(
        "budget", _token_amount, TokenAmount(0.2), "AMOUNT",
        "tokens a sequence may keep: a share of its prompt in (0, 1], or a count",
    ),
    Flag(
        "block_size", _whole(1, 32), 32, "TOKENS",
        "tokens per block, the unit that is kept or evicted",
    ),
    Flag(
        "window", _whole(1, 16), 16, "QUERIES",
        "recent queries whose attention judges the blocks",
    ),
    Flag(
        "sink_tokens", _whole(0, 4), 4, "TOKENS",
        "first tokens of a sequence, never evicted, rounded up to whole blocks",
    ),
    Flag(
        "recent_tokens", _token_amount_or_none, TokenAmount(64), "AMOUNT",
        "newest tokens of a sequence, never evicted: a count, or a share of the budget",
    ),
    Flag(
        "min_tokens", _whole(0, 128), 128, "TOKENS",
        "smallest budget; shorter sequences are never touched",
    ),
    Flag(
        "thin_to", _falling_shares, (0.5, 0.2, 0.1), "SHARES",
        "under memory pressure, thin cold cached nodes to these shares of their tokens, step by step, before whole "
        "nodes are dropped; or `none`",
    ),
    Flag(
        "thin_shared", _truth, False, "true|false",
        "whether memory pressure may thin prefixes that several prompts share, last of all",
    ),
    Flag(
        "pin_system", _truth, True, "true|false",
        "whether chat requests pin their leading system messages and tool definitions",
    ),
    Flag(
        "pin_first_user", _truth, False, "true|false",
        "whether chat requests pin their first user message too, and all before it: the task of an agent",
    ),
    Flag(
        "seed", _whole(0, 0), 0, "NUMBER",
        "seed of the random draws",
    ),
    Flag(
        "policy_config", _json_object, {}, "JSON",
        "JSON object with the policy's own fields",
    ),
)  # fmt: skip
"""The one table of flags: argparse, the Engine's keywords, the README's table and the defaults below come from it."""

_DEFAULTS = {flag.field: flag.default for flag in FLAGS}


def readme_table() -> str:
    """:data:`FLAGS` as the README shows it."""
    rows = ["| Flag | Engine keyword | Default | Meaning |", "| --- | --- | --- | --- |"]
    rows += [f"| `{flag.option}` | `{flag.keyword}` | `{flag.default_text}` | {flag.help} |" for flag in FLAGS]
    return "\n".join(rows) + "\n"


@dataclass(frozen=True)
class NexusConfig:
    """What the ``--kv-*`` flags say, checked. What a field means stands in :data:`FLAGS`.

    Attributes:
        debug: check every invariant after each operation (slow; for tests).
        timing: clock decode passes and the evictions after them, waiting for the device (for benchmarks).

    Raises:
        ConfigError: a value is not usable.
    """

    policy: str
    budget: TokenAmount = _DEFAULTS["budget"]
    block_size: int = _DEFAULTS["block_size"]
    window: int = _DEFAULTS["window"]
    sink_tokens: int = _DEFAULTS["sink_tokens"]
    recent_tokens: TokenAmount = _DEFAULTS["recent_tokens"]
    min_tokens: int = _DEFAULTS["min_tokens"]
    thin_to: tuple[float, ...] = _DEFAULTS["thin_to"]
    thin_shared: bool = _DEFAULTS["thin_shared"]
    pin_system: bool = _DEFAULTS["pin_system"]
    pin_first_user: bool = _DEFAULTS["pin_first_user"]
    seed: int = _DEFAULTS["seed"]
    policy_config: dict[str, Any] = field(default_factory=dict)
    debug: bool = False
    timing: bool = False

    def __post_init__(self) -> None:
        for flag in FLAGS:
            value = flag.read(getattr(self, flag.field), flag.option)
            object.__setattr__(self, flag.field, value)  # the way to set a field of a frozen dataclass

    @property
    def sink_length(self) -> int:
        """Sink tokens rounded up to whole blocks."""
        return self.whole_blocks(self.sink_tokens)

    def whole_blocks(self, tokens: int) -> int:
        """``tokens`` rounded up to whole blocks."""
        return -(-tokens // self.block_size) * self.block_size

    def budget_tokens(self, prompt_tokens: int, amount: TokenAmount | None = None) -> int:
        """Tokens a sequence may keep resident, before the size of the pool is looked at.

        Never less than ``min_tokens``, nor than the sinks plus two blocks.

        Args:
            prompt_tokens: length of its prompt.
            amount: what the request itself asks for; None for the server's budget.
        """
        asked = (amount or self.budget).of(prompt_tokens)
        floor = max(self.min_tokens, self.sink_length + 2 * self.block_size)
        return max(asked, floor)

    def recent_length(self, budget_tokens: int) -> int:
        """Size of the recent window, in tokens: at least the query window, at most half of what the sinks leave.

        Args:
            budget_tokens: budget of the sequence.
        """
        asked = max(self.recent_tokens.of(budget_tokens), self.window)
        return max(1, min(asked, max(self.block_size, (budget_tokens - self.sink_length) // 2)))

    def private_floor(self, budget_tokens: int) -> int:
        """Tokens a sequence keeps of its own when a shared prefix alone fills its budget.

        A quarter of the budget, and at least its recent window and one block.

        Args:
            budget_tokens: budget of the sequence.
        """
        return max(budget_tokens // 4, self.recent_length(budget_tokens) + self.block_size)

    def to_json(self) -> str:
        """For :meth:`from_json` in another process."""
        raw = dataclasses.asdict(self)
        raw["budget"] = self.budget.value
        raw["recent_tokens"] = self.recent_tokens.value
        return json.dumps(raw, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> NexusConfig:
        """The config that :meth:`to_json` wrote."""
        return cls(**json.loads(text))
