"""GPU memory beside the KV pool: SGLang gives the pool all but a fixed slack, so what requests need comes out of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nexus_sglang.errors import ConfigError
from nexus_sglang.kv_slots.capacity import affordable_requests, request_memory, side_memory, virtual_size
from nexus_sglang.sglang_plugin import carrier
from nexus_sglang.sglang_plugin.installer import Hook

logger = logging.getLogger(__name__)


def reserve_memory(original: Callable[..., int], configurator: Any, *args: Any, **kwargs: Any) -> int:
    """AROUND ``KVCacheConfigurator._profile_available_bytes``: leave room for query windows, rows and virtual ids.

    Args:
        original: bytes that SGLang would give the pool.
        configurator: SGLang's ``KVCacheConfigurator``.
        args: as for the hooked function.
        kwargs: as for the hooked function.

    Returns:
        Bytes for the pool, less what as many requests need as SGLang will admit.

    Raises:
        ConfigError: nothing would be left for the pool.
    """
    free = original(configurator, *args, **kwargs)
    if configurator.device == "cpu":
        return free
    tokens = configurator.config_from_budget(free).max_total_num_tokens
    requests = configurator.resolve_max_num_reqs(tokens)
    ids = virtual_size(tokens, carrier.current(), configurator.model_config.context_len, requests)
    taken = side_memory(requests, _per_request(configurator), ids)
    shown = f"{taken / 2**30:.2f} of {free / 2**30:.2f} GiB go to query windows and rows of {requests} requests"
    if taken >= free:
        raise ConfigError(
            f"--kv-policy leaves no memory for the KV pool: {shown}. Recipe: lower --max-running-requests."
        )
    logger.info("nexus: %s; --max-running-requests sets how many", shown)
    return free - taken


def limit_requests(result: int, configurator: Any, token_capacity: int) -> int:
    """AFTER ``KVCacheConfigurator.resolve_max_num_reqs``: where nobody said how many, what a small share pays for.

    Args:
        result: requests that SGLang would admit at once.
        configurator: SGLang's ``KVCacheConfigurator``.
        token_capacity: tokens of the pool.

    Returns:
        On a GPU no more requests than have windows and rows in ``capacity.REQUEST_SHARE`` of the pool's bytes.
    """
    from sglang.srt.runtime_context import get_parallel, get_schedule

    if configurator.device == "cpu" or get_schedule().max_running_requests is not None:
        return result
    model = configurator.model_config
    heads = model.get_num_kv_heads(get_parallel().attn_tp_size)
    token = 2 * model.num_hidden_layers * heads * model.head_dim * configurator.kv_cache_dtype.itemsize
    return min(result, affordable_requests(token_capacity * token, _per_request(configurator)))


def _per_request(configurator: Any) -> int:
    """Bytes allocated for each request that may run."""
    from sglang.srt.runtime_context import get_parallel

    model = configurator.model_config
    heads = model.get_max_num_attention_heads() // get_parallel().attn_tp_size
    return request_memory(
        model.context_len,
        carrier.current().window,
        model.num_hidden_layers,
        heads,
        model.head_dim,
        configurator.model_dtype.itemsize,
    )


HOOKS = (
    Hook("mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes", "around", reserve_memory),
    Hook("mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs", "after", limit_requests),
)
