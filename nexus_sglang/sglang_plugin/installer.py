"""Hook SGLang's functions, and refuse to serve unless everything that we change in SGLang still fits.

SGLang only logs a plugin or a hook that fails. Serving with half of the hooks would give wrong answers or fill the
cache without a word, so each process remembers what it installed and checks exactly that.

Three kinds of change are recorded in ``patches/``, with fingerprints of the functions they depend on:

- hooked: a function runs our code before, after or around its own
- replaced: an attribute of a class or of a built object is ours; recorded are the functions that read it
- overridden: a class of ours inherits from one of SGLang's and defines a method anew
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import logging
import pkgutil
import sys
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


class Replaced(NamedTuple):
    """One attribute that is replaced.

    Attributes:
        attribute: dotted name below ``sglang.srt``, or of FlashInfer; an attribute of objects stands under their class.
        read_by: functions that read it in the way that the replacement is written for.
        strict: whether a changed body of theirs is refused, because nothing else would notice; else it is a warning.
    """

    attribute: str
    read_by: tuple[str, ...]
    strict: bool = False


class Misfit(NamedTuple):
    """A function of SGLang that is not what it was when our code was written for it.

    Attributes:
        target: its full name.
        text: what is wrong, as a sentence that begins with the name.
        edited: only its body has changed, so our code may still fit.
    """

    target: str
    text: str
    edited: bool = False


_hooks: list[Hook] = []
_replaced: list[Replaced] = []
_overriding: list[str] = []
"""What this process has installed."""


def install(hooks: Iterable[Hook], replaced: Iterable[Replaced] = (), overriding: Iterable[str] = ()) -> None:
    """Register hooks with SGLang, which puts them in place when it has loaded all plugins.

    Args:
        hooks: what to register.
        replaced: attributes that the caller or these hooks replace.
        overriding: our classes that are used from now on and inherit from SGLang's, as dotted names in this package.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # SGLang is imported by SGLang's processes only

    _replaced.extend(replaced)
    _overriding.extend(overriding)
    for hook in hooks:
        _hooks.append(hook)  # first: a hook that cannot be registered has to be missed by the check
        HookRegistry.register(_full(hook.target), hook.function, HookType(hook.how))


