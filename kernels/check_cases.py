"""One random case per kernel: run the Triton kernel and compare it with its torch reference on the CPU.

Shared by :mod:`.check` and the tests. A case is made from the device (``cpu`` in the interpreter, or ``cuda``), a seed
and shapes; its inputs depend on seed and shapes only. What a case's error counts is in its docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from . import block_attention, compact_rows, distinctiveness, page_table, query_ring, reservoir, walk_weights
from .dispatch import Dispatched, interpreted

R = TypeVar("R")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Outcome(NamedTuple):
    """What came of one case.

    Attributes:
        error: the largest error, in the unit that the case's docstring names.
        tolerance: what is allowed, in the same unit.
    """

    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the error is allowed; NaN is not."""
        return self.error <= self.tolerance


def _copy(argument: Any, device: str) -> Any:
    """A tensor, or each tensor of a list, copied to the device; anything else as it is."""
    if isinstance(argument, list):
        return [_copy(x, device) for x in argument]
    return argument.to(device, copy=True) if isinstance(argument, torch.Tensor) else argument


def _pair(device: str, *arguments: Any) -> tuple[list[Any], list[Any]]:
    """The arguments for both sides.

    Args:
        device: where the kernel runs.
        arguments: tensors on the CPU, lists of them, and anything else.

    Returns:
        The arguments with the tensors copied to the device, and with copies on the CPU.
    """
    return [_copy(x, device) for x in arguments], [_copy(x, "cpu") for x in arguments]


def _both(function: Dispatched[..., R], here: list[Any], there: list[Any], *more: Any) -> tuple[R, R]:
    """Run both implementations.

    Args:
        function: the kernel and its reference.
        here: the kernel's first arguments.
        there: the reference's first arguments.
        more: the other arguments, of both.

    Returns:
        What the kernel returned, and what the reference returned.
    """
    return function.kernel(*here, *more), function.reference(*there, *more)


