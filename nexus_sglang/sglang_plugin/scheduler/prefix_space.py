"""The part of the radix tree that a request reads and writes, as the one string SGLang has room for."""

from __future__ import annotations

import json
from typing import NamedTuple


class PrefixSpace(NamedTuple):
    """What two requests must have in common to share a prefix. The cache salt is a field of SGLang's own beside it.

    Attributes:
        client_key: the ``extra_key`` that the client sent.
        adapter: SGLang's id of the LoRA adapter.
        budget: the budget the request asked for (share or tokens), where it is not the server's.
        evict: False for requests that are not evicted from. Memory pressure drops their nodes whole or not at all.
    """

    client_key: str | None = None
    adapter: str | None = None
    budget: float | None = None
    evict: bool = True

    def name(self) -> str | None:
        """The ``extra_key`` of this space; None for the space of requests that ask for nothing.

        Different spaces have different names: JSON quotes what clients write, and prints every float so that reading
        it gives the same float. No client's key reaches the tree in another way, so none can spell another's name.
        """
        if self == PrefixSpace():
            return None
        return json.dumps([self.evict, self.budget, self.adapter, self.client_key], ensure_ascii=False)


def space_of(name: str | None) -> PrefixSpace:
    """The space that a node of the tree belongs to.

    Args:
        name: the ``extra_key`` of its key, as :meth:`PrefixSpace.name` made it. With elastic expert parallelism SGLang
            appends the number of experts' ranks, or makes a key of it alone; neither says what may be thinned.
    """
    if name is None or not name.startswith("["):
        return PrefixSpace()
    (evict, budget, adapter, client_key), _ = json.JSONDecoder().raw_decode(name)
    return PrefixSpace(client_key, adapter, budget, evict)
