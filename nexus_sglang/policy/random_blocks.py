"""The control: blocks at random."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Blocks, Evidence, Policy, Weighing
from .parts.draws import uniforms


@dataclass(frozen=True)
class RandomBlocks(Policy):
    """Keep a uniform sample, drawn anew at each event."""

    name = "random"
    source = "control; a counter-based draw per block and event"
    needs_attention = False

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        return Weighing(uniforms(blocks.seed, blocks.identity, blocks.event, 1)[0])
