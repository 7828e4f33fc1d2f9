"""Every kernel compiles to machine code for A100, H100 and B200 class GPUs. Nothing of it is run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_LIMIT = 99 * 1024  # bytes a block may take on the smallest of sm_80 to sm_100 (sm_86, sm_89)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles(capability, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(Path(__file__).parent / "compile_for_gpu.py"), str(capability)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    built = json.loads(run.stdout)
    assert max(shared for shared, _ in built.values()) <= SHARED_LIMIT, built
    assert not any(narrow for _, narrow in built.values()), f"keys and values are to be read 16 bytes at a time: {built}"
