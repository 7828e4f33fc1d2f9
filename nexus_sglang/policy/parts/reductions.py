"""From the window's rows to one number per block, with or without state, and the value and key terms."""

from __future__ import annotations

import torch

from nexus_sglang.policy.base import Evidence

WINDOW_REDUCTIONS = ("mean", "sum", "max", "max-floor", "last", "running-average", "decaying-max")
"""How the W rows become one; the two last keep state."""
TERMS = ("none", "value", "key")
"""What the weights may be multiplied by."""


def floor_at_mean(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Raise every score to at least the mean (prior correction of arXiv 2510.13334).

    Args:
        scores: float ``[N]``.
        mask: bool ``[N]``, the blocks over which the mean is taken.

    Returns:
        float ``[N]``.
    """
    mean = (scores * mask).sum() / mask.sum().clamp_min(1)
    return scores.clamp_min(mean)


def reduce_window(rows: torch.Tensor, kind: str, mask: torch.Tensor) -> torch.Tensor:
    """One number per block from the window's rows, without state.

    Args:
        rows: float64 ``[W, N]``, oldest query first.
        kind: one of :data:`WINDOW_REDUCTIONS`: ``mean`` (SnapKV), ``sum`` (H2O), ``max`` (MorphKV), ``max-floor``
            (DefensiveKV), ``last`` (TOVA). ``running-average`` reduces by the mean here and ``decaying-max`` by the
            maximum; :func:`remember` does the rest.
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
    """Join this event's scores with the state of earlier events.

    Args:
        scores: float64 ``[N]``, s.
        state: float ``[N]``, m: a column of ``Blocks.state``, NaN where no event has judged the block.
        kind: ``sum`` (m + s: H2O), ``running-average`` (d m + (1 - d) s) or ``decaying-max`` (max(d m, s)).
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
    """Multiply the weights by a term of the block's values or keys, scaled to mean 1.

    The papers' value term (arXiv 2502.03805, 2510.13334) is the norm of ``W_o v``. The pool holds no ``W_o``, so this
    is the norm of v itself.

    Args:
        weights: float64 ``[N]``.
        evidence: holds ``value_norm`` for ``value``, ``key_distinctiveness`` for ``key``.
        term: one of :data:`TERMS`.

    Returns:
        float64 ``[N]``.
    """
    if term == "none":
        return weights
    factor = (evidence.value_norm if term == "value" else evidence.key_distinctiveness).double()
    return weights * factor / factor.mean().clamp_min(1e-300)


def flatness(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Entropy of the weights as a share of its maximum.

    Args:
        weights: float ``[N]``, non-negative.
        mask: bool ``[N]``, the blocks that count.

    Returns:
        float64 scalar tensor in [0, 1]: 1 where all weights are equal, 0 where one block has everything.
    """
    # A product instead of weights[mask], whose size the host would have to wait for.
    kept = weights.double() * mask
    entropy = torch.special.entr(kept / kept.sum().clamp_min(1e-300)).sum()
    return (entropy / mask.sum().clamp_min(2).double().log()).clamp(0, 1)
