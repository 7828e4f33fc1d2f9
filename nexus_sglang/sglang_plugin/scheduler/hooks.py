"""Every function of SGLang that is hooked when a policy is on, in one list, with the code that runs there."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from nexus_sglang.config import TokenAmount
from nexus_sglang.device import Stopwatch
from nexus_sglang.errors import ConfigError
from nexus_sglang.evidence.query_window import LayerShape
from nexus_sglang.kv_slots.capacity import affordable_requests, request_memory, side_memory, virtual_size
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.sglang_plugin import carrier
from nexus_sglang.sglang_plugin.attention import backends as attention_hooks
from nexus_sglang.sglang_plugin.installer import Hook

from . import built_check, telemetry
from . import hints as request_params
from . import ranks as parallel

logger = logging.getLogger(__name__)


WHOLE_BARRIER = ("SGLANG_ENABLE_WAR_BARRIER", "SGLANG_FORCE_COARSE_WAR_BARRIER")
"""By default SGLang's scheduler goes on once a pass has read its inputs; the eviction comes later (:func:`run_forward`).
The first is SGLang's default on CUDA, not on ROCm."""


def build_allocator(original, self, **kwargs):
    """AROUND ``KVCacheConfigurator._build_token_to_kv_pool_allocator``: virtual ids over the same pool."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.runtime_context import get_schedule

    from .allocator import NexusAllocator
    from .runtime import NexusRuntime

    stock = original(self, **kwargs)
    if type(stock) is not TokenToKVPoolAllocator:
        raise ConfigError(
            f"--kv-policy needs SGLang's plain token allocator, not {type(stock).__name__}. "
            "Recipe: a plain causal MHA or GQA model with --page-size 1."
        )
    # Read later in this process, when the prefix cache is built and in the event loop; other processes never see them.
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "nexus"
    if str(stock.device) != "cpu":  # where there are streams
        os.environ.update(dict.fromkeys(WHOLE_BARRIER, "1"))
    config, schedule = carrier.current(), get_schedule()
    requests = kwargs["req_to_token_pool"]
    table = PageTable(
        virtual_size(stock.size, config, requests.max_context_len, requests.size), stock.size, stock.device
    )
    chunk = schedule.chunked_prefill_size
    if chunk is None or chunk <= 0:
        chunk = requests.max_context_len
    allocator = NexusAllocator(table, stock.dtype, stock.device, stock.get_kvcache(), stock.need_sort)
    allocator.runtime = NexusRuntime(config, table, chunk, overlap=not schedule.disable_overlap_schedule)
    return allocator


def reserve_memory(original, configurator, *args, **kwargs):
    """AROUND ``KVCacheConfigurator._profile_available_bytes``: on a GPU SGLang gives all memory but a fixed slack to the
    KV pool; what is allocated beside it for as many requests as it will admit has to come out of that.

    Raises:
        ConfigError: nothing would be left for the pool.
    """
    free = original(configurator, *args, **kwargs)
    if configurator.device == "cpu":
        return free
    tokens = configurator.config_from_budget(free).max_total_num_tokens
    requests = configurator.resolve_max_num_reqs(tokens)
    ids = virtual_size(tokens, carrier.current(), configurator.model_config.context_len, requests)
    taken = side_memory(requests, _per_request(configurator), ids)
    shown = f"{taken / 2**30:.2f} of {free / 2**30:.2f} GiB go to query windows and rows of {requests} requests"
    if taken >= free:
        raise ConfigError(
            f"--kv-policy leaves no memory for the KV pool: {shown}. Recipe: lower --max-running-requests."
        )
    logger.info("nexus: %s; --max-running-requests sets how many", shown)
    return free - taken


def limit_requests(result, configurator, token_capacity):
    """AFTER ``KVCacheConfigurator.resolve_max_num_reqs``: on a GPU, where nobody said how many, no more requests than
    have windows and rows in a small share of the pool's bytes."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    if configurator.device == "cpu" or get_schedule().max_running_requests is not None:
        return result
    model = configurator.model_config
    heads = model.get_num_kv_heads(get_parallel().attn_tp_size)
    token = 2 * model.num_hidden_layers * heads * model.head_dim * configurator.kv_cache_dtype.itemsize
    return min(result, affordable_requests(token_capacity * token, _per_request(configurator)))


