"""Pages and help texts name only what exists, and every command of the README is run by a test.

Planted faults at the end show that each check finds what it is for.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import re
import sys
from pathlib import Path

import pytest

from nexus_sglang import cli
from nexus_sglang.config import FLAGS
from nexus_sglang.policy import make_policy
from nexus_sglang.policy.probe import probe
from nexus_sglang.sglang_plugin import ENVIRONMENT
from tests.support import documents as docs

PAGES = docs.pages()
HEADINGS = {page: docs.anchors(text) for page, text in PAGES.items()}
TARGETS = docs.make_targets((docs.ROOT / "Makefile").read_text())
HISTORY = ("CHANGELOG.md",)
"""Pages that name what is no longer there."""


KV_FLAGS = {flag.option for flag in FLAGS}


class _Parser(Exception):
    """Carries the command line's parser out of ``cli.main``."""


@pytest.fixture(scope="module")
def parser():
    def caught(self, args=None, namespace=None):
        raise _Parser(self)

    before = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = caught
    try:
        cli.main([])
    except _Parser as found:
        return found.args[0]
    finally:
        argparse.ArgumentParser.parse_args = before


@pytest.fixture(scope="module")
def parse(parser):
    """Why the command line does not understand these words, or None."""

    def why(words: list[str]) -> str | None:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                parser.parse_args([word for word in words if word != "..."])
            except SystemExit as end:
                return said.getvalue().splitlines()[-1] if end.code else None
        return None

    return why


@pytest.fixture(scope="module")
def helps(parser) -> dict[str, str]:
    """What ``--help`` prints, of the command and of each of its subcommands."""
    choices = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    subcommands = {name: sub.format_help() for name, sub in choices.items()}
    return {"": parser.format_help(), "--kv-*": "\n".join(flag.help for flag in FLAGS), **subcommands}


# -- what pages name exists ---------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_commands_can_be_typed(page, parse):
    text = PAGES[page]
    commands = docs.block_commands(text) + docs.inline_commands(text)
    faults = {command: docs.command_fault(command, TARGETS, parse) for command in commands}
    assert {command: why for command, why in faults.items() if why} == {}


@pytest.mark.parametrize("page", PAGES)
def test_files_modules_links_and_flags_exist(page):
    text = PAGES[page]
    faults = docs.link_faults(page, text, HEADINGS) + docs.flag_faults(page, text, KV_FLAGS)
    if page not in HISTORY:
        faults += docs.path_faults(page, text) + docs.dotted_faults(page, text)
    assert faults == []


@pytest.mark.parametrize("page", PAGES)
def test_nothing_refers_to_what_a_reader_does_not_have(page):
    assert docs.code_faults(page, PAGES[page]) == []


def test_help_texts_name_what_exists(helps, parse):
    named = {where: re.findall(r"`([^`]+)`", text) for where, text in helps.items()}
    commands = [(where, span) for where, spans in named.items() for span in spans if docs.COMMAND.match(span)]
    assert [(where, span, why) for where, span in commands if (why := docs.command_fault(span, TARGETS, parse))] == []


