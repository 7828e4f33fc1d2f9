"""DefensiveKV: guard against the worst case, not the mean."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Blocks, Evidence, Policy, Weighing
from .parts.reductions import apply_term, reduce_window
from .parts.walk import normalise_rows


@dataclass(frozen=True)
class Defensive(Policy):
    """Maximum over heads, layers and window, floored at the mean, times the value norm."""

    name = "defensive"
    source = (
        "Feng et al., arXiv 2510.13334; maximum over layers too, norm of v for W_o v, no head budgets or first stage"
    )
    head_reduction = "max"
    needs_values = True

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        rows = normalise_rows(evidence.attention, blocks.candidates)
        return Weighing(apply_term(reduce_window(rows, "max-floor", blocks.candidates), evidence, "value"))
