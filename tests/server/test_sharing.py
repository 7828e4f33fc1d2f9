"""Shared prefixes, memory pressure and long prompts on a small pool, every invariant checked."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.support.server import healthy, nexus_of, output_ids, text_ids

pytestmark = pytest.mark.server


def test_eight_agents_share_a_system_prompt(ours, tokenizer):
    ours.flush()
    system = text_ids(tokenizer, 1500, seed=200)
    agents = [system + [1000 + i] + text_ids(tokenizer, 500, seed=201 + i) for i in range(8)]
    trace = {"custom": {"kv_trace": True}}
    together = ours.generate(agents, 40, **trace)
    for answer in together:
        held = nexus_of(answer)
        assert held["events"] and min(b for e in held["trace"] for b in e["blocks"]) * 32 >= 1500, "shared part whole"
    assert sorted(a["meta_info"]["cached_tokens"] for a in together)[1:] == [1500] * 7
    floor = max(nexus_of(together[0])["budget"] // 4, 64 + 32)
    private = 8 * (floor + 32 + 40)
    assert ours.info()["resident"] <= 1500 + private, "the shared part holds its slots once"

    # Alone, an agent has nobody to share with: it pins what the others protected for it.
    for agent, answer in zip(agents, together, strict=True):
        ours.flush()
        solo = ours.generate(agent, 40, custom={"kv_trace": True, "kv_pin_tokens": 1500})
        assert nexus_of(solo)["trace"] == nexus_of(answer)["trace"]
        assert output_ids(solo) == output_ids(answer)
    healthy(ours)


def test_a_neighbour_over_budget_changes_nothing(ours, tokenizer):
    """Two running requests share a prefix; the long answer of one evicts, the other's output stays its own."""
    ours.flush()
    prefix = text_ids(tokenizer, 600, seed=220)
    quiet = prefix + [1200] + text_ids(tokenizer, 20, 221)
    loud = prefix + [1300] + text_ids(tokenizer, 300, 222)
    whole = {"kv_pin_tokens": len(prefix)}
    alone = output_ids(ours.generate(quiet, 60, custom=whole))
    ours.flush()
    with ThreadPoolExecutor(2) as threads:
        noise = threads.submit(ours.generate, loud, 160, custom=whole)
        time.sleep(1.0)
        beside = threads.submit(ours.generate, quiet, 60, custom=whole)
        assert output_ids(beside.result()) == alone
        assert nexus_of(noise.result())["events"] > 0


def test_salts_do_not_touch_each_other(ours, tokenizer):
    """The same prompt under two cache salts: no token and no KV slot in common."""
    ours.flush()
    prompt = text_ids(tokenizer, 800, seed=230)
    one = ours.generate(prompt, 4, cache_salt="one")
    before = ours.info()["resident"]
    other = ours.generate(prompt, 120, cache_salt="two")
    assert other["meta_info"]["cached_tokens"] == 0
    assert ours.info()["resident"] - before == nexus_of(other)["resident"]
    again = ours.generate(prompt, 4, cache_salt="one")
    assert again["meta_info"]["cached_tokens"] == 799
    assert abs(nexus_of(again)["resident"] - nexus_of(one)["resident"]) <= 1


@pytest.mark.parametrize(
    "custom, forged", [({"kv_evict": False}, "kv_evict=false"), ({"kv_budget": 0.5}, "kv_budget=0.5")]
)
def test_a_clients_key_opens_no_other_space(ours, tokenizer, custom, forged):
    """Not even the name that the space has in the tree."""
    ours.flush()
    prompt = text_ids(tokenizer, 1000, seed=231)
    owner = ours.generate(prompt, 8, custom=custom)
    for key in (forged, "[false, null, null, null]", "[true, 0.5, null, null]"):
        other = ours.generate(prompt + text_ids(tokenizer, 40, seed=232), 8, extra_key=key)
        assert other["meta_info"]["cached_tokens"] == 0
    again = ours.generate(prompt, 8, custom=custom)
    assert again["meta_info"]["cached_tokens"] == 999
    if custom == {"kv_evict": False}:
        assert output_ids(again) == output_ids(owner)
        assert nexus_of(again)["evicted"] == 0
        assert nexus_of(again)["resident"] == nexus_of(again)["logical"]


def test_pins_and_clipped_budgets_are_said(ours, tokenizer):
    prompt = text_ids(tokenizer, 900, seed=240)
    held = nexus_of(ours.generate(prompt, 4, custom={"kv_pin_tokens": 300, "kv_trace": True, "kv_budget": 450}))
    assert min(b for e in held["trace"] for b in e["blocks"]) * 32 >= 300
    clipped = nexus_of(ours.generate(prompt, 4, custom={"kv_budget": 999_999}))
    assert clipped["clipped"] == ["kv_budget"] and clipped["budget"] == ours.info()["largest_budget"]


def test_a_request_that_must_not_be_evicted_has_to_fit(tight, tokenizer):
    prompt = text_ids(tokenizer, 1500, seed=265)
    held = nexus_of(tight.generate(prompt, 24, custom={"kv_evict": False}))
    assert held["evicted"] == 0 and held["resident"] == 1523
    body = {"input_ids": text_ids(tokenizer, 2500, 266), "sampling_params": {"custom_params": {"kv_evict": False}}}
    answer = requests.post(tight.url + "/generate", json=body, timeout=60)
    assert answer.status_code == 400 and "2500 tokens" in answer.text and "Drop kv_evict" in answer.text
    healthy(tight)


