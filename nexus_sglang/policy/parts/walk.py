"""The iterative walk of Nexus Sampling (arXiv 2606.23961) over the window's rows.

:func:`normalise_rows` and :func:`walk` stand beside the kernel that they are the reference of.
"""

from __future__ import annotations

import torch

from nexus_sglang.kernels.walk_weights import normalise_rows, walk, walk_weights

__all__ = ["normalise_rows", "walk", "window_weights"]


def window_weights(
    rows: torch.Tensor,
    candidates: torch.Tensor,
    steps: int,
    walk_weight: float,
    recency_eps: float,
) -> torch.Tensor:
    """Mean of the normalised rows + ``walk_weight`` * :func:`walk` + a ramp in favour of the newer, in one launch on a GPU.

    Args:
        rows: float ``[W, N]``, not normalised, oldest query first.
        candidates: bool ``[N]``; other blocks take no part in rows and walk.
        steps: rows the walk takes, the newest.
        walk_weight: factor of the walk.
        recency_eps: what the ramp adds to the newest block; it grows from 0 at the oldest.

    Returns:
        float64 ``[N]``.
    """
    window, blocks = (torch.full((1,), n, dtype=torch.int64, device=rows.device) for n in rows.shape)
    return walk_weights(rows[None], window, blocks, candidates[None], steps, walk_weight, recency_eps)[0]
