"""The KV pool of all layers in one launch: a table of addresses, read by the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


def same_layout(name: str, pools: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first of several layers' buffers.

    Raises:
        ValueError: there is none, or another differs in shape, strides, dtype or device.
    """
    if not pools:
        raise ValueError(f"{name} is empty: give one buffer per layer")
    first, *others = ((tuple(p.shape), p.stride(), p.dtype, p.device) for p in pools)
    for layer, other in enumerate(others, start=1):
        if other != first:
            raise ValueError(f"{name}: layer {layer} is laid out as {other}, layer 0 as {first}; call once per layout")
    return pools[0]


def addresses(pools: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict]:
    """What :func:`layer_pool` needs: int64 ``[L]`` on the pools' device, and its compile-time arguments."""
    first, at = pools[0], [pool.data_ptr() for pool in pools]
    table = torch.tensor(at, dtype=torch.int64, device="cpu").to(first.device, non_blocking=True)
    dtype = getattr(tl, str(first.dtype).removeprefix("torch."))
    return table, {"DTYPE": dtype, "ALIGNED": all(address % 16 == 0 for address in at)}


@triton.jit
def layer_pool(pools_ptr, layer, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to one layer's buffer."""
    pool_ptr = tl.load(pools_ptr + layer).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # lets the compiler read 16 bytes at a time, as it would from a tensor's own pointer
        pool_ptr = tl.multiple_of(pool_ptr, 16)
    return pool_ptr
