"""The evictor makes the same choices whichever implementation the dispatch takes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from nexus_sglang.policy import Policy, Weighing, make_policy
from tests.support.bench import bench

POLICIES = [
    ("nexus", {}),
    ("nexus", {"head_reduction": "mean"}),
    ("nexus-paper", {}),
    ("h2o", {}),
    ("expected-attention", {}),
    ("vase", {}),
]


def history(policy: str, fields: dict, with_lse: bool) -> tuple:
    b = bench(policy, with_lse=with_lse, **fields)
    seq = b.sequence(1, 300, budget=80)
    other = b.sequence(2, 130, budget=40)
    b.evictor.after_prefill(seq, protected=30, room=0)
    b.evictor.after_prefill(other, protected=0, room=0)
    for length in range(301, 330):
        b.grow(1, length)
        b.evictor.after_decode(seq, lambda: 30)
    b.table.check_integrity()
    b.rows.check_integrity()
    return [*seq.events, *other.events], b.rows.slots.tolist(), b.table.free_physical.tolist()


@pytest.mark.parametrize("policy, fields, with_lse", [*((*both, False) for both in POLICIES), ("nexus", {}, True)])
def test_same_events_rows_and_free_slots(policy, fields, with_lse, monkeypatch):
    results = {}
    for name in ("torch", "triton"):
        monkeypatch.setenv("NEXUS_SGLANG_KERNELS", name)
        results[name] = history(policy, fields, with_lse)
    assert results["torch"] == results["triton"] and len(results["torch"][0]) > 4


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("policy", ["nexus", "h2o", "expected-attention"])
def test_the_warm_up_compiles_what_an_event_needs(policy, with_lse, monkeypatch):
    launched = set()
    run = InterpretedFunction.run

    def noted(self, *args, **options):
        launched.add(self.__name__)
        return run(self, *args, **options)

    monkeypatch.setenv("NEXUS_SGLANG_KERNELS", "triton")
    monkeypatch.setattr(InterpretedFunction, "run", noted)
    b = bench(policy, with_lse=with_lse)
    seq = b.sequence(1, 300, budget=80)
    other = b.sequence(2, 300, budget=80)
    launched.clear()
    b.evictor.warm_up()
    warmed = set(launched)
    launched.clear()
    b.rows.rebuild(1)  # after which the log-sum-exp of its queries does not hold any more
    rows = set(launched)  # those run at each admission
    for i, each in enumerate((seq, other)):
        launched.clear()
        b.evictor.after_prefill(each, protected=30, room=0)
        assert each.events and launched - rows and launched - rows <= warmed
        if policy != "expected-attention":
            assert ("_lse_kernel" in launched) == (i == 0 or not with_lse), "keys are read once where it holds"


class Wild(Policy):
    """Numbers no policy should return; NaN once the sequence is long."""

    name = "wild"
    source = "test"
    needs_attention = False

    def weigh(self, evidence, blocks):
        g = torch.Generator().manual_seed(blocks.event)
        values = [torch.inf, -torch.inf, 0.0, -0.0, -1.0, 1e308, 5e-324] + [torch.nan] * (blocks.event > 300)
        return Weighing(torch.tensor(values).double()[torch.randint(len(values), blocks.index.shape, generator=g)])


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_nan_in_decode_frees_no_slot_twice_and_is_reported_once(kernels, monkeypatch, caplog):
    monkeypatch.setenv("NEXUS_SGLANG_KERNELS", kernels)
    b = bench()
    b.evictor.policy = Wild()
    seq = b.sequence(1, 300, budget=80)
    b.evictor.after_prefill(seq, protected=0, room=0)
    for length in range(301, 360):
        b.grow(1, length)
        b.evictor.after_decode(seq, lambda: 0)
        b.table.check_integrity()
        b.rows.check_integrity()
    assert b.evictor.counters.events_by_recency == 0, "decode waits for nothing"
    b.evictor.policy = make_policy("random", {})
    for row in (2, 3):
        b.evictor.after_prefill(b.sequence(row, 200, budget=80), 0, 0)
        assert 0 < b.evictor.counters.events_by_recency < seq.evictions
    assert caplog.text.count("said NaN") == 1


class Counted(TorchDispatchMode):
    """Counts operations of PyTorch that would start work on a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not (func.is_view or "detach" in func.name() or "empty" in func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["nexus", "nexus-paper", "h2o", "keydiff"])
def test_an_event_starts_as_much_work_for_many_layers_as_for_one(policy, monkeypatch):
    monkeypatch.setenv("NEXUS_SGLANG_KERNELS", "triton")
    run = InterpretedFunction.run
    launches = []
    seen = []

    def counted(self, *args, **options):
        launches.append(self.__name__)
        with torch.utils._python_dispatch._disable_current_modes():  # the interpreter's own copies
            return run(self, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    for layers in (1, 6):
        b = bench(policy, layers=layers)
        seq = b.sequence(1, 300, budget=80)
        b.evictor.after_prefill(seq, protected=0, room=0)
        for length in range(301, 313):
            b.grow(1, length)
        launches.clear()
        with Counted() as counted_ops:
            b.evictor.after_decode(seq, lambda: 0)
        assert seq.evictions == 2
        seen.append((sorted(launches), counted_ops.count))
    print(policy, len(seen[0][0]), seen[0][1])
    assert seen[0] == seen[1] and seen[0][0]
