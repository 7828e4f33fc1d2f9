"""TOVA: what the newest query attends to least goes."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Blocks, Evidence, Policy, Weighing
from .parts.reductions import reduce_window


@dataclass(frozen=True)
class TOVA(Policy):
    """Keep the blocks the newest query attends to most."""

    name = "tova"
    source = "Oren et al., arXiv 2401.06104; whole blocks and one choice for all layers instead of tokens per layer"

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        return Weighing(reduce_window(evidence.attention.double(), "last", blocks.candidates))
