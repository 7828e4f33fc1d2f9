"""Multi-turn sessions as token ids: generated here, or read from recorded traces by path."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """One request of a session.

    Attributes:
        prompt: the whole prompt as token ids.
        output: how many tokens are generated.
    """

    prompt: list[int]
    output: int


Session = list[Turn]
WORDS = (
    "order table window river letter engine market signal garden report winter bridge station copper paper anchor "
    "lantern silver harbour ticket module server cache index record branch commit test patch build error line file"
).split()


def text(rng: random.Random, words: int) -> str:
    """So many random words, some of which end a sentence."""
    return " ".join(f"{rng.choice(WORDS)}{'.' if rng.random() < 0.08 else ''}" for _ in range(words))


def generated(
    tokenizer: Any, sessions: int, turns: int, first: int, step: int, seed: int, output: int = 8
) -> list[Session]:
    """Tool-using agents that share a system prompt.

    Args:
        tokenizer: of the model.
        sessions: how many agents.
        turns: of each.
        first: tokens of the first turn; a third of them are the system prompt.
        step: tokens that a turn adds at most; half of them at least.
        seed: same seed and tokenizer, same sessions.
        output: tokens generated a turn.
    """
    system = tokenizer.encode(text(random.Random(seed), first // 3))[: first // 3]
    made = []
    for number in range(sessions):
        rng = random.Random(f"{seed}-{number}")
        prompt = system + tokenizer.encode(text(rng, first))[: first - len(system)]
        session = []
        for _ in range(turns):
            session.append(Turn(list(prompt), output))
            prompt += tokenizer.encode(text(rng, step))[: rng.randint(step // 2, step)]
        made.append(session)
    return made


def from_hash_trace(path: Path, tokenizer: Any, scale: float, limit: int, longest: int) -> list[Session]:
    """Prompts recorded as hashes of prefix blocks: each hash becomes the same few tokens wherever it occurs.

    Reads one session per JSON file (``{"block_size", "requests": [{"out", "hash_ids"}]}``), or a JSONL whose lines
    carry ``input_length, output_length, hash_ids``; there, a line that continues an earlier one joins its session.

    Args:
        path: of the trace.
        tokenizer: of the model.
        scale: trace tokens to tokens here.
        limit: requests read.
        longest: longer prompts are left out, in tokens.
    """
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()[:limit]]
        block = 512
        requests = [(row["hash_ids"], row["output_length"]) for row in rows]
    else:
        data = json.loads(path.read_text())
        block = data["block_size"]
        requests = [(row["hash_ids"], row["out"]) for row in data["requests"][:limit]]
    size = max(1, round(block * scale))
    pieces: dict[int, list[int]] = {}

    def tokens(hash_id: int) -> list[int]:
        if hash_id not in pieces:
            rng = random.Random(f"{path.name}-{hash_id}")
            pieces[hash_id] = tokenizer.encode(text(rng, size + 2))[:size]
        return pieces[hash_id]

    sessions: list[tuple[list[int], Session]] = []
    for hashes, output in requests:
        prompt = [t for h in hashes for t in tokens(h)]
        if not prompt or len(prompt) > longest:
            continue
        turn = Turn(prompt, max(1, min(16, round(output * scale))))
        for i, (last, session) in enumerate(sessions):
            if len(last) > 1 and hashes[: len(last) - 1] == last[:-1]:
                session.append(turn)
                sessions[i] = (hashes, session)
                break
        else:
            sessions.append((hashes, [turn]))
    return [session for _, session in sessions]


def from_chats(path: Path, tokenizer: Any, limit: int, longest: int) -> list[Session]:
    """One request per assistant message of recorded chats, whose answers are replayed.

    Args:
        path: JSON lines of ``{"messages": [{"role": .., "content": ..}]}``.
        tokenizer: of the model, with a chat template.
        limit: chats read.
        longest: longer prompts are left out, in tokens.
    """
    sessions = []
    for line in path.read_text().splitlines()[:limit]:
        messages = json.loads(line)["messages"]
        session: Session = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i == 0:
                continue
            # Plain text in, so that the ids of a turn begin with the ids of the turn before it.
            markup = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(markup)
            if len(ids) <= longest:
                session.append(Turn(ids, 8))
        if session:
            sessions.append(session)
    return sessions
