"""Distribution tests of the selectors. Seeds are fixed; each statistical check would fail for one seed in 10,000."""

import itertools
import math

import pytest
import torch
from scipy import stats

from nexus_sglang.policy import Blocks
from nexus_sglang.policy.parts.draws import uniforms
from nexus_sglang.policy.parts.selectors import SELECTORS, core_then, interleave, sampling_priorities, select, sharpen
from tests.support import oracles_policy

ALPHA = 1e-4
WEIGHTS = torch.tensor([0.05, 0.1, 0.2, 0.25, 0.4], dtype=torch.float64)


EXPONENTIAL = "exponential-keys"
POISSON = "sequential-poisson"


def blocks_of(n, seed=0, event=0):
    """``n`` candidates, none of them judged before."""
    index = torch.arange(n)
    return Blocks(index, torch.zeros(n, dtype=torch.bool), index, torch.empty(n, 0), event, seed)


def trials(law, weights, count, seed=0, event=0, draws=1, beta=1.0):
    """Priorities ``[count, N]`` of independent trials; the laws look at each block alone, so one call does all."""
    n = len(weights)
    return sampling_priorities(law, weights.repeat(count), blocks_of(count * n, seed, event), draws, beta).view(
        count, n
    )


def first_k(priority, k):
    """bool ``[count, N]``: the k largest of each trial."""
    kept = torch.zeros_like(priority, dtype=torch.bool)
    return kept.scatter_(1, priority.topk(k, dim=1).indices, True)


def inclusion(weights, k):
    """Inclusion probabilities of successive draws without replacement, by enumerating every order of k draws."""
    w = weights.tolist()
    out = [0.0] * len(w)
    for order in itertools.permutations(range(len(w)), k):
        p = 1.0
        left = sum(w)
        for j in order:
            p = p * w[j] / left
            left = left - w[j]
        for j in order:
            out[j] += p
    return torch.tensor(out, dtype=torch.float64)


def close(observed, expected, error):
    """Every entry within the two-sided bound for ALPHA over all entries."""
    z = stats.norm.isf(ALPHA / (2 * len(expected)))
    return bool(((observed - expected).abs() <= z * error).all())


def test_first_draw_is_proportional_to_weight():
    wins = trials(EXPONENTIAL, WEIGHTS, 40_000).argmax(dim=1).bincount(minlength=5)
    assert stats.chisquare(wins.numpy(), (WEIGHTS * 40_000).numpy()).pvalue > ALPHA


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_inclusion_equals_enumeration(k):
    count = 40_000
    expected = inclusion(WEIGHTS, k)
    assert math.isclose(float(expected.sum()), k) and (expected > 0).all() and (expected.diff() > 0).all()
    seen = first_k(trials(EXPONENTIAL, WEIGHTS, count, seed=k), k).double().mean(dim=0)
    assert (seen > 0).all() and (seen.diff() > 0).all()
    assert close(seen, expected, (expected * (1 - expected) / count).sqrt())


def test_five_draws_follow_the_law_of_one_at_small_weights():
    """Their mean is their maximum, which is again one exponential clock: n is not a knob at weights of 1/N."""
    count = 20_000
    small = WEIGHTS / 100
    expected = inclusion(WEIGHTS, 2)
    seen = first_k(trials(EXPONENTIAL, small, count, seed=3, draws=5), 2).double().mean(dim=0)
    assert close(seen, expected, (expected * (1 - expected) / count).sqrt())


def test_horvitz_thompson_is_unbiased():
    count = 40_000
    k = 2
    z = torch.tensor([3.0, -1.0, 4.0, 1.0, 5.0], dtype=torch.float64)
    kept = first_k(trials(EXPONENTIAL, WEIGHTS, count, seed=9), k)
    estimates = (kept * z / inclusion(WEIGHTS, k)).sum(dim=1)
    assert close(estimates.mean()[None], z.sum()[None], estimates.std() / count**0.5)


def test_many_draws_order_like_top_k():
    """The mean of u**(1/w) tends to w / (w + 1)."""
    w = torch.tensor([0.5, 0.02, 1.5, 0.1, 0.3], dtype=torch.float64)
    n = 40_000
    priority = sampling_priorities(EXPONENTIAL, w, blocks_of(5, seed=1), draws=n)
    limit = w / (w + 1)
    error = ((w / (w + 2) - limit**2) / n).sqrt()
    assert close(priority.exp(), limit, error)
    assert priority.argsort().tolist() == w.argsort().tolist()


