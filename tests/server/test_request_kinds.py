"""Requests beside the plain one: several answers, a grammar, logprobs, a pause that retracts, wrong hints, probes."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.support.hints import BAD, Bad, envelope
from tests.support.server import healthy, nexus_of, output_ids, text_ids

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


CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
ENDPOINTS = {
    "/generate": {"text": "Hello", "sampling_params": {"max_new_tokens": 2}},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "Hello", "max_tokens": 2},
}


def refusal(server, path: str, bad: Bad) -> requests.Response:
    body = dict(ENDPOINTS[path])
    if path == "/generate":
        body["sampling_params"] = {**body["sampling_params"], "custom_params": bad.params}
    else:
        body["custom_params"] = bad.params
    return requests.post(server.url + path, json=body, timeout=60)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_wrong_hint_is_a_400_that_says_what_is_right(ours, path):
    assert len(BAD) >= 40
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda bad: refusal(ours, path, bad), BAD))
    wrong = []
    for bad, answer in zip(BAD, answers, strict=True):
        text = answer.text.replace("\\", "")
        if answer.status_code != 400 or not all(part in text for part in (bad.field, bad.shown, bad.alternative)):
            wrong.append((bad.params, answer.status_code, answer.text))
    assert not wrong
    assert ours.generate([1, 2, 3], 4)["meta_info"]["completion_tokens"] == 4


def test_what_json_has_no_number_for_is_refused_too(ours):
    """Neither NaN nor a whole number beyond 64 bits gets as far as a hint's own check everywhere."""
    for value in ("NaN", "Infinity", "1e999", "1" + "0" * 30, "1" + "0" * 400):
        for key in ("kv_budget", "kv_pin_tokens"):
            body = f'{{"text": "Hello", "sampling_params": {{"custom_params": {{"{key}": {value}}}}}}}'
            head = {"content-type": "application/json"}
            answer = requests.post(ours.url + "/generate", data=body, headers=head, timeout=60)
            assert answer.status_code in (400, 422), (key, value, answer.status_code, answer.text)
    assert ours.generate([1, 2, 3], 4)["meta_info"]["completion_tokens"] == 4


def test_messages_and_responses_carry_no_hints(ours):
    """SGLang 0.5.23 drops ``custom_params`` there without a word; docs/guide/requests.md says so."""
    model = requests.get(ours.url + "/v1/models", timeout=60).json()["data"][0]["id"]
    wrong = {"custom_params": {"kv_budget": -1}, "kv_hints": envelope(("nexus.budget", -1))}
    for path, body in (
        ("/v1/messages", CHAT),
        ("/v1/responses", {"model": model, "input": "Hello", "max_output_tokens": 16}),
    ):
        answer = requests.post(ours.url + path, json={**body, **wrong}, timeout=120)
        assert answer.ok, (path, answer.text)


def test_kv_hints_and_custom_params_keep_the_same_blocks(ours, tokenizer):
    prompt = text_ids(tokenizer, 900, seed=206)
    reports = []
    actions = envelope(("nexus.budget", 0.4), ("nexus.pin", 300), ("nexus.trace", True), ("vendor.offload", 1))
    for hints in ({"custom": {"kv_budget": 0.4, "kv_pin_tokens": 300, "kv_trace": True}}, {"kv_hints": actions}):
        ours.flush()
        answer = ours.generate(prompt, 40, **hints)
        reports.append((nexus_of(answer), output_ids(answer)))
    (params, told), (envelope_, said) = reports
    ignored = envelope_.pop("ignored")
    assert params == envelope_
    assert told == said
    assert params["trace"]
    assert params["budget"] == 360
    assert ignored == [{"action_id": "a3", "action_type": "vendor.offload", "action_version": "1"}]
    whole = nexus_of(ours.generate(prompt, 4, kv_hints=envelope(("nexus.evict", False))))
    assert whole["evicted"] == 0


def test_two_places_that_disagree_are_a_400(ours, tokenizer):
    body = {"input_ids": text_ids(tokenizer, 50, seed=207), "kv_hints": envelope(("nexus.budget", 0.5))}
    sampling = {"max_new_tokens": 4, "custom_params": {"kv_budget": 0.25}}
    answer = requests.post(ours.url + "/generate", json={**body, "sampling_params": sampling}, timeout=60)
    assert answer.status_code == 400
    assert "custom_params kv_budget 0.25 contradicts kv_hints nexus.budget 0.5" in answer.text
    answer = requests.post(ours.url + "/generate", json={**body, "kv_hints": envelope(("nexus.pin", -1))}, timeout=60)
    assert answer.status_code == 400
    assert "kv_hints nexus.pin -1" in answer.text
    healthy(ours)


def test_probes_are_not_listed(ours):
    assert requests.get(ours.url + "/health_generate", timeout=60).ok
    assert not any(rid.startswith("HEALTH_CHECK") for rid in ours.info()["recent_requests"])
