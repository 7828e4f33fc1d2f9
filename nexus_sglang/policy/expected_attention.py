"""Expected Attention: what queries like the recent ones would attend to."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Blocks, Evidence, Policy, Weighing


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Keep the blocks with the largest expected attention times value norm under Gaussian queries."""

    name = "expected-attention"
    source = "Devoto et al., arXiv 2510.00636; moments of the window's rotated queries, mean over layers, whole blocks"
    needs_attention = False
    needs_expected = True

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        return Weighing(evidence.expected.double())
