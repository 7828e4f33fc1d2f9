"""The batch a paged attention backend plans from: the same requests, but lengths count resident tokens.

SGLang's triton and flashinfer backends build their index lists from rows and lengths and never look at positions: keys
are cached with their rotary position applied. With compact rows in place of logical ones, lengths are all that is left
to replace. The model keeps the real batch; only the backend's planning sees this one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from nexus_sglang.device import upload
from nexus_sglang.errors import ShadowError


class RowsPool:
    """SGLang's request pool as a backend sees it: ``req_to_token`` is the compact rows, the rest is the pool's."""

    def __init__(self, pool: Any, slots: torch.Tensor):
        """``pool``: SGLang's ``ReqToTokenPool``. ``slots``: int32 ``[rows, width]``, the compact rows."""
        self._pool = pool
        self.req_to_token = slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def shadow_batch(batch: Any, batch_rows: Sequence[int], resident: Sequence[int], padding: int) -> Any:
    """A copy of a batch whose lengths are those of the compact rows.

    Host and device lengths come from one list. FlashInfer partitions its work by the host's and reads by the device's,
    and checks neither against the other.

    Args:
        batch: SGLang's ``ForwardBatch``, or the view from which it replays a CUDA graph (no ``extend_*``). Not changed.
        batch_rows: request row of each request of the batch; what follows them up to ``batch_size`` is padding.
        resident: per request row, its resident tokens, those of this pass included (host).
        padding: length of a request that is padding. It reads row 0, whose slots are all 0.

    Returns:
        Shallow copy with ``seq_lens``, ``seq_lens_cpu``, ``seq_lens_sum`` replaced, and for a prefill
        ``extend_prefix_lens`` and ``extend_prefix_lens_cpu``. New tokens per request and ``orig_seq_lens`` stay.

    Raises:
        ShadowError: more rows than the batch has requests, an empty row, or a row shorter than its new tokens.
    """
    spare = batch.batch_size - len(batch_rows)
    if spare < 0 or any(resident[row] == 0 for row in batch_rows):
        raise ShadowError(
            f"{len(batch_rows)} rows {list(batch_rows)} for a batch of {batch.batch_size}; a row in use is not empty"
        )
    lengths = [resident[row] for row in batch_rows] + [padding] * spare
    out = copy.copy(batch)
    out.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    out.seq_lens = upload(lengths, batch.seq_lens.device, batch.seq_lens.dtype)
    out.seq_lens_sum = sum(lengths)
    if getattr(batch, "extend_prefix_lens", None) is not None:
        prefix = _prefixes(lengths, batch.extend_seq_lens_cpu)
        out.extend_prefix_lens_cpu = prefix
        out.extend_prefix_lens = upload(prefix, batch.extend_prefix_lens.device, batch.extend_prefix_lens.dtype)
    return out


def _prefixes(lengths: list[int], extend: Sequence[int]) -> list[int]:
    """Resident tokens before the new ones, which are all resident. SGLang never pads the requests of a prefill."""
    prefix = [n - int(new) for n, new in zip(lengths, extend, strict=False)]
    if len(extend) != len(lengths) or min(prefix, default=0) < 0:
        raise ShadowError(f"rows hold {lengths} tokens, but {list(extend)} are to be new")
    return prefix
