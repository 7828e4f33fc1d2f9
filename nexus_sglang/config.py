"""Everything a user can set, validated in one place before a model is loaded.

The command line, ``sgl.Engine(...)`` and per-request hints all end in :class:`NexusConfig`.
Nothing here imports SGLang.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

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
        return 0 < self.value <= 1

    def of(self, total: int) -> int:
        """Tokens meant, for a ``total`` in tokens; shares round up."""
        return math.ceil(self.value * total - 1e-9) if self.is_fraction else int(self.value)

    @classmethod
    def parse(cls, raw: Any, flag: str, *, allow_zero: bool = False) -> TokenAmount:
        """Read a user's value.

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


def _whole(raw: Any, flag: str, low: int, example: int) -> int:
    try:
        value = int(raw)
        usable = not isinstance(raw, bool) and float(raw) == value and value >= low
    except (TypeError, ValueError, OverflowError):
        usable = False
    if not usable:
        raise ConfigError(f"{flag} {raw!r} is not usable: give a whole number of at least {low}, such as {example}")
    return value


def _truth(raw: Any, flag: str) -> bool:
    named = {"true": True, "false": False}
    value = named.get(raw.lower(), raw) if isinstance(raw, str) else raw
    if not isinstance(value, bool):
        raise ConfigError(f"{flag} {raw!r} is not usable: give true or false")
    return value


@dataclass(frozen=True)
class NexusConfig:
    """What ``--kv-*`` flags say, checked.

    Attributes:
        policy: registered policy name, or ``module:Class`` for one of the user's own.
        budget: tokens a sequence may keep resident: a share of its prompt, or a count.
        block_size: tokens per block, the unit that is kept or evicted (paper: 32).
        window: recent queries whose attention judges the blocks (paper: 16).
        sink_tokens: first tokens of a sequence that are never evicted, rounded up to whole blocks.
        recent_tokens: newest tokens that are never evicted: a count, or a share of the budget.
        min_tokens: floor of every budget; a sequence this short is never touched.
        thin_to: under memory pressure, shares of its tokens a cold cached node is thinned to, step by step,
            before whole leaves are dropped; empty for SGLang's own behaviour.
        thin_shared: whether nodes that several prompts share may be thinned too, last.
        pin_system: whether a chat request pins its leading system messages and tool definitions.
        pin_first_user: whether it pins its first user message as well, with all that stands before it.
        seed: seed of every random draw (counter-based, see ``policy/draws.py``).
        policy_config: the policy's own fields.
        debug: check every invariant after each operation (slow; for tests).
        timing: clock decode passes and the evictions after them, waiting for the device (for benchmarks).
    """

    policy: str
    budget: TokenAmount = TokenAmount(0.2)
    block_size: int = 32
    window: int = 16
    sink_tokens: int = 4
    recent_tokens: TokenAmount = TokenAmount(64)
    min_tokens: int = 128
    thin_to: tuple[float, ...] = (0.5, 0.2, 0.1)
    thin_shared: bool = False
    pin_system: bool = True
    pin_first_user: bool = False
    seed: int = 0
    policy_config: dict[str, Any] = field(default_factory=dict)
    debug: bool = False
    timing: bool = False

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen dataclass)
        put("budget", TokenAmount.parse(self.budget, "--kv-budget"))
        put("recent_tokens", TokenAmount.parse(self.recent_tokens, "--kv-recent-tokens", allow_zero=True))
        put("block_size", _whole(self.block_size, "--kv-block-size", 1, 32))
        put("window", _whole(self.window, "--kv-window", 1, 16))
        put("sink_tokens", _whole(self.sink_tokens, "--kv-sink-tokens", 0, 4))
        put("min_tokens", _whole(self.min_tokens, "--kv-min-tokens", 0, 128))
        put("seed", _whole(self.seed, "--kv-seed", 0, 0))
        put("thin_to", self._read_thin_to(self.thin_to))
        put("thin_shared", _truth(self.thin_shared, "--kv-thin-shared"))
        put("pin_system", _truth(self.pin_system, "--kv-pin-system"))
        put("pin_first_user", _truth(self.pin_first_user, "--kv-pin-first-user"))
        if not isinstance(self.policy, str) or not self.policy:
            raise ConfigError(f"--kv-policy {self.policy!r} is not a policy name: try 'nexus'")
        put("policy_config", self._read_policy_config(self.policy_config))

    @staticmethod
    def _read_thin_to(raw: Any) -> tuple[float, ...]:
        flag, hint = "--kv-thin-to", "give falling shares in (0, 1) such as 0.5,0.2,0.1, or none"
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

    @staticmethod
    def _read_policy_config(raw: Any) -> dict[str, Any]:
        example = "'{\"walk_weight\": 0.5}'"
        if isinstance(raw, str):
            try:
                raw = json.loads(raw)
            except json.JSONDecodeError as err:
                raise ConfigError(f"--kv-policy-config {raw!r} is not JSON ({err}): write {example}") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"--kv-policy-config {raw!r} is not a JSON object: write {example}")
        return raw

    @property
    def sink_length(self) -> int:
        """Sink tokens rounded up to whole blocks."""
        return self.whole_blocks(self.sink_tokens)

    def whole_blocks(self, tokens: int) -> int:
        """``tokens`` rounded up to whole blocks."""
        return -(-tokens // self.block_size) * self.block_size

    def budget_tokens(self, prompt_tokens: int, amount: TokenAmount | None = None) -> int:
        """Tokens a sequence with this prompt may keep resident (before any clip by the pool).

        Never less than ``min_tokens``, nor than the forced set plus one block to choose.
        """
        asked = (amount or self.budget).of(prompt_tokens)
        floor = max(self.min_tokens, self.sink_length + 2 * self.block_size)
        return max(asked, floor)

    def recent_length(self, budget_tokens: int) -> int:
        """Newest tokens that are forced: at least the query window, at most half of what the sinks leave."""
        asked = max(self.recent_tokens.of(budget_tokens), self.window)
        return max(1, min(asked, max(self.block_size, (budget_tokens - self.sink_length) // 2)))

    def private_floor(self, budget_tokens: int) -> int:
        """Tokens a sequence keeps of its own when a shared prefix alone fills its budget: a quarter of the
        budget, and at least its recent window and one block."""
        return max(budget_tokens // 4, self.recent_length(budget_tokens) + self.block_size)

    def to_json(self) -> str:
        raw = dataclasses.asdict(self)
        raw["budget"], raw["recent_tokens"] = self.budget.value, self.recent_tokens.value
        return json.dumps(raw, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> NexusConfig:
        return cls(**json.loads(text))
