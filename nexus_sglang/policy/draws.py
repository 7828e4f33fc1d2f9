"""Counter-based random draws: Philox 4x32-10 (Salmon et al., SC 2011), in integer torch.

A draw depends on (seed, block identity, event, draw number) and on nothing else, so the same requests
give the same evictions alone or in a batch, on any rank, before and after a retraction.
"""

from __future__ import annotations

import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def _mulhilo(factor: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The product wraps in int64, but its 64 bits are those of the unsigned product.
    product = x * factor
    return (product >> 32) & _LOW, product & _LOW


def philox(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Philox 4x32-10.

    Args:
        counter: four int64 tensors of one shape, each holding unsigned 32-bit numbers.
        key: two unsigned 32-bit numbers.

    Returns:
        Four int64 tensors of that shape, unsigned 32-bit numbers.
    """
    c0, c1, c2, c3 = (c & _LOW for c in counter)
    k0, k1 = key[0] & _LOW, key[1] & _LOW
    for _ in range(10):
        hi0, lo0 = _mulhilo(_M0, c0)
        hi1, lo1 = _mulhilo(_M1, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def uniforms(seed: int, identity: torch.Tensor, event: int, draws: int) -> torch.Tensor:
    """Uniform numbers strictly inside (0, 1).

    Args:
        seed: the server's seed.
        identity: int64 ``[N]``, what each block is (content and position).
        event: which event of the sequence this is.
        draws: numbers wanted per block.

    Returns:
        float64 ``[draws, N]``, identical on every platform.
    """
    number = torch.arange(draws, dtype=torch.int64, device=identity.device)[:, None]
    counter = torch.broadcast_tensors(identity & _LOW, (identity >> 32) & _LOW, torch.full_like(identity, event), number)
    words = philox(counter, (seed, seed >> 32))
    return (words[0].double() + 0.5) * 2.0**-32
