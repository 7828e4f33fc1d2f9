"""Run every file of ``interpreted/`` under Triton's interpreter, one process each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_under_the_interpreter(name):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("NEXUS_SGLANG_KERNELS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", str(FOLDER / name)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
