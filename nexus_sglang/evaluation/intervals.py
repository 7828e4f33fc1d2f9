"""Standard errors and Student's intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable

Z = 1.959964
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % points of Student's distribution for 1 to 9 degrees of freedom, and for infinitely many (``Z``)."""


def mean_and_error(values: Iterable[float], groups: Iterable[object]) -> tuple[float, float]:
    """Mean and its standard error.

    Args:
        values: what was measured.
        groups: which values belong together: questions about one passage are not independent and count as one.
    """
    pairs = list(zip(values, groups, strict=True))
    mean = sum(value for value, _ in pairs) / len(pairs)
    sums: dict[object, float] = {}
    for value, group in pairs:
        sums[group] = sums.get(group, 0.0) + value - mean
    n = len(sums)
    spread = sum(total * total for total in sums.values()) * n / max(n - 1, 1)
    return mean, math.sqrt(spread) / len(pairs)


def student(n: int) -> float:
    """97.5 % point of Student's distribution for the mean of ``n`` values.

    Args:
        n: how many values the mean was taken over.
    """
    if n - 1 <= len(T):
        return T[max(n - 2, 0)]
    v = n - 1  # Abramowitz and Stegun 26.7.5
    return Z + (Z**3 + Z) / (4 * v) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * v * v)
