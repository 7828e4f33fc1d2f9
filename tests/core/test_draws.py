"""Philox draws: known answers, a pinned vector, and independence of company."""

import pytest
import torch
from scipy import stats

from nexus_sglang.policy.parts.draws import uniforms

ONES = 0xFFFFFFFF
PINNED = [[2843834898, 3216907003, 2865188722, 3564126466], [1314437401, 2761022837, 1148563979, 992024447]]


def slow_philox(counter, key):
    """Philox 4x32-10 on Python integers, straight from Salmon et al. (SC 2011)."""
    c = list(counter)
    k = list(key)
    for _ in range(10):
        a = 0xD2511F53 * c[0]
        b = 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & ONES, (a >> 32) ^ c[3] ^ k[1], a & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return c


@pytest.mark.parametrize(
    "counter, key, answer",
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, answer):
    assert slow_philox(counter, key) == list(answer)
    if counter == (0,) * 4:  # the only one that a block of a sequence can have
        assert uniforms(0, torch.tensor([0]), 0, 1).item() == (answer[0] + 0.5) / 2**32


def test_uniforms_are_philox_words():
    identity = torch.tensor([0, 1, -1, 0x123456789ABCDEF])
    seed = (7 << 32) + 3
    event = 2090
    u = uniforms(seed, identity, event, 3)
    assert u.dtype == torch.float64 and u.shape == (3, 4)
    for number in range(3):
        for j, block in enumerate(identity.tolist()):
            word = slow_philox((block & ONES, (block >> 32) & ONES, event, number), (3, 7))[0]
            assert u[number, j].item() == (word + 0.5) / 2**32


def test_pinned_vector():
    """What a server with seed 0 draws; a change of these numbers changes every eviction."""
    u = uniforms(0, torch.tensor([0, 1, 2, -1]), 100, 2) * 2.0**32 - 0.5
    assert u.long().tolist() == PINNED


def test_company_and_order_change_nothing():
    identity = torch.randint(-(2**62), 2**62, (1000,), generator=torch.Generator().manual_seed(1))
    every = uniforms(5, identity, 64, 2)
    some = torch.tensor([998, 3, 511])
    assert torch.equal(uniforms(5, identity[some], 64, 2), every[:, some])
    assert torch.equal(uniforms(5, identity, 64, 5)[:2], every)
    for other in (uniforms(6, identity, 64, 2), uniforms(5, identity, 65, 2), uniforms(5 + (1 << 32), identity, 64, 2)):
        assert int((other == every).sum()) < 3


def test_uniform_and_inside_the_interval():
    """Kolmogorov-Smirnov on 100,000 draws and on the correlation of neighbours; either fails once in 10,000 seeds."""
    u = uniforms(11, torch.arange(100_000), 1, 1)[0]
    assert 0 < u.min() and u.max() < 1
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
    assert stats.pearsonr(u[1:].numpy(), u[:-1].numpy()).pvalue > 1e-4
