"""Generated English prose and the draws behind it: filler sentences, keys, names.

Everything comes from the word lists below, so nothing has to be downloaded and every platform sees the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

CountTokens = Callable[[str], int]
"""Number of tokens of a text, by the served model's tokenizer."""

Option = TypeVar("Option")

# Word lists keep several entries a line (fmt: skip): one entry a line would bury the code.
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
FIRST_NAMES = (
    "Mara",
    "Tomas",
    "Ilse",
    "Bruno",
    "Greta",
    "Anton",
    "Livia",
    "Oskar",
    "Petra",
    "Jonas",
    "Selma",
    "Viktor",
)
TOWNS = ("Torvik", "Almedia", "Grenholm", "Casterby", "Ostrava", "Ridgefield", "Montaro", "Belford", "Kalmar", "Lydden")


class Dice:
    """Draws that are the same under every Python, because only ``Random.random`` is used.

    Args:
        seed: same seed, same draws.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def below(self, n: int) -> int:
        """An integer in [0, n)."""
        return int(self._rng.random() * n)

    def pick(self, options: Sequence[Option]) -> Option:
        """One of the options."""
        return options[self.below(len(options))]

    def distinct(self, options: Sequence[Option], count: int) -> list[Option]:
        """``count`` of the options in drawn order, none taken twice."""
        pool = list(options)
        return [pool.pop(self.below(len(pool))) for _ in range(count)]

    def number(self, digits: int) -> str:
        """A decimal number of exactly this many digits."""
        return str(1 + self.below(9)) + "".join(str(self.below(10)) for _ in range(digits - 1))


def filler(dice: Dice) -> str:
    """One sentence that says nothing any question asks for."""
    return f"{dice.pick(TIMES)}, {dice.pick(PEOPLE)} {dice.pick(DEEDS)} {dice.pick(THINGS)} {dice.pick(ENDS)}."


def hide(facts: Sequence[str], tokens: int, count_tokens: CountTokens, dice: Dice) -> str:
    """Filler of about ``tokens`` tokens with the facts in order, each at a drawn place in its own share of the middle.

    The first and the last twentieth hold no fact, so neither the sinks nor the recent window give one away.

    Args:
        facts: sentences to hide.
        tokens: length of the text, in tokens.
        count_tokens: tokens of a text.
        dice: decides the filler and the places.
    """
    sentences: list[str] = []
    used = sum(map(count_tokens, facts))
    while used < tokens:
        sentences.append(filler(dice))
        used += count_tokens(" " + sentences[-1])
    margin = max(3, len(sentences) // 20)
    share = (len(sentences) - 2 * margin) / len(facts)
    for i in reversed(range(len(facts))):
        sentences.insert(margin + int((i + dice.below(1000) / 1000) * share), facts[i])
    return " ".join(sentences)
