"""A pool whose tokens come and go, and SGLang's own paged attention backends over it, on the CPU.

The backends are SGLang's classes without their constructors, which want a GPU: every line of their planning runs, with
Triton's interpreter in place of a GPU, and FlashInfer's wrappers replaced by ``flashinfer_stand_in``. The reference is
a dictionary from virtual id to KV slot, kept beside page table and rows.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention import flashinfer_backend, triton_backend
from sglang.srt.mem_cache import kv_index_translator
from sglang.srt.mem_cache.kv_loc_plan import IdSpace, IdSpaceKind
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from nexus_sglang.evidence.query_window import LayerShape, QueryWindow
from nexus_sglang.kv_slots.compact_rows import CompactRows
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.sglang_plugin.attention import backends, paged
from tests.support import flashinfer_stand_in
from tests.support.flashinfer_stand_in import Wrapper

ROWS = 6
WIDTH = 160
SLOTS = 700
MOST_REQUESTS = 8
HEADS = 4
KV_HEADS = 2
DIM = 16
W = 4
LAYER = SimpleNamespace(
    layer_id=0,
    tp_q_head_num=HEADS,
    tp_k_head_num=KV_HEADS,
    tp_v_head_num=KV_HEADS,
    qk_head_dim=DIM,
    v_head_dim=DIM,
    head_dim=DIM,
    scaling=0.25,
    logit_cap=0.0,
    logit_capping_method="tanh",
    sliding_window_size=-1,
    attn_type=None,
    is_cross_attention=False,
    k_scale=None,
    v_scale=None,
    k_scale_float=None,
    v_scale_float=None,
    xai_temperature_len=-1,
)


class World:
    """Requests in rows 1 to ``ROWS``, grown, shared and evicted from; ``reference`` says what each may read."""

    def __init__(self, seed: int = 0):
        self.noise = torch.Generator().manual_seed(seed)
        self.table = PageTable(4000, SLOTS)
        self.req_to_token = torch.zeros((ROWS + 1, WIDTH), dtype=torch.int32)
        self.rows = CompactRows(self.req_to_token, self.table)
        self.names: dict[int, list[int]] = {}
        self.slot_of: dict[int, int] = {}

    def start(self, row: int, length: int, sharing: int | None = None, prefix: int = 0) -> None:
        """A request whose first ``prefix`` tokens are those of row ``sharing``, and ``length`` new ones."""
        self.names[row] = self.names[sharing][:prefix] if sharing is not None else []
        self.req_to_token[row, : len(self.names[row])] = torch.tensor(self.names[row], dtype=torch.int32)
        self.grow([row], length)

    def grow(self, rows: list[int], tokens: int) -> torch.Tensor:
        """Every row gains this many tokens, as SGLang allocates them; int64 virtual ids."""
        ids = self.table.allocate(len(rows) * tokens)
        for row, mine in zip(rows, ids.tolist() if tokens == 1 else ids.view(len(rows), tokens).tolist(), strict=True):
            mine = [mine] if tokens == 1 else mine
            begin = len(self.names[row])
            self.names[row] = self.names[row] + mine
            self.req_to_token[row, begin : begin + tokens] = torch.tensor(mine, dtype=torch.int32)
        self.slot_of.update(zip(ids.tolist(), self.table.v2p[ids].tolist(), strict=True))
        self.rows.extend(rows, [len(self.names[row]) for row in rows])
        return ids

    def evict(self, row: int, share: float) -> None:
        """Part of the row's tokens, the newest spared; other rows that name them lose them too."""
        old = self.names[row][:-1]
        gone = [
            name for name, x in zip(old, torch.rand(len(old), generator=self.noise).tolist(), strict=True) if x < share
        ]
        self.table.evict(torch.tensor(gone, dtype=torch.int64))
        for name in gone:
            self.slot_of.pop(name, None)
        self.rows.rebuild_all()

    def reference(self, row: int) -> list[int]:
        return [self.slot_of[name] for name in self.names[row] if name in self.slot_of]


def install_hooks(monkeypatch) -> None:
    """The hooks of the paged backends through SGLang's registry, and what the backends miss without a GPU."""
    assert len(paged.HOOKS) == 8
    for hook in paged.HOOKS:
        target = f"sglang.srt.{hook.target}"
        if target not in HookRegistry._patched:
            HookRegistry.register(target, hook.function, HookType(hook.how))
    HookRegistry.apply_hooks()
    assert {f"sglang.srt.{hook.target}" for hook in paged.HOOKS} <= HookRegistry._patched
    flashinfer_stand_in.install(lambda *args: monkeypatch.setattr(*args, raising=False))
    alone = SimpleNamespace(dcp_enabled=False, attn_dcp_size=1)
    monkeypatch.setattr(kv_index_translator, "get_parallel", lambda: alone)


