"""Every kernel compiles to machine code for A100, H100 and B200 class GPUs. Nothing of it is run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_LIMIT = 99 * 1024  # bytes a block may take on the smallest of sm_80 to sm_100 (sm_86, sm_89)
STACK_LIMIT = 64  # bytes a thread may spill
ONCE = ("_lse_kernel", "_join_kernel", "_unmap_kernel", "_translate_kernel", "_ranks_kernel", "_draw_kernel")
"""Kernels of an event that one compilation must serve, however long the window and whatever is freed."""


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles(capability, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "compile_for_gpu.py"), str(capability)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    built = json.loads(run.stdout)
    assert max(one["shared"] for one in built.values()) <= SHARED_LIMIT, built
    assert max(one["stack"] for one in built.values()) <= STACK_LIMIT, built
    assert not any(one["narrow"] for one in built.values()), (
        f"keys and values are to be read 16 bytes at a time: {built}"
    )
    assert all(len(built[name]["variants"]) == 1 for name in ONCE), built
    assert len(built["_walk_kernel"]["variants"]) == 2, "one for windows up to 16, one for 128"
    assert len(built["_rows_kernel"]["variants"]) <= 2, "one per reduction"
    assert len(built["_keep_kernel"]["variants"]) == 2, "one for decode, one for prefill"
