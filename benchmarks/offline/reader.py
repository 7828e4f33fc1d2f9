"""A Hugging Face model whose queries are watched and whose cache is cut: the offline reference, never the server.

Kept keys stay as they were rotated and new tokens get their logical positions, as on the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from nexus_sglang.eviction.sequence import block_identities
from nexus_sglang.evidence.measure import measure
from nexus_sglang.evidence.query_window import CapturePlan, LayerShape, QueryWindow
from nexus_sglang.kv_slots.kv_buffers import KVBuffers
from nexus_sglang.kv_slots.resident_row import ResidentRow
from nexus_sglang.policy.base import Evidence, Policy

_NAME = "nexus_watched"


@dataclass
class Prefix:
    """Tokens a model has read.

    Attributes:
        ids: token ids, T of them.
        keys: per layer ``[Hkv, T, D]``, rotary applied.
        values: per layer ``[Hkv, T, D]``.
        window: the last W queries, in row 0.
        logits: float ``[n, vocab]`` after the last n tokens, as many as were asked for.
    """

    ids: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    window: QueryWindow
    logits: torch.Tensor

    def measure(self, policy: Policy, block_size: int, resident: torch.Tensor | None = None) -> Evidence:
        """The evidence the server would measure for ``policy``, by the server's own code.

        Args:
            policy: says what to measure.
            block_size: tokens per block.
            resident: int64 ``[R]``, ascending, positions still cached; None is all of them.
        """
        length = len(self.ids)
        positions = torch.arange(length) if resident is None else resident
        blocks = len(torch.unique_consecutive(positions // block_size))
        # The cache is its own pool: a token's slot is its position, and its virtual id, which nobody asks for, as well.
        row = ResidentRow.of(0, length, 0, block_size, blocks, positions, positions, positions)
        buffers = KVBuffers(
            lambda layer: self.keys[layer].transpose(0, 1), lambda layer: self.values[layer].transpose(0, 1)
        )
        return measure(policy, self.window, buffers, row)

    def identities(self, block_size: int) -> torch.Tensor:
        """int64 ``[N]``, see ``eviction.sequence.block_identities``."""
        known = torch.from_numpy(block_identities(self.ids, block_size))
        return torch.nn.functional.pad(known, (0, -(-len(self.ids) // block_size) - len(known)))


@dataclass
class Kept:
    """Which cached tokens stay.

    Attributes:
        index: per layer int64 ``[Hkv, R]``, positions.
        valid: per layer bool ``[Hkv, R]``; False entries are padding.
    """

    index: list[torch.Tensor]
    valid: list[torch.Tensor]

    @classmethod
    def shared(cls, tokens: torch.Tensor, layers: int, heads: int) -> Kept:
        """The same int64 ``[R]`` for every layer and head."""
        index = tokens.expand(heads, -1)
        return cls([index] * layers, [torch.ones_like(index, dtype=torch.bool)] * layers)

    def key(self) -> tuple:
        """Equal for equal shared choices; a choice per layer equals only itself."""
        one = all(index is self.index[0] for index in self.index)
        return tuple(self.index[0][0].tolist()) if one else (id(self),)

    def count(self) -> float:
        """Tokens kept, mean over layers and heads."""
        return sum(float(v.sum()) / v.shape[0] for v in self.valid) / len(self.valid)


def _pad(x: torch.Tensor, width: int) -> torch.Tensor:
    """``[Hkv, R]`` to ``[Hkv, width]`` with zeros behind."""
    return torch.nn.functional.pad(x, (0, width - x.shape[1]))


class Reader:
    """Reads with a model whose attention is :meth:`_attend`; see :meth:`load`.

    Args:
        model: a Llama-like ``ForCausalLM``.
        tokenizer: its tokenizer; None where only token ids are read.
        window: last queries kept.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, window: int = 16) -> None:
        AttentionInterface.register(_NAME, self._attend)
        model.set_attn_implementation(_NAME)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.window = window
        config = model.config
        self.layers = config.num_hidden_layers
        self.kv_heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._shape = LayerShape(config.num_attention_heads, dim, dim**-0.5)
        self._capture: tuple[QueryWindow, CapturePlan] | None = None
        self._valid: list[torch.Tensor] | None = None

    @classmethod
    def load(cls, folder: str | Path, window: int = 16) -> Reader:
        """From a Hugging Face folder, in float32 (on CPUs faster than bfloat16)."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(model, AutoTokenizer.from_pretrained(folder), window)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def read(self, ids: list[int], before: Prefix | None = None, last: int = 1) -> Prefix:
        """Read tokens with everything resident.

        Args:
            ids: token ids.
            before: what was read before them; it stays as it is.
            last: after how many of the last tokens logits are kept.
        """
        start = len(before.ids) if before else 0
        shapes = dict.fromkeys(range(self.layers), self._shape)
        window = QueryWindow(shapes, 1, self.window, torch.float32, "cpu")
        cache = DynamicCache()
        if before:
            for layer in range(self.layers):
                window.rings[layer].copy_(before.window.rings[layer])
                cache.update(before.keys[layer][None], before.values[layer][None], layer)
        self._capture = (window, window.plan_extend([0], [start], [len(ids)], "cpu"))
        logits = self._forward([ids], start, cache, last)
        self._capture = None
        keys = [layer.keys[0] for layer in cache.layers]
        values = [layer.values[0] for layer in cache.layers]
        return Prefix((before.ids if before else []) + ids, keys, values, window, logits[0])

    def continue_reduced(self, prefix: Prefix, kept: list[Kept], ids: list[int], start: int, last: int) -> torch.Tensor:
        """Read tokens on each of several reduced caches at once.

        Args:
            prefix: what was read before.
            kept: what each cache keeps of it.
            ids: token ids, the same for all.
            start: position of the first.
            last: after how many of the last tokens logits are wanted.

        Returns:
            float32 ``[len(kept), last, vocab]``: logits after the last ``last`` tokens.
        """
        cache = DynamicCache()
        self._valid = []
        rows = torch.arange(self.kv_heads)[:, None]
        for layer in range(self.layers):
            width = max(k.index[layer].shape[1] for k in kept)
            index = [_pad(k.index[layer], width) for k in kept]
            keys = torch.stack([prefix.keys[layer][rows, i] for i in index])
            cache.update(keys, torch.stack([prefix.values[layer][rows, i] for i in index]), layer)
            self._valid.append(torch.stack([_pad(k.valid[layer], width) for k in kept]))
        logits = self._forward([ids] * len(kept), start, cache, last)
        self._valid = None
        return logits

    @torch.inference_mode()
    def _forward(self, batch: list[list[int]], start: int, cache: DynamicCache, last: int) -> torch.Tensor:
        positions = torch.arange(start, start + len(batch[0])).expand(len(batch), -1)
        out = self.model(
            torch.tensor(batch), position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=last
        )
        return out.logits.float()

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention ``[B, H, Q, D]`` over ``[B, Hkv, T, D]``: causal by place, cached tokens seen unless padding."""
        layer = module.layer_idx
        new = query.shape[2]
        total = key.shape[2]
        if self._capture:
            window, plan = self._capture
            window.capture(layer, query[0].transpose(0, 1), plan)
        group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(group, 1)
        value = value.repeat_interleave(group, 1)
        mask = None
        if new != total:
            mask = torch.ones(new, total, dtype=torch.bool).tril(total - new).expand(query.shape[0], 1, -1, -1)
            if self._valid is not None and not bool(self._valid[layer].all()):
                seen = self._valid[layer].repeat_interleave(group, 1)[:, :, None, :].expand(-1, -1, new, -1)
                mask = torch.cat((seen, mask[..., total - new :].expand(-1, seen.shape[1], -1, -1)), dim=-1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None and new > 1, scale=scaling
        )
        return out.transpose(1, 2).contiguous(), None
