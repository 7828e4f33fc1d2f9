"""A hint means one thing or is refused, in either of its two places."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest

from nexus_sglang.config import TokenAmount
from nexus_sglang.errors import ConfigError
from nexus_sglang.sglang_plugin.scheduler.hints import HINTS, Hints, read_hints
from tests.support.hints import BAD, Bad, envelope


def sent(*actions, **options):
    """``kv_hints`` as SGLang hands them on."""
    made = envelope(*actions, **options)
    return SimpleNamespace(actions=[SimpleNamespace(**action) for action in made["actions"]])


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_wrong_hint_is_refused_by_name_value_and_alternative(bad: Bad):
    with pytest.raises(ConfigError) as caught:
        read_hints(bad.params)
    for part in (bad.field, bad.shown, bad.alternative):
        assert part in str(caught.value)


@pytest.mark.parametrize("bad", [bad for bad in BAD if set(bad.params) <= set(HINTS)], ids=str)
def test_kv_hints_refuse_the_same(bad: Bad):
    with pytest.raises(ConfigError) as caught:
        read_hints(None, sent(*((HINTS[key].action, value) for key, value in bad.params.items())))
    for part in (HINTS[bad.field].action, bad.shown, bad.alternative):
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, 10**5000, 0.1 + 1j, "x" * 10**6], ids=type)
def test_a_value_that_cannot_be_shown_does_not_fill_the_message(value):
    for key in HINTS:
        with pytest.raises(ConfigError, match=re.escape(f"custom_params {key} ")) as caught:
            read_hints({key: value})
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("params", [["kv_budget"], "kv_budget", 3, False])
def test_what_is_no_object_is_refused(params):
    with pytest.raises(ConfigError, match="custom_params .*give an object"):
        read_hints(params)


@pytest.mark.parametrize("raw", [1e-4, 0.5, 1, 1.0, 2, 512, 512.0, 10**9])
def test_legal_budgets(raw):
    assert read_hints({"kv_budget": raw}) == Hints(TokenAmount(raw))
    assert read_hints(None, sent(("nexus.budget", raw))) == Hints(TokenAmount(raw))


def test_both_places_say_the_same():
    assert read_hints(None) == Hints() == read_hints({"other": 3}) == read_hints({}, sent())
    everything = {"kv_budget": 0.5, "kv_pin_tokens": 64, "kv_trace": True}
    actions = [(HINTS[key].action, value) for key, value in everything.items()]
    wanted = Hints(TokenAmount(0.5), True, 64, True)
    assert (
        read_hints(everything) == read_hints(None, sent(*actions)) == read_hints(everything, sent(*actions)) == wanted
    )
    assert read_hints({"kv_trace": True}, sent(("nexus.evict", False))) == Hints(evict=False, trace=True)


@pytest.mark.parametrize("params, actions, words", [
    ({"kv_budget": 0.5}, [("nexus.budget", 0.25)], ["custom_params kv_budget 0.5", "kv_hints nexus.budget 0.25"]),
    ({"kv_evict": False}, [("nexus.evict", True)], ["custom_params kv_evict False", "kv_hints nexus.evict True"]),
    ({"kv_evict": False}, [("nexus.pin", 64)], ["custom_params kv_evict false", "kv_hints nexus.pin 64"]),
    (None, [("nexus.pin", 64), ("nexus.pin", 65)], ["kv_hints nexus.pin 65", "kv_hints nexus.pin 64"]),
])  # fmt: skip
def test_wishes_that_contradict_each_other_are_refused(params, actions, words):
    with pytest.raises(ConfigError) as caught:
        read_hints(params, sent(*actions))
    for word in words:
        assert word in str(caught.value)


def test_actions_of_others_are_ignored_and_listed():
    read = read_hints(None, sent(("vendor.offload", 1), ("nexus.pin", 64), ("nexus.drop", [0, 9])))
    assert read.pin == 64
    assert [action["action_type"] for action in read.ignored] == ["vendor.offload", "nexus.drop"]
    assert read.ignored[0] == {"action_id": "a0", "action_type": "vendor.offload", "action_version": "1"}
    later = read_hints(None, sent(("nexus.pin", "what version 2 means"), version="2"))
    assert later.pin == 0
    assert later.ignored[0]["action_version"] == "2"


@pytest.mark.parametrize("payload", [{}, {"tokens": 64}, {"value": 64, "unit": "blocks"}])
def test_a_payload_has_one_value(payload):
    hints = sent(("nexus.pin", 64))
    hints.actions[0].payload = payload
    with pytest.raises(ConfigError, match='kv_hints nexus.pin payload .*give {"value": ...} alone'):
        read_hints(None, hints)
