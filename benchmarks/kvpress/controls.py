"""What makes the difference: our policies with one setting changed at a time, offline, from one prefill per prompt.

``benchmarks.offline`` measures and chooses with the server's own code. The three settings that the servers also ran are
among the variants, so that their answers can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.offline.choosing import describe_blocks, keep_tokens
from benchmarks.offline.reader import Prefix, Reader
from nexus_sglang.config import NexusConfig, TokenAmount
from nexus_sglang.policy import Evidence, make_policy
from nexus_sglang.policy.base import Policy

BUDGET = 0.2
LONGEST_WINDOW = 64


class Variant(NamedTuple):
    """A policy and what differs from the server's defaults.

    Attributes:
        policy: with its fields.
        block_size: tokens per block.
        window: last queries that judge.
    """

    policy: Policy
    block_size: int = 32
    window: int = 16


_MAXIMUM = {"head_reduction": "max"}
VARIANTS = {
    "snapkv": Variant(make_policy("snapkv", {})),
    "tova": Variant(make_policy("tova", {})),
    "streaming-llm": Variant(make_policy("streaming-llm", {})),
    "snapkv, window 64": Variant(make_policy("snapkv", {}), window=64),
    "snapkv, blocks of 1": Variant(make_policy("snapkv", {}), block_size=1),
    "snapkv, maximum over heads": Variant(make_policy("composed", _MAXIMUM)),
    "tova, blocks of 1": Variant(make_policy("tova", {}), block_size=1),
    "tova, maximum over heads": Variant(make_policy("composed", {**_MAXIMUM, "window": "last"})),
    "streaming-llm, blocks of 1": Variant(make_policy("streaming-llm", {}), block_size=1),
}


class AnyReader(Reader):
    """A reader of any dtype; the window of :class:`Reader` takes float32 queries only."""

    def _attend(self, module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        watched = self._capture
        self._capture = None
        if watched:
            window, plan = watched
            window.capture(module.layer_idx, query[0].transpose(0, 1).float(), plan)
        out = super()._attend(module, query, *args, **kwargs)
        self._capture = watched
        return out


def load(folder: str, dtype: str) -> Reader:
    """A reader in ``dtype`` that keeps as many queries as the widest window needs."""
    return AnyReader(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), None, window=LONGEST_WINDOW)


def choose(prefix: Prefix, variant: Variant, evidence: Evidence) -> torch.Tensor:
    """int64 ``[R]``: positions that stay, one choice for all layers and heads."""
    length = len(prefix.ids)
    config = NexusConfig("snapkv", TokenAmount(BUDGET), block_size=variant.block_size, window=variant.window)
    budget = config.budget_tokens(length)
    blocks = describe_blocks(length, prefix.identities(config.block_size), config, budget, variant.policy.state_width)
    if evidence.attention is not None:
        evidence = evidence._replace(attention=evidence.attention[-variant.window :])
    return keep_tokens(variant.policy, evidence, blocks, config, budget)


def decode(reader: Reader, prefix: Prefix, tokens: torch.Tensor, count: int) -> list[int]:
    """``count`` greedy tokens: the first after the whole prompt, the others from the cache of ``tokens`` only."""
    cache = DynamicCache()
    length = len(prefix.ids)
    for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
        cache.update(keys[None, :, tokens], values[None, :, tokens], layer)
    out = [int(prefix.logits[-1].argmax())]
    for position in range(length, length + count - 1):
        where = torch.tensor([[position]])
        logits = reader.model(torch.tensor([out[-1:]]), past_key_values=cache, position_ids=where).logits
        out.append(int(logits[0, -1].argmax()))
    return out


@torch.inference_mode()
def run(reader: Reader, prompt: dict[str, Any]) -> Iterator[tuple[str, list[int], int]]:
    """Name, answer's token ids and tokens kept, for each variant."""
    prefix = reader.read(prompt["ids"])
    measured: dict[tuple, Evidence] = {}
    for name, variant in VARIANTS.items():
        key = (variant.block_size, variant.policy.head_reduction, variant.policy.needs_attention)
        if key not in measured:
            measured[key] = prefix.measure(variant.policy, variant.block_size)
        tokens = choose(prefix, variant, measured[key])
        yield name, decode(reader, prefix, tokens, prompt["tokens"]), len(tokens)
