"""The README's own commands and program, as they stand there, against real servers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.server
ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path = ROOT) -> str:
    """What it printed; it must end with 0."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_request_of_the_readme_prints_such_a_report(ours, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```\s*```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    ((program, shown),) = blocks
    assert "http://127.0.0.1:30000" in program
    path = tmp_path / "request.py"
    path.write_text(program.replace("http://127.0.0.1:30000", ours.url))
    (printed,) = eval(run(sys.executable, str(path)))
    (shown,) = eval(shown)
    assert printed.keys() == shown.keys()
    same = ("budget", "peak_resident", "pinned")
    assert {key: printed[key] for key in same} == {key: shown[key] for key in same}
    assert printed["resident"] <= printed["budget"] + 32 and printed["evicted"] > 1000


def test_sglang_serve_takes_the_same_flags(model_path):
    """Up to the check of the pool, which comes after the model was loaded in the scheduler's process."""
    serve = "import sys; from sglang.cli.main import main; sys.argv[0] = 'sglang'; sys.exit(main())"
    small = ("--kv-policy", "nexus", "--max-total-tokens", "700", "--chunked-prefill-size", "512")
    command = [sys.executable, "-c", serve, "serve", "--model-path", model_path, *small]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode != 0 and "KV pool of 700 tokens is too small" in ended.stdout + ended.stderr


@pytest.mark.slow
def test_eval_drives_a_running_server(small_pool, tmp_path):
    words = ("--url", small_pool.url, "--budgets", "0.2,0.5", "--lengths", "1024:1", "--tasks", "single-number")
    data = ("--data", str(ROOT / "examples" / "eval_data.jsonl"), "--out", "my-results")
    run(sys.executable, "-m", "nexus_sglang.cli", "eval", *words, *data, cwd=tmp_path)
    report = (tmp_path / "my-results" / "report.md").read_text()
    assert "nexus 0.2" in report and "nexus 0.5" in report


@pytest.mark.slow
def test_eval_quick(tmp_path):
    out = run(sys.executable, "-m", "nexus_sglang.cli", "eval", "--quick", cwd=tmp_path)
    assert "nexus" in out and (tmp_path / "eval-results" / "report.md").is_file()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_demo():
    """``-o setup``: the environment is the one that runs the tests."""
    out = run("make", "-o", "setup", "demo", f"VENV={sys.prefix}")
    assert out.count("\nOK  ") == 2 and "CHECK FAILED" not in out
