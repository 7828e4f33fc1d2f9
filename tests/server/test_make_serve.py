"""``make serve`` serves until it is stopped, and the request it prints is answered."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from tests.support.server import free_port

pytestmark = [pytest.mark.server, pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")]

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 400


@pytest.fixture
def served(model_path, tmp_path):
    """A running ``make serve``: its URL, and what it has printed."""
    port = free_port()
    log = tmp_path / "log"
    command = ["make", "-o", "setup", "serve", f"VENV={sys.prefix}", f"PORT={port}", "ARGS=--skip-server-warmup"]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + START_SECONDS
        while not answers(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(1)
        yield log.read_text(), process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        return requests.get(url + "/health", timeout=2).ok
    except requests.RequestException:
        return False


def test_the_printed_request_is_answered_until_the_server_is_stopped(served):
    log, process = served
    begin = log.index("curl -s ")
    request = log[begin : log.index("}'\n", begin) + 2]
    assert "custom_params" in request and log[:begin].count("\n") == 3, "it comes before the server's log"
    run = subprocess.run(["bash", "-c", request], capture_output=True, text=True, timeout=120, check=True)
    (report,) = json.loads(run.stdout)["choices"][0]["meta_info"]["nexus"]
    assert report["evicted"] > 0 and report["trace"]
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
