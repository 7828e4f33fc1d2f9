"""Which implementation of a kernel runs, Triton or torch: decided here and nowhere else."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch
import triton

VARIABLE = "NEXUS_SGLANG_KERNELS"
"""The environment variable that forces one implementation."""
CHOICES = ("torch", "triton")
"""What it may be set to."""

P = ParamSpec("P")
R = TypeVar("R")


class KernelChoiceError(ValueError):
    """The environment asks for an implementation that does not exist or cannot run here."""


def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU (``TRITON_INTERPRET=1`` before Python starts)."""
    return bool(triton.knobs.runtime.interpret)


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether work on this tensor is done by Triton: on CUDA, unless :data:`VARIABLE` says otherwise.

    Args:
        tensor: of any shape; its device decides.

    Raises:
        KernelChoiceError: naming the variable, its value and what would be legal.
    """
    forced = os.environ.get(VARIABLE, "")
    if forced not in ("", *CHOICES):
        raise KernelChoiceError(f"{VARIABLE}={forced!r}: set it to {' or '.join(CHOICES)}, or leave it unset")
    if forced != "triton" or tensor.is_cuda:
        return tensor.is_cuda and forced != "torch"
    if not interpreted():
        raise KernelChoiceError(
            f"{VARIABLE}=triton, but the tensors are on {tensor.device}: Triton runs there only with "
            "TRITON_INTERPRET=1 set before Python starts; unset one or set the other"
        )
    return True


class Dispatched(Generic[P, R]):
    """A function with two implementations; the first tensor among the arguments decides which runs.

    Attributes:
        reference: on torch; its docstring is the contract of both.
        kernel: launches Triton; takes and returns the same.
    """

    def __init__(self, reference: Callable[P, R], kernel: Callable[P, R]):
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.kernel = kernel

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return (self.kernel if uses_triton(tensor) else self.reference)(*args, **kwargs)


def dispatch(reference: Callable[P, R], kernel: Callable[P, R]) -> Dispatched[P, R]:
    """One function out of a torch reference and a Triton launcher of the same signature.

    Args:
        reference: on torch; its docstring is the contract of both.
        kernel: launches Triton.
    """
    return Dispatched(reference, kernel)
