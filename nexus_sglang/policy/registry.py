"""Policies by name. ``module:Class`` loads one from outside the package."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import Any

from nexus_sglang.errors import ConfigError

from .base import HEAD_REDUCTIONS, Policy
from .composed import Composed
from .defensive import Defensive
from .expected_attention import ExpectedAttention
from .h2o import H2O
from .keydiff import KeyDiff
from .keyformer import Keyformer
from .morphkv import MorphKV
from .nexus import Nexus
from .nexus_paper import NexusPaper
from .random_blocks import RandomBlocks
from .snapkv import SnapKV
from .streaming_llm import StreamingLLM
from .tova import TOVA
from .vase import VaSE

_ALL: tuple[type[Policy], ...] = (
    Nexus,
    NexusPaper,
    StreamingLLM,
    H2O,
    TOVA,
    SnapKV,
    MorphKV,
    Keyformer,
    VaSE,
    KeyDiff,
    ExpectedAttention,
    Defensive,
    RandomBlocks,
    Composed,
)
POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in _ALL}
"""Every policy of the package, by the name that ``--kv-policy`` takes."""


def find_policy(name: str) -> type[Policy]:
    """The class behind ``--kv-policy``.

    Args:
        name: a registered name, or ``module:Class``.

    Raises:
        ConfigError: unknown name (with the list and the nearest match), or a module that does not load.
    """
    if name in POLICIES:
        return POLICIES[name]
    if ":" in name:
        return _load(name)
    near = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"--kv-policy {name!r} is not registered: did you mean {near!r}? Registered: {', '.join(sorted(POLICIES))}; "
        "your own is given as module:Class"
    )


def _load(name: str) -> type[Policy]:
    """The class that ``module:Class`` names, from outside the package."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as err:
        raise ConfigError(
            f"--kv-policy {name!r} does not load ({err}): give module:Class with the module on PYTHONPATH, or 'nexus'"
        ) from err
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"--kv-policy {name!r} is not a subclass of nexus_sglang.policy.base.Policy; try 'nexus'")
    return found


def make_policy(name: str, fields: dict[str, Any]) -> Policy:
    """The policy object with its fields set.

    Args:
        name: a registered name, or ``module:Class``.
        fields: what ``--kv-policy-config`` sets; the other fields have their defaults.

    Raises:
        ConfigError: unknown name, unknown field, or a value the policy refuses.
    """
    cls = find_policy(name)
    known = [f.name for f in dataclasses.fields(cls)]
    for key in fields:
        if key not in known:
            listing = ", ".join(known) or "none"
            raise ConfigError(f"--kv-policy-config field {key!r} is not one of {name}'s: {listing}")
    try:
        policy = cls(**fields)
    except (TypeError, ValueError) as err:
        raise ConfigError(f"--kv-policy-config is refused by {name}: {err}") from err
    if policy.head_reduction not in HEAD_REDUCTIONS:
        raise ConfigError(f"--kv-policy {name}: head_reduction must be one of {', '.join(HEAD_REDUCTIONS)}")
    return policy