def test_cancel_storm_leaves_strangers_alone(ours, tokenizer):
    """Shared prefix, cancels at 15 and 19 ms, retries, an unrelated request meanwhile; 15 of 15."""
    ours.flush()
    stranger = text_ids(tokenizer, 120, seed=250)
    solo = output_ids(ours.generate(stranger, 12))
    shared = text_ids(tokenizer, 700, seed=251)

    def cancelled(seconds: float, tail: int) -> None:
        body = {
            "input_ids": shared + [tail],
            "sampling_params": {"max_new_tokens": 64, "temperature": 0},
            "stream": True,
        }
        try:
            requests.post(ours.url + "/generate", json=body, timeout=seconds, stream=True).close()
        except requests.RequestException:
            pass

    for round_ in range(15):
        with ThreadPoolExecutor(6) as threads:
            for i in range(2):
                threads.submit(cancelled, 0.015, 2000 + i)
                threads.submit(cancelled, 0.019, 2000 + i)
            unrelated = threads.submit(ours.generate, stranger, 12)
            assert output_ids(unrelated.result()) == solo, f"round {round_}"
    healthy(ours)


def test_a_prompt_three_times_the_pool(tight, tokenizer):
    """It is answered; the budget holds after every chunk; the sinks are those of the sequence, not of each chunk."""
    answer = tight.generate(text_ids(tokenizer, 6000, seed=260), 24, custom={"kv_trace": True})
    held = nexus_of(answer)
    assert len(output_ids(answer)) == 24 and answer["meta_info"]["prompt_tokens"] == 6000
    assert held["peak_resident"] <= held["budget"] + 256 <= 2048
    assert tight.info()["chunk_evictions"] >= 10
    assert all(0 not in e["blocks"] for e in held["trace"])
    healthy(tight)


def test_long_prompts_that_start_alike_do_not_wait_for_each_other(tight, tokenizer):
    """What the queue awaits is protected, but never beyond what the pool can hold: nothing hangs or runs out."""
    common = text_ids(tokenizer, 3000, seed=262)
    long = [common + [50 + i] + text_ids(tokenizer, 2000, seed=263 + i) for i in range(2)]
    assert all(len(output_ids(a)) == 8 for a in tight.generate(long, 8))
    healthy(tight)
    nearly = [common[:1500] + [60] + common[1500:1599], common[:1500] + [70] + common[1500:1999]]
    assert all(len(output_ids(a)) == 100 for a in tight.generate(nearly, 100))
    same = [common[:2000], common[:2000]]
    assert all(len(output_ids(a)) == 100 for a in tight.generate(same, 100))
    healthy(tight)


def test_beams_are_refused(tight):
    body = {"text": "Hello", "sampling_params": {"beam_width": 4, "max_new_tokens": 8}}
    answer = requests.post(tight.url + "/generate", json=body, timeout=60)
    assert answer.status_code == 400 and "beam_width 1" in answer.text


def test_abort_in_the_middle_of_a_chunked_prefill(tight, tokenizer):
    """A client hangs up while its prompt is read; the next request finds nothing locked and nothing lost."""
    prompt = text_ids(tokenizer, 3000, seed=261)
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, "temperature": 0}, "stream": True}
    for seconds in (0.15, 0.4, 0.8):
        try:
            requests.post(tight.url + "/generate", json=body, timeout=seconds, stream=True).close()
        except requests.RequestException:
            pass
        answer = tight.generate(prompt, 8)
        assert len(output_ids(answer)) == 8
    healthy(tight)


def test_twelve_sub_agents_on_a_quarter_of_their_size(tight, tokenizer):
    """Contexts that together are four times the pool: all finish, nothing stays locked."""
    rng = random.Random(3)
    prompts = [text_ids(tokenizer, rng.randint(550, 800), seed=270 + i) for i in range(12)]
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda ids: tight.generate(ids, 32), prompts))
    assert all(len(output_ids(a)) == 32 for a in answers)
    info = tight.info()
    assert info["protected"] == 0 and info["resident"] <= 2048
    healthy(tight)


def test_two_sessions_stay_warm(tight, tokenizer):
    """Two sessions of 1,500 tokens alternate on 2,048 slots; no turn re-prefills its prefix."""
    tight.flush()
    before = tight.info()
    sessions = [text_ids(tokenizer, 1500, seed=290 + i) for i in range(2)]
    for turn in range(6):
        for i, ids in enumerate(sessions):
            answer = tight.generate(ids, 16)
            if turn:
                assert answer["meta_info"]["cached_tokens"] >= len(ids) - 45
            sessions[i] = ids + output_ids(answer) + text_ids(tokenizer, 30, seed=300 + 10 * turn + i)
    after = tight.info()
    for count in ("retractions", "tokens_dropped_with_leaves"):
        assert after[count] == before[count]
    healthy(tight)


def test_pressure_thins_before_it_drops(tight, tokenizer):
    """Cold sessions are thinned to fit a newcomer and still found whole by name."""
    tight.flush()
    sessions = [text_ids(tokenizer, 700, seed=310 + i) for i in range(4)]
    before = tight.info()["tokens_thinned"]
    half = {"custom": {"kv_budget": 0.9}}
    for ids in sessions:
        tight.generate(ids, 4, **half)
    assert tight.info()["tokens_thinned"] > before
    again = tight.generate(sessions[0] + [7, 8, 9], 4, **half)
    assert again["meta_info"]["cached_tokens"] >= 700, "thinner, not gone"
    healthy(tight)
