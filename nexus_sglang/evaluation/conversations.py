"""Multi-turn tasks: several questions on one document, a rule that must hold, facts asked for eight turns later.

Each turn is a request of its own on the conversation so far, so it finds the reduced cache of the turns before it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from .prose import FIRST_NAMES, TOWNS, CountTokens, Dice, filler
from .recall import RECALL_TASKS
from .scoring import Score, match_all, match_word

KINDS = ("questions", "rule", "facts")
QUESTIONS = ("question-1", "question-2", "question-3")
RULE = "rule"
FACTS = ("fact-number", "fact-town")
JUDGED = {"questions": QUESTIONS, "rule": (RULE,), "facts": FACTS}
"""Tasks that the conversations of a kind are scored on."""
PINS = {"questions": (), "rule": ("pinned",), "facts": ("pinned", "opening")}
"""What else conversations of a kind are played with: the system message pinned, or the first user message as well."""


class Turn(NamedTuple):
    """What the user says, and what is expected.

    Attributes:
        task: what the score counts for; None when the turn is not judged.
        user: what the user says.
        begin: how the answer begins; the model goes on from there.
        answers: expected substrings.
        tokens: most tokens of the answer.
        reply: what stands in the conversation afterwards instead of the model's own answer, so that turns stay
            comparable; None keeps what the model said.
        score: output and answers to [0, 1].
    """

    task: str | None
    user: str
    begin: str
    answers: tuple[str, ...]
    tokens: int
    reply: str | None
    score: Score = match_all


class Conversation(NamedTuple):
    """A conversation before it is played.

    Attributes:
        kind: one of :data:`KINDS`.
        seed: same seed, same conversation.
        system: the system message; None is raw text without a chat template.
        turns: in order.
    """

    kind: str
    seed: int
    system: str | None
    turns: list[Turn]


def questions(seed: int, tokens: int, count_tokens: CountTokens) -> Conversation:
    """Three questions on one document, evicted from after each (SnapKV issue 18, kvpress issue 61).

    Question 1 is visible when the document is evicted from first; questions 2 and 3 read what is left.
    """
    sample = RECALL_TASKS["multi-key"](seed, tokens, count_tokens)
    turns: list[Turn] = []
    for task, question in zip(QUESTIONS, sample.questions, strict=True):
        text = question.text if turns else sample.passage + question.text
        turns.append(Turn(task, text, "", (question.answer.strip(),), count_tokens(question.answer), question.answer))
    return Conversation("questions", seed, None, turns)


RULES = (
    ("Answer in Spanish. Responde siempre en español.", ("el", "la", "de", "que", "es", "los", "puede", "más")),
    ("Answer in French. Réponds toujours en français.", ("le", "la", "de", "je", "ne", "les", "est", "bien")),
    ("Answer in German. Antworte immer auf Deutsch.", ("ich", "der", "das", "ein", "eine", "ist", "und", "nicht")),
    ("Answer in Italian. Rispondi sempre in italiano.", ("il", "di", "che", "la", "un", "gli", "è", "sono")),
)
"""A rule a model of 135M parameters can follow, and words that show that it did; none of them is an English word."""
COMPANY = (
    "You are a helpful assistant of the Northern Ferry Company. You know the timetable, the fares and the harbours, "
    "you are patient with every passenger and you never argue. Passengers write to you about many things and "
    "you help them all."
)
ERRANDS = (
    "What is a good name for a grey cat?", "Name one fruit that grows on trees.", "How do I boil an egg?",
    "What do bees make?", "Give me one tip for sleeping well.", "What colour is the sea?", "Name a large animal.",
    "What can I cook with rice?", "Why do people wear hats?", "Name a musical instrument.",
    "How do I keep bread fresh?", "What is snow made of?", "Name a city by the sea.", "What does a baker do?",
)  # fmt: skip
ROUNDS = 10
"""Errands of a conversation about a rule."""


def rule(seed: int) -> Conversation:
    """A rule in the system message that must hold for ten rounds (llama.cpp issue 15416).

    The model's own answers stay in the conversation; the rule stands behind the sink block. A round also brings about
    100 tokens of other text, so that the budget is passed several times.
    """
    dice = Dice(seed)
    text, marks = dice.pick(RULES)
    turns = []
    for errand in dice.distinct(ERRANDS, ROUNDS):
        user = f"{' '.join(filler(dice) for _ in range(4))} Now something else. {errand}"
        turns.append(Turn(RULE, user, "", marks, 10, None, match_word))
    return Conversation("rule", seed, f"{COMPANY} {text}", turns)


TOOLS = (
    "search_orders",
    "get_weather",
    "list_files",
    "read_page",
    "query_stock",
    "get_route",
    "find_user",
    "get_price",
)


def facts(seed: int) -> Conversation:
    """Two facts told in the first turn of a tool-using session, asked for after eight tool results."""
    dice = Dice(seed)
    name = dice.pick(FIRST_NAMES)
    town = dice.pick(TOWNS)
    order = dice.number(5)
    told = f"My name is {name}, I live in {town} and my order number is {order}. Please look into my delivery."
    turns = [Turn(None, told, "", (), 1, "I will look into that.")]
    for tool in dice.distinct(TOOLS, len(TOOLS)):
        rows = ", ".join(f'{{"id": {dice.number(4)}, "note": "{filler(dice)}"}}' for _ in range(3))
        turns.append(Turn(None, f'[{tool}] {{"results": [{rows}]}}', "", (), 1, "Thank you, I will go on."))
    number = f"Your order number is {order}."
    place = f"You live in {town}."
    turns.append(Turn(FACTS[0], "What is my order number?", "Your order number is", (order,), 8, number))
    turns.append(Turn(FACTS[1], "In which town do I live?", "You live in", (town,), 6, place))
    return Conversation("facts", seed, f"{COMPANY} You have tools.", turns)


def make_conversation(kind: str, seed: int, tokens: int, count_tokens: CountTokens) -> Conversation:
    """One conversation.

    Args:
        kind: one of :data:`KINDS`.
        seed: same seed and tokenizer, same conversation.
        tokens: length of the document of ``questions``; the other kinds have a length of their own.
        count_tokens: tokens of a text, by the served model's tokenizer.
    """
    if kind == "questions":
        return questions(seed, tokens, count_tokens)
    return {"rule": rule, "facts": facts}[kind](seed)


class Script:
    """The token ids of a conversation, turn by turn.

    Args:
        conversation: what to say.
        tokenizer: a Hugging Face tokenizer; with a chat template where the conversation has a system message.
    """

    def __init__(self, conversation: Conversation, tokenizer: Any) -> None:
        self.conversation = conversation
        self.tokenizer = tokenizer
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": conversation.system}]
        self._ids: list[int] = []

    def pinned_tokens(self, pin: str) -> int:
        """How many leading tokens a pin covers.

        Args:
            pin: ``""`` for none, ``pinned`` for the system message, ``opening`` for the first user message as well.
        """
        opening = [{"role": "user", "content": self.conversation.turns[0].user}] if pin == "opening" else []
        return len(self._render(False, opening)) if pin else 0

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _render(self, answering: bool, more: Sequence[dict[str, Any]] = ()) -> list[int]:
        messages = [*self._messages, *more]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answering)
        return self._encode(text)

    def play(self) -> Generator[tuple[Turn, list[int]], str, None]:
        """Turns with the token ids to send; ``send`` the model's answer to get the next turn."""
        for turn in self.conversation.turns:
            if self.conversation.system is None:
                ids = self._ids + self._encode(turn.user)
                answer = yield turn, ids
                self._ids = ids + self._encode(turn.reply if turn.reply is not None else answer)
            else:
                self._messages.append({"role": "user", "content": turn.user})
                answer = yield turn, self._render(True) + self._encode(turn.begin)
                said = turn.reply if turn.reply is not None else turn.begin + answer
                self._messages.append({"role": "assistant", "content": said})
