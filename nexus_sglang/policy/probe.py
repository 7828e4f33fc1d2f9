"""Try a policy on made-up evidence, so that a broken one is refused before the model loads."""

from __future__ import annotations

import torch

from nexus_sglang.errors import ConfigError

from .base import Blocks, Evidence, Policy, Weighing

ASKED_BY = {
    "attention": "needs_attention",
    "value_norm": "needs_values",
    "key_distinctiveness": "needs_keys",
    "expected": "needs_expected",
    "value_distinctiveness": "needs_distinct_values",
}
"""Which attribute of a policy asks for which evidence."""


def probe(policy: Policy, blocks: int = 12, window: int = 4) -> None:
    """Let a policy weigh and order made-up blocks twice, the second time with the state of the first.

    Args:
        policy: gets the evidence it asks for and no other, as when serving.
        blocks: how many blocks, N; the first and the last are forced.
        window: how many queries, W.

    Raises:
        ConfigError: naming the policy and what it did wrong.
    """
    noise = torch.Generator().manual_seed(0)
    made_up = {name: torch.rand(blocks, generator=noise) for name in ASKED_BY}
    made_up["attention"] = torch.rand(window, blocks, generator=noise)
    evidence = Evidence(**{name: made_up[name] for name, need in ASKED_BY.items() if getattr(policy, need)})
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
                f"--kv-policy {policy.name!r} fails on a trial event: {type(err).__name__}: {err}{_hint(err, evidence)}"
            ) from err
        _check(policy, weighing, priority, blocks)
        if weighing.state is not None:
            state = weighing.state.float()


def _hint(err: Exception, evidence: Evidence) -> str:
    """How to ask for evidence, where the error looks as if the policy had read some that it did not ask for."""
    missing = [f"{name} ({ASKED_BY[name]} = True)" for name in ASKED_BY if getattr(evidence, name) is None]
    return f". Evidence it does not ask for is None: {', '.join(missing)}" if "None" in str(err) and missing else ""


def _check(policy: Policy, weighing: Weighing, priority: torch.Tensor, blocks: int) -> None:
    """Raise ConfigError for a wrong shape or NaN."""
    wanted: dict[str, tuple[object, tuple[int, ...]]] = {
        "weights": (weighing.weights, (blocks,)),
        "priorities": (priority, (blocks,)),
    }
    if weighing.state is not None:
        wanted["state"] = (weighing.state, (blocks, policy.state_width))
    for what, (answer, shape) in wanted.items():
        if not isinstance(answer, torch.Tensor) or tuple(answer.shape) != shape:
            seen = tuple(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
            raise ConfigError(f"--kv-policy {policy.name!r} returns {what} of shape {seen} where {shape} is asked for")
        if what != "state" and bool(torch.isnan(answer).any()):
            raise ConfigError(f"--kv-policy {policy.name!r} returns {what} with NaN")
