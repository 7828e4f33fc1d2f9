"""95 % intervals and standard errors."""

from __future__ import annotations

import math
from collections.abc import Iterable


def wilson(right: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    if n == 0:
        return 0.0, 1.0
    share, denominator = right / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / denominator
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / denominator
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_and_error(values: Iterable[float], groups: Iterable[object]) -> tuple[float, float]:
    """Mean and its standard error; questions about one passage (``groups``) are not independent and count as one."""
    pairs = list(zip(values, groups, strict=True))
    mean = sum(value for value, _ in pairs) / len(pairs)
    sums: dict[object, float] = {}
    for value, group in pairs:
        sums[group] = sums.get(group, 0.0) + value - mean
    n = len(sums)
    spread = sum(total * total for total in sums.values()) * n / max(n - 1, 1)
    return mean, math.sqrt(spread) / len(pairs)
