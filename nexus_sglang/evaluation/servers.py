"""Where jobs are played: servers that are started here, one per policy, or one that runs already."""

from __future__ import annotations

import argparse
import shlex
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from nexus_sglang.errors import ConfigError
from nexus_sglang.harness.models import MODELS, ensure_model

from .plan import FULL, Job, Plan
from .user_data import UserSample

SERVER_FLAGS = ("--max-total-tokens", "49152", "--chunked-prefill-size", "8192", "--max-running-requests", "48")
AT_ONCE = 8
"""Conversations that are played side by side on one server."""


class Work(NamedTuple):
    """What one server is to do.

    Attributes:
        plan: what the whole run measures.
        jobs: what this server is to play.
        data: the user's samples.
        done: called with every finished job and its row.
        stop: once set, no further job begins.
    """

    plan: Plan
    jobs: list[Job]
    data: list[UserSample]
    done: Callable[[Job, dict[str, Any]], None]
    stop: threading.Event


class Started:
    """One server per policy, started here and stopped after.

    Args:
        args: as parsed.

    Raises:
        ConfigError, ModelError: the model or its tokenizer cannot be had.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = args.model
        if args.model in MODELS:
            self.model = str(ensure_model(args.model, log=lambda line: print(line, file=sys.stderr, flush=True)))
        self.tokenizer = load_tokenizer(args.tokenizer or self.model)

    def policies(self, plan: Plan) -> tuple[str, ...]:
        """Those that the plan names."""
        return plan.policies

    def play(self, policy: str, work: Work) -> None:
        """Start a server with this policy and play its work on it."""
        from nexus_sglang.harness.server import Server

        flags = [*SERVER_FLAGS, *shlex.split(self.args.server_flags)]
        if policy != FULL:
            flags += ["--kv-policy", policy]
        with Server(self.model, *flags) as server:
            play_all(server.url, policy, self.tokenizer, work)


class Driven:
    """One running server; its policy is the only one that can be asked for, every budget is a request hint.

    Args:
        args: as parsed.

    Raises:
        ConfigError: nothing answers at ``--url``, or it serves another policy than ``--policies`` says.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        import requests

        self.url = args.url.rstrip("/")
        try:
            model = requests.get(self.url + "/model_info", timeout=30).json()
            state = requests.get(self.url + "/server_info", timeout=30).json()["internal_states"][0]
        except (requests.RequestException, ValueError, KeyError, IndexError) as err:
            raise ConfigError(
                f"--url {args.url} is not a running SGLang server ({err}): give http://HOST:PORT"
            ) from None
        self.model = model["model_path"]
        self.served = state.get("nexus", {}).get("policy", FULL)
        self.tokenizer = load_tokenizer(args.tokenizer or model.get("tokenizer_path") or self.model)
        if args.policies and args.policies != (self.served,):
            raise ConfigError(
                f"--policies {','.join(args.policies)}: the server at {args.url} serves {self.served}. "
                "Leave --policies out; to compare policies, run once per server with the same --out, "
                "one after the other"
            )

    def policies(self, plan: Plan) -> tuple[str, ...]:
        """The one that is served."""
        return (self.served,)

    def play(self, policy: str, work: Work) -> None:
        """Play the work on the running server."""
        play_all(self.url, policy, self.tokenizer, work)


def play_all(url: str, policy: str, tokenizer: Any, work: Work) -> None:
    """Every job of one policy on one server.

    Args:
        url: of the server.
        policy: that it serves.
        tokenizer: of its model.
        work: what to play.
    """
    from .runner import Runner, run_jobs

    runner = Runner(url, policy, tokenizer, work.plan)
    run_jobs(runner, [job for job in work.jobs if job.kind != "data"], AT_ONCE, work.done, work.stop)
    lines = {sample.line: sample for sample in work.data}
    for job in work.jobs:
        if job.kind == "data" and not work.stop.is_set():
            work.done(job, runner.data(lines[job.seed], job.budget))
            runner.flush()


def load_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer of the served model.

    Args:
        path: folder or name.

    Raises:
        ConfigError: it cannot be loaded; names --tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"--tokenizer {path} cannot be loaded ({str(err)[:120]}): give the served model's folder"
        ) from None
