"""A policy of one's own: attention that spills over to neighbouring blocks, so that passages stay whole.

    PYTHONPATH=examples nexus-sglang policies custom_policy:Passages
    PYTHONPATH=examples python -m sglang.launch_server --model-path MODEL --kv-policy custom_policy:Passages

What a question asks for often crosses the border between two blocks, while attention marks only one of them. SnapKV
pools scores over neighbouring tokens for that reason; here a block's neighbours get a share of its weight.
"""

from dataclasses import dataclass

import torch

from nexus_sglang.policy import Blocks, Evidence, Policy, Weighing
from nexus_sglang.policy.base import check_range


@dataclass(frozen=True)
class Passages(Policy):
    """Keep the blocks that some head looks at, and what stands right beside them.

    Attributes:
        spill: share of its weight that a block lends to the block before and the block after, 0 to 1.
    """

    name = "passages"
    source = "examples/custom_policy.py; SnapKV's pooling (arXiv 2404.14469), between blocks instead of tokens"
    head_reduction = "max"  # the mean would hide the few heads that retrieve

    spill: float = 0.25

    def __post_init__(self) -> None:
        check_range(self.name, "spill", self.spill, 0, 1)

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        weights = evidence.attention.double().mean(dim=0)
        lent = self.spill * weights.masked_fill(blocks.forced, 0)  # sinks and recent tokens lend nothing
        touching = blocks.index.diff() == 1  # evicted blocks leave gaps
        weights[1:] = torch.maximum(weights[1:], lent[:-1] * touching)
        weights[:-1] = torch.maximum(weights[:-1], lent[1:] * touching)
        return Weighing(weights)
