"""The batch a paged backend plans from, and which backends are trusted with compact rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus_sglang.errors import ShadowError
from nexus_sglang.sglang_plugin.attention import backends, paged
from nexus_sglang.sglang_plugin.attention.shadow_batch import RowsPool, shadow_batch


def decode_batch(lengths, size, **fields):
    return SimpleNamespace(
        batch_size=size,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu=None,
        seq_lens_sum=None,
        orig_seq_lens=torch.tensor(lengths),
        **fields,
    )


@settings(deadline=None)
@given(resident=st.lists(st.integers(1, 500), min_size=1, max_size=8), padding=st.integers(0, 3), seed=st.randoms())
def test_host_and_device_lengths_agree(resident, padding, seed):
    batch_rows = list(range(1, len(resident) + 1))
    seed.shuffle(batch_rows)
    batch = decode_batch([1000] * (len(batch_rows) + padding), len(batch_rows) + padding)
    out = shadow_batch(batch, batch_rows, [0, *resident], padding=1)
    want = [resident[row - 1] for row in batch_rows] + [1] * padding
    assert out.seq_lens.tolist() == out.seq_lens_cpu.tolist() == want and out.seq_lens_sum == sum(want)
    assert out.seq_lens.dtype == torch.int32 and out.orig_seq_lens is batch.orig_seq_lens
    assert batch.seq_lens.tolist() == [1000] * len(want) and batch.seq_lens_sum is None, (
        "the model's batch is not touched"
    )
    assert not hasattr(out, "extend_prefix_lens")


def test_prefixes_are_what_is_resident_before_the_new_tokens():
    fields = dict(
        extend_prefix_lens=torch.tensor([90, 0], dtype=torch.int32),
        extend_prefix_lens_cpu=[90, 0],
        extend_seq_lens=torch.tensor([10, 7]),
        extend_seq_lens_cpu=[10, 7],
    )
    batch = decode_batch([100, 7], 2, **fields)
    out = shadow_batch(batch, [3, 1], [0, 7, 0, 25], padding=1)
    assert out.extend_prefix_lens.tolist() == out.extend_prefix_lens_cpu == [15, 0]
    assert out.extend_seq_lens is batch.extend_seq_lens and batch.extend_prefix_lens_cpu == [90, 0]


@pytest.mark.parametrize(
    "batch_rows, resident, extend",
    [
        ([1, 2], [0, 5, 5], None),  # more requests than the batch has
        ([1], [0, 0], None),  # a request without a token
        ([1], [0, 5], [6]),  # fewer tokens than are new
        ([1], [0, 5], [2, 2]),  # a prefill of other requests
    ],
)
def test_what_does_not_fit_is_refused(batch_rows, resident, extend):
    fields = {} if extend is None else {"extend_prefix_lens": torch.zeros(1), "extend_seq_lens_cpu": extend}
    with pytest.raises(ShadowError):
        shadow_batch(decode_batch([9], 1, **fields), batch_rows, resident, padding=1)


def test_the_pool_a_backend_sees():
    slots = torch.zeros(2, 2)
    pool = RowsPool(SimpleNamespace(size=7, req_to_token=torch.ones(2, 2)), slots)
    assert pool.req_to_token is slots and pool.size == 7


def named(name, **fields):
    return type(name, (), fields)()


def runner_of(backend, slots):
    translator = SimpleNamespace(req_to_token=torch.ones(2, 2), reads_are_translated=False)
    runtime = SimpleNamespace(rows=SimpleNamespace(slots=slots))
    return SimpleNamespace(
        attn_backend=backend,
        decode_attn_backend=None,
        decode_attn_backend_group=[],
        kv_index_translator=translator,
        token_to_kv_pool_allocator=SimpleNamespace(runtime=runtime),
    )


def test_both_halves_of_a_mixed_backend_get_rows():
    slots = torch.zeros(2, 2)
    pool = SimpleNamespace(req_to_token=torch.ones(2, 2), size=1)
    prefill = named("FlashInferAttnBackend", req_to_token_pool=pool)
    decode = named("TritonAttnBackend", req_to_token_pool=pool, req_to_token=pool.req_to_token)
    runner = runner_of(named("HybridAttnBackend", prefill_backend=prefill, decode_backend=decode), slots)
    for half in (prefill, decode):
        half.kv_index_translator = runner.kv_index_translator
        assert not backends.reads_compact_rows(half, runner)
    backends.install_rows(runner, runner.token_to_kv_pool_allocator.runtime)
    assert all(backends.reads_compact_rows(half, runner) for half in (prefill, decode))
    assert not hasattr(prefill, "req_to_token") and decode.req_to_token is slots

    decode.req_to_token = pool.req_to_token
    assert not backends.reads_compact_rows(decode, runner), "a row table of its own is noticed"
    runner.kv_index_translator.reads_are_translated = True
    assert not backends.reads_compact_rows(prefill, runner), "so is an id space with a table of its own"


@pytest.mark.parametrize("name", ["FlashAttentionBackend", "LLaDA2CFGFlashInferAttnBackend", "TboAttnBackend"])
def test_other_backends_do_not_count_as_readers(name):
    backend = named(name)
    runner = runner_of(backend, torch.zeros(2, 2))
    backends.install_rows(runner, runner.token_to_kv_pool_allocator.runtime)
    assert not backends.reads_compact_rows(backend, runner)


def test_debug_mode_compares_the_rows_of_batch_and_requests():
    backend = SimpleNamespace(nexus_runtime=SimpleNamespace(batch_rows=[2, 3], config=SimpleNamespace(debug=True)))
    with pytest.raises(ShadowError, match=r"rows \[2, 1\] for requests in rows \[2, 3\]"):
        paged.plan_resident(print, backend, SimpleNamespace(req_pool_indices=torch.tensor([2, 1])))
