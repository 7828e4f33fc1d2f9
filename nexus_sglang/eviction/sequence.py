"""What the evictor knows of one running request: host numbers only."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)
_ODD = np.uint64(0x9E3779B97F4A7C15)


class EvictionEvent(NamedTuple):
    """One event of one sequence.

    Attributes:
        length: tokens of the sequence when it happened; later queries no longer see what went.
        blocks: block numbers evicted, ascending.
        tokens: how many tokens that was.
    """

    length: int
    blocks: list[int]
    tokens: int


@dataclass
class RunningSequence:
    """A request that holds a row.

    Attributes:
        rid: request id. row: its request row. final: tokens it may grow to.
        budget: tokens it may keep resident, after every clip.
        pinned: leading tokens that are never evicted for this request's budget.
        evictable: False when the request asked for no eviction.
        token_ids: returns the sequence's token ids known so far.
        budget_clipped, pin_clipped: more was asked for than the pool can grant.
        floor: what it may hold above its budget, because of a protected prefix (set at each event).
        prefill_left: prompt tokens still to be prefilled. thinned_in_prefill: evicted from between its chunks.
        peak: most tokens it ever held resident.
        events: what was evicted, oldest first.
        report: what it held when it left its row, or None while it runs.
    """

    rid: str
    row: int
    final: int
    budget: int
    token_ids: Callable[[], Sequence[int]]
    pinned: int = 0
    evictable: bool = True
    budget_clipped: bool = False
    pin_clipped: bool = False
    trace: bool = False
    floor: int = 0
    prefill_left: int = 0
    thinned_in_prefill: bool = False
    peak: int = 0
    over_budget: bool = False
    events: list[EvictionEvent] = field(default_factory=list)
    report: dict | None = None

    @property
    def tokens_evicted(self) -> int:
        return sum(event.tokens for event in self.events)


def block_identities(token_ids: Sequence[int], index: np.ndarray, block_size: int) -> np.ndarray:
    """64-bit hashes of blocks: their tokens and where they stand, nothing else.

    Args:
        token_ids: the sequence. index: int64 ``[N]``, block numbers. block_size: tokens per block.

    Returns:
        int64 ``[N]``; 0 for a block whose tokens are not all known yet (it is young, hence forced).
    """
    tokens = np.asarray(token_ids if isinstance(token_ids, (array, np.ndarray)) else list(token_ids), dtype=np.int64)
    whole = len(tokens) // block_size
    grid = tokens[: whole * block_size].reshape(whole, block_size).astype(np.uint64)
    powers = np.ones(block_size, dtype=np.uint64)
    out = np.zeros(len(index), dtype=np.uint64)
    known = index < whole
    with np.errstate(over="ignore"):
        for i in range(1, block_size):
            powers[i] = powers[i - 1] * np.uint64(0xD6E8FEB86659FD93)
        mixed = ((grid[index[known]] + np.uint64(1)) * powers).sum(axis=1, dtype=np.uint64)
        mixed = (mixed ^ (index[known].astype(np.uint64) + np.uint64(1)) * _ODD) & _MASK
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        out[known] = mixed ^ (mixed >> np.uint64(31))
    return out.view(np.int64)