def _per_request(configurator) -> int:
    """Bytes allocated for each request that may run."""
    from sglang.srt.runtime_context import get_parallel

    model = configurator.model_config
    heads = model.get_max_num_attention_heads() // get_parallel().attn_tp_size
    return request_memory(
        model.context_len, carrier.current().window, model.num_hidden_layers, heads, model.head_dim,
        configurator.model_dtype.itemsize,
    )  # fmt: skip


def translate_writes(result, runner):
    """AFTER ``ModelRunner.init_kv_index_translator``: forward passes write to physical slots."""
    from sglang.srt.mem_cache.kv_loc_plan import IdSpace, IdSpaceKind

    allocator = runner.token_to_kv_pool_allocator
    runner.kv_index_translator._spaces[IdSpaceKind.FULL] = IdSpace(
        key=(IdSpaceKind.FULL, id(allocator)), write=allocator.translate_write_loc
    )
    allocator.runtime.attach_rows(runner.req_to_token_pool)


def adopt_layers(result, runner):
    """AFTER ``ModelRunner.init_attention_backends``: look at the built layers, set up rings and evictor, compare ranks."""
    from sglang.srt.layers.radix_attention import RadixAttention

    built_check.refuse_pool(runner.kv_cache_dtype)
    layers = {}
    for module in runner.model.modules():
        if isinstance(module, RadixAttention):
            built_check.refuse_layer(module)
            layers[module.layer_id] = LayerShape(module.tp_q_head_num, module.qk_head_dim, module.scaling)
    runtime = runner.token_to_kv_pool_allocator.runtime
    runtime.attach_layers(dict(sorted(layers.items())), runner.dtype, runner.token_to_kv_pool, parallel.score_group(),
                          attention_hooks.reports_lse(runner))  # fmt: skip
    attention_hooks.install_rows(runner, runtime)
    built_check.check_runner(runner)
    parallel.check_ranks(runtime)


def run_forward(original, worker, batch, *args, **kwargs):
    """AROUND ``TpModelWorker.forward_batch_generation``, on the stream of the forward pass.

    With overlap scheduling there are two streams, and page table and rows are written on both: ids are given out, rows
    grow and requests are freed on the scheduler's, evictions happen here. What the host does is one sequence, and the
    device has to follow it:

    1. step n+1 is allocated after step n was launched, so after eviction n was queued and rows.resident says its outcome
    2. the new token's slot is written to its compact row there, and the forward stream waits for the scheduler's
       stream (``Scheduler.run_batch``) before it plans step n+1 from rows and rows.resident, then runs and evicts
    3. after each launch the scheduler's stream waits for the whole forward stream (``Scheduler._apply_war_barrier``,
       made coarse by ``WHOLE_BARRIER``), so nothing it does next overtakes eviction n+1

    The waits of 2 and 3 are between streams; the host goes on, unless something it then does on the scheduler's stream
    waits for the device. Without overlap there is one stream.
    """
    runtime = worker.model_runner.token_to_kv_pool_allocator.runtime
    runtime.before_forward(batch)
    clocked = runtime.config.timing and batch is not None and batch.forward_mode.is_decode()
    watch = Stopwatch(runtime.evictor.counters, runtime.table.device) if clocked else None
    result = original(worker, batch, *args, **kwargs)
    if watch:
        watch.lap("decode_seconds")
    runtime.after_forward(batch)
    if watch:
        watch.lap("decode_eviction_seconds")
    return result


def tree_took_tokens(result, tree, req, **kwargs):
    """AFTER ``UnifiedRadixCache.checkpoint_into_tree``: the row may name the tree's copies now."""
    if tree.disable or req.last_node is None:
        return
    runtime = tree.token_to_kv_pool_allocator.runtime
    tree.tree_core.mark_prompt(req.last_node, len(req.origin_input_ids))
    runtime.row_rewritten(req)


