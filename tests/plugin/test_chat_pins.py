"""What a chat request pins by itself, with templates that are not known to the code. Imports SGLang's protocol."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from nexus_sglang.config import NexusConfig
from nexus_sglang.sglang_plugin import carrier
from nexus_sglang.sglang_plugin.launcher import chat_pins

RULES = {"role": "system", "content": "Never talk about the weather."}
HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "read_log", "parameters": {"type": "object"}}}


def chatml(messages, tools) -> str:
    """Tools first, then every message under its role; a stock system message where there is none."""
    text = f"<tools>{json.dumps(tools)}</tools>" if tools else ""
    if messages[0]["role"] != "system":
        text += "<system>You are helpful."
    return text + "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def folded(messages, tools) -> str:
    """The system message inside the first user message, tools before the last one."""
    rules = "".join(m["content"] for m in messages if m["role"] == "system")
    rest = [m for m in messages if m["role"] != "system"]
    text = ""
    for i, m in enumerate(rest):
        shown = f"[tools {json.dumps(tools)}]" if tools and i == len(rest) - 1 else ""
        text += f"{shown}[{m['role']}]{rules if i == 0 else ''}\n{m['content']}"
    return text


class Serving:
    """Stands in for ``OpenAIServingChat``: one id per character of what ``template`` renders."""

    def __init__(self, template):
        self.template = template
        self.rendered = 0

    def text(self, request) -> str:
        tools = [t.model_dump() for t in request.tools] if request.tools and request.tool_choice != "none" else None
        return self.template([m.model_dump() for m in request.messages], tools)

    def _process_messages(self, request, is_multimodal):
        self.rendered += 1
        return SimpleNamespace(prompt_ids=[ord(c) for c in self.text(request)])


def chat(messages, **fields):
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=messages, model="default", **fields)


def pinned(serving, request, prefixes=None) -> str:
    """The text that is pinned."""
    text = serving.text(request)
    return text[: chat_pins.pin_length(serving, request, [ord(c) for c in text], prefixes or chat_pins.Prefixes())]


def test_leading_messages_are_pinned_up_to_the_first_word_of_the_user():
    assert pinned(Serving(chatml), chat([RULES, HELLO])) == f"<system>{RULES['content']}<user>"
    more = {"role": "developer", "content": "Be brief."}
    later = [RULES, more, HELLO, {"role": "assistant", "content": "Hi"}, {"role": "system", "content": "Late"}, HELLO]
    assert pinned(Serving(chatml), chat(later)) == f"<system>{RULES['content']}<developer>Be brief.<user>"
    assert pinned(Serving(folded), chat([RULES, HELLO])) == f"[user]{RULES['content']}\n"


def test_tools_are_pinned_where_the_template_puts_them_first():
    first = pinned(Serving(chatml), chat([HELLO], tools=[TOOL]))
    assert "read_log" in first and first.endswith("<user>")
    without = pinned(Serving(chatml), chat([RULES, HELLO], tools=[TOOL], tool_choice="none"))
    assert without == f"<system>{RULES['content']}<user>"
    # Later turns of this template begin otherwise: nothing is pinned that is not at the start.
    turns = [HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]
    assert pinned(Serving(folded), chat(turns, tools=[TOOL])) == "["


def test_without_a_system_message_nothing_is_pinned():
    serving = Serving(chatml)
    assert pinned(serving, chat([HELLO])) == ""
    assert pinned(serving, chat([HELLO], tools=[TOOL], tool_choice="none")) == "" and serving.rendered == 0


@pytest.mark.parametrize("content", ["#", "  # x", "", "x", [{"type": "text", "text": "# Title"}], "\u00e9t\u00e9"])
def test_the_stand_in_never_begins_like_the_question(content):
    request = chat([RULES, {"role": "user", "content": content}])
    assert pinned(Serving(chatml), chat([RULES, {"role": "user", "content": "x#"}])).endswith("<user>")
    text = chat_pins.stand_in(request.messages[1])
    first = content[0]["text"] if isinstance(content, list) else content
    assert not first.lstrip().startswith(text)


def test_a_conversation_without_a_user_message_is_pinned_too():
    assert pinned(Serving(chatml), chat([RULES])) == f"<system>{RULES['content']}<"
    only = [RULES, {"role": "assistant", "content": "Hi"}]
    assert pinned(Serving(chatml), chat(only, continue_final_message=True)) == f"<system>{RULES['content']}<"


def test_a_prefix_is_rendered_once_and_the_memory_is_bounded():
    serving = Serving(chatml)
    prefixes = chat_pins.Prefixes(size=2)
    for question in ("one", "two", "three"):
        pinned(serving, chat([RULES, {"role": "user", "content": question}]), prefixes)
    assert serving.rendered == 1
    pinned(serving, chat([RULES, HELLO], tools=[TOOL]), prefixes)
    pinned(serving, chat([RULES, HELLO], chat_template_kwargs={"enable_thinking": False}), prefixes)
    assert serving.rendered == 3 and len(prefixes._known) == 2


TASK = {"role": "user", "content": "Fix issue 7."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "function": {"name": "read_log", "arguments": "{}"}}],
}


def task_pinned(serving, messages, **fields) -> str:
    request = chat(messages, **fields)
    text = serving.text(request)
    ids = [ord(c) for c in text]
    return text[: chat_pins.pin_length(serving, request, ids, chat_pins.Prefixes(), first_user=True)]


@pytest.mark.parametrize("head", [[RULES, TASK], [TASK]])
def test_the_first_user_message_is_pinned_to_its_end_in_every_turn(head):
    begins = "<system>" + (RULES["content"] if len(head) > 1 else "You are helpful.") + "<user>Fix issue 7.<assistant>"
    result = {"role": "tool", "content": "ok", "tool_call_id": "1"}
    later = [[], [{"role": "assistant", "content": "Done"}, HELLO], [CALL, result, HELLO]]
    for turns in later:
        assert task_pinned(Serving(chatml), [*head, *turns]) == begins
    with_tools = task_pinned(Serving(chatml), head, tools=[TOOL])
    assert "read_log" in with_tools and with_tools.endswith(begins)


def test_templates_that_want_turns_to_alternate_take_the_stand_in():
    def strict(messages, tools):
        roles = [m["role"] for m in messages if m["role"] != "system"]
        if any(one == other for one, other in zip(roles, roles[1:], strict=False)):
            raise ValueError("Conversation roles must alternate")
        return chatml(messages, tools)

    assert task_pinned(Serving(strict), [RULES, TASK]).endswith("<user>Fix issue 7.<assistant>")


def test_only_the_first_user_message_counts():
    assert task_pinned(Serving(chatml), [TASK, HELLO]).endswith("<user>Fix issue 7.<")
    hello = {"role": "assistant", "content": "How can I help?"}
    assert task_pinned(Serving(chatml), [RULES, hello, TASK]) == f"<system>{RULES['content']}<", (
        "a greeting comes first"
    )
    assert task_pinned(Serving(chatml), [hello]) == ""


@pytest.fixture
def hook(monkeypatch):
    """Runs the hook on a request under a config; returns the request's custom_params."""
    monkeypatch.setattr(chat_pins, "_prefixes", chat_pins.Prefixes())
    monkeypatch.setattr(chat_pins, "_warned", False)

    def run(custom=None, serving=None, **settings):
        config = NexusConfig("nexus", **settings)
        monkeypatch.setenv(carrier.VARIABLE, config.to_json())
        request = chat([RULES, HELLO])
        serving = serving or Serving(chatml)
        generate = SimpleNamespace(
            sampling_params={"custom_params": custom}, input_ids=[ord(c) for c in Serving(chatml).text(request)]
        )
        assert chat_pins.pin_chat((generate, request), serving, request, None) is None
        return generate.sampling_params["custom_params"]

    return run


