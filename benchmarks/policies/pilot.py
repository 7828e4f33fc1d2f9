"""Choose the defaults of ``nexus``: many variants on few samples, seeds apart from those of the table (run.py).

python benchmarks/policies/pilot.py [--passages 4] [--out benchmarks/policies/pilot.json]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from common import TASK_NAMES, open_reader, run_all

from nexus_sglang.config import TokenAmount
from nexus_sglang.evaluation.experiment import Contestant
from nexus_sglang.policy import Weighing, make_policy
from nexus_sglang.policy.base import Policy
from nexus_sglang.policy.composed import Composed
from nexus_sglang.policy.draws import uniforms
from nexus_sglang.policy.selectors import interleave

FIRST_SEED = 500_000
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Mixed(Policy):
    """``Composed`` interleaved with an order that looks at no query, or at another window reduction."""

    name = "mixed"
    source = "pilot only"
    needs_values = needs_keys = needs_expected = True

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
            "value": lambda: evidence.value_norm.double(),
            "expected": lambda: evidence.expected.double(),
            "last": lambda: evidence.attention[-1].double(),
            "random": lambda: uniforms(blocks.seed, blocks.identity, blocks.event, 1)[0],
        }[self.other]()
        orders = [x.double().masked_fill(blocks.forced, -float("inf")) for x in (first, second)]
        return Weighing(interleave(orders, [1 - self.share, self.share]))


def variants() -> dict[str, Contestant]:
    """Label -> what it is."""
    put = lambda **fields: Contestant(Composed(**fields))  # noqa: E731
    best = {"head_reduction": "max", "window": "mean", "walk_weight": 0.5}
    mix = lambda other, share, **fields: Contestant(Mixed(Composed(**fields), other, share))  # noqa: E731
    out = {
        "max mean": put(head_reduction="max"),
        "max mean walk": put(**best),
        "max max": put(head_reduction="max", window="max"),
        "max last": put(head_reduction="max", window="last"),
        "top mean walk": put(**{**best, "head_reduction": "top"}),
        "top max": put(head_reduction="top", window="max"),
        "mean mean walk": put(walk_weight=0.5),
        "max mean walk, 10% drawn": put(**best, selector="core-sampled", sampled_share=0.1, sharpness=4),
        "max mean walk, 25% drawn": put(**best, selector="core-sampled", sampled_share=0.25, sharpness=4),
        "max mean walk, 25% drawn b1": put(**best, selector="core-sampled", sampled_share=0.25, sharpness=1),
        "max mean walk, poisson b2": put(**best, selector="sequential-poisson", sharpness=2),
        "max mean walk, poisson b4": put(**best, selector="sequential-poisson", sharpness=4),
        "max mean walk x value": put(**best, term="value"),
        "max mean walk x key": put(**best, term="key"),
        "top max x key": put(head_reduction="top", window="max", term="key"),
        "max mean walk | key 25%": mix("key", 0.25, **best),
        "max mean walk | key 50%": mix("key", 0.5, **best),
        "max mean walk | expected 50%": mix("expected", 0.5, **best),
        "top max | expected 50%": mix("expected", 0.5, head_reduction="top", window="max"),
        "max mean walk | last 50%": mix("last", 0.5, **best),
        "mean mean | expected 50%": mix("expected", 0.5),
        "max mean walk | random 25%": mix("random", 0.25, **best),
        "max mean walk, recent 25%": Contestant(Composed(**best), TokenAmount(0.25)),
        "max mean walk, recent 50%": Contestant(Composed(**best), TokenAmount(0.5)),
        "max expected": mix("expected", 0.999, **best),
        "top expected": mix("expected", 0.999, head_reduction="top"),
    }
    for name in ("nexus-paper", "expected-attention", "snapkv", "random"):
        out[name] = Contestant(make_policy(name, {}))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=4, help="per task")
    parser.add_argument("--out", type=Path, default=HERE / "pilot.json")
    args = parser.parse_args()
    plan = [(task, FIRST_SEED + 100 * t + i, 2000) for i in range(args.passages) for t, task in enumerate(TASK_NAMES)]
    run_all(open_reader(), plan, variants(), args.out)


if __name__ == "__main__":
    main()
