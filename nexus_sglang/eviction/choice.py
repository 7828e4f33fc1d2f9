"""Which blocks go: one choice, made here for the server and for the offline lab.

In go a policy, what was measured, the blocks, and how many tokens are too many. Out come the blocks to give up. Nothing
here knows rows, slots or requests, and nothing is changed. Where all candidates are whole the host knows how many go
without asking the device. Where some are not, that depends on their order, and the host waits for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from nexus_sglang.device import download, upload
from nexus_sglang.errors import PolicyError
from nexus_sglang.kernels import reservoir
from nexus_sglang.policy.base import Blocks, Evidence, Policy, Weighing


class Choice(NamedTuple):
    """Blocks to give up at one event. Tensors are on the device of the blocks.

    Attributes:
        ordinals: int64 ``[k]``, ascending, which of the N blocks go.
        on_host: the same numbers where the host had to learn them, because some candidates were not whole; else None.
        weighing: the policy's verdict on all N blocks.
        by_recency: bool ``[]``, whether the policy called a candidate NaN, so that the newest were kept instead and its
            verdict is void.
    """

    ordinals: torch.Tensor
    on_host: list[int] | None
    weighing: Weighing
    by_recency: torch.Tensor


def forced_blocks(index: torch.Tensor, block_size: int, head_end: int, recent_start: int) -> torch.Tensor:
    """Which blocks may not go: sinks and protected prefix at the start, the recent window at the end.

    Args:
        index: int64 ``[N]``, block numbers.
        block_size: tokens per block.
        head_end: position in tokens; blocks that begin before it are forced.
        recent_start: position in tokens; blocks that end after it are forced.

    Returns:
        bool ``[N]``.
    """
    return (index < -(-head_end // block_size)) | (index >= recent_start // block_size)


def choose(
    policy: Policy,
    evidence: Evidence,
    blocks: Blocks,
    candidates: int,
    excess: int,
    block_size: int,
    tokens: list[int] | None = None,
) -> Choice:
    """Ask the policy, and take the candidates it ranks last until enough tokens are gone.

    Args:
        policy: weighs the blocks and puts them in order.
        evidence: what it asked to be measured.
        blocks: N blocks, forced ones included.
        candidates: how many of them are not forced, as the host knows it.
        excess: tokens that have to go; whole blocks go, so it may be up to one block more. All candidates go where that
            is not enough, none where it is 0 or less.
        block_size: tokens per block.
        tokens: resident tokens of each of the N blocks, where some candidates are not whole; None where all are.

    Returns:
        The blocks that go.

    Raises:
        PolicyError: the policy raised, or returned what does not fit.
    """
    count = min(candidates, max(0, math.ceil(excess / block_size)))
    weighing, priority = ask(policy, evidence, blocks, candidates - count)
    may_go = blocks.candidates
    by_recency = ((torch.isnan(weighing.weights) | torch.isnan(priority)) & may_go).any()
    places = order_of_keeping(torch.where(by_recency, blocks.index.double(), priority.double()), may_go)
    if tokens is None:
        return Choice(_from_place(places, may_go, candidates - count, count), None, weighing, by_recency)
    on_host = _until_enough(download(places), tokens, candidates, excess)
    return Choice(upload(on_host, places.device), on_host, weighing, by_recency)


def ask(policy: Policy, evidence: Evidence, blocks: Blocks, keep: int) -> tuple[Weighing, torch.Tensor]:
    """What the policy says of the blocks, and in which order it keeps them.

    Args:
        policy: is asked.
        evidence: what it asked to be measured.
        blocks: N blocks.
        keep: how many candidates will stay.

    Returns:
        Its weighing, and float ``[N]``, its priorities.

    Raises:
        PolicyError: it raised, or returned what is no tensor ``[N]`` on the device of the blocks. Not where memory ran
            out: that happens on one rank alone, and ranks must choose alike.
    """
    try:
        weighing = policy.weigh(evidence, blocks)
        priority = policy.prioritise(weighing.weights, blocks, keep)
        state = weighing.state
    except torch.OutOfMemoryError:
        raise
    except Exception as err:  # a user's class may raise anything
        raise PolicyError(f"policy {policy.name!r} failed: {type(err).__name__}: {err}") from err
    _require(policy, "weights", weighing.weights, blocks.index)
    _require(policy, "priorities", priority, blocks.index)
    if state is not None:
        _require(policy, "state", state, blocks.index, policy.state_width)
    return weighing, priority


def order_of_keeping(priority: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Each candidate's place in the order of keeping.

    Args:
        priority: float ``[N]``, larger is kept longer. Those of forced blocks are not looked at and may be NaN.
        candidates: bool ``[N]``.

    Returns:
        int64 ``[N]``: 0 for the one that goes last; of two equals the newer goes later. N for blocks that are forced.
    """
    values = priority.double().nan_to_num(-torch.inf, torch.inf, -torch.inf)[None]
    return reservoir.ranks(values, candidates[None], upload([len(priority)], values.device))[0].long()


def fewest(order: torch.Tensor, tokens: torch.Tensor, excess: int) -> torch.Tensor:
    """The first blocks of an order that hold enough tokens together. Waits for the device.

    Args:
        order: int64 ``[k]``, blocks, the first to go first.
        tokens: int64 ``[N]``, tokens of each block.
        excess: how many tokens are to go, at least 1.

    Returns:
        int64 ``[<= k]``, in the order given; all of them where they hold too few.
    """
    return order[: int(torch.searchsorted(tokens[order].cumsum(0), excess)) + 1]


def _from_place(places: torch.Tensor, candidates: torch.Tensor, keep: int, count: int) -> torch.Tensor:
    """int64 ``[count]``, ascending: the candidates at place ``keep`` or after it, of which there are ``count``."""
    blocks = torch.arange(len(places), device=places.device)
    return torch.where(candidates & (places >= keep), blocks, len(places)).sort().values[:count]


def _until_enough(places: torch.Tensor, tokens: list[int], candidates: int, excess: int) -> list[int]:
    """Ascending: the candidates in the last places that hold ``excess`` tokens together. All of it on the host."""
    if excess <= 0:
        return []
    last_first = torch.argsort(places, descending=True, stable=True)[len(places) - candidates :]
    return fewest(last_first, torch.tensor(tokens, device="cpu"), excess).sort().values.tolist()


def _require(policy: Policy, what: str, answer: object, index: torch.Tensor, *width: int) -> None:
    """Raise PolicyError unless there is one number, or one row of this width, per block, beside the blocks."""
    wanted = (len(index), *width)
    if not isinstance(answer, torch.Tensor):
        raise PolicyError(f"policy {policy.name!r} returned {what} that are no tensor but {type(answer).__name__}")
    if tuple(answer.shape) != wanted:
        raise PolicyError(
            f"policy {policy.name!r} returned {what} of shape {tuple(answer.shape)}, for {len(index)} blocks: "
            f"{wanted} is asked for"
        )
    if answer.device != index.device:
        raise PolicyError(f"policy {policy.name!r} returned {what} on {answer.device}, for blocks on {index.device}")
