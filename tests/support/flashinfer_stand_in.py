"""FlashInfer's wrappers in plain PyTorch, so that SGLang's flashinfer backend runs on a CPU.

Its planning, its calls and its merging are SGLang's own. A server takes them with
``--kv-policy tests.support.flashinfer_stand_in:Nexus`` and ``FLASHINFER_STAND_IN=1``.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import torch

from nexus_sglang.policy.nexus import Nexus as _Nexus


def attend(q, k, v, scale, causal):
    """Attention of queries over keys and values; the last query stands beside the last key.

    Args:
        q: ``[n, Hq, D]``.
        k: ``[m, Hkv, D]``.
        v: like ``k``.
        scale: of the scores.
        causal: whether a query attends to no later key.

    Returns:
        ``[n, Hq, D]``, and the log-sum-exp ``[n, Hq]``, to base 2 as FlashInfer's (``lse_base`` of its ``run``).
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("nhd,mhd->nhm", q, k) * scale
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        logits = logits.masked_fill(hidden[:, None], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    return torch.einsum("nhm,mhd->nhd", torch.exp(logits - lse[..., None]).nan_to_num(0), v), lse / math.log(2)


def merge(o1, s1, o2, s2):
    """Attention over two sets of keys from that over each; one of them may be empty."""
    both = torch.logaddexp2(s1, s2)
    return o1 * torch.exp2(s1 - both)[..., None] + o2 * torch.exp2(s2 - both)[..., None], both


class Wrapper:
    """In place of a FlashInfer wrapper: keeps the arguments of its planning calls and attends to what was planned."""

    def __init__(self, indices: torch.Tensor | None = None, requests: int = 0):
        self.is_cuda_graph_enabled = indices is not None
        self._paged_kv_indices_buf = indices
        self.calls: list[tuple] = []
        # What FlashInfer's own fast_decode_plan looks at.
        self._backend = self._requested_backend = "fa2"
        self._cudnn_auto = False
        self.use_tensor_cores = True
        self._fixed_batch_size = requests
        self.device = "cpu"
        self._float_workspace_buffer = self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = None
        self._cached_module = SimpleNamespace(plan=lambda *args: self.host.append(args))
        self.host: list[tuple] = []

    def begin_forward(self, *args, **kwargs):
        self.calls.append(args)

    def forward(self, *args, **kwargs):
        return self.forward_return_lse(*args, **kwargs)[0]

    def forward_return_lse(self, q, *kv, sm_scale, causal=True, **kwargs):
        """``kv`` is the pool's pair for a paged wrapper, keys and values of the new tokens for a ragged one."""
        plan = [x.tolist() for x in self.calls[-1] if isinstance(x, torch.Tensor)]
        if len(kv) == 2:
            k, v = kv
            begin, ends = plan[:2]
        else:
            begin, ends, indices = plan[:3] if len(plan) > 3 else (list(range(len(q) + 1)), *plan[:2])
            k, v = (x[indices[: ends[-1]]] for x in kv[0])
        parts = []
        for (first, last), (start, end) in zip(pairwise(begin), pairwise(ends), strict=False):
            parts.append(attend(q[first:last], k[start:end], v[start:end], sm_scale, causal))
        return torch.cat([o for o, _ in parts]), torch.cat([s for _, s in parts])


class HostTorch:
    """``torch`` for a module that asks for CUDA memory by name."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty(*args, device=None, **kwargs):
        return torch.empty(*args, device="cpu", **kwargs)


def install(put=setattr) -> None:
    """Make SGLang's flashinfer backend take these. ``put``: like ``setattr``, for example a monkeypatch's."""
    import flashinfer
    from sglang.srt.layers.attention import flashinfer_backend

    wrappers = (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
    )
    names = {
        "torch": HostTorch(),
        "fast_decode_plan": flashinfer.fast_decode_plan,
        "_safe_merge_state": merge,
        "should_use_tensor_core": lambda **shape: True,
        **dict.fromkeys(wrappers, lambda *args, **options: Wrapper()),
    }
    for name, stand_in in names.items():
        put(flashinfer_backend, name, stand_in)
    put(torch.cuda, "device", lambda device: contextlib.nullcontext())


@dataclass(frozen=True)
class Nexus(_Nexus):
    """The default policy; loading it brings the stand-ins with it."""


def install_in_a_server() -> None:
    """:func:`install` without the refusal of a backend that needs a GPU.

    The log says of each event whether it was given the log-sum-exp or computed it.
    """
    from nexus_sglang.evidence import head_reduction
    from nexus_sglang.sglang_plugin.launcher import refusals

    def refuse_nothing(backend, args):
        return None

    install()
    refusals.refuse_backend = refuse_nothing
    attend_in_blocks = head_reduction.block_attention_rows

    def said(*args, **options):
        print("log-sum-exp", "computed" if args[11] is None else "given", flush=True)
        return attend_in_blocks(*args, **options)

    head_reduction.block_attention_rows = said


if os.environ.get("FLASHINFER_STAND_IN"):
    install_in_a_server()
