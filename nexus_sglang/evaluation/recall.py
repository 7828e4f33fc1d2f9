"""Small recall tasks in the manner of RULER (Hsieh et al., arXiv 2404.06654): a long passage, a few facts, questions.

The conversations use the multi-key task; the offline lab in ``benchmarks/`` uses all three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .prose import KEYS, LETTERS, CountTokens, Dice, hide


class RecallQuestion(NamedTuple):
    """One question with its only right answer.

    Attributes:
        text: asked after the passage; ends where the answer begins.
        answer: how the right answer goes on, its leading space included.
    """

    text: str
    answer: str


class RecallSample(NamedTuple):
    """One passage with its questions.

    Attributes:
        task: a name of :data:`RECALL_TASKS`.
        seed: same seed and tokenizer, same sample.
        tokens: length of the passage that was asked for, in tokens.
        passage: filler with the facts in it.
        questions: what is asked about the passage.
    """

    task: str
    seed: int
    tokens: int
    passage: str
    questions: list[RecallQuestion]


MakeSample = Callable[[int, int, CountTokens], RecallSample]
"""Seed, length in tokens and the tokenizer's count to a sample."""


def _number_question(key: str, number: str) -> RecallQuestion:
    # Ends with the words of the fact, which is what a small model can continue.
    text = f"\n\nWhat is the special magic number for {key}? One of the special magic numbers for {key} is:"
    return RecallQuestion(text, f" {number}")


def _needles(task: str, keys: int, asked: int) -> MakeSample:
    """The task that hides ``keys`` numbers under a key each and asks for ``asked`` of them."""

    def make(seed: int, tokens: int, count_tokens: CountTokens) -> RecallSample:
        dice = Dice(seed)
        pairs = [(key, dice.number(5)) for key in dice.distinct(KEYS, keys)]
        facts = [f"One of the special magic numbers for {key} is: {number}." for key, number in pairs]
        passage = hide(facts, tokens, count_tokens, dice)
        questions = [_number_question(*pair) for pair in dice.distinct(pairs, asked)]
        return RecallSample(task, seed, tokens, passage, questions)

    return make


def _variables(seed: int, tokens: int, count_tokens: CountTokens) -> RecallSample:
    # Two chains of two, one hop asked for: a model of 135M parameters does not follow two hops even with everything.
    dice = Dice(seed)
    names = ["".join(dice.distinct(LETTERS, 3)) for _ in range(4)]
    chains = [(names[0], names[1]), (names[2], names[3])]
    facts = []
    for first, second in chains:
        facts += [f"VAR {first} = {dice.number(5)}.", f"VAR {second} = VAR {first}."]
    passage = hide(facts, tokens, count_tokens, dice)
    questions = [
        RecallQuestion(f"\n\nVAR {second} is which variable? VAR {second} = VAR", f" {first}")
        for first, second in dice.distinct(chains, 2)
    ]
    return RecallSample("variables", seed, tokens, passage, questions)


RECALL_TASKS: dict[str, MakeSample] = {
    "needle": _needles("needle", keys=1, asked=1),
    "multi-key": _needles("multi-key", keys=3, asked=3),
    "variables": _variables,
}
