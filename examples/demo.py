"""The same agent session with and without eviction, side by side: ``python examples/demo.py``, or ``make demo``.

Starts two servers one after the other, plays ``examples/multi_turn_agent.py`` against each, compares what the
KV cache held, and stops everything whatever happens.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nexus_sglang.harness.models import MODELS, ModelError, ensure_model
from nexus_sglang.harness.server import Server, ServerError

AGENT = Path(__file__).resolve().parent / "multi_turn_agent.py"
BLOCK = 32
"""Tokens a block."""
CHUNK = 4096
"""Tokens prefilled at a time."""
SERVER_FLAGS = (
    *("--max-total-tokens", "16384"),
    *("--chunked-prefill-size", str(CHUNK)),
    *("--max-running-requests", "4"),
    "--enable-metrics",  # without it, answers do not carry their decode speed
)


class DemoError(RuntimeError):
    """The demo could not run. The message says why."""


def say(line: str = "") -> None:
    """Print at once, as the agent's own output comes in between."""
    print(line, flush=True)


def policy_flags(budget: str | None) -> list[str]:
    """Server flags for a budget, or for stock SGLang."""
    if budget is None:
        return ["--kv-policy", "none"]
    return ["--kv-policy", "nexus", "--kv-budget", budget, "--kv-block-size", str(BLOCK)]


@contextmanager
def server(model: str, port: int, flags: list[str]) -> Iterator[Server]:
    """A running server, stopped on every way out.

    Args:
        model: folder or name.
        port: 0 takes a free one.
        flags: beside :data:`SERVER_FLAGS`.

    Raises:
        ServerError: it did not start.
    """
    running = Server(model, *SERVER_FLAGS, *flags, port=port)
    say(f"$ python {' '.join(running.command[1:])}")
    begin = time.monotonic()
    try:
        running.wait(lambda s: say(f"  starting, {s:.0f} s (loading PyTorch and the model takes about a minute)"))
        say(f"  ready after {time.monotonic() - begin:.0f} s")
        yield running
    finally:
        running.stop()


def run_agent(url: str, out: Path, replay: Path | None) -> list[dict[str, Any]]:
    """Play the session. Its table goes to our stdout.

    Args:
        url: of the server.
        out: file for the numbers and replies of every turn.
        replay: such a file of an earlier session, whose replies this one keeps to.

    Returns:
        The numbers of every turn.

    Raises:
        DemoError: the session failed.
    """
    command = [sys.executable, str(AGENT), "--url", url, "--json", str(out)]
    if replay is not None:
        command += ["--replay", str(replay)]
    status = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    if status:
        raise DemoError(f"the agent session failed with exit status {status}")
    return json.loads(out.read_text())["turns"]


def show_counters(running: Server, turns: list[dict[str, Any]]) -> None:
    """What /server_info says after the session."""
    state = running.info()
    cached = sum(turn["cached_tokens"] or 0 for turn in turns)
    prompts = sum(turn["prompt_tokens"] for turn in turns)
    say()
    say("Counters from /server_info after the session:")
    say(f"  kept     {state['resident']:,} tokens resident, of {state['logical']:,} that the radix cache can name")
    say(
        f"  evicted  {state['tokens_evicted']:,} tokens in {state['blocks_evicted']:,} blocks, "
        f"{state['eviction_events']:,} eviction events"
    )
    say(f"  shared   {cached:,} of {prompts:,} prompt tokens came from the radix cache instead of being computed")


def compare(nexus: list[dict[str, Any]], stock: list[dict[str, Any]]) -> str:
    """Both sessions, turn by turn. Stock SGLang keeps the whole prompt and reply, but a cut-off reply's last token."""
    head = f"{'':4}  {'':>7}  {'cached':^15}  {'resident':^15}  {'decode tok/s':^15}  {'fact found':^15}"
    names = f"{'nexus':>7} {'stock':>7}"
    lines = [head, f"{'turn':>4}  {'prompt':>7}  {names}  {names}  {names}  {names}"]

    def pair(left: Any, right: Any) -> str:
        shown = []
        for value in (left, right):
            text = "-" if value is None else ("no", "yes")[value] if isinstance(value, bool) else f"{value:,}"
            shown.append(f"{value:.1f}" if isinstance(value, float) else text)
        return f"{shown[0]:>7} {shown[1]:>7}"

    for a, b in zip(nexus, stock, strict=True):
        held = b["prompt_tokens"] + b["completion_tokens"] - (b["finish_reason"] == "length")
        cells = (
            pair(a["cached_tokens"], b["cached_tokens"]),
            pair(a["resident"], held),
            pair(a["decode_tokens_per_s"], b["decode_tokens_per_s"]),
            pair(a["fact_found"], b["fact_found"]),
        )
        lines.append(f"{a['turn']:>4}  {a['prompt_tokens']:>7,}  " + "  ".join(cells))
    return "\n".join(lines)


