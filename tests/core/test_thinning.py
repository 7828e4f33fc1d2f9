"""Thinning a cold node: whole blocks, lightest first, sinks and the newest left alone."""

from __future__ import annotations

import torch

from nexus_sglang.eviction.thinning import thin


def test_lightest_blocks_go_until_enough():
    positions = torch.arange(64)
    weights = torch.tensor([9.0, 1, 5, 2, 8, 3, 7, 6]).repeat_interleave(8)
    drop = thin(positions, weights, keep=40, block_size=8, head_end=8, tail_start=56)
    assert torch.unique(positions[drop] // 8).tolist() == [1, 3, 5]


def test_sinks_and_tail_stay_whatever_is_asked():
    positions = torch.arange(100, 164)
    drop = thin(positions, torch.zeros(64), keep=0, block_size=8, head_end=120, tail_start=150)
    assert positions[drop].tolist() == list(range(120, 144))


def test_unjudged_blocks_rank_in_the_middle():
    positions = torch.arange(40)
    weights = torch.tensor([0.0, 1.0, torch.nan, 3.0, 4.0]).repeat_interleave(8)
    drop = thin(positions, weights, keep=24, block_size=8, head_end=0, tail_start=40)
    assert torch.unique(positions[drop] // 8).tolist() == [0, 1]
    never = thin(positions, torch.full((40,), torch.nan), keep=24, block_size=8, head_end=0, tail_start=40)
    assert torch.unique(positions[never] // 8).tolist() == [0, 1], "nothing judged: the oldest"


def test_holes_and_nothing_to_do():
    positions = torch.tensor([0, 1, 2, 17, 18, 40, 41, 42])
    drop = thin(positions, torch.tensor([1.0, 1, 1, 0, 0, 2, 2, 2]), keep=6, block_size=8, head_end=0, tail_start=99)
    assert positions[drop].tolist() == [17, 18]
    assert not thin(positions, torch.zeros(8), keep=8, block_size=8, head_end=0, tail_start=99).any()
