"""Counter-based random draws: Philox 4x32-10 (Salmon et al., SC 2011).

A draw depends on (seed, block identity, event, draw number) and on nothing else, so the same requests
give the same evictions alone or in a batch, on any rank, before and after a retraction.
"""

from __future__ import annotations

import torch

from nexus_sglang.kernels.reservoir import draw


def uniforms(seed: int, identity: torch.Tensor, event: int, draws: int) -> torch.Tensor:
    """Uniform numbers strictly inside (0, 1): the only source of chance a policy may use.

    Args:
        seed: the server's seed.
        identity: int64 ``[N]``, ``Blocks.identity``: a hash of each block's tokens and position.
        event: ``Blocks.event``, the sequence's length at this event in tokens.
        draws: how many numbers per block.

    Returns:
        float64 ``[draws, N]``, identical on every platform.
    """
    events = torch.full((1,), event, dtype=torch.int64, device=identity.device)
    return draw(seed, identity[None], events, draws)[0]
