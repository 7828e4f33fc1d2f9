"""How far a reduced cache moves the next-token distributions, without labels: KL, top-1 agreement, perplexity.

A text is streamed: a first part, then steps of :data:`STEP` tokens, each a request on the prefix so far, after which
the server evicts as it does for any prompt. The log-probabilities of a step's tokens come from what the steps before it
left.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from nexus_sglang.errors import ConfigError

STEP = 64
TOP = 50
"""Alternatives per position that are asked for."""


class Position(NamedTuple):
    """One predicted token.

    Attributes:
        logprob: log-probability of the token that stands there, in nats.
        top: token id to log-probability of the :data:`TOP` likeliest.
    """

    logprob: float
    top: dict[int, float]


def read_positions(meta: dict[str, Any]) -> list[Position]:
    """Positions of one answer with ``return_logprob``; the first of the span has no prediction and is left out.

    Args:
        meta: SGLang's meta_info.
    """
    tokens = zip(meta["input_token_logprobs"], meta["input_top_logprobs"], strict=True)
    return [
        Position(logprob, {token: value for value, token, _ in alternatives})
        for (logprob, _, _), alternatives in tokens
        if logprob is not None
    ]


def divergence(full: Position, reduced: Position) -> float:
    """KL(full || reduced) in nats over the tokens that both lists name, the rest as one outcome.

    Merging outcomes never raises a divergence, so this is a lower bound of the KL over the vocabulary.

    Args:
        full: the prediction with the full cache.
        reduced: the prediction for the same token with what was left of it.
    """
    shared = full.top.keys() & reduced.top.keys()
    total = sum(math.exp(full.top[token]) * (full.top[token] - reduced.top[token]) for token in shared)
    rest = [max(1e-9, 1 - sum(math.exp(p.top[token]) for token in shared)) for p in (full, reduced)]
    return max(0.0, total + rest[0] * math.log(rest[0] / rest[1]))


def compare(full: list[Position], reduced: list[Position]) -> dict[str, float]:
    """How far the reduced cache moves the predictions.

    Args:
        full: positions with the full cache.
        reduced: the same positions with what was left of it.

    Returns:
        ``positions``: how many. Means over them: ``nll``, the negative log-likelihood in nats with the reduced cache;
        ``kl`` in nats; ``top1``, the share whose likeliest token is the same.

    Raises:
        ValueError: the two streams do not have the same positions.
    """
    if len(full) != len(reduced) or not full:
        raise ValueError(f"{len(full)} positions with the full cache, {len(reduced)} with the reduced one")
    n = len(full)
    return {
        "positions": n,
        "nll": -sum(p.logprob for p in reduced) / n,
        "kl": sum(map(divergence, full, reduced)) / n,
        "top1": sum(_likeliest(a) == _likeliest(b) for a, b in zip(full, reduced, strict=True)) / n,
    }


def _likeliest(position: Position) -> int:
    return max(position.top, key=position.top.__getitem__)


def texts(path: Path | None, count: int, tokens: int, tokenizer: Any) -> list[list[int]]:
    """Long texts to stream.

    Args:
        path: a file that is cut into pieces; None takes CPython's own documentation (``pydoc_data.topics``), which
            differs a little between Python versions, so results name theirs.
        count: how many texts.
        tokens: exact length of each, in tokens.
        tokenizer: a Hugging Face tokenizer.

    Returns:
        Token ids of each text.

    Raises:
        ConfigError: the file cannot be read or is too short.
    """
    if path is not None:
        try:
            ids = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(f"--text {path} cannot be read ({err}): give a text file in UTF-8") from None
        if len(ids) < count * tokens:
            raise ConfigError(f"--text {path} has {len(ids)} tokens: give one with {count * tokens}, or fewer --texts")
        return [ids[i * tokens : (i + 1) * tokens] for i in range(count)]
    from pydoc_data import topics

    longest = sorted(topics.topics.values(), key=lambda text: (-len(text), text))
    # A topic has a few thousand tokens; where one is too short, the next is appended.
    found: list[list[int]] = []
    ids = []
    for text in longest:
        ids += tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= tokens:
            found.append(ids[:tokens])
            ids = []
        if len(found) == count:
            return found
    raise ConfigError(f"--texts {count} of {tokens} tokens are more than there is: use fewer, or --text FILE")
