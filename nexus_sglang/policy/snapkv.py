"""SnapKV: what the last window attends to on average stays."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Blocks, Evidence, Policy, Weighing
from .parts.reductions import reduce_window


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keep the blocks with the largest mean attention over the window."""

    name = "snapkv"
    source = (
        "Li et al., arXiv 2404.14469; the sum over a block stands for the pooling, one choice for all layers and heads"
    )

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        return Weighing(reduce_window(evidence.attention.double(), "mean", blocks.candidates))
