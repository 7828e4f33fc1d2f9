"""Writes docs/results/ from the checked-in results: same results, same bytes.

python -m benchmarks.pages               every page
python -m benchmarks.pages kvpress.md    this one
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.followups import report as followups
from benchmarks.kvpress import report as kvpress
from benchmarks.policies import report as policies
from benchmarks.sessions import report as sessions
from nexus_sglang.evaluation import report as evaluation
from nexus_sglang.evaluation.plan import read_results
from nexus_sglang.evaluation.tables import Rows

BENCHMARKS = ROOT / "benchmarks"
FOLDER = ROOT / "docs" / "results"


def _read(*names: str) -> Any:
    return json.loads(BENCHMARKS.joinpath(*names).read_text(encoding="utf-8"))


def _quality() -> str:
    head, rows = read_results(BENCHMARKS / "quality" / "results.jsonl")
    plots = [f"../../benchmarks/quality/{name}.png" for name in ("accuracy", "depth", "tasks")]
    return evaluation.render(head, Rows(list(rows.values())), plots)


def _policies() -> str:
    return policies.render(*(_read("policies", f"{name}.json") for name in ("results", "pilot", "values")))


def _sessions() -> str:
    files = sorted((BENCHMARKS / "sessions" / "results").glob("*.json"))
    return sessions.render({file.stem: _read("sessions", "results", file.name) for file in files})


PAGES: dict[str, Callable[[], str]] = {
    "quality.md": _quality,
    "policies.md": _policies,
    "sessions.md": _sessions,
    "kvpress.md": lambda: kvpress.render(_read("kvpress", "results.json")),
    "followups.md": lambda: followups.render(_read("followups", "results.json")),
}
"""Name of a page in docs/results/ to what makes its text."""


def main(argv: list[str] | None = None) -> int:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"default: all of {', '.join(PAGES)}")
    chosen = parser.parse_args(argv).pages or list(PAGES)
    if unknown := sorted(set(chosen) - set(PAGES)):
        parser.error(f"no such page: {', '.join(unknown)}. Use some of {', '.join(PAGES)}")
    for name in chosen:
        path: Path = FOLDER / name
        path.write_text(PAGES[name](), encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
