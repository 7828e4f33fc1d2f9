"""The contract between the evictor and a policy. Imports torch only.

A policy is a frozen dataclass with one method that must be written, :meth:`Policy.weigh`, and one
that usually need not be, :meth:`Policy.prioritise`. It sees one sequence at one eviction event:
statistics in, one number per block out. It knows nothing of requests, slots or SGLang.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

HEAD_REDUCTIONS = ("max", "mean", "top", "qk")


class Evidence(NamedTuple):
    """What was measured about the N blocks of a sequence, for this event.

    Attributes:
        attention: float32 ``[W, N]``. Row w is window query w's attention summed per block, oldest
            query first, reduced over heads and layers as ``Policy.head_reduction`` asks; ``max`` rows
            do not sum to 1. ``W`` may be shorter than the configured window, never 0. None unless
            ``Policy.needs_attention``.
        value_norm: float32 ``[N]``, mean L2 norm of the block's value vectors over layers and heads,
            or None unless ``Policy.needs_values``.
        key_distinctiveness: float32 ``[N]`` in [0, 2], mean of 1 - cos(key, mean key) over the block's
            tokens, layers and heads, or None unless ``Policy.needs_keys``.
        expected: float32 ``[N]``, attention expected of queries like the window's (arXiv 2510.00636) times the
            value norm, summed per block, reduced over heads and layers as ``Policy.head_reduction`` asks; None
            unless ``Policy.needs_expected``.
        value_distinctiveness: float32 ``[N]`` in [0, 2], the same of value vectors, or None unless
            ``Policy.needs_distinct_values``.
    """

    attention: torch.Tensor | None = None
    value_norm: torch.Tensor | None = None
    key_distinctiveness: torch.Tensor | None = None
    expected: torch.Tensor | None = None
    value_distinctiveness: torch.Tensor | None = None


class Blocks(NamedTuple):
    """The blocks of one sequence that still hold resident tokens, in order.

    Attributes:
        index: int64 ``[N]``, block number in the sequence (position // block size), ascending.
        forced: bool ``[N]``: sinks, recent, shared or pinned; kept whatever the policy says.
        identity: int64 ``[N]``, a hash of the block's tokens and position; keys the random draws.
        state: float32 ``[N, state_width]``, what the policy wrote at earlier events; NaN before that.
        event: the sequence's length in tokens at this event (a counter that no batch can change).
        seed: the server's seed.
    """

    index: torch.Tensor
    forced: torch.Tensor
    identity: torch.Tensor
    state: torch.Tensor
    event: int
    seed: int

    @property
    def candidates(self) -> torch.Tensor:
        """bool ``[N]``: the blocks a policy decides about."""
        return ~self.forced


class Weighing(NamedTuple):
    """A policy's verdict.

    Attributes:
        weights: float ``[N]``, non-negative, larger is more worth keeping. Forced entries are ignored.
        state: float32 ``[N, state_width]`` to keep with the blocks, or None to leave it as it is.
    """

    weights: torch.Tensor
    state: torch.Tensor | None = None


@dataclass(frozen=True)
class Policy(ABC):
    """Base of every policy. Fields are what ``--kv-policy-config`` may set.

    Class attributes:
        name: what ``--kv-policy`` says.
        source: the paper, and in a few words how the block form differs from it.
        head_reduction: how heads and layers become one row: ``max``, ``mean`` (of probabilities),
            ``top`` (mean of the strongest few layer-head pairs), ``qk`` (heads averaged before the softmax).
        needs_attention, needs_values, needs_keys, needs_expected, needs_distinct_values: which evidence to measure.
        state_width: floats of state per block.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    head_reduction: ClassVar[str] = "mean"
    needs_attention: ClassVar[bool] = True
    needs_values: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = False
    needs_expected: ClassVar[bool] = False
    needs_distinct_values: ClassVar[bool] = False
    state_width: ClassVar[int] = 0

    @abstractmethod
    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        """Weigh the blocks of one sequence. Pure; same arguments, same answer."""

    def prioritise(self, weights: torch.Tensor, blocks: Blocks, keep: int) -> torch.Tensor:
        """Order in which blocks are kept; the evictor drops candidates from the lowest up.

        Args:
            weights: float ``[N]`` from :meth:`weigh`.
            keep: how many candidates will stay (a host decision; 0 <= keep <= candidates).

        Returns:
            float64 ``[N]``; ties are broken in favour of the newer block. The default is top-K by weight.
        """
        return weights.double()


def check_choice(policy: str, fieldname: str, value: object, options: tuple) -> None:
    """Raise ValueError naming the policy's field, the value and the options."""
    if value not in options:
        raise ValueError(f"{policy}: {fieldname} {value!r} is not one of {', '.join(map(str, options))}")


def check_range(policy: str, fieldname: str, value: object, low: float, high: float) -> None:
    """Raise ValueError unless value is a number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{policy}: {fieldname} {value!r} is not a number from {low:g} to {high:g}")


def check_whole(policy: str, fieldname: str, value: object, low: int, high: int) -> None:
    """Raise ValueError unless value is a whole number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{policy}: {fieldname} {value!r} is not a whole number from {low} to {high}")
