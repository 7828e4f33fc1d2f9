"""One eviction event outside a server: the lab's blocks, the server's choice."""

from __future__ import annotations

import math

import torch

from nexus_sglang.config import NexusConfig
from nexus_sglang.eviction.choice import choose, forced_blocks
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
        length: tokens of the sequence.
        identities: int64, one per block of the whole sequence.
        config: says how long sinks and recent window are, and the seed.
        budget: tokens the sequence may keep.
        width: floats of state per block.
        resident: int64 ``[R]``, ascending, positions still cached; None is all of them.

    Returns:
        N blocks.
    """
    size = config.block_size
    positions = torch.arange(length) if resident is None else resident
    index = torch.unique_consecutive(positions // size)
    forced = forced_blocks(index, size, config.sink_length, length - config.recent_length(budget))
    return Blocks(index, forced, identities[index], torch.full((len(index), width), math.nan), length, config.seed)


def keep_blocks(
    policy: Policy, evidence: Evidence, blocks: Blocks, excess: int, block_size: int
) -> tuple[torch.Tensor, Weighing]:
    """Which blocks stay when ``excess`` tokens must go from blocks whose candidates are whole.

    Returns:
        int64 ``[n]``, ascending: numbers of the blocks that stay; and the policy's verdict.
    """
    choice = choose(policy, evidence, blocks, int(blocks.candidates.sum()), excess, block_size)
    stays = torch.ones(len(blocks.index), dtype=torch.bool)
    stays[choice.ordinals] = False
    return blocks.index[stays], choice.weighing


def keep_tokens(policy: Policy, evidence: Evidence, blocks: Blocks, config: NexusConfig, budget: int) -> torch.Tensor:
    """int64 ``[R]``: positions that stay when a sequence that holds everything is cut to ``budget`` tokens."""
    kept, _ = keep_blocks(policy, evidence, blocks, blocks.event - budget, config.block_size)
    positions = torch.arange(blocks.event)
    return positions[torch.isin(positions // config.block_size, kept)]
