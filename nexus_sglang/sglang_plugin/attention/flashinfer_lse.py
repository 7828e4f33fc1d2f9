"""The log-sum-exp that FlashInfer's attention computes anyway, asked for and collected on the way."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch


class LogSumExp:
    """Collects it from FlashInfer's wrappers, one layer at a time.

    SGLang calls ``forward`` or ``forward_return_lse`` of one wrapper, or of two: with a cached prefix, attention to the new
    tokens and attention to the prefix are computed apart and merged. The log-sum-exp of both adds up.
    """

    def __init__(self):
        self._heard: list[torch.Tensor] = []

    def listen(self, wrappers: Iterable[Any]) -> None:
        """Hear what these wrappers return from now on; their callers notice nothing. Again and again is the same as once."""
        self._heard.clear()
        for wrapper in wrappers:
            if getattr(wrapper, "nexus_listener", None) is not self:
                wrapper.nexus_listener, attend = self, wrapper.forward_return_lse
                wrapper.forward_return_lse = functools.partial(self._attend, attend)
                wrapper.forward = functools.partial(self._attend_plain, attend)

    def _attend(self, attend, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend(*args, **kwargs)
        self._heard.append(lse)
        return out, lse

    def _attend_plain(self, attend, *args, **kwargs) -> torch.Tensor:
        return self._attend(attend, *args, **kwargs)[0]

    def take(self) -> torch.Tensor | None:
        """float32 ``[tokens, heads]``, to base 2, over all keys the layer attended to; None where no wrapper was called."""
        heard, self._heard = self._heard, []
        return functools.reduce(torch.logaddexp2, heard) if heard else None
