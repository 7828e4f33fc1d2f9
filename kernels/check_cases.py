"""One random case per kernel: run the Triton kernel, compare with its torch reference on the CPU.

Shared by :mod:`.check` and the tests. Every function takes the device, a seed and shapes, and returns an
:class:`Outcome`; inputs depend on the seed only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import block_attention, compact_rows, distinctiveness, page_table, query_ring, reservoir, walk_weights
from .dispatch import interpreted

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Outcome(NamedTuple):
    """Largest error of one case and what is allowed, in the unit its function's docstring names."""

    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


def _pair(device: str, *tensors) -> tuple[list, list]:
    """The tensors on the device and separate copies on the CPU; what is no tensor stays as it is."""
    moved = [x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for x in tensors]
    return moved, [x.clone() if isinstance(x, torch.Tensor) else x for x in tensors]


def _unequal(got, wanted) -> float:
    """How many numbers differ, over pairs of tensors."""
    return float(sum(int((a.cpu() != b).sum()) for a, b in zip(got, wanted, strict=True)))


def attention(
    device: str,
    seed: int,
    window: int,
    kv_heads: int,
    group: int,
    dim: int,
    blocks: int,
    block_size: int,
    dtype: str,
    reduction: str,
    given_lse: bool,
    layers: int = 2,
) -> Outcome:
    """Error relative to the block's value + 1/N, over ``layers`` layers; sums are divided by layers x heads.

    A fifth of the tokens is evicted, so blocks are ragged and slots in no order. Half precision is exact in the
    products; what differs is the order of single-precision sums, which tensor cores also round.
    """
    g = torch.Generator().manual_seed(seed)
    length, heads = blocks * block_size, kv_heads * group
    resident = torch.rand(length, generator=g) < 0.8
    resident[-window:] = True
    positions = torch.nonzero(resident).squeeze(1)
    index, ordinal = torch.unique_consecutive(positions // block_size, return_inverse=True)
    query_positions = torch.arange(max(length - window, 0), length)
    queries = (2 * torch.randn(layers, len(query_positions), heads, dim, generator=g)).to(DTYPES[dtype])
    pools = [torch.randn(length + 1, kv_heads, dim, generator=g).to(DTYPES[dtype]) for _ in range(layers)]
    slots = (torch.randperm(length, generator=g)[: len(positions)] + 1).to(torch.int32)
    scale, lse = dim**-0.5, None
    if given_lse:
        k = torch.stack([pool[slots] for pool in pools]).float().repeat_interleave(group, dim=2)
        scores = torch.einsum("lwhd,lthd->lwht", queries.float(), k) * scale
        lse = scores.masked_fill_(positions > query_positions[:, None, None], -torch.inf).logsumexp(-1)
    start = torch.rand(len(query_positions), len(index), generator=g) / len(index)  # as left by other layers
    here, there = _pair(device, queries, slots, query_positions, positions, ordinal, start)
    pools_here, fixed, attend = (
        [pool.to(device) for pool in pools],
        (len(index), block_size, scale),
        block_attention.block_attention_rows,
    )
    got = attend.kernel(
        here[0], pools_here, *here[1:5], *fixed, here[5], reduction, None if lse is None else lse.to(device)
    )
    wanted = attend.reference(there[0], pools, *there[1:5], *fixed, there[5], reduction, lse)
    pairs = layers * heads if reduction == "sum" else 1
    error = ((got.cpu() - wanted).abs() / pairs) / (wanted / pairs + 1 / len(index))
    return Outcome(float(error.max()), 1e-5 if interpreted() else 1e-4)


def directions(
    device: str, seed: int, kv_heads: int, dim: int, blocks: int, block_size: int, dtype: str, layers: int = 2
) -> Outcome:
    """Absolute error, of a number in [0, 2]. Blocks are ragged, slots in no order; one block in ten is empty."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, block_size + 1, (blocks,), generator=g)
    sizes[1:][torch.rand(blocks - 1, generator=g) < 0.1] = 0
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0))).to(torch.int32)
    tokens = int(starts[-1])
    lean = torch.randn(kv_heads, dim, generator=g)  # vectors share a direction, as keys do
    pools = [(torch.randn(tokens + 9, kv_heads, dim, generator=g) + lean).to(DTYPES[dtype]) for _ in range(layers)]
    slots = torch.randperm(tokens + 8, generator=g)[:tokens] + 1
    pools[0][slots[:1]] = 0
    here, there = _pair(device, slots, starts)
    measured = distinctiveness.block_distinctiveness
    got = measured.kernel([pool.to(device) for pool in pools], *here, block_size).cpu()
    wanted = measured.reference(pools, *there, block_size)
    return Outcome(float((got - wanted).abs().max()), 1e-5)


def walk(device: str, seed: int, batch: int, window: int, blocks: int, steps: int) -> Outcome:
    """Relative error; both sides compute in double precision. Windows and lengths are ragged."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.rand(batch, window, blocks, generator=g) ** 6
    windows = torch.randint(1, window + 1, (batch,), generator=g)
    lengths = torch.randint(1, blocks + 1, (batch,), generator=g)
    windows[0], lengths[0] = window, blocks
    candidates = torch.rand(batch, blocks, generator=g) < 0.9
    here, there = _pair(device, rows, windows, lengths, candidates)
    got = walk_weights.walk_weights.kernel(*here, steps, 0.5, 1e-6).cpu()
    wanted = walk_weights.walk_weights.reference(*there, steps, 0.5, 1e-6)
    return Outcome(float(((got - wanted).abs() / wanted.clamp_min(1e-12)).max()), 1e-12)


def _blocks(g: torch.Generator, batch: int, blocks: int) -> tuple[torch.Tensor, ...]:
    """Weights with a heavy tail and some zeros, identities, events, ragged lengths, candidates."""
    weights = torch.rand(batch, blocks, generator=g, dtype=torch.float64) ** 8 / blocks
    weights[torch.rand(batch, blocks, generator=g) < 0.02] = 0
    identity = torch.randint(-(2**63), 2**63 - 1, (batch, blocks), generator=g)
    lengths = torch.randint(1, blocks + 1, (batch,), generator=g)
    lengths[0] = blocks
    events = torch.randint(0, 2**33, (batch,), generator=g)
    return weights, identity, events, lengths, torch.rand(batch, blocks, generator=g) < 0.9


def draws(device: str, seed: int, batch: int, blocks: int, count: int) -> Outcome:
    """Numbers whose bits differ."""
    _, identity, events, _, _ = _blocks(torch.Generator().manual_seed(seed), batch, blocks)
    key = (seed * 0x9E3779B97F4A7C15) % 2**64
    here, there = _pair(device, identity, events)
    return Outcome(
        _unequal([reservoir.draw.kernel(key, *here, count)], [reservoir.draw.reference(key, *there, count)]), 0
    )


def priorities(device: str, seed: int, batch: int, blocks: int, law: str, count: int, beta: float) -> Outcome:
    """Error relative to max(value, 1): the libraries' logarithms may differ in the last place. Infinite if only one is."""
    weights, identity, events, lengths, _ = _blocks(torch.Generator().manual_seed(seed), batch, blocks)
    here, there = _pair(device, weights, identity, events, lengths)
    got = reservoir.priorities.kernel(*here, seed, law, count, beta).cpu()
    wanted = reservoir.priorities.reference(*there, seed, law, count, beta)
    error = torch.where(got == wanted, 0.0, (got - wanted).abs() / wanted.abs().clamp_min(1))
    return Outcome(float(error.max()), 1e-13)


def ranks(device: str, seed: int, batch: int, blocks: int, levels: int) -> Outcome:
    """Ranks that differ, on values of few ``levels`` (many ties) with infinities among them."""
    g = torch.Generator().manual_seed(seed)
    _, _, _, lengths, eligible = _blocks(g, batch, blocks)
    values = torch.randint(0, levels, (batch, blocks), generator=g).double()
    values[torch.rand(batch, blocks, generator=g) < 0.1] = -torch.inf
    values[torch.rand(batch, blocks, generator=g) < 0.05] = torch.inf
    here, there = _pair(device, values, eligible, lengths)
    return Outcome(_unequal([reservoir.ranks.kernel(*here)], [reservoir.ranks.reference(*there)]), 0)


def _table(g: torch.Generator, virtual_size: int) -> torch.Tensor:
    """int64 ``[V + 1]``: a random page table, 60 % mapped, no slot twice."""
    v2p = torch.zeros(virtual_size + 1, dtype=torch.int64)
    mapped = torch.randperm(virtual_size, generator=g)[: max(virtual_size * 6 // 10, 1)] + 1
    v2p[mapped] = torch.randperm(len(mapped), generator=g) + 1
    return v2p


def compact(device: str, seed: int, rows: int, width: int, hinted: bool) -> Outcome:
    """Slots, positions and counts that differ, over ragged rows (an empty one among them), untouched places included."""
    g = torch.Generator().manual_seed(seed)
    v2p = _table(g, max(2 * width, 1))
    virtual = torch.randint(1, len(v2p), (rows, width), generator=g, dtype=torch.int32)
    lengths = torch.randint(0, width + 1, (rows,), generator=g, dtype=torch.int32)
    lengths[-1], lengths[0] = 0, width
    blank = torch.full((rows, width), -7, dtype=torch.int32)
    here, there = _pair(device, virtual, lengths, v2p, blank, blank)
    longest = int(lengths.max()) if hinted else None
    got = compact_rows.compact_rows.kernel(*here, longest)
    wanted = compact_rows.compact_rows.reference(*there, longest)
    return Outcome(_unequal([got, *here[3:]], [wanted, *there[3:]]), 0)


def table(device: str, seed: int, virtual_size: int, ids: int, short: int) -> Outcome:
    """Numbers that differ after translate and unmap (room ``short`` too small): slots, map, list and count."""
    g = torch.Generator().manual_seed(seed)
    v2p = _table(g, virtual_size)
    virtual = (torch.randperm(virtual_size, generator=g) + 1)[: min(ids, virtual_size)].to(torch.int32)
    room = max(int((v2p[virtual.long()] > 0).sum()) - short, 0)
    here, there = _pair(device, v2p, virtual, torch.zeros(room, dtype=torch.int64))
    got = [page_table.translate.kernel(*here[:2]), page_table.unmap.kernel(*here)]
    wanted = [page_table.translate.reference(*there[:2]), page_table.unmap.reference(*there)]
    return Outcome(_unequal([*got, *here], [*wanted, *there]), 0)


def ring(
    device: str, seed: int, tokens: int, kept: int, heads: int, dim: int, window: int, dtype: str, given_lse: bool
) -> Outcome:  # fmt: skip
    """Numbers that differ anywhere in the rings. ``kept`` of the tokens are named; 0: all of them, in order, as in decode."""
    g = torch.Generator().manual_seed(seed)
    n = kept or tokens
    where = torch.randperm((n + 3) * window, generator=g)[:n]
    chosen = torch.randperm(tokens, generator=g)[:n] if kept else None
    packed = torch.randn(tokens, heads + 2, dim, generator=g).to(
        DTYPES[dtype]
    )  # queries as a model's projection leaves them
    blank, blank_lse = (
        torch.full((n + 3, window, heads, dim), -7.0).to(DTYPES[dtype]),
        torch.full((n + 3, window, heads), -7.0),
    )
    lse = (blank_lse, torch.randn(tokens, heads, generator=g)) if given_lse else (None, None)
    here, there = _pair(device, blank, packed, where // window, where % window, chosen, *lse)
    for (rings, queries, *rest), keep in (
        (here, query_ring.keep_queries.kernel),
        (there, query_ring.keep_queries.reference),
    ):
        keep(rings, queries[:, :heads], *rest)
    written = (0, 5) if given_lse else (0,)
    return Outcome(_unequal([here[i] for i in written], [there[i] for i in written]), 0)


KERNELS: dict[str, Callable[..., Outcome]] = {
    "block_attention_rows": attention,
    "block_distinctiveness": directions,
    "walk_weights": walk,
    "reservoir: draws": draws,
    "reservoir: priorities": priorities,
    "reservoir: ranks": ranks,
    "compact_rows": compact,
    "page_table": table,
    "query_ring": ring,
}
