"""Pin the system prompt and the tool definitions of a chat request.

Agents of one kind share them, and they are kept whole even when no other agent with the same prompt is running. With
``--kv-pin-first-user`` the first user message is pinned too: an agent's task is said once and needed to the end.

Runs in the process that serves HTTP, where SGLang turns messages into token ids. Nothing is assumed about the chat
template: the leading messages are rendered once more with another message after them, and what both prompts have in
common at their start is pinned.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from nexus_sglang.prefixes import common_prefix
from nexus_sglang.sglang_plugin import carrier
from nexus_sglang.sglang_plugin.installer import Hook

logger = logging.getLogger(__name__)

LEADING_ROLES = ("system", "developer", "root")
SHAPES_THE_PREFIX = {"messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "response_format"}
"""Fields of a chat request that templates read. One that is missing here makes a pin too short, never wrong."""

REMEMBERED = 256
"""Rendered prefixes kept; one costs four bytes a token."""


def leading(messages: Sequence[Any], first_user: bool = False) -> list[Any]:
    """The messages that a conversation begins with: those of the system and the developer.

    Args:
        messages: of a chat request, in order.
        first_user: whether the first message after them belongs to it, where it is the user's.
    """
    end = next((i for i, message in enumerate(messages) if message.role not in LEADING_ROLES), len(messages))
    return list(messages[: end + (first_user and end < len(messages) and messages[end].role == "user")])


def stand_in(message: Any) -> str:
    """Text for another message, which starts with another character than this one.

    Args:
        message: of a chat request; None where the conversation ends.
    """
    content = getattr(message, "content", None)
    if isinstance(content, list):
        content = next((part.text for part in content if getattr(part, "text", None)), "")
    return "#" if not (content or "").lstrip().startswith("#") else "x"


class Prefixes:
    """The last rendered prefixes, by what they were rendered from. Safe to use from several threads.

    Args:
        size: how many are kept.
    """

    def __init__(self, size: int = REMEMBERED):
        self.size = size
        self._known: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def ids(self, serving: Any, probe: Any) -> np.ndarray:
        """Token ids of a chat request.

        Args:
            serving: SGLang's ``OpenAIServingChat``, which renders it.
            probe: its ``ChatCompletionRequest``.

        Returns:
            int32 ``[tokens]``.
        """
        # Templates may print the date.
        text = time.strftime("%Y-%m-%d") + probe.model_dump_json(include=SHAPES_THE_PREFIX)
        key = hashlib.sha256(text.encode()).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        ids = np.asarray(serving._process_messages(probe, False).prompt_ids, dtype=np.int32)
        with self._lock:
            self._known[key] = ids
            while len(self._known) > self.size:
                self._known.popitem(last=False)
        return ids


_prefixes = Prefixes()
_warned = False
_behind_responses: ContextVar[Any] = ContextVar("_behind_responses", default=None)


def pin_length(
    serving: Any, request: Any, prompt_ids: Sequence[int], prefixes: Prefixes | None = None, first_user: bool = False
) -> int:
    """How many leading tokens hold the system messages and tools of a chat request.

    Args:
        serving: SGLang's ``OpenAIServingChat``.
        request: its ``ChatCompletionRequest``, after conversion.
        prompt_ids: token ids of the request's prompt.
        prefixes: where rendered prefixes are kept; None for those of this process.
        first_user: whether its first user message is pinned as well.

    Returns:
        Tokens; 0 for a request that has nothing of the kind.
    """
    head = leading(request.messages, first_user)
    tools = request.tools and request.tool_choice != "none"
    if not head and not tools:
        return 0
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionMessageGenericParam, ChatCompletionMessageUserParam

    other = stand_in(request.messages[len(head)] if len(head) < len(request.messages) else None)
    if head and head[-1].role == "user":  # many templates want turns to alternate
        behind = ChatCompletionMessageGenericParam(role="assistant", content=other)
    else:
        behind = ChatCompletionMessageUserParam(role="user", content=other)
    probe = request.model_copy(update={"messages": [*head, behind], "input_ids": None, "continue_final_message": False})
    ids = (prefixes or _prefixes).ids(serving, probe)
    return common_prefix(ids, prompt_ids[: len(ids)])


def _pin(serving: Any, request: Any, generate: Any) -> None:
    """Put the length into the sampling parameters of a request, as the hint ``kv_pin_tokens``.

    A client's own ``kv_pin_tokens`` stands. Whatever goes wrong here costs the pin, never the request.

    Args:
        serving: SGLang's ``OpenAIServingChat``.
        request: its ``ChatCompletionRequest``.
        generate: the ``GenerateReqInput`` that was made of it.
    """
    global _warned
    config = carrier.current()
    if config is None or not (config.pin_system or config.pin_first_user):
        return
    custom = generate.sampling_params.get("custom_params") or {}
    if "kv_pin_tokens" in custom or custom.get("kv_evict") is False or not generate.input_ids:
        return
    try:
        pin = pin_length(serving, request, generate.input_ids, first_user=config.pin_first_user)
    except Exception as err:
        if not _warned:
            logger.warning(
                "--kv-pin-system, --kv-pin-first-user: this chat template does not render what a conversation begins "
                "with alone, nothing is pinned (%s: %s)",
                type(err).__name__,
                err,
            )
        _warned = True
        return
    if pin:
        generate.sampling_params["custom_params"] = {**custom, "kv_pin_tokens": pin}


def pin_chat(result: tuple[Any, Any], serving: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``OpenAIServingChat._convert_to_internal_request``: ``/v1/chat/completions`` and ``/v1/messages``."""
    _pin(serving, request, result[0])


def note_responses(result: Any, serving: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``OpenAIServingChat._process_messages``: remember the chat request that ``/v1/responses`` makes."""
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

    if isinstance(serving, OpenAIServingResponses):
        _behind_responses.set(request)


def pin_responses(serving: Any, request_id: str, prompt: Any, adapted: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``OpenAIServingResponses._generate_with_builtin_tools``, in the task that rendered the prompt."""
    request = _behind_responses.get()
    if request is not None:
        _pin(serving, request, adapted)
        _behind_responses.set(None)


HOOKS = (
    Hook("entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request", "after", pin_chat),
    Hook("entrypoints.openai.serving_chat.OpenAIServingChat._process_messages", "after", note_responses),
    Hook(
        "entrypoints.openai.serving_responses.OpenAIServingResponses._generate_with_builtin_tools",
        "before",
        pin_responses,
    ),
)
