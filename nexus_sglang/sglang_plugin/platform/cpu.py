"""A plain CPU as an SGLang platform, so that it serves without its AMX kernels and without a GPU."""

from __future__ import annotations

import os


def accelerator_present() -> bool:
    """Whether SGLang would find a device of its own."""
    import torch

    if torch.cuda.is_available():
        return True
    return any(
        getattr(torch, name, None) is not None and getattr(torch, name).is_available()
        for name in ("xpu", "npu", "musa")
    )


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the platform class, or None where it must stay out of the way."""
    if accelerator_present() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return "nexus_sglang.sglang_plugin.platform.plain_cpu.PlainCpuPlatform"
