"""Nexus Sampling as in its paper."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Blocks, Evidence, Policy, Weighing, check_choice, check_range, check_whole
from .parts.selectors import sampling_priorities
from .parts.walk import window_weights


@dataclass(frozen=True)
class NexusPaper(Policy):
    """Window mean plus walk, then a weighted reservoir.

    Attributes:
        walk_steps: rows the walk takes, H in the paper.
        walk_weight: factor of the walk, lambda in the paper.
        recency_eps: what the newest block gains over the oldest as a tie-break, eps in the paper.
        draws: uniform numbers per block that are averaged, n in the paper.
        head_reduction: ``mean`` of each head's probabilities, or ``qk``: heads averaged before the softmax,
            which is what the paper writes and which loses retrieval heads.
    """

    name = "nexus-paper"
    source = "Duong et al., arXiv 2606.23961; one choice for all layers instead of one per layer"

    walk_steps: int = 3
    walk_weight: float = 0.5
    recency_eps: float = 1e-6
    draws: int = 5
    head_reduction: str = "mean"

    def __post_init__(self) -> None:
        check_whole(self.name, "walk_steps", self.walk_steps, 0, 1024)
        check_range(self.name, "walk_weight", self.walk_weight, 0, 1e6)
        check_range(self.name, "recency_eps", self.recency_eps, 0, 1)
        check_whole(self.name, "draws", self.draws, 1, 1024)
        check_choice(self.name, "head_reduction", self.head_reduction, ("mean", "qk"))

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        every = torch.ones_like(blocks.forced)
        return Weighing(window_weights(evidence.attention, every, self.walk_steps, self.walk_weight, self.recency_eps))

    def prioritise(self, weights: torch.Tensor, blocks: Blocks, keep: int) -> torch.Tensor:
        return sampling_priorities("exponential-keys", weights, blocks, self.draws)
