"""The only room that knows SGLang's and FlashInfer's objects.

**Two processes, one wall.** SGLang calls ``entry.register`` in every process it starts. ``launcher`` is the code of the
process that parses arguments and serves HTTP. ``scheduler`` and ``attention`` are the code of the scheduler processes,
which own the GPU. They share nothing but the checked config, which ``carrier`` hands over in an environment variable.
``platform`` lets SGLang serve on a plain CPU, with a policy or without.

**What happens to** ``--kv-policy nexus``, in order:

1. Flag. ``launcher.flags``: SGLang loads the plugin before it parses arguments. Our flags become a ``NexusConfig``,
   which ``carrier`` publishes. ``launcher.chat_pins`` hooks the chat endpoints.
2. Refusals. ``launcher.refusals``: combinations that cannot work are refused while SGLang resolves its arguments. In
   the scheduler ``scheduler.built_check`` does the same with what SGLang has built.
3. Allocator. ``scheduler.build`` puts our parts among SGLang's, on memory that ``scheduler.reserve`` has kept free.
   ``scheduler.allocator`` gives out virtual ids; forward passes write to the KV slots behind them.
4. Row. ``scheduler.requests`` reads what a request asks for (``scheduler.hints``), resolves its plan, and names its
   prefix space (``scheduler.prefix_space``). ``scheduler.admission`` and ``scheduler.prefill_budget`` price it in KV
   slots. ``scheduler.runtime`` keeps its compact row as long as it runs; SGLang's request pool tells
   ``scheduler.row_listener`` when the row grows.
5. Forward. ``scheduler.passes`` stands around each forward pass. Attention (``attention``) reads compact rows, and the
   queries it attends with go into the query window.
6. Evidence. After the pass, the attention of the query window over each block is measured, for sequences over budget.
7. Policy. It weighs and orders the blocks.
8. Page table. The evictor unmaps the tokens that go. Ids stay, so the radix tree (``scheduler.tree``) never notices.
   Steps 6 to 8 are the rooms ``evidence``, ``policy``, ``eviction`` and ``kv_slots``, which know no SGLang.

Beside this way: ``scheduler.pressure`` thins the cache when memory runs out, ``scheduler.ranks`` keeps the ranks of
tensor parallelism together, ``scheduler.aborts`` ends the request that a client names and no other,
``scheduler.reports`` and ``scheduler.telemetry`` show what happened.

**What is changed in SGLang.** ``hook_table`` lists hooks, replaced attributes and overridden methods. ``installer``
puts hooks in place, and refuses to serve unless all of it fits. Without ``--kv-policy`` only the launch hooks are
installed (``hook_table.LAUNCH``, two attributes of ``Engine``, two resolution steps), and hand every call on.

**What is hung on SGLang's objects**: :data:`ATTACHED`. **Which of their fields get another value**: :data:`CHANGED`.
**Environment variables**: :data:`ENVIRONMENT`. Tests compare these tables with the code.
"""

from __future__ import annotations

from typing import NamedTuple


class Attached(NamedTuple):
    """An attribute of ours on an object of SGLang.

    Attributes:
        on: the object's class.
        attribute: its name.
        holds: what it is.
        written_by: modules of this package that set it.
        read_by: modules of this package that read it.
    """

    on: str
    attribute: str
    holds: str
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]


