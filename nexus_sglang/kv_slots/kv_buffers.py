"""Where keys and values of the layers lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class KVBuffers(NamedTuple):
    """The KV pool, layer by layer.

    Attributes:
        keys_of: layer id -> keys ``[physical slots, kv heads, head dim]``, rotary position applied.
        values_of: layer id -> values, of the same shape.
    """

    keys_of: Callable[[int], torch.Tensor]
    values_of: Callable[[int], torch.Tensor]
