"""What the evictor knows of one running request."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from nexus_sglang.device import download, upload

from .block_map import BlockMap

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
        evictable: False when the request asked for no eviction. trace: remember which blocks each event took.
        token_ids: returns the sequence's token ids known so far.
        budget_clipped, pin_clipped: more was asked for than the pool can grant.
        floor: what it may hold above its budget, because of a protected prefix (set at each event).
        prefill_left: prompt tokens still to be prefilled. thinned_in_prefill: evicted from between its chunks.
        returned: it was evicted from, retracted, and holds a row again. peak: most tokens it ever held resident.
        evictions, tokens_evicted: events so far, and the tokens they took; what was computed again may go again.
        block_map: what the host knows of its row, or None.
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
    returned: bool = False
    peak: int = 0
    over_budget: bool = False
    evictions: int = 0
    tokens_evicted: int = 0
    block_map: BlockMap | None = None
    report: dict | None = None
    _events: list[EvictionEvent] = field(default_factory=list, repr=False)
    _identities: torch.Tensor | None = field(default=None, repr=False)

    def carry_over(self, before: RunningSequence) -> None:
        """The same request held another row until it was retracted: what is told of it goes on from there."""
        self.returned, self.peak, self.over_budget = before.evictions > 0, before.peak, before.over_budget
        self.evictions, self.tokens_evicted, self._events = before.evictions, before.tokens_evicted, before._events

    def record(self, length: int, blocks: torch.Tensor, tokens: int, keep: bool) -> None:
        """An event took place. ``blocks`` (int64 ``[k]``, perhaps on the device) are kept only where somebody will ask."""
        self.evictions += 1
        self.tokens_evicted += tokens
        if keep:
            self._events.append(EvictionEvent(length, blocks, tokens))

    @property
    def events(self) -> list[EvictionEvent]:
        """What was evicted, oldest first, of a sequence that is traced; waits for the device."""
        untold = [i for i, event in enumerate(self._events) if isinstance(event.blocks, torch.Tensor)]
        if untold:
            told = download(torch.cat([self._events[i].blocks for i in untold]))
            for i, blocks in zip(untold, told.split([len(self._events[i].blocks) for i in untold]), strict=True):
                self._events[i] = self._events[i]._replace(blocks=blocks.tolist())
        return self._events

    def identities(self, count: int, block_size: int, device: str | torch.device) -> torch.Tensor:
        """int64 ``[count]`` on the device: :func:`block_identities` of the sequence's first blocks, each hashed once; 0
        for blocks whose tokens are not all known yet (they are young, hence forced)."""
        ids, known = self.token_ids(), self._identities
        if known is None:
            known = torch.empty(0, dtype=torch.int64, device=device)
        if len(ids) // block_size > len(known):
            known = torch.cat((known, upload(torch.from_numpy(block_identities(ids, block_size, len(known))), device)))
            self._identities = known
        return torch.nn.functional.pad(known, (0, max(0, count - len(known))))[:count]


def block_identities(token_ids: Sequence[int], block_size: int, first: int = 0) -> np.ndarray:
    """64-bit hashes of blocks: their tokens and where they stand, nothing else.

    Args:
        token_ids: the sequence. block_size: tokens per block. first: number of the first block wanted.

    Returns:
        int64, one per block from ``first`` on whose tokens are all there.
    """
    tokens = token_ids[first * block_size :]
    tokens = np.asarray(tokens if isinstance(tokens, (array, np.ndarray)) else list(tokens), dtype=np.int64)
    whole = len(tokens) // block_size
    grid = tokens[: whole * block_size].reshape(whole, block_size).astype(np.uint64)
    place = np.arange(first + 1, first + whole + 1, dtype=np.uint64)
    powers = np.ones(block_size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for i in range(1, block_size):
            powers[i] = powers[i - 1] * np.uint64(0xD6E8FEB86659FD93)
        mixed = ((grid + np.uint64(1)) * powers).sum(axis=1, dtype=np.uint64)
        mixed = mixed ^ place * _ODD
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int64)