def name_candidate(original, adder, req, **kwargs):
    """AROUND ``PrefillAdder._check_prefill_budget``: the budget has to know whose price it computes."""
    adder.memory_budget.candidate = req
    return original(adder, req, **kwargs)


def count_retraction(result, *, token_to_kv_pool_allocator, **kwargs):
    """AFTER ``release_req``, which takes a request back: for want of memory, for one of higher priority, at a pause."""
    token_to_kv_pool_allocator.runtime.evictor.counters.retractions += 1


def count_names(original, observer):
    """AROUND ``SchedulerPoolStatsObserver._get_token_info``: SGLang's accounting is in virtual ids."""
    import dataclasses

    stats = original(observer)
    table = observer.token_to_kv_pool_allocator.table
    free = len(table.free_virtual)
    reclaimable = observer.token_to_kv_pool_allocator.runtime.reclaimable()
    return dataclasses.replace(
        stats,
        full_available_size=free,
        full_num_used=observer.max_total_num_tokens - free - stats.full_evictable_size,
        # What the operator watches is memory, so usage is physical: mapped and not evictable.
        full_token_usage=max(0.0, 1 - reclaimable / table.physical_size),
    )


def accept_request(req, scheduler, recv_req, *args, **kwargs):
    """AFTER ``Scheduler._create_generation_req``: read the request's hints; other budgets get their own prefixes."""
    prompt, room = len(req.origin_input_ids), scheduler.token_to_kv_pool_allocator.runtime.room_without_eviction()
    try:
        req.nexus_hints = hints = request_params.read_hints(req.sampling_params.custom_params)
        if not hints.evict:
            request_params.require_room(prompt, room)
    except ConfigError as err:
        req.set_finish_with_abort(str(err))
        # SGLang goes on to compare these with the prompt, which is one token now, and would answer with that instead.
        recv_req.logprob_start_len, recv_req.routed_experts_start_len = -1, 0
        return req
    start = recv_req.logprob_start_len
    if recv_req.return_logprob and start is not None and 0 <= start < len(req.origin_input_ids) - 1:
        logger.warning("rid %s: input logprobs over an evicted prefix are those of the reduced cache", req.rid)
    space = None
    if not hints.evict:
        space = request_params.WHOLE
    elif hints.budget is not None and TokenAmount(hints.budget) != scheduler_config(scheduler).budget:
        space = f"kv_budget={hints.budget:g}"
    if space:
        req.extra_key = f"{req.extra_key}|{space}" if req.extra_key else space
    return req


def fit_request(result, scheduler, req):
    """AFTER ``Scheduler.init_req_max_new_tokens``: prompt and answer of a request that is not to be evicted have to fit the
    pool."""
    runtime = scheduler.token_to_kv_pool_allocator.runtime
    if runtime.can_thin(req):
        return
    params, room = req.sampling_params, runtime.room_without_eviction() - len(req.origin_input_ids)
    params.max_new_tokens = min(params.max_new_tokens, max(0, room))
    params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)


def refuse_beams(original, coordinator, req, recv_req):
    """AROUND ``BeamCoordinator.validate_and_init``: beams share and rewrite rows behind the page table's back."""
    return "beam_width above 1 does not work with --kv-policy: beams rewrite shared KV rows. Use beam_width 1."


def scheduler_config(scheduler):
    return scheduler.token_to_kv_pool_allocator.runtime.config


def scheduler_ready(result, scheduler, *args, **kwargs):
    """AFTER ``Scheduler.__init__``: the prefix cache exists; last check before serving."""
    runtime = scheduler.token_to_kv_pool_allocator.runtime
    built_check.check_scheduler(scheduler)
    runtime.waiting = lambda: scheduler.waiting_queue
    if not scheduler.tree_cache.disable:
        runtime.attach_tree(scheduler.tree_cache.tree_core)
    if str(runtime.table.device) != "cpu":  # where kernels are compiled
        runtime.evictor.warm_up()
    logger.info(
        "nexus: policy %s, budget %s, block %d; %d virtual ids over %d physical slots, largest budget %d, "
        "query window %.1f MiB",
        runtime.config.policy, runtime.config.budget, runtime.config.block_size, runtime.table.virtual_size,
        runtime.table.physical_size, runtime.largest_budget, runtime.window.bytes / 2**20,
    )  # fmt: skip


