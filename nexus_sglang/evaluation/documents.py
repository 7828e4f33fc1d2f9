"""One long document that carries the material of all thirteen RULER families (arXiv 2404.06654), and its questions.

RULER makes one context per family and sample. Here the families share a document, so that one prefill serves thirteen
questions. What belongs to one family distracts from the others, so scores are lower than RULER's at the same length.
"""

from __future__ import annotations

from typing import NamedTuple

from .prose import FIRST_NAMES, KEYS, LETTERS, TOWNS, CountTokens, Dice, filler
from .scoring import Score, match_all, match_part

WORDS = (
    "anchor", "barrel", "candle", "dragon", "engine", "feather", "guitar", "hammer", "island", "jacket", "kitten",
    "ladder", "magnet", "needle", "orange", "pencil", "quiver", "rocket", "saddle", "tunnel", "unicorn", "violin",
    "window", "yogurt", "zipper", "bucket", "carpet", "donkey", "fabric", "goblet", "helmet", "icicle", "jungle",
    "kettle", "lizard", "mirror", "napkin", "oyster", "parrot", "ribbon",
)  # fmt: skip
LAST_NAMES = (
    "Lindqvist",
    "Okafor",
    "Marin",
    "Halloran",
    "Petrov",
    "Duarte",
    "Keller",
    "Sato",
    "Novak",
    "Byrne",
    "Farkas",
)
TRADES = ("glassblower", "surveyor", "violin maker", "printer", "botanist", "blacksmith", "translator", "pilot")


class DocumentQuestion(NamedTuple):
    """One question about a document.

    Attributes:
        task: its RULER family, one of :data:`FAMILIES`.
        text: asked after the document; ends where the answer begins.
        answers: expected substrings.
        tokens: most tokens the answer may take.
        depth: where in the document its material lies, in [0, 1]; None when it is spread over all of it.
        score: output and answers to [0, 1].
    """

    task: str
    text: str
    answers: tuple[str, ...]
    tokens: int
    depth: float | None
    score: Score = match_all


class Document(NamedTuple):
    """A generated document.

    Attributes:
        seed: same seed and tokenizer, same document.
        tokens: length that was asked for, in tokens.
        text: the document.
        questions: one per family, in the order of :data:`FAMILIES`.
    """

    seed: int
    tokens: int
    text: str
    questions: list[DocumentQuestion]


class Piece(NamedTuple):
    """What one family adds to a document, and the question it asks.

    Attributes:
        task: the family.
        sentences: to hide in the document; empty when the question is about another piece's sentences.
        scattered: whether each sentence is hidden on its own; otherwise they form one paragraph.
        asked: which sentence the depth is read from; None for a question about all of them.
        question: text of the question.
        answers: expected substrings.
        tokens: most tokens the answer may take.
        score: output and answers to [0, 1].
    """

    task: str
    sentences: list[str]
    scattered: bool
    asked: int | None
    question: str
    answers: tuple[str, ...]
    tokens: int
    score: Score = match_all


def _hexadecimal(dice: Dice) -> str:
    return "".join(dice.pick("0123456789abcdef") for _ in range(8))


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _ask_needle(kind: str, key: str) -> str:
    return f"\n\nWhat is the special magic {kind[:-1]} for {key}? One of the special magic {kind} for {key} is:"


def _single(task: str, kind: str, key: str, value: str, tokens: int) -> Piece:
    return Piece(task, [_needle(kind, key, value)], True, 0, _ask_needle(kind, key), (value,), tokens)


