"""What ``make`` would run."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def recipe(*arguments: str) -> str:
    """The commands of a target, not executed; ``setup`` counts as done."""
    run = ["make", "-n", "-o", "setup", "--no-print-directory", *arguments]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_serve_launches_sglang_itself_and_first_says_what_to_ask():
    text = recipe("serve", "VENV=somewhere", "PORT=31234", "ARGS=--kv-seed 7")
    said, launched = text.split("exec ")
    assert "somewhere/bin/nexus-sglang model smollm2-135m" in said and '"$REQUEST"' in said
    flags = launched.replace("\\\n", " ").split()
    assert flags[:4] == ["somewhere/bin/python", "-m", "sglang.launch_server", "--model-path"]
    pairs = [" ".join(pair) for pair in zip(flags, flags[1:], strict=False)]
    assert {"--kv-policy nexus", "--port 31234", "--kv-seed 7"} <= set(pairs)
