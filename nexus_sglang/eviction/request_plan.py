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
        budget_clipped: whether a larger budget was asked for than the pool can grant.
        pin_clipped: whether a longer pin was asked for than the pool can grant.
        own_budget: the share or count it asked for, where that is not the server's; None where it is. It shares
            prefixes with requests that asked for the same only: what one budget has left is of no use to a larger.
    """

    budget: int | None
    pinned: int = 0
    trace: bool = False
    budget_clipped: bool = False
    pin_clipped: bool = False
    own_budget: float | None = None

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
        """
        if not evict:
            return cls(None, config.whole_blocks(pin), trace)
        asked = config.budget_tokens(prompt_tokens, budget)
        granted = min(asked, largest_budget)
        # What is pinned has to fit the pool beside the tokens that a sequence always keeps of its own. In whole blocks:
        # a pin that ended inside a block would lose that block when protection is clipped.
        room = max(0, largest_budget - config.private_floor(granted))
        pinned = min(config.whole_blocks(pin), room // config.block_size * config.block_size)
        return cls(
            granted,
            pinned,
            trace,
            budget_clipped=granted < asked,
            pin_clipped=pinned < pin,
            own_budget=budget.value if budget is not None and budget != config.budget else None,
        )
