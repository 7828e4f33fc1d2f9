"""Whole passes on SGLang's triton and flashinfer backends: what is attended to, and which queries are kept.

Triton's attention kernels are SGLang's, in the interpreter; FlashInfer's are stood in for by plain PyTorch that follows
what was planned. Nothing here ran on a GPU.

A CUDA graph is stood in for by a trace: PyTorch records the operations of one decode pass over its input buffers,
without any of its Python, and the recording is run again after the buffers were refilled.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch.fx.experimental.proxy_tensor import make_fx

from nexus_sglang.sglang_plugin.attention import backends, paged, plain_torch
from tests.support.paged_world import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYER,
    MOST_REQUESTS,
    ROWS,
    Runner,
    W,
    World,
    flashinfer,
    install_hooks,
    triton,
)


@pytest.fixture(scope="module", autouse=True)
def hooked():
    with pytest.MonkeyPatch.context() as patch:
        install_hooks(patch)
        yield


@pytest.fixture
def world() -> World:
    """Four requests; two share a prefix; all but one were evicted from."""
    world = World(seed=3)
    for row, length in ((1, 70), (2, 5), (3, 33)):
        world.start(row, length)
    world.evict(1, 0.4)
    world.start(4, 20, sharing=1, prefix=50)
    world.evict(4, 0.5)
    world.evict(3, 1.0)
    return world


def random(*shape):
    return torch.randn(*shape, generator=random.noise)


random.noise = torch.Generator().manual_seed(11)


def run(runner: Runner, mode: ForwardMode, rows: list[int], tokens: int = 1, view=None):
    """One pass over fresh queries, keys and values; the output, the queries, and the same by plain attention."""
    world = runner.world
    pool = runner.pool
    batch = runner.batch(mode, rows, world.grow(rows, tokens), tokens)
    n = len(rows) * tokens
    q = random(n, HEADS * DIM)
    k = random(n, KV_HEADS, DIM)
    v = random(n, KV_HEADS, DIM)
    with runner.passing(rows) as backend:
        backend.init_forward_metadata(batch)
        out = backend.forward(q, k, v, LAYER, batch)
    queries = q.view(n, HEADS, DIM)
    slots = [torch.tensor(world.reference(row)) for row in rows]
    want = plain_torch.extend(queries, pool.keys, pool.values, slots, [tokens] * len(rows), LAYER.scaling)
    return out.view(n, HEADS, DIM), queries, want


def filled(world: World, backend, **options) -> Runner:
    """A runner whose pool holds keys and values in every slot, the padding slot and evicted ones included."""
    runner = Runner(world, backend, **options)
    runner.pool.keys = random(*runner.pool.keys.shape)
    runner.pool.values = random(*runner.pool.values.shape)
    return runner


@pytest.mark.parametrize("backend, options", [(triton, {}), (flashinfer, {}), (flashinfer, {"use_paged": True})])
@pytest.mark.parametrize("mode, tokens", [(ForwardMode.DECODE, 1), (ForwardMode.EXTEND, 1), (ForwardMode.EXTEND, 6)])
def test_passes_attend_to_the_resident_tokens(world, backend, options, mode, tokens):
    runner = filled(world, backend, **options)
    for rows in ([1, 2, 3, 4], [4, 2]):
        out, _, want = run(runner, mode, rows, tokens)
        torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("backend", [triton, flashinfer])
def test_twenty_evictions_in_a_row(world, backend):
    runner = filled(world, backend)
    for step in range(20):
        out, _, want = run(runner, ForwardMode.DECODE, [1, 3])
        torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
        world.evict((1, 3)[step % 2], 0.2)


@pytest.mark.parametrize("backend", [triton, flashinfer])
def test_replays_attend_to_the_resident_tokens(world, backend):
    """Planned once for a capture over padding; replays change what the planned buffers hold, never which they are."""
    runner = filled(world, backend)
    padded = 6
    backend = runner.attn_backend
    empty = runner.replay_view(runner.batch(ForwardMode.DECODE, [], torch.zeros(0, dtype=torch.int64)), padded)
    backend.init_forward_metadata_out_graph(empty, in_capture=True)
    captured = backend.forward_metadata
    for rows in ([1, 2, 3, 4], [4, 2], [3]):
        view = runner.replay_view(runner.batch(ForwardMode.DECODE, rows, world.grow(rows, 1)), padded)
        with runner.passing(rows):
            backend.init_forward_metadata_out_graph(view)
        assert backend.forward_metadata is captured
        q = random(padded, HEADS * DIM)
        k = random(padded, KV_HEADS, DIM)
        v = random(padded, KV_HEADS, DIM)
        out = backend.forward(q, k, v, LAYER, view).view(padded, HEADS, DIM)
        slots = [torch.tensor(world.reference(row)) for row in rows] + [torch.zeros(1, dtype=torch.int64)] * (
            padded - len(rows)
        )
        want = plain_torch.decode(
            q.view(padded, HEADS, DIM), runner.pool.keys, runner.pool.values, slots, LAYER.scaling
        )
        torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
        world.evict(rows[0], 0.3)


class Heard:
    """Reference of the window: every query of every row, by position."""

    def __init__(self):
        self.queries: dict[tuple[int, int], torch.Tensor] = {}
        self.lse: dict[tuple[int, int], torch.Tensor] = {}

    def add(self, rows, positions, queries):
        self.queries.update({(r, p): q for r, p, q in zip(rows, positions, queries, strict=True)})

    def score(self, runner: Runner, rows, tokens, queries):
        """After a pass: each new query's log-sum-exp over what its row holds up to it."""
        for i, row in enumerate(r for r in rows for _ in range(tokens)):
            behind = tokens - 1 - i % tokens
            slots = torch.tensor(runner.world.reference(row))
            keys = runner.pool.keys[slots[: len(slots) - behind]].repeat_interleave(HEADS // KV_HEADS, dim=1)
            scores = torch.einsum("hd,thd->ht", queries[i], keys) * LAYER.scaling
            self.lse[row, len(runner.world.names[row]) - 1 - behind] = scores.logsumexp(-1)

    def check(self, runner: Runner, row: int):
        window = runner.runtime.window
        length = len(runner.world.names[row])
        positions = window.positions(row, length)
        for p in positions.tolist():
            assert torch.equal(window.rings[0][row, p % W], self.queries[row, p]), f"row {row}, position {p}"
        if self.lse and backends.reports_lse(runner):
            reported = window.lse(window.groups[0], row, positions)
            torch.testing.assert_close(reported[0], torch.stack([self.lse[row, p] for p in positions.tolist()]))


@pytest.mark.parametrize("backend, options", [(triton, {}), (flashinfer, {}), (flashinfer, {"use_paged": True})])
def test_prefill_and_decode_keep_the_last_queries(world, backend, options):
    """And with FlashInfer their log-sum-exp: over one wrapper's keys, or over those of two."""
    runner = filled(world, backend, **options)
    heard = Heard()
    world.names[5] = []  # nothing before it: SGLang calls the ragged wrapper alone
    for row in (1, 2, 3, 4, 5):
        runner.runtime.window.begin(row, len(world.names[row]))
    for mode, rows, tokens in (
        (ForwardMode.EXTEND, [1, 4], 7),
        (ForwardMode.EXTEND, [2], 2),
        (ForwardMode.DECODE, [4, 1, 2], 1),
        (ForwardMode.DECODE, [1, 2], 1),
        (ForwardMode.EXTEND, [3], W),
        (ForwardMode.EXTEND, [5], W + 2),
    ):
        before = [len(world.names[row]) for row in rows]
        _, queries, _ = run(runner, mode, rows, tokens)
        heard.add([r for r in rows for _ in range(tokens)], [b + i for b in before for i in range(tokens)], queries)
        heard.score(runner, rows, tokens, queries)
        world.evict(rows[0], 0.3)
    for row in (1, 2, 3, 4, 5):
        heard.check(runner, row)
    assert torch.equal(runner.runtime.window.rings[0][[0, 6]], torch.zeros(2, W, HEADS, DIM)), "nobody else's ring"


def test_wrappers_that_are_passed_by_cost_a_warning_only(world, caplog):
    runner = Runner(world, flashinfer)
    batch = runner.batch(ForwardMode.DECODE, [1, 2], world.grow([1, 2], 1))
    q = random(2, HEADS * DIM)
    with runner.passing([1, 2]) as backend:
        backend.init_forward_metadata(batch)
        paged.keep_queries(lambda *args: "out", backend, q, None, None, LAYER, batch)
    window = runner.runtime.window
    assert (
        "passed by" in caplog.text and not window.lse_rings and window.lse(window.groups[0], 1, torch.arange(2)) is None
    )
    at = [len(world.names[row]) - 1 for row in (1, 2)]
    assert torch.equal(window.rings[0][[1, 2], [p % W for p in at]], q.view(2, HEADS, DIM)), (
        "the queries are kept all the same"
    )


def test_a_prefill_without_requests_keeps_nothing(world):
    runner = Runner(world, flashinfer)
    batch = runner.batch(ForwardMode.EXTEND, [2], world.grow([2], 3), 3)
    backend = runner.attn_backend
    backend.init_forward_metadata(batch)
    backend.forward(random(3, HEADS * DIM), random(3, KV_HEADS, DIM), random(3, KV_HEADS, DIM), LAYER, batch)
    assert not runner.runtime.window.rings[0].any()


def test_a_recorded_decode_follows_its_input_buffers(world):
    """Recorded over padding alone, as SGLang captures; replayed for requests with padding behind them."""
    runner = Runner(world, flashinfer)
    heard = Heard()
    backend = runner.attn_backend
    window = runner.runtime.window
    runner.runtime.window.begin(1, len(world.names[1]))
    runner.runtime.window.begin(4, len(world.names[4]))
    empty = runner.batch(ForwardMode.DECODE, [], torch.zeros(0, dtype=torch.int64))
    graph = runner.replay_view(empty, MOST_REQUESTS)  # the graph's buffers

    def attention(backend, q, *args):
        """Whose log-sum-exp of a query is its first number of each head."""
        q = q.view(MOST_REQUESTS, HEADS, DIM)
        (wrapper,) = backend.forward_metadata.decode_wrappers
        return wrapper.forward(q)

    def one_pass(ring, lse_ring, q, rows, positions):
        window.rings[0] = ring
        window.lse_rings[0] = lse_ring
        graph.req_pool_indices = rows
        graph.positions = positions
        paged.keep_queries(attention, backend, q, None, None, LAYER, graph)
        return ring, lse_ring

    ring = window.rings[0]
    lse_ring = window.lse_rings[0]
    q = torch.zeros(MOST_REQUESTS, HEADS * DIM)
    rows = graph.req_pool_indices
    positions = graph.positions
    wrapper = SimpleNamespace(forward=None, forward_return_lse=lambda q: (q, q[:, :, 0]))
    backend.forward_metadata = SimpleNamespace(decode_wrappers=[wrapper])
    recorded = make_fx(one_pass)(ring.clone(), lse_ring.clone(), q, rows, positions)
    window.rings[0] = ring
    window.lse_rings[0] = lse_ring
    for step in range(W + 2):
        batch_rows = [4, 1] if step % 2 else [1, 4]
        view = runner.replay_view(
            runner.batch(ForwardMode.DECODE, batch_rows, world.grow(batch_rows, 1)), MOST_REQUESTS
        )
        rows.copy_(view.req_pool_indices)
        positions.copy_(view.positions)
        q.copy_(random(MOST_REQUESTS, HEADS * DIM))
        assert view.req_pool_indices[2:].tolist() == [0] * (MOST_REQUESTS - 2)
        recorded(ring, lse_ring, q, rows, positions)
        heard.add(batch_rows, positions[:2].tolist(), q.view(MOST_REQUESTS, HEADS, DIM)[:2].clone())
    heard.check(runner, 1)
    heard.check(runner, 4)
    others = [row for row in range(1, ROWS + 1) if row not in (1, 4)]
    assert torch.equal(lse_ring[1:], ring[1:, ..., 0]), "each beside its query"
    assert not ring[others].any(), "padding requests write to row 0 only"
    assert len({(r, p) for r, p in heard.queries if r == 1}) == W + 2
