"""String match as RULER defines it (Hsieh et al., arXiv 2404.06654, ``string_match_all`` and ``string_match_part``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Score = Callable[[str, Sequence[str]], float]
"""Output and expected answers to a score in [0, 1]."""


def match_all(output: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the output, without regard to case."""
    text = output.lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def match_part(output: str, answers: Sequence[str]) -> float:
    """1.0 if any of the answers occurs in the output, without regard to case, else 0.0."""
    text = output.lower()
    return float(any(answer.lower() in text for answer in answers))


def match_word(output: str, answers: Sequence[str]) -> float:
    """1.0 if any of the answers is a whole word of the output, without regard to case, else 0.0.

    Not RULER's: there, French "est" would be found in "the best way".
    """
    return float(not set(re.findall(r"\w+", output.lower())).isdisjoint(answers))
