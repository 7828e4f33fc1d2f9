"""Refuse to serve unless every hook is in place and every wrapped object is ours.

SGLang only logs a plugin or hook that fails; serving half-applied would mean wrong answers or a full cache
without a word.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import logging
import pkgutil
from importlib import resources
from typing import Any

from nexus_sglang import SGLANG_VERSION
from nexus_sglang.errors import SelfCheckError

logger = logging.getLogger(__name__)


def fingerprint(target: str) -> dict[str, Any]:
    """Parameters and body hash of the unhooked function behind a dotted target."""
    found = pkgutil.resolve_name(f"sglang.srt.{target}")
    function = inspect.unwrap(getattr(found, "__func__", found))  # a classmethod binds its class once hooked
    body = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    return {"parameters": list(inspect.signature(function).parameters), "body": body}


def recorded() -> dict[str, Any]:
    """What the hooked functions looked like when the hooks were written (``patches/``)."""
    name = f"sglang-{SGLANG_VERSION}.json"
    return json.loads(resources.files("nexus_sglang.patches").joinpath(name).read_text())


def record() -> str:
    """JSON of every hooked function as it is now; ``make patches`` writes it after hooks were added or moved."""
    from .scheduler import hooks

    seen = {hook.target: fingerprint(hook.target) for hook in (*hooks.SERVE, *hooks.LAUNCH, *hooks.CHAT)}
    return json.dumps(dict(sorted(seen.items())), indent=1) + "\n"


def check_hooks(hooks) -> list[str]:
    """Problems with these hooks, in words; empty when all fit."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    problems = []
    installed = importlib.metadata.version("sglang")
    if installed != SGLANG_VERSION:
        problems.append(f"sglang {installed} is installed, the hooks fit {SGLANG_VERSION} only")
    known = recorded()
    for hook in hooks:
        target = f"sglang.srt.{hook.target}"
        try:
            seen = fingerprint(hook.target)
        except (AttributeError, ImportError, OSError, TypeError) as err:
            problems.append(f"{target} is gone ({err})")
            continue
        if target not in HookRegistry._patched:
            problems.append(f"{target} is not hooked")
        if seen["parameters"] != known.get(hook.target, {}).get("parameters"):
            problems.append(f"{target} takes other parameters than in sglang {SGLANG_VERSION}: {seen['parameters']}")
        elif seen["body"] != known[hook.target]["body"]:
            logger.warning("%s was edited since sglang %s; the hook may not fit", target, SGLANG_VERSION)
    return problems


def _raise(problems: list[str]) -> None:
    if problems:
        listing = "\n  - ".join(problems)
        raise SelfCheckError(
            f"nexus-sglang refuses to serve:\n  - {listing}\n"
            f"Recipe: pip install 'sglang=={SGLANG_VERSION}', or start without --kv-policy."
        )


def check_launch() -> None:
    """In the launching process, which tells the user that the server is up.

    Raises:
        SelfCheckError: a launch hook is missing.
    """
    from .scheduler import hooks

    _raise(check_hooks(hooks.LAUNCH))


def check_chat() -> None:
    """In the process that serves chat requests, with ``--kv-pin-system`` or ``--kv-pin-first-user`` on.

    Raises:
        SelfCheckError: a chat hook is missing.
    """
    from .scheduler import hooks

    _raise(check_hooks(hooks.CHAT))


def check_runner(runner) -> None:
    """After the attention backends are built.

    Raises:
        SelfCheckError: listing every object that is not ours.
    """
    from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind

    from .attention import backends as attention_hooks
    from .scheduler import hooks
    from .scheduler.allocator import NexusAllocator

    problems = check_hooks(hooks.SERVE)
    allocator = runner.token_to_kv_pool_allocator
    if not isinstance(allocator, NexusAllocator):
        problems.append(f"the KV allocator is {type(allocator).__name__}, not NexusAllocator")
    elif runner.kv_index_translator._spaces[IdSpaceKind.FULL].write != allocator.translate_write_loc:
        problems.append("KV writes are not translated to physical slots")
    if runner.req_to_token_pool._aux_cache is not getattr(allocator, "runtime", None):
        problems.append("the request pool does not report to the nexus runtime")
    for backend in attention_hooks.backends(runner):
        if not attention_hooks.reads_compact_rows(backend, runner):
            problems.append(f"attention backend {type(backend).__name__} does not read compact rows")
    _raise(problems)


def check_scheduler(scheduler) -> None:
    """After the scheduler is built, before it serves.

    Raises:
        SelfCheckError: listing what is not ours.
    """
    from .scheduler.allocator import NexusAllocator
    from .scheduler.tree import NexusTreeCore

    problems = []
    if not isinstance(scheduler.token_to_kv_pool_allocator, NexusAllocator):
        problems.append("the scheduler's KV allocator is not NexusAllocator")
    tree = scheduler.tree_cache
    core = getattr(tree, "tree_core", None)
    if not tree.disable and not isinstance(core, NexusTreeCore):
        problems.append(f"the prefix cache is {type(tree).__name__} over {type(core).__name__}, not NexusTreeCore")
    if scheduler.max_total_num_tokens != scheduler.token_to_kv_pool_allocator.table.virtual_size:
        problems.append(f"the scheduler plans with {scheduler.max_total_num_tokens} tokens, not the virtual capacity")
    _raise(problems)