def _unequal(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """How many numbers differ, over pairs of tensors of one shape."""
    return float(sum(int((a.cpu() != b).sum()) for a, b in zip(got, wanted, strict=True)))


def _with_holes(g: torch.Generator, length: int, window: int) -> torch.Tensor:
    """int64 ``[T]``: positions left when a fifth of ``length`` tokens was evicted; the newest ``window`` are kept."""
    resident = torch.rand(length, generator=g) < 0.8
    resident[-window:] = True
    return torch.nonzero(resident).squeeze(1)


def _visible_lse(
    queries: torch.Tensor,
    keys: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
) -> torch.Tensor:
    """Log-sum-exp as an attention backend would report it.

    Args:
        queries: ``[L, W, Hq, D]``.
        keys: ``[L, T, Hkv, D]``.
        query_positions: int64 ``[W]``.
        key_positions: int64 ``[T]``.

    Returns:
        float32 ``[L, W, Hq]``.
    """
    every_head = keys.float().repeat_interleave(queries.shape[2] // keys.shape[2], dim=2)
    scores = torch.einsum("lwhd,lthd->lwht", queries.float(), every_head) * queries.shape[3] ** -0.5
    return scores.masked_fill_(key_positions > query_positions[:, None, None], -torch.inf).logsumexp(-1)


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
    """Error relative to the block's value + 1/N. Sums are divided by layers x heads.

    A fifth of the tokens is evicted, so blocks are ragged and slots in no order. Half precision is exact in the
    products; what differs is the order of single-precision sums, which tensor cores also round.

    Args:
        device: where the kernel runs.
        seed: of the inputs.
        window: W, queries.
        kv_heads: key heads.
        group: query heads per key head.
        dim: numbers per head.
        blocks: before the eviction.
        block_size: tokens.
        dtype: of queries and keys, a key of :data:`DTYPES`.
        reduction: ``max`` or ``sum``.
        given_lse: whether the log-sum-exp is handed in.
        layers: pools.
    """
    g = torch.Generator().manual_seed(seed)
    length = blocks * block_size
    positions = _with_holes(g, length, window)
    index, ordinal = torch.unique_consecutive(positions // block_size, return_inverse=True)
    query_positions = torch.arange(max(length - window, 0), length)
    queries = (2 * torch.randn(layers, len(query_positions), kv_heads * group, dim, generator=g)).to(DTYPES[dtype])
    pools = [torch.randn(length + 1, kv_heads, dim, generator=g).to(DTYPES[dtype]) for _ in range(layers)]
    slots = (torch.randperm(length, generator=g)[: len(positions)] + 1).to(torch.int32)
    keys = torch.stack([pool[slots] for pool in pools])
    lse = _visible_lse(queries, keys, query_positions, positions) if given_lse else None
    start = torch.rand(len(query_positions), len(index), generator=g) / len(index)  # as left by other layers
    tensors = (queries, pools, slots, query_positions, positions, ordinal)
    here, there = _pair(device, *tensors, len(index), block_size, dim**-0.5, start, reduction, lse)
    got, wanted = _both(block_attention.block_attention_rows, here, there)
    pairs = layers * kv_heads * group if reduction == "sum" else 1
    error = ((got.cpu() - wanted).abs() / pairs) / (wanted / pairs + 1 / len(index))
    return Outcome(float(error.max()), 1e-5 if interpreted() else 1e-4)


def directions(
    device: str,
    seed: int,
    kv_heads: int,
    dim: int,
    blocks: int,
    block_size: int,
    dtype: str,
    layers: int = 2,
) -> Outcome:
    """Absolute error, of a number in [0, 2]. Blocks are ragged, slots in no order; one block in ten is empty.

    Args:
        device: where the kernel runs.
        seed: of the inputs.
        kv_heads: heads of the vectors.
        dim: numbers per head.
        blocks: N.
        block_size: most tokens per block.
        dtype: of the vectors, a key of :data:`DTYPES`.
        layers: pools.
    """
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, block_size + 1, (blocks,), generator=g)
    sizes[1:][torch.rand(blocks - 1, generator=g) < 0.1] = 0
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0))).to(torch.int32)
    tokens = int(starts[-1])
    lean = torch.randn(kv_heads, dim, generator=g)  # vectors share a direction, as keys do
    pools = [(torch.randn(tokens + 9, kv_heads, dim, generator=g) + lean).to(DTYPES[dtype]) for _ in range(layers)]
    slots = torch.randperm(tokens + 8, generator=g)[:tokens] + 1
    pools[0][slots[:1]] = 0
    here, there = _pair(device, pools, slots, starts, block_size)
    got, wanted = _both(distinctiveness.block_distinctiveness, here, there)
    return Outcome(float((got.cpu() - wanted).abs().max()), 1e-5)


def walk(device: str, seed: int, batch: int, window: int, blocks: int, steps: int) -> Outcome:
    """Relative error; both sides compute in double precision. Windows and lengths are ragged.

    Args:
        device: where the kernel runs.
        seed: of the inputs.
        batch: requests.
        window: W, rows of the longest.
        blocks: N, of the longest.
        steps: rows the walk takes.
    """
    g = torch.Generator().manual_seed(seed)
    rows = torch.rand(batch, window, blocks, generator=g) ** 6
    windows = torch.randint(1, window + 1, (batch,), generator=g)
    lengths = torch.randint(1, blocks + 1, (batch,), generator=g)
    windows[0] = window
    lengths[0] = blocks
    candidates = torch.rand(batch, blocks, generator=g) < 0.9
    here, there = _pair(device, rows, windows, lengths, candidates)
    got, wanted = _both(walk_weights.walk_weights, here, there, steps, 0.5, 1e-6)
    return Outcome(float(((got.cpu() - wanted).abs() / wanted.clamp_min(1e-12)).max()), 1e-12)