class Pool:
    """Keys and values of one layer, as SGLang's pool hands them to a backend."""

    def __init__(self):
        self.keys, self.values = (torch.zeros(SLOTS + 1, KV_HEADS, DIM) for _ in range(2))

    def set_kv_buffer(self, layer, loc, k, v, *scales):
        self.keys[loc.loc] = k
        self.values[loc.loc] = v

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values

    def get_kv_buffer(self, layer_id):
        return self.keys, self.values


class Runner:
    """As much of a ModelRunner as the binding and the backends touch."""

    def __init__(self, world: World, backend, use_paged: bool = False):
        self.world = world
        self.pool = Pool()
        shapes = {0: LayerShape(HEADS, DIM, 0.25)}
        with_lse = backend is flashinfer
        window = QueryWindow(shapes, ROWS + 1, W, torch.float32, "cpu", with_lse)
        self.runtime = SimpleNamespace(
            rows=world.rows, table=world.table, batch_rows=[], window=window, config=SimpleNamespace(debug=True)
        )
        self.token_to_kv_pool_allocator = SimpleNamespace(runtime=self.runtime)
        self.req_to_token_pool = SimpleNamespace(req_to_token=world.req_to_token, size=ROWS)
        self.kv_index_translator = kv_index_translator.KVIndexTranslator(
            req_to_token=world.req_to_token,
            token_to_kv_pool_allocator=None,
            token_to_kv_pool=self.pool,
            page_size=1,
            device="cpu",
        )
        self.kv_index_translator._spaces[IdSpaceKind.FULL] = IdSpace(
            key=(IdSpaceKind.FULL, 1), write=world.table.translate
        )
        self.attn_backend = backend(self, use_paged) if backend is flashinfer else backend(self)
        self.decode_attn_backend = None
        self.decode_attn_backend_group = []
        assert backends.reports_lse(self) == with_lse
        assert not backends.reads_compact_rows(self.attn_backend, self)
        backends.install_rows(self, self.runtime)
        assert backends.reads_compact_rows(self.attn_backend, self)

    @contextlib.contextmanager
    def passing(self, rows: list[int]):
        """A forward pass of these requests is under way."""
        self.runtime.batch_rows = list(rows)
        yield self.attn_backend
        self.runtime.batch_rows = []

    def batch(self, mode: ForwardMode, rows: list[int], written: torch.Tensor, tokens: int = 1) -> ForwardBatch:
        """The batch SGLang would build: logical lengths and positions, virtual write ids, which it translates."""
        lengths = [len(self.world.names[row]) for row in rows]
        before = [n - tokens for n in lengths]
        fields = {}
        if mode is ForwardMode.EXTEND:
            fields = dict(
                extend_num_tokens=len(rows) * tokens,
                extend_prefix_lens_cpu=before,
                extend_seq_lens_cpu=[tokens] * len(rows),
                extend_prefix_lens=torch.tensor(before, dtype=torch.int32),
                extend_seq_lens=torch.full((len(rows),), tokens, dtype=torch.int32),
            )
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.zeros(len(written), dtype=torch.int64),
            req_pool_indices=_ids(rows),
            seq_lens=_ids(lengths),
            seq_lens_cpu=_ids(lengths),
            seq_lens_sum=sum(lengths),
            positions=_ids([p for b, n in zip(before, lengths, strict=True) for p in range(b, n)]),
            out_cache_loc=written,
            **fields,
        )
        self.kv_index_translator.bind_own_plan(batch)
        return batch

    def replay_view(self, batch: ForwardBatch, padded: int) -> SimpleNamespace:
        """What SGLang's CUDA-graph runner plans a replay with, for a graph of ``padded`` requests."""
        registry = build_decode_registry(
            device=torch.device("cpu"),
            max_bs=MOST_REQUESTS,
            max_num_token=MOST_REQUESTS,
            seq_len_fill_value=1,
            cache_loc_dtype=torch.int64,
            share_pool=False,
        )
        names = ("input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu")
        buffers = SimpleNamespace(mamba_track_indices=None, **{name: registry.get_slot(name).buffer for name in names})
        for buffer in (buffers.req_pool_indices, buffers.positions, buffers.seq_lens, buffers.seq_lens_cpu):
            buffer.fill_(5)  # what an earlier replay left behind
        registry.fill_from(
            batch, raw_bs=batch.batch_size, padded_bs=padded, raw_num_tokens=batch.batch_size, padded_num_tokens=padded
        )
        view = build_replay_fb_view(
            batch,
            buffers,
            bs=padded,
            raw_bs=batch.batch_size,
            num_tokens=padded,
            global_num_tokens_cpu=None,
            seq_len_fill_value=1,
            capture_forward_mode=ForwardMode.DECODE,
            is_encoder_decoder=False,
        )
        batch.kv_loc_plan.bind_replay(
            view, self.kv_index_translator, slots=registry.get_slot("out_cache_loc").buffer[:padded]
        )
        return view


