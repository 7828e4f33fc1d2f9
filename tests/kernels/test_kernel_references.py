"""The torch references say what oracles and the package say, and dispatch takes the one that was asked for."""

import pytest
import torch

from nexus_sglang.kernels import block_attention, dispatch, head_attention, page_table, reservoir, walk_weights
from nexus_sglang.kernels.compact_rows import compact_rows
from nexus_sglang.kv_slots.compact_rows import CompactRows
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.policy.parts import draws
from tests.support import oracles_policy


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_draws_of_a_batch_are_those_of_each_request():
    identity = torch.randint(-(2**63), 2**63 - 1, (2, 50), generator=generator())
    for seed in (0, 7, 2**63 + 1):
        batch = reservoir.draw(seed, identity, torch.tensor([5, 4096]), 3)
        for b, event in enumerate((5, 4096)):
            assert torch.equal(batch[b], draws.uniforms(seed, identity[b], event, 3))


@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0])
def test_priorities_follow_their_laws(beta):
    weights = torch.rand(1, 60, generator=generator())
    weights[0, 3] = 0
    identity = torch.arange(60)[None]
    event = torch.tensor([9])
    length = torch.tensor([60])
    u = draws.uniforms(1, identity[0], 9, 5)
    got = [reservoir.priorities(weights, identity, event, length, 1, law, 5, beta)[0] for law in reservoir.LAWS]
    assert torch.equal(got[0], oracles_policy.exponential_keys(weights[0], u))
    assert torch.equal(got[1], oracles_policy.sequential_poisson(weights[0], u, beta))


@pytest.mark.parametrize("seed", range(5))
def test_ranks_are_a_stable_sort_of_the_candidates(seed):
    g = generator(seed)
    values = torch.randint(0, 4, (40,), generator=g).double()
    candidates = torch.rand(40, generator=g) < 0.8
    worst_first = torch.argsort(values, stable=True)  # among equals the older
    best_first = worst_first[candidates[worst_first]].flip(0).tolist()
    ranks = reservoir.ranks(values[None], candidates[None], torch.tensor([40]))[0].tolist()
    assert [best_first.index(j) if candidates[j] else 40 for j in range(40)] == ranks


def test_walk_weights_follow_the_paper():
    g = generator(1)
    attention = torch.rand(6, 30, generator=g)
    candidates = torch.rand(30, generator=g) < 0.8
    wanted = oracles_policy.window_weights(attention, candidates, 3, 0.5, 1e-6)
    padded = torch.full((2, 8, 40), 9.0)
    padded[0, :6, :30] = attention
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[0, :30] = candidates
    got = walk_weights.walk_weights(padded, torch.tensor([6, 1]), torch.tensor([30, 1]), mask, 3, 0.5, 1e-6)
    assert torch.equal(got[0, :30], wanted) and bool((got[0, 30:] == 0).all())


@pytest.mark.parametrize("reduction", ["max", "sum"])
def test_rows_are_block_attention_reduced(reduction):
    g = generator(2)
    pools = torch.randn(3, 60, 2, 16, generator=g)
    queries = torch.randn(3, 4, 6, 16, generator=g)
    positions = torch.tensor([p for p in range(50) if p % 5])
    index, ordinal = torch.unique_consecutive(positions // 8, return_inverse=True)
    slots = torch.randperm(60, generator=g)[: len(positions)]
    at = torch.arange(46, 50)
    cells = ordinal * 8 + positions % 8
    fixed = (at, positions, cells, len(index), 8, 0.25)
    layers = [(q, pool[slots]) for q, pool in zip(queries, pools, strict=True)]
    heads = torch.cat([head_attention.block_attention(*layer, *fixed) for layer in layers], dim=1)
    wanted = heads.amax(dim=1) if reduction == "max" else heads.sum(dim=1)
    lses = [torch.logsumexp(scores(*layer, at, positions), dim=-1) for layer in layers]
    for lse in (None, torch.stack(lses)):
        out = torch.zeros(4, len(index))
        block_attention.block_attention_rows(
            queries, list(pools), slots, at, positions, ordinal, len(index), 8, 0.25, out, reduction, lse
        )
        assert torch.allclose(out, wanted, rtol=0, atol=1e-6)


def scores(queries, keys, at, positions):
    every = torch.einsum("whd,thd->wht", queries, keys.repeat_interleave(3, dim=1)) * 0.25
    return every.masked_fill(positions > at[:, None, None], -torch.inf)


def test_table_and_rows_are_the_memorys():
    table = PageTable(40, 25)
    virtual = table.allocate(20)
    table.evict(virtual[4:9])
    requests = torch.zeros(3, 24, dtype=torch.int32)
    requests[1, :20] = virtual.to(torch.int32)
    rows = CompactRows(requests, table)
    rows.length[1] = 20
    rows.rebuild(1)
    slots = torch.zeros_like(rows.slots)
    positions = torch.zeros_like(rows.positions)
    counts = compact_rows(requests, torch.tensor(rows.length), table.v2p, slots, positions)
    assert counts.tolist() == rows.resident
    assert torch.equal(slots, rows.slots) and torch.equal(positions, rows.positions)
    mine = table.v2p.clone()
    freed = torch.zeros(15, dtype=torch.int64)
    assert int(page_table.unmap(mine, virtual, freed)) == table.evict(virtual) == 15
    assert torch.equal(mine, table.v2p) and torch.equal(freed, table.free_physical[-15:])


def test_dispatch_takes_torch_on_the_cpu(monkeypatch):
    ran = []
    function = dispatch.dispatch(lambda a, x: ran.append("torch"), lambda a, x: ran.append("triton"))
    for value in ("", "torch"):
        monkeypatch.setenv(dispatch.VARIABLE, value)
        function(1, x=torch.zeros(1))
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    function(1, torch.zeros(1))
    assert ran == ["torch", "torch", "triton"]


@pytest.mark.parametrize("value, message", [("cuda", "set it to torch or triton"), ("triton", "TRITON_INTERPRET=1")])
def test_dispatch_refuses_what_cannot_run(monkeypatch, value, message):
    monkeypatch.setenv(dispatch.VARIABLE, value)
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    with pytest.raises(dispatch.KernelChoiceError, match=message):
        page_table.translate(torch.zeros(2).long(), torch.zeros(1).long())


def test_kernels_import_nothing_of_the_rest():
    import ast
    from pathlib import Path

    for path in Path(dispatch.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, path
                names = [node.module or ""] if node.level == 0 else []
            assert not [name for name in names if name.split(".")[0] in ("nexus_sglang", "sglang")], path