def _needles(dice: Dice) -> list[Piece]:
    """Single needle of three kinds, multi-key, multi-query and multi-value: sentences scattered in prose."""
    keys = dice.distinct(KEYS, 8)
    pieces = [
        _single("single-number", "numbers", keys[0], dice.number(5), 8),
        _single("single-word", "words", keys[1], dice.pick(WORDS[:20]), 4),
        _single("single-hex", "codes", keys[2], _hexadecimal(dice), 12),
    ]
    pairs = [(key, dice.number(5)) for key in keys[3:7]]
    asked = dice.below(4)
    sentences = [_needle("ids", key, value) for key, value in pairs]
    pieces.append(
        Piece("multi-key-prose", sentences, True, asked, _ask_needle("ids", pairs[asked][0]), (pairs[asked][1],), 8)
    )
    two = dice.distinct(pairs, 2)
    query = (
        f"\n\nWhat are the special magic ids for {two[0][0]} and {two[1][0]}? The special magic ids are: {two[0][0]}:"
    )
    pieces.append(Piece("multi-query", [], True, None, query, tuple(value for _, value in two), 16))
    values = [dice.number(4) for _ in range(2)]
    query = f"\n\nWhat are all the special magic dates for {keys[7]}? The special magic dates for {keys[7]} are:"
    sentences = [_needle("dates", keys[7], value) for value in values]
    pieces.append(Piece("multi-value", sentences, True, None, query, tuple(values), 14))
    return pieces


def _lines(dice: Dice, task: str, kind: str, names: list[str], values: list[str], tokens: int) -> Piece:
    """A paragraph of lines that differ only in key and value: every line but one distracts."""
    asked = dice.below(len(names))
    lines = [f"The {kind} of {name} is {value}." for name, value in zip(names, values, strict=True)]
    question = f"\n\nWhat is the {kind} of {names[asked]}? The {kind} of {names[asked]} is"
    return Piece(task, lines, False, asked, question, (values[asked],), tokens)


def _variables(dice: Dice) -> Piece:
    """A chain of three assignments and one that distracts (RULER's variable tracking)."""
    a, b, c, other = ("".join(dice.distinct(LETTERS, 3)) for _ in range(4))
    first = dice.number(5)
    second = dice.number(5)
    sentences = [f"VAR {a} = {first}.", f"VAR {other} = {second}.", f"VAR {b} = VAR {a}.", f"VAR {c} = VAR {b}."]
    question = f"\n\nFind all variables that are assigned the value {first}. They are: VAR"
    return Piece("variable-tracking", sentences, True, None, question, (a, b, c), 14)


def _common_words(dice: Dice) -> Piece:
    """Three words five times each among twelve that come once (RULER's common words extraction)."""
    words = dice.distinct(WORDS[20:], 15)
    bag = words[:3] * 5 + words[3:]
    listing = ["Word list: " + ", ".join(dice.distinct(bag, len(bag))) + "."]
    question = "\n\nWhat are the three most common words in the word list? The three most common words are:"
    return Piece("common-words", listing, False, 0, question, tuple(words[:3]), 12)


def _frequent_words(dice: Dice) -> Piece:
    """Made-up words whose counts fall off, with noise dots (RULER's frequent words extraction)."""
    words = ["".join(dice.pick("bdfgklmnprstvz") + dice.pick("aeiou") for _ in range(3)) for _ in range(6)]
    bag = [word for word, count in zip(words, (8, 6, 5, 1, 1, 1), strict=True) for _ in range(count)]
    listing = ["Coded text: " + " ".join(dice.distinct(bag, len(bag))) + " ..."]
    question = "\n\nWhat are the three most frequent words in the coded text? The three most frequent words are:"
    return Piece("frequent-words", listing, False, 0, question, tuple(words[:3]), 14)


def _passages(dice: Dice) -> list[Piece]:
    """Short biographies; one question needs one of them, the other two (RULER's SQuAD and HotpotQA, own text)."""
    people = [
        f"{first} {last}"
        for first, last in zip(dice.distinct(FIRST_NAMES, 4), dice.distinct(LAST_NAMES, 4), strict=True)
    ]
    towns = dice.distinct(TOWNS, 4)
    trades = dice.distinct(TRADES, 4)
    texts = [
        f"Document {i + 1}: {people[i]} was born in {towns[i]} and worked as a {trades[i]}. "
        + (f"{people[i]} was taught by {people[i - 1]}." if i else f"{people[i]} had no teacher.")
        for i in range(4)
    ]
    one = dice.below(4)
    two = 1 + dice.below(3)
    easy = f"\n\nIn which town was {people[one]} born? {people[one]} was born in"
    hard = f"\n\nIn which town was the teacher of {people[two]} born? The teacher of {people[two]} was born in"
    return [
        Piece("qa-one-passage", texts, False, one, easy, (towns[one],), 6, match_part),
        Piece("qa-two-passages", [], False, None, hard, (towns[two - 1],), 6, match_part),
    ]


