"""Start-up says which hook no longer fits. Imports SGLang, so it takes half a minute."""

from __future__ import annotations

import json

import pytest

from nexus_sglang.errors import ConfigError, SelfCheckError
from nexus_sglang.sglang_plugin import hook_table, installer
from nexus_sglang.sglang_plugin.hook_table import ALL, LAUNCH, LAUNCH_REPLACES, OVERRIDING, SERVE, SERVE_REPLACES
from nexus_sglang.sglang_plugin.installer import Hook, check_hooks, check_installed, recorded, refuse
from nexus_sglang.sglang_plugin.launcher import flags


@pytest.fixture(scope="module")
def registry():
    """SGLang's registry, as if every hook were in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = HookRegistry._patched
    HookRegistry._patched = {f"sglang.srt.{hook.target}" for hook in ALL}
    yield HookRegistry
    HookRegistry._patched = before


def test_the_record_is_that_of_the_pinned_sglang():
    assert json.loads(hook_table.record()) == recorded(), "run `make patches`"


def test_all_in_place(registry):
    assert check_hooks(ALL, (*LAUNCH_REPLACES, *SERVE_REPLACES), OVERRIDING) == []


def test_no_function_is_hooked_twice():
    assert len({hook.target for hook in ALL}) == len(ALL)


def test_a_missing_hook_is_named(registry, monkeypatch):
    target = f"sglang.srt.{SERVE[2].target}"
    monkeypatch.setattr(registry, "_patched", registry._patched - {target})
    assert check_hooks(SERVE) == [f"{target} is not hooked"]


def test_a_process_checks_what_it_installed(registry, monkeypatch):
    monkeypatch.setattr(installer, "_hooks", [])
    monkeypatch.setattr(installer, "_replaced", [])
    monkeypatch.setattr(installer, "_overriding", [])
    monkeypatch.setattr(registry, "_hooks", registry._hooks.copy())
    gone = Hook("managers.scheduler.Scheduler.no_such_thing", "after", print)
    installer.install(LAUNCH)
    assert check_installed() == []
    installer.install((gone,))
    assert ["no_such_thing is gone" in problem for problem in check_installed()] == [True]


def test_a_hook_that_cannot_be_registered_is_missed(registry, monkeypatch):
    monkeypatch.setattr(installer, "_hooks", [])
    monkeypatch.setattr(installer, "_replaced", [])
    monkeypatch.setattr(installer, "_overriding", [])
    monkeypatch.setattr(registry, "_patched", set())
    with pytest.raises(ValueError):
        installer.install((LAUNCH[0]._replace(how="beside"),))
    assert check_installed() == [f"sglang.srt.{LAUNCH[0].target} is not hooked"]


def test_changed_parameters_are_named(registry, monkeypatch):
    known = recorded()
    target = SERVE[0].target
    known["hooked"][target]["parameters"] = ["self", "something_else"]
    monkeypatch.setattr(installer, "recorded", lambda: known)
    (problem,) = check_hooks(SERVE)
    assert target in problem and "takes other parameters" in problem
    with pytest.raises(SelfCheckError, match=r"refuses to serve[\s\S]*pip install 'sglang==0.5.23'"):
        refuse([problem])


def test_another_sglang_is_refused(registry, monkeypatch):
    monkeypatch.setattr(installer.importlib.metadata, "version", lambda name: "0.5.24")
    assert "sglang 0.5.24 is installed" in check_hooks(LAUNCH)[0]


ENGINE = "sglang.srt.entrypoints.engine.Engine.__init__"


def test_a_changed_reader_of_what_is_replaced_is_named_once(registry, monkeypatch):
    known = recorded()
    for one in LAUNCH_REPLACES:
        known["replaced"][one.attribute][one.read_by[0]]["body"] = "0"
    monkeypatch.setattr(installer, "recorded", lambda: known)
    (problem,) = check_hooks((), LAUNCH_REPLACES)
    assert problem.startswith(f"{ENGINE} was edited"), "nothing else would notice"


def test_a_changed_method_under_an_overriding_class_is_named(registry, monkeypatch, caplog):
    known = recorded()
    methods = known["overridden"]["scheduler.tree.NexusTreeCore"]
    split, insert = (
        f"mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore.{name}"
        for name in ("_split_node", "_insert_overlap_step")
    )
    methods[split]["parameters"] = ["self", "key"]
    methods[insert]["body"] = "0"
    monkeypatch.setattr(installer, "recorded", lambda: known)
    (problem,) = check_hooks((), (), OVERRIDING)
    assert f"{split} takes other parameters" in problem
    assert f"{insert} was edited" in caplog.text


def test_what_is_not_in_the_record_is_named(registry):
    new = Hook("managers.scheduler.Scheduler.get_next_batch_to_run", "after", print)
    assert [misfit.text.split(": ")[-1] for misfit in installer.misfits((new,))] == ["run `make patches`"]


def test_keywords_are_read_in_the_frame_of_the_engine_only(monkeypatch):
    from sglang.srt.entrypoints import engine

    class Stub:
        server_args = flags.ReadyMadeArgs()

        def __init__(self, **settings):
            self.server_args = settings.get("server_args")

        def attach(self, kwargs):
            self.server_args = kwargs["server_args"]

    monkeypatch.setattr(engine, "Engine", Stub)
    assert Stub(server_args=1, port=3).server_args == 1 and Stub(kv_policy="nexus").server_args is None
    with pytest.raises(ConfigError, match="kv_policy='nexus'"):
        Stub(server_args=1, kv_policy="nexus")
    Stub().attach({"server_args": 2, "kv_policy": "nexus"})

    class Stricter(Stub):
        def __init__(self, server_args, kv_policy=None):
            self.server_args = server_args

    monkeypatch.setattr(engine, "Engine", Stricter)
    with pytest.raises(SelfCheckError, match="no free keywords"):
        Stricter(1, kv_policy="nexus")
