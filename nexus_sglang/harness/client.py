"""Greedy requests to a running SGLang server, stock or ours, and what their answers say about the cache."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

import requests


class Answer(NamedTuple):
    """One answer.

    Attributes:
        text: what was generated; empty from a server without a tokenizer.
        ids: token ids of what was generated.
        prompt: tokens of the prompt.
        cached: how many of them came from the prefix cache.
        resident: share of the sequence's tokens that were resident at its end; 1.0 from a server without a policy.
        evicted: tokens evicted for this request.
        meta: SGLang's meta_info.
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
        url: of the server.
        ids: token ids of one prompt, or of several.
        tokens: how many to generate; exactly so many unless ``ignore_eos`` is False.
        options: ``custom`` goes to custom_params, ``ignore_eos`` (default True) and ``stop`` to the sampling
            parameters, the rest to the request.

    Returns:
        SGLang's answer, a list of them for several prompts.

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
    """When a streamed answer came.

    Attributes:
        first: ``time.monotonic`` of the first token.
        last: of the last token.
        meta: SGLang's meta_info with the last token.
    """

    first: float
    last: float
    meta: dict[str, Any]


def stream_generate(url: str, ids: list[int], timeout: float = 3600, **sampling: Any) -> Streamed:
    """POST /generate with token ids, greedy and streamed.

    Args:
        url: of the server.
        ids: token ids of the prompt.
        timeout: seconds without a token after which it gives up.
        sampling: more sampling parameters.

    Raises:
        requests.HTTPError: the server refused, or sent nothing.
    """
    body = {"input_ids": ids, "stream": True, "sampling_params": {"temperature": 0, **sampling}}
    first = None
    last = b""
    with requests.post(url + "/generate", json=body, stream=True, timeout=timeout) as stream:
        stream.raise_for_status()
        # Every line carries the whole answer so far: small reads, and parsing all of them, would take longer than
        # decoding.
        for line in stream.iter_lines(chunk_size=1 << 16):
            if line.startswith(b"data: {"):
                first = first or time.monotonic()
                last = line
    if first is None:
        raise requests.HTTPError(f"{url}/generate sent no token")
    return Streamed(first, time.monotonic(), json.loads(last[6:])["meta_info"])


def read_answer(raw: dict[str, Any]) -> Answer:
    """The parts of one /generate answer that the evaluation uses."""
    meta = raw["meta_info"]
    held = (meta.get("nexus") or [None])[0]
    return Answer(
        text=raw.get("text", ""),
        ids=raw["output_ids"],
        prompt=meta["prompt_tokens"],
        cached=meta.get("cached_tokens", 0),
        resident=held["resident"] / held["logical"] if held else 1.0,
        evicted=held["evicted"] if held else 0,
        meta=meta,
    )
