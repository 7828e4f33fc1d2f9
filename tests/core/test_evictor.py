"""The evictor on a small pool with random keys: budget, sinks, shared prefixes, reproducibility."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nexus_sglang.errors import IntegrityError
from nexus_sglang.eviction.request_plan import RequestPlan
from nexus_sglang.eviction.sequence import RunningSequence, block_identities
from nexus_sglang.evidence import head_reduction
from nexus_sglang.kv_slots.block_ledger import BlockLedger
from nexus_sglang.policy import POLICIES, Policy, Weighing
from tests.support.bench import BLOCK, SINK, bench


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_budget_sinks_and_recent_window_hold(policy):
    b = bench(policy)
    seq = b.sequence(1, 400, budget=80)
    b.evictor.after_prefill(seq, protected=0, room=0)
    assert b.rows.resident[1] == 80
    assert 0 in b.blocks(1), "the sink block stays"
    assert b.blocks(1)[-2:] == [48, 49], "the recent window stays"
    assert b.table.counts().physical_free == 1024 - 80
    assert b.rows.length[1] == 400, "the logical length stays"
    b.table.check_integrity()
    b.rows.check_integrity()


def test_twenty_decode_evictions_move_the_kept_set():
    """At the budget, one block goes for each block gained, and not always the same."""
    b = bench()
    seq = b.sequence(1, 100, budget=80)
    b.evictor.after_prefill(seq, 0, 0)
    seen = set()
    for length in range(101, 300):
        b.grow(1, length)
        b.evictor.after_decode(seq, lambda: 0)
        assert b.rows.resident[1] < 80 + BLOCK
        seen |= set(b.blocks(1))
    assert b.evictor.counters.eviction_events >= 20
    assert 0 in b.blocks(1) and max(seen) == 37
    assert any(100 <= block * BLOCK < 250 for event in seq.events for block in event.blocks), "decoded blocks go too"


def test_chunks_between_which_the_prompt_is_evicted_from():
    """The budget holds after each chunk, and sinks are those of the sequence."""
    b = bench()
    seq = b.sequence(1, 100, budget=80)
    for end in (100, 200, 300, 400):
        if end > 100:
            b.grow(1, end)
        seq.prefill_left = 400 - end
        b.evictor.after_prefill(seq, 0, room=250 if end < 400 else 0)  # the last chunk but one would fit whole
        assert b.rows.resident[1] <= 80 and 0 in b.blocks(1)
    assert b.evictor.counters.chunk_evictions == 3


def test_chunks_with_room_wait_for_the_question():
    b = bench()
    seq = b.sequence(1, 100, budget=80)
    seq.prefill_left = 300
    b.evictor.after_prefill(seq, 0, room=300)
    assert b.rows.resident[1] == 100 and not seq.events


def test_shared_prefix_is_left_alone():
    b = bench()
    seq = b.sequence(1, 400, budget=80)
    b.evictor.after_prefill(seq, protected=60, room=0)
    assert b.blocks(1)[:8] == list(range(8)), "blocks touching the first 60 tokens stay"
    assert b.rows.resident[1] == 64 + 24, "60 shared tokens count as 64, beside them the private floor of 24"
    more = b.sequence(2, 400, budget=80)
    b.evictor.after_prefill(more, protected=200, room=0)
    assert b.blocks(2)[:25] == list(range(25)) and b.rows.resident[2] == 200 + 24, "the private floor"
    assert b.evictor.counters.budget_held_by_shared == 2
    for length in range(401, 450):
        b.grow(2, length)
        b.evictor.after_decode(more, lambda: 200)
        assert b.rows.resident[2] < 200 + 24 + BLOCK


def test_protection_never_holds_more_than_the_pool_can_grant():
    """Two long prompts that start alike: what the queue awaits must not keep the first from being evicted from."""
    b = bench()
    b.evictor.largest_budget = 200
    seq = b.sequence(1, 400, budget=80)
    other = b.sequence(2, 300, budget=80)
    b.req_to_token[2, :300] = b.req_to_token[1, :300]  # the other request holds the same prefix
    b.table.free(torch.arange(401, 701))
    b.rows.rebuild(2)
    seq.prefill_left = 5000
    b.evictor.after_prefill(seq, protected=400, room=100)
    assert b.rows.resident[1] <= 200 and b.evictor.counters.protection_clipped == 1
    assert b.rows.resident[2] < 300 and other.rid == "r2"
    b.table.check_integrity()
    b.rows.check_integrity()


def test_pins_and_no_eviction():
    b = bench()
    pinned = b.sequence(1, 300, budget=100, pinned=40)
    exempt = b.sequence(2, 300, budget=None)
    b.evictor.after_prefill(pinned, 0, 0)
    b.evictor.after_prefill(exempt, 0, 0)
    assert b.blocks(1)[:5] == [0, 1, 2, 3, 4] and b.rows.resident[1] == 100
    assert b.rows.resident[2] == 300


@pytest.mark.parametrize("policy", ["nexus", "nexus-paper", "random"])
def test_choice_depends_on_content_and_seed_not_on_the_row(policy):
    def kept(row, seed):
        b = bench(policy)
        b.evictor.config = replace(b.config, seed=seed)
        seq = b.sequence(row, 400, budget=120)
        b.evictor.after_prefill(seq, 0, 0)
        return b.blocks(row)

    assert kept(1, 3) == kept(4, 3)
    assert any(kept(1, 3) != kept(1, seed) for seed in range(4, 12))


class Failing(Policy):
    """Falls ill at some events; weighs by content at the others."""

    name = "failing"
    source = "test"
    needs_attention = False
    state_width = 1

    def weigh(self, evidence, blocks):
        weights = (blocks.identity % 101).abs().float()
        ill = self.illness(blocks)
        if ill == "raises":
            raise ValueError("it is ill")
        if ill == "shape":
            return Weighing(weights[1:], weights[:, None])
        if ill == "state":
            return Weighing(weights, weights[:, None].expand(-1, 2))
        if ill == "nan":
            weights = torch.where(blocks.index == int(blocks.index[blocks.candidates][0]), torch.nan, weights)
        return Weighing(weights, weights[:, None])

    @staticmethod
    def illness(blocks) -> str:
        """What goes wrong, by the length of the sequence."""
        return {416: "nan", 432: "raises", 448: "shape", 464: "state"}.get(blocks.event, "")


def records(b) -> tuple[list, list]:
    """What the ledger holds of the tokens of row 1."""
    virtual = b.rows.virtual(1)
    return b.ledger.weight[virtual].nan_to_num(-1).tolist(), b.ledger.state[virtual].nan_to_num(-1).tolist()


def test_a_policy_that_fails_at_an_event_keeps_the_newest_there(caplog):
    b = bench()
    b.evictor.policy = Failing()
    b.ledger = b.evictor.ledger = BlockLedger(4096, 1)
    seq = b.sequence(1, 400, budget=80)
    b.evictor.after_prefill(seq, 0, 0)
    for length in range(401, 481):
        b.grow(1, length)
        before = b.blocks(1)
        ledger = dict(zip(b.rows.virtual(1).tolist(), zip(*records(b), strict=True), strict=True))
        b.evictor.after_decode(seq, lambda: 0)
        b.table.check_integrity(), b.rows.check_integrity()
        assert b.rows.resident[1] < 80 + BLOCK
        if length in (416, 432, 448, 464):
            assert seq.events[-1].length == length and seq.events[-1].blocks == [before[1]], "the oldest candidate"
            after = list(zip(*records(b), strict=True))
            assert after == [ledger[name] for name in b.rows.virtual(1).tolist()], "what it said leaves no mark"
    assert seq.evictions == 11 and all(event.tokens == BLOCK for event in seq.events[1:])
    assert b.evictor.counters.policy_errors == 3
    b.evictor.catch_up()
    assert b.evictor.counters.events_by_recency == 4
    assert caplog.text.count("policy_errors counts") == 1, "one of three is logged"
    assert 'raise ValueError("it is ill")' in caplog.text, "with its traceback"
    assert caplog.text.count("'failing' said NaN") == 1


def test_nan_is_counted_at_events_that_wait_and_logged_once(caplog):
    class Nan(Policy):
        name = "nan"
        source = "test"
        needs_attention = False

        def weigh(self, evidence, blocks):
            return Weighing(torch.full((len(blocks.index),), torch.nan))

    b = bench()
    b.evictor.policy = Nan()
    for row in (1, 2):
        b.evictor.after_prefill(b.sequence(row, 304, budget=80), 0, 0)
        assert b.rows.resident[row] == 80 and b.blocks(row) == [0, *range(29, 38)]
        assert b.evictor.counters.events_by_recency == row and b.evictor.counters.policy_errors == 0
    assert caplog.text.count("'nan' said NaN") == 1


def test_ledger_follows_the_slots():
    b = bench()
    seq = b.sequence(1, 400, budget=80)
    b.evictor.after_prefill(seq, 0, 0)
    known = ~torch.isnan(b.ledger.weight[b.rows.virtual(1)])
    assert known[SINK : 400 - 16].all() and not known[:SINK].any() and not known[400 - 16 :].any(), "forced: not judged"
    b.ledger.forget(b.rows.virtual(1)[100:103])
    assert (~torch.isnan(b.ledger.weight[b.rows.virtual(1)])).sum() == known.sum() - 3


def test_the_record_of_a_request_goes_on_after_a_retraction():
    b = bench()
    seq = b.sequence(1, 300, budget=80)
    seq.peak = 300
    b.evictor.after_prefill(seq, protected=0, room=0)
    again = b.sequence(2, 200, budget=80)
    again.carry_over(seq)
    assert (again.evictions, again.peak, again.over_budget) == (1, 300, True)
    b.evictor.after_prefill(again, protected=0, room=0)
    assert again.evictions == len(again.events) == 2 and again.tokens_evicted == sum(e.tokens for e in again.events)
    assert b.evictor.counters.sequences_over_budget == 1
    within = b.sequence(3, 80 + b.config.block_size - 1, budget=80)
    within.carry_over(again)
    b.evictor.after_prefill(within, protected=0, room=0)
    assert within.evictions == 2, "as in decode, a block goes once a whole one has been gained"


def test_block_identity_is_content_and_place():
    tokens = list(range(64))
    first = block_identities(tokens, 8)
    assert len(set(first.tolist())) == 8
    assert (first == block_identities(tokens + [1, 2], 8)).all(), "a block whose tokens are not all there has none"
    assert (first[3:] == block_identities(tokens, 8, first=3)).all() and len(block_identities(tokens, 8, first=8)) == 0
    other = tokens.copy()
    other[9] += 1
    changed = block_identities(other, 8) != first
    assert changed.tolist() == [False, True, False, False, False, False, False, False]
    repeated = block_identities([5] * 64, 8)
    assert len(set(repeated.tolist())) == 8, "the same text elsewhere draws anew"


def test_a_sequence_hashes_each_block_once():
    tokens = list(range(20))
    seq = RunningSequence("r", 1, 600, RequestPlan(80), token_ids=lambda: tokens)

    def whole() -> list[int]:
        return block_identities(tokens, 8).tolist()

    assert seq.identities(3, 8, "cpu").tolist() == [*whole(), 0]
    kept = seq._identities
    assert kept is not None and seq.identities(4, 8, "cpu").tolist() == [*whole(), 0, 0] and seq._identities is kept
    tokens += range(20, 30)
    assert seq.identities(4, 8, "cpu").tolist() == [*whole(), 0] and len(whole()) == 3
    assert seq.identities(2, 8, "cpu").tolist() == whole()[:2]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_warm_up_changes_nothing(policy, caplog):
    plain = bench(policy)
    warmed = bench(policy)
    warmed.evictor.warm_up()
    assert warmed.evictor.counters == plain.evictor.counters and not caplog.records
    events = []
    for b in (plain, warmed):
        seq = b.sequence(1, 300, budget=80)
        b.evictor.after_prefill(seq, protected=30, room=0)
        b.evictor.warm_up() if b is warmed else None
        for length in range(301, 320):
            b.grow(1, length)
            b.evictor.after_decode(seq, lambda: 30)
        b.table.check_integrity()
        b.rows.check_integrity()
        events.append(
            (seq.events, b.rows.slots.tolist(), b.table.free_physical.tolist(), b.ledger.weight.nan_to_num(-1).tolist())
        )
    assert events[0] == events[1] and len(events[0][0]) > 1


def test_a_policy_that_cannot_digest_padding_does_not_stop_the_server(caplog):
    class Picky(Policy):
        name = "picky"

        def weigh(self, evidence, blocks):
            raise ValueError("no evidence")

    b = bench()
    b.evictor.policy = Picky()
    b.evictor.warm_up()
    assert "warm-up" in caplog.text and "no evidence" in caplog.text


def lse_given(monkeypatch) -> list[bool]:
    """Whether each call of the attention kernel from now on was given a log-sum-exp."""
    given = []
    attend = head_reduction.block_attention_rows

    def noted(*args, **options):
        given.append(args[11] is not None)
        return attend(*args, **options)

    monkeypatch.setattr(head_reduction, "block_attention_rows", noted)
    return given


@pytest.mark.parametrize("policy", ["nexus", "h2o", "morphkv"])
def test_a_backend_that_reports_the_log_sum_exp_changes_no_choice(policy, monkeypatch):
    given = lse_given(monkeypatch)
    events = []
    for with_lse in (False, True):
        b = bench(policy, layers=2, with_lse=with_lse)
        seq = b.sequence(1, 300, budget=80, prefill_left=100)
        given.clear()
        b.evictor.after_prefill(seq, protected=0, room=0)
        b.grow(1, 400)
        seq.prefill_left = 0
        b.evictor.after_prefill(seq, protected=0, room=0)
        for length in range(401, 450):
            b.grow(1, length)
            b.evictor.after_decode(seq, lambda: 0)
        assert given == [with_lse] * seq.evictions and seq.evictions == 8
        events.append(seq.events)
    assert events[0] == events[1]


def test_a_log_sum_exp_over_other_keys_is_not_used(monkeypatch):
    """The row was read anew, or evicted from, since the oldest query of the window."""
    given = lse_given(monkeypatch)
    b = bench(with_lse=True)
    seq = b.sequence(1, 300, budget=80)
    b.rows.rebuild(1)  # as after every chunk, when the tree takes the tokens: which may be others' now
    b.evictor.after_prefill(seq, protected=0, room=0)
    b.grow(1, 300 + BLOCK)
    b.evictor.enforce(seq, 0, 0)
    b.grow(1, 300 + 2 * BLOCK)
    b.rows.rebuild_all()
    b.grow(1, 303 + 2 * BLOCK)  # a window of 4: its oldest query saw the row before
    b.evictor.enforce(seq, 0, 0)
    b.rows.rebuild_all()
    b.grow(1, 307 + 2 * BLOCK)
    b.evictor.enforce(seq, 0, 0)
    assert given == [False, True, False, True] and seq.evictions == 4
    b.rows.free(1)
    b.window.begin(1, 0)
    b.evictor.after_prefill(b.sequence(1, 200, budget=80), 0, 0)
    assert given[-1], "the row's next owner starts anew"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda lse: lse * math.log(2),
        lambda lse: lse.flip(1),
        lambda lse: lse + torch.tensor([3, 0]),
        lambda lse: lse * math.nan,
    ],
)
def test_a_wrong_log_sum_exp_is_found_in_debug_mode(wrong):
    """Another base, heads in another order, one head alone, no number."""
    b = bench(with_lse=True, layers=2)
    b.config = b.evictor.config = replace(b.config, debug=True)
    b.evictor.after_prefill(b.sequence(1, 300, budget=80), 0, 0)
    right = b.log_sum_exp
    b.log_sum_exp = lambda *args: wrong(right(*args))
    with pytest.raises(IntegrityError, match="row 2: the log-sum-exp that the attention backend reported is off by"):
        b.evictor.after_prefill(b.sequence(2, 300, budget=80), 0, 0)
