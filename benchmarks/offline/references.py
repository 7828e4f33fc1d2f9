"""What the papers ran: every layer (and where they say so every head) chooses for itself. Evaluation only.

All take ``(prefix, config, budget)`` and return a :class:`~benchmarks.offline.reader.Kept` of ``budget`` tokens
per head on average over layers and heads (``nexus-paper``: whole blocks, at most ``budget``).
"""

from __future__ import annotations

import torch

from benchmarks.offline.choosing import describe_blocks, keep_tokens
from benchmarks.offline.reader import Kept, Prefix
from nexus_sglang.config import NexusConfig
from nexus_sglang.kernels.head_attention import block_attention
from nexus_sglang.policy.base import Evidence
from nexus_sglang.policy.nexus_paper import NexusPaper

POOL = 7
"""Width of SnapKV's max pooling over tokens (its LongBench script)."""
PYRAMID_BETA = 20
"""Steepness of PyramidKV: the last layer gets a twentieth of the room beyond the window."""
ADA_FLOOR = 0.2
"""Share of its equal part that Ada-KV leaves to every head."""


def _attention(prefix: Prefix, layer: int, size: int, average: bool) -> torch.Tensor:
    """float32 ``[W, Hq or 1, N]``: window attention of one layer, summed over blocks of ``size`` tokens."""
    length = len(prefix.ids)
    positions = torch.arange(length)
    at = prefix.window.positions(0, length)
    (queries,) = prefix.window.queries(prefix.window.rings[layer][None], 0, at)
    keys = prefix.keys[layer].transpose(0, 1)
    if average:  # before the softmax, as arXiv 2606.23961 has it
        queries, keys = (x.float().mean(dim=1, keepdim=True) for x in (queries, keys))
    scale = prefix.window.layers[layer].scale
    return block_attention(queries, keys, at, positions, positions, -(-length // size), size, scale)


def nexus_paper_per_layer(prefix: Prefix, config: NexusConfig, budget: int) -> Kept:
    """Nexus Sampling (arXiv 2606.23961): blocks, queries and keys averaged over heads, one reservoir per layer."""
    policy = NexusPaper(head_reduction="qk")
    length = len(prefix.ids)
    blocks = describe_blocks(length, prefix.identities(config.block_size), config, budget, 0)
    index = []
    for layer, keys in enumerate(prefix.keys):
        rows = _attention(prefix, layer, config.block_size, True)[:, 0]
        mine = blocks._replace(seed=config.seed + (layer << 32))
        index.append(keep_tokens(policy, Evidence(rows), mine, config, budget).expand(keys.shape[0], -1))
    return Kept(index, [torch.ones_like(i, dtype=torch.bool) for i in index])


def _snap_scores(prefix: Prefix, layer: int) -> torch.Tensor:
    """float32 ``[Hkv, T - W]``: SnapKV's pooled window mean per KV head, of the tokens before the window."""
    rows = _attention(prefix, layer, 1, False).mean(dim=0)
    heads = prefix.keys[layer].shape[0]
    scores = rows.view(heads, -1, rows.shape[-1]).mean(dim=1)[:, : len(prefix.ids) - prefix.window.size]
    return torch.nn.functional.max_pool1d(scores[None], POOL, stride=1, padding=POOL // 2)[0]


def _with_window(chosen: list[torch.Tensor], length: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index and validity ``[Hkv, R]`` of what each head chose (int64 ``[R_h]``) plus the window, padded in front."""
    recent = torch.arange(length - window, length)
    width = max(len(tokens) for tokens in chosen)
    pad = [width - len(tokens) for tokens in chosen]
    index = [
        torch.cat((tokens.new_zeros(n), tokens.sort().values, recent)) for n, tokens in zip(pad, chosen, strict=True)
    ]
    valid = torch.stack([torch.arange(width + window) >= n for n in pad])
    return torch.stack(index), valid


def _snap(prefix: Prefix, rooms: list[int]) -> Kept:
    """Every head of layer l keeps its best ``rooms[l]`` tokens and the window."""
    pairs = []
    for layer, room in enumerate(rooms):
        scores = _snap_scores(prefix, layer)
        best = scores.topk(min(room, scores.shape[1]), dim=1).indices
        pairs.append(_with_window(list(best), len(prefix.ids), prefix.window.size))
    return Kept([index for index, _ in pairs], [valid for _, valid in pairs])


def snapkv_per_layer(prefix: Prefix, config: NexusConfig, budget: int) -> Kept:
    """SnapKV (arXiv 2404.14469): tokens, per layer and KV head, window mean, max pooling, the same room everywhere."""
    return _snap(prefix, [budget - prefix.window.size] * len(prefix.keys))


def pyramid_rooms(room: int, layers: int, longest: int) -> list[int]:
    """PyramidKV's rooms: a falling line of mean ``room`` whose last entry is ``room / beta``.

    Where the first layers would get more than ``longest`` the line is flattened about its mean.
    """
    low = max(room / PYRAMID_BETA, 2 * room - longest)
    step = 2 * (room - low) / max(layers - 1, 1)
    return [round(2 * room - low - step * layer) for layer in range(layers)]


def pyramidkv_per_layer(prefix: Prefix, config: NexusConfig, budget: int) -> Kept:
    """PyramidKV (arXiv 2406.02069): SnapKV with more room in the first layers than in the last."""
    window = prefix.window.size
    return _snap(prefix, pyramid_rooms(budget - window, len(prefix.keys), len(prefix.ids) - window))


def ada_rooms(scores: torch.Tensor, room: int) -> list[int]:
    """Ada-KV's rooms of one layer's heads: their shares of the joint top ``Hkv * room``, softened by the floor.

    Args:
        scores: float ``[Hkv, T]``.
    """
    heads, length = scores.shape
    winners = scores.flatten().topk(min(heads * room, heads * length)).indices // length
    share = torch.bincount(winners, minlength=heads).double()
    return [round(float((1 - ADA_FLOOR) * n + ADA_FLOOR * room)) for n in share]


def ada_snapkv_per_layer(prefix: Prefix, config: NexusConfig, budget: int) -> Kept:
    """Ada-SnapKV (arXiv 2407.11550): SnapKV's scores, the room of a layer shared out among its heads by need."""
    pairs = []
    for layer in range(len(prefix.keys)):
        scores = _snap_scores(prefix, layer)
        rooms = ada_rooms(scores, budget - prefix.window.size)
        chosen = [row.topk(min(room, len(row))).indices for row, room in zip(scores, rooms, strict=True)]
        pairs.append(_with_window(chosen, len(prefix.ids), prefix.window.size))
    return Kept([index for index, _ in pairs], [valid for _, valid in pairs])


REFERENCES = {
    "nexus-paper (per layer)": nexus_paper_per_layer,
    "snapkv (per layer)": snapkv_per_layer,
    "pyramidkv (per layer)": pyramidkv_per_layer,
    "ada-snapkv (per layer)": ada_snapkv_per_layer,
}
