"""KeyDiff: unusual keys stay."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Blocks, Evidence, Policy, Weighing


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keep the blocks whose keys differ most in direction from the mean key; looks at no query."""

    name = "keydiff"
    source = "Park et al., arXiv 2504.15364; mean over a block's tokens, layers and heads instead of per token and head"
    needs_attention = False
    needs_keys = True

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        return Weighing(evidence.key_distinctiveness.double().clamp_min(0))
