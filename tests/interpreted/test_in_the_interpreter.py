"""Run every other file of this folder under Triton's interpreter, one process each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__)
FILES = sorted(path.name for path in HERE.parent.glob("test_*.py") if path != HERE)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter")
@pytest.mark.parametrize("name", FILES)
def test_under_the_interpreter(name):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("NEXUS_SGLANG_KERNELS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", str(HERE.parent / name)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
