"""Small recall tasks in the manner of RULER (Hsieh et al., arXiv 2404.06654): a long passage, a few facts, questions.

The filler is made from the word lists below: nothing has to be downloaded, every platform sees the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

PEOPLE = (
    "the baker", "an old sailor", "the librarian", "my neighbour", "the young doctor", "a travelling painter",
    "the station master", "her brother", "the gardener", "a retired teacher", "the clockmaker", "two students",
    "the mayor", "a quiet tailor", "the ferryman", "our cousin", "the beekeeper", "a street musician",
)  # fmt: skip
DEEDS = (
    "walked slowly along", "described with care", "forgot about", "looked for", "wrote a long letter about",
    "made a drawing of", "argued about", "admired", "came back to", "told a story of", "cleaned", "dreamed of",
    "asked the others about", "passed by", "spoke kindly of", "was tired of", "took a photograph of", "worried about",
)  # fmt: skip
THINGS = (
    "the narrow bridge", "the market square", "a wooden boat", "the apple orchard", "the broken fence",
    "a blue lantern", "the stone chapel", "the winter road", "an empty theatre", "the river bank",
    "a basket of pears", "the copper kettle", "the high meadow", "a small museum", "the railway tunnel",
    "a garden wall", "the harbour lights", "the lost umbrella",
)  # fmt: skip
TIMES = (
    "In the early morning", "After the rain", "On the last day of the fair", "Late in the evening", "Before supper",
    "During the long holiday", "When the bells rang", "Years later", "At the edge of town", "That same week",
    "While the snow melted", "Without any hurry", "As everyone expected", "Once the shops had closed",
    "In those days",
)  # fmt: skip
ENDS = (
    "and nobody was surprised", "because the weather had changed", "although there was little time",
    "and then went home", "which pleased everyone", "but the door stayed shut", "as people there often do",
    "until the lamps were lit", "and the dog followed", "so the work had to wait", "while the kettle boiled",
    "and said nothing more about it", "because it seemed the right thing", "even if it took all afternoon",
    "and the children laughed",
)  # fmt: skip
KEYS = (
    "amber", "basil", "cedar", "coral", "ember", "fennel", "granite", "hazel", "indigo", "jasper", "lilac", "maple",
    "nutmeg", "olive", "pepper", "quartz", "saffron", "topaz", "velvet", "willow", "zephyr", "cobalt", "marble",
    "thistle",
)  # fmt: skip
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


class Question(NamedTuple):
    """One question; ``text`` ends where the answer begins."""

    text: str
    answer: str


class Sample(NamedTuple):
    """One passage with its questions. ``tokens`` is the length that was asked for."""

    task: str
    seed: int
    tokens: int
    passage: str
    questions: list[Question]


class Dice:
    """Draws that are the same under every Python: only ``Random.random`` is used."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)

    def below(self, n: int) -> int:
        return int(self._rng.random() * n)

    def pick(self, options):
        return options[self.below(len(options))]

    def distinct(self, options, count: int) -> list:
        pool = list(options)
        return [pool.pop(self.below(len(pool))) for _ in range(count)]

    def number(self, digits: int) -> str:
        return str(1 + self.below(9)) + "".join(str(self.below(10)) for _ in range(digits - 1))


def filler(dice: Dice) -> str:
    """One sentence about nothing."""
    return f"{dice.pick(TIMES)}, {dice.pick(PEOPLE)} {dice.pick(DEEDS)} {dice.pick(THINGS)} {dice.pick(ENDS)}."


def compose(facts: list[str], tokens: int, length: Callable[[str], int], dice: Dice) -> str:
    """Filler of about ``tokens`` tokens with the facts in order, each somewhere in its own share of the middle.

    The first and the last twentieth hold no fact, so neither sinks nor the recent window give one away.

    Args:
        length: tokens of a text.
    """
    sentences, used = [], sum(map(length, facts))
    while used < tokens:
        sentences.append(filler(dice))
        used += length(" " + sentences[-1])
    margin = max(3, len(sentences) // 20)
    share = (len(sentences) - 2 * margin) / len(facts)
    for i in reversed(range(len(facts))):
        sentences.insert(margin + int((i + dice.below(1000) / 1000) * share), facts[i])
    return " ".join(sentences)


def _number_question(key: str, number: str) -> Question:
    # Ends with the words of the fact, which is what a small model can continue.
    text = f"\n\nWhat is the special magic number for {key}? One of the special magic numbers for {key} is:"
    return Question(text, f" {number}")


def _needles(task: str, keys: int, asked: int):
    def make(seed: int, tokens: int, length: Callable[[str], int]) -> Sample:
        dice = Dice(seed)
        pairs = [(key, dice.number(5)) for key in dice.distinct(KEYS, keys)]
        facts = [f"One of the special magic numbers for {key} is: {number}." for key, number in pairs]
        passage = compose(facts, tokens, length, dice)
        return Sample(task, seed, tokens, passage, [_number_question(*pair) for pair in dice.distinct(pairs, asked)])

    return make


def _variables(seed: int, tokens: int, length: Callable[[str], int]) -> Sample:
    # Two chains of two, one hop asked for: a model of 135M parameters does not follow two hops even with everything.
    dice = Dice(seed)
    names = ["".join(dice.distinct(LETTERS, 3)) for _ in range(4)]
    chains = [(names[0], names[1]), (names[2], names[3])]
    facts = []
    for first, second in chains:
        facts += [f"VAR {first} = {dice.number(5)}.", f"VAR {second} = VAR {first}."]
    passage = compose(facts, tokens, length, dice)
    questions = [
        Question(f"\n\nVAR {second} is which variable? VAR {second} = VAR", f" {first}")
        for first, second in dice.distinct(chains, 2)
    ]
    return Sample("variables", seed, tokens, passage, questions)


TASKS: dict[str, Callable[[int, int, Callable[[str], int]], Sample]] = {
    "needle": _needles("needle", keys=1, asked=1),
    "multi-key": _needles("multi-key", keys=3, asked=3),
    "variables": _variables,
}
