"""One eviction event outside a server: blocks in, kept tokens out, by the rules of ``eviction.evictor``."""

from __future__ import annotations

import math

import torch

from nexus_sglang.config import NexusConfig
from nexus_sglang.eviction.evictor import forced_blocks
from nexus_sglang.policy.base import Blocks, Evidence, Policy, Weighing


def describe_blocks(
    length: int,
    identities: torch.Tensor,
    config: NexusConfig,
    budget: int,
    width: int,
    resident: torch.Tensor | None = None,
) -> Blocks:
    """The blocks of a sequence that hold resident tokens, none judged yet, sinks and recent window forced.

    Args:
        length: tokens of the sequence. identities: int64, one per block of the whole sequence.
        width: floats of state per block. resident: int64 ``[R]``, positions still cached; None is all of them.
    """
    size = config.block_size
    positions = torch.arange(length) if resident is None else resident
    index = torch.unique_consecutive(positions // size)
    forced = forced_blocks(index, size, config.sink_length, length - config.recent_length(budget))
    return Blocks(index, forced, identities[index], torch.full((len(index), width), math.nan), length, config.seed)


def choose_blocks(
    policy: Policy, evidence: Evidence, blocks: Blocks, excess: int, block_size: int
) -> tuple[torch.Tensor, Weighing]:
    """int64 ``[n]``, ascending: numbers of the blocks that stay when ``excess`` tokens must go; and the verdict."""
    candidates = int(blocks.candidates.sum())
    gone = min(candidates, max(0, math.ceil(excess / block_size)))
    weighing = policy.weigh(evidence, blocks)
    priority = policy.prioritise(weighing.weights, blocks, candidates - gone)
    order = torch.argsort(priority.double(), stable=True)
    stays = torch.ones(len(blocks.index), dtype=torch.bool)
    stays[order[blocks.candidates[order]][:gone]] = False
    return blocks.index[stays], weighing


def choose_tokens(policy: Policy, evidence: Evidence, blocks: Blocks, config: NexusConfig, budget: int) -> torch.Tensor:
    """int64 ``[R]``: positions that stay when a sequence that holds everything is cut to ``budget`` tokens."""
    kept, _ = choose_blocks(policy, evidence, blocks, blocks.event - budget, config.block_size)
    positions = torch.arange(blocks.event)
    return positions[torch.isin(positions // config.block_size, kept)]