LENGTH = len(f"<system>{RULES['content']}<user>")


def test_the_pin_travels_as_a_hint(hook):
    assert hook() == {"kv_pin_tokens": LENGTH}
    assert hook({"kv_trace": True, "mine": 3}) == {"kv_trace": True, "mine": 3, "kv_pin_tokens": LENGTH}


def test_what_the_client_or_the_server_said_stands(hook):
    assert hook({"kv_pin_tokens": 0}) == {"kv_pin_tokens": 0}
    assert hook({"kv_evict": False}) == {"kv_evict": False}
    assert hook(pin_system="false") is None
    assert hook({"kv_pin_tokens": 3}, pin_first_user=True) == {"kv_pin_tokens": 3}


@pytest.mark.parametrize("pin_system", [True, False])
def test_the_first_user_message_takes_what_is_before_it_along(hook, pin_system):
    assert hook(pin_first_user=True, pin_system=pin_system) == {"kv_pin_tokens": LENGTH + len("Hello<assistant>")}


def test_a_server_without_a_policy_is_left_alone(monkeypatch):
    monkeypatch.delenv(carrier.VARIABLE, raising=False)
    assert chat_pins.pin_chat((None, None), None, None) is None


def test_a_template_that_fails_costs_the_pin_not_the_request(hook, caplog):
    def strict(messages, tools):
        raise ValueError("Conversation roles must alternate")

    with caplog.at_level(logging.WARNING):
        assert hook(serving=Serving(strict)) is None and hook(serving=Serving(strict)) is None
    (record,) = caplog.records
    assert "--kv-pin-system" in record.message and "roles must alternate" in record.message


def test_the_responses_endpoint_pins_through_the_chat_request_it_makes(monkeypatch):
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

    class Responses(OpenAIServingResponses):
        def __init__(self):
            self.chat = Serving(chatml)

        def _process_messages(self, request, is_multimodal):
            result = self.chat._process_messages(request, is_multimodal)
            chat_pins.note_responses(result, self, request, is_multimodal)
            return result

    monkeypatch.setattr(chat_pins, "_prefixes", chat_pins.Prefixes())
    monkeypatch.setenv(carrier.VARIABLE, NexusConfig("nexus").to_json())
    serving = Responses()
    request = chat([RULES, HELLO])
    ids = serving._process_messages(request, False).prompt_ids
    first, second = (SimpleNamespace(sampling_params={}, input_ids=ids) for _ in range(2))
    chat_pins.pin_responses(serving, "id", ids, first, first.sampling_params, None)
    assert first.sampling_params == {"custom_params": {"kv_pin_tokens": LENGTH}}
    chat_pins.pin_responses(serving, "id", ids, second, second.sampling_params, None)
    assert second.sampling_params == {}, "a prompt rendered another way (Harmony) has no chat request behind it"


def test_a_chat_request_leaves_nothing_for_the_responses_endpoint(monkeypatch):
    monkeypatch.setenv(carrier.VARIABLE, NexusConfig("nexus").to_json())
    chat_pins.note_responses(None, Serving(chatml), chat([RULES, HELLO]), False)
    adapted = SimpleNamespace(sampling_params={}, input_ids=[1, 2])
    chat_pins.pin_responses(None, "id", [1, 2], adapted)
    assert adapted.sampling_params == {}
