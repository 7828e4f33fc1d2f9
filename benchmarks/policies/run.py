"""Every policy on recall tasks, question visible or hidden, at 10 %, 20 % and 50 %, offline.

python -m benchmarks.policies.run            run what results.json lacks (it is saved after every passage)
python -m benchmarks.policies.run --again L  drop label L first (its policy has changed)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.offline.experiment import Contestant, Contestants
from benchmarks.offline.references import REFERENCES
from benchmarks.policies.common import open_reader, run_all, save
from nexus_sglang.evaluation.plan import SETTINGS
from nexus_sglang.policy import POLICIES, make_policy

FIRST_SEED = 100_000
RESULTS = Path(__file__).with_name("results.json")


def plan() -> list[tuple[str, int, int]]:
    """(task, seed, tokens) of every passage: 12 needle, 8 multi-key, 10 variables; can be cut short."""
    passages = []
    for i in range(12):
        passages.append(("needle", FIRST_SEED + i, 3900 if i in (5, 11) else 2000))
        if i < 10:
            passages.append(("variables", FIRST_SEED + 2000 + i, 2000))
        if i < 8:
            passages.append(("multi-key", FIRST_SEED + 1000 + i, 2000))
    return passages


ABLATIONS = {"nexus, values 0": {"value_share": 0}, "nexus, nothing drawn": {"sampled_share": 0}}


def contestants() -> Contestants:
    """Every registered policy with its defaults, two ablations, and the references in which each layer chooses."""
    entries: Contestants = {name: Contestant(make_policy(name, {})) for name in POLICIES if name != "composed"}
    entries |= {label: Contestant(make_policy("nexus", fields)) for label, fields in ABLATIONS.items()}
    return entries | REFERENCES


def drop(label: str) -> None:
    """Forget a label's scores."""
    records = json.loads(RESULTS.read_text())
    for record in records:
        for setting in SETTINGS:
            for scores in record[setting].values():
                scores.pop(label, None)
    save(records, RESULTS)


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--again", action="append", default=[], metavar="LABEL", help="forget this one and run it again"
    )
    parser.add_argument("--without", action="append", default=[], metavar="LABEL", help="leave this one for later")
    args = parser.parse_args(argv)
    for label in args.again:
        drop(label)
    chosen = {label: entry for label, entry in contestants().items() if label not in args.without}
    run_all(open_reader(), plan(), chosen, RESULTS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