def _pieces(dice: Dice) -> list[Piece]:
    numbers = [dice.number(4) for _ in range(6)]
    codes = [_hexadecimal(dice) for _ in range(4)]
    values = [_hexadecimal(dice) for _ in range(4)]
    return [
        *_needles(dice),
        _lines(dice, "multi-key-lines", "locker", dice.distinct(FIRST_NAMES, 6), numbers, 8),
        _lines(dice, "multi-key-hex", "checksum", codes, values, 12),
        _variables(dice),
        _common_words(dice),
        _frequent_words(dice),
        *_passages(dice),
    ]


FAMILIES = (
    "single-number", "single-word", "single-hex", "multi-key-prose", "multi-key-lines", "multi-key-hex", "multi-value",
    "multi-query", "variable-tracking", "common-words", "frequent-words", "qa-one-passage", "qa-two-passages",
)  # fmt: skip
SMALLEST = 900
"""Tokens below which the material of all tasks does not fit a document."""


def make_document(seed: int, tokens: int, count_tokens: CountTokens) -> Document:
    """The document of this seed, of about ``tokens`` tokens.

    Args:
        seed: same seed and tokenizer, same document.
        tokens: length of the document, at least :data:`SMALLEST`.
        count_tokens: tokens of a text, by the served model's tokenizer.

    Raises:
        ValueError: too few tokens for the material.
    """
    if tokens < SMALLEST:
        raise ValueError(f"--lengths {tokens} is too short for thirteen tasks: use {SMALLEST} tokens or more")
    dice = Dice(seed)
    pieces = _pieces(dice)
    # What is hidden, as (piece, index of its first sentence, text): scattered sentences singly, paragraphs whole.
    hidden: list[tuple[Piece, int, list[str]]] = []
    for piece in pieces:
        groups = [[s] for s in piece.sentences] if piece.scattered else [piece.sentences] if piece.sentences else []
        hidden += [(piece, i, group) for i, group in enumerate(groups)]
    used = sum(count_tokens(" " + sentence) for _, _, group in hidden for sentence in group)
    text: list[str] = []
    while used < tokens:
        text.append(filler(dice))
        used += count_tokens(" " + text[-1])
    chunks, depths = _scatter(hidden, text, dice, count_tokens)
    questions = [
        DocumentQuestion(
            p.task, p.question, p.answers, p.tokens, None if p.asked is None else depths[p.task, p.asked], p.score
        )
        for p in sorted(pieces, key=lambda piece: FAMILIES.index(piece.task))
    ]
    return Document(seed, tokens, " ".join(chunks), questions)


def _scatter(
    hidden: list[tuple[Piece, int, list[str]]], text: list[str], dice: Dice, count_tokens: CountTokens
) -> tuple[list[str], dict[tuple[str, int], float]]:
    """Hide the groups at random places between the filler sentences; the order within a piece is kept.

    Returns:
        Sentences in order, and the depth in [0, 1] of each hidden sentence by (task, number in its piece).
    """
    places = sorted(dice.below(len(text) + 1) for _ in hidden)
    order = dice.distinct(hidden, len(hidden))
    for piece, _, _ in hidden:  # variable chains stand in order
        where = [i for i, entry in enumerate(order) if entry[0] is piece]
        for slot, entry in zip(where, sorted((order[i] for i in where), key=lambda e: e[1]), strict=True):
            order[slot] = entry
    chunks: list[str] = []
    marks: list[tuple[str, int, int]] = []
    next_text = 0
    for place, (piece, first, group) in zip(places, order, strict=True):
        chunks += text[next_text:place]
        next_text = place
        for i, sentence in enumerate(group):
            marks.append((piece.task, first + i, len(chunks)))
            chunks.append(sentence)
    chunks += text[next_text:]
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + count_tokens(" " + chunk))
    return chunks, {(task, number): round(ends[at] / ends[-1], 4) for task, number, at in marks}
