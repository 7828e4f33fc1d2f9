"""Which attention backends of SGLang read compact rows, and how they are pointed at them."""

from __future__ import annotations

from typing import Any

from nexus_sglang.sglang_plugin.scheduler.runtime import runtime_of

from .shadow_batch import RowsPool

FLASHINFER = "FlashInferAttnBackend"
TRITON = "TritonAttnBackend"
NATIVE = "TorchNativeAttnBackend"
PAGED = (TRITON, FLASHINFER)
"""Classes of SGLang's attention backends that gather slots from request rows (see ``paged``). Together with ``NATIVE``
(see ``plain_torch``) they are all that read compact rows; their subclasses do not."""


def backends(runner: Any) -> list[Any]:
    """Attention backends of a runner; both halves where prefill and decode use different ones.

    Args:
        runner: SGLang's ``ModelRunner``.
    """
    found = []
    for backend in filter(None, (runner.attn_backend, runner.decode_attn_backend, *runner.decode_attn_backend_group)):
        halves = type(backend).__name__ == "HybridAttnBackend"
        found += [backend.prefill_backend, backend.decode_backend] if halves else [backend]
    return found


def reports_lse(runner: Any) -> bool:
    """Whether every backend of the runner is FlashInfer's, which gives the log-sum-exp of each query.

    Args:
        runner: SGLang's ``ModelRunner``.
    """
    return all(type(backend).__name__ == FLASHINFER for backend in backends(runner))


def install_rows(runner: Any, runtime: Any) -> None:
    """Point everything that reads KV by request row at the compact rows. Once, before CUDA graphs are captured.

    Paged backends gather their indices from the translator's ``req_to_token``, as long as no id space reads through
    another table (``KVIndexTranslator._passthrough_table``).

    Args:
        runner: SGLang's ``ModelRunner``; its backends and translator are changed in place.
        runtime: the ``NexusRuntime`` that owns the compact rows.
    """
    for backend in backends(runner):
        backend.nexus_runtime = runtime
        if type(backend).__name__ in PAGED:
            runner.kv_index_translator.req_to_token = runtime.rows.slots
            backend.req_to_token_pool = RowsPool(backend.req_to_token_pool, runtime.rows.slots)
            if hasattr(backend, "req_to_token"):
                backend.req_to_token = runtime.rows.slots


def reads_compact_rows(backend: Any, runner: Any) -> bool:
    """Whether :func:`install_rows` reached this backend and it has no other way to a row.

    Args:
        backend: one of :func:`backends`.
        runner: SGLang's ``ModelRunner``.
    """
    slots = runtime_of(runner).rows.slots
    name = type(backend).__name__
    translator = runner.kv_index_translator
    return name == NATIVE or (
        name in PAGED
        and backend.kv_index_translator is translator
        and translator.req_to_token is slots
        and not translator.reads_are_translated
        and backend.req_to_token_pool.req_to_token is slots
        and getattr(backend, "req_to_token", slots) is slots
    )
