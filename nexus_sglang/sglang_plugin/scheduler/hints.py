"""What a single request may ask for: in ``kv_hints``, or in ``custom_params`` of its sampling parameters."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from nexus_sglang.config import TokenAmount
from nexus_sglang.errors import ConfigError

SMALLEST_SHARE = 1e-4
"""Below it a share of the longest prompts is less than a block."""
MOST_TOKENS = 10**9
"""Above it no count of tokens is meant: it is more than any pool holds."""
ACTION_VERSION = "1"
"""Of every action here; those of another version are another's."""
SHOWN = 60
"""Characters of a wrong value that a message repeats."""


class Hints(NamedTuple):
    """What a request asks for, as it was given (what it gets is its ``RequestPlan``).

    Attributes:
        budget: share or tokens, like ``--kv-budget``; None for the server's.
        evict: False keeps the whole sequence resident.
        pin: leading tokens never evicted for this request's budget.
        trace: list every eviction event in the answer's ``meta_info``.
        ignored: actions of ``kv_hints`` that nobody here carries out: id, type and version of each.
    """

    budget: TokenAmount | None = None
    evict: bool = True
    pin: int = 0
    trace: bool = False
    ignored: tuple[dict[str, str], ...] = ()


def _is_number(raw: Any) -> bool:
    """Whether a value was a number in JSON, and a finite one."""
    return isinstance(raw, (int, float)) and not isinstance(raw, bool) and (isinstance(raw, int) or math.isfinite(raw))


def _budget(raw: Any, where: str) -> TokenAmount:
    share = _is_number(raw) and SMALLEST_SHARE <= raw <= 1
    count = _is_number(raw) and 2 <= raw <= MOST_TOKENS and raw == int(raw)
    if not share and not count:
        raise ConfigError(
            f"{where} {_shown(raw)} is not usable: give a number, such as 0.5: a share from {SMALLEST_SHARE:g} to 1, "
            f"or a whole number of tokens from 2 to {MOST_TOKENS}"
        )
    return TokenAmount(float(raw))


def _pin(raw: Any, where: str) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 <= raw <= MOST_TOKENS:
        raise ConfigError(f"{where} {_shown(raw)} is not usable: give a whole number from 0 to {MOST_TOKENS}, as 256")
    return raw


def _truth(raw: Any, where: str) -> bool:
    if not isinstance(raw, bool):
        raise ConfigError(f"{where} {_shown(raw)} is not usable: give true or false")
    return raw


class Hint(NamedTuple):
    """One thing that a request may ask for.

    Attributes:
        field: its name in :class:`Hints`.
        read: turns what the client wrote into the field's value; gets its place in the request for its ConfigError.
        action: type of its action in ``kv_hints``.
    """

    field: str
    read: Callable[[Any, str], Any]
    action: str


HINTS = {
    "kv_budget": Hint("budget", _budget, "nexus.budget"),
    "kv_evict": Hint("evict", _truth, "nexus.evict"),
    "kv_pin_tokens": Hint("pin", _pin, "nexus.pin"),
    "kv_trace": Hint("trace", _truth, "nexus.trace"),
}
"""By their keys in ``custom_params``."""
KEY_OF = {hint.action: key for key, hint in HINTS.items()}


class Wish(NamedTuple):
    """A hint that a request gave.

    Attributes:
        value: as read.
        where: its place in the request, for messages.
    """

    value: Any
    where: str


def read_hints(params: dict[str, Any] | None, envelope: Any = None) -> Hints:
    """Check what a request asks for, in both places.

    Args:
        params: the request's ``custom_params``, as the client sent them; keys without ``kv_`` belong to others.
        envelope: its ``kv_hints``, SGLang's ``KvHintsEnvelope``; None where it has none.

    Raises:
        ConfigError: not an object, unknown ``kv_*`` key, unusable value, or two wishes that contradict each other;
            with a legal alternative.
    """
    wishes, ignored = _actions(envelope)
    for key, wish in _params(params).items():
        _add(wishes, key, wish)
    evict = wishes.get("kv_evict")
    if evict is not None and not evict.value:
        for key in ("kv_budget", "kv_pin_tokens"):
            if key in wishes:
                raise ConfigError(
                    f"{wishes[key].where} {_shown(wishes[key].value)} contradicts {evict.where} false, which keeps the "
                    f"whole sequence: drop one of them"
                )
    fields = {HINTS[key].field: wish.value for key, wish in wishes.items()}
    return Hints(**fields, ignored=tuple(ignored))


def _params(params: dict[str, Any] | None) -> dict[str, Wish]:
    """The wishes in ``custom_params``."""
    if params is None:
        return {}
    if not isinstance(params, dict):
        raise ConfigError(f'custom_params {_shown(params)} is not usable: give an object such as {{"kv_budget": 0.5}}')
    wishes = {}
    for key, raw in params.items():
        if not isinstance(key, str) or not key.startswith("kv_"):
            continue
        if key not in HINTS:
            nearest = difflib.get_close_matches(key, HINTS, n=1, cutoff=0)[0]
            raise ConfigError(
                f"custom_params {_shown(key)} is not known: did you mean {nearest}? There are {', '.join(HINTS)}"
            )
        where = f"custom_params {key}"
        wishes[key] = Wish(HINTS[key].read(raw, where), where)
    return wishes


def _actions(envelope: Any) -> tuple[dict[str, Wish], list[dict[str, str]]]:
    """The wishes in ``kv_hints``, and the actions that are not ours."""
    wishes: dict[str, Wish] = {}
    ignored = []
    for action in envelope.actions if envelope is not None else ():
        key = KEY_OF.get(action.action_type)
        if key is None or action.action_version != ACTION_VERSION:
            named = ("action_id", "action_type", "action_version")
            ignored.append({name: getattr(action, name) for name in named})
            continue
        where = f"kv_hints {action.action_type}"
        if set(action.payload) != {"value"}:
            raise ConfigError(f'{where} payload {_shown(action.payload)} is not usable: give {{"value": ...}} alone')
        _add(wishes, key, Wish(HINTS[key].read(action.payload["value"], where), where))
    return wishes, ignored


def _add(wishes: dict[str, Wish], key: str, wish: Wish) -> None:
    """Take a wish up, unless another one says something else."""
    known = wishes.setdefault(key, wish)
    if known.value != wish.value:
        raise ConfigError(
            f"{wish.where} {_shown(wish.value)} contradicts {known.where} {_shown(known.value)} of the same request: "
            f"give one of them, or the same value twice"
        )


def _shown(raw: Any) -> str:
    """A value of a client in a message, which it must not fill."""
    if isinstance(raw, TokenAmount):
        raw = raw.value
    try:
        text = repr(raw)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "(a number too long to print)"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def require_room(prompt: int, room: int) -> None:
    """Check that the prompt of a request that is not to be evicted from fits.

    Args:
        prompt: its tokens.
        room: tokens that such a request can have in all.

    Raises:
        ConfigError: with the tokens of both.
    """
    if prompt >= room:
        raise ConfigError(
            f"kv_evict false: the prompt of {prompt} tokens does not fit the KV pool, which has room for {room}. Drop "
            f"kv_evict, or shorten the prompt"
        )
