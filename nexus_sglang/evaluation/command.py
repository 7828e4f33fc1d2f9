"""``nexus-sglang eval``: starts a server per policy, or drives a running one, and writes results, report and plots."""

from __future__ import annotations

import argparse
import hashlib
import platform
import shlex
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nexus_sglang import SGLANG_VERSION
from nexus_sglang.errors import ConfigError
from nexus_sglang.harness.models import MODELS

from .conversations import KINDS
from .documents import FAMILIES
from .plan import FULL, Job, Plan, Results, read_results
from .servers import Driven, Started, Work
from .user_data import UserSample, read_samples

RESULTS = "results.jsonl"
USUAL: dict[str, Any] = {
    "policies": (FULL, "nexus", "snapkv"),
    "budgets": (0.2,),
    "samples": {1024: 10},
    "visible_samples": {},
}
"""Fields of the :class:`Plan` where the command line says nothing."""
QUICK: dict[str, Any] = {
    "policies": (FULL, "nexus", "snapkv", "streaming-llm"),
    "budgets": (0.2,),
    "samples": {1024: 3},
    "visible_samples": {},
    "conversations": 2,
    "texts": 1,
    "text_tokens": 1024,
}
"""The same with ``--quick``."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register ``eval`` with its flags.

    Args:
        commands: subcommands of ``nexus-sglang``.
    """
    text = (
        "measure what eviction does to answers, through a real server: recall tasks, conversations, fidelity, your data"
    )
    command = commands.add_parser("eval", help=text, description=text)
    add = command.add_argument
    add("--model", default="smollm2-135m", help="model folder, or one of: " + ", ".join(sorted(MODELS)))
    add("--url", help="drive this running server instead of starting one per policy")
    add("--tokenizer", help="folder of the tokenizer (default: the model's; with --url, what the server names)")
    add("--policies", type=_names, help=f"comma list; {FULL} is SGLang without eviction (default: full,nexus,snapkv)")
    add("--budgets", type=_numbers, help="comma list of shares of the prompt, or token counts (default: 0.2)")
    add("--lengths", type=_counts, metavar="LENGTH[:SAMPLES],...", help="documents, question hidden (default: 1024:10)")
    add("--visible", type=_counts, metavar="LENGTH[:SAMPLES],...", help="documents, question visible (default: none)")
    add("--tasks", type=_names, help=f"comma list (default: all thirteen): {', '.join(FAMILIES)}")
    add("--conversations", type=int, metavar="N", help="conversations of each kind: " + ", ".join(KINDS))
    add("--texts", type=int, metavar="N", help="texts streamed for KL, top-1 agreement and perplexity")
    add("--text-tokens", type=int, help="length of a text (default: 2048)")
    add("--text", type=Path, help="file the texts are cut from (default: CPython's documentation)")
    add("--data", type=Path, help="JSON lines of your own chats: messages, expect, max_tokens")
    add("--quick", action="store_true", help="a small run of everything: minutes on two CPU cores")
    add("--servers", type=int, default=1, help="servers that run at a time (3 to 4 GB each on a CPU)")
    add("--server-flags", default="", help="more flags for the servers that are started, as one string")
    add("--first-seed", type=int, help="of documents and conversations (default: 1000)")
    add(
        "--out", type=Path, default=Path("eval-results"), help="folder of the result file; a second run goes on with it"
    )
    add("--document", type=Path, help="write the report to this file (default: report.md in --out)")
    add("--report", action="store_true", help="only write report and plots from --out")
    command.set_defaults(run=run, command_line=None)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _names(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0.1,0.2,0.5") from None


def _counts(text: str) -> dict[int, int]:
    try:
        pairs = [part.partition(":") for part in _names(text)]
        return {int(length): int(count or 10) for length, _, count in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1024:20,2048:50") from None


def plan_of(args: argparse.Namespace) -> Plan:
    """What the command line asks for; ``--quick`` gives other defaults.

    Args:
        args: as parsed.

    Raises:
        ConfigError: unknown policy or task, or an unusable number.
    """
    from nexus_sglang.policy import find_policy  # here because it imports torch, seconds that --help need not wait

    given = {
        "policies": args.policies,
        "budgets": args.budgets,
        "samples": args.lengths,
        "visible_samples": args.visible,
        "tasks": args.tasks,
        "conversations": args.conversations,
        "texts": args.texts,
        "text_tokens": args.text_tokens,
        "text_file": str(args.text) if args.text else None,
        "first_seed": args.first_seed,
    }
    wanted = (QUICK if args.quick else USUAL) | {name: value for name, value in given.items() if value is not None}
    for policy in wanted["policies"]:
        if policy != FULL:
            try:
                find_policy(policy)
            except ConfigError as err:
                raise ConfigError(str(err).replace("--kv-policy", "--policies", 1)) from None
    return Plan(**wanted)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: as parsed.

    Returns:
        The exit status: 0, or 1 when a server did not come up or went away.
    """
    import requests

    from nexus_sglang.harness.server import ServerError

    from .report import write_report

    if not args.report:
        try:
            measure(args, plan_of(args))
        except (ServerError, requests.RequestException) as err:
            print(
                f"nexus-sglang: {err}\nWhat was measured is in {args.out}; the same command goes on.", file=sys.stderr
            )
            return 1
    head, rows = read_results(args.out / RESULTS)
    report = write_report(args.out, head, list(rows.values()), args.document)
    print(report.summary)
    print(f"written: {', '.join(str(path) for path in report.files)}", file=sys.stderr)
    return 0


def measure(args: argparse.Namespace, plan: Plan) -> None:
    """Play what is missing from the result file.

    Args:
        args: as parsed.
        plan: what is to be measured.

    Raises:
        ConfigError, ModelError: a value cannot be used, or the model cannot be made.
    """
    from tqdm import tqdm

    if args.servers < 1:
        raise ConfigError(f"--servers {args.servers} is not usable: give a whole number of at least 1")
    data = read_samples(args.data) if args.data else []
    begin = time.monotonic()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave no server behind
    target: Driven | Started = Driven(args) if args.url else Started(args)
    head = {
        "model": Path(target.model).name,
        "sglang": SGLANG_VERSION,
        "first_seed": plan.first_seed,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "tasks": ",".join(plan.tasks) if plan.samples or plan.visible_samples else None,
        "text": check_inputs(plan, data, target.tokenizer),
        "commands": [command_line(args)],
    }
    results = Results(args.out / RESULTS, head)
    check_data(args, data, results)
    jobs = {policy: _missing(plan, policy, data, results) for policy in target.policies(plan)}
    with tqdm(total=sum(map(len, jobs.values())), unit="job", smoothing=0.05) as bar:

        def done(job: Job, row: dict[str, Any]) -> None:
            results.add(job, row)
            bar.update()

        def play(policy: str) -> None:
            if jobs[policy] and not stop.is_set():
                bar.write(f"{policy}: {len(jobs[policy])} jobs", file=sys.stderr)
                target.play(policy, Work(plan, jobs[policy], data, done, stop))

        with ThreadPoolExecutor(args.servers) as threads:
            try:
                for _ in threads.map(play, jobs):
                    pass
            except BaseException:  # Ctrl-C as well: each server finishes what it is at, and is stopped
                stop.set()
                raise
    print(f"measured in {(time.monotonic() - begin) / 60:.1f} minutes", file=sys.stderr)


def check_inputs(plan: Plan, data: list[UserSample], tokenizer: Any) -> str | None:
    """Make every text and render a chat once, before hours of work.

    Args:
        plan: what is to be measured.
        data: the user's samples.
        tokenizer: of the served model.

    Returns:
        What the fidelity texts are cut from; None without any.

    Raises:
        ConfigError: a text is too short, or the tokenizer's template cannot render what is asked for.
    """
    from . import fidelity

    system = [{"role": "system", "content": "x"}]
    chats = [("--conversations", chat) for chat in (system, [*system, {"role": "user", "content": "y"}])]
    chats = chats * bool(plan.conversations) + [("--data", sample.messages) for sample in data]
    for flag, messages in chats:
        try:
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as err:  # templates raise what they like
            raise ConfigError(
                f"{flag}: the chat template of this tokenizer does not render {str(messages)[:60]} ({str(err)[:120]}). "
                f"Leave {flag} out, or give the folder of an instruct model's tokenizer with --tokenizer"
            ) from None
    if not plan.texts:
        return None
    path = Path(plan.text_file) if plan.text_file else None
    fidelity.texts(path, plan.texts, plan.text_tokens, tokenizer)
    if path is None:
        return f"documentation of CPython {platform.python_version()}"
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def check_data(args: argparse.Namespace, data: list[UserSample], results: Results) -> None:
    """A result belongs to a line of ``--data``: the line must still ask what it asked.

    Args:
        args: as parsed.
        data: the user's samples.
        results: what was measured before.

    Raises:
        ConfigError: it does not.
    """
    asked = {sample.line: sample.digest for sample in data}
    for row in results.rows.values():
        if data and row["kind"] == "data" and row.get("sample") not in (None, asked.get(row["seed"])):
            raise ConfigError(
                f"--data {args.data}, line {row['seed']}: --out {args.out} holds a result of another line. "
                "Lines may be added at the end; use another --out for another file"
            )


def _missing(plan: Plan, policy: str, data: list[UserSample], results: Results) -> list[Job]:
    """Jobs of this policy that the result file lacks."""
    jobs = [*plan.jobs(policy)]
    jobs += [Job("data", "", policy, budget, 0, sample.line) for sample in data for budget in plan.budgets_of(policy)]
    return [job for job in jobs if job.key not in results.rows]


def command_line(args: argparse.Namespace) -> str:
    """What was typed, with file names in place of paths, so that a report carries no paths of the machine it ran on.

    Args:
        args: as parsed.
    """
    words = args.command_line or sys.argv[1:]
    given = (args.model if "/" in args.model else None, args.tokenizer, args.data, args.text, args.out, args.document)
    folders = {str(path) for path in given if path}
    return shlex.join(["nexus-sglang", *(Path(word).name if word in folders else word for word in words)])
