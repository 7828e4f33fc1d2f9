"""Try a policy on made-up evidence, so that a broken one is refused before the model loads."""

from __future__ import annotations

import torch

from nexus_sglang.errors import ConfigError

from .base import Blocks, Evidence, Policy, Weighing


def probe(policy: Policy, blocks: int = 12, window: int = 4) -> None:
    """Weigh and order ``blocks`` blocks twice, the second time with the state of the first.

    Raises:
        ConfigError: naming the policy and what it did wrong.
    """
    noise = torch.Generator().manual_seed(0)
    fields = {name: torch.rand(blocks, generator=noise) for name in Evidence._fields}
    evidence = Evidence(**{**fields, "attention": torch.rand(window, blocks, generator=noise)})
    forced = torch.zeros(blocks, dtype=torch.bool)
    forced[0] = forced[-1] = True
    state = torch.full((blocks, policy.state_width), torch.nan)
    for event in (1000, 1032):
        view = Blocks(torch.arange(blocks), forced, torch.arange(blocks) + 7, state, event, 0)
        try:
            weighing = policy.weigh(evidence, view)
            priority = policy.prioritise(weighing.weights, view, keep=5)
        except Exception as err:  # a user's class may raise anything; all of it is one message to the user
            raise ConfigError(
                f"--kv-policy {policy.name!r} fails on a trial event: {type(err).__name__}: {err}"
            ) from err
        _check(policy, weighing, priority, blocks)
        if weighing.state is not None:
            state = weighing.state.float()


def _check(policy: Policy, weighing: Weighing, priority: torch.Tensor, blocks: int) -> None:
    wanted = {"weights": (weighing.weights, (blocks,)), "priorities": (priority, (blocks,))}
    if weighing.state is not None:
        wanted["state"] = (weighing.state, (blocks, policy.state_width))
    for what, (tensor, shape) in wanted.items():
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
            seen = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ConfigError(f"--kv-policy {policy.name!r} returns {what} of shape {seen} where {shape} is asked for")
        if what != "state" and bool(torch.isnan(tensor).any()):
            raise ConfigError(f"--kv-policy {policy.name!r} returns {what} with NaN")
