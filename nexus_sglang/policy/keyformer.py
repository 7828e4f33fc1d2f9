"""Keyformer: accumulated attention under Gumbel noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Blocks, Evidence, Policy, Weighing, check_range
from .parts.draws import uniforms
from .parts.reductions import remember


@dataclass(frozen=True)
class Keyformer(Policy):
    """Sum over the window of ``softmax((log p + g) / tau)``, added up from event to event.

    Attributes:
        tau_start: temperature at the first event.
        tau_end: temperature from event ``tau_events`` on.
        tau_events: events over which the temperature rises.
    """

    name = "keyformer"
    source = "Adnan et al., arXiv 2403.09054; noise per block on head-averaged probabilities instead of per token logit"
    state_width = 2  # the sum, and how many events it spans

    tau_start: float = 1.0
    tau_end: float = 2.0
    tau_events: int = 64

    def __post_init__(self) -> None:
        check_range(self.name, "tau_start", self.tau_start, 1e-3, 1e3)
        check_range(self.name, "tau_end", self.tau_end, 1e-3, 1e3)
        check_range(self.name, "tau_events", self.tau_events, 1, 1e9)

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        events = torch.nan_to_num(blocks.state[:, 1].double())
        progress = (events.max() / self.tau_events).clamp(max=1)  # stays on the device
        tau = self.tau_start + (self.tau_end - self.tau_start) * progress
        rows = evidence.attention.double()
        u = uniforms(blocks.seed, blocks.identity, blocks.event, rows.shape[0])
        noisy = (rows.clamp_min(1e-300).log() - (-u.log()).log()) / tau
        total = remember(torch.softmax(noisy, dim=1).sum(dim=0), blocks.state[:, 0], "sum", 1.0)
        return Weighing(total, torch.stack((total, events + 1), dim=1))
