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
    """Mean of the normalised rows, plus the walk, plus a tie-break for the newer; one launch on a GPU.

    Args:
        rows: float ``[W, N]``, not normalised, oldest query first.
        candidates: bool ``[N]``; other blocks take no part in rows and walk.
        steps: rows the walk takes, the newest.
        walk_weight: factor of :func:`walk`.
        recency_eps: what the newest block gains; the gain falls evenly to 0 at the oldest.

    Returns:
        float64 ``[N]``.
    """
    window = torch.full((1,), rows.shape[0], dtype=torch.int64, device=rows.device)
    length = torch.full((1,), rows.shape[1], dtype=torch.int64, device=rows.device)
    return walk_weights(rows[None], window, length, candidates[None], steps, walk_weight, recency_eps)[0]
