"""benchmarks/README.md lists every benchmark, and each of its commands exists."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from benchmarks import ROOT

FOLDER = ROOT / "benchmarks"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"python -m (benchmarks[\w.]+)", README)))
FOREIGN = {"benchmarks.kvpress.reference"}
"""Cannot be imported here: needs kvpress."""


def path_of(module: str):
    return ROOT / (module.replace(".", "/") + ".py")


def programs() -> list[str]:
    """Modules that can be run."""
    files = [path for path in FOLDER.rglob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)


def test_the_readme_lists_every_program():
    assert COMMANDS == programs()


@pytest.mark.parametrize("module", COMMANDS)
def test_a_program_has_a_main_and_says_how_it_is_run(module):
    tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
    assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert f"python -m {module}" in ast.get_docstring(tree)


@pytest.mark.parametrize("module", sorted(set(COMMANDS) - FOREIGN))
def test_help_of_a_program(module, capsys):
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(module).main(["--help"])
    assert stopped.value.code == 0 and "usage:" in capsys.readouterr().out


def test_commands_on_pages_and_in_documents_exist():
    """Of every ``python -m benchmarks...`` anywhere in the documentation."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "kernels" / "README.md", FOLDER / "README.md"]
    for page in pages:
        for module in re.findall(r"python -m (benchmarks[\w.]+\w)", page.read_text(encoding="utf-8")):
            assert path_of(module).exists(), f"{page.name}: {module}"
