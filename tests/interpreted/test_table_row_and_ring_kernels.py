"""Walk weights, compact rows, page-table operations and the query ring equal their references."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nexus_sglang.kernels import check_cases as cases
from nexus_sglang.kernels import page_table
from nexus_sglang.kernels.compact_rows import compact_rows
from nexus_sglang.kernels.query_ring import keep_queries
from nexus_sglang.kernels.walk_weights import walk_weights

SEED = st.integers(0, 10_000)


@settings(max_examples=15)
@given(
    seed=SEED, batch=st.integers(1, 4), window=st.integers(1, 20), blocks=st.integers(1, 700), steps=st.integers(0, 24)
)
@example(seed=1, batch=2, window=16, blocks=4096, steps=3)
def test_walk(**shape):
    outcome = cases.walk("cpu", **shape)
    assert outcome.ok, outcome


@pytest.mark.parametrize("run", [walk_weights.reference, walk_weights.kernel])
def test_rows_without_mass_weigh_by_recency_alone(run):
    one = torch.ones(1, dtype=torch.long)
    weights = run(torch.zeros(1, 2, 5), 2 * one, 4 * one, torch.ones(1, 5, dtype=torch.bool), 3, 0.5, 1e-3)
    assert torch.allclose(weights, torch.tensor([[0, 1, 2, 3, 0]]).double() * 1e-3 / 3, rtol=1e-15, atol=0)


@settings(max_examples=30)
@given(seed=SEED, rows=st.integers(1, 5), width=st.integers(0, 3000), hinted=st.booleans())
@example(seed=2, rows=2, width=131_072, hinted=True)
def test_compact(**shape):
    outcome = cases.compact("cpu", **shape)
    assert outcome.ok, outcome


def test_rows_of_a_wider_table_compact_in_place():
    v2p = torch.tensor([0, 5, 0, 7, 9])
    virtual = torch.tensor([[1, 2, 3, 99], [4, 1, 2, 99]])[:, :3]
    slots = torch.zeros(2, 3, dtype=torch.int32)
    positions = torch.zeros(2, 3, dtype=torch.int32)
    assert compact_rows.kernel(virtual, torch.tensor([3, 3]), v2p, slots, positions).tolist() == [2, 2]
    assert slots.tolist() == [[5, 7, 0], [9, 5, 0]] and positions.tolist() == [[0, 2, 0], [0, 1, 0]]


def test_strided_outputs_are_refused():
    wide = torch.zeros(2, 6, dtype=torch.int32)
    with pytest.raises(ValueError, match="must be contiguous"):
        compact_rows.kernel(wide, torch.tensor([1, 1]), torch.zeros(2).long(), wide[:, :3], wide[:, :3])


@settings(max_examples=30)
@given(seed=SEED, virtual_size=st.integers(1, 5000), ids=st.integers(0, 5000), short=st.integers(0, 20))
@example(seed=2, virtual_size=200_000, ids=100_000, short=0)
def test_table(**shape):
    outcome = cases.table("cpu", **shape)
    assert outcome.ok, outcome


def test_translate_keeps_the_shape():
    v2p = torch.arange(100) * 3
    virtual = torch.randint(0, 100, (4, 5, 6), dtype=torch.int32)
    assert torch.equal(page_table.translate.kernel(v2p, virtual), v2p[virtual.long()])


@settings(max_examples=30)
@given(
    seed=SEED,
    tokens=st.integers(1, 30),
    kept=st.integers(0, 30),
    heads=st.integers(1, 9),
    dim=st.sampled_from([64, 80, 128]),
    window=st.integers(1, 17),
    dtype=st.sampled_from(sorted(cases.DTYPES)),
    given_lse=st.booleans(),
)
@example(seed=1, tokens=3, kept=0, heads=40, dim=128, window=16, dtype="bf16", given_lse=True)
def test_queries_into_rings(kept, tokens, **shape):
    outcome = cases.ring("cpu", tokens=tokens, kept=min(kept, tokens), **shape)
    assert outcome.ok, outcome


@pytest.mark.parametrize("run", [keep_queries.reference, keep_queries.kernel])
@pytest.mark.parametrize(
    "change, named",
    [
        ({"queries": torch.zeros(2, 3, 8)}, "do not fit a ring"),
        ({"queries": torch.zeros(2, 4, 8).half()}, "float16"),
        ({"lse": torch.zeros(2, 4)}, "both or neither"),
        ({"ring": torch.zeros(5, 6, 8, 4).mT}, "must be contiguous"),
        ({"lse": torch.zeros(2, 3), "lse_ring": torch.zeros(5, 6, 4)}, r"lse \(2, 3\)"),
    ],
)
def test_what_does_not_fit_is_named(run, change, named):
    at = torch.tensor([1, 2])
    arguments = {"ring": torch.zeros(5, 6, 4, 8), "queries": torch.zeros(2, 4, 8), "rows": at, "places": at, **change}
    with pytest.raises(ValueError, match=named):
        run(**arguments)
