"""Putting eviction into SGLang's own start-up: four steps, each when SGLang has just built what it needs.

1. :func:`build_allocator`: the KV pool exists. Page table, runtime, and an allocator that hands out virtual ids.
2. :func:`translate_writes`: the request pool exists. Compact rows follow its rows; writes go to physical slots.
3. :func:`adopt_layers`: model and attention backends exist. Query rings and evictor.
4. :func:`scheduler_ready`: the prefix cache exists. Last checks before serving.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from nexus_sglang.errors import ConfigError
from nexus_sglang.evidence.query_window import LayerShape
from nexus_sglang.kv_slots.capacity import virtual_size
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.sglang_plugin import carrier
from nexus_sglang.sglang_plugin.attention import backends
from nexus_sglang.sglang_plugin.installer import Hook

from . import built_check, ranks
from .row_listener import RowListener
from .runtime import NexusRuntime, runtime_of

logger = logging.getLogger(__name__)

WHOLE_BARRIER = ("SGLANG_ENABLE_WAR_BARRIER", "SGLANG_FORCE_COARSE_WAR_BARRIER")
"""By default SGLang's scheduler goes on once a pass has read its inputs; the eviction comes later (see ``passes``).
The first is SGLang's default on CUDA, not on ROCm."""


def build_allocator(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """AROUND ``KVCacheConfigurator._build_token_to_kv_pool_allocator``: virtual ids over the same pool.

    Args:
        original: builds SGLang's allocator, whose pool and size are taken over.
        configurator: SGLang's ``KVCacheConfigurator``.
        kwargs: its arguments; ``req_to_token_pool`` is the request pool.

    Returns:
        A ``NexusAllocator``.

    Raises:
        ConfigError: the pool is not one of plain keys and values, or too small for the budget.
    """
    # Not at the top: they import SGLang's memory pools, which only a scheduler process needs.
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.runtime_context import get_schedule

    from .allocator import NexusAllocator

    stock = original(configurator, **kwargs)
    if type(stock) is not TokenToKVPoolAllocator:
        raise ConfigError(
            f"--kv-policy needs SGLang's plain token allocator, not {type(stock).__name__}. "
            "Recipe: a plain causal MHA or GQA model with --page-size 1."
        )
    # Read later in this process, when the prefix cache is built and in the event loop; other processes never see them.
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "nexus"
    if str(stock.device) != "cpu":  # where there are streams
        os.environ.update(dict.fromkeys(WHOLE_BARRIER, "1"))
    config = carrier.current()
    schedule = get_schedule()
    requests = kwargs["req_to_token_pool"]
    ids = virtual_size(stock.size, config, requests.max_context_len, requests.size)
    table = PageTable(ids, stock.size, stock.device)
    chunk = schedule.chunked_prefill_size
    if chunk is None or chunk <= 0:
        chunk = requests.max_context_len
    runtime = NexusRuntime(config, table, chunk, overlap=not schedule.disable_overlap_schedule)
    return NexusAllocator(runtime, stock.dtype, stock.device, stock.get_kvcache(), stock.need_sort)


def translate_writes(result: Any, runner: Any) -> None:
    """AFTER ``ModelRunner.init_kv_index_translator``: forward passes write to physical slots, rows are followed.

    Args:
        result: None.
        runner: SGLang's ``ModelRunner``.
    """
    from sglang.srt.mem_cache.kv_loc_plan import IdSpace, IdSpaceKind

    allocator = runner.token_to_kv_pool_allocator
    runner.kv_index_translator._spaces[IdSpaceKind.FULL] = IdSpace(
        key=(IdSpaceKind.FULL, id(allocator)), write=allocator.translate_write_loc
    )
    requests = runner.req_to_token_pool
    allocator.runtime.attach_rows(requests.req_to_token)
    requests.attach_aux_cache(RowListener(allocator.runtime))


def adopt_layers(result: Any, runner: Any) -> None:
    """AFTER ``ModelRunner.init_attention_backends``: check the layers, set up rings and evictor, compare ranks.

    Args:
        result: None.
        runner: SGLang's ``ModelRunner``.

    Raises:
        ConfigError: a layer or the pool is of a kind that cannot be evicted from.
        SelfCheckError: something is not in place, or ranks differ.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    built_check.refuse_pool(runner.kv_cache_dtype)
    layers = {}
    for module in runner.model.modules():
        if isinstance(module, RadixAttention):
            built_check.refuse_layer(module)
            layers[module.layer_id] = LayerShape(module.tp_q_head_num, module.qk_head_dim, module.scaling)
    runtime = runtime_of(runner)
    runtime.attach_layers(
        dict(sorted(layers.items())),
        runner.dtype,
        runner.token_to_kv_pool,
        ranks.score_group(),
        backends.reports_lse(runner),
    )
    backends.install_rows(runner, runtime)
    built_check.check_runner(runner)
    ranks.check_ranks(runtime)


def scheduler_ready(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler.__init__``: the prefix cache exists; last check before serving.

    Args:
        result: None.
        scheduler: SGLang's ``Scheduler``.
        args: as for the hooked function.
        kwargs: as for the hooked function.

    Raises:
        SelfCheckError: something is not in place.
    """
    built_check.check_scheduler(scheduler)
    runtime = runtime_of(scheduler)
    # Asked anew each time: SGLang replaces its queue.
    runtime.attach_tree(scheduler.tree_cache.tree_core, waiting=lambda: scheduler.waiting_queue)
    if str(runtime.table.device) != "cpu":  # where kernels are compiled
        runtime.evictor.warm_up()
    logger.info(
        "nexus: policy %s, budget %s, block %d; %d virtual ids over %d physical slots, largest budget %d, "
        "query window %.1f MiB",
        runtime.config.policy,
        runtime.config.budget,
        runtime.config.block_size,
        runtime.table.virtual_size,
        runtime.table.physical_size,
        runtime.largest_budget,
        runtime.window.bytes / 2**20,
    )


HOOKS = (
    Hook(
        "mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool_allocator",
        "around",
        build_allocator,
    ),
    Hook("model_executor.model_runner.ModelRunner.init_kv_index_translator", "after", translate_writes),
    Hook("model_executor.model_runner.ModelRunner.init_attention_backends", "after", adopt_layers),
    Hook("managers.scheduler.Scheduler.__init__", "after", scheduler_ready),
)
