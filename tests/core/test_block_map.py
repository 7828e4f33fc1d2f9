"""What the host believes of a row's blocks, against the row: prefills, events, holes and changing protection."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nexus_sglang.errors import IntegrityError
from nexus_sglang.eviction.block_map import BlockMap
from nexus_sglang.kv_slots.page_table import PageTable
from nexus_sglang.sglang_plugin.scheduler import passes
from tests.support.bench import BLOCK, SINK, Bench, bench


def blocks_of(b: Bench, row: int) -> dict[int, int]:
    """Block number -> resident tokens, from the page table."""
    positions = torch.nonzero(b.table.v2p[b.rows.virtual(row)] > 0).squeeze(1)
    index, tokens = torch.unique_consecutive(positions // BLOCK, return_counts=True)
    return dict(zip(index.tolist(), tokens.tolist(), strict=True))


def check(b: Bench, seq) -> None:
    block_map = seq.block_map
    real = blocks_of(b, seq.row)
    assert block_map.resident == sum(real.values()) == b.rows.resident[seq.row] and block_map.blocks == len(real)
    known = dict(zip(block_map.index, block_map.tokens, strict=True))
    assert known.items() <= real.items() and block_map.index == sorted(known)
    unknown = real.keys() - known.keys()
    assert len(unknown) == block_map.unknown and all(real[block] == BLOCK for block in unknown)
    if unknown:
        after = [block for block in known if block * BLOCK >= block_map.head_end]
        assert min(unknown) * BLOCK >= block_map.head_end and max(unknown) < min(after, default=10**9)


def punch(b: Bench, row: int, positions: list[int]) -> None:
    """Others evicted these tokens of the row."""
    b.table.evict(b.rows.virtual(row)[torch.tensor(sorted(positions), dtype=torch.int64)])
    b.rows.rebuild(row)


def heal(b: Bench, row: int, tokens: int) -> None:
    """Somebody computed the row's evicted tokens again: the first of them are resident once more."""
    holes = torch.nonzero(b.table.v2p[b.rows.virtual(row)] == 0).squeeze(1)[:tokens]
    donor = b.table.allocate(len(holes))
    assert b.table.adopt(b.rows.virtual(row)[holes], donor) == len(holes)
    b.table.free(donor)
    b.rows.rebuild(row)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_host_is_right_whatever_happens(data):
    b = bench(data.draw(st.sampled_from(["nexus", "random", "streaming-llm"])))
    b.evictor.largest_budget = data.draw(st.sampled_from([900, 150]))
    length = data.draw(st.integers(90, 300))
    seq = b.sequence(1, length, budget=data.draw(st.integers(48, 90)), pinned=data.draw(st.sampled_from([0, 0, 13])))
    protected = 0
    for _ in range(data.draw(st.integers(3, 12))):
        what = data.draw(st.sampled_from(["prefill", "decode", "decode", "decode", "holes", "heal", "share"]))
        if what == "prefill":
            length = min(590, length + data.draw(st.integers(2, 60)))
            b.grow(1, length)
            b.evictor.after_prefill(seq, protected, room=0)
        elif what == "holes":
            there = [int(p) for p in b.rows.positions[1, : b.rows.resident[1]] if SINK <= p < length - 1]
            punch(b, 1, data.draw(st.lists(st.sampled_from(there), max_size=9, unique=True)))
        elif what == "heal":
            heal(b, 1, data.draw(st.integers(1, 40)))
        elif what == "share":
            protected = data.draw(st.sampled_from([0, 10, 16, 40, 100]))
        else:
            for _ in range(data.draw(st.integers(1, 3 * BLOCK))):
                length = min(590, length + 1)
                b.grow(1, length) if b.rows.length[1] < length else None
                b.evictor.after_decode(seq, lambda shared=protected: shared)
        b.table.check_integrity()
        b.rows.check_integrity()
        if seq.block_map is not None and seq.block_map.generation == b.rows.generations[1]:
            seq.block_map.grow(length)
            check(b, seq)
    assert seq.evictions == len(seq.events) and seq.tokens_evicted == sum(event.tokens for event in seq.events)


def test_blocks_with_holes_go_by_their_tokens():
    """The cut counts tokens, and the host learns which blocks went."""
    b = bench("streaming-llm")
    seq = b.sequence(1, 160, budget=80)
    punch(b, 1, [17, 18, 19, 20, 21, 22, 33])
    b.evictor.after_prefill(seq, 0, 0)
    # Blocks 1, 2 (2 tokens left), 3, .. go, oldest first, until 160 - 7 - 80 = 73 are gone.
    assert [tuple(event) for event in seq.events] == [(160, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 73)]
    assert b.rows.resident[1] == 80 and not seq.block_map.unknown
    check(b, seq)


def test_a_hole_in_a_block_that_stays_costs_nothing():
    b = bench("streaming-llm")
    seq = b.sequence(1, 160, budget=80)
    punch(b, 1, [150])  # in the recent window
    b.evictor.after_prefill(seq, 0, 0)
    assert seq.block_map.unknown and seq.events[0].tokens == 80
    check(b, seq)


