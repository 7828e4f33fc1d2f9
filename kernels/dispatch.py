"""Which implementation of a kernel runs, Triton or torch: decided here and nowhere else."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
import triton

VARIABLE = "NEXUS_SGLANG_KERNELS"
CHOICES = ("torch", "triton")


class KernelChoiceError(ValueError):
    """The environment asks for an implementation that does not exist or cannot run here."""


def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU (``TRITON_INTERPRET=1`` before Python starts)."""
    return bool(triton.knobs.runtime.interpret)


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether work on this tensor is done by Triton: on CUDA, unless :data:`VARIABLE` says otherwise.

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


def dispatch(reference: Callable, kernel: Callable) -> Callable:
    """One function out of two of the same signature; the first tensor argument decides which runs.

    Args:
        reference: on torch; its docstring is the contract of both. kernel: launches Triton.

    Returns:
        The function, with both as attributes ``reference`` and ``kernel``.
    """

    @functools.wraps(reference)
    def run(*args, **kwargs):
        tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return (kernel if uses_triton(tensor) else reference)(*args, **kwargs)

    run.reference, run.kernel = reference, kernel
    return run
