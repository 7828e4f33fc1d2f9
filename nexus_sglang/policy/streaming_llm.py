"""StreamingLLM: sinks and the newest tokens, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Blocks, Evidence, Policy, Weighing


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep the newest blocks; the forced sinks do the rest."""

    name = "streaming-llm"
    source = "Xiao et al., arXiv 2309.17453; whole blocks, keys keep their original positions"
    needs_attention = False

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        return Weighing(blocks.index.double())
