"""Tensor parallelism: each rank is a scheduler process with its own page table and its share of the heads.

Ranks see the same requests in the same order, so all they must exchange are block scores (``evidence.score_group``).
"""

from __future__ import annotations

import dataclasses

import torch

from nexus_sglang import SGLANG_VERSION, __version__
from nexus_sglang.errors import RankMismatchError, SelfCheckError
from nexus_sglang.evidence.score_group import ALONE, ProcessScores, ScoreGroup

from .runtime import NexusRuntime


def score_group() -> ScoreGroup:
    """The ranks among which SGLang has split the attention heads of this process's requests."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    ranks = get_attn_tp_group()
    return ProcessScores(ranks.device_group, ranks.cpu_group) if ranks.world_size > 1 else ALONE


def check_ranks(runtime: NexusRuntime) -> None:
    """Everything a choice of blocks depends on, beside scores and requests, is the same on all ranks.

    Args:
        runtime: this rank's.

    Raises:
        SelfCheckError: on every rank, naming what differs and the ranks.
    """
    group = runtime.evictor.group
    table = runtime.table
    window = runtime.window
    facts = {
        "the configuration": runtime.config.to_json(),
        "the policy": f"{type(runtime.policy).__qualname__} {dataclasses.asdict(runtime.policy)}",
        "the seed": str(runtime.config.seed),
        "the budget": f"{runtime.config.budget} up to {runtime.largest_budget}",
        "the size of the pool": f"{table.virtual_size} over {table.physical_size}",
        "the room for chunks": str(runtime.chunk_room),
        "the size of the rows": str(tuple(runtime.rows.slots.shape)),
        "the attention layers": str(list(window.layers.items())),
        "the software": f"nexus-sglang {__version__}, sglang {SGLANG_VERSION}, torch {torch.__version__}",
    }
    problems = []
    for what, text in facts.items():
        try:
            group.require_same(what, text)
        except RankMismatchError as err:
            problems.append(str(err))
    if problems:
        listing = "\n  - ".join(problems)
        raise SelfCheckError(
            f"nexus-sglang refuses to serve:\n  - {listing}\n"
            "Recipe: start every node with the same arguments and versions."
        )