ATTACHED = (
    Attached(
        "ServerArgs", "_nexus_config", "the NexusConfig of this launch, or None",
        written_by=("launcher.flags",),
        read_by=("launcher.refusals",),
    ),
    Attached(
        "token_to_kv_pool_allocator", "runtime", "the NexusRuntime of this process; the allocator is ours",
        written_by=("scheduler.allocator",),
        read_by=("scheduler.allocator", "scheduler.build", "scheduler.prefill_budget", "scheduler.requests",
                 "scheduler.runtime"),
    ),
    Attached(
        "AttentionBackend", "nexus_runtime", "the same",
        written_by=("attention.backends",),
        read_by=("attention.paged", "attention.plain_torch"),
    ),
    Attached(
        "AttentionBackend", "nexus_capture", "which queries of the running pass enter the query window",
        written_by=("attention.paged",),
        read_by=("attention.paged",),
    ),
    Attached(
        "AttentionBackend, and FlashInfer's wrappers", "nexus_listener", "collects the log-sum-exp they compute",
        written_by=("attention.flashinfer_lse", "attention.paged"),
        read_by=("attention.flashinfer_lse", "attention.paged"),
    ),
    Attached(
        "ForwardBatch", "_nexus_plan", "what every layer of a pass on torch_native reads",
        written_by=("attention.plain_torch",),
        read_by=("attention.plain_torch",),
    ),
    Attached(
        "Req", "nexus_plan", "its RequestPlan, resolved when it was accepted",
        written_by=("scheduler.requests",),
        read_by=("scheduler.admission", "scheduler.passes", "scheduler.prefill_budget", "scheduler.requests"),
    ),
    Attached(
        "Req", "nexus_sequence", "its RunningSequence, from its first pass on",
        written_by=("scheduler.passes",),
        read_by=("scheduler.passes", "scheduler.reports"),
    ),
    Attached(
        "PrefillAdder.memory_budget", "candidate", "the request that is being priced; the budget is ours",
        written_by=("scheduler.admission",),
        read_by=("scheduler.prefill_budget",),
    ),
    Attached(
        "UnifiedTreeNode", "carries_prompt", "whether a prompt runs through the node",
        written_by=("scheduler.tree",),
        read_by=("scheduler.tree",),
    ),
    Attached(
        "UnifiedTreeNode", "resident", "how many KV slots are behind the node, with the ids that were counted",
        written_by=("scheduler.pressure", "scheduler.tree"),
        read_by=("scheduler.tree",),
    ),
)  # fmt: skip
# A row says what and where; the formatter would take twelve lines for it.


class Changed(NamedTuple):
    """A field of SGLang's own that gets another value in a running server.

    Attributes:
        on: the object's class.
        field: its name.
        why: what the value means.
        written_by: the module of this package.
    """

    on: str
    field: str
    why: str
    written_by: str


CHANGED = (
    Changed("Req", "extra_key", "the name of the request's prefix space", "scheduler.requests"),
    Changed("Req", "rid", "hidden while SGLang ends another request whose id begins alike", "scheduler.aborts"),
    Changed("SamplingParams", "max_new_tokens", "an answer that fits the pool without eviction", "scheduler.requests"),
    Changed("SamplingParams", "min_new_tokens", "not above the former", "scheduler.requests"),
    Changed("TokenizedGenerateReqInput", "logprob_start_len", "a refused request asks for none", "scheduler.requests"),
    Changed("TokenizedGenerateReqInput", "routed_experts_start_len", "likewise", "scheduler.requests"),
)
"""Beside the attributes of ``hook_table.LAUNCH_REPLACES`` and ``SERVE_REPLACES``, which are checked at start."""


class Variable(NamedTuple):
    """An environment variable that the package reads or sets.

    Attributes:
        name: of the variable.
        set_by: ``user``, or the module of this package that sets it.
        effect: what it does.
    """

    name: str
    set_by: str
    effect: str


ENVIRONMENT = (
    Variable("NEXUS_SGLANG_DEBUG", "user", "1: every invariant is checked after each pass"),
    Variable("NEXUS_SGLANG_TIMING", "user", "1: decode passes and their evictions are clocked"),
    Variable("NEXUS_SGLANG_KERNELS", "user", "torch or triton: only these implementations of the kernels"),
    Variable("NEXUS_SGLANG_CACHE", "user", "folder of the demo models"),
    Variable("TRITON_INTERPRET", "user", "1: Triton's kernels run in its interpreter, on the CPU"),
    Variable("SGLANG_PLUGINS", "user", "names of the plugins that SGLang loads; all where it is not set"),
    Variable("SGLANG_PLATFORM", "user", "name of the platform plugin that SGLang uses"),
    Variable("SGLANG_USE_CPU_ENGINE", "user", "1: SGLang's own CPU engine in place of our platform"),
    Variable("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "user", "refused with a policy"),
    Variable("SGLANG_RUST_SERVER", "user", "refused with a policy"),
    Variable("NEXUS_SGLANG_CONFIG", "carrier", "the checked config, for the scheduler processes"),
    Variable("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "carrier", "0: the pool is not resized under the page table"),
    Variable("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "scheduler.build", "nexus: our core of the radix tree"),
    Variable("SGLANG_ENABLE_WAR_BARRIER", "scheduler.build", "1: the scheduler's stream waits for evictions"),
    Variable("SGLANG_FORCE_COARSE_WAR_BARRIER", "scheduler.build", "1: for the whole forward stream"),
)
