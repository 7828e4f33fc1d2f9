"""Greedy requests to a running SGLang server, stock or ours, and what their answers say about the cache."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

import requests


class Answer(NamedTuple):
    """One answer.

    Attributes:
        text, ids: what was generated. prompt, cached: prompt tokens, and how many came from the prefix cache.
        resident: share of the sequence's tokens that were resident at its end; 1.0 from a server without a policy.
        evicted: tokens evicted for this request. meta: SGLang's meta_info.
    """

    text: str
    ids: list[int]
    prompt: int
    cached: int
    resident: float
    evicted: int
    meta: dict[str, Any]


def post_generate(url: str, ids: list[int] | list[list[int]], tokens: int = 16, **options: Any) -> Any:
    """POST /generate with token ids, greedy.

    Args:
        tokens: max_new_tokens. options: ``custom`` goes to custom_params, ``ignore_eos`` (default True) and ``stop`` to
            the sampling parameters, the rest to the request.

    Raises:
        requests.HTTPError: the server refused; the message ends with its answer.
    """
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": options.pop("ignore_eos", True)}
    for name, key in (("custom", "custom_params"), ("stop", "stop")):
        if value := options.pop(name, None):
            sampling[key] = value
    answer = requests.post(
        url + "/generate", json={"input_ids": ids, "sampling_params": sampling, **options}, timeout=600
    )
    if not answer.ok:
        raise requests.HTTPError(f"{answer.status_code} from {url}/generate: {answer.text[:300]}", response=answer)
    return answer.json()


class Streamed(NamedTuple):
    """When the first and the last token of a streamed answer came (``time.monotonic``), and SGLang's last meta_info."""

    first: float
    last: float
    meta: dict[str, Any]


def stream_generate(url: str, ids: list[int], timeout: float = 3600, **sampling: Any) -> Streamed:
    """POST /generate with token ids, greedy and streamed; ``sampling``: more sampling parameters.

    Raises:
        requests.HTTPError: the server refused.
    """
    body = {"input_ids": ids, "stream": True, "sampling_params": {"temperature": 0, **sampling}}
    first, last = None, b""
    with requests.post(url + "/generate", json=body, stream=True, timeout=timeout) as stream:
        stream.raise_for_status()
        # Every line carries the whole answer so far: small reads and parsing all of them would take longer than decoding.
        for line in stream.iter_lines(chunk_size=1 << 16):
            if line.startswith(b"data: {"):
                first, last = first or time.monotonic(), line
    return Streamed(first, time.monotonic(), json.loads(last[6:])["meta_info"])


def read_answer(raw: dict[str, Any]) -> Answer:
    """The parts of one /generate answer that the suite uses."""
    meta = raw["meta_info"]
    held = (meta.get("nexus") or [None])[0]
    share, evicted = (held["resident"] / held["logical"], held["evicted"]) if held else (1.0, 0)
    return Answer(
        raw.get("text", ""),
        raw["output_ids"],
        meta["prompt_tokens"],
        meta.get("cached_tokens", 0),
        share,
        evicted,
        meta,
    )
