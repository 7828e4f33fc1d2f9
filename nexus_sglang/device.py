"""Between host and device. Everything the host waits for goes through :func:`download`; uploads do not wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


def upload(
    values: Sequence | torch.Tensor, device: str | torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Host numbers (a list, or a tensor on the CPU, which keeps its dtype) on the device.

    ``torch.tensor(.., device=..)`` and a plain ``.to(device)`` would wait for everything queued on a GPU.
    """
    host = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    return host.to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU; on a GPU the host waits for it."""
    return tensor.cpu()


class Stopwatch:
    """Adds wall time to counters, waiting for the device at every lap: for measuring, never for serving."""

    def __init__(self, counters: Any, device: Any):
        self._counters = counters
        self._wait = getattr(torch.get_device_module(torch.device(device)), "synchronize", lambda: None)
        self._wait()
        self._last = time.perf_counter()

    def lap(self, counter: str) -> None:
        self._wait()
        now = time.perf_counter()
        setattr(self._counters, counter, getattr(self._counters, counter) + now - self._last)
        self._last = now