class RandomBlocks(NamedTuple):
    """Blocks of a batch of requests, of ragged lengths.

    Attributes:
        weights: float64 ``[B, N]``, with a heavy tail and some zeros.
        identity: int64 ``[B, N]``.
        events: int64 ``[B]``.
        lengths: int64 ``[B]``; the first is N.
        candidates: bool ``[B, N]``, nine of ten.
    """

    weights: torch.Tensor
    identity: torch.Tensor
    events: torch.Tensor
    lengths: torch.Tensor
    candidates: torch.Tensor


def random_blocks(g: torch.Generator, batch: int, blocks: int) -> RandomBlocks:
    """Made-up blocks.

    Args:
        g: source of the numbers.
        batch: B, requests.
        blocks: N, of the longest.
    """
    weights = torch.rand(batch, blocks, generator=g, dtype=torch.float64) ** 8 / blocks
    weights[torch.rand(batch, blocks, generator=g) < 0.02] = 0
    identity = torch.randint(-(2**63), 2**63 - 1, (batch, blocks), generator=g)
    lengths = torch.randint(1, blocks + 1, (batch,), generator=g)
    lengths[0] = blocks
    events = torch.randint(0, 2**33, (batch,), generator=g)
    return RandomBlocks(weights, identity, events, lengths, torch.rand(batch, blocks, generator=g) < 0.9)


def draws(device: str, seed: int, batch: int, blocks: int, count: int) -> Outcome:
    """Numbers whose bits differ.

    Args:
        device: where the kernel runs.
        seed: of the inputs.
        batch: requests.
        blocks: N, of the longest.
        count: draws per block.
    """
    made = random_blocks(torch.Generator().manual_seed(seed), batch, blocks)
    key = (seed * 0x9E3779B97F4A7C15) % 2**64
    here, there = _pair(device, key, made.identity, made.events, count)
    got, wanted = _both(reservoir.draw, here, there)
    return Outcome(_unequal([got], [wanted]), 0)


def priorities(device: str, seed: int, batch: int, blocks: int, law: str, count: int, beta: float) -> Outcome:
    """Error relative to max(value, 1); infinite where only one side is. Libraries' logarithms differ in the last place.

    Args:
        device: where the kernel runs.
        seed: of the inputs.
        batch: requests.
        blocks: N, of the longest.
        law: one of ``reservoir.LAWS``.
        count: draws per block.
        beta: sharpness of sequential Poisson.
    """
    made = random_blocks(torch.Generator().manual_seed(seed), batch, blocks)
    here, there = _pair(device, made.weights, made.identity, made.events, made.lengths)
    got, wanted = _both(reservoir.priorities, here, there, seed, law, count, beta)
    got = got.cpu()
    error = torch.where(got == wanted, 0.0, (got - wanted).abs() / wanted.abs().clamp_min(1))
    return Outcome(float(error.max()), 1e-13)


def ranks(device: str, seed: int, batch: int, blocks: int, levels: int) -> Outcome:
    """Ranks that differ, on values with many ties and infinities among them.

    Args:
        device: where the kernel runs.
        seed: of the inputs.
        batch: requests.
        blocks: N, of the longest.
        levels: distinct values but for the infinities.
    """
    g = torch.Generator().manual_seed(seed)
    made = random_blocks(g, batch, blocks)
    values = torch.randint(0, levels, (batch, blocks), generator=g).double()
    values[torch.rand(batch, blocks, generator=g) < 0.1] = -torch.inf
    values[torch.rand(batch, blocks, generator=g) < 0.05] = torch.inf
    here, there = _pair(device, values, made.candidates, made.lengths)
    got, wanted = _both(reservoir.ranks, here, there)
    return Outcome(_unequal([got], [wanted]), 0)