def test_every_page_is_reached_from_the_index():
    """From the README, link by link."""
    reached = set()
    todo = ["README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page not in PAGES:
            continue
        reached.add(page)
        for link, _ in docs.LINK.findall(PAGES[page]):
            name = link.partition("#")[0]
            if name and not re.match(r"[a-z]+:", name):
                todo.append(_below_root((docs.ROOT / page).parent / name))
    assert set(PAGES) - reached == set()


def _below_root(path: Path) -> str:
    path = path.resolve()
    return path.relative_to(docs.ROOT).as_posix() if path.is_relative_to(docs.ROOT) else ""


def test_every_environment_variable_is_explained():
    page = PAGES["docs/guide/environment.md"]
    explained = set(re.findall(r"`([A-Z_]+)", page))
    assert {variable.name for variable in ENVIRONMENT} - explained == set()


# -- the policy of CONTRIBUTING works ------------------------------------------------------------------


def test_the_policy_of_contributing_is_one(tmp_path, monkeypatch, capsys):
    source = re.search(r"```python\n(.*?)```", PAGES["CONTRIBUTING.md"], re.S).group(1)
    (tmp_path / "my_policy.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_policy", raising=False)
    probe(make_policy("my_policy:Peak", {"decay": 0.9}))
    assert cli.main(["policies", "my_policy:Peak"]) == 0
    assert "an example" in capsys.readouterr().out
    importlib.invalidate_caches()


# -- every command of the README and of the help is run by a test ---------------------------------------

CLI_TESTS = "tests/evaluation/test_cli.py"
RUN_BY = {
    "python -m build": "tests/packaging/test_wheel.py::test_the_wheel_serves",
    "python -m pip": "tests/packaging/test_wheel.py::test_the_wheel_serves",
    "make serve": "tests/server/test_make_serve.py::test_the_printed_request_is_answered_until_the_server_is_stopped",
    "make demo": "tests/server/test_readme_commands.py::test_make_demo",
    "make test": ".ci/run",
    "nexus-sglang doctor": "tests/plugin/test_doctor.py::test_a_healthy_installation",
    "nexus-sglang model": f"{CLI_TESTS}::test_second_call_reuses_the_folder_and_stdout_is_only_the_path",
    "nexus-sglang policies": "tests/core/test_policy_registry.py::test_cli_lists_fields_defaults_and_sources",
    "nexus-sglang eval": "tests/server/test_readme_commands.py::test_eval_drives_a_running_server",
    "sglang serve": "tests/server/test_readme_commands.py::test_sglang_serve_takes_the_same_flags",
    "python -m sglang.launch_server": "tests/server/test_serving.py::test_counters_show_that_it_runs",
}
"""Command, without its arguments: the test that runs it, or the script."""


def program(command: str) -> str:
    """A command without its arguments: what the table is about."""
    words = command.split()
    while "=" in words[0]:
        words.pop(0)
    if words[0] == "python":
        return " ".join(words[:3] if words[1] == "-m" else words[:2])
    return " ".join(words[:2])


def test_the_table_of_commands_is_complete(helps):
    readme = PAGES["README.md"]
    named = {program(command) for command in docs.block_commands(readme) + docs.inline_commands(readme)}
    named |= {f"nexus-sglang {name}" for name in helps if name.isalpha()}
    assert named == set(RUN_BY)


@pytest.mark.parametrize("command, place", RUN_BY.items())
def test_what_runs_a_command_exists(command, place):
    path, _, test = place.partition("::")
    source = (docs.ROOT / path).read_text()
    if test:
        assert test in {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    else:
        assert f"run {command.split()[1]}\n" in source


# -- planted faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, found",
    [
        ("```\nmake demos\n```", "the Makefile has no demos"),
        ("Say `make everything VENV=x`.", "the Makefile has no everything"),
        ("```bash\nnexus-sglang demo\n```", "invalid choice: 'demo'"),
        ("```\nnexus-sglang eval --budget-list 0.2\n```", "unrecognized arguments: --budget-list"),
        ("```\nX=1 python -m nexus_sglang.binding.entry\n```", "no such module"),
        ("    python benchmarks/nothing.py --out x", "no such file"),
    ],
)
def test_a_planted_command_is_found(text, found, parse):
    commands = docs.block_commands(text) + docs.inline_commands(text)
    faults = [docs.command_fault(command, TARGETS, parse) for command in commands]
    assert len(faults) == 1 and found in faults[0]


@pytest.mark.parametrize(
    "text, name, why",
    [
        ("See `nexus_sglang/memory/rows.py`.", "nexus_sglang/memory/rows.py", "no such file or folder"),
        ("See `tests/unit`.", "tests/unit", "no such file or folder"),
        ("Import `nexus_sglang.statistics.measure`.", "nexus_sglang.statistics.measure", "no such module"),
        ("[gone](docs/kernels.md)", "docs/kernels.md", "no such file"),
        ("[gone](#nothing-of-that-name)", "#nothing-of-that-name", "no such heading"),
        ("Set `--kv-density`.", "--kv-density", "no such flag"),
        ("As in S12.", "S12", "refers to nothing in the repository"),
    ],
)
def test_a_planted_reference_is_found(text, name, why):
    page = "README.md"
    faults = docs.path_faults(page, text) + docs.dotted_faults(page, text) + docs.code_faults(page, text)
    faults += docs.link_faults(page, text, HEADINGS) + docs.flag_faults(page, text, KV_FLAGS)
    assert faults == [docs.Fault(page, name, why)]
