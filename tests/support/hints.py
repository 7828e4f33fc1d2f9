"""Wrong hints of requests, and what the refusal has to say."""

from __future__ import annotations

from typing import Any, NamedTuple

BUDGET = "whole number of tokens from 2 to 1000000000"
PIN = "whole number from 0 to 1000000000"
TRUTH = "true or false"
UNKNOWN = "did you mean"
CONTRADICTION = "drop one of them"


class Bad(NamedTuple):
    """A wrong ``custom_params``.

    Attributes:
        params: as a client sends them.
        field: key that the message names.
        shown: how the message shows the value.
        alternative: words of the legal alternative.
    """

    params: dict[str, Any]
    field: str
    shown: str
    alternative: str


def _all(field: str, alternative: str, values: list[Any]) -> list[Bad]:
    return [Bad({field: value}, field, repr(value)[:20], alternative) for value in values]


BAD = [
    *_all("kv_budget", BUDGET, [0, 0.0, -1, -0.5, 1.5, 2.5, 1e-9, 9e-5, 1e99, 10**9 + 1, 10**12, 999.99]),
    *_all("kv_budget", BUDGET, ["0.5", "512", "", "all", True, False, None, [0.5], {"share": 0.5}]),
    *_all("kv_pin_tokens", PIN, [-1, 1.5, 256.0, 10**12, 10**9 + 1, 1e99, "256", "", True, False, None, [256]]),
    *_all("kv_evict", TRUTH, [0, 1, "false", "no", None, [], 0.0]),
    *_all("kv_trace", TRUTH, [0, 1, "true", None, {}]),
    Bad({"kv_budgets": 0.5}, "kv_budgets", "kv_budgets", f"{UNKNOWN} kv_budget?"),
    Bad({"kv_pin": 256}, "kv_pin", "kv_pin", f"{UNKNOWN} kv_pin_tokens?"),
    Bad({"kv_evicted": False}, "kv_evicted", "kv_evicted", f"{UNKNOWN} kv_evict?"),
    Bad({"kv_": 1}, "kv_", "kv_", UNKNOWN),
    Bad({"kv_evict": False, "kv_budget": 0.5}, "kv_budget", "0.5", CONTRADICTION),
    Bad({"kv_evict": False, "kv_budget": 512}, "kv_budget", "512", CONTRADICTION),
    Bad({"kv_evict": False, "kv_pin_tokens": 64}, "kv_pin_tokens", "64", CONTRADICTION),
    Bad({"kv_evict": False, "kv_pin_tokens": 0}, "kv_pin_tokens", "0", CONTRADICTION),
]


def envelope(*actions: tuple[str, Any], version: str = "1") -> dict[str, Any]:
    """A ``kv_hints`` with these actions: (type, value)."""
    return {
        "protocol_version": "1",
        "message_id": "m",
        "actions": [
            {"action_id": f"a{i}", "action_type": kind, "action_version": version, "payload": {"value": value}}
            for i, (kind, value) in enumerate(actions)
        ],
    }