def install_late(hooks: Iterable[Hook]) -> None:
    """Register hooks after SGLang has loaded its plugins, and put them in place at once."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    install(hooks)
    HookRegistry.apply_hooks()


def fingerprint(target: str) -> dict[str, Any]:
    """What a function looks like without hooks.

    Args:
        target: dotted name below ``sglang.srt``, or of FlashInfer.

    Returns:
        ``parameters``, their names in order, and ``body``, the start of its source's SHA-256.

    Raises:
        AttributeError, ImportError, OSError, TypeError: there is no such function, or it has no source.
    """
    found = pkgutil.resolve_name(_full(target))
    found = found.fget if isinstance(found, property) else found
    function = inspect.unwrap(getattr(found, "__func__", found))  # a classmethod binds its class once hooked
    body = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    return {"parameters": list(inspect.signature(function).parameters), "body": body}


def overridden_by(name: str) -> list[str]:
    """Targets of the methods that one of our classes defines anew.

    Args:
        name: dotted name of the class below this package.
    """
    cls = pkgutil.resolve_name(f"{__package__}.{name}")
    targets = []
    for method, value in vars(cls).items():
        base = next((base for base in cls.__mro__[1:-1] if method in vars(base)), None)
        if base is not None and (inspect.isfunction(value) or isinstance(value, property)):
            targets.append(f"{base.__module__}.{base.__qualname__}.{method}".removeprefix("sglang.srt."))
    return sorted(targets)


def recorded() -> dict[str, Any]:
    """Fingerprints of when our code was written (``patches/``).

    Returns:
        ``hooked``: by target. ``replaced``: by attribute, then by reader. ``overridden``: by our class, then by target.
    """
    name = f"sglang-{SGLANG_VERSION}.json"
    return json.loads(resources.files("nexus_sglang.patches").joinpath(name).read_text())


def record(hooks: Iterable[Hook], replaced: Iterable[Replaced], overriding: Iterable[str]) -> str:
    """The fingerprints as they are now, as JSON: what ``make patches`` writes after hooks were added or moved.

    Args:
        hooks: all of them.
        replaced: all attributes that are replaced.
        overriding: all our classes that inherit from SGLang's, as dotted names in this package.
    """
    seen = {
        "hooked": {hook.target: fingerprint(hook.target) for hook in sorted(hooks)},
        "replaced": {one.attribute: {name: fingerprint(name) for name in one.read_by} for one in sorted(replaced)},
        "overridden": {cls: {name: fingerprint(name) for name in overridden_by(cls)} for cls in sorted(overriding)},
    }
    return json.dumps(seen, indent=1) + "\n"


def check_version() -> list[str]:
    """Whether the installed SGLang is the one that the hooks were written for; problems in words."""
    installed = importlib.metadata.version("sglang")
    if installed == SGLANG_VERSION:
        return []
    return [f"sglang {installed} is installed, the hooks fit {SGLANG_VERSION} only"]


def misfits(hooks: Iterable[Hook], replaced: Iterable[Replaced] = (), overriding: Iterable[str] = ()) -> list[Misfit]:
    """Functions that have changed since our code was written for them, whether or not they are hooked now.

    Args:
        hooks: whose targets are looked at.
        replaced: whose readers are looked at.
        overriding: our classes, the methods under which are looked at.
    """
    known = recorded()
    found = []
    for hook in hooks:
        found += _compare(hook.target, known["hooked"].get(hook.target))
    for one in replaced:
        for name in one.read_by:
            found += _compare(name, known["replaced"].get(one.attribute, {}).get(name), one.strict)
    for cls in overriding:
        for name, was in known["overridden"].get(cls, {}).items():
            found += _compare(name, was)
    return list(dict.fromkeys(found))  # one function may read several attributes


def _compare(target: str, was: dict[str, Any] | None, strict: bool = False) -> list[Misfit]:
    """One function with its record.

    Args:
        target: see :func:`fingerprint`.
        was: its recorded fingerprint; None for none.
        strict: whether a changed body is more than an edit.
    """
    full = _full(target)
    if not full.startswith("sglang.") and full.split(".")[0] not in sys.modules:
        return []  # FlashInfer, which this process does not use
    try:
        now = fingerprint(target)
    except (AttributeError, ImportError, OSError, TypeError) as err:
        return [Misfit(full, f"{full} is gone ({err})")]
    if was is None:
        return [Misfit(full, f"{full} is not in the record: run `make patches`")]
    if now["parameters"] != was["parameters"]:
        text = f"{full} takes other parameters than in sglang {SGLANG_VERSION}: {now['parameters']}"
        return [Misfit(full, text)]
    if now["body"] != was["body"]:
        return [Misfit(full, f"{full} was edited since sglang {SGLANG_VERSION}, our code may not fit", not strict)]
    return []


def check_hooks(hooks: Iterable[Hook], replaced: Iterable[Replaced] = (), overriding: Iterable[str] = ()) -> list[str]:
    """Whether these are in place and fit. What was only edited is a warning in the log.

    Args:
        hooks: as for :func:`misfits`; they have to be in place as well.
        replaced: as for :func:`misfits`.
        overriding: as for :func:`misfits`.

    Returns:
        Problems in words; none when all is well.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    problems = check_version()
    misfitting = misfits(hooks, replaced, overriding)
    for misfit in misfitting:
        if misfit.edited:
            logger.warning(misfit.text)
        else:
            problems.append(misfit.text)
    in_place = HookRegistry._patched | {misfit.target for misfit in misfitting if not misfit.edited}
    return problems + [f"{target} is not hooked" for hook in hooks if (target := _full(hook.target)) not in in_place]


def check_installed() -> list[str]:
    """:func:`check_hooks` of everything that this process has installed."""
    return check_hooks(_hooks, _replaced, _overriding)


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
    return target if target.startswith("flashinfer.") else f"sglang.srt.{target}"
