"""Evidence and blocks made by hand, for tests of policies."""

import math

import torch

from nexus_sglang.policy import Blocks, Evidence


def blocks_of(n, forced=(), state=None, event=640, seed=3, width=0):
    mask = torch.zeros(n, dtype=torch.bool)
    mask[list(forced)] = True
    state = torch.full((n, width), math.nan) if state is None else state
    return Blocks(torch.arange(n), mask, torch.arange(n) * 7919 + 1, state, event, seed)


def evidence_of(n, w=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = torch.rand(w, n, generator=g) ** 8

    def rand():
        return torch.rand(n, generator=g)

    return Evidence(rows / rows.sum(dim=1, keepdim=True), rand() + 1, rand(), rand(), rand())


def top(weights, k, blocks):
    weights = weights.double().masked_fill(blocks.forced, -math.inf)
    return sorted(weights.topk(k).indices.tolist())