def _ids(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _bare(cls, **attributes):
    instance = object.__new__(cls)
    for name, value in attributes.items():
        setattr(instance, name, value)
    return instance


def triton(runner: Runner):
    """SGLang's TritonAttnBackend."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    backend = _bare(
        triton_backend.TritonAttnBackend,
        kv_index_translator=runner.kv_index_translator,
        device="cpu",
        dcp_size=1,
        req_to_token=runner.world.req_to_token,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool=runner.pool,
        sliding_window_size=None,
        window_kv_indptr=None,
        use_sliding_window_kv_pool=False,
        max_context_len=WIDTH,
        num_head=HEADS,
        num_kv_head=KV_HEADS,
        v_head_dim=DIM,
        swa_v_head_dim=None,
        max_kv_splits=4,
        static_kv_splits=False,
        device_core_count=132,
        enable_deterministic=False,
        split_tile_size=None,
        lean_total_programs=1,
        lean_block_m=16,
        skip_prefill=False,
        use_mla=False,
        use_pdl=False,
        page_size=1,
        use_verify_shared_kv=False,
        use_verify_splitkv=False,
        enable_lean_attention=False,
        allow_bidirectional_attention_in_extend=False,
        use_dense_fp8_chunked_prefill=False,
        kv_indptr=torch.zeros(MOST_REQUESTS + 1, dtype=torch.int32),
        qo_indptr=torch.zeros(MOST_REQUESTS + 1, dtype=torch.int64),
        mask_indptr=torch.zeros(MOST_REQUESTS + 1, dtype=torch.int64),
        _verify_mask=None,
        is_draft_runner=False,
        topk=0,
        decode_attention_fwd=decode_attention_fwd,
        extend_attention_fwd=extend_attention_fwd,
        speculative_num_steps=None,
        num_draft_tokens=None,
        dllm_block_size=None,
        target_verify_num_tokens_per_req=1,
    )
    backend.init_cuda_graph_state(MOST_REQUESTS, MOST_REQUESTS)
    return backend


def flashinfer(runner: Runner, use_paged: bool = False):
    """SGLang's FlashInferAttnBackend and its two planners; FlashInfer's wrappers are :class:`Wrapper`."""
    module = flashinfer_backend
    backend = _bare(
        module.FlashInferAttnBackend,
        kv_index_translator=runner.kv_index_translator,
        dispatch_reason=None,
        num_wrappers=1,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool=runner.pool,
        use_sliding_window_kv_pool=False,
        is_multimodal=False,
        enable_mis=False,
        enable_deterministic=False,
        use_paged=use_paged,
        is_dllm_model=False,
        prefill_uses_dequant_workspace=False,
        decode_uses_dequant_workspace=False,
        dq_page_table=None,
        dq_paged_kernel_lens=None,
        decode_split_tile_size=None,
        prefill_split_tile_size=None,
        disable_cuda_graph_kv_split=False,
        prefill_backend="fa2",
        decode_cuda_graph_metadata={},
        _swa_kv_pool=None,
        kv_cache_quant_method=SimpleNamespace(needs_global_scale=lambda: False),
        prefill_wrapper_ragged=Wrapper(),
        prefill_wrappers_paged=[Wrapper()],
        decode_wrappers=[Wrapper()],
        flashinfer_kv_cache_dtype=torch.bfloat16,
        cuda_graph_kv_indices=[torch.zeros(MOST_REQUESTS * WIDTH, dtype=torch.int32)],
    )
    backend._create_decode_wrappers = lambda bs, tokens: [Wrapper(backend.cuda_graph_kv_indices[0], bs)]
    for name, cls in (
        ("decode", module.FlashInferIndicesUpdaterDecode),
        ("prefill", module.FlashInferIndicesUpdaterPrefill),
    ):
        planner = _bare(
            cls,
            num_qo_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            data_type=torch.bfloat16,
            _swa_kv_pool=None,
            q_data_type=torch.bfloat16,
            attn_backend=backend,
            sliding_window_size=None,
            kv_indptr=[torch.zeros(MOST_REQUESTS + 1, dtype=torch.int32)],
            kv_last_page_len=torch.ones(MOST_REQUESTS, dtype=torch.int32),
            qo_indptr=[torch.zeros(MOST_REQUESTS + 1, dtype=torch.int32)],
            prefill_wrapper_ragged=backend.prefill_wrapper_ragged,
        )
        planner.update = planner.update_single_wrapper
        setattr(backend, f"indices_updater_{name}", planner)
    return backend
