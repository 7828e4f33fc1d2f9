"""The page table against a dictionary model, over random histories."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus_sglang.errors import IntegrityError
from nexus_sglang.kv_slots.compact_rows import CompactRows
from nexus_sglang.kv_slots.page_table import PageTable

OPERATIONS = st.lists(st.tuples(st.sampled_from(["alloc", "evict", "free"]), st.integers(0, 2**30)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(physical=st.integers(1, 40), extra=st.integers(0, 80), operations=OPERATIONS)
def test_random_histories_keep_the_books(physical, extra, operations):
    table = PageTable(physical + extra, physical)
    held: dict[int, bool] = {}  # virtual id -> resident
    for what, number in operations:
        if what == "alloc":
            want = number % 12 + 1
            room = min(physical + extra - len(held), physical - sum(held.values()))
            ids = table.allocate(want)
            assert (ids is not None) == (want <= room)
            if ids is not None:
                assert not held.keys() & set(ids.tolist())
                held.update((i, True) for i in ids.tolist())
        elif held:
            some = [i for i in sorted(held) if (i * 2654435761 + number) % 3 == 0]
            ids = torch.tensor(some, dtype=torch.int64)
            resident = sum(held[i] for i in some)
            if what == "evict":
                assert table.evict(ids) == resident
                held.update((i, False) for i in some)
            else:
                assert table.free(ids) == resident
                for i in some:
                    del held[i]
        counts = table.check_integrity()
        assert counts.virtual_held == len(held) and counts.physical_mapped == sum(held.values())
    for virtual, resident in held.items():
        assert bool(table.v2p[virtual] > 0) == resident


def test_evicted_slots_are_reused_at_once():
    """Evicting n tokens of a running request frees exactly n slots, and they are handed out again."""
    table = PageTable(64, 16)
    ids = table.allocate(16)
    assert table.allocate(1) is None
    assert table.evict(ids[3:8]) == 5
    assert table.free_slots == table.counts().physical_free == 5
    assert table.free_ids == table.counts().virtual_free == 48
    assert table.mapped(ids).tolist() == [True] * 3 + [False] * 5 + [True] * 8
    again = table.allocate(5)
    assert set(table.v2p[again].tolist()) <= set(range(1, 17))
    assert table.evict(ids[3:8]) == 0, "evicting twice frees nothing"
    table.check_integrity()


def test_adopt_fills_holes_and_frees_the_rest():
    table = PageTable(32, 16)
    kept = table.allocate(8)
    duplicate = table.allocate(8)
    table.evict(kept[:3])
    table.evict(duplicate[:1])
    assert table.adopt(kept, duplicate) == 2
    assert table.free(duplicate) == 5
    assert table.resident(kept) == 7
    table.check_integrity()


@pytest.mark.parametrize(
    "damage, word",
    [
        (lambda t: t.v2p.__setitem__(3, 5), "mapped"),
        (lambda t: setattr(t, "free_physical", torch.cat((t.free_physical[1:], t.free_physical[-1:]))), "twice"),
        (lambda t: setattr(t, "free_virtual", torch.cat((t.free_virtual[1:], t.free_virtual[-1:]))), "twice"),
    ],
)
def test_damage_is_found(damage, word):
    table = PageTable(16, 8)
    damage(table)
    with pytest.raises(IntegrityError, match=word):
        table.check_integrity()


def test_virtual_smaller_than_physical_is_refused():
    with pytest.raises(ValueError, match="smaller than physical"):
        PageTable(4, 8)


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3), seed=st.integers(0, 2**20))
def test_compact_rows_follow_the_table(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    table = PageTable(256, 128)
    req_to_token = torch.zeros((4, 64), dtype=torch.int32)
    rows = CompactRows(req_to_token, table)
    for row, n in enumerate(lengths, start=1):
        req_to_token[row, :n] = table.allocate(n).int()
        rows.extend_to(row, n)
    for _ in range(20):
        row = int(torch.randint(1, len(lengths) + 1, (1,), generator=generator))
        length = rows.length[row]
        if length < 60 and torch.rand(1, generator=generator) < 0.6:
            grow = int(torch.randint(1, 3, (1,), generator=generator))
            req_to_token[row, length : length + grow] = table.allocate(grow).int()
            rows.extend_to(row, length + grow)
        else:
            gone = torch.rand(length, generator=generator) < 0.3
            table.evict(rows.virtual(row)[gone])
            rows.rebuild(row)
        rows.check_integrity()
        positions = rows.positions[row, : rows.resident[row]]
        assert torch.equal(positions, positions.sort().values)
        assert torch.equal(table.v2p[rows.virtual(row)[positions.long()]].int(), rows.slots[row, : rows.resident[row]])
    rows.free(1)
    assert rows.resident[1] == rows.length[1] == 0


def test_stale_row_is_found():
    table = PageTable(16, 8)
    req_to_token = torch.zeros((2, 8), dtype=torch.int32)
    rows = CompactRows(req_to_token, table)
    ids = table.allocate(4)
    req_to_token[1, :4] = ids.int()
    rows.extend_to(1, 4)
    table.evict(ids[:1])
    with pytest.raises(IntegrityError, match="row 1: 4 compact entries, but 3 of 4"):
        rows.check_integrity()
