"""S22: start-up says which hook no longer fits. Imports SGLang, so it takes half a minute."""

from __future__ import annotations

import json

import pytest

from nexus_sglang.sglang_plugin import self_check
from nexus_sglang.sglang_plugin.scheduler import hooks


@pytest.fixture(scope="module")
def everything_hooked():
    from sglang.srt.plugins.hook_registry import HookRegistry

    patched = {f"sglang.srt.{hook.target}" for hook in (*hooks.SERVE, *hooks.LAUNCH)}
    before, HookRegistry._patched = HookRegistry._patched, patched
    yield HookRegistry
    HookRegistry._patched = before


def test_the_record_is_that_of_the_pinned_sglang():
    assert json.loads(self_check.record()) == self_check.recorded()


def test_all_in_place(everything_hooked):
    assert self_check.check_hooks((*hooks.SERVE, *hooks.LAUNCH)) == []


def test_a_missing_hook_is_named(everything_hooked):
    target = f"sglang.srt.{hooks.SERVE[2].target}"
    everything_hooked._patched = everything_hooked._patched - {target}
    try:
        assert self_check.check_hooks(hooks.SERVE) == [f"{target} is not hooked"]
    finally:
        everything_hooked._patched = everything_hooked._patched | {target}


def test_changed_parameters_are_named(everything_hooked, monkeypatch):
    known = self_check.recorded()
    target = hooks.SERVE[0].target
    known[target]["parameters"] = ["self", "something_else"]
    monkeypatch.setattr(self_check, "recorded", lambda: known)
    (problem,) = self_check.check_hooks(hooks.SERVE)
    assert target in problem and "takes other parameters" in problem
    with pytest.raises(self_check.SelfCheckError, match=r"refuses to serve[\s\S]*pip install 'sglang==0.5.23'"):
        self_check._raise([problem])


def test_another_sglang_is_refused(everything_hooked, monkeypatch):
    monkeypatch.setattr(self_check.importlib.metadata, "version", lambda name: "0.5.24")
    assert "sglang 0.5.24 is installed" in self_check.check_hooks(hooks.LAUNCH)[0]


def test_a_vanished_function_is_named(everything_hooked):
    gone = hooks.Hook("managers.scheduler.Scheduler.no_such_thing", "after", print)
    assert "no_such_thing is gone" in self_check.check_hooks((gone,))[0]
