"""Every error that this package raises for a user or an operator. Messages name what was wrong and the way out."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting is not usable. The message names the flag, the value and a legal alternative."""


class PolicyError(RuntimeError):
    """A policy returned something that cannot be an order of blocks."""


class IntegrityError(RuntimeError):
    """Slots, rows or counts do not add up. The message shows the arithmetic."""


class SelfCheckError(RuntimeError):
    """The plugin does not sit in SGLang as it must. The message lists what is wrong."""


class RankMismatchError(RuntimeError):
    """Ranks that must agree do not. The message says about what, and which ranks."""


class ShadowError(RuntimeError):
    """A batch and the compact rows do not fit each other."""
