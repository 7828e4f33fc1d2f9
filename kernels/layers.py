"""The KV pool of all layers in one launch: a table of addresses, read by the kernel."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

_REMEMBERED = 64
"""Tables kept: a server asks for the same two pools, keys and values, at every event."""
_tables: OrderedDict[tuple, tuple[torch.Tensor, dict[str, Any]]] = OrderedDict()


def same_layout(pools: Sequence[torch.Tensor]) -> None:
    """Check that one table can serve all layers.

    Args:
        pools: per layer its buffer.

    Raises:
        ValueError: a layer's buffer differs from the first in shape, strides, dtype or device.
    """
    layouts = [(tuple(pool.shape), pool.stride(), pool.dtype, pool.device) for pool in pools]
    for layer, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise ValueError(
                f"pools: layer {layer} is laid out as {layout}, layer 0 as {layouts[0]}; call once per layout"
            )


def layer_table(pools: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    """What :func:`layer_pool` needs to find a layer's buffer.

    Args:
        pools: per layer its buffer, all of one layout.

    Returns:
        int64 ``[L]``, the buffers' addresses, on the pools' device; and the kernel's compile-time arguments.

    Raises:
        ValueError: layers of different layouts.
    """
    first = pools[0]
    at = tuple(pool.data_ptr() for pool in pools)
    key = (at, first.shape, first.stride(), first.dtype, first.device)
    if key not in _tables:
        same_layout(pools)
        table = torch.tensor(at, dtype=torch.int64, device="cpu").to(first.device, non_blocking=True)
        dtype = getattr(tl, str(first.dtype).removeprefix("torch."))
        _tables[key] = table, {"DTYPE": dtype, "ALIGNED": all(address % 16 == 0 for address in at)}
        if len(_tables) > _REMEMBERED:
            _tables.popitem(last=False)
    return _tables[key]


@triton.jit
def layer_pool(pools_ptr, layer, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to one layer's buffer, from the table of :func:`layer_table`."""
    pool_ptr = tl.load(pools_ptr + layer).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # lets the compiler read 16 bytes at a time, as it would from a tensor's own pointer
        pool_ptr = tl.multiple_of(pool_ptr, 16)
    return pool_ptr
