"""Combinations that cannot work, refused while SGLang resolves its arguments, before a model is loaded.

Each refusal names the flag, the reason and a recipe. What only the built model shows is refused in the scheduler
(``scheduler.built_check``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from nexus_sglang.errors import ConfigError
from nexus_sglang.sglang_plugin import carrier

logger = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("torch_native", "triton", "flashinfer")
"""Those with a reader for evicted sequences (``sglang_plugin.attention``)."""

VARIABLES = {
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": "a recorded plan would freeze how many tokens are resident",
    "SGLANG_RUST_SERVER": "it passes no meta_info of plugins on, and serves chats without their pins",
}
"""Environment variables that do not go together with a policy, and why."""

KV_DTYPES = ("auto", "bf16", "bfloat16")
"""Values of ``--kv-cache-dtype`` that keep keys unquantised; ``auto`` is looked at again when the pool is built."""


class Refusal(NamedTuple):
    """One rule.

    Attributes:
        flag: what the user set.
        applies: whether the resolved arguments break the rule.
        why: reason, for the message.
        recipe: legal alternative, for the message.
    """

    flag: str
    applies: Callable[[Any], bool]
    why: str
    recipe: str


def _on(name: str) -> Callable[[Any], bool]:
    """Applies where an argument is set at all."""
    return lambda args: bool(getattr(args, name, None))


def _above_one(name: str) -> Callable[[Any], bool]:
    """Applies where a number is above 1."""
    return lambda args: (getattr(args, name, 1) or 1) > 1


def _interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU: far too slow to serve, enough to test."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _whole_prefill_graphs(args: Any) -> bool:
    """Applies where a prefill is recorded as one graph, because the user or the model asks for it."""
    resolved = getattr(getattr(args, "cuda_graph_config", None), "prefill", None)
    return "full" in (args.cuda_graph_backend_prefill, getattr(resolved, "backend", None))


_HOST_COPIES = "it copies KV by slot to another tier and would bring evicted tokens back"

REFUSALS = (
    Refusal("--speculative-algorithm", _on("speculative_algorithm"),
            "draft and verify passes address KV by logical slot", "drop the flag"),
    Refusal("--disaggregation-mode", lambda a: a.disaggregation_mode not in (None, "null"),
            "KV rows are transferred by physical slot", "serve prefill and decode in one instance"),
    Refusal("--pp-size", _above_one("pp_size"), "each stage would choose other tokens", "use --pp-size 1"),
    Refusal("--enable-dp-attention", _on("enable_dp_attention"),
            "choosing blocks with it was never tried", "use --dp-size without it, or --tp-size"),
    Refusal("--dcp-size", _above_one("dcp_size"), "it spreads one sequence's KV over ranks", "use --dcp-size 1"),
    Refusal("--attn-cp-size", _above_one("attn_cp_size"), "it spreads one sequence over ranks", "use --attn-cp-size 1"),
    Refusal("--enable-kv-cache-sharding", _on("enable_kv_cache_sharding"),
            "it spreads one sequence's KV over ranks", "drop the flag"),
    Refusal("--enable-hierarchical-cache", _on("enable_hierarchical_cache"), _HOST_COPIES, "drop the flag"),
    Refusal("--enable-lmcache", _on("enable_lmcache"), _HOST_COPIES, "drop the flag"),
    Refusal("--enable-flexkv", _on("enable_flexkv"), _HOST_COPIES, "drop the flag"),
    Refusal("--enable-unified-cache-external-linker", _on("enable_unified_cache_external_linker"),
            _HOST_COPIES, "drop the flag"),
    Refusal("--enable-unified-memory", _on("enable_unified_memory"),
            "it has virtual slots of its own", "drop the flag"),
    Refusal("--enable-hisparse", _on("enable_hisparse"), "it has virtual slots of its own", "drop the flag"),
    Refusal("--enable-page-major-kv-layout", _on("enable_page_major_kv_layout"),
            "tokens are evicted one slot at a time", "drop the flag"),
    Refusal("--prefill-only-disable-kv-cache", _on("prefill_only_disable_kv_cache"),
            "there is no KV cache to evict from", "drop the flag, or use --kv-policy none"),
    Refusal("--page-size", _above_one("page_size"), "eviction frees single slots", "use --page-size 1"),
    Refusal("--enable-torch-compile", _on("enable_torch_compile"),
            "a compiled model would freeze which queries are kept", "drop the flag"),
    Refusal("--cuda-graph-backend-prefill", _whole_prefill_graphs,
            "a graph of a whole prefill would freeze which queries are kept",
            "use --cuda-graph-backend-prefill breakable, or disabled"),
    Refusal("--enable-nvidia-megakernel", _on("enable_nvidia_megakernel"),
            "it replaces the attention that evicted sequences are read by", "drop the flag"),
    Refusal("--enable-mixed-chunk", _on("enable_mixed_chunk"),
            "a batch is prefill or decode here", "drop the flag"),
    Refusal("--enable-two-batch-overlap", _on("enable_two_batch_overlap"),
            "it splits a batch under way", "drop the flag"),
    Refusal("--enable-single-batch-overlap", _on("enable_single_batch_overlap"),
            "it splits a batch under way", "drop the flag"),
    Refusal("--enable-pdmux", _on("enable_pdmux"), "it splits a batch under way", "drop the flag"),
    Refusal("--dllm-algorithm", _on("dllm_algorithm"), "diffusion models rewrite their KV", "serve a causal model"),
    Refusal("--enable-deterministic-inference", _on("enable_deterministic_inference"),
            "its batch-invariant kernels read logical rows", "drop the flag"),
    Refusal("--tokenizer-worker-num", _above_one("tokenizer_worker_num"),
            "SGLang does not load plugins in tokenizer workers", "use --tokenizer-worker-num 1"),
    Refusal("--enable-session-radix-cache", _on("enable_session_radix_cache"),
            "sessions keep rows of their own", "drop the flag: multi-turn prefixes are shared by the radix cache"),
    Refusal("--enable-streaming-session", _on("enable_streaming_session"),
            "sessions keep rows of their own", "drop the flag: multi-turn prefixes are shared by the radix cache"),
    Refusal("--smg-grpc-mode", lambda a: a.smg_grpc_mode or a.grpc_mode,
            "its own request manager serves chats without their pins",
            "use --grpc-port, which serves gRPC beside HTTP"),
    Refusal("--enable-mis", _on("enable_mis"),
            "scoring many items at once switches the radix cache off", "drop the flag, or use --kv-policy none"),
    Refusal("--disable-radix-cache", _on("disable_radix_cache"),
            "eviction works inside the radix cache", "drop the flag, or use --kv-policy none"),
    Refusal("--radix-cache-backend", _on("radix_cache_backend"),
            "eviction works inside SGLang's own radix cache", "drop the flag"),
    Refusal("--kv-canary", lambda a: a.kv_canary not in (None, "none"), "it reads KV by logical slot", "drop the flag"),
    Refusal("--kv-events-config", _on("kv_events_config"),
            "it would publish evicted blocks as resident", "drop the flag"),
    Refusal("--use-ray", _on("use_ray"), "the settings do not reach Ray actors", "drop the flag"),
    Refusal("--is-embedding", _on("is_embedding"),
            "there is no generation to keep a cache for", "use --kv-policy none"),
    Refusal("--kv-cache-dtype", lambda a: a.kv_cache_dtype not in KV_DTYPES,
            "block scores need unquantised keys", "use --kv-cache-dtype auto"),
)  # fmt: skip
# One rule in two lines, where the formatter would take five.


def refuse(args: Any, model: Any = None) -> None:
    """Check everything that is known before a model is loaded.

    Args:
        args: SGLang's resolved arguments.
        model: SGLang's ``ModelConfig``; None to look at the arguments alone.

    Raises:
        ConfigError: for the first rule that applies.
    """
    for rule in REFUSALS:
        if rule.applies(args):
            value = getattr(args, rule.flag[2:].replace("-", "_"), True)
            shown = "" if value in (True, None) else f" {value}"
            raise ConfigError(f"--kv-policy does not work with {rule.flag}{shown}: {rule.why}. Recipe: {rule.recipe}.")
    for backend in sorted(
        {args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend} - {None}
    ):
        refuse_backend(backend, args)
    for variable, why in refused_variables().items():
        value = os.environ[variable]
        raise ConfigError(f"--kv-policy does not work with {variable}={value}: {why}. Recipe: unset it.")
    if model is not None:
        refuse_model(model)


def refused_variables() -> dict[str, str]:
    """Those of :data:`VARIABLES` that are switched on, and why they are refused."""
    on = ("1", "true", "yes", "y")
    return {name: why for name, why in VARIABLES.items() if os.environ.get(name, "").lower() in on}


def backend_with_reader(default: str, has_flashinfer: bool) -> str:
    """The attention backend to use where nobody chose one.

    Args:
        default: what SGLang would use.
        has_flashinfer: whether FlashInfer is installed and runs on this device.
    """
    if default in ATTENTION_BACKENDS:
        return default
    return "flashinfer" if has_flashinfer else "triton"


def refuse_backend(backend: str, args: Any) -> None:
    """Check one attention backend.

    Args:
        backend: its name, as in ``--attention-backend``.
        args: SGLang's resolved arguments, of which the device is looked at.

    Raises:
        ConfigError: it does not read compact rows, or cannot run on this device.
    """
    if backend not in ATTENTION_BACKENDS:
        why = "it has no reader for evicted sequences"
        recipe = "--attention-backend flashinfer, or triton"
    elif backend != "torch_native" and args.device == "cpu" and not (backend == "triton" and _interpreted()):
        why = "it needs a GPU"
        recipe = "--attention-backend torch_native"
    else:
        return
    raise ConfigError(f"--kv-policy does not work with --attention-backend {backend}: {why}. Recipe: {recipe}.")


def refuse_model(model: Any) -> None:
    """Check the config of a model.

    Args:
        model: SGLang's ``ModelConfig``.

    Raises:
        ConfigError: when the architecture's cache is not plain keys and values of full causal attention.
    """
    found = None
    if getattr(model, "is_hybrid_swa", False) or (getattr(model, "sliding_window_size", None) or 0) > 0:
        found = "its sliding window counts logical positions"
    elif getattr(getattr(model, "attention_arch", None), "name", "MHA") != "MHA":
        found = "it caches latent vectors (MLA)"
    elif getattr(model, "is_encoder_decoder", False):
        found = "encoder-decoder attention"
    elif getattr(model, "is_multimodal", False):
        found = "multimodal inputs"
    elif getattr(model, "has_attention_sinks", False):
        found = "block scores do not know its attention sinks"
    elif not getattr(model, "is_generation", True):
        found = "it does not generate"
    if found:
        name = ", ".join(getattr(model.hf_config, "architectures", None) or ["this model"])
        raise ConfigError(
            f"--kv-policy does not work with {name}: {found}. "
            "Recipe: a plain causal MHA or GQA model, or --kv-policy none."
        )


def choose_backend(server_args: Any, previous: Callable[[Any], None]) -> None:
    """In place of SGLang's resolution step ``handle_attention_backend_compatibility``.

    Where nobody chose a backend, and SGLang's default for the GPU has no reader for evicted sequences (fa3 on Hopper,
    trtllm_mha on Blackwell), it takes one that has.

    Args:
        server_args: SGLang's arguments, on their way to being resolved.
        previous: the step as it was, called in any case.
    """
    if getattr(server_args, "_nexus_config", None) is not None:
        from sglang.srt.arg_groups import model_override_base as resolution
        from sglang.srt.arg_groups.overrides import declare_resolution
        from sglang.srt.runtime_context import get_platform

        if resolution.is_attention_backend_not_set(resolution.resolving_view(server_args)):
            model = resolution.model_config_of(server_args)
            uses_mla = resolution.use_mla_backend(server_args)
            default = resolution.get_default_attn_backend(server_args, uses_mla, model)
            chosen = backend_with_reader(default, get_platform().has_flashinfer)
            if chosen != default:
                # Before SGLang's own step: that would also fit the page size to its default.
                declare_resolution(server_args, "nexus", attention_backend=chosen)
                logger.warning(
                    "--kv-policy: --attention-backend %s in place of %s, which has no reader for evicted sequences",
                    chosen,
                    default,
                )
    previous(server_args)


def validate(server_args: Any, previous: Callable[[Any], None]) -> None:
    """In place of SGLang's resolution step ``handle_other_validations``, the last: refuses what cannot work.

    Args:
        server_args: SGLang's arguments, resolved but for this step.
        previous: the step as it was, called first.

    Raises:
        ConfigError: see :func:`refuse`.
    """
    previous(server_args)
    config = getattr(server_args, "_nexus_config", None)
    carrier.publish(config)  # arguments that were not stamped are a launch without a policy
    if config is None:
        return
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view

    refuse(resolving_view(server_args), model_config_of(server_args))
