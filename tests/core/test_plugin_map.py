"""The tables at the top of the plugin say what its code does. Read from the syntax tree: SGLang is not imported."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from nexus_sglang.sglang_plugin import ATTACHED, CHANGED, ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "nexus_sglang" / "sglang_plugin"
LOOKS = ("getattr", "hasattr", "setattr", "delattr")
OURS = {"self", "cls", "runtime", "counters", "seq", "out", "tree_core", "sequences[row]"}
"""Objects of this package whose attributes are set by others: how the code spells the last part of them."""
VARIABLE = re.compile(r"\b(?:NEXUS_SGLANG|SGLANG|TRITON)_[A-Z_]+\b(?!\.)")


@cache
def trees() -> dict[str, ast.Module]:
    """Syntax tree of each module of the plugin, by its name below the plugin."""
    paths = [path for path in sorted(PLUGIN.rglob("*.py")) if path.name != "__init__.py"]
    return {".".join(path.relative_to(PLUGIN).with_suffix("").parts): ast.parse(path.read_text()) for path in paths}


def uses(tree: ast.Module) -> list[tuple[str, str, bool]]:
    """Owner as spelled, attribute, and whether it is set, of everything with a dot, or looked up by name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.append((ast.unparse(node.value), node.attr, not isinstance(node.ctx, ast.Load)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LOOKS:
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant):
                found.append((ast.unparse(owner), name.value, node.func.id in LOOKS[2:]))
    return found


def modules(attribute: str, written: bool) -> set[str]:
    """Modules in which the attribute of any object is set, or read."""
    return {
        module
        for module, tree in trees().items()
        for _, name, store in uses(tree)
        if name == attribute and store == written
    }


@pytest.mark.parametrize("row", ATTACHED, ids=lambda row: row.attribute)
def test_who_writes_and_who_reads(row):
    if "nexus" in row.attribute:  # a name of its own
        assert modules(row.attribute, True) == set(row.written_by)
        assert modules(row.attribute, False) == set(row.read_by)
    else:
        assert set(row.written_by) <= modules(row.attribute, True)
        assert set(row.read_by) <= modules(row.attribute, False)


def replaced() -> set[str]:
    """Last parts of the names in ``hook_table``'s replaced attributes."""
    calls = [node for node in ast.walk(trees()["hook_table"]) if isinstance(node, ast.Call)]
    named = [call.args[0] for call in calls if getattr(call.func, "id", "") == "Replaced"]
    return {"forward", "forward_return_lse"} | {re.split(r"[.'\"]", ast.unparse(name))[-2] for name in named}


def unlisted(sources: dict[str, ast.Module]) -> list[str]:
    """Attributes that are set on objects of SGLang and stand in no table."""
    listed = {row.attribute for row in ATTACHED} | {row.field for row in CHANGED} | replaced()
    return [
        f"{module}: {owner}.{name}"
        for module, tree in sources.items()
        for owner, name, store in uses(tree)
        if store and name not in listed and owner not in OURS and owner.split(".")[-1] not in OURS
    ]


def test_nothing_else_is_set_on_objects_of_sglang():
    assert unlisted(trees()) == []


def test_a_planted_attribute_is_found():
    planted = ast.parse("def hook(result, req):\n    req.favourite = 1\n    setattr(req.pool, 'mine', 2)")
    assert unlisted({"scheduler.passes": planted}) == [
        "scheduler.passes: req.favourite",
        "scheduler.passes: req.pool.mine",
    ]


@pytest.mark.parametrize("row", CHANGED, ids=lambda row: row.field)
def test_changed_fields_are_changed_where_it_says(row):
    assert modules(row.field, True) == {row.written_by}


def test_every_environment_variable_is_listed():
    named = set()
    for path in [*(ROOT / "nexus_sglang").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        if path != PLUGIN / "__init__.py":
            constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            named |= {name for text in constants if isinstance(text, str) for name in VARIABLE.findall(text)}
    assert named == {row.name for row in ENVIRONMENT}


@pytest.mark.parametrize("row", [row for row in ENVIRONMENT if row.set_by != "user"], ids=lambda row: row.name)
def test_variables_are_set_where_it_says(row):
    tree = trees()[row.set_by]
    assert row.name in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert "os.environ" in ast.unparse(tree)


def test_the_guide_names_every_variable():
    guide = (ROOT / "docs" / "guide" / "environment.md").read_text()
    assert [row.name for row in ENVIRONMENT if row.name not in guide] == []


def test_the_map_names_every_module():
    text = (PLUGIN / "__init__.py").read_text()
    rooms = ("launcher", "scheduler")
    parts = [module for module in trees() if module.split(".")[0] in rooms or "." not in module]
    missing = [module for module in parts if f"``{module}" not in text and module != "doctor"]
    assert missing == []
