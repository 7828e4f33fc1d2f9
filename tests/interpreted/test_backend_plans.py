"""SGLang's triton and flashinfer backends plan exactly the resident tokens: indptr and indices equal a reference.

Their planning code is SGLang's own (see ``paged_world``). Nothing here ran on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.support.paged_world import MOST_REQUESTS, ROWS, Runner, World, flashinfer, install_hooks, triton

STEP = st.one_of(
    st.tuples(st.just("grow"), st.integers(1, ROWS), st.integers(1, 9)),
    st.tuples(st.just("decode"), st.integers(1, ROWS), st.just(1)),
    st.tuples(st.just("share"), st.integers(1, ROWS), st.integers(0, 40)),
    st.tuples(st.just("evict"), st.integers(1, ROWS), st.sampled_from([0.1, 0.5, 1.0])),
)


@pytest.fixture(scope="module", autouse=True)
def hooked():
    with pytest.MonkeyPatch.context() as patch:
        install_hooks(patch)
        yield


def played(steps, seed=0) -> World:
    """Three requests, then these steps."""
    world = World(seed)
    for row, length in ((1, 30), (2, 1), (3, 57)):
        world.start(row, length)
    for what, row, amount in steps:
        if what == "share" and row not in world.names:
            world.start(row, 3, sharing=1, prefix=min(amount, len(world.names[1]) - 1))
        elif row in world.names and what == "evict":
            world.evict(row, amount)
        elif row in world.names and what != "share" and len(world.names[row]) + amount < 150:
            world.grow([row], amount)
    world.table.check_integrity()
    world.rows.check_integrity()
    return world


def flat(world: World, rows, padding=0, drop=0):
    """Reference: indptr and indices; ``drop`` newest tokens of each row left out, padding requests read slot 0."""
    lists = [world.reference(row)[: len(world.reference(row)) - drop] for row in rows] + [[0]] * padding
    indptr = torch.tensor([len(x) for x in lists]).cumsum(0).tolist()
    return [0, *indptr], [slot for x in lists for slot in x]


def agree(indptr, indices, expected) -> bool:
    want_indptr, want = expected
    return indptr.tolist() == want_indptr and indices[: want_indptr[-1]].tolist() == want


@settings(max_examples=20)
@given(steps=st.lists(STEP, max_size=10), seed=st.integers(0, 99))
def test_triton_decode(steps, seed):
    world = played(steps, seed)
    runner = Runner(world, triton)
    rows = sorted(world.names)
    batch = runner.batch(ForwardMode.DECODE, rows, world.grow(rows, 1))
    assert batch.out_cache_loc.tolist() == [world.reference(row)[-1] for row in rows], "written where it is read"
    with runner.passing(rows) as backend:
        backend.init_forward_metadata(batch)
    plan = backend.forward_metadata
    assert agree(plan.kv_indptr, plan.kv_indices, flat(world, rows))
    assert len(plan.kv_indices) == plan.kv_indptr[-1], "sized by the host's lengths"
    assert batch.seq_lens.tolist() == [len(world.names[row]) for row in rows], "the model keeps logical lengths"


@settings(max_examples=20)
@given(steps=st.lists(STEP, max_size=10), seed=st.integers(0, 99), tokens=st.integers(1, 7))
def test_triton_extend(steps, seed, tokens):
    world = played(steps, seed)
    runner = Runner(world, triton)
    rows = sorted(world.names)[::-1]
    batch = runner.batch(ForwardMode.EXTEND, rows, world.grow(rows, tokens), tokens)
    with runner.passing(rows) as backend:
        backend.init_forward_metadata(batch)
    plan = backend.forward_metadata
    assert agree(plan.kv_indptr, plan.kv_indices, flat(world, rows, drop=tokens))
    assert len(plan.kv_indices) == plan.kv_indptr[-1]
    assert plan.qo_indptr.tolist() == [tokens * i for i in range(len(rows) + 1)]
    assert plan.max_extend_len == tokens


@settings(max_examples=20)
@given(steps=st.lists(STEP, max_size=10), seed=st.integers(0, 99), wider=st.integers(0, 2))
def test_triton_graph_replay_with_padding(steps, seed, wider):
    world = played(steps, seed)
    runner = Runner(world, triton)
    rows = sorted(world.names)
    padded = min(MOST_REQUESTS, len(rows) + wider)
    view = runner.replay_view(runner.batch(ForwardMode.DECODE, rows, world.grow(rows, 1)), padded)
    assert not hasattr(view, "extend_prefix_lens")
    with runner.passing(rows) as backend:
        backend.init_forward_metadata_out_graph(view)
    expected = flat(world, rows, padding=padded - len(rows))
    assert agree(backend.kv_indptr[: padded + 1], backend.cuda_graph_kv_indices, expected)


def planned(call):
    """(indptr, indices) of a decode plan's arguments."""
    return call[0], call[1]


@settings(max_examples=20)
@given(steps=st.lists(STEP, max_size=10), seed=st.integers(0, 99))
def test_flashinfer_decode(steps, seed):
    world = played(steps, seed)
    runner = Runner(world, flashinfer)
    rows = sorted(world.names)
    batch = runner.batch(ForwardMode.DECODE, rows, world.grow(rows, 1))
    with runner.passing(rows) as backend:
        backend.init_forward_metadata(batch)
    indptr, indices = planned(backend.decode_wrappers[0].calls[-1])
    assert agree(indptr, indices, flat(world, rows)) and len(indices) == indptr[-1]


