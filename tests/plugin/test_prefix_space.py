"""Who shares a prefix with whom: decided by what requests ask for, never by how a client spells its key."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus_sglang.sglang_plugin.scheduler import requests
from nexus_sglang.sglang_plugin.scheduler.prefix_space import PrefixSpace, space_of

from .test_runtime import Request, made
from .test_tree import Forest

SERVER_BUDGET = 0.2
TOKENS = list(range(10))


class Asked(NamedTuple):
    """What decides the prefix space of a request."""

    key: str | None = None
    salt: str | None = None
    adapter: str | None = None
    budget: float | None = None
    evict: bool = True

    def meant(self) -> Asked:
        """The same request asked for in the shortest way."""
        return self._replace(budget=None if self.budget == SERVER_BUDGET else self.budget)


server = cache(made)


def space(asked: Asked) -> dict:
    """``extra_key`` and ``cache_salt`` of the request, as SGLang makes it and the hook leaves it."""
    params = {}
    if asked.budget is not None:
        params["kv_budget"] = asked.budget
    if not asked.evict:
        params["kv_evict"] = False
    glued = (asked.key or "") + asked.adapter if asked.adapter else asked.key
    request = Request(100, params, extra_key=glued)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(runtime=server()), max_req_input_len=5000)
    received = SimpleNamespace(
        logprob_start_len=-1,
        return_logprob=False,
        routed_experts_start_len=0,
        extra_key=asked.key,
        lora_id=asked.adapter,
        kv_hints=None,
    )
    requests.accept_request(request, scheduler, received)
    assert request.error is None
    return {"extra_key": request.extra_key, "cache_salt": asked.salt}


FORGED = [
    "kv_evict=false",
    "x|kv_evict=false",
    "kv_budget=0.5",
    "[false, null, null, null]",
    "[true, 0.5, null, null]",
    '[true, null, "yz", "x"]',
    '"',
    'x", "y',
    "null",
    "elastic_ep_size=8",
]
KEYS = st.none() | st.sampled_from(["x", "xy", "z", *FORGED]) | st.text('xyz|[]",\\\ud800', min_size=1, max_size=6)
FIELDS = {
    "key": KEYS,
    "salt": st.none() | st.sampled_from(["x", "one"]),
    "adapter": st.none() | st.sampled_from(["z", "yz", "kv_evict=false"]),
    "wish": st.just((None, False))
    | st.sampled_from([None, 0.2, 0.5, 1, 1.0, 0.3333333, 0.33333334, 300, 300.0]).map(lambda b: (b, True)),
}


@st.composite
def asked(draw) -> Asked:
    budget, evict = draw(FIELDS["wish"])
    return Asked(draw(FIELDS["key"]), draw(FIELDS["salt"]), draw(FIELDS["adapter"]), budget, evict)


def shared(one: Asked, other: Asked) -> int:
    """Tokens that the second request finds of the first one's prompt."""
    forest = Forest()
    forest.insert(TOKENS, prompt=len(TOKENS), **space(one))
    return len(forest.match(TOKENS, **space(other))[1])


@settings(max_examples=60, deadline=None)
@given(st.lists(asked(), min_size=20, max_size=40))
def test_what_differs_never_shares_and_what_is_equal_does(requests_):
    """The same prompt again and again into one tree: it is found whole by who asked the same, by others not at all."""
    forest = Forest()
    seen = set()
    for one in requests_:
        names = space(one)
        found = len(forest.match(TOKENS, **names)[1])
        assert found == (len(TOKENS) if one.meant() in seen else 0)
        forest.insert(TOKENS, prompt=len(TOKENS), known=found, **names)
        seen.add(one.meant())


@pytest.mark.parametrize("one, other", [
    (Asked(evict=False), Asked("kv_evict=false")),
    (Asked(budget=0.5), Asked("kv_budget=0.5")),
    (Asked("x", evict=False), Asked("x|kv_evict=false")),
    (Asked(evict=False), Asked("[false, null, null, null]")),
    (Asked(budget=0.3333333), Asked(budget=0.33333334)),
    (Asked("x", adapter="yz"), Asked("xy", adapter="z")),
    (Asked(adapter="z"), Asked("z")),
])  # fmt: skip
def test_a_client_cannot_write_another_space(one, other):
    assert shared(one, other) == shared(other, one) == 0
    assert shared(one, one) == shared(other, other) == len(TOKENS)


@pytest.mark.parametrize("asked, thinned", [
    (Asked(), True),
    (Asked("x|kv_evict=false"), True),
    (Asked("[false, null, null, null]"), True),
    (Asked(adapter="kv_evict=false"), True),
    (Asked(evict=False), False),
    (Asked("tenant", "salt", "adapter", evict=False), False),
])  # fmt: skip
def test_pressure_spares_who_asked_not_to_be_evicted_from(asked, thinned):
    forest = Forest()
    forest.insert(TOKENS, prompt=len(TOKENS), **space(asked))
    assert len(forest.core.cold_nodes(shared=False)) == thinned


@given(st.builds(PrefixSpace, KEYS, KEYS, st.none() | st.floats(1e-4, 1) | st.integers(2, 10**9), st.booleans()))
def test_a_name_is_read_back_with_or_without_what_sglang_appends(original):
    assert space_of(original.name()) == original
    assert space_of(f"{original.name() or 'elastic'}|elastic_ep_size=8") == original


def test_a_refused_request_stays_in_the_space_of_its_client():
    """It computes one token, which must not land under a name that its client made up."""
    request = Request(100, {"kv_budgets": 1}, extra_key="[false, null, null, null]")
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(runtime=made()), max_req_input_len=5000)
    received = SimpleNamespace(extra_key=request.extra_key, lora_id=None, kv_hints=None)
    requests.accept_request(request, scheduler, received)
    assert "kv_budgets" in request.error
    assert space_of(request.extra_key) == PrefixSpace("[false, null, null, null]")
