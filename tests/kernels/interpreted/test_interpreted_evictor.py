"""The evictor makes the same choices whichever implementation the dispatch takes."""

import pytest
from test_evictor import bench
from triton.runtime.interpreter import InterpretedFunction

POLICIES = [
    ("nexus", {}), ("nexus", {"head_reduction": "mean"}), ("nexus-paper", {}), ("h2o", {}), ("expected-attention", {}),
    ("vase", {}),
]  # fmt: skip


def history(policy: str, fields: dict) -> tuple:
    b = bench(policy, **fields)
    seq, other = b.sequence(1, 300, budget=80), b.sequence(2, 130, budget=40)
    b.evictor.after_prefill(seq, protected=30, room=0)
    b.evictor.after_prefill(other, protected=0, room=0)
    for length in range(301, 330):
        b.grow(1, length)
        b.evictor.after_decode(seq, lambda: 30)
    b.table.check_integrity(), b.rows.check_integrity()
    return [*seq.events, *other.events], b.rows.slots.tolist(), b.table.free_physical.tolist()


@pytest.mark.parametrize("policy, fields", POLICIES)
def test_same_events_rows_and_free_slots(policy, fields, monkeypatch):
    results = {}
    for name in ("torch", "triton"):
        monkeypatch.setenv("NEXUS_SGLANG_KERNELS", name)
        results[name] = history(policy, fields)
    assert results["torch"] == results["triton"] and len(results["torch"][0]) > 4


@pytest.mark.parametrize("policy", ["nexus", "h2o", "expected-attention"])
def test_the_warm_up_compiles_what_an_event_needs(policy, monkeypatch):
    launched, run = set(), InterpretedFunction.run

    def noted(self, *args, **options):
        launched.add(self.__name__)
        return run(self, *args, **options)

    monkeypatch.setenv("NEXUS_SGLANG_KERNELS", "triton")
    monkeypatch.setattr(InterpretedFunction, "run", noted)
    b = bench(policy)
    seq = b.sequence(1, 300, budget=80)
    launched.clear()
    b.evictor.warm_up()
    warmed = set(launched)
    launched.clear()
    b.rows.rebuild(1)
    rows = set(launched)  # those run at each admission
    launched.clear()
    b.evictor.after_prefill(seq, protected=30, room=0)
    assert seq.events and launched - rows and launched - rows <= warmed