def _page_table(g: torch.Generator, virtual_size: int) -> torch.Tensor:
    """int64 ``[V + 1]``: a random page table, 60 % of the ids with a slot, no slot twice."""
    v2p = torch.zeros(virtual_size + 1, dtype=torch.int64)
    mapped = torch.randperm(virtual_size, generator=g)[: max(virtual_size * 6 // 10, 1)] + 1
    v2p[mapped] = torch.randperm(len(mapped), generator=g) + 1
    return v2p


def compact(device: str, seed: int, rows: int, width: int, hinted: bool) -> Outcome:
    """Slots, positions and counts that differ, places that must stay untouched included. Rows are ragged, one is empty.

    Args:
        device: where the kernel runs.
        seed: of the inputs.
        rows: R.
        width: virtual ids per row.
        hinted: whether the host says how long the longest row is.
    """
    g = torch.Generator().manual_seed(seed)
    v2p = _page_table(g, max(2 * width, 1))
    virtual = torch.randint(1, len(v2p), (rows, width), generator=g, dtype=torch.int32)
    lengths = torch.randint(0, width + 1, (rows,), generator=g, dtype=torch.int32)
    lengths[-1] = 0
    lengths[0] = width
    blank = torch.full((rows, width), -7, dtype=torch.int32)
    here, there = _pair(device, virtual, lengths, v2p, blank, blank)
    longest = int(lengths.max()) if hinted else None
    got, wanted = _both(compact_rows.compact_rows, here, there, longest)
    return Outcome(_unequal([got, *here[3:]], [wanted, *there[3:]]), 0)


def table(device: str, seed: int, virtual_size: int, ids: int, short: int) -> Outcome:
    """Numbers that differ after translate and unmap: slots, table, list of freed slots and count.

    Args:
        device: where the kernel runs.
        seed: of the inputs.
        virtual_size: V.
        ids: how many ids are unmapped.
        short: by how many places the list is too short.
    """
    g = torch.Generator().manual_seed(seed)
    v2p = _page_table(g, virtual_size)
    virtual = (torch.randperm(virtual_size, generator=g) + 1)[: min(ids, virtual_size)].to(torch.int32)
    room = max(int((v2p[virtual.long()] > 0).sum()) - short, 0)
    here, there = _pair(device, v2p, virtual, torch.zeros(room, dtype=torch.int64))
    slots_here, slots_there = _both(page_table.translate, here[:2], there[:2])
    count_here, count_there = _both(page_table.unmap, here, there)
    return Outcome(_unequal([slots_here, count_here, *here], [slots_there, count_there, *there]), 0)


def ring(
    device: str,
    seed: int,
    tokens: int,
    kept: int,
    heads: int,
    dim: int,
    window: int,
    dtype: str,
    given_lse: bool,
) -> Outcome:
    """Numbers that differ anywhere in the rings.

    Args:
        device: where the kernel runs.
        seed: of the inputs.
        tokens: T, of the pass.
        kept: how many of them are chosen; 0: all of them, in order, as in decode.
        heads: query heads.
        dim: numbers per head.
        window: W, places per ring.
        dtype: of the queries, a key of :data:`DTYPES`.
        given_lse: whether the log-sum-exp is kept too.
    """
    g = torch.Generator().manual_seed(seed)
    n = kept or tokens
    where = torch.randperm((n + 3) * window, generator=g)[:n]
    chosen = torch.randperm(tokens, generator=g)[:n] if kept else None
    packed = torch.randn(tokens, heads + 2, dim, generator=g).to(DTYPES[dtype])  # as a model's projection leaves them
    blank = torch.full((n + 3, window, heads, dim), -7.0).to(DTYPES[dtype])
    lse_ring = torch.full((n + 3, window, heads), -7.0) if given_lse else None
    lse = torch.randn(tokens, heads, generator=g) if given_lse else None
    here, there = _pair(device, blank, packed, where // window, where % window, chosen, lse_ring, lse)
    for side in (here, there):
        side[1] = side[1][:, :heads]
    _both(query_ring.keep_queries, here, there)
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
"""The case of each kernel, by the name that :mod:`.check` prints."""
