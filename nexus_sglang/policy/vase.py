"""VaSE: attention-weighted sampling beside a reserve for large values."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Blocks, Evidence, Policy, Weighing, check_range
from .parts.reductions import reduce_window
from .parts.selectors import interleave, sampling_priorities


@dataclass(frozen=True)
class VaSE(Policy):
    """A share of the room goes to the largest values, the rest is drawn without replacement by window attention.

    Attributes:
        value_reserve: share of the kept candidates chosen by value.
    """

    name = "vase"
    source = "VaSE (AttnV), arXiv 2606.03928; whole blocks for all layers, mean value norm for the range of values"
    needs_values = True

    value_reserve: float = 0.25

    def __post_init__(self) -> None:
        check_range(self.name, "value_reserve", self.value_reserve, 0, 1)

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        attention = reduce_window(evidence.attention.double(), "mean", blocks.candidates)
        drawn = sampling_priorities("exponential-keys", attention, blocks)
        shares = [self.value_reserve, 1 - self.value_reserve]
        return Weighing(interleave([evidence.value_norm, drawn], shares, blocks.candidates))
