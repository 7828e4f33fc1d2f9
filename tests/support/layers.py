"""What imports what, read from the syntax trees: nothing is executed, and sources come as text.

Every check takes ``{module name: source}`` and returns sentences, one for each fault, so that a test can plant one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "nexus_sglang"

FLOORS = (
    ("nexus_sglang", "patches"),
    ("errors", "prefixes"),
    ("config",),
    ("device",),
    ("kernels",),
    ("kv_slots", "policy"),
    ("evidence",),
    ("eviction",),
    ("sglang_plugin", "harness"),
    ("evaluation",),
    ("cli",),
)
"""The rooms, lowest first. A room imports from the floors below it, and from itself, but not from its neighbour."""

CORE = frozenset(room for floor in FLOORS for room in floor) - {"sglang_plugin", "cli"}
"""Rooms that know nothing of SGLang: they are understood, tested and used without it."""

ENGINES = frozenset({"sglang", "flashinfer", "sgl_kernel"})
POLICY_MAY = frozenset({"policy", "kernels", "errors", "config"})
OUTSIDE = frozenset({"tests", "benchmarks", "examples"})


class Import(NamedTuple):
    """One imported name.

    Attributes:
        module: the module that imports.
        target: what it imports, as far as it is a module.
        late: inside a function, so not when the module is loaded.
    """

    module: str
    target: str
    late: bool


def package_sources() -> dict[str, str]:
    """The package as it is installed: ``kernels/`` and ``patches/`` of the repository root are part of it."""
    mapped = {
        f"{PACKAGE}.{name}": text for folder in ("kernels", "patches") for name, text in sources_in(folder).items()
    }
    return sources_in(PACKAGE) | mapped


def sources_in(folder: str) -> dict[str, str]:
    """The modules of one folder of the repository."""
    found = {}
    for path in (ROOT / folder).rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path.read_text()
    return found


def room(module: str) -> str:
    """``nexus_sglang.eviction.evictor`` -> ``eviction``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imports(sources: dict[str, str]) -> list[Import]:
    """Every import of every module; ``from package import name`` means the module ``package.name`` if there is one."""
    found = []
    packages = {name.rpartition(".")[0] for name in sources} | {PACKAGE}
    for module, source in sources.items():
        for node, late in _import_statements(_parsed(source)):
            for target in _targets(node, module, module in packages, sources):
                found.append(Import(module, target, late))
    return found


def knows_engine(sources: dict[str, str]) -> list[str]:
    """Core rooms that import SGLang or FlashInfer, inside functions too."""
    return [
        f"{one.module} imports {one.target}"
        for one in imports(sources)
        if room(one.module) in CORE and one.target.split(".")[0] in ENGINES
    ]


def upwards(sources: dict[str, str]) -> list[str]:
    """Imports of a higher floor or of the neighbour on the same one, and core rooms that import the plugin."""
    floor_of = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    faults = [f"{module}: its room is on no floor" for module in sources if room(module) not in floor_of]
    for one in imports(sources):
        here = room(one.module)
        there = room(one.target)
        if one.target.split(".")[0] != PACKAGE or here == there or here not in floor_of:
            continue
        too_high = there not in floor_of or floor_of[there] >= floor_of[here]
        if too_high or (here in CORE and there == "sglang_plugin"):
            faults.append(f"{one.module} imports {one.target}")
    return faults


def circles(sources: dict[str, str], late: bool) -> list[str]:
    """Modules that need each other; with ``late``, imports inside functions count as well."""
    edges: dict[str, set[str]] = {module: set() for module in sources}
    for one in imports(sources):
        if one.target in sources and one.target != one.module and (late or not one.late):
            edges[one.module].add(one.target)
    reached = {module: _reachable(edges, module) for module in sources}
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in sources
        if module in reached[module]
    }
    return [" <-> ".join(group) for group in sorted(groups)]


def loads_engine(sources: dict[str, str], start: Iterable[str]) -> list[str]:
    """Which of these modules load SGLang or FlashInfer when they are imported, by whatever they import."""
    edges: dict[str, set[str]] = {}
    for one in imports(sources):
        if not one.late:
            edges.setdefault(one.module, set()).add(one.target)
    roots = {module: {name.split(".")[0] for name in _reachable(edges, module)} for module in start}
    return [module for module in start if roots[module] & ENGINES]


def policy_reaches(sources: dict[str, str]) -> list[str]:
    """A policy is understood from its own file: the rooms it may build on are few."""
    return [
        f"{one.module} imports {one.target}"
        for one in imports(sources)
        if room(one.module) == "policy" and one.target.startswith(PACKAGE) and room(one.target) not in POLICY_MAY
    ]


def leaves_package(sources: dict[str, str]) -> list[str]:
    """Imports of what is not installed with the package."""
    return [f"{one.module} imports {one.target}" for one in imports(sources) if one.target.split(".")[0] in OUTSIDE]


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _import_statements(tree: ast.Module) -> Iterable[tuple[ast.Import | ast.ImportFrom, bool]]:
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, late = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, late
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        waiting.extend((child, late) for child in ast.iter_child_nodes(node))


def _targets(node: ast.Import | ast.ImportFrom, module: str, is_package: bool, sources: dict[str, str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        above = module.split(".")
        above = above[: len(above) - node.level + is_package]
        base = ".".join([*above, base] if base else above)
    return [f"{base}.{alias.name}" if f"{base}.{alias.name}" in sources else base for alias in node.names]


def _reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = list(edges.get(start, ()))
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting.extend(edges.get(module, ()))
    return reached
