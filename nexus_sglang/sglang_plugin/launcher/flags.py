"""``--kv-*`` flags for ``launch_server``, ``sglang serve`` and ``sgl.Engine``: checked, then handed to ``carrier``."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from nexus_sglang.config import FLAGS, NexusConfig
from nexus_sglang.errors import ConfigError
from nexus_sglang.policy import make_policy
from nexus_sglang.policy.probe import probe
from nexus_sglang.sglang_plugin import carrier, installer

from . import chat_pins

MODES = {"debug": "NEXUS_SGLANG_DEBUG", "timing": "NEXUS_SGLANG_TIMING"}
"""Fields of the config that are set by environment variables: for tests and benchmarks, not for users."""


def config_from(settings: dict[str, Any]) -> NexusConfig | None:
    """The config that a user asks for.

    Args:
        settings: values by keyword (``kv_budget``), as text or as Python objects. Other keywords are ignored.

    Returns:
        None when no policy is asked for.

    Raises:
        ConfigError: a bad value, or a ``kv_*`` setting without ``kv_policy``.
    """
    given = [flag for flag in FLAGS if settings.get(flag.keyword) is not None]
    policy = settings.get("kv_policy")
    if policy is None or policy == "none":
        if given and policy is None:
            raise ConfigError(f"{', '.join(flag.option for flag in given)} without --kv-policy: add --kv-policy nexus")
        return None
    modes = {mode: os.environ.get(variable) == "1" for mode, variable in MODES.items()}
    config = NexusConfig(**modes, **{flag.field: settings[flag.keyword] for flag in given})
    probe(make_policy(config.policy, config.policy_config))
    return config


def stamp(server_args: Any, config: NexusConfig | None) -> Any:
    """Publish the config and tie it to these arguments, so that a launch with other arguments does not inherit it.

    Args:
        server_args: SGLang's ``ServerArgs``.
        config: None for no policy.

    Returns:
        ``server_args``.

    Raises:
        SelfCheckError: there is a policy, and a hook of this process is missing.
    """
    if config is not None:
        installer.refuse(installer.check_installed())
    carrier.publish(config)
    server_args._nexus_config = config
    return server_args


def add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    """AFTER ``ServerArgs.add_cli_args``: add ours.

    Args:
        result: None.
        parser: of SGLang's command line.
    """
    group = parser.add_argument_group("KV-cache eviction (nexus-sglang)")
    for flag in FLAGS:
        group.add_argument(
            flag.option,
            dest=flag.keyword,
            default=None,  # whether the user said anything is asked later
            metavar=flag.metavar,
            help=f"{flag.help} (default {flag.default_text})",
        )


def from_cli_args(original: Callable, cls: type, args: argparse.Namespace) -> Any:
    """AROUND ``ServerArgs.from_cli_args``: read ours, and hook the chat endpoints where chats are pinned.

    Args:
        original: makes SGLang's arguments.
        cls: ``ServerArgs``.
        args: what the command line said.

    Raises:
        SystemExit: a setting is not usable.
    """
    try:
        config = config_from(vars(args))
    except ConfigError as err:
        raise SystemExit(f"error: {err}") from None
    if config is not None and (config.pin_system or config.pin_first_user):
        installer.install_late(chat_pins.HOOKS)  # this process will serve HTTP; an Engine takes no chat messages
    return stamp(original(cls, args), config)


def engine_args(engine: Any, **kwargs: Any) -> Any:
    """In place of ``Engine.server_args_class``, which makes ``ServerArgs`` of an engine's keywords: takes ours out.

    SGLang loads plugins inside ``Engine.__init__``, so wrapping that would miss the first engine of a process.

    Raises:
        ConfigError: a setting is not usable.
    """
    from sglang.srt.server_args import ServerArgs

    config = config_from({flag.keyword: kwargs.pop(flag.keyword) for flag in FLAGS if flag.keyword in kwargs})
    return stamp(ServerArgs(**kwargs), config)


class ReadyMadeArgs:
    """In place of ``Engine.server_args``: refuses ``kv_*`` keywords beside a ``server_args`` that the caller made.

    SGLang reads no other keyword then, and the engine would serve without eviction. Plugins are loaded by
    ``Engine.__init__`` itself, so no wrapper around that can see the keywords of the first engine of a process. They
    are read in its frame, when it assigns this attribute (``hook_table.LAUNCH_REPLACES``).
    """

    def __get__(self, engine: Any, owner: type | None = None) -> Any:
        if engine is None:
            return self
        if "server_args" not in vars(engine):
            raise AttributeError("server_args")
        return vars(engine)["server_args"]

    def __set__(self, engine: Any, value: Any) -> None:
        given = _keywords_of_engine(sys._getframe(1))
        names = [flag.keyword for flag in FLAGS if given.get(flag.keyword) is not None]
        if names:
            stray = ", ".join(f"{name}={given[name]!r}" for name in names)
            raise ConfigError(
                f"sgl.Engine(server_args=..., {stray}): SGLang reads no other keyword beside server_args. "
                f"Give the server's arguments as keywords too: sgl.Engine(model_path=..., {stray})"
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
