"""The default policy: Nexus Sampling with what measurement changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import HEAD_REDUCTIONS, Blocks, Evidence, Policy, Weighing, check_choice, check_range, check_whole
from .parts.reductions import flatness
from .parts.selectors import core_then, interleave, sampling_priorities
from .parts.walk import window_weights

PEAKED = 0.90
"""Flatness of the attention part below which values get no share of the room."""
FLAT = 0.95
"""Flatness of the attention part above which values get their full share of the room."""


@dataclass(frozen=True)
class Nexus(Policy):
    """Window mean plus walk over maxima, beside a share for unusual values; a certain core and a sampled rest.

    What differs from ``nexus-paper``, and why (docs/design/policies.md has the numbers):

    * Rows are maxima over heads and layers. A mean over heads hides the few that retrieve.
    * The walk runs on the candidates only. Sinks would dominate every inner product.
    * Where the window's attention is flat, a share of the room goes to blocks whose values point away from the mean.
      The last window says little about a question that has not been asked yet.
    * All but ``sampled_share`` of the room goes to the highest weights for certain, and the rest is drawn by sequential
      Poisson. Exponential keys would drop blocks at the threshold.

    Attributes:
        walk_steps: rows the walk takes, H in the paper.
        walk_weight: factor of the walk, lambda in the paper.
        recency_eps: what the newest block gains over the oldest as a tie-break, eps in the paper.
        value_share: share of the kept candidates for the most unusual values where attention is flat. Flatness was
            measured as 0.85 to 0.93 with a question in the window and 0.95 to 0.97 without.
        sampled_share: share of the kept candidates that is drawn at random instead of taken from the top.
        sharpness: beta of ``w**beta`` for the drawn part.
        head_reduction: ``max``, ``mean``, ``top`` or ``qk``.
    """

    name = "nexus"
    source = (
        "after Duong et al., arXiv 2606.23961; maxima over heads and layers, a share for unusual values, certain core"
    )

    walk_steps: int = 3
    walk_weight: float = 0.5
    recency_eps: float = 1e-6
    value_share: float = 0.6
    sampled_share: float = 0.1
    sharpness: float = 8.0
    head_reduction: str = "max"

    def __post_init__(self) -> None:
        check_whole(self.name, "walk_steps", self.walk_steps, 0, 1024)
        check_range(self.name, "walk_weight", self.walk_weight, 0, 1e6)
        check_range(self.name, "recency_eps", self.recency_eps, 0, 1)
        check_range(self.name, "value_share", self.value_share, 0, 1)
        check_range(self.name, "sampled_share", self.sampled_share, 0, 1)
        check_range(self.name, "sharpness", self.sharpness, 0, 64)
        check_choice(self.name, "head_reduction", self.head_reduction, HEAD_REDUCTIONS)

    @property
    def needs_distinct_values(self) -> bool:  # type: ignore[override]  # it depends on a field
        return self.value_share > 0

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        candidates = blocks.candidates
        weights = window_weights(evidence.attention, candidates, self.walk_steps, self.walk_weight, self.recency_eps)
        if self.value_share == 0:
            return Weighing(weights)
        flat = ((flatness(weights, candidates) - PEAKED) / (FLAT - PEAKED)).clamp(0, 1)
        share = self.value_share * flat
        return Weighing(interleave([evidence.value_distinctiveness, weights], [share, 1 - share], candidates))

    def prioritise(self, weights: torch.Tensor, blocks: Blocks, keep: int) -> torch.Tensor:
        drawn = sampling_priorities("sequential-poisson", weights, blocks, beta=self.sharpness)
        return core_then(drawn, weights, keep - round(self.sampled_share * keep), blocks.candidates)
