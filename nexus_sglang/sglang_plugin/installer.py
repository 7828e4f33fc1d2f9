"""Hook SGLang's functions, and refuse to serve unless every hook fits.

SGLang only logs a plugin or a hook that fails. Serving with half of the hooks would give wrong answers or fill the
cache without a word, so each process remembers what it installed and checks exactly that.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import logging
import pkgutil
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any, NamedTuple

from nexus_sglang import SGLANG_VERSION
from nexus_sglang.errors import SelfCheckError

logger = logging.getLogger(__name__)


class Hook(NamedTuple):
    """One hooked function of SGLang.

    Attributes:
        target: dotted name below ``sglang.srt``.
        how: ``before``, ``after`` or ``around``, as in SGLang's hook registry.
        function: ours. It gets the call's arguments; ``after`` gets the result first, ``around`` the original first.
    """

    target: str
    how: str
    function: Callable


_installed: list[Hook] = []
"""What this process has hooked."""


def install(hooks: Iterable[Hook]) -> None:
    """Register hooks with SGLang, which puts them in place when it has loaded all plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # SGLang is imported by SGLang's processes only

    for hook in hooks:
        _installed.append(hook)  # first: a hook that cannot be registered has to be missed by the check
        HookRegistry.register(_full(hook.target), hook.function, HookType(hook.how))


def install_late(hooks: Iterable[Hook]) -> None:
    """Register hooks after SGLang has loaded its plugins, and put them in place at once."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    install(hooks)
    HookRegistry.apply_hooks()


def fingerprint(target: str) -> dict[str, Any]:
    """What a function of SGLang looks like without hooks.

    Args:
        target: dotted name below ``sglang.srt``.

    Returns:
        ``parameters``, their names in order, and ``body``, the start of its source's SHA-256.

    Raises:
        AttributeError, ImportError, OSError, TypeError: there is no such function, or it has no source.
    """
    found = pkgutil.resolve_name(_full(target))
    function = inspect.unwrap(getattr(found, "__func__", found))  # a classmethod binds its class once hooked
    body = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    return {"parameters": list(inspect.signature(function).parameters), "body": body}


def recorded() -> dict[str, Any]:
    """Fingerprints of the hooked functions when the hooks were written (``patches/``), by target."""
    name = f"sglang-{SGLANG_VERSION}.json"
    return json.loads(resources.files("nexus_sglang.patches").joinpath(name).read_text())


def record(hooks: Iterable[Hook]) -> str:
    """JSON of the fingerprints as they are now; ``make patches`` writes it after hooks were added or moved."""
    seen = {hook.target: fingerprint(hook.target) for hook in hooks}
    return json.dumps(dict(sorted(seen.items())), indent=1) + "\n"


def check_version() -> list[str]:
    """Whether the installed SGLang is the one that the hooks were written for; problems in words."""
    installed = importlib.metadata.version("sglang")
    if installed == SGLANG_VERSION:
        return []
    return [f"sglang {installed} is installed, the hooks fit {SGLANG_VERSION} only"]


def check_hooks(hooks: Iterable[Hook]) -> list[str]:
    """Whether these hooks are in place and fit the functions under them; problems in words.

    A function whose body alone has changed is a warning in the log.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    problems = check_version()
    known = recorded()
    for hook in hooks:
        target = _full(hook.target)
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


def check_installed() -> list[str]:
    """:func:`check_hooks` of everything this process has installed."""
    return check_hooks(_installed)


def refuse(problems: list[str]) -> None:
    """Do not serve with these problems.

    Raises:
        SelfCheckError: listing them, if there are any.
    """
    if problems:
        listing = "\n  - ".join(problems)
        raise SelfCheckError(
            f"nexus-sglang refuses to serve:\n  - {listing}\n"
            f"Recipe: pip install 'sglang=={SGLANG_VERSION}', or start without --kv-policy."
        )


def _full(target: str) -> str:
    return f"sglang.srt.{target}"
