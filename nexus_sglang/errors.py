"""The errors that this package raises for a user or an operator. A message names what was wrong and the way out."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting is not usable. The message names the flag, the value and a legal alternative."""


class PolicyError(RuntimeError):
    """A policy raised, or returned what does not fit. The message names it. A server goes on by recency."""


class IntegrityError(RuntimeError):
    """KV slots, rows or counts do not add up: a fault of this package. The message shows the arithmetic."""


class SelfCheckError(RuntimeError):
    """Refusal to serve: another SGLang release, a hook not in place, ranks that differ. The message lists them."""


class RankMismatchError(RuntimeError):
    """Tensor-parallel ranks that must agree do not. The message says about what, and which ranks."""


class ShadowError(RuntimeError):
    """A batch that SGLang planned and the compact rows do not fit each other."""
