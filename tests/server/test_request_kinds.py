"""Requests beside the plain one: several answers, a grammar, logprobs, a pause that retracts, wrong hints, probes."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.support.server import nexus_of, output_ids, text_ids

pytestmark = pytest.mark.server


def post(server, ids, sampling: dict, **options):
    body = {"input_ids": ids, "sampling_params": sampling, **options}
    answer = requests.post(server.url + "/generate", json=body, timeout=600)
    assert answer.ok, answer.text
    return answer.json()


def test_several_answers_to_one_prompt_share_it_and_leave_nothing(ours, tokenizer):
    ours.flush()
    empty = ours.info()["physical_free"]
    answers = post(ours, text_ids(tokenizer, 800, seed=201), {"n": 3, "temperature": 0.9, "max_new_tokens": 40})
    assert len(answers) == 3 and all(nexus_of(a)["evicted"] > 500 for a in answers)
    assert ours.info()["logical"] < 800 + 3 * 64, "one prompt in the cache, not three"
    ours.flush()
    assert ours.info()["physical_free"] == empty


def test_a_grammar_holds_over_an_evicted_prompt(ours, tokenizer):
    sampling = {"temperature": 0, "max_new_tokens": 30, "regex": r"The year is (19|20)[0-9]{2}\."}
    answer = post(ours, text_ids(tokenizer, 700, seed=202), sampling)
    assert re.fullmatch(sampling["regex"], answer["text"]) and nexus_of(answer)["evicted"] > 400


def test_logprobs_after_an_evicted_prompt(ours, tokenizer):
    answer = post(
        ours, text_ids(tokenizer, 700, seed=203), {"temperature": 0, "max_new_tokens": 4}, return_logprob=True
    )
    assert len(answer["meta_info"]["output_token_logprobs"]) == 4 and nexus_of(answer)["evicted"] > 400


def test_a_pause_that_retracts_is_counted_and_the_report_goes_on(ours, tokenizer):
    ours.flush()
    ids = text_ids(tokenizer, 900, seed=204)
    before = ours.info()
    whole = ours.generate(ids, 72)
    ours.flush()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(ours.generate, ids, 72, custom={"kv_trace": True})
        deadline = time.monotonic() + 120
        while ours.info()["sequences"] < before["sequences"] + 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)  # some tokens into the answer
        for path, body in (("pause_generation", {"mode": "retract"}), ("continue_generation", {})):
            assert requests.post(f"{ours.url}/{path}", json=body, timeout=60).ok
        answer = running.result(600)
    held = nexus_of(answer)
    after = ours.info()
    retracted = answer["meta_info"]["num_retractions"]
    assert retracted >= 1 and after["retractions"] - before["retractions"] == retracted
    assert after["sequences"] - before["sequences"] == 2, "a request that comes back is no new sequence"
    assert held["events"] == len(held["trace"]) and held["tokens_evicted"] == sum(e["tokens"] for e in held["trace"])
    assert held["peak_resident"] >= 900 and held["logical"] == 900 + len(output_ids(answer)) - 1
    assert len(output_ids(answer)) == len(output_ids(whole)) == 72


def test_a_wrong_hint_is_named_whatever_else_is_asked(ours, tokenizer):
    body = {"input_ids": text_ids(tokenizer, 200, seed=205), "return_logprob": True, "logprob_start_len": 100}
    for custom, word in (({"kv_budgett": 1}, "kv_budgett"), (["kv_budget"], "give an object")):
        answer = requests.post(
            ours.url + "/generate", json={**body, "sampling_params": {"custom_params": custom}}, timeout=60
        )
        assert answer.status_code == 400 and word in answer.text, answer.text


def test_probes_are_not_listed(ours):
    assert requests.get(ours.url + "/health_generate", timeout=60).ok
    assert not any(rid.startswith("HEALTH_CHECK") for rid in ours.info()["recent_requests"])
