"""Four choices, put together by name: the grid behind most of the literature."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import HEAD_REDUCTIONS, Blocks, Evidence, Policy, Weighing, check_choice, check_range, check_whole
from .parts.reductions import TERMS, WINDOW_REDUCTIONS, apply_term, reduce_window, remember
from .parts.selectors import SELECTORS, select
from .parts.walk import normalise_rows, walk

_WITH_STATE = ("running-average", "decaying-max")


@dataclass(frozen=True)
class Composed(Policy):
    """Window reduction, head reduction, value or key term, selector.

    Attributes:
        window: how the W rows become one, see ``policy.parts.reductions.reduce_window``.
        decay: factor of the two window reductions with state.
        walk_steps: rows the walk takes, H in the paper.
        walk_weight: factor of the walk beside the reduced window, lambda in the paper; 0 leaves it out.
        head_reduction: ``max``, ``mean``, ``top`` or ``qk``.
        term: ``none``, ``value`` (norm) or ``key`` (distinctiveness), a factor on the weights.
        selector: ``top-k``, ``exponential-keys``, ``sequential-poisson`` or ``core-sampled``.
        sharpness: beta of ``w**beta`` before a random selector.
        draws: uniform numbers per block that exponential keys average.
        sampled_share: share of the kept candidates that ``core-sampled`` draws.
    """

    name = "composed"
    source = (
        "this project; blocks and one choice for all layers, each part by its own paper (policy/parts/reductions.py)"
    )
    window: str = "mean"
    decay: float = 0.9
    walk_steps: int = 3
    walk_weight: float = 0.0
    head_reduction: str = "mean"
    term: str = "none"
    selector: str = "top-k"
    sharpness: float = 1.0
    draws: int = 1
    sampled_share: float = 0.1

    def __post_init__(self) -> None:
        check_choice(self.name, "window", self.window, WINDOW_REDUCTIONS)
        check_range(self.name, "decay", self.decay, 0, 1)
        check_whole(self.name, "walk_steps", self.walk_steps, 0, 1024)
        check_range(self.name, "walk_weight", self.walk_weight, 0, 1e6)
        check_choice(self.name, "head_reduction", self.head_reduction, HEAD_REDUCTIONS)
        check_choice(self.name, "term", self.term, TERMS)
        check_choice(self.name, "selector", self.selector, SELECTORS)
        check_range(self.name, "sharpness", self.sharpness, 0, 64)
        check_whole(self.name, "draws", self.draws, 1, 1024)
        check_range(self.name, "sampled_share", self.sampled_share, 0, 1)

    @property
    def state_width(self) -> int:  # type: ignore[override]  # it depends on a field
        return 1 if self.window in _WITH_STATE else 0

    @property
    def needs_values(self) -> bool:  # type: ignore[override]
        return self.term == "value"

    @property
    def needs_keys(self) -> bool:  # type: ignore[override]
        return self.term == "key"

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        rows = normalise_rows(evidence.attention, blocks.candidates)
        scores = reduce_window(rows, self.window, blocks.candidates) + self.walk_weight * walk(rows, self.walk_steps)
        state = None
        if self.window in _WITH_STATE:
            scores = remember(scores, blocks.state[:, 0], self.window, self.decay)
            state = scores[:, None]
        return Weighing(apply_term(scores, evidence, self.term), state)

    def prioritise(self, weights: torch.Tensor, blocks: Blocks, keep: int) -> torch.Tensor:
        return select(self.selector, weights, blocks, keep, self.draws, self.sharpness, self.sampled_share)
