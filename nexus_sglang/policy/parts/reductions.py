"""Building blocks of a policy: window rows to one number per block, with or without state, and value or key terms."""

from __future__ import annotations

import torch

from nexus_sglang.policy.base import Evidence

WINDOW_REDUCTIONS = ("mean", "sum", "max", "max-floor", "last", "running-average", "decaying-max")
TERMS = ("none", "value", "key")


def floor_at_mean(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Raise every score ``[N]`` to at least the mean over ``mask`` (prior correction of arXiv 2510.13334)."""
    mean = (scores * mask).sum() / mask.sum().clamp_min(1)
    return scores.clamp_min(mean)


def reduce_window(rows: torch.Tensor, kind: str, mask: torch.Tensor) -> torch.Tensor:
    """One number per block from the window's rows, without state.

    Args:
        rows: float64 ``[W, N]``, oldest query first.
        kind: ``mean`` (SnapKV), ``sum`` (H2O), ``max`` (MorphKV), ``max-floor`` (DefensiveKV), ``last`` (TOVA); the two
            kinds with state reduce by ``mean`` and ``max`` here, see :func:`remember`.
        mask: bool ``[N]``, the blocks over which ``max-floor`` takes its mean.

    Returns:
        float64 ``[N]``.
    """
    if kind in ("max", "max-floor", "decaying-max"):
        scores = rows.amax(dim=0)
        return floor_at_mean(scores, mask) if kind == "max-floor" else scores
    if kind == "last":
        return rows[-1]
    return rows.sum(dim=0) if kind == "sum" else rows.mean(dim=0)


def remember(scores: torch.Tensor, state: torch.Tensor, kind: str, decay: float) -> torch.Tensor:
    """Join this event's scores with what the block remembers.

    Args:
        scores: float64 ``[N]``.
        state: float ``[N]`` from the last event, NaN where none has judged the block.
        kind: ``sum`` (m + s: H2O), ``running-average`` (d m + (1 - d) s), ``decaying-max`` (max(d m, s)).
        decay: d in [0, 1]; ``sum`` ignores it.

    Returns:
        float64 ``[N]``, the new state; ``scores`` where the block was never judged.
    """
    old = state.double()
    if kind == "sum":
        joined = old + scores
    elif kind == "running-average":
        joined = decay * old + (1 - decay) * scores
    else:
        joined = torch.maximum(decay * old, scores)
    return torch.where(torch.isnan(old), scores, joined)


def apply_term(weights: torch.Tensor, evidence: Evidence, term: str) -> torch.Tensor:
    """Multiply weights ``[N]`` by what the block holds, scaled to mean 1: ``value`` norm or ``key`` distinctiveness.

    The original of the value term (arXiv 2502.03805, 2510.13334) is the norm of ``W_o v``; the pool holds no
    ``W_o``, so this is the norm of v itself.
    """
    if term == "none":
        return weights
    factor = (evidence.value_norm if term == "value" else evidence.key_distinctiveness).double()
    return weights * factor / factor.mean().clamp_min(1e-300)


def flatness(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Entropy of the weights ``[N]`` over ``mask`` as a share of its maximum: 1 when all are equal, 0 for one alone."""
    kept = weights.double() * mask  # no selection by mask: its size would have to come from the device
    entropy = torch.special.entr(kept / kept.sum().clamp_min(1e-300)).sum()
    return (entropy / mask.sum().clamp_min(2).double().log()).clamp(0, 1)
