"""What a single request may ask for, through ``custom_params`` of its sampling parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

from nexus_sglang.config import TokenAmount
from nexus_sglang.errors import ConfigError

KEYS = ("kv_budget", "kv_evict", "kv_pin_tokens", "kv_trace")


class Hints(NamedTuple):
    """What a request asks for, as it was given (what it gets is its ``RequestPlan``).

    Attributes:
        budget: share or tokens, like ``--kv-budget``; None for the server's.
        evict: False keeps the whole sequence resident.
        pin: leading tokens never evicted for this request's budget.
        trace: list every eviction event in the answer's ``meta_info``.
    """

    budget: TokenAmount | None = None
    evict: bool = True
    pin: int = 0
    trace: bool = False


def read_hints(params: dict[str, Any] | None) -> Hints:
    """Check the ``kv_*`` keys of a request's ``custom_params``; other keys belong to others.

    Args:
        params: the request's ``custom_params``, as the client sent them.

    Raises:
        ConfigError: not an object, unknown ``kv_*`` key, or unusable value, with a legal alternative.
    """
    if params is None:
        return Hints()
    if not isinstance(params, dict):
        raise ConfigError(f'custom_params {params!r} is not usable: give an object such as {{"kv_budget": 0.5}}')
    for key in params:
        if isinstance(key, str) and key.startswith("kv_") and key not in KEYS:
            raise ConfigError(f"custom_params {key!r} is not known: use one of {', '.join(KEYS)}")
    for key in ("kv_evict", "kv_trace"):
        if not isinstance(params.get(key, True), bool):
            raise ConfigError(f"custom_params {key} {params[key]!r} is not usable: give true or false")
    pin = params.get("kv_pin_tokens", 0)
    if isinstance(pin, bool) or not isinstance(pin, int) or pin < 0:
        raise ConfigError(f"custom_params kv_pin_tokens {pin!r} is not usable: give a whole number such as 256")
    budget = params.get("kv_budget")
    if budget is not None:
        budget = TokenAmount.parse(budget, "custom_params kv_budget")
    return Hints(budget, params.get("kv_evict", True), pin, params.get("kv_trace", False))


def require_room(prompt: int, room: int) -> None:
    """Check that the prompt of a request with ``kv_evict`` false fits.

    Args:
        prompt: its tokens.
        room: tokens that such a request can have in all.

    Raises:
        ConfigError: with the tokens of both.
    """
    if prompt >= room:
        raise ConfigError(
            f"custom_params kv_evict False: the prompt of {prompt} tokens does not fit the KV pool, which has room for "
            f"{room}. Drop kv_evict, or shorten the prompt"
        )
