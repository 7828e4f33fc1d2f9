"""One eviction event outside a server: blocks in, kept tokens out, by the rules of ``eviction.evictor``."""

from __future__ import annotations

import math

import torch

from ..config import NexusConfig
from ..policy.base import Blocks, Evidence, Policy


def describe_blocks(length: int, identities: torch.Tensor, config: NexusConfig, budget: int, width: int) -> Blocks:
    """The blocks of a sequence nothing has been evicted from yet, sinks and recent window forced."""
    size = config.block_size
    index = torch.arange(-(-length // size))
    forced = (index * size < config.sink_length) | ((index + 1) * size > length - config.recent_length(budget))
    return Blocks(index, forced, identities, torch.full((len(index), width), math.nan), length, config.seed)


def choose_tokens(policy: Policy, evidence: Evidence, blocks: Blocks, config: NexusConfig, budget: int) -> torch.Tensor:
    """int64 ``[R]``: positions that stay when the sequence is cut to ``budget`` tokens."""
    size, length = config.block_size, blocks.event
    candidates = int(blocks.candidates.sum())
    gone = min(candidates, max(0, math.ceil((length - budget) / size)))
    weights = policy.weigh(evidence, blocks).weights
    priority = policy.prioritise(weights, blocks, candidates - gone)
    order = torch.argsort(priority.double(), stable=True)
    stays = torch.ones(len(blocks.index), dtype=torch.bool)
    stays[order[blocks.candidates[order]][:gone]] = False
    positions = torch.arange(length)
    return positions[stays[positions // size]]
