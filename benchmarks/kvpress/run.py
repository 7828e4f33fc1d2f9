"""Ours on the same prompts as kvpress, through real servers, and both sides into results.json.

    python -m benchmarks.kvpress.run prompts.jsonl --kvpress kvpress.json

docs/results/kvpress.md has the steps before; ``python -m benchmarks.pages kvpress.md`` writes that page.

One server per system, one request at a time, the prefix cache flushed after each prompt; then the controls, offline
(controls.py). Systems that the result file already holds are not run again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kvpress import controls
from benchmarks.kvpress.prompts import SCORES, digest, read_prompts
from nexus_sglang.harness.models import ensure_model
from nexus_sglang.harness.server import Server

HERE = Path(__file__).resolve().parent
FLAGS = ("--max-total-tokens", "16384", "--chunked-prefill-size", "4096", "--max-running-requests", "4")


class System(NamedTuple):
    """One server.

    Attributes:
        flags: beside :data:`FLAGS`.
        budgets: asked of it, as shares of the prompt; 1.0 is without eviction.
    """

    flags: tuple[str, ...]
    budgets: tuple[float, ...]


SYSTEMS: dict[str, System] = {
    "snapkv": System(("--kv-policy", "snapkv"), (1.0, 0.2, 0.5)),
    "tova": System(("--kv-policy", "tova"), (0.2, 0.5)),
    "streaming-llm": System(("--kv-policy", "streaming-llm"), (0.2, 0.5)),
}


class Row(NamedTuple):
    """One answer.

    Attributes:
        side: ``kvpress``, ``ours`` (through a server) or ``offline``.
        system: the method, with what differs from its defaults.
        budget: share of the prompt; 1.0 is the full cache.
        id: of the prompt.
        text: the answer.
        score: 0 or 1.
        kept: tokens in the cache when the prompt had been read and cut.
    """

    side: str
    system: str
    budget: float
    id: str
    text: str
    score: float
    kept: int


def row(side: str, system: str, budget: float, prompt: dict, ids: list[int], kept: int, tokenizer: Any) -> Row:
    """Score an answer given as token ids."""
    text = tokenizer.decode(ids)
    score = SCORES[prompt["score"]](text, prompt["answers"])
    return Row(side, "full" if budget == 1.0 else system, budget, prompt["id"], text, score, kept)


def ask(server: Server, prompt: dict[str, Any], budget: float) -> tuple[list[int], int]:
    """Answer's token ids and tokens kept after prefill.

    Raises:
        RuntimeError: there was not exactly one event where there should be one, or prefix reuse.
    """
    hint = {"kv_evict": False} if budget == 1.0 else {"kv_budget": budget}
    answer = server.generate(prompt["ids"], prompt["tokens"], custom=hint, cache_salt=f"{prompt['id']} {budget}")
    meta = answer["meta_info"]
    held = meta["nexus"][0]
    if held["events"] != (budget < 1.0) or meta["cached_tokens"]:
        raise RuntimeError(f"{prompt['id']} at {budget}: {held}, {meta['cached_tokens']} tokens from the prefix cache")
    return answer["output_ids"], len(prompt["ids"]) - held["tokens_evicted"]


def kvpress_rows(raw: dict[str, Any], prompts: list[dict[str, Any]], tokenizer: Any) -> list[Row]:
    """Rows of what reference.py wrote."""
    rows = []
    for prompt in prompts:
        for name, answer in raw["rows"][prompt["id"]].items():
            system, _, budget = name.rpartition(" ")
            share = float(budget) if system else 1.0
            rows.append(row("kvpress", system, share, prompt, answer["ids"], answer["kept"], tokenizer))
    return rows


def save(path: Path, result: dict[str, Any], rows: list[Row]) -> None:
    """Head first, then a line per row."""
    head = json.dumps(result, indent=1)[:-2]
    lines = ",\n".join(json.dumps(r._asdict(), ensure_ascii=False) for r in rows)
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def _described(prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**{k: v for k, v in p.items() if k != "ids"}, "length": len(p["ids"])} for p in prompts]


def head_of(raw: dict[str, Any], folder: str, prompts: list[dict], options: argparse.Namespace) -> dict[str, Any]:
    """The result file without its rows."""
    return {
        "model": Path(folder).name,
        "dtype": raw["dtype"],
        "commands": {
            "prompts": f"python -m benchmarks.kvpress.prompts {options.prompts.name}",
            "kvpress": raw["command"],
            "ours": f"python -m benchmarks.kvpress.run {options.prompts.name} --kvpress {options.kvpress.name}",
        },
        "kvpress": {k: raw[k] for k in ("versions", "python", "attention", "checked_alone")},
        "ours": {"versions": {name: importlib.metadata.version(name) for name in ("sglang", "transformers", "torch")}},
        "sha256": digest(prompts),
        "prompts": _described(prompts),
    }


def serve(folder: str, dtype: str, name: str, prompts: list[dict[str, Any]], tokenizer: Any) -> list[Row]:
    """All prompts and budgets of one system through a server."""
    system = SYSTEMS[name]
    rows: list[Row] = []
    with Server(folder, *system.flags, *FLAGS, "--dtype", dtype) as server:
        for i, prompt in enumerate(prompts):
            rows += [row("ours", name, b, prompt, *ask(server, prompt, b), tokenizer) for b in system.budgets]
            server.flush()
            print(f"{name}: {i + 1}/{len(prompts)}", file=sys.stderr, flush=True)
    return rows


def offline(folder: str, dtype: str, prompts: list[dict[str, Any]], tokenizer: Any) -> list[Row]:
    """All variants of controls.py."""
    reader = controls.load(folder, dtype)
    rows: list[Row] = []
    for i, prompt in enumerate(prompts):
        answers = controls.run(reader, prompt)
        rows += [row("offline", name, controls.BUDGET, prompt, ids, kept, tokenizer) for name, ids, kept in answers]
        print(f"controls: {i + 1}/{len(prompts)}", file=sys.stderr, flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="from prompts.py")
    parser.add_argument("--kvpress", type=Path, required=True, help="from reference.py")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    measure(parser.parse_args(argv))
    return 0


def measure(options: argparse.Namespace) -> None:
    """Run what is missing from the result file.

    Raises:
        SystemExit: the result file belongs to other prompts.
    """
    from transformers import AutoTokenizer

    folder = str(ensure_model(options.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = read_prompts(options.prompts)
    raw = json.loads(options.kvpress.read_text(encoding="utf-8"))
    result = head_of(raw, folder, prompts, options)
    rows = kvpress_rows(raw, prompts, tokenizer)
    if options.out.exists():
        old = json.loads(options.out.read_text(encoding="utf-8"))
        if old["sha256"] != result["sha256"]:
            raise SystemExit(f"error: --out {options.out} belongs to other prompts: give another file")
        rows += [Row(**r) for r in old["rows"] if r["side"] != "kvpress"]
    for name in SYSTEMS:
        if not any((r.side, r.system) == ("ours", name) for r in rows):
            rows += serve(folder, raw["dtype"], name, prompts, tokenizer)
            save(options.out, result, rows)
    if not any(r.side == "offline" for r in rows):
        rows += offline(folder, raw["dtype"], prompts, tokenizer)
    save(options.out, result, rows)


if __name__ == "__main__":
    raise SystemExit(main())
