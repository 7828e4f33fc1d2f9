"""Between host and device. Everything the host waits for goes through :func:`download`; uploads do not wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


def upload(
    values: Sequence | torch.Tensor,
    device: str | torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Bring numbers of the host to the device without waiting for it.

    ``torch.tensor(.., device=..)`` and a plain ``.to(device)`` would wait for everything that is queued on a GPU.

    Args:
        values: numbers, or a tensor on the CPU of any shape.
        device: where they are wanted.
        dtype: of the result, where ``values`` is no tensor; a tensor keeps its own.

    Returns:
        A tensor on ``device``, of the shape of ``values``.
    """
    host = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    return host.to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Bring a tensor to the CPU. On a GPU the host waits until everything before it is done.

    Args:
        tensor: of any shape and dtype, on any device.

    Returns:
        The same numbers on the CPU.
    """
    return tensor.cpu()


class Stopwatch:
    """Adds wall time to counters. It waits for the device at every lap, so it is for measuring, never for serving.

    Args:
        counters: an object with a float attribute, in seconds, for each lap's name.
        device: the device that the timed work runs on.
    """

    def __init__(self, counters: Any, device: str | torch.device):
        self._counters = counters
        self._wait = getattr(torch.get_device_module(torch.device(device)), "synchronize", lambda: None)
        self._wait()
        self._last = time.perf_counter()

    def lap(self, counter: str) -> None:
        """Add the time since the last lap, or since the start, to the attribute ``counter``."""
        self._wait()
        now = time.perf_counter()
        setattr(self._counters, counter, getattr(self._counters, counter) + now - self._last)
        self._last = now
