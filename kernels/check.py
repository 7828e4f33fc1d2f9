"""``python -m nexus_sglang.kernels.check`` compares every kernel with its torch reference and prints one table.

Exit code 1 on failure. It runs on the GPU where there is one, else in Triton's interpreter on the CPU, on fewer and
smaller shapes. The interpreter checks arithmetic and indexing, not what a GPU's compiler and memory do with them.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .check_cases import Outcome


def _shapes(columns: str, *rows: tuple) -> list[dict[str, Any]]:
    """Keyword arguments of a case, one dictionary per row of a table.

    Args:
        columns: names, with spaces between.
        rows: one value per column each.
    """
    return [dict(zip(columns.split(), row, strict=True)) for row in rows]


_ATTENTION = "window kv_heads group dim blocks block_size dtype reduction given_lse"
_DIRECTIONS = "kv_heads dim blocks block_size dtype"
_WALK = "batch window blocks steps"
_DRAWS = "batch blocks count"
_PRIORITIES = "batch blocks law count beta"
_RANKS = "batch blocks levels"
_ROWS = "rows width hinted"
_TABLE = "virtual_size ids short"
_RING = "tokens kept heads dim window dtype given_lse"
_LAWS = [
    ("exponential-keys", 1, 1.0),
    ("exponential-keys", 5, 1.0),
    ("sequential-poisson", 1, 4.0),
    ("sequential-poisson", 1, 0.0),
]

SMALL: dict[str, list[dict[str, Any]]] = {
    "block_attention_rows": _shapes(
        _ATTENTION,
        (16, 2, 4, 64, 12, 32, "bf16", "max", False),
        (16, 2, 4, 64, 12, 32, "bf16", "sum", True),
        (5, 1, 7, 128, 9, 16, "fp16", "max", True),
        (16, 3, 1, 128, 40, 7, "fp32", "sum", False),
        (1, 2, 3, 64, 1, 32, "fp32", "max", False),
        (40, 1, 8, 80, 33, 8, "bf16", "max", False),
        (4, 1, 2, 64, 4096, 1, "fp16", "max", False),
    ),
    "block_distinctiveness": _shapes(
        _DIRECTIONS,
        (1, 64, 1, 1, "fp32"),
        (3, 64, 37, 32, "bf16"),
        (2, 80, 9, 128, "fp16"),
        (2, 128, 700, 7, "fp32"),
    ),
    "walk_weights": _shapes(_WALK, (1, 1, 1, 3), (3, 16, 300, 3), (2, 5, 257, 0), (2, 16, 64, 1024), (1, 16, 4096, 3)),
    "reservoir: draws": _shapes(_DRAWS, (1, 1, 1), (3, 300, 5), (2, 4096, 2)),
    "reservoir: priorities": _shapes(_PRIORITIES, *[(3, n, *law) for n in (1, 300, 1000) for law in _LAWS]),
    "reservoir: ranks": _shapes(_RANKS, (1, 1, 2), (4, 129, 3), (3, 700, 1000), (1, 4096, 50)),
    "compact_rows": _shapes(_ROWS, (2, 1, False), (5, 3000, True), (3, 1024, False)),
    "page_table": _shapes(_TABLE, (1, 1, 0), (5000, 3000, 0), (5000, 5000, 9), (40, 0, 0), (4096, 2048, 0)),
    "query_ring": _shapes(
        _RING,
        (1, 0, 1, 64, 1, "fp32", False),
        (5, 0, 32, 128, 16, "bf16", True),
        (40, 7, 9, 80, 4, "fp16", True),
        (12, 12, 3, 64, 16, "bf16", False),
    ),
}
"""Shapes for the interpreter; the GPU runs them too."""
LARGE: dict[str, list[dict[str, Any]]] = {
    "block_attention_rows": _shapes(
        _ATTENTION,
        (16, 8, 4, 128, 256, 32, "bf16", "max", False),
        (16, 8, 4, 128, 256, 32, "bf16", "max", True),
        (16, 8, 1, 64, 1024, 32, "fp16", "sum", False),
        (16, 2, 8, 128, 4096, 16, "fp16", "max", False),
        (64, 4, 5, 256, 64, 128, "fp32", "sum", False),
        (16, 1, 32, 128, 300, 32, "bf16", "max", False),
    ),
    "block_distinctiveness": _shapes(_DIRECTIONS, (8, 128, 4096, 32, "bf16"), (2, 256, 300, 128, "fp32")),
    "walk_weights": _shapes(_WALK, (64, 16, 4096, 3)),
    "reservoir: draws": _shapes(_DRAWS, (64, 4096, 5)),
    "reservoir: priorities": _shapes(
        _PRIORITIES, (64, 4096, "exponential-keys", 5, 1.0), (4, 100_000, "exponential-keys", 1, 1.0)
    ),
    "reservoir: ranks": _shapes(_RANKS, (64, 4096, 40), (1, 32_768, 9)),
    "compact_rows": _shapes(_ROWS, (64, 32_768, True), (2, 131_072, False)),
    "page_table": _shapes(_TABLE, (2_000_000, 500_000, 0)),
    "query_ring": _shapes(_RING, (256, 0, 32, 128, 16, "bf16", True), (8192, 256, 64, 128, 16, "bf16", True)),
}
"""More shapes for the GPU."""


def _interpret_without_gpu() -> None:
    """Start over with the interpreter on: Triton reads the variable when it is imported."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "nexus_sglang.kernels.check", *sys.argv[1:]], environment)


def run_all(device: str) -> bool:
    """Run every case and print the table.

    Args:
        device: ``cuda``, or ``cpu`` in the interpreter.

    Returns:
        Whether all kernels are within tolerance.
    """
    from .check_cases import KERNELS  # late: it imports the kernels, which the interpreter's variable must precede

    print(f"{'kernel':24}{'cases':>6}{'worst error':>14}{'tolerance':>12}{'seconds':>9}  ok")
    good = True
    for name, case in KERNELS.items():
        shapes = SMALL[name] + (LARGE[name] if device == "cuda" else [])
        started = time.monotonic()
        outcomes: list[Outcome] = []
        try:
            outcomes = [case(device, seed, **shape) for seed, shape in enumerate(shapes)]
        except Exception:  # the table goes on, with the reason above the kernel's line
            traceback.print_exc()
        fine = len(outcomes) == len(shapes) and all(outcome.ok for outcome in outcomes)
        worst = max((outcome.error for outcome in outcomes), default=float("nan"))
        allowed = outcomes[0].tolerance if outcomes else float("nan")
        took = time.monotonic() - started
        print(
            f"{name:24}{len(shapes):>6}{worst:>14.2g}{allowed:>12.0e}{took:>9.1f}  {'yes' if fine else 'NO'}",
            flush=True,
        )
        good &= fine
    return good


def main() -> int:
    """Run the checks where they can run, and return the exit code."""
    _interpret_without_gpu()
    from .dispatch import interpreted  # late, for the same reason

    device = "cpu" if interpreted() else "cuda"
    where = "Triton's interpreter on the CPU: arithmetic and indexing only, no GPU" if interpreted() else ""
    print(where or f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    good = run_all(device)
    print("all kernels within tolerance" if good else "NOT all kernels within tolerance: see the table")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
