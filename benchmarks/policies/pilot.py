"""Choose the defaults of ``nexus``: many variants on few samples, seeds apart from those of the table (run.py).

python benchmarks/policies/pilot.py [--passages 5] [--out benchmarks/policies/pilot.json]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from common import open_reader, run_all

from nexus_sglang.config import TokenAmount
from nexus_sglang.evaluation.experiment import Contestant
from nexus_sglang.policy import Weighing, make_policy
from nexus_sglang.policy.base import Policy
from nexus_sglang.policy.composed import Composed
from nexus_sglang.policy.selectors import interleave

FIRST_SEED = 600_000
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Mixed(Policy):
    """``Composed`` interleaved with an order of another kind."""

    name = "mixed"
    source = "pilot only"
    needs_keys = needs_expected = needs_distinct_values = True

    base: Composed = Composed()
    other: str = "key"
    share: float = 0.5

    @property
    def head_reduction(self) -> str:
        return self.base.head_reduction

    def weigh(self, evidence, blocks):
        first = self.base.weigh(evidence, blocks).weights
        second = {
            "key": lambda: evidence.key_distinctiveness.double(),
            "expected": lambda: evidence.expected.double(),
            "direction": lambda: evidence.value_distinctiveness.double(),
        }[self.other]()
        orders = [x.double().masked_fill(blocks.forced, -float("inf")) for x in (first, second)]
        return Weighing(interleave(orders, [1 - self.share, self.share]))


def variants() -> dict[str, Contestant]:
    """Label -> what it is. "A | B 50%": half of the room by A, half by B; "drawn": sampled_share."""
    walk = {"head_reduction": "max", "window": "mean", "walk_weight": 0.5}
    plain = lambda **fields: Contestant(Composed(**fields))  # noqa: E731
    mix = lambda other, share, **fields: Contestant(Mixed(Composed(**fields), other, share))  # noqa: E731
    nexus = lambda recent=64, **fields: Contestant(make_policy("nexus", fields), TokenAmount(recent))  # noqa: E731
    out = {
        "max mean walk": plain(**walk),
        "max mean": plain(head_reduction="max"),
        "max max": plain(head_reduction="max", window="max"),
        "max last": plain(head_reduction="max", window="last"),
        "top max": plain(head_reduction="top", window="max"),
        "mean mean walk": plain(walk_weight=0.5),
        "max mean walk x value norm": plain(**walk, term="value"),
        "max mean walk | key 50%": mix("key", 0.5, **walk),
        "max mean walk | expected 50%": mix("expected", 0.5, **walk),
        "top max | value direction 50%": mix("direction", 0.5, head_reduction="top", window="max"),
        "max last | value direction 50%": mix("direction", 0.5, head_reduction="max", window="last"),
        "max mean | value direction 50%": nexus(walk_weight=0, sampled_share=0),
        "value direction": nexus(distinct_share=1, sampled_share=0),
    }
    for share in (0.25, 0.5, 0.75):
        out[f"max mean walk | value direction {share:.0%}"] = nexus(distinct_share=share, sampled_share=0)
    for drawn in (0.1, 0.25, 0.5):
        out[f"... 50%, {drawn:.0%} drawn"] = nexus(distinct_share=0.5, sampled_share=drawn)
    out["... 50%, 25% drawn, sharpness 1"] = nexus(distinct_share=0.5, sampled_share=0.25, sharpness=1.0)
    for recent in (0.25, 0.5):
        out[f"... 50%, recent {recent:.0%} of the budget"] = nexus(recent, distinct_share=0.5, sampled_share=0)
    return out | {name: Contestant(make_policy(name, {})) for name in ("nexus-paper", "snapkv", "random")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=5, help="per task")
    parser.add_argument("--out", type=Path, default=HERE / "pilot.json")
    args = parser.parse_args()
    tasks = ("multi-key", "variables", "needle")
    plan = [(task, FIRST_SEED + 100 * t + i, 1950) for i in range(args.passages) for t, task in enumerate(tasks)]
    run_all(open_reader(), plan, variants(), args.out)


if __name__ == "__main__":
    main()
