"""What the project's pages and help texts name: commands, files, modules, links.

Every check takes text and returns sentences, one for each fault.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

MAPPED = {"nexus_sglang.kernels": "kernels", "nexus_sglang.patches": "patches"}
"""Packages that stand elsewhere in the tree (``pyproject.toml``)."""
OUTSIDE = ("sglang", "pip", "pytest", "build", "venv", "my_policy", "my_module")
"""First names of modules that are not ours, and of a reader's own."""
ENGINE_FLAGS = ("--kv-cache-dtype", "--kv-canary", "--kv-events-config")
"""SGLang's own flags that begin like ours."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")
FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]*")
DOTTED = re.compile(r"nexus_sglang(?:\.\w+)+")
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ +)*(make|nexus-sglang|python|sglang)(?= |$)")
CODES = re.compile(r"\b(?:S\d{1,2}|F\d|issues? #?\d+)\b|/tmp/|/work/|/root/")
"""What refers to nothing a reader has: scenario codes, numbers of issues, paths of one machine."""


class Fault(NamedTuple):
    """Something a page says that is not so.

    Attributes:
        page: where it says so.
        text: what it names.
        why: what is wrong with it.
    """

    page: str
    text: str
    why: str


def pages(root: Path = ROOT) -> dict[str, str]:
    """Every Markdown page of the project: path below the root, text."""
    found = {path.relative_to(root): path for path in sorted(root.rglob("*.md"))}
    return {
        name.as_posix(): path.read_text(encoding="utf-8")
        for name, path in found.items()
        if not any(part.startswith(".") for part in name.parts)
    }


# -- commands -------------------------------------------------------------------------------------------


def block_commands(text: str) -> list[str]:
    """Commands in a page's code blocks, comments and continuation lines taken out."""
    found = []
    for language, body in FENCE.findall(text):
        if language in ("", "bash", "sh", "console"):
            lines = body.replace("\\\n", " ").splitlines()
            found += [command for line in lines for command in _split(line)]
    return found


def inline_commands(text: str) -> list[str]:
    """Commands between backticks outside of code blocks, and indented ones of result pages."""
    outside = re.sub(r"\\\n\s*", " ", FENCE.sub("", text))
    spans = INLINE.findall(outside)
    spans += [line.strip() for line in outside.splitlines() if line.startswith("    ")]
    return [command for span in spans for command in _split(span) if " " in command]


def _split(line: str) -> Iterator[str]:
    for part in re.split(r"\s+#\s|&&", line.strip().removeprefix("$ ")):
        if COMMAND.match(part.strip()):
            yield " ".join(part.split())


def make_targets(makefile: str) -> set[str]:
    """Targets that a Makefile declares phony, which are those to be typed."""
    return {target for line in re.findall(r"^\.PHONY:(.*)$", makefile, re.M) for target in line.split()}


def command_fault(command: str, targets: set[str], parse: Callable[[list[str]], str | None]) -> str | None:
    """Why a command cannot be typed as it stands; None if it can.

    Args:
        command: one line.
        targets: what ``make`` can make.
        parse: says why ``nexus-sglang`` would not understand these words, or None.
    """
    try:
        words = shlex.split(command)
    except ValueError as err:
        return str(err)
    while "=" in words[0]:
        words.pop(0)
    program, *rest = words
    if program == "make":
        wrong = [word for word in rest if "=" not in word and not word.startswith("-") and word not in targets]
        return f"the Makefile has no {', '.join(wrong)}" if wrong else None
    if program == "nexus-sglang":
        return parse(rest)
    if program == "python" and rest[:1] == ["-m"]:
        return module_fault(rest[1]) if len(rest) > 1 else None
    if program == "python" and rest and rest[0].endswith(".py"):
        return None if (ROOT / rest[0]).is_file() else "no such file"
    return None


def module_fault(name: str) -> str | None:
    """Why a module of this project cannot be imported, read from the files alone; an attribute at its end is fine."""
    if name.split(".")[0] in OUTSIDE:
        return None
    for place in (name, name.rpartition(".")[0]):
        if _stands(place) or (place != name and _has(place, name.rpartition(".")[2])):
            return None
    return "no such module"


def _path(module: str) -> Path:
    for package, folder in MAPPED.items():
        if module == package or module.startswith(package + "."):
            module = folder + module[len(package) :]
    return ROOT / module.replace(".", "/")


def _stands(module: str) -> bool:
    path = _path(module)
    return bool(module) and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


def _has(module: str, attribute: str) -> bool:
    path = _path(module)
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return any(re.search(rf"\b{attribute}\b", file.read_text(encoding="utf-8")) for file in files)


# -- what a page points at ----------------------------------------------------------------------------


def path_faults(page: str, text: str) -> list[Fault]:
    """Files and folders in backticks that are not there: below the root, beside the page, or in the package.

    A folder that ends in a slash, and a name with a folder before it, are paths; a bare file name may be the reader's.
    """
    faults = []
    places = (ROOT, (ROOT / page).parent, ROOT / "nexus_sglang")
    for span in INLINE.findall(FENCE.sub("", text)):
        if not FILE.fullmatch(span) or span.startswith(("http", "/")):
            continue
        known = any((place / span.split("/")[0]).exists() for place in places)
        looks_like_one = known or re.search(r"\.(py|md|json|jsonl|toml|txt|png)$", span)
        if looks_like_one and not any((place / span).exists() for place in places):
            faults.append(Fault(page, span, "no such file or folder"))
    return faults


def dotted_faults(page: str, text: str) -> list[Fault]:
    """Modules named with dots that are not there."""
    return [Fault(page, name, fault) for name in sorted(set(DOTTED.findall(text))) if (fault := module_fault(name))]


def link_faults(page: str, text: str, headings: dict[str, set[str]]) -> list[Fault]:
    """Relative links to files or headings that are not there.

    Args:
        page: path below the root.
        text: its Markdown.
        headings: of each page, the anchors its headings have.
    """
    faults = []
    for link, image in LINK.findall(FENCE.sub("", text)):
        target = link or image
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent.joinpath(name).resolve() if name else (ROOT / page).resolve()
        if not path.exists():
            faults.append(Fault(page, target, "no such file"))
        elif anchor and anchor not in headings.get(path.relative_to(ROOT).as_posix(), set()):
            faults.append(Fault(page, target, "no such heading"))
    return faults


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def code_faults(page: str, text: str) -> list[Fault]:
    """References that a reader cannot follow (see ``CODES``)."""
    return [Fault(page, found.group(), "refers to nothing in the repository") for found in CODES.finditer(text)]


def flag_faults(page: str, text: str, flags: set[str]) -> list[Fault]:
    """``--kv-*`` flags that do not exist."""
    named = set(re.findall(r"--kv-[a-z-]+[a-z]", text)) - set(ENGINE_FLAGS)
    return [Fault(page, flag, "no such flag") for flag in sorted(named - flags)]
