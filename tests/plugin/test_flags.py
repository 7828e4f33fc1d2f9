"""Every setting: what is accepted, and that a wrong value gets one message naming flag, value and alternative."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nexus_sglang.config import NexusConfig, TokenAmount
from nexus_sglang.errors import ConfigError
from nexus_sglang.kv_slots.capacity import largest_budget, require_pool, virtual_size
from nexus_sglang.sglang_plugin import carrier, installer
from nexus_sglang.sglang_plugin.carrier import NO_RESIZE, current, publish
from nexus_sglang.sglang_plugin.launcher.flags import config_from, from_cli_args


def test_budget_as_share_and_as_tokens():
    share = NexusConfig("nexus", budget="0.2")
    count = NexusConfig("nexus", budget=512)
    assert share.budget_tokens(2090) == 418 and share.budget_tokens(2000) == 400
    assert count.budget_tokens(10) == count.budget_tokens(100_000) == 512
    assert NexusConfig("nexus", budget="1.0").budget_tokens(777) == 777
    assert share.budget_tokens(100) == 128, "never below --kv-min-tokens"


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("budget", 0, ["--kv-budget 0", "0.2", "512"]),
        ("budget", 1.5, ["--kv-budget 1.5", "whole number"]),
        ("budget", "lots", ["--kv-budget 'lots'", "512"]),
        ("budget", -3, ["--kv-budget -3"]),
        ("budget", float("nan"), ["--kv-budget nan"]),
        ("block_size", 0, ["--kv-block-size 0", "32"]),
        ("block_size", "x", ["--kv-block-size 'x'", "32"]),
        ("window", 2.5, ["--kv-window 2.5", "16"]),
        ("sink_tokens", -1, ["--kv-sink-tokens -1", "4"]),
        ("recent_tokens", -1, ["--kv-recent-tokens -1"]),
        ("pin_system", "maybe", ["--kv-pin-system 'maybe'", "true or false"]),
        ("pin_first_user", 1, ["--kv-pin-first-user 1", "true or false"]),
        ("min_tokens", True, ["--kv-min-tokens True", "128"]),
        ("seed", -1, ["--kv-seed -1"]),
        ("policy_config", "{", ["--kv-policy-config '{'", "walk_weight"]),
        ("policy_config", "[1]", ["--kv-policy-config [1]", "JSON object"]),
        ("policy_config", '{"walk_wait": 1}', ["'walk_wait'", "walk_weight"]),
        ("policy_config", '{"walk_weight": "much"}', ["walk_weight 'much'"]),
        ("policy_config", '{"walk_steps": 1.5}', ["walk_steps 1.5", "whole number from 0 to 1024"]),
        ("window", float("inf"), ["--kv-window inf", "16"]),
    ],
)
def test_bad_values(field, value, words):
    key = "kv_policy_config" if field == "policy_config" else f"kv_{field}"
    with pytest.raises(ConfigError) as caught:
        config_from({"kv_policy": "nexus", key: value})
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_policy_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'nexus'.*Registered: .*streaming-llm"):
        config_from({"kv_policy": "nexis"})
    with pytest.raises(ConfigError, match="does not load"):
        config_from({"kv_policy": "no_such_module:Policy"})
    with pytest.raises(ConfigError, match="not a subclass"):
        config_from({"kv_policy": "collections:OrderedDict"})


def test_off_means_off(monkeypatch):
    monkeypatch.delenv("NEXUS_SGLANG_CONFIG", raising=False)
    assert config_from({}) is None and config_from({"kv_policy": "none", "kv_budget": "0.5"}) is None
    with pytest.raises(ConfigError, match="--kv-budget without --kv-policy"):
        config_from({"kv_budget": "0.5"})
    config = config_from({"kv_policy": "nexus", "kv_seed": "7"})
    publish(config)
    assert current() == config and current().seed == 7
    assert os.environ[NO_RESIZE] == "0"
    publish(None)
    assert current() is None and NO_RESIZE not in os.environ


def test_keywords_beside_ready_made_arguments_are_refused():
    """SGLang would drop them and serve without a policy. In a process of its own: an engine loads plugins."""
    code = "import sglang; sglang.Engine(server_args=object(), kv_policy='nexus', kv_budget=0.5)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1 and "ConfigError: sgl.Engine(server_args=..., kv_policy='nexus', kv_budget=0.5)" in last
    assert "sgl.Engine(model_path=..., kv_policy='nexus', kv_budget=0.5)" in last


def test_round_trip_through_the_environment():
    config = NexusConfig("nexus", budget=300, recent_tokens=0.5, policy_config={"walk_weight": 1.0})
    assert NexusConfig.from_json(config.to_json()) == config


def test_the_config_is_parsed_once_until_another_is_published(monkeypatch):
    monkeypatch.setenv(carrier.VARIABLE, NexusConfig("nexus", seed=1).to_json())
    first = current()
    assert current() is first
    monkeypatch.setenv(carrier.VARIABLE, NexusConfig("nexus", seed=2).to_json())
    assert current().seed == 2
    monkeypatch.delenv(carrier.VARIABLE)
    assert current() is None


@pytest.mark.parametrize("budget", [128, 200, 418, 5000])
def test_recent_window_leaves_room_to_choose(budget):
    config = NexusConfig("nexus", recent_tokens=1.0)
    assert config.window <= config.recent_length(budget) <= (budget - config.sink_length) // 2 + config.block_size
    assert TokenAmount(0.25).of(418) == 105


def test_capacity():
    config = NexusConfig("nexus", budget=0.2)
    assert virtual_size(16384, config, 8192, 8) == 81920
    assert virtual_size(4096, NexusConfig("nexus", budget=512), 8192, 4) == 65536
    assert largest_budget(4096, config, 512, overlap=True) == 4096 - 1024 - 64
    require_pool(4096, config, 512, overlap=True)
    with pytest.raises(ConfigError, match=r"KV pool of 1000 tokens .* 128 \+ prefill chunks 2 x 512 \+ .* = 1216"):
        require_pool(1000, config, 512, overlap=True)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({}, "lower --chunked-prefill-size, for example to 202"),
        ({"min_tokens": 900}, "--kv-min-tokens 900"),
        ({"budget": 1000}, "--kv-budget 1000"),
        ({"block_size": 256, "budget": 0.5}, "--kv-block-size 256"),
        ({"sink_tokens": 900}, "--kv-sink-tokens 900"),
    ],
)
def test_a_small_pool_is_told_what_would_help(settings, words):
    config = NexusConfig("nexus", **settings)
    with pytest.raises(ConfigError, match="KV pool of 1000 tokens is too small") as caught:
        require_pool(1000, config, 512, overlap=True)
    assert words in str(caught.value)
    if "chunked" in words:
        require_pool(1000, config, 202, overlap=True)
    else:
        assert "--chunked-prefill-size" not in str(caught.value)
        with pytest.raises(ConfigError):
            require_pool(1000, config, 32, overlap=True)


@pytest.mark.parametrize(
    "flags, hooked",
    [
        ({}, False),
        ({"kv_policy": "none"}, False),
        ({"kv_policy": "nexus"}, True),
        ({"kv_policy": "nexus", "kv_pin_system": "false"}, False),
        ({"kv_policy": "nexus", "kv_pin_system": "false", "kv_pin_first_user": "true"}, True),
    ],
)
def test_chat_is_hooked_only_where_it_pins(monkeypatch, flags, hooked):
    calls = []
    monkeypatch.setattr(installer, "install_late", calls.append)
    monkeypatch.setattr(installer, "check_installed", lambda: [])
    from_cli_args(lambda cls, args: SimpleNamespace(), object, SimpleNamespace(**flags))
    publish(None)
    assert bool(calls) is hooked
