"""Wilson's interval of a share (Wilson 1927)."""

from __future__ import annotations

import math


def wilson(right: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of the share ``right / n``.

    Args:
        right: how many of ``n`` were right.
        n: how many there were.
        z: quantile of the normal distribution; the default gives 95 %.
    """
    if n == 0:
        return 0.0, 1.0
    share = right / n
    denominator = 1 + z * z / n
    middle = (share + z * z / (2 * n)) / denominator
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / denominator
    return max(0.0, middle - half), min(1.0, middle + half)
