"""Two processes over gloo, each with half of the heads: the same blocks go on both, and they are those one process with
all heads would evict. No SGLang here."""

from __future__ import annotations

import hashlib
import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nexus_sglang.config import NexusConfig
from nexus_sglang.errors import RankMismatchError
from nexus_sglang.eviction.evictor import Evictor
from nexus_sglang.eviction.request_plan import RequestPlan
from nexus_sglang.eviction.sequence import RunningSequence
from nexus_sglang.evidence.query_window import LayerShape, QueryWindow
from nexus_sglang.evidence.score_group import ALONE, ProcessScores
from nexus_sglang.kv_slots.block_ledger import BlockLedger
from nexus_sglang.kv_slots.compact_rows import CompactRows
from nexus_sglang.kv_slots.kv_buffers import KVBuffers
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.policy import make_policy

WORLD = 2
LAYERS = 3
HEADS = 8
DIM = 16
PROMPT = 400
END = 470
CASES = {
    "nexus, max": ("nexus", {}),
    "nexus, max alone": ("nexus", {"value_share": 0}),
    "nexus, mean": ("nexus", {"head_reduction": "mean"}),
    "nexus, top": ("nexus", {"head_reduction": "top"}),
    "nexus, qk": ("nexus", {"head_reduction": "qk"}),
    "nexus-paper": ("nexus-paper", {}),
    "snapkv": ("snapkv", {}),
    "h2o": ("h2o", {}),
    "expected-attention": ("expected-attention", {}),
    "keydiff": ("keydiff", {}),
    "vase": ("vase", {}),
    "defensive": ("defensive", {}),
    "keyformer": ("keyformer", {}),
}
EXACT = "nexus, max alone"
"""A maximum over heads and nothing else: the same bits as in one process. Means are summed in another order."""
KEY_HEADS = {"": 4, ", replicated": 1}
"""Key heads of the model: two per rank, or one that both ranks hold."""


class Shard:
    """An evictor over the heads of one rank (or of all). Tokens, page table and seed are those of every rank."""

    def __init__(self, case: str, key_heads: int, rank: int | None, group=ALONE):
        name, fields = CASES[case]
        noise = torch.Generator().manual_seed(11)
        keys, values = (torch.randn(LAYERS, END, key_heads, DIM, generator=noise) * 3 for _ in range(2))
        queries = torch.randn(LAYERS, END, HEADS, DIM, generator=noise)
        if rank is not None:
            mine = HEADS // WORLD
            queries = queries[:, :, rank * mine : (rank + 1) * mine]
            if key_heads >= WORLD:
                some = key_heads // WORLD
                keys, values = (x[:, :, rank * some : (rank + 1) * some] for x in (keys, values))
        self.keys = keys
        self.values = values
        self.queries = queries
        self.config = NexusConfig(
            name, block_size=8, window=6, sink_tokens=8, recent_tokens=16, min_tokens=32, debug=True
        )
        policy = make_policy(name, fields)
        self.table = PageTable(1024, 512)
        self.req_to_token = torch.zeros((3, END), dtype=torch.int32)
        self.rows = CompactRows(self.req_to_token, self.table)
        self.ledger = BlockLedger(1024, policy.state_width)
        shape = LayerShape(queries.shape[2], DIM, DIM**-0.5)
        self.window = QueryWindow(dict.fromkeys(range(LAYERS), shape), 3, 6, torch.float32, "cpu")
        self.pools = [torch.zeros(LAYERS, 513, *x.shape[2:]) for x in (keys, values)]
        buffers = KVBuffers(*(pool.__getitem__ for pool in self.pools))
        self.evictor = Evictor(
            self.config, policy, 400, self.table, self.rows, self.ledger, self.window, buffers, group
        )

    def grow(self, length: int) -> None:
        before = self.rows.length[1]
        self.req_to_token[1, before:length] = self.table.allocate(length - before).int()
        self.rows.extend_to(1, length)
        slots = self.table.translate(self.req_to_token[1, before:length])
        plan = self.window.plan_extend([1], [before], [length - before], "cpu")
        for layer in range(LAYERS):
            self.pools[0][layer][slots] = self.keys[layer, before:length]
            self.pools[1][layer][slots] = self.values[layer, before:length]
            self.window.capture(layer, self.queries[layer, before:length], plan)

    def run(self) -> dict:
        """Events of a prompt and its decode, tokens that stay, and a hash of every weight and state of a block."""
        seq = RunningSequence("r", 1, END, RequestPlan(120), lambda: [7 * i % 101 for i in range(self.rows.length[1])])
        self.window.begin(1, 0)
        self.grow(PROMPT)
        self.evictor.after_prefill(seq, 0, 0)
        for length in range(PROMPT + 1, END):
            self.grow(length)
            self.evictor.after_decode(seq, lambda: 0)
        self.rows.check_integrity()
        self.table.check_integrity()
        bits = self.ledger.weight.numpy().tobytes() + self.ledger.state.numpy().tobytes()
        return {
            "events": [tuple(event) for event in seq.events],
            "kept": self.rows.positions[1, : self.rows.resident[1]].tolist(),
            "bits": hashlib.sha256(bits).hexdigest(),
        }


class Unjoined(ProcessScores):
    """Ranks that compare what they did and do not join their scores: the fault that debug mode is there to find."""

    def gather(self, part):
        return part[None].expand(self.world, *part.shape)

    def largest(self, part):
        return part


def rank_main(rank: int, port: int, folder: str) -> None:
    """One rank: every case with scores joined, and the fault."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    group = ProcessScores(dist.group.WORLD)
    results = {}
    for suffix, key_heads in KEY_HEADS.items():
        for case in CASES:
            results[case + suffix] = Shard(case, key_heads, rank, group).run()
    faults = {
        "fault": lambda: Shard("snapkv", 4, rank, Unjoined(dist.group.WORLD)).run(),
        "digest": lambda: group.require_same("the seed", f"seed {rank}"),
    }
    for name, broken in faults.items():
        try:
            broken()
        except RankMismatchError as err:
            results[name] = str(err)
    group.require_same("the seed", "7")
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(port, str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("suffix", KEY_HEADS, ids=["split", "replicated"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_keep_what_one_process_would(ranks, case, suffix):
    first, second = (results[case + suffix] for results in ranks)
    assert first == second, "kept sets, events, and every weight and state bit for bit"
    whole = Shard(case, KEY_HEADS[suffix], None).run()
    assert len(whole["events"]) > 5
    assert (first["events"], first["kept"]) == (whole["events"], whole["kept"])
    if case == EXACT:
        assert first["bits"] == whole["bits"]


@pytest.mark.parametrize("case", CASES)
def test_left_to_themselves_they_would_not(case):
    """So that the test above can fail."""
    alone = [Shard(case, 4, rank).run()["events"] for rank in range(WORLD)]
    assert alone[0] != alone[1]
    assert Shard(case, 4, None).run()["events"] not in alone


def test_debug_mode_finds_ranks_that_drift(ranks):
    for results in ranks:
        assert results["fault"] == (
            "what was evicted from row 1 at token 400 differs between tensor-parallel ranks: rank 0 against rank 1"
        )
        assert results["digest"] == "the seed differs between tensor-parallel ranks: rank 0 against rank 1"


def test_alone_nothing_is_exchanged():
    part = torch.rand(3, 4)
    assert torch.equal(ALONE.gather(part)[0], part)
    for joined in (ALONE.largest(part), ALONE.total(part), ALONE.average(part)):
        assert torch.equal(joined, part)
    ALONE.require_same("anything", "x")