def streamer_class(original, scheduler):
    """AROUND ``Scheduler.get_output_streamer_class``: finished requests report in ``meta_info['nexus']``."""
    return _reporting(original(scheduler))


@functools.cache
def _reporting(base: type) -> type:
    def build(self, reqs):
        info = self.__class__.__mro__[1].build_additional_customized_info(self, reqs)
        sequences = [getattr(req, "nexus_sequence", None) if req.finished() else None for req in reqs]
        info["nexus"] = [[seq.report] if seq and seq.report else [] for seq in sequences]
        return info

    attributes = {"has_additional_customized_info": True, "build_additional_customized_info": build, "__slots__": ()}
    return type("NexusOutputStreamer", (base,), attributes)


def show_state(result, controller, state: dict[str, Any]):
    """AFTER ``SchedulerInternalStateController._add_memory_usage``: ``/server_info`` shows the counters."""
    runtime = controller.scheduler.token_to_kv_pool_allocator.runtime
    state["nexus"] = {**telemetry.snapshot(runtime), "recent_requests": dict(runtime.log.recent)}


def log_batch(result, reporter, *args, **kwargs):
    """AFTER ``report_prefill_stats`` and ``report_decode_stats``: our line, every decode interval."""
    scheduler = reporter.scheduler
    runtime = scheduler.token_to_kv_pool_allocator.runtime
    runtime.batches += 1
    if runtime.batches % max(1, reporter.decode_log_interval) == 0 and reporter.is_stats_logging_rank:
        logger.info(telemetry.log_line(runtime))


HOOKS = (
    Hook("mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes", "around", reserve_memory),
    Hook("mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs", "after", limit_requests),
    Hook("mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool_allocator", "around", build_allocator),
    Hook("model_executor.model_runner.ModelRunner.init_kv_index_translator", "after", translate_writes),
    Hook("model_executor.model_runner.ModelRunner.init_attention_backends", "after", adopt_layers),
    Hook("layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend", "around",
         attention_hooks.torch_native_forward),
    Hook("layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_decode", "around",
         attention_hooks.torch_native_forward),
    *(Hook(f"layers.attention.{module}.{cls}.{name}", "around", function)
      for module, cls in (("triton_backend", "TritonAttnBackend"), ("flashinfer_backend", "FlashInferAttnBackend"))
      for name, function in (("init_forward_metadata", attention_hooks.plan_resident),
                             ("init_forward_metadata_out_graph", attention_hooks.plan_resident),
                             ("forward_extend", attention_hooks.keep_queries),
                             ("forward_decode", attention_hooks.keep_queries))),
    Hook("managers.tp_worker.TpModelWorker.forward_batch_generation", "around", run_forward),
    Hook("mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree", "after", tree_took_tokens),
    Hook("managers.schedule_policy.PrefillAdder._check_prefill_budget", "around", name_candidate),
    Hook("managers.schedule_batch.release_req", "after", count_retraction),
    Hook("managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver._get_token_info", "around",
         count_names),
    Hook("managers.scheduler.Scheduler._create_generation_req", "after", accept_request),
    Hook("beam_search.coordinator.BeamCoordinator.validate_and_init", "around", refuse_beams),
    Hook("managers.scheduler.Scheduler.init_req_max_new_tokens", "after", fit_request),
    Hook("managers.scheduler.Scheduler.__init__", "after", scheduler_ready),
    Hook("managers.scheduler.Scheduler.get_output_streamer_class", "around", streamer_class),
    Hook("managers.scheduler_components.internal_state.SchedulerInternalStateController._add_memory_usage", "after",
         show_state),
    Hook("managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_prefill_stats", "after", log_batch),
    Hook("managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats", "after", log_batch),
)  # fmt: skip
