"""Kernel times on a GPU against the byte floor: ``python -m benchmarks.gpu.kernels [--out results.json]``.

The floor of a kernel is the time this GPU's own copy needs for the bytes that must be read and written once. Prints
one JSON object; times are medians in microseconds, warm, L2 flushed between runs. ``kernel_us`` and ``torch_us`` are
the device's, ``host_us`` what the host needs to start the kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from nexus_sglang.kernels import (
    block_attention,
    compact_rows,
    distinctiveness,
    page_table,
    query_ring,
    reservoir,
    walk_weights,
)

GIB = 2**30

Case = tuple[str, dict[str, Any], int, Any, tuple[Any, ...]]
"""Name, shape, bytes that must be moved, the kernel with its reference, and their arguments."""


def bandwidth() -> float:
    """Bytes per second of a device copy of 1 GiB, read and write counted."""
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * GIB / (triton.testing.do_bench(lambda: target.copy_(source), return_mode="median") / 1e3)


LAYERS = 8
"""Measured in one launch, as an event does it; of an 8B model's 32, so that three pool sizes fit one GPU."""


def _pools(tokens: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Per layer a bf16 pool of 8 heads of 128 with five slots per token, and the slots in use, in no order."""
    pools = [torch.randn(tokens * 5, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    return pools, torch.randperm(tokens * 5, device="cuda")[:tokens].int()


def attention_cases() -> Iterator[Case]:
    """32 query and 8 key heads of 128, bf16, window 16, blocks of 32, a fifth of the pool's slots in use."""
    for tokens in (1638, 8192, 32_768, 131_072):  # 1,638: a fifth of an 8K prompt
        pools, slots = _pools(tokens)
        queries = torch.randn(LAYERS, 16, 32, 128, dtype=torch.bfloat16, device="cuda")
        positions = torch.arange(tokens, device="cuda")
        blocks = -(-tokens // 32)
        out = torch.zeros(16, blocks, device="cuda")
        lse = torch.full((LAYERS, 16, 32), 5.0, device="cuda")
        common = (queries, pools, slots, positions[-16:], positions, positions // 32, blocks, 32, 128**-0.5, out, "max")
        moved = LAYERS * tokens * (8 * 128 * 2 + 4 + 8) + 2 * out.numel() * 4 + queries.numel() * 2
        for given in (lse, None):  # without it the keys are read twice; the floor counts them once all the same
            shape = {"tokens": tokens, "layers": LAYERS, "lse_given": given is not None}
            yield "block_attention_rows", shape, moved, block_attention.block_attention_rows, (*common, given)


def direction_cases() -> Iterator[Case]:
    """The attention cases' pools. Vectors are read twice; the floor counts them once all the same."""
    for tokens in (8192, 131_072):
        pools, slots = _pools(tokens)
        starts = torch.arange(0, tokens + 1, 32, dtype=torch.int32, device="cuda")
        moved = LAYERS * (tokens * (8 * 128 * 2 + 4) + tokens // 32 * 8)
        shape = {"tokens": tokens, "layers": LAYERS}
        arguments = (pools, slots, starts, 32)
        yield "block_distinctiveness", shape, moved, distinctiveness.block_distinctiveness, arguments


def other_cases() -> Iterator[Case]:
    """A batch of 64 requests at 4,096 blocks, or 64 rows of 32,768 tokens."""
    b = 64
    n = 4096
    w = 16
    tokens = 32_768
    rows = torch.rand(b, w, n, device="cuda")
    candidates = torch.ones(b, n, dtype=torch.bool, device="cuda")
    windows = torch.full((b,), w, device="cuda")
    lengths = torch.full((b,), n, device="cuda")
    shape = {"requests": b, "blocks": n}
    walked = (rows, windows, lengths, candidates, 3, 0.5, 1e-6)
    yield "walk_weights", shape, rows.numel() * 4 + b * n * 9, walk_weights.walk_weights, walked
    weights = torch.rand(b, n, device="cuda", dtype=torch.float64)
    identity = torch.arange(b * n, device="cuda").view(b, n)
    drawn = (weights, identity, lengths, lengths, 1, "sequential-poisson", 1, 4.0)
    yield "reservoir: priorities", shape, b * n * 24, reservoir.priorities, drawn
    yield "reservoir: ranks", shape, b * n * 13, reservoir.ranks, (weights, candidates, lengths)
    v2p = torch.arange(b * tokens + 1, device="cuda")
    virtual = (torch.randperm(b * tokens, device="cuda") + 1).int().view(b, tokens)
    full = torch.full((b,), tokens, device="cuda")
    compacted = (virtual, full, v2p, torch.empty_like(virtual), torch.empty_like(virtual))
    # Ids are scattered, so a map entry of 8 bytes costs a sector of 32; the floor counts the 8.
    shape = {"rows": b, "tokens": tokens}
    yield "compact_rows", shape, virtual.numel() * (4 + 8 + 8), compact_rows.compact_rows, compacted
    yield "page_table: translate", shape, virtual.numel() * (4 + 8 + 8), page_table.translate, (v2p, virtual)
    # What every layer does in a decode step of 256 requests, with 32 heads of 128.
    ring = torch.zeros(257, w, 32, 128, dtype=torch.bfloat16, device="cuda")
    batch_rows = torch.arange(1, 257, device="cuda")
    queries = ring[1:, 0].contiguous()
    lse = torch.zeros(256, 32, device="cuda")
    kept = (ring, queries, batch_rows, batch_rows % w, None, torch.zeros(257, w, 32, device="cuda"), lse)
    moved = 2 * (queries.numel() * 2 + lse.numel() * 4)
    yield "query_ring", {"requests": 256}, moved, query_ring.keep_queries, kept


def device_us(run: Callable[[], object], repeats: int = 50) -> float:
    """Median time on the device. It sleeps first, so that the host has started everything before the clock does."""
    flushed = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        torch.cuda._sleep(2_000_000)  # cycles: about a millisecond
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def host_us(run: Callable[[], object], repeats: int = 50) -> float:
    """Median time until the call returns, with nothing queued before it."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        before = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - before))
    return statistics.median(times)


def measure(
    name: str, shape: dict[str, Any], moved: int, function: Any, arguments: tuple[Any, ...], rate: float
) -> dict[str, Any]:
    """Time one case.

    Args:
        name: of the kernel.
        shape: what the case is, for the report.
        moved: bytes that must be read and written once.
        function: has ``kernel`` and ``reference``.
        arguments: of both.
        rate: bytes per second of a copy on this GPU.
    """

    def run() -> object:
        return function.kernel(*arguments)

    kernel = device_us(run)
    try:
        reference = device_us(lambda: function.reference(*arguments))
    except torch.cuda.OutOfMemoryError:
        reference = None
    floor = 1e6 * moved / rate
    return {
        "kernel": name,
        **shape,
        "bytes": moved,
        "floor_us": floor,
        "kernel_us": kernel,
        "host_us": host_us(run),
        "torch_us": reference,
        "times_floor": kernel / floor,
    }


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write the JSON here instead of to standard output")
    out = parser.parse_args(argv).out
    if not torch.cuda.is_available():
        print("benchmarks.gpu.kernels needs a CUDA GPU, and torch.cuda.is_available() is false here", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    rate = bandwidth()
    results = [
        measure(*case, rate) for cases in (attention_cases(), direction_cases(), other_cases()) for case in cases
    ]
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_second": rate,
        "results": results,
    }
    text = json.dumps(report, indent=1)
    if out:
        with open(out, "w") as file:
            file.write(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
