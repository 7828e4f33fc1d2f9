"""Entry point ``sglang.srt.plugins``: runs in every SGLang process, before arguments are parsed."""

from __future__ import annotations

from nexus_sglang import SGLANG_VERSION

from .launcher import flags


def register() -> None:
    """Install the launch hooks; in a process started with a policy, the serving hooks as well.

    SGLang only logs what goes wrong in here, so ``self_check`` verifies the outcome before serving.
    """
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.entrypoints.engine import Engine

    from .launcher import refusals as rejects
    from .scheduler import hooks

    _install(hooks.LAUNCH)
    Engine.server_args_class = flags.engine_args
    Engine.server_args = flags.ReadyMadeArgs()
    register_resolution_hook("handle_attention_backend_compatibility")(rejects.choose_backend)
    register_resolution_hook("handle_other_validations")(rejects.validate)
    if flags.current() is not None and _is_worker_process():
        install_serving_hooks()


def _is_worker_process() -> bool:
    """Scheduler processes are started by multiprocessing; the launching process is not."""
    import multiprocessing

    return multiprocessing.parent_process() is not None


def install_serving_hooks() -> None:
    """Hook everything that serving with a policy needs (see ``hooks.SERVE``)."""
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import get_tree_core_factory, register_tree_core_backend

    from .scheduler import hooks

    _install(hooks.SERVE)
    if get_tree_core_factory("nexus") is None:
        register_tree_core_backend("nexus", _tree_core)


def install_chat_hooks() -> None:
    """Hook the chat endpoints of this process (see ``hooks.CHAT``); called once a policy is known to be on.

    Raises:
        SelfCheckError: a hook is not in place.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    from . import self_check
    from .scheduler import hooks

    _install(hooks.CHAT)
    HookRegistry.apply_hooks()
    self_check.check_chat()


def _tree_core(params, components):
    from .scheduler.tree import NexusTreeCore

    return NexusTreeCore(params, components)


def _install(hooks) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(f"sglang.srt.{hook.target}", hook.function, HookType(hook.how))


__all__ = ["SGLANG_VERSION", "install_serving_hooks", "register"]
