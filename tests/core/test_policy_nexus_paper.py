"""``nexus-paper`` against a slow float64 reference written from the paper's formulas, block for block."""

import math
import random

import torch

from nexus_sglang.policy import Blocks, Evidence, make_policy

ONES = 0xFFFFFFFF


def uniform(seed, identity, event, number):
    """Word 0 of Philox 4x32-10 on Python integers."""
    c = [identity & ONES, (identity >> 32) & ONES, event, number]
    k = [seed & ONES, (seed >> 32) & ONES]
    for _ in range(10):
        a = 0xD2511F53 * c[0]
        b = 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & ONES, (a >> 32) ^ c[3] ^ k[1], a & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return (c[0] + 0.5) / 2**32


def slow_weights(rows, steps, lam, eps):
    """w_j = a_j + lambda c_j + eps j / (N - 1), loops only."""
    rows = [[x / math.fsum(row) for x in row] for row in rows]
    n = len(rows[0])
    a = [math.fsum(row[j] for row in rows) / len(rows) for j in range(n)]
    state = [0.0] * n
    for row in rows[len(rows) - min(steps, len(rows)) :]:
        gamma = 1 + math.fsum(r * c for r, c in zip(row, state, strict=True))
        state = [c + gamma * r for c, r in zip(state, row, strict=True)]
    total = math.fsum(state) or 1.0
    return [a[j] + lam * state[j] / total + eps * j / max(n - 1, 1) for j in range(n)]


def slow_priorities(weights, seed, identities, event, draws):
    """log mean_i u_i^(1/w): the largest power is factored out, which is exact and cannot underflow."""
    out = []
    for w, identity in zip(weights, identities, strict=True):
        powers = [math.log(uniform(seed, identity, event, i)) / w for i in range(draws)]
        top = max(powers)
        out.append(top + math.log(math.fsum(math.exp(p - top) for p in powers) / draws))
    return out


def test_two_hundred_random_cases():
    rng = random.Random(2606)
    for case in range(200):
        n = rng.choice([2, 5, 33, 120])
        w = rng.choice([1, 3, 16])
        fields = {
            "walk_steps": rng.choice([0, 1, 3, 5]),
            "walk_weight": rng.choice([0.0, 0.5, 2.0]),
            "draws": rng.choice([1, 5]),
        }
        rows = torch.tensor([[rng.random() ** 6 + 1e-9 for _ in range(n)] for _ in range(w)])
        identities = [rng.getrandbits(64) - 2**63 for _ in range(n)]
        forced = torch.tensor([j in (0, n - 1) for j in range(n)])
        seed = rng.getrandbits(40)
        event = rng.randrange(1, 100_000)
        blocks = Blocks(torch.arange(n), forced, torch.tensor(identities), torch.empty(n, 0), event, seed)
        policy = make_policy("nexus-paper", fields)

        weights = policy.weigh(Evidence(rows), blocks).weights
        expected = slow_weights(rows.double().tolist(), fields["walk_steps"], fields["walk_weight"], 1e-6)
        assert torch.allclose(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=0), case

        priority = policy.prioritise(weights, blocks, 1)
        slow = slow_priorities(expected, seed, identities, event, fields["draws"])
        free = [j for j in range(n) if not forced[j]]
        fast_order = sorted(free, key=lambda j: float(priority[j]))
        assert fast_order == sorted(free, key=lambda j: slow[j]), case


def test_without_the_walk_it_is_the_window_mean():
    rows = torch.rand(16, 40, generator=torch.Generator().manual_seed(1))
    rows = rows / rows.sum(dim=1, keepdim=True)
    blocks = Blocks(torch.arange(40), torch.zeros(40, dtype=torch.bool), torch.arange(40), torch.empty(40, 0), 99, 0)
    plain = make_policy("nexus-paper", {"walk_weight": 0, "recency_eps": 0}).weigh(Evidence(rows), blocks).weights
    assert torch.allclose(plain, rows.double().mean(dim=0), rtol=1e-6)
