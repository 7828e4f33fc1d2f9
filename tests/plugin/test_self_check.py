"""Start-up says which hook no longer fits. Imports SGLang, so it takes half a minute."""

from __future__ import annotations

import json

import pytest

from nexus_sglang.errors import SelfCheckError
from nexus_sglang.sglang_plugin import installer
from nexus_sglang.sglang_plugin.hook_table import ALL, LAUNCH, SERVE
from nexus_sglang.sglang_plugin.installer import Hook, check_hooks, check_installed, recorded, refuse


@pytest.fixture(scope="module")
def registry():
    """SGLang's registry, as if every hook were in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = HookRegistry._patched
    HookRegistry._patched = {f"sglang.srt.{hook.target}" for hook in ALL}
    yield HookRegistry
    HookRegistry._patched = before


def test_the_record_is_that_of_the_pinned_sglang():
    assert json.loads(installer.record(ALL)) == recorded()


def test_all_in_place(registry):
    assert check_hooks(ALL) == []


def test_no_function_is_hooked_twice():
    assert len({hook.target for hook in ALL}) == len(ALL)


def test_a_missing_hook_is_named(registry, monkeypatch):
    target = f"sglang.srt.{SERVE[2].target}"
    monkeypatch.setattr(registry, "_patched", registry._patched - {target})
    assert check_hooks(SERVE) == [f"{target} is not hooked"]


def test_a_process_checks_what_it_installed(registry, monkeypatch):
    monkeypatch.setattr(installer, "_installed", [])
    monkeypatch.setattr(registry, "_hooks", registry._hooks.copy())
    gone = Hook("managers.scheduler.Scheduler.no_such_thing", "after", print)
    installer.install(LAUNCH)
    assert check_installed() == []
    installer.install((gone,))
    assert ["no_such_thing is gone" in problem for problem in check_installed()] == [True]


def test_a_hook_that_cannot_be_registered_is_missed(registry, monkeypatch):
    monkeypatch.setattr(installer, "_installed", [])
    monkeypatch.setattr(registry, "_patched", set())
    with pytest.raises(ValueError):
        installer.install((LAUNCH[0]._replace(how="beside"),))
    assert check_installed() == [f"sglang.srt.{LAUNCH[0].target} is not hooked"]


def test_changed_parameters_are_named(registry, monkeypatch):
    known = recorded()
    target = SERVE[0].target
    known[target]["parameters"] = ["self", "something_else"]
    monkeypatch.setattr(installer, "recorded", lambda: known)
    (problem,) = check_hooks(SERVE)
    assert target in problem and "takes other parameters" in problem
    with pytest.raises(SelfCheckError, match=r"refuses to serve[\s\S]*pip install 'sglang==0.5.23'"):
        refuse([problem])


def test_another_sglang_is_refused(registry, monkeypatch):
    monkeypatch.setattr(installer.importlib.metadata, "version", lambda name: "0.5.24")
    assert "sglang 0.5.24 is installed" in check_hooks(LAUNCH)[0]