def test_a_row_that_changed_without_growing_is_read_again():
    """As many tokens come back as go, so the row's length says nothing."""
    b = bench("streaming-llm")
    seq = b.sequence(1, 160, budget=80)
    b.evictor.after_prefill(seq, 0, 0)
    resident = b.rows.resident[1]
    heal(b, 1, 4)
    punch(b, 1, [int(p) for p in b.rows.positions[1, :resident] if 8 <= p < 130 and p >= 80][:4])
    assert b.rows.resident[1] == resident
    for length in range(161, 220):
        b.grow(1, length)
        b.evictor.after_decode(seq, lambda: 0)
        b.table.check_integrity()
        b.rows.check_integrity()


def test_a_hole_in_the_recent_window_grows_old():
    b = bench("streaming-llm")
    seq = b.sequence(1, 160, budget=80)
    punch(b, 1, [150])
    b.evictor.after_prefill(seq, 0, 0)
    assert seq.block_map.unknown, "the hole was not among the candidates"
    for length in range(161, 260):
        b.grow(1, length)
        b.evictor.after_decode(seq, lambda: 0)
        b.table.check_integrity()
        b.rows.check_integrity()
        seq.block_map.grow(length)
        check(b, seq)


def test_a_filled_hole_is_seen_by_every_row_that_shares_it():
    b = bench("streaming-llm")
    one = b.sequence(1, 160, budget=80)
    two = b.sequence(2, 40, budget=80)
    b.table.free(b.rows.virtual(2))
    b.req_to_token[2, :160] = b.req_to_token[1, :160].clone()
    b.rows.length[2] = 160
    b.rows.rebuild(2)
    runtime = SimpleNamespace(rows=b.rows, tree=SimpleNamespace(take_healed=lambda: True))
    b.evictor.after_prefill(one, 0, 0)
    b.rows.rebuild_all()
    b.evictor.after_prefill(two, 0, 0)
    holes = torch.nonzero(b.table.v2p[b.rows.virtual(1)] == 0).squeeze(1)[:12]
    donor = b.table.allocate(12)
    assert b.table.adopt(b.rows.virtual(1)[holes], donor) == 12
    b.table.free(donor)
    passes.reread(runtime, 1)
    b.rows.check_integrity()
    for length in range(161, 190):
        b.grow(2, length)
        b.evictor.after_decode(two, lambda: 160)
        b.rows.check_integrity()
        b.table.check_integrity()


def test_a_wrong_count_is_found_and_hands_out_no_slot_outside_of_the_pool():
    table = PageTable(20, 10)
    virtual = table.allocate(6)
    table.evict(virtual[:4], mapped=5)
    assert int(table.free_physical.max()) <= 10
    with pytest.raises(IntegrityError, match="1 evictions freed another number"):
        table.check_integrity()
    b = bench("random")
    b.table.evict(b.table.allocate(4)[:2], mapped=1)
    with pytest.raises(IntegrityError, match="1 evictions freed another number"):
        b.evictor.after_prefill(b.sequence(1, 160, budget=80), 0, 0)


def test_debug_mode_notices_what_the_host_got_wrong():
    block_map = BlockMap(torch.arange(40), 4, 40, 0)
    block_map.remove_some(8, 32, 2)

    def gone(*blocks: int) -> torch.Tensor:
        return torch.tensor([p for p in range(40) if p // 4 not in blocks])

    block_map.check_integrity(gone(2, 5))
    for wrong in (gone(2), gone(1, 2), gone(2, 5, 6), torch.cat((gone(2, 5)[:-1], torch.tensor([41])))):
        with pytest.raises(IntegrityError, match="4 unknown blocks of 4 from position 8"):
            block_map.check_integrity(wrong)


def test_block_map_answers():
    block_map = BlockMap(torch.tensor([0, 1, 2, 3, 8, 9, 10, 11, 12, 14, 16]), 4, 17, 0)
    assert (block_map.index, block_map.tokens, block_map.blocks, block_map.resident) == (
        [0, 2, 3, 4],
        [4, 4, 2, 1],
        4,
        11,
    )
    block_map.grow(21)
    assert (block_map.index, block_map.tokens) == ([0, 2, 3, 4, 5], [4, 4, 2, 4, 1])
    assert [block_map.resident_before(p) for p in (0, 4, 8, 12, 16)] == [0, 4, 4, 8, 10]
    assert [block_map.head_end_within(n) for n in (3, 4, 8, 9, 10, 99)] == [0, 8, 12, 12, 16, 21]
    assert block_map.candidates(4, 12) == (1, True) and block_map.candidates(4, 16) == (2, False)
    assert block_map.candidates(16, 12) == (0, True)
    block_map.remove_some(4, 12, 1)
    assert block_map.knows(4) and block_map.knows(99), "no block is left that could be unknown"
    block_map = BlockMap(torch.arange(40), 4, 40, 0)
    block_map.remove_some(8, 32, 2)
    assert (block_map.index, block_map.unknown, block_map.blocks, block_map.resident) == ([0, 1, 8, 9], 4, 8, 32)
    assert block_map.knows(8) and not block_map.knows(12)
    assert block_map.candidates(4, 36) == (6, True), "a shorter head gives up a known block"
