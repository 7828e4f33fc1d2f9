"""The log-sum-exp of each query, which FlashInfer computes anyway: asked for on the way, and collected."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch


class LogSumExp:
    """Collects what FlashInfer's wrappers return, one layer at a time.

    SGLang calls ``forward`` or ``forward_return_lse`` of one wrapper, or of two: with a cached prefix, attention to the
    new tokens and attention to the prefix are computed apart and merged. The log-sum-exp of both adds up.
    """

    def __init__(self) -> None:
        self._collected: list[torch.Tensor] = []

    def listen(self, wrappers: Iterable[Any]) -> None:
        """Forget what was collected, and collect from these wrappers from now on. Their callers notice nothing.

        Args:
            wrappers: FlashInfer's, whose ``forward`` and ``forward_return_lse`` are replaced. A wrapper that was given
                before is left as it is.
        """
        self._collected.clear()
        for wrapper in wrappers:
            if getattr(wrapper, "nexus_listener", None) is self:
                continue
            attend = wrapper.forward_return_lse
            wrapper.nexus_listener = self
            wrapper.forward_return_lse = functools.partial(self._attend, attend)
            wrapper.forward = functools.partial(self._attend_plain, attend)

    def _attend(self, attend: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """In place of ``forward_return_lse``; ``attend`` is the wrapper's own."""
        out, lse = attend(*args, **kwargs)
        self._collected.append(lse)
        return out, lse

    def _attend_plain(self, attend: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """In place of ``forward``."""
        return self._attend(attend, *args, **kwargs)[0]

    def take(self) -> torch.Tensor | None:
        """What was collected since :meth:`listen`.

        Returns:
            float32 ``[tokens, heads]``, to base 2, over all keys that the layer attended to; None where no wrapper was
            called.
        """
        collected = self._collected
        self._collected = []
        return functools.reduce(torch.logaddexp2, collected) if collected else None