def check(nexus: list[dict[str, Any]], stock: list[dict[str, Any]]) -> list[str]:
    """What does not hold, in words; empty when all is well.

    At its peak a turn may hold its budget, one block, and the chunk in flight: what it prefills (prompt minus cached
    tokens), at most :data:`CHUNK`.

    Args:
        nexus: turns of the session with eviction.
        stock: the same turns without.
    """
    problems = []
    for a, b in zip(nexus, stock, strict=True):
        turn = a["turn"]
        allowed = a["budget"] + BLOCK
        in_flight = min(CHUNK, a["prompt_tokens"] - (a["cached_tokens"] or 0))
        if a["resident"] > allowed:
            problems.append(f"turn {turn}: {a['resident']} tokens resident, more than budget + block = {allowed}")
        if a["peak_resident"] > allowed + in_flight:
            problems.append(
                f"turn {turn}: {a['peak_resident']} tokens at the peak, more than budget + block + chunk "
                f"in flight = {allowed + in_flight}"
            )
        if a["prompt_tokens"] != b["prompt_tokens"]:
            problems.append(f"turn {turn}: prompts differ, {a['prompt_tokens']} and {b['prompt_tokens']} tokens")
        if turn > 1 and a["cached_tokens"] != b["cached_tokens"]:
            problems.append(f"turn {turn}: {a['cached_tokens']} tokens cached, {b['cached_tokens']} with stock SGLang")
    if not any(turn["evicted"] for turn in nexus):
        problems.append("nothing was evicted")
    return problems


def demo(model: str, budget: str, port: int | None) -> int:
    """Play both sessions and compare them.

    Args:
        model: folder or name.
        budget: as ``--kv-budget``.
        port: of both servers, which run one after the other; None takes free ones.

    Returns:
        0 when every check holds, else 1.
    """
    with tempfile.TemporaryDirectory(prefix="nexus-sglang-demo-") as folder:
        work = Path(folder)
        say(f"1. Agent session with eviction (budget {budget} of each prompt).")
        with server(model, port or 0, policy_flags(budget)) as running:
            nexus = run_agent(running.url, work / "nexus.json", None)
            show_counters(running, nexus)
        say()
        say("2. The same session on stock SGLang (--kv-policy none).")
        say("   Same conversation: it keeps to the replies recorded in the first run, which are also put into this")
        say("   server's cache, so prompts and cached tokens are identical token for token.")
        with server(model, port or 0, policy_flags(None)) as running:
            stock = run_agent(running.url, work / "stock.json", work / "nexus.json")
    say()
    say("Side by side, in tokens (stock SGLang keeps the whole prompt and reply resident):")
    say(compare(nexus, stock))
    say()
    problems = check(nexus, stock)
    for problem in problems:
        say(f"CHECK FAILED  {problem}")
    if not problems:
        say("OK  after each turn, resident is at most budget + one block; at the peak, plus the chunk in flight")
        say("OK  from turn 2 on, cached tokens equal stock SGLang's: eviction did not cost a prefix hit")
        say(f"Answers: {facts(nexus, stock)}. A small model misses many either way.")
        say("Decode speed is one run each, and depends on what else this machine does.")
    return 1 if problems else 0


def facts(nexus: list[dict[str, Any]], stock: list[dict[str, Any]]) -> str:
    """How many of the facts that were asked for each session found."""
    asked = sum(turn["fact_found"] is not None for turn in nexus)
    right, right_stock = (sum(bool(turn["fact_found"]) for turn in turns) for turns in (nexus, stock))
    return f"facts found: {right} of {asked} with eviction, {right_stock} of {asked} without"


def _model_path(name: str) -> str:
    return str(ensure_model(name, log=say)) if name in MODELS else name


def main() -> int:
    """Run the demo; exit status 0 when every check holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="registered model or a path (default %(default)s)")
    parser.add_argument("--budget", default="0.2", help="as --kv-budget (default %(default)s)")
    parser.add_argument("--port", type=int, help="(default: a free one)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return demo(_model_path(args.model), args.budget, args.port)
    except (DemoError, ModelError, ServerError, OSError) as err:
        print(f"demo: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the servers are stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
