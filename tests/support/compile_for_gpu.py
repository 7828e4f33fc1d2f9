"""Compile every kernel to machine code for one GPU architecture; needs no GPU. Run as a script: ``... 90``.

The launchers run on CPU tensors with the launch itself left out, so signatures and constants are the real ones.
Prints one JSON object: kernel name -> :class:`Built`.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nexus_sglang.kernels import (
    block_attention,
    compact_rows,
    distinctiveness,
    log_sum_exp,
    page_table,
    query_ring,
    reservoir,
    walk_weights,
)

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# A single-precision dot takes the compiler seconds, so it is small and comes once.
ATTENTION = {
    80: (torch.float32, 64, ("max",)),
    90: (torch.bfloat16, 128, ("max", "sum")),
    100: (torch.float16, 128, ("max",)),
}


@dataclass
class Built:
    """What came out: the largest over a kernel's variants.

    Attributes:
        shared: bytes of shared memory per program.
        stack: bytes of stack per thread, which is where registers are spilled.
        narrow: loads of 2 bytes in the PTX.
        variants: hashes of what was compiled.
    """

    shared: int = 0
    stack: int = 0
    narrow: int = 0
    variants: list[str] = field(default_factory=list)

    def add(self, kernel) -> None:
        """Count one compiled variant."""
        if kernel.hash in self.variants:
            return
        self.variants.append(kernel.hash)
        self.shared = max(self.shared, kernel.metadata.shared)
        self.narrow = max(self.narrow, kernel.asm["ptx"].count("ld.global.b16"))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        self.stack = max(self.stack, *map(int, re.findall(r"STACK:(\d+)", usage)))


class NoDevice:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int):
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


def record_instead_of_launching() -> dict[str, Built]:
    """From now on every launch only compiles; what came out is added to the dictionary returned."""
    built: dict[str, Built] = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"], self.__name__
        built.setdefault(self.__name__, Built()).add(kernel)
        return kernel

    JITFunction.run = compile_only
    return built


def launch_everything(dtype: torch.dtype, dim: int, reductions: tuple[str, ...]) -> None:
    """Every launcher once for each shape that must not need another compilation.

    Args:
        dtype: of queries, keys and values.
        dim: numbers per head.
        reductions: those of block attention to compile.
    """
    ids = torch.arange(64)
    length = torch.tensor([64])
    pools = [torch.zeros(64, 8, dim, dtype=dtype) for _ in range(2)]
    for window in (16, 5, 1):  # a window that is not full yet
        queries = torch.zeros(2, window, 32, dim, dtype=dtype)
        for reduction in reductions:
            block_attention.block_attention_rows.kernel(
                queries, pools, ids.int(), ids[:window], ids, ids // 32, 2, 32, 0.1, torch.zeros(window, 2), reduction
            )
    distinctiveness.block_distinctiveness.kernel(pools, ids.int(), torch.tensor([0, 32, 64], dtype=torch.int32), 32)
    weights = torch.zeros(1, 64)
    everyone = torch.ones(1, 64, dtype=torch.bool)
    for window in (16, 5, 1, 128):
        walk_weights.walk_weights.kernel(torch.zeros(1, window, 64), length, length, everyone, 3, 0.5, 1e-6)
    reservoir.draw.kernel(2**63 + 1, ids[None], length, 5)
    for law in reservoir.LAWS:
        reservoir.priorities.kernel(weights, ids[None], length, length, 1, law, 5, 4.0)
    for orders in (1, 2):
        reservoir.ranks.kernel(weights.double().expand(orders, 64), everyone.expand(orders, 64), length.expand(orders))
    row = ids.int()[None]
    compact_rows.compact_rows.kernel(row, length, ids, row.clone(), row.clone())
    for some in (ids, ids[:1], ids[1:34]):  # as many as an event frees, anywhere in memory
        page_table.translate.kernel(ids, some)
        page_table.unmap.kernel(ids.clone(), some, ids.clone())
    ring = torch.zeros(8, 16, 32, dim, dtype=dtype)
    lse_ring = torch.zeros(8, 16, 32)
    for batch in (4, 3, 1):  # decode batches of any size; then as many tokens of a prefill, of one upload
        rows = ids[:batch]
        query_ring.keep_queries.kernel(ring, ring[0, :batch], rows, rows, None, lse_ring, lse_ring[0, :batch])
        tokens, rows, places = torch.zeros(3, batch, dtype=torch.int64)
        query_ring.keep_queries.kernel(ring, ring[0], rows, places, tokens, lse_ring, lse_ring[0])


def all_kernels() -> set[str]:
    """Names of the package's kernels, as far as they are launched from the host."""
    modules = (
        block_attention,
        compact_rows,
        distinctiveness,
        log_sum_exp,
        page_table,
        query_ring,
        reservoir,
        walk_weights,
    )
    return {
        name for m in modules for name, x in vars(m).items() if isinstance(x, JITFunction) and name.endswith("_kernel")
    }


if __name__ == "__main__":
    capability = int(sys.argv[1])
    triton.runtime.driver.set_active(NoDevice(capability))
    built = record_instead_of_launching()
    launch_everything(*ATTENTION[capability])
    missing = all_kernels() - set(built)
    assert not missing, f"never compiled: {missing}"
    print(json.dumps({name: asdict(one) for name, one in built.items()}))
