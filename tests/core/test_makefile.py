"""What ``make`` would run, and that every file means the same versions."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from nexus_sglang import SGLANG_VERSION, __version__

ROOT = Path(__file__).resolve().parents[2]


def recipe(*arguments: str) -> str:
    """The commands of a target, not executed; ``setup`` counts as done."""
    run = ["make", "-n", "-o", "setup", "--no-print-directory", *arguments]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@needs_make
def test_serve_launches_sglang_itself_and_first_says_what_to_ask():
    text = recipe("serve", "VENV=somewhere", "PORT=31234", "ARGS=--kv-seed 7")
    said, launched = text.split("exec ")
    assert "somewhere/bin/nexus-sglang model smollm2-135m" in said and '"$REQUEST"' in said
    flags = launched.replace("\\\n", " ").split()
    assert flags[:4] == ["somewhere/bin/python", "-m", "sglang.launch_server", "--model-path"]
    pairs = [" ".join(pair) for pair in zip(flags, flags[1:], strict=False)]
    assert {"--kv-policy nexus", "--port 31234", "--kv-seed 7"} <= set(pairs)


@needs_make
def test_the_record_is_written_for_the_pinned_sglang():
    assert f"patches/sglang-{SGLANG_VERSION}.json" in recipe("patches")


def test_one_version_of_sglang_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f"sglang=={SGLANG_VERSION}" in project["project"]["dependencies"]
    assert f"sglang=={SGLANG_VERSION}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert [path.name for path in (ROOT / "patches").glob("*.json")] == [f"sglang-{SGLANG_VERSION}.json"]


def test_one_version_of_this_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "nexus_sglang.__version__"}
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text()
