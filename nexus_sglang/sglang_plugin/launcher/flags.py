"""``--kv-*`` flags for ``launch_server``, ``sglang serve`` and ``sgl.Engine``.

SGLang's ``ServerArgs`` cannot take fields from outside, so the validated config travels in one environment
variable (``carrier``).
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from types import FrameType
from typing import Any

from nexus_sglang.config import FLAGS, NexusConfig
from nexus_sglang.errors import ConfigError
from nexus_sglang.policy import make_policy
from nexus_sglang.policy.probe import probe
from nexus_sglang.sglang_plugin import carrier, installer

from . import chat_pins


def config_from(settings: dict[str, Any]) -> NexusConfig | None:
    """Validated config from ``kv_*`` keywords; None when no policy is asked for.

    Raises:
        ConfigError: a bad value, or a ``kv_*`` setting without ``kv_policy``.
    """
    given = [flag for flag in FLAGS if settings.get(flag.keyword) is not None]
    policy = settings.get("kv_policy")
    if policy is None or policy == "none":
        if given and policy is None:
            raise ConfigError(f"{', '.join(flag.option for flag in given)} without --kv-policy: add --kv-policy nexus")
        return None
    modes = {name: os.environ.get(f"NEXUS_SGLANG_{name.upper()}") == "1" for name in ("debug", "timing")}
    config = NexusConfig(**modes, **{flag.field: settings[flag.keyword] for flag in given})
    probe(make_policy(config.policy, config.policy_config))
    return config


def stamp(server_args: Any, config: NexusConfig | None) -> Any:
    """Publish the config and tie it to these arguments, so that a launch with other arguments does not inherit it.

    Raises:
        SelfCheckError: there is a policy, and a hook of this process is missing.
    """
    if config is not None:
        installer.refuse(installer.check_installed())
    carrier.publish(config)
    server_args._nexus_config = config
    return server_args


def add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    """AFTER ``ServerArgs.add_cli_args``."""
    group = parser.add_argument_group("KV-cache eviction (nexus-sglang)")
    for flag in FLAGS:
        group.add_argument(
            flag.option,
            dest=flag.keyword,
            default=None,  # whether the user said anything is asked later
            metavar=flag.metavar,
            help=f"{flag.help} (default {flag.default_text})",
        )


def from_cli_args(original, cls, args: argparse.Namespace):
    """AROUND ``ServerArgs.from_cli_args``."""
    try:
        config = config_from(vars(args))
    except ConfigError as err:
        raise SystemExit(f"error: {err}") from None
    if config is not None and (config.pin_system or config.pin_first_user):
        installer.install_late(chat_pins.HOOKS)  # this process will serve HTTP; an Engine takes no chat messages
    return stamp(original(cls, args), config)


def engine_args(engine, **kwargs):
    """In place of ``Engine.server_args_class``: takes our keywords out and publishes them.

    SGLang loads plugins inside ``Engine.__init__``, so wrapping that would miss the first engine of a process.
    """
    from sglang.srt.server_args import ServerArgs

    config = config_from({flag.keyword: kwargs.pop(flag.keyword) for flag in FLAGS if flag.keyword in kwargs})
    return stamp(ServerArgs(**kwargs), config)


class ReadyMadeArgs:
    """``Engine.server_args``, set by ``Engine.__init__`` once plugins are loaded: refuses ``kv_*`` keywords beside a
    ``server_args`` that the caller made, where SGLang reads no other keyword and the engine would serve without eviction.

    Plugins are loaded by ``Engine.__init__`` itself, so no wrapper around that can see the keywords of the first engine
    of a process. They are read in its frame, when it assigns this attribute (``hook_table.LAUNCH_REPLACES``).
    """

    def __get__(self, engine, owner=None):
        if engine is None:
            return self
        if "server_args" not in vars(engine):
            raise AttributeError("server_args")
        return vars(engine)["server_args"]

    def __set__(self, engine, value):
        given = _keywords_of_engine(sys._getframe(1))
        stray = [f"{name}={given[name]!r}" for name in (flag.keyword for flag in FLAGS) if given.get(name) is not None]
        if stray:
            raise ConfigError(
                f"sgl.Engine(server_args=..., {', '.join(stray)}): SGLang reads no other keyword beside server_args. "
                f"Give the server's arguments as keywords too: sgl.Engine(model_path=..., {', '.join(stray)})"
            )
        vars(engine)["server_args"] = value


def _keywords_of_engine(frame: FrameType) -> dict[str, Any]:
    """Keywords of a call of ``Engine.__init__`` that was given ``server_args``; none for any other function.

    Args:
        frame: of the function that assigns ``Engine.server_args``. ``Engine.attach_tokenizer_worker`` does so as well,
            and takes no settings.

    Raises:
        SelfCheckError: ``Engine.__init__`` does not take keywords as it did.
    """
    from sglang.srt.entrypoints.engine import Engine

    if frame.f_code is not inspect.unwrap(Engine.__init__).__code__:
        return {}
    call = inspect.getargvalues(frame)
    if call.keywords is None:
        installer.refuse(["sgl.Engine(...) takes no free keywords, among which nexus-sglang looks for its own"])
    given = call.locals[call.keywords]
    return given if "server_args" in given else {}


HOOKS = (
    installer.Hook("server_args.ServerArgs.add_cli_args", "after", add_cli_args),
    installer.Hook("server_args.ServerArgs.from_cli_args", "around", from_cli_args),
)
