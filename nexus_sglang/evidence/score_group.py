"""Ranks that hold the heads of a sequence between them (tensor parallelism), and how their scores become one.

Every rank has the same requests, page table and seed, but only its own heads. What is measured is joined here before a
policy sees it, so that all ranks choose the same blocks. Knows process groups, not SGLang.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from nexus_sglang.errors import RankMismatchError


class ScoreGroup:
    """One rank alone; and what groups of several have in common.

    Results are the same bits on every rank: a maximum does not depend on the order, and each rank takes sums from the
    same gathered parts in the same order.

    Attributes:
        rank: this rank's number.
        world: how many ranks there are.
    """

    rank: int = 0
    world: int = 1

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """``[world, *shape]``: this tensor of every rank, in the order of ranks. Shapes must agree."""
        return part[None]

    def largest(self, part: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over ranks."""
        return part

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        first, *rest = self.gather(part)
        for other in rest:
            first = first + other
        return first

    def average(self, part: torch.Tensor) -> torch.Tensor:
        """Mean over ranks. Right for means over heads too: ranks hold equally many, replicated key heads included."""
        return self.total(part) / self.world if self.world > 1 else part

    def digests(self, text: str) -> list[str]:
        """A hash of every rank's ``text``, in the order of ranks."""
        return [hashlib.sha256(text.encode()).hexdigest()]

    def require_same(self, what: str, text: str) -> None:
        """Compare a text between ranks; every rank must call this, and every rank raises.

        Args:
            what: what the text describes, for the message.
            text: this rank's.

        Raises:
            RankMismatchError: saying what differs and which ranks agree with each other.
        """
        camps: dict[str, list[str]] = {}
        for rank, digest in enumerate(self.digests(text)):
            camps.setdefault(digest, []).append(str(rank))
        if len(camps) > 1:
            sides = " against ".join(f"rank {', '.join(ranks)}" for ranks in camps.values())
            raise RankMismatchError(f"{what} differs between tensor-parallel ranks: {sides}")


ALONE = ScoreGroup()
"""One rank that holds all heads."""


class ProcessScores(ScoreGroup):
    """Ranks of a ``torch.distributed`` group.

    Args:
        scores: group that moves tensors of the KV pool's device (NCCL or gloo).
        control: group that moves CPU tensors, for :meth:`digests`; ``scores`` where that is gloo.
    """

    def __init__(self, scores: dist.ProcessGroup, control: dist.ProcessGroup | None = None):
        self.scores = scores
        self.control = control or scores
        self.rank = dist.get_rank(scores)
        self.world = dist.get_world_size(scores)

    def _gather(self, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """``[world, *shape]``: this tensor of every rank of ``group``."""
        out = torch.empty((self.world, *part.shape), dtype=part.dtype, device=part.device)
        dist.all_gather(list(out), part.contiguous(), group=group)
        return out

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return self._gather(part, self.scores)

    def largest(self, part: torch.Tensor) -> torch.Tensor:
        out = part.clone()
        dist.all_reduce(out, op=dist.ReduceOp.MAX, group=self.scores)
        return out

    def digests(self, text: str) -> list[str]:
        mine = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device="cpu")
        return [bytes(row).hex() for row in self._gather(mine, self.control).tolist()]
