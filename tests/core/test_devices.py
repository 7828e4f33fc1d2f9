"""Every tensor of an eviction is on the table's device, and the host waits only where the evictor says it does."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from nexus_sglang.kv_slots.block_ledger import BlockLedger
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.policy import POLICIES, Policy, Weighing
from tests.support.bench import bench
from tests.support.pretend_device import DEVICE, PretendDevice

READ = ["device.download", "device.download"]
"""An event that reads the row: its positions, and how past events went."""


def history(b, steps: int = 40) -> list[tuple]:
    """A prompt, then decode; every event."""
    seq = b.sequence(1, 400, budget=80)
    b.evictor.after_prefill(seq, protected=30, room=0)
    for length in range(401, 401 + steps):
        b.grow(1, length)
        b.evictor.after_decode(seq, lambda: 30)
    return seq.events


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_tensor_without_a_device(policy):
    """Inside the context a tensor made without a device has no data, and the next operation on it fails."""
    wanted = history(bench(policy))
    b = bench(policy)
    seq = b.sequence(1, 400, budget=80)
    with torch.device("meta"):
        b.evictor.after_prefill(seq, protected=30, room=0)
        for length in range(401, 441):
            b.grow(1, length)
            b.evictor.after_decode(seq, lambda: 30)
    assert seq.events == wanted


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_device_and_no_wait_in_decode(policy, monkeypatch):
    monkeypatch.setenv("NEXUS_SGLANG_KERNELS", "torch")
    wanted = history(bench(policy))
    with PretendDevice() as device:
        b = bench(policy, device=DEVICE)
        seq = b.sequence(1, 400, budget=80)
        for length in range(400, 441):
            b.grow(1, length) if length > 400 else None
            device.waits.clear()
            b.evictor.after_decode(seq, lambda: 30) if length > 400 else b.evictor.after_prefill(seq, 30, 0)
            assert device.waits == (READ if length == 400 else [])
        assert seq.evictions > 4 and seq.events == wanted
        b.table.check_integrity()
        b.rows.check_integrity()


@pytest.mark.parametrize("answer", ["nan", "raises"])
def test_a_policy_that_fails_makes_nobody_wait(answer, monkeypatch):
    class Failing(Policy):
        name = "failing"
        source = "test"

        def weigh(self, evidence, blocks):
            if answer == "raises":
                raise ValueError(answer)
            return Weighing(evidence.attention.sum(0) * torch.nan)

    monkeypatch.setenv("NEXUS_SGLANG_KERNELS", "torch")
    with PretendDevice() as device:
        b = bench(device=DEVICE)
        b.evictor.policy = Failing()
        seq = b.sequence(1, 400, budget=80)
        b.evictor.after_prefill(seq, 30, 0)
        device.waits.clear()
        for length in range(401, 441):
            b.grow(1, length)
            b.evictor.after_decode(seq, lambda: 30)
        assert device.waits == [] and seq.evictions > 4
        b.evictor.catch_up()
        assert b.evictor.counters.events_by_recency == seq.evictions


def test_rows_grow_in_decode_without_a_wait():
    with PretendDevice() as device:
        b = bench(device=DEVICE)
        for row, length in ((1, 40), (2, 77), (3, 5)):
            b.sequence(row, length, budget=80)
        for row, length in ((1, 40), (3, 5)):
            b.req_to_token[row, length : length + 1] = b.table.allocate(1).int()
        device.waits.clear()
        b.rows.extend([1, 3], [41, 6])
        assert device.waits == []
        b.rows.check_integrity()
        b.table.check_integrity()


class CpuArguments(TorchDispatchMode):
    """Operations on CUDA tensors that were given one on the CPU, which PyTorch copies and waits for."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kinds = {x.device.type for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)}
        if kinds == {"cpu", "cuda"}:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_giving_out_ids_copies_nothing_from_the_host():
    """PyTorch makes a number assigned by index a CPU tensor where the target is on CUDA; no other device shows it."""
    with FakeTensorMode(), CpuArguments() as given:
        for width in (0, 2):
            table = PageTable(64, 32, "cuda")
            ledger = BlockLedger(64, width, "cuda")
            ledger.forget(table.allocate(5))
        assert given.seen == []
        ledger.weight[table.allocate(5)] = torch.nan
        assert given.seen == ["aten.index_put_.default"]


def test_the_pretended_device_finds_faults():
    with PretendDevice() as device:
        here = torch.arange(6, device=DEVICE)
        with pytest.raises(AssertionError, match="two devices"):
            here + torch.ones(6)
        assert device.waits == []
        here[here > 3]
        int(here.sum())
        here.cpu()
        torch.nonzero(here)
        torch.ones(6).to(DEVICE)
        assert device.waits == ["test"] * 5
        torch.ones(6).to(DEVICE, non_blocking=True)
        here[torch.ones(2, dtype=torch.long, device=DEVICE)]
        assert len(device.waits) == 5
