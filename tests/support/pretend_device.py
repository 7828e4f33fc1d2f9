"""A device that is none: tensors that claim to live on ``lazy`` and compute on the CPU.

It finds what CPU tests cannot: tensors made on the wrong device, and places where the host waits for the device.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import nexus_sglang
import nexus_sglang.kernels as kernels

DEVICE = torch.device("lazy:0")
_OURS = tuple(str(Path(package.__path__[0])) for package in (nexus_sglang, kernels))
_ops = torch.ops.aten
WAITS = {
    _ops._local_scalar_dense,
    _ops.nonzero,
    _ops.unique_consecutive,
    _ops._unique2,
    _ops.masked_select,
    _ops.equal,
    _ops.bincount,
    _ops.is_nonzero,
}
"""Operations that make the host wait on a real device: their value or their shape comes from it."""

REFERENCES = {"compact_rows._compact_torch", "page_table._unmap_torch", "walk_weights._walk_torch"}
"""Torch references that wait, in whose place Triton kernels run on a GPU (``tests/gpu`` holds those to not waiting)."""


class Far(torch.Tensor):
    """A tensor on the pretended device around one on the CPU."""

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> Far:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=DEVICE,
        )

    def __init__(self, near: torch.Tensor) -> None:
        self.near = near

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Far({self.near})"

    def tolist(self) -> list:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError("used outside of PretendDevice")


class PretendDevice(TorchDispatchMode):
    """Runs every operation, and fails where tensors of both devices meet (a scalar from the CPU may).

    Attributes:
        waits: where the host waited so far, as ``file.function``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def _wait(self) -> None:
        """Note where the host waits, unless it is in a reference that no GPU runs."""
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_OURS)]
        where = f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "test"
        if where not in REFERENCES:
            self.waits.append(where)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        far = any(isinstance(x, Far) for x in tensors)
        packet = func.overloadpacket
        asked = kwargs.get("device")
        there = far if asked is None else torch.device(asked).type == DEVICE.type
        if asked is not None and there:
            kwargs["device"] = torch.device("cpu")
        if packet is _ops._to_copy:
            if far != there and not kwargs.get("non_blocking", False):
                self._wait()
        elif packet is _ops.copy_:
            if (
                not all(isinstance(x, Far) for x in tensors)
                and far
                and tensors[-1].dim()
                and not (args[2:] and args[2])
            ):
                self._wait()
        elif far:
            strays = [x for x in tensors if not isinstance(x, Far) and x.dim()]
            assert not strays, f"{func} got tensors of two devices: {strays}"
            by_mask = packet in (_ops.index, _ops.index_put, _ops.index_put_, _ops._index_put_impl_) and any(
                x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
            )
            if packet in WAITS or by_mask:
                self._wait()
        near = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
        if not there:
            return near
        known = {id(x.near): x for x in tensors if isinstance(x, Far)}  # what was changed in place comes back itself

        def wrap(x: Any) -> Any:
            return (known[id(x)] if id(x) in known else Far(x)) if isinstance(x, torch.Tensor) else x

        return tree_map(wrap, near)


def _unwrap(x: Any) -> Any:
    """What a tensor on the pretended device is made of."""
    return x.near if isinstance(x, Far) else x
