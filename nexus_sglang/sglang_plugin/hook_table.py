"""Everything that is changed in SGLang, by when it is installed. A hook stands with the code that runs in it."""

from __future__ import annotations

from . import installer
from .attention import paged, plain_torch
from .installer import Replaced
from .launcher import chat_pins, flags
from .scheduler import aborts, admission, build, passes, reports, requests, reserve

LAUNCH = flags.HOOKS
"""In every process of SGLang."""

CHAT = chat_pins.HOOKS
"""In the process that serves HTTP, when a policy is on that pins what chat requests begin with."""

SERVE = (
    *reserve.HOOKS,
    *build.HOOKS,
    *plain_torch.HOOKS,
    *paged.HOOKS,
    *requests.HOOKS,
    *admission.HOOKS,
    *passes.HOOKS,
    *reports.HOOKS,
    *aborts.HOOKS,
)
"""In scheduler processes, when a policy is on: memory, parts, attention, then the way of a request."""

ALL = (*LAUNCH, *CHAT, *SERVE)

LAUNCH_REPLACES = (
    Replaced("entrypoints.engine.Engine.server_args_class", ("entrypoints.engine.Engine.__init__",), strict=True),
    Replaced("entrypoints.engine.Engine.server_args", ("entrypoints.engine.Engine.__init__",), strict=True),
)
"""By the plugin's entry point, in every process."""

_TRANSLATOR = "mem_cache.kv_index_translator.KVIndexTranslator"
_TRITON = "layers.attention.triton_backend.TritonAttnBackend"
_FLASHINFER = "layers.attention.flashinfer_backend.FlashInferAttnBackend"
_STREAMER = "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"

SERVE_REPLACES = (
    Replaced(f"{_TRANSLATOR}._spaces", (f"{_TRANSLATOR}.space", f"{_TRANSLATOR}._reads_translated")),
    Replaced(
        f"{_TRANSLATOR}.req_to_token",
        (
            f"{_TRANSLATOR}.plan_uniform_extend",
            f"{_TRANSLATOR}.build_iteration_table",
            f"{_TRANSLATOR}.read_source",
            f"{_TRANSLATOR}._passthrough_table",
            f"{_TRANSLATOR}.pack_read_stream",
        ),
    ),
    Replaced(f"{_TRITON}.req_to_token", (f"{_TRITON}.__init__", f"{_TRITON}._dcp_kv_indices")),
    Replaced(f"{_TRITON}.req_to_token_pool", (f"{_TRITON}.__init__",)),
    Replaced(f"{_FLASHINFER}.req_to_token_pool", (f"{_FLASHINFER}.__init__",)),
    *(
        Replaced(f"{wrapper}.{method}", (f"{wrapper}.{method}",))
        for wrapper in (
            "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper",
            "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper",
            "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper",
        )
        for method in ("forward", "forward_return_lse")
    ),
    Replaced(f"{_STREAMER}.build_additional_customized_info", (f"{_STREAMER}._stream_output_generation",)),
    Replaced(f"{_STREAMER}.has_additional_customized_info", (f"{_STREAMER}._stream_output_generation",)),
)
"""On objects that a scheduler has built, by the serving hooks."""

OVERRIDING = (
    "scheduler.prefill_budget.NexusPrefillBudget",
    "scheduler.allocator.NexusAllocator",
    "scheduler.tree.NexusTreeCore",
)
"""Our classes that inherit from SGLang's and are used when a policy is on."""


def record() -> str:
    """See :func:`installer.record`, of everything above."""
    return installer.record(ALL, (*LAUNCH_REPLACES, *SERVE_REPLACES), OVERRIDING)
