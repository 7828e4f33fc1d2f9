"""What the evictor knows of one running request, and what it remembers of its events."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from nexus_sglang.device import download, upload

from .block_map import BlockMap
from .request_plan import RequestPlan

_PLACE = np.uint64(0x9E3779B97F4A7C15)
_TOKEN = np.uint64(0xD6E8FEB86659FD93)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Odd constants: two blocks differ in their hash when they differ in place, in a token, or in the order of tokens. The
last step is the finaliser of SplitMix64, (shift, factor) and a shift by 31."""


class EvictionEvent(NamedTuple):
    """One event of one sequence.

    Attributes:
        length: tokens of the sequence when it happened; later queries no longer see what went.
        blocks: numbers of the blocks that went, ascending. A tensor (int64 ``[k]``, on the device) until somebody asks.
        tokens: how many tokens that was.
    """

    length: int
    blocks: list[int] | torch.Tensor
    tokens: int


@dataclass
class RunningSequence:
    """A request that holds a row.

    Attributes:
        rid: request id.
        row: its request row.
        final: tokens it may grow to.
        plan: what it may keep.
        token_ids: returns the sequence's token ids known so far.
        floor: tokens it may hold above its budget because of a protected prefix; set at each event.
        prefill_left: prompt tokens still to be prefilled.
        evicted_in_prefill: it was evicted from between the chunks of its prompt.
        returned: it was evicted from, retracted, and holds a row again.
        peak: most tokens it ever held resident.
        over_budget: it has held more than it may, at least once.
        evictions: events so far.
        tokens_evicted: tokens they took; one that was computed again and went again counts twice.
        block_map: what the host knows of its row; None before it was asked for.
        report: what it held when it left its row; None while it runs.
    """

    rid: str
    row: int
    final: int
    plan: RequestPlan
    token_ids: Callable[[], Sequence[int]]
    floor: int = 0
    prefill_left: int = 0
    evicted_in_prefill: bool = False
    returned: bool = False
    peak: int = 0
    over_budget: bool = False
    evictions: int = 0
    tokens_evicted: int = 0
    block_map: BlockMap | None = None
    report: dict | None = None
    _events: list[EvictionEvent] = field(default_factory=list, repr=False)
    _identities: torch.Tensor | None = field(default=None, repr=False)

    @property
    def budget(self) -> int:
        """Tokens it may keep resident: all it can grow to, where it is not evicted from."""
        return self.final if self.plan.budget is None else self.plan.budget

    @property
    def pinned(self) -> int:
        """Leading tokens that are never evicted for this request's budget."""
        return self.plan.pinned

    @property
    def evictable(self) -> bool:
        """False when the request asked for no eviction."""
        return self.plan.evict

    @property
    def trace(self) -> bool:
        """Whether which blocks each event took is remembered."""
        return self.plan.trace

    def carry_over(self, before: RunningSequence) -> None:
        """Go on counting where the same request stopped.

        Args:
            before: what it was in the row that it held until it was retracted.
        """
        self.returned = before.evictions > 0
        self.peak = before.peak
        self.over_budget = before.over_budget
        self.evictions = before.evictions
        self.tokens_evicted = before.tokens_evicted
        self._events = before._events

    def record(self, length: int, blocks: torch.Tensor, tokens: int, keep: bool) -> None:
        """An event took place.

        Args:
            length: tokens of the sequence.
            blocks: int64 ``[k]``, perhaps on the device, numbers of the blocks that went.
            tokens: how many tokens went with them.
            keep: whether somebody will ask which blocks went.
        """
        self.evictions += 1
        self.tokens_evicted += tokens
        if keep:
            self._events.append(EvictionEvent(length, blocks, tokens))

    @property
    def events(self) -> list[EvictionEvent]:
        """Events that were kept, oldest first, with lists of blocks. One wait for all that are still on the device."""
        waiting = {i: event.blocks for i, event in enumerate(self._events) if isinstance(event.blocks, torch.Tensor)}
        if waiting:
            fetched = download(torch.cat(list(waiting.values())))
            parts = fetched.split([len(blocks) for blocks in waiting.values()])
            for i, blocks in zip(waiting, parts, strict=True):
                self._events[i] = self._events[i]._replace(blocks=blocks.tolist())
        return self._events

    def identities(self, count: int, block_size: int, device: str | torch.device) -> torch.Tensor:
        """:func:`block_identities` of the sequence's first blocks, each hashed once.

        Args:
            count: blocks wanted.
            block_size: tokens per block.
            device: where they are wanted; the same at every call.

        Returns:
            int64 ``[count]`` on the device; 0 for blocks whose tokens are not all known yet. Those are the newest,
            hence forced.
        """
        ids = self.token_ids()
        known = self._identities
        if known is None:
            known = torch.empty(0, dtype=torch.int64, device=device)
        if len(ids) // block_size > len(known):
            new = torch.from_numpy(block_identities(ids, block_size, len(known)))
            known = self._identities = torch.cat((known, upload(new, device)))
        return torch.nn.functional.pad(known, (0, max(0, count - len(known))))[:count]


def block_identities(token_ids: Sequence[int], block_size: int, first: int = 0) -> np.ndarray:
    """64-bit hashes of blocks: of their tokens and where they stand, nothing else.

    Args:
        token_ids: the sequence.
        block_size: tokens per block.
        first: number of the first block wanted.

    Returns:
        int64, one per block from ``first`` on whose tokens are all there.
    """
    wanted = token_ids[first * block_size :]
    tokens = np.asarray(wanted if isinstance(wanted, (array, np.ndarray)) else list(wanted), dtype=np.int64)
    whole = len(tokens) // block_size
    grid = tokens[: whole * block_size].reshape(whole, block_size).astype(np.uint64)
    place = np.arange(first + 1, first + whole + 1, dtype=np.uint64)
    powers = np.ones(block_size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for i in range(1, block_size):
            powers[i] = powers[i - 1] * _TOKEN
        mixed = ((grid + np.uint64(1)) * powers).sum(axis=1, dtype=np.uint64)
        mixed = mixed ^ place * _PLACE
        for shift, factor in _MIX:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int64)
