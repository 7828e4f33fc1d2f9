"""The iterative walk of Nexus Sampling (arXiv 2606.23961) and the reductions of window rows around it."""

from __future__ import annotations

import torch

from nexus_sglang.kernels.walk_weights import walk_weights


def window_weights(
    rows: torch.Tensor, candidates: torch.Tensor, steps: int, walk_weight: float, recency_eps: float
) -> torch.Tensor:  # fmt: skip
    """Mean of the normalised rows + ``walk_weight`` * :func:`walk` + :func:`recency`, in one launch on a GPU.

    Args:
        rows: float ``[W, N]``, not normalised, newest last. candidates: bool ``[N]``; other blocks take no part.

    Returns:
        float64 ``[N]``.
    """
    window, blocks = (torch.full((1,), n, dtype=torch.int64, device=rows.device) for n in rows.shape)
    return walk_weights(rows[None], window, blocks, candidates[None], steps, walk_weight, recency_eps)[0]


def normalise_rows(rows: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Scale each row of ``[W, N]`` to sum 1, over the blocks of ``mask`` (bool ``[N]``) where given, 0 elsewhere."""
    rows = rows.double()
    if mask is not None:
        rows = rows * mask
    return rows / rows.sum(dim=1, keepdim=True).clamp_min(1e-300)


def walk(rows: torch.Tensor, steps: int) -> torch.Tensor:
    """The walk term: blocks that successive queries agree on gain.

    ``C(0) = 0; gamma = 1 + <r, C>; C <- C + gamma r`` for the newest ``steps`` rows, newest last (the
    paper does not say which rows; see docs/policies.md), then ``c = C / |C|_1``.

    Args:
        rows: float64 ``[W, N]``, each row summing to 1.
        steps: rows consumed, H in the paper; 0 gives zeros.

    Returns:
        float64 ``[N]`` summing to 1 (0 where steps is 0).
    """
    state = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    if steps <= 0:
        return state
    for row in rows[-steps:]:
        state = state + (1 + torch.dot(row, state)) * row
    return state / state.sum().clamp_min(1e-300)


def recency(index: torch.Tensor, eps: float) -> torch.Tensor:
    """``eps * j / (N - 1)`` for the j-th block in order: a tie-break in favour of the newer."""
    n = index.shape[0]
    ramp = torch.arange(n, dtype=torch.float64, device=index.device)
    return eps * ramp / max(n - 1, 1)
