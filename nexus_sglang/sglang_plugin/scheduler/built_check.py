"""What SGLang has built can be evicted from, and is ours where it must be. Asked before the first request."""

from __future__ import annotations

from typing import Any

import torch

from nexus_sglang.errors import ConfigError
from nexus_sglang.sglang_plugin import installer
from nexus_sglang.sglang_plugin.attention import backends

from .row_listener import RowListener


def refuse_layer(layer: Any) -> None:
    """Check one attention layer (what a model's config alone does not show).

    Args:
        layer: SGLang's ``RadixAttention``.

    Raises:
        ConfigError: naming the layer and what it does.
    """
    found = None
    if layer.is_cross_attention:
        found = "cross attention"
    elif layer.sliding_window_size is not None and layer.sliding_window_size > 0:
        found = f"a sliding window of {layer.sliding_window_size}"
    elif layer.logit_cap:
        found = f"a logit cap of {layer.logit_cap}"
    elif getattr(layer.attn_type, "value", "decoder") != "decoder":
        found = f"{layer.attn_type.value} attention"
    elif getattr(layer, "k_scale_float", None) not in (None, 1.0):
        found = f"keys cached at a scale of {layer.k_scale_float:g}"
    if found:
        raise ConfigError(
            f"--kv-policy does not work with this model: layer {layer.layer_id} has {found}. "
            "Recipe: a plain causal MHA or GQA model, or --kv-policy none."
        )


def refuse_pool(dtype: torch.dtype) -> None:
    """Check what the KV pool was built of: ``--kv-cache-dtype auto`` follows the checkpoint.

    Raises:
        ConfigError: it is quantised.
    """
    if dtype.itemsize < 2:
        raise ConfigError(
            f"--kv-policy does not work with --kv-cache-dtype auto where the checkpoint makes it {dtype}: "
            "block scores need unquantised keys. Recipe: --kv-cache-dtype bfloat16."
        )


def check_runner(runner: Any) -> None:
    """After the attention backends are built: every hook of this process is in place, every wrapped object ours.

    Args:
        runner: SGLang's ``ModelRunner``.

    Raises:
        SelfCheckError: listing what is not.
    """
    # Late: these import SGLang's memory pools, which must not be imported before SGLang has parsed its arguments.
    from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind

    from .allocator import NexusAllocator

    problems = installer.check_installed()
    allocator = runner.token_to_kv_pool_allocator
    if not isinstance(allocator, NexusAllocator):
        problems.append(f"the KV allocator is {type(allocator).__name__}, not NexusAllocator")
    elif runner.kv_index_translator._spaces[IdSpaceKind.FULL].write != allocator.translate_write_loc:
        problems.append("KV writes are not translated to physical slots")
    if not isinstance(runner.req_to_token_pool._aux_cache, RowListener):
        problems.append("the request pool does not report to the nexus runtime")
    for backend in backends.backends(runner):
        if not backends.reads_compact_rows(backend, runner):
            problems.append(f"attention backend {type(backend).__name__} does not read compact rows")
    installer.refuse(problems)


def check_scheduler(scheduler: Any) -> None:
    """After the scheduler is built, before it serves.

    Args:
        scheduler: SGLang's ``Scheduler``.

    Raises:
        SelfCheckError: listing what is not ours.
    """
    from .allocator import NexusAllocator
    from .tree import NexusTreeCore

    problems = []
    if not isinstance(scheduler.token_to_kv_pool_allocator, NexusAllocator):
        problems.append("the scheduler's KV allocator is not NexusAllocator")
    tree = scheduler.tree_cache
    core = getattr(tree, "tree_core", None)
    if not isinstance(core, NexusTreeCore):
        problems.append(f"the prefix cache is {type(tree).__name__} over {type(core).__name__}, not NexusTreeCore")
    if scheduler.max_total_num_tokens != scheduler.token_to_kv_pool_allocator.table.virtual_size:
        problems.append(f"the scheduler plans with {scheduler.max_total_num_tokens} tokens, not the virtual capacity")
    installer.refuse(problems)
