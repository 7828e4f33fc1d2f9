"""What two prompts begin with alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def common_prefix(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """How many leading token ids two prompts have in common.

    Args:
        one: token ids.
        other: token ids.
    """
    n = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:n]) != np.asarray(other[:n]))
    return int(differs[0]) if len(differs) else n
