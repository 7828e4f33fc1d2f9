"""The log-sum-exp that FlashInfer's own kernels report, and the rings that keep it, replayed from a CUDA graph."""

import math

import pytest
import torch

from nexus_sglang.evidence.query_window import LayerShape, QueryWindow
from nexus_sglang.sglang_plugin.attention.flashinfer_lse import LogSumExp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here (torch.cuda.is_available() is false)"),
]
HEADS = 8
KV_HEADS = 2
DIM = 64
LENGTHS = (1, 70, 513)
SCALE = 0.11


def ids(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.fixture
def world():
    """Queries, a pool of keys and values with pages of one token, and which slots each request holds, in no order."""
    g = torch.Generator("cuda").manual_seed(0)
    total = sum(LENGTHS)
    queries = torch.randn(len(LENGTHS), HEADS, DIM, generator=g, device="cuda", dtype=torch.bfloat16)
    pool = tuple(
        torch.randn(2 * total, 1, KV_HEADS, DIM, generator=g, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    return queries, pool, torch.randperm(2 * total, generator=g, device="cuda")[:total].int()


def expected(queries, keys, slots) -> torch.Tensor:
    """float32 ``[requests, HEADS]``: natural log-sum-exp over each request's keys."""
    rows = []
    for query, mine in zip(queries, slots.split(LENGTHS), strict=True):
        held = keys[mine.long(), 0].float().repeat_interleave(HEADS // KV_HEADS, dim=1)
        rows.append((torch.einsum("hd,thd->ht", query.float(), held) * SCALE).logsumexp(-1))
    return torch.stack(rows)


def decode_wrapper(slots, graph: bool, tensor_cores: bool = True):
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
    indptr = ids([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    last = ids([1] * len(LENGTHS))
    buffers = dict(
        use_cuda_graph=True,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=slots.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", backend="fa2", use_tensor_cores=tensor_cores, **(buffers if graph else {})
    )
    wrapper.begin_forward(
        indptr, slots, last, HEADS, KV_HEADS, DIM, 1, q_data_type=torch.bfloat16, data_type=torch.bfloat16
    )
    return wrapper


@pytest.mark.parametrize("tensor_cores", [True, False])
def test_decode_tells_it_to_base_2(world, tensor_cores):
    queries, pool, slots = world
    wrapper = decode_wrapper(slots, graph=False, tensor_cores=tensor_cores)
    listener = LogSumExp()
    silent = wrapper.forward(queries, pool, sm_scale=SCALE)
    listener.listen([wrapper])
    assert torch.equal(wrapper.forward(queries, pool, sm_scale=SCALE), silent), "listening changes nothing"
    torch.testing.assert_close(listener.take() * math.log(2), expected(queries, pool[0], slots), atol=2e-2, rtol=2e-2)


def test_prefill_with_a_prefix_tells_two_that_add_up(world):
    """New tokens by the ragged wrapper, the prefix by the paged one, as SGLang calls them."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

    queries, pool, slots = world
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
    ragged = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    # Hopper's default, fa3, would read one key of an empty prefix.
    paged = BatchPrefillWithPagedKVCacheWrapper(torch.empty_like(workspace), "NHD", backend="fa2")
    new = ids(range(len(LENGTHS) + 1))  # the last token of each request is new
    before = [mine[:-1] for mine in slots.split(LENGTHS)]
    indptr = ids([0, *torch.tensor([len(b) for b in before]).cumsum(0).tolist()])
    newest = torch.stack([mine[-1] for mine in slots.split(LENGTHS)]).long()
    k, v = (x[newest, 0] for x in pool)
    ragged.begin_forward(new, new, HEADS, KV_HEADS, DIM, q_data_type=torch.bfloat16)
    paged.begin_forward(
        new,
        indptr,
        torch.cat(before),
        ids([1] * len(LENGTHS)),
        HEADS,
        KV_HEADS,
        DIM,
        1,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    listener = LogSumExp()
    listener.listen([ragged, paged])
    ragged.forward_return_lse(queries, k, v, causal=True, sm_scale=SCALE)
    paged.forward_return_lse(queries, pool, causal=False, sm_scale=SCALE)
    torch.testing.assert_close(listener.take() * math.log(2), expected(queries, pool[0], slots), atol=2e-2, rtol=2e-2)


def test_a_graph_writes_it_beside_its_query(world):
    """Captured once, replayed with other queries, rows and positions."""
    queries, pool, slots = world
    wrapper = decode_wrapper(slots, graph=True)
    listener = LogSumExp()
    window = QueryWindow({0: LayerShape(HEADS, DIM, SCALE)}, 9, 16, torch.bfloat16, "cuda", with_lse=True)
    rows = torch.tensor([0, 0, 0], device="cuda")
    positions = torch.tensor([1, 1, 1], device="cuda")

    def step():
        plan = window.plan_decode(rows, positions)
        listener.listen([wrapper])
        wrapper.forward(queries, pool, sm_scale=SCALE)
        window.capture(0, queries, plan, listener.take())

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for at in range(3):
        rows.copy_(torch.tensor([7, 2, 5]))
        positions.copy_(torch.tensor([20, 31, 500]) + at)
        queries.normal_()
        graph.replay()
        for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            assert torch.equal(window.rings[0][row, position % 16], queries[i])
            lse = window.lse(window.groups[0], row, positions[i : i + 1])[0, 0]
            torch.testing.assert_close(lse, expected(queries, pool[0], slots)[i], atol=2e-2, rtol=2e-2)
