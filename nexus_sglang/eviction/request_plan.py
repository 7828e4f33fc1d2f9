"""What one request may keep: resolved once, when the request is accepted, and read by everybody after that."""

from __future__ import annotations

from typing import NamedTuple

from nexus_sglang.config import NexusConfig, TokenAmount


class RequestPlan(NamedTuple):
    """A request's budget and protection, after every clip.

    Attributes:
        budget: tokens it may keep resident; None for a request that is not evicted from and keeps all it can grow to.
        pinned: leading tokens that are never evicted for this request's budget, in whole blocks.
        trace: whether the answer lists every eviction event.
        clipped: of ``kv_budget`` and ``kv_pin_tokens``, those that were asked for larger than the pool can grant, or
            longer than the prompt.
        own_budget: the share or count it asked for, where that is not the server's; None where it is. It shares
            prefixes with requests that asked for the same only: what one budget has left is of no use to a larger.
        ignored: hints of the request that nobody here carries out, for its report.
    """

    budget: int | None
    pinned: int = 0
    trace: bool = False
    clipped: tuple[str, ...] = ()
    own_budget: float | None = None
    ignored: tuple[dict[str, str], ...] = ()

    @property
    def evict(self) -> bool:
        """Whether this request may be evicted from."""
        return self.budget is not None

    @classmethod
    def resolve(
        cls,
        config: NexusConfig,
        largest_budget: int,
        prompt_tokens: int,
        *,
        budget: TokenAmount | None = None,
        evict: bool = True,
        pin: int = 0,
        trace: bool = False,
        ignored: tuple[dict[str, str], ...] = (),
    ) -> RequestPlan:
        """The plan of a request, from its hints and what the pool can grant.

        Args:
            config: the server's settings.
            largest_budget: largest budget that any request can be granted on this pool, in tokens.
            prompt_tokens: length of the prompt.
            budget: a budget of its own; None for the server's.
            evict: False keeps the whole sequence resident.
            pin: leading tokens that are not to be evicted.
            trace: list every eviction event.
            ignored: hints that nobody here carries out.
        """
        if not evict:
            return cls(None, trace=trace, ignored=ignored)
        asked = config.budget_tokens(prompt_tokens, budget)
        granted = min(asked, largest_budget)
        # What is pinned has to fit the pool beside the tokens that a sequence always keeps of its own. In whole blocks:
        # a pin that ended inside a block would lose that block when protection is clipped.
        room = max(0, largest_budget - config.private_floor(granted))
        pinned = min(config.whole_blocks(min(pin, prompt_tokens)), room // config.block_size * config.block_size)
        return cls(
            granted,
            pinned,
            trace,
            clipped=("kv_budget",) * (granted < asked) + ("kv_pin_tokens",) * (pinned < pin),
            own_budget=budget.value if budget is not None and budget != config.budget else None,
            ignored=ignored,
        )
