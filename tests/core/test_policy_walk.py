"""The walk and the window reductions against their closed forms."""

import math

import pytest
import torch

from nexus_sglang.policy.parts.reductions import WINDOW_REDUCTIONS, floor_at_mean, reduce_window, remember
from nexus_sglang.policy.parts.walk import normalise_rows, walk, window_weights
from tests.support import oracles_policy


def rows(w, n, seed=0):
    raw = torch.rand(w, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 8
    return raw / raw.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("steps", [1, 2, 3, 16, 40])
def test_closed_identity(steps):
    """C(H) = sum_q r_q + sum_q r_q <r_q, C(q-1)>."""
    r = rows(16, 50, steps)[-steps:]
    states = [torch.zeros(50, dtype=torch.float64)]
    for row in r:
        states.append(states[-1] + (1 + row @ states[-1]) * row)
    closed = r.sum(dim=0) + sum((row * (row @ before) for row, before in zip(r, states[:-1], strict=True)))
    assert torch.allclose(walk(rows(16, 50, steps), steps), closed / closed.sum(), rtol=1e-13, atol=0)


def test_walk_is_a_mean_of_the_newest_rows():
    """It re-weights the rows it reads, agreement counts more, and it lifts no block that none of them attends to."""
    r = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 1.0, 0]], dtype=torch.float64)
    assert walk(r, 3).tolist() == [0, 0.25, 0.75, 0]
    assert walk(r, 0).tolist() == [0, 0, 0, 0]
    assert torch.equal(walk(r, 99), walk(r, 4)) and math.isclose(float(walk(rows(16, 9), 5).sum()), 1)


def test_normalise_rows_over_a_mask():
    out = normalise_rows(torch.tensor([[8.0, 1.0, 3.0], [5.0, 0.0, 0.0]]), torch.tensor([False, True, True]))
    assert out.tolist() == [[0, 0.25, 0.75], [0, 0, 0]]


def test_recency_ramp():
    """Without attention and walk, what is left is a tie-break in favour of the newer."""
    for n, ramp in ((5, [0, 2.5e-7, 5e-7, 7.5e-7, 1e-6]), (1, [0])):
        nothing = torch.zeros(2, n)
        every = torch.ones(n, dtype=torch.bool)
        assert window_weights(nothing, every, 3, 0.5, 1e-6).tolist() == pytest.approx(ramp)
        assert oracles_policy.recency(n, 1e-6).tolist() == pytest.approx(ramp)


@pytest.mark.parametrize("w, steps", [(1, 0), (1, 3), (16, 3), (16, 0), (5, 5), (7, 40)])
def test_window_weights_are_the_oracles(w, steps):
    g = torch.Generator().manual_seed(w + steps)
    attention = torch.rand(w, 33, generator=g) ** 6
    candidates = torch.rand(33, generator=g) < 0.8
    wanted = oracles_policy.window_weights(attention, candidates, steps, 0.7, 1e-3)
    assert torch.equal(window_weights(attention, candidates, steps, 0.7, 1e-3), wanted)


def test_window_reductions():
    r = torch.tensor([[1.0, 4.0, 0.0], [3.0, 0.0, 0.0]]).double()
    mask = torch.tensor([True, True, True])
    expected = {
        "mean": [2, 2, 0],
        "sum": [4, 4, 0],
        "max": [3, 4, 0],
        "max-floor": [3, 4, 7 / 3],
        "last": [3, 0, 0],
        "running-average": [2, 2, 0],
        "decaying-max": [3, 4, 0],
    }
    assert set(expected) == set(WINDOW_REDUCTIONS)
    for kind, numbers in expected.items():
        assert reduce_window(r, kind, mask).tolist() == pytest.approx(numbers), kind
    assert floor_at_mean(torch.tensor([9.0, 0.0, 4.0]), torch.tensor([False, True, True])).tolist() == [9, 2, 4]


def test_memory_starts_with_the_first_judgement():
    old = torch.tensor([math.nan, 2.0, 10.0])
    new = torch.tensor([3.0, 3.0, 3.0]).double()
    assert remember(new, old, "sum", 1.0).tolist() == [3, 5, 13]
    assert remember(new, old, "running-average", 0.5).tolist() == [3, 2.5, 6.5]
    assert remember(new, old, "decaying-max", 0.5).tolist() == [3, 3, 5]
