"""H2O: heavy hitters by accumulated attention."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Blocks, Evidence, Policy, Weighing
from .parts.reductions import reduce_window, remember


@dataclass(frozen=True)
class H2O(Policy):
    """Keep what has received most attention so far; the forced recent window is its recent half."""

    name = "h2o"
    source = "Zhang et al., arXiv 2306.14048; per block over all heads, only each event's window of queries is summed"
    state_width = 1

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        received = reduce_window(evidence.attention.double(), "sum", blocks.candidates)
        total = remember(received, blocks.state[:, 0], "sum", 1.0)
        return Weighing(total, total[:, None])
