"""How large the two id spaces must be, and whether a pool can serve a budget at all. Plain arithmetic."""

from __future__ import annotations

from nexus_sglang.config import NexusConfig
from nexus_sglang.errors import ConfigError

VIRTUAL_LIMIT = 16
"""Most virtual ids per physical slot: a virtual id costs tens of bytes, a KV slot tens of kilobytes."""
VIRTUAL_ID_BYTES = 24
"""Page table, free list, and the ledger of a policy that remembers one number per block."""
REQUEST_SHARE = 1 / 16
"""Most of the pool's memory that query windows and rows may take where nobody chose ``--max-running-requests``. SGLang
would admit 2,048 requests or more, whose windows can outweigh the pool of a large model."""
FEWEST_REQUESTS = 64
"""Lower bound of the requests admitted, even above ``REQUEST_SHARE``."""
SMALLEST_CHUNK = 32
"""Tokens; the smallest ``--chunked-prefill-size`` worth recommending."""


def virtual_size(physical: int, config: NexusConfig, context_length: int, max_requests: int) -> int:
    """Virtual ids to create for a pool.

    Enough for every running request at full context and for the pool filled at the configured density, but at most
    ``VIRTUAL_LIMIT`` times the pool (and always the pool plus one full context).

    Args:
        physical: slots of the pool.
        config: its budget says how many tokens a slot serves.
        context_length: most tokens of a request.
        max_requests: requests that may run at once.
    """
    density = config.budget.value if config.budget.is_fraction else min(1.0, config.budget.value / context_length)
    wanted = max(physical / density, context_length * max_requests)
    return int(max(physical + context_length, min(wanted, VIRTUAL_LIMIT * physical)))


def chunk_room(chunk: int, overlap: bool) -> int:
    """Slots that chunks take beside the resident tokens.

    Args:
        chunk: tokens of a prefill chunk.
        overlap: whether the next chunk is allocated before the last is evicted from (SGLang's overlap schedule).
    """
    return chunk * (2 if overlap else 1)


def largest_budget(physical: int, config: NexusConfig, chunk: int, overlap: bool) -> int:
    """The largest budget one sequence can be granted on this pool, in tokens.

    Args:
        physical: slots of the pool.
        config: its block size.
        chunk: tokens of a prefill chunk.
        overlap: as for :func:`chunk_room`.
    """
    return physical - chunk_room(chunk, overlap) - 2 * config.block_size


def request_memory(context_length: int, window: int, layers: int, heads: int, head_dim: int, element: int) -> int:
    """Bytes that are allocated for each request that may run: its query window, with a log-sum-exp per query, and its
    compact row.

    Args:
        context_length: most tokens of a request.
        window: queries kept.
        layers: attention layers of the model.
        heads: query heads on this rank.
        head_dim: numbers per head.
        element: bytes per number.
    """
    return window * layers * heads * (head_dim * element + 4) + 2 * 4 * context_length


def affordable_requests(pool_bytes: int, per_request: int) -> int:
    """How many requests fit ``REQUEST_SHARE`` of some memory, but no fewer than ``FEWEST_REQUESTS``.

    Args:
        pool_bytes: the memory, in bytes.
        per_request: what :func:`request_memory` says.
    """
    return max(FEWEST_REQUESTS, int(pool_bytes * REQUEST_SHARE) // per_request - 1)


def side_memory(requests: int, per_request: int, virtual: int) -> int:
    """Bytes that are allocated beside the KV pool.

    Args:
        requests: requests that may run at once; SGLang has one row more, for padding.
        per_request: what :func:`request_memory` says.
        virtual: virtual ids.
    """
    return (requests + 1) * per_request + VIRTUAL_ID_BYTES * virtual


def require_pool(physical: int, config: NexusConfig, chunk: int, overlap: bool) -> None:
    """Refuse a pool on which no request could ever run.

    Args:
        physical: slots of the pool.
        config: what budgets are made of.
        chunk: tokens of a prefill chunk.
        overlap: as for :func:`chunk_room`.

    Raises:
        ConfigError: with the arithmetic.
    """
    smallest = config.budget_tokens(0) if config.budget.is_fraction else config.budget_tokens(1)
    room = chunk_room(chunk, overlap)
    slack = 2 * config.block_size
    if physical < smallest + room + slack:
        chunks = f"2 x {chunk}" if overlap else f"{chunk}"
        left = physical - smallest - slack
        if left >= chunk_room(SMALLEST_CHUNK, overlap):
            lower = f"--chunked-prefill-size, for example to {max(SMALLEST_CHUNK, left // 4)}"
        else:
            lower = (
                f"what a budget is made of: --kv-budget {config.budget}, --kv-min-tokens {config.min_tokens}, "
                f"--kv-sink-tokens {config.sink_tokens}, --kv-block-size {config.block_size}"
            )
        raise ConfigError(
            f"the KV pool of {physical} tokens is too small: budget {smallest} + prefill chunks {chunks} + "
            f"headroom {slack} = {smallest + room + slack}. Raise --max-total-tokens (or --mem-fraction-static), "
            f"or lower {lower}"
        )
