"""A user's own conversations: JSON lines of chat messages with what the answer must contain.

One line is ``{"messages": [{"role": "user", "content": "..."}, ...], "expect": ["...", ...], "max_tokens": 32}``;
``expect`` is scored as the share of its strings that occur in the answer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from nexus_sglang.errors import ConfigError

EXAMPLE = '{"messages": [{"role": "user", "content": "What is 2 + 2?"}], "expect": ["4"]}'


class UserSample(NamedTuple):
    """One line of the file.

    Attributes:
        line: its number, from 1.
        messages: the chat.
        expect: strings the answer must contain.
        tokens: most tokens of the answer.
    """

    line: int
    messages: list[dict[str, Any]]
    expect: tuple[str, ...]
    tokens: int

    @property
    def digest(self) -> str:
        """What was asked, to tell whether a result belongs to it."""
        return hashlib.sha256(json.dumps(self[1:]).encode()).hexdigest()[:12]


def read_samples(path: Path) -> list[UserSample]:
    """Every line of the file that is not empty.

    Args:
        path: of the file.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is not usable; names the line and shows a usable one.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(
            f"--data {path} cannot be read ({err}): give a JSON lines file with lines like {EXAMPLE}"
        ) from None
    samples = [_sample(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not samples:
        raise ConfigError(f"--data {path} is empty: write lines like {EXAMPLE}")
    return samples


def _sample(path: Path, number: int, line: str) -> UserSample:
    def bad(why: str) -> ConfigError:
        return ConfigError(f"--data {path}, line {number}: {why}. A usable line: {EXAMPLE}")

    try:
        raw = json.loads(line)
    except json.JSONDecodeError as err:
        raise bad(f"not JSON ({err})") from None
    if not isinstance(raw, dict):
        raise bad("not a JSON object")
    messages = raw.get("messages")
    expect = raw.get("expect")
    tokens = raw.get("max_tokens", 32)
    if not isinstance(messages, list) or not messages:
        raise bad("'messages' is not a list of chat messages")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise bad(f"message {message!r:.60} has no 'role' and 'content' text")
    expect = [expect] if isinstance(expect, str) else expect
    if not isinstance(expect, list) or not expect or not all(isinstance(text, str) and text for text in expect):
        raise bad("'expect' is not a list of strings")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise bad(f"'max_tokens' {tokens!r} is not a whole number of at least 1")
    return UserSample(number, messages, tuple(expect), tokens)
