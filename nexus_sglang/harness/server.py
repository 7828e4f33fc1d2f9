"""A real SGLang server as a child process: for the demo, the benchmarks and the tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import requests

from .client import post_generate

START_SECONDS = 600
"""How long a server may take to start: a minute on an idle CPU machine, several on a busy one."""


def free_port() -> int:
    """A TCP port of this machine that nobody listens on at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(model: str, port: int, *flags: str) -> list[str]:
    """The command line of a server on this machine that reports cached tokens and rests when idle.

    Args:
        model: folder or name.
        port: to listen on.
        flags: more flags of ``sglang.launch_server``.
    """
    launch = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1"]
    return [*launch, "--port", str(port), "--skip-server-warmup", "--enable-cache-report", "--sleep-on-idle", *flags]


class ServerError(RuntimeError):
    """The server did not start (the message ends with its log), or does other work."""


def flush_cache(url: str, attempts: int = 60) -> None:
    """Empty the prefix cache of a server; waits until it agrees that it is idle.

    Args:
        url: of the server.
        attempts: how often to ask, half a second apart.

    Raises:
        ServerError: it never was.
    """
    for _ in range(attempts):
        answer = requests.post(url + "/flush_cache", timeout=60)
        if answer.ok:
            return
        time.sleep(0.5)
    said = f"{answer.status_code}, {answer.text[:100]}"
    raise ServerError(f"the cache of {url} cannot be emptied ({said}): leave the server to this run alone")


class Server:
    """One server in a process group of its own; as a context it is ready inside and gone after.

    Args:
        model: folder or name.
        flags: more flags of ``sglang.launch_server``.
        env: environment variables beside this process's own.
        port: 0 takes a free one.
    """

    def __init__(self, model: str, *flags: str, env: dict[str, str] | None = None, port: int = 0) -> None:
        self.port = port or free_port()
        self.log = tempfile.NamedTemporaryFile("w+", prefix="nexus-sglang-", suffix=".log", delete=False)
        self.command = command(model, self.port, *flags)
        defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **defaults, **(env or {})},
        )

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self, progress: Callable[[float], None] = lambda seconds: None) -> Server:
        """Return when it answers.

        Args:
            progress: called every 20 seconds with the seconds passed.

        Raises:
            ServerError: it ended or was not ready in time; the message ends with its log.
        """
        begin = shown = time.monotonic()
        while (now := time.monotonic()) < begin + START_SECONDS:
            if now - shown > 20:
                shown = now
                progress(now - begin)
            if self.process.poll() is not None:
                raise ServerError(f"server ended with {self.process.returncode}:\n{self.tail()}")
            try:
                if requests.get(self.url + "/health", timeout=2).status_code == 200:
                    return self
            except requests.RequestException:
                pass
            time.sleep(0.5)
        self.stop()
        raise ServerError(f"server did not come up in {START_SECONDS} s:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        """The last lines of its log, each cut to 300 characters."""
        with open(self.log.name) as f:
            return "".join(line[:300].rstrip() + "\n" for line in f.readlines()[-lines:])

    def text(self) -> str:
        """Its whole log."""
        with open(self.log.name) as f:
            return f.read()

    def stop(self) -> None:
        """End the whole process group, on every way out; the log file stays."""
        # A Ctrl-C now would leave the server running.
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        try:
            self._end()
        finally:
            if main:
                signal.signal(signal.SIGINT, before)

    def _end(self) -> None:
        for sign, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(patience)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue

    def __enter__(self) -> Server:
        try:
            return self.wait()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def generate(self, ids: list[int] | list[list[int]], tokens: int = 16, **options: Any) -> Any:
        """One greedy request, see :func:`.client.post_generate`."""
        return post_generate(self.url, ids, tokens, **options)

    def info(self) -> dict[str, Any]:
        """The nexus part of /server_info."""
        return requests.get(self.url + "/server_info", timeout=60).json()["internal_states"][0]["nexus"]

    def flush(self) -> None:
        """Empty its prefix cache, see :func:`flush_cache`."""
        flush_cache(self.url)
