"""MorphKV: attention of the newest tokens, measured anew at each event."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Blocks, Evidence, Policy, Weighing, check_choice
from .parts.reductions import reduce_window
from .parts.walk import normalise_rows


@dataclass(frozen=True)
class MorphKV(Policy):
    """Fuse the window's rows, each normalised over the blocks outside the forced set.

    Attributes:
        fusion: ``max`` or ``sum`` over the window's rows.
    """

    name = "morphkv"
    source = (
        "Ghadia et al., arXiv 2503.00979; whole blocks, one choice for all layers, rows renormalised after the softmax"
    )

    fusion: str = "max"

    def __post_init__(self) -> None:
        check_choice(self.name, "fusion", self.fusion, ("max", "sum"))

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        rows = normalise_rows(evidence.attention, blocks.candidates)
        return Weighing(reduce_window(rows, self.fusion, blocks.candidates))
