"""Entry point ``sglang.srt.plugins``: SGLang calls :func:`register` in every process, before arguments are parsed."""

from __future__ import annotations

import multiprocessing
from typing import Any

from . import carrier, hook_table, installer
from .launcher import flags, refusals


def register() -> None:
    """Install the launch hooks; in a scheduler process started with a policy, the serving hooks as well.

    SGLang only logs what goes wrong in here, so ``installer`` checks the outcome before serving.
    """
    # Late: this module is loaded before SGLang has set up what these import.
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.entrypoints.engine import Engine

    installer.install(hook_table.LAUNCH, hook_table.LAUNCH_REPLACES)
    Engine.server_args_class = flags.engine_args
    Engine.server_args = flags.ReadyMadeArgs()
    register_resolution_hook("handle_attention_backend_compatibility")(refusals.choose_backend)
    register_resolution_hook("handle_other_validations")(refusals.validate)
    if carrier.current() is not None and _is_worker_process():
        install_serving_hooks()


def _is_worker_process() -> bool:
    """Scheduler processes are started by multiprocessing; the launching process is not."""
    return multiprocessing.parent_process() is not None


def install_serving_hooks() -> None:
    """Hook everything that serving with a policy needs, and register our core of the radix tree."""
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import get_tree_core_factory, register_tree_core_backend

    installer.install(hook_table.SERVE, hook_table.SERVE_REPLACES, hook_table.OVERRIDING)
    if get_tree_core_factory("nexus") is None:
        register_tree_core_backend("nexus", _tree_core)


def _tree_core(params: Any, components: Any) -> Any:
    from .scheduler.tree import NexusTreeCore  # needs SGLang's tree, which is imported when a server builds one

    return NexusTreeCore(params, components)
