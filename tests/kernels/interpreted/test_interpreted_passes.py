"""Whole passes on SGLang's triton and flashinfer backends: what is attended to, and which queries are kept.

Triton's attention kernels are SGLang's, in the interpreter; FlashInfer's are stood in for by plain PyTorch that follows
what was planned. Nothing here ran on a GPU.

A CUDA graph is stood in for by a trace: PyTorch records the operations of one decode pass over its input buffers, without
any of its Python, and the recording is run again after the buffers were refilled.
"""

from __future__ import annotations

import pytest
import torch
from paged_world import DIM, HEADS, KV_HEADS, LANES, LAYER, ROWS, Runner, W, World, flashinfer, install_hooks, triton
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch.fx.experimental.proxy_tensor import make_fx

from nexus_sglang.attention import torch_native
from nexus_sglang.binding import attention_hooks


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
    world.evict(4, 0.5), world.evict(3, 1.0)
    return world


def random(*shape):
    return torch.randn(*shape, generator=random.noise)


random.noise = torch.Generator().manual_seed(11)


def run(runner: Runner, mode: ForwardMode, rows: list[int], tokens: int = 1, view=None):
    """One pass over fresh queries, keys and values; the output, the queries, and the same by plain attention."""
    world, pool = runner.world, runner.pool
    batch = runner.batch(mode, rows, world.grow(rows, tokens), tokens)
    n = len(rows) * tokens
    q, k, v = random(n, HEADS * DIM), random(n, KV_HEADS, DIM), random(n, KV_HEADS, DIM)
    with runner.passing(rows) as backend:
        backend.init_forward_metadata(batch)
        out = backend.forward(q, k, v, LAYER, batch)
    queries = q.view(n, HEADS, DIM)
    slots = [torch.tensor(world.reference(row)) for row in rows]
    want = torch_native.extend(queries, pool.keys, pool.values, slots, [tokens] * len(rows), LAYER.scaling)
    return out.view(n, HEADS, DIM), queries, want


def filled(world: World, backend, **options) -> Runner:
    """A runner whose pool holds keys and values in every slot, the padding slot and evicted ones included."""
    runner = Runner(world, backend, **options)
    runner.pool.keys, runner.pool.values = random(*runner.pool.keys.shape), random(*runner.pool.values.shape)
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
    runner, lanes = filled(world, backend), 6
    backend = runner.attn_backend
    empty = runner.replay_view(runner.batch(ForwardMode.DECODE, [], torch.zeros(0, dtype=torch.int64)), lanes)
    backend.init_forward_metadata_out_graph(empty, in_capture=True)
    captured = backend.forward_metadata
    for rows in ([1, 2, 3, 4], [4, 2], [3]):
        view = runner.replay_view(runner.batch(ForwardMode.DECODE, rows, world.grow(rows, 1)), lanes)
        with runner.passing(rows):
            backend.init_forward_metadata_out_graph(view)
        assert backend.forward_metadata is captured
        q, k, v = random(lanes, HEADS * DIM), random(lanes, KV_HEADS, DIM), random(lanes, KV_HEADS, DIM)
        out = backend.forward(q, k, v, LAYER, view).view(lanes, HEADS, DIM)
        slots = [torch.tensor(world.reference(row)) for row in rows] + [torch.zeros(1, dtype=torch.int64)] * (lanes - len(rows))
        want = torch_native.decode(q.view(lanes, HEADS, DIM), runner.pool.keys, runner.pool.values, slots, LAYER.scaling)
        torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
        world.evict(rows[0], 0.3)


class Heard:
    """Reference of the window: every query of every row, by position."""

    def __init__(self):
        self.queries: dict[tuple[int, int], torch.Tensor] = {}

    def add(self, rows, positions, queries):
        self.queries.update({(r, p): q for r, p, q in zip(rows, positions, queries, strict=True)})

    def check(self, runner: Runner, row: int):
        window, length = runner.runtime.window, len(runner.world.names[row])
        for p in window.positions(row, length).tolist():
            assert torch.equal(window.rings[0][row, p % W], self.queries[row, p]), f"row {row}, position {p}"


@pytest.mark.parametrize("backend", [triton, flashinfer])
def test_prefill_and_decode_keep_the_last_queries(world, backend):
    runner, heard = Runner(world, backend), Heard()
    for row in (1, 2, 3, 4):
        runner.runtime.window.begin(row, len(world.names[row]))
    for mode, rows, tokens in (
        (ForwardMode.EXTEND, [1, 4], 7), (ForwardMode.EXTEND, [2], 2), (ForwardMode.DECODE, [4, 1, 2], 1),
        (ForwardMode.DECODE, [1, 2], 1), (ForwardMode.EXTEND, [3], W),
    ):  # fmt: skip
        before = [len(world.names[row]) for row in rows]
        _, queries, _ = run(runner, mode, rows, tokens)
        heard.add([r for r in rows for _ in range(tokens)], [b + i for b in before for i in range(tokens)], queries)
        world.evict(rows[0], 0.3)
    for row in (1, 2, 3, 4):
        heard.check(runner, row)
    assert torch.equal(runner.runtime.window.rings[0][[0, 5, 6]], torch.zeros(3, W, HEADS, DIM)), "nobody else's ring"


def test_a_prefill_without_requests_keeps_nothing(world):
    runner = Runner(world, flashinfer)
    batch = runner.batch(ForwardMode.EXTEND, [2], world.grow([2], 3), 3)
    backend = runner.attn_backend
    backend.init_forward_metadata(batch)
    backend.forward(random(3, HEADS * DIM), random(3, KV_HEADS, DIM), random(3, KV_HEADS, DIM), LAYER, batch)
    assert not runner.runtime.window.rings[0].any()


def test_a_recorded_decode_follows_its_input_buffers(world):
    """Recorded over padding alone, as SGLang captures; replayed for real requests, with padding lanes behind them."""
    runner, heard = Runner(world, flashinfer), Heard()
    backend, window = runner.attn_backend, runner.runtime.window
    runner.runtime.window.begin(1, len(world.names[1])), runner.runtime.window.begin(4, len(world.names[4]))
    empty = runner.batch(ForwardMode.DECODE, [], torch.zeros(0, dtype=torch.int64))
    graph = runner.replay_view(empty, LANES)  # the graph's buffers

    def one_pass(ring, q, rows, positions):
        window.rings[0], graph.req_pool_indices, graph.positions = ring, rows, positions
        attention_hooks.keep_queries(lambda *args: None, backend, q, None, None, LAYER, graph)
        return ring

    ring, q = window.rings[0], torch.zeros(LANES, HEADS * DIM)
    rows, positions = graph.req_pool_indices, graph.positions
    recorded = make_fx(one_pass)(ring.clone(), q, rows, positions)
    window.rings[0] = ring
    for step in range(W + 2):
        lanes = [4, 1] if step % 2 else [1, 4]
        view = runner.replay_view(runner.batch(ForwardMode.DECODE, lanes, world.grow(lanes, 1)), LANES)
        rows.copy_(view.req_pool_indices), positions.copy_(view.positions), q.copy_(random(LANES, HEADS * DIM))
        assert view.req_pool_indices[2:].tolist() == [0] * (LANES - 2)
        recorded(ring, q, rows, positions)
        heard.add(lanes, positions[:2].tolist(), q.view(LANES, HEADS, DIM)[:2].clone())
    heard.check(runner, 1), heard.check(runner, 4)
    others = [row for row in range(1, ROWS + 1) if row not in (1, 4)]
    assert not ring[others].any(), "padding lanes write to row 0 only"
    assert len({(r, p) for r, p in heard.queries if r == 1}) == W + 2