def test_survival_follows_the_product_law():
    """One block of four goes at each of 200 steps and an equal one comes; the marked block survives with p**200."""
    w = torch.tensor([120.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    count = 6000
    steps = 200
    p = float(inclusion(w, 3)[0])
    assert 0.9 < p < 1
    alive = torch.ones(count, dtype=torch.bool)
    checks = {}
    for step in range(1, steps + 1):
        alive &= trials(EXPONENTIAL, w, count, seed=4, event=step).argmin(dim=1) != 0
        if step in (1, 50, 200):
            checks[step] = float(alive.double().mean())
    for step, seen in checks.items():
        expected = torch.tensor([p**step], dtype=torch.float64)
        assert close(torch.tensor([seen]), expected, (expected * (1 - expected) / count).sqrt())


def test_under_top_k_one_step_below_the_cut_is_final():
    w = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert select("top-k", w, blocks_of(4), 3).argmin() == 0


def test_sequential_poisson_keeps_what_is_above_the_threshold():
    w = torch.tensor([50.0, 30.0, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    k = 4
    priority = trials(POISSON, w, 20_000, seed=2)
    kept = first_k(priority, k)
    threshold = priority.exp().topk(k + 1, dim=1).values[:, -1:]
    assert bool(kept[w.expand_as(kept) > threshold].all())
    seen = kept.double().mean(dim=0)
    # The tail of four shares what the two heavy ones leave, nearly in proportion to weight.
    assert seen[0] > 0.999 and seen[1] > 0.99
    assert (seen[2:].diff() > 0).all() and abs(float(seen[3] / seen[2]) - 2) < 0.15
    lost = (~first_k(trials(EXPONENTIAL, w, 20_000, seed=2), k)).double().mean(dim=0)
    assert lost[1] > 1 - seen[1]


@pytest.mark.parametrize(
    "kind, beta", [*((kind, beta) for kind in SELECTORS for beta in (1.0, 4.0)), ("sequential-poisson", 64.0)]
)
def test_a_hundred_thousand_blocks(kind, beta):
    """Weights of 1.5 / N: no underflow, no ties, no NaN."""
    n = 100_000
    w = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 / n
    blocks = blocks_of(n, event=1)
    priority = select(kind, w, blocks, 20_000, 5, beta, 0.25)
    assert not priority.isnan().any() and not (priority == -math.inf).any()
    distinct = len(torch.unique(priority))
    core = 15_000 if kind == "core-sampled" else 1
    assert distinct >= n - core - 5  # the certain core shares one priority; 32-bit draws may coincide

    if kind == EXPONENTIAL:  # the trap this avoids
        naive = uniforms(0, blocks.identity, 1, 1)[0].float() ** (1 / w.float())
        assert float((naive == 0).double().mean()) > 0.9


def test_zero_weights_come_last():
    w = torch.tensor([0.0, 1e-12, 1.0])
    for law in (EXPONENTIAL, POISSON):
        priority = sampling_priorities(law, w, blocks_of(3))
        assert priority[0] == -math.inf and torch.isfinite(priority[1:]).all()
    assert torch.isfinite(sampling_priorities(POISSON, w, blocks_of(3), beta=0.0)).all()  # a uniform sample


@pytest.mark.parametrize("draws", [1, 5])
@pytest.mark.parametrize("beta", [0.0, 1.0, 8.0])
def test_laws_are_the_oracles(draws, beta):
    w = torch.rand(300, generator=torch.Generator().manual_seed(draws)) ** 8
    w[::40] = 0
    blocks = blocks_of(300, seed=5, event=77)
    u = uniforms(5, blocks.identity, 77, draws)
    assert torch.equal(sampling_priorities(EXPONENTIAL, w, blocks, draws), oracles_policy.exponential_keys(w, u))
    assert torch.equal(
        sampling_priorities(POISSON, w, blocks, draws, beta), oracles_policy.sequential_poisson(w, u, beta)
    )


def test_sharpness_tends_to_top_k():
    w = torch.tensor([0.1, 0.4, 0.2, 0.3])
    kept = first_k(trials(POISSON, w.double(), 2000, beta=64.0), 2)
    assert kept.double().mean(dim=0)[[1, 3]].min() > 0.99
    assert torch.equal(sharpen(w, 1.0).argsort(), w.argsort()) and sharpen(w, 8.0).max() == 1


def test_core_is_certain_and_ties_favour_the_newer():
    w = torch.tensor([5.0, 5.0, 5.0, 9.0, 1.0])
    candidates = torch.tensor([True, True, True, False, True])
    out = core_then(torch.zeros(5, dtype=torch.float64), w, 2, candidates)
    assert (out == math.inf).tolist() == [False, True, True, False, False]
    assert not core_then(torch.zeros(5), w, 0, candidates).any()
    assert core_then(torch.zeros(5, dtype=torch.float64), w, 99, candidates).isinf().sum() == 4


def test_interleave_of_one_order_is_that_order_among_the_candidates():
    order = torch.tensor([2.0, 9.0, 7.0, 2.0, -math.inf])
    candidates = torch.tensor([True, False, True, True, True])
    standing = 1 / interleave([order], [1.0], candidates)
    assert standing[candidates].tolist() == [
        3,
        1,
        2,
        4,
    ]  # among equals the newer; 9.0 is no candidate and takes no place


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("keep", [8, 20, 40])
def test_interleave_gives_each_order_its_share(share, keep):
    n = 200
    orders = [torch.randperm(n, generator=torch.Generator().manual_seed(s)).double() for s in (1, 2)]
    every = torch.ones(n, dtype=torch.bool)
    kept = set(interleave(orders, [1 - share, share], every).topk(keep).indices.tolist())
    for order, part in zip(orders, (1 - share, share), strict=True):
        assert set(order.topk(math.floor(part * keep)).indices.tolist()) <= kept
