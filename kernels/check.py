"""``python -m nexus_sglang.kernels.check``: every kernel against its torch reference, one table, exit code 1 on failure.

Runs on the GPU where there is one, else under Triton's interpreter on the CPU with fewer and smaller shapes. The
interpreter checks the arithmetic and the indexing, not what a GPU's compiler and memory do with them.
"""

from __future__ import annotations

import os
import sys
import time
import traceback

import torch

_WORDS = ("window", "kv_heads", "group", "dim", "blocks", "block_size", "dtype", "reduction", "given_lse")
_ATTENTION = [
    (16, 2, 4, 64, 12, 32, "bf16", "max", False),
    (16, 2, 4, 64, 12, 32, "bf16", "sum", True),
    (5, 1, 7, 128, 9, 16, "fp16", "max", True),
    (16, 3, 1, 128, 40, 7, "fp32", "sum", False),
    (1, 2, 3, 64, 1, 32, "fp32", "max", False),
    (40, 1, 8, 80, 33, 8, "bf16", "max", False),
    (4, 1, 2, 64, 4096, 1, "fp16", "max", False),
]
_ATTENTION_GPU = [
    (16, 8, 4, 128, 256, 32, "bf16", "max", False),
    (16, 8, 4, 128, 256, 32, "bf16", "max", True),
    (16, 8, 1, 64, 1024, 32, "fp16", "sum", False),
    (16, 2, 8, 128, 4096, 16, "fp16", "max", False),
    (64, 4, 5, 256, 64, 128, "fp32", "sum", False),
    (16, 1, 32, 128, 300, 32, "bf16", "max", False),
]
_RING = ("tokens", "kept", "heads", "dim", "window", "dtype", "given_lse")
_QUERIES = [
    (1, 0, 1, 64, 1, "fp32", False),
    (5, 0, 32, 128, 16, "bf16", True),
    (40, 7, 9, 80, 4, "fp16", True),
    (12, 12, 3, 64, 16, "bf16", False),
]
SMALL = {
    "block_attention_rows": [dict(zip(_WORDS, values, strict=True)) for values in _ATTENTION],
    "block_distinctiveness": [
        {"kv_heads": h, "dim": d, "blocks": n, "block_size": b, "dtype": t}
        for h, d, n, b, t in ((1, 64, 1, 1, "fp32"), (3, 64, 37, 32, "bf16"), (2, 80, 9, 128, "fp16"), (2, 128, 700, 7, "fp32"))
    ],
    "walk_weights": [
        {"batch": b, "window": w, "blocks": n, "steps": s}
        for b, w, n, s in ((1, 1, 1, 3), (3, 16, 300, 3), (2, 5, 257, 0), (2, 16, 64, 1024), (1, 16, 4096, 3))
    ],
    "reservoir: draws": [{"batch": b, "blocks": n, "count": c} for b, n, c in ((1, 1, 1), (3, 300, 5), (2, 4096, 2))],
    "reservoir: priorities": [
        {"batch": 3, "blocks": n, "law": law, "count": c, "beta": beta}
        for n in (1, 300, 1000)
        for law, c, beta in (("exponential-keys", 1, 1.0), ("exponential-keys", 5, 1.0), ("sequential-poisson", 1, 4.0),
                             ("sequential-poisson", 1, 0.0))
    ],
    "reservoir: ranks": [
        {"batch": b, "blocks": n, "levels": k} for b, n, k in ((1, 1, 2), (4, 129, 3), (3, 700, 1000), (1, 4096, 50))
    ],
    "compact_rows": [{"rows": r, "width": w, "hinted": h} for r, w, h in ((2, 1, False), (5, 3000, True), (3, 1024, False))],
    "page_table": [
        {"virtual_size": v, "ids": i, "short": s}
        for v, i, s in ((1, 1, 0), (5000, 3000, 0), (5000, 5000, 9), (40, 0, 0), (4096, 2048, 0))
    ],
    "query_ring": [dict(zip(_RING, values, strict=True)) for values in _QUERIES],
}  # fmt: skip
"""Shapes for the interpreter; the GPU runs them too."""
LARGE = {
    "block_attention_rows": [dict(zip(_WORDS, values, strict=True)) for values in _ATTENTION_GPU],
    "block_distinctiveness": [
        {"kv_heads": 8, "dim": 128, "blocks": 4096, "block_size": 32, "dtype": "bf16"},
        {"kv_heads": 2, "dim": 256, "blocks": 300, "block_size": 128, "dtype": "fp32"},
    ],
    "walk_weights": [{"batch": 64, "window": 16, "blocks": 4096, "steps": 3}],
    "reservoir: draws": [{"batch": 64, "blocks": 4096, "count": 5}],
    "reservoir: priorities": [
        {"batch": 64, "blocks": 4096, "law": "exponential-keys", "count": 5, "beta": 1.0},
        {"batch": 4, "blocks": 100_000, "law": "exponential-keys", "count": 1, "beta": 1.0},
    ],
    "reservoir: ranks": [{"batch": 64, "blocks": 4096, "levels": 40}, {"batch": 1, "blocks": 32_768, "levels": 9}],
    "compact_rows": [{"rows": 64, "width": 32_768, "hinted": True}, {"rows": 2, "width": 131_072, "hinted": False}],
    "page_table": [{"virtual_size": 2_000_000, "ids": 500_000, "short": 0}],
    "query_ring": [
        dict(zip(_RING, values, strict=True))
        for values in ((256, 0, 32, 128, 16, "bf16", True), (8192, 256, 64, 128, 16, "bf16", True))
    ],
}
"""More shapes for the GPU."""


def _interpret_without_gpu() -> None:
    """Start over with the interpreter on: Triton reads the variable when it is imported."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "nexus_sglang.kernels.check", *sys.argv[1:]], environment)


def run_all(device: str) -> bool:
    """Run every case and print the table.

    Returns:
        Whether all kernels are within tolerance.
    """
    from .check_cases import KERNELS

    print(f"{'kernel':24}{'cases':>6}{'worst error':>14}{'tolerance':>12}{'seconds':>9}  ok")
    good = True
    for name, case in KERNELS.items():
        shapes = SMALL[name] + (LARGE[name] if device == "cuda" else [])
        started, outcomes = time.monotonic(), []
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
    _interpret_without_gpu()
    from .dispatch import interpreted

    device = "cpu" if interpreted() else "cuda"
    where = "Triton's interpreter on the CPU: arithmetic and indexing only, no GPU" if interpreted() else ""
    print(where or f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    good = run_all(device)
    print("all kernels within tolerance" if good else "NOT all kernels within tolerance: see the table")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