@settings(max_examples=20)
@given(steps=st.lists(STEP, max_size=10), seed=st.integers(0, 99), tokens=st.integers(1, 7), paged=st.booleans())
def test_flashinfer_extend(steps, seed, tokens, paged):
    world = played(steps, seed)
    runner = Runner(world, flashinfer, use_paged=paged)
    rows = sorted(world.names)
    batch = runner.batch(ForwardMode.EXTEND, rows, world.grow(rows, tokens), tokens)
    with runner.passing(rows) as backend:
        backend.init_forward_metadata(batch)
    qo_indptr, indptr, indices, *_ = backend.prefill_wrappers_paged[0].calls[-1]
    expected = flat(
        world, rows, drop=0 if paged else tokens
    )  # with the ragged wrapper, new tokens are not read from the pool
    assert agree(indptr, indices, expected) and len(indices) == indptr[-1] + 256
    assert qo_indptr.tolist() == [tokens * i for i in range(len(rows) + 1)]
    ragged = backend.prefill_wrapper_ragged.calls
    assert len(ragged) == (not paged) and all(torch.equal(call[0], qo_indptr) for call in ragged)
    assert paged or backend.forward_metadata.extend_no_prefix == (indptr[-1] == 0)


def capture_then_replay(world, rows, padded):
    """Plan a graph's capture, then its replay for these rows; the wrapper with what it was given."""
    runner = Runner(world, flashinfer)
    backend = runner.attn_backend
    synthetic = runner.replay_view(runner.batch(ForwardMode.DECODE, [], torch.zeros(0, dtype=torch.int64)), padded)
    backend.init_forward_metadata_out_graph(synthetic, in_capture=True)
    (wrapper,) = backend.decode_cuda_graph_metadata[padded]
    indptr, indices = planned(wrapper.calls[-1])
    assert agree(indptr, indices, flat(world, [], padding=padded)), "a capture reads the padding slot"
    view = runner.replay_view(runner.batch(ForwardMode.DECODE, rows, world.grow(rows, 1)), padded)
    with runner.passing(rows):
        backend.init_forward_metadata_out_graph(view)
    return backend, wrapper


@settings(max_examples=20)
@given(steps=st.lists(STEP, max_size=10), seed=st.integers(0, 99), wider=st.integers(0, 2))
def test_flashinfer_graph_replay_with_padding(steps, seed, wider):
    """A replay is planned by FlashInfer's own ``fast_decode_plan``, which trusts the host's lengths."""
    world = played(steps, seed)
    rows = sorted(world.names)
    padded = min(MOST_REQUESTS, len(rows) + wider)
    backend, wrapper = capture_then_replay(world, rows, padded)
    expected = flat(world, rows, padding=padded - len(rows))
    device = backend.indices_updater_decode.kv_indptr[0][: padded + 1]
    assert agree(device, backend.cuda_graph_kv_indices[0], expected)
    _, _, _, _, host, lengths, *_ = wrapper.host[-1]
    assert host.tolist() == device.tolist() == expected[0], "host and device agree"
    assert lengths.tolist() == device.diff().tolist()


def test_logical_lengths_on_the_host_would_be_noticed(monkeypatch):
    """The check above has teeth: with the host's lengths left alone it fails."""
    from nexus_sglang.sglang_plugin.attention import paged

    shadow = paged.shadow_batch

    def half(batch, *args):
        out = shadow(batch, *args)
        out.seq_lens_cpu = batch.seq_lens_cpu
        return out

    world = played([("evict", 1, 0.5), ("evict", 3, 0.5)])
    monkeypatch.setattr(paged, "shadow_batch", half)
    backend, wrapper = capture_then_replay(world, [1, 2, 3], 4)
    host = wrapper.host[-1][4]
    device = backend.indices_updater_decode.kv_indptr[0][:5]
    assert host.tolist() != device.tolist()


@pytest.mark.parametrize("backend", [triton, flashinfer])
def test_without_the_adapter_names_would_be_read_as_slots(backend):
    world = played([("evict", 1, 0.5), ("evict", 3, 1.0)])
    runner = Runner(world, backend)
    batch = runner.batch(ForwardMode.DECODE, [1, 3], world.grow([1, 3], 1))
    runner.attn_backend.init_forward_metadata(batch)  # no request is known to be under way: lengths stay logical
    plan = runner.attn_backend.forward_metadata
    found = planned(plan.decode_wrappers[0].calls[-1]) if backend is flashinfer else (plan.kv_indptr, plan.kv_indices)
    assert not agree(*found, flat(world, [1, 3]))


@pytest.mark.parametrize("backend", [triton, flashinfer])
def test_extend_after_everything_before_was_evicted(backend):
    world = World()
    world.start(1, 40)
    world.start(2, 10)
    world.evict(1, 1.0)
    world.table.evict(torch.tensor(world.names[1][-1:]))
    del world.slot_of[world.names[1][-1]]
    world.rows.rebuild_all()
    assert world.rows.resident[1] == 0
    runner = Runner(world, backend)
    batch = runner.batch(ForwardMode.EXTEND, [1], world.grow([1], 3), 3)
    with runner.passing([1]) as backend:
        backend.init_forward_metadata(batch)
    plan = backend.forward_metadata
    if hasattr(plan, "prefill_wrappers"):
        qo, indptr, *_ = plan.prefill_wrappers[0].calls[-1]
        assert plan.extend_no_prefix, "nothing resident before: FlashInfer takes its branch for no prefix"
    else:
        qo = plan.qo_indptr
        indptr = plan.kv_indptr
    assert qo.tolist() == [0, 3] and indptr.tolist() == [0, 0]
    assert batch.positions.tolist() == [40, 41, 42], "positions are never renumbered"
