"""``/abort_request`` on a real server: requests whose ids begin alike, running and waiting."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.support.server import healthy, output_ids, text_ids

pytestmark = pytest.mark.server

RIDS = ("job-1", "job-10", "job-11", "job-12", "job-13", "job-14")
"""Four run at a time, so the last two wait."""


def test_one_id_ends_one_request(tight, tokenizer):
    prompts = {rid: text_ids(tokenizer, 300, seed=430 + i) for i, rid in enumerate(RIDS)}

    def answer(rid: str) -> dict:
        sampling = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
        body = {"rid": rid, "input_ids": prompts[rid], "sampling_params": sampling}
        return requests.post(f"{tight.url}/generate", json=body, timeout=600).json()

    def end(rid: str) -> None:
        assert requests.post(f"{tight.url}/abort_request", json={"rid": rid}, timeout=60).ok

    with ThreadPoolExecutor(len(RIDS)) as threads:
        before = tight.info()["sequences"]
        answers = {}
        for i, rid in enumerate(RIDS):
            answers[rid] = threads.submit(answer, rid)
            deadline = time.monotonic() + 120
            while i < 4 and tight.info()["sequences"] <= before + i and time.monotonic() < deadline:
                time.sleep(0.05)
        time.sleep(0.5)
        for rid in ("", "job-", "job-1"):
            end(rid)
        ended = {rid: future.result(600) for rid, future in answers.items()}
    reasons = {rid: one["meta_info"]["finish_reason"]["type"] for rid, one in ended.items()}
    assert reasons == {rid: "abort" if rid == "job-1" else "length" for rid in RIDS}
    assert all(len(output_ids(one)) == 150 for rid, one in ended.items() if rid != "job-1")
    recent = tight.info()["recent_requests"]
    assert set(RIDS) <= set(recent), "the one that was ended has a report too"
    healthy(tight)
