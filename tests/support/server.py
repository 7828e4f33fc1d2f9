"""What the server tests share."""

from __future__ import annotations

import random
from typing import Any

from nexus_sglang.harness.server import Server, free_port

__all__ = ["STRICT", "WIDE", "Server", "free_port", "healthy", "nexus_of", "output_ids", "prose", "text_ids"]

STRICT = {"NEXUS_SGLANG_DEBUG": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2"}
"""Our invariants after every pass, and SGLang's own accounting checked while it is busy."""

WIDE = "--dtype float32 --max-total-tokens 16384 --chunked-prefill-size 512 --max-running-requests 8".split()
"""Float32 and a pool that holds whole sessions."""


def healthy(server: Server) -> None:
    """Alive, nothing leaked, every slot back after a flush."""
    server.flush()
    info = server.info()
    assert info["physical_free"] == info["physical_capacity"] and info["virtual_free"] == info["virtual_capacity"]
    log = server.text()
    assert "hit an exception" not in log and "memory leak" not in log


def output_ids(answer: dict[str, Any]) -> list[int]:
    return answer["output_ids"]


def nexus_of(answer: dict[str, Any]) -> dict[str, Any]:
    """What the request held, from its meta_info."""
    return answer["meta_info"]["nexus"][0]


def text_ids(tokenizer: Any, tokens: int, seed: int) -> list[int]:
    """Exactly ``tokens`` ids of varied English-like text."""
    return tokenizer.encode(prose(tokens, seed))[:tokens]


def prose(words: int, seed: int) -> str:
    """At least ``words`` words, deterministic."""
    rng = random.Random(seed)
    subjects = "the ferry,a courier,our teacher,the old bridge,this garden,every student,the council,a violin".split(
        ","
    )
    verbs = "crossed,remembered,painted,ignored,repaired,sold,followed,described".split(",")
    objects = "the harbour,a blue letter,seven lanterns,the northern road,an empty theatre,the winter market".split(",")
    tails = "before noon,without a word,in heavy rain,for the third time,near the station,as promised".split(",")
    sentences = []
    count = 0
    while count < words:
        s = " ".join(rng.choice(part) for part in (subjects, verbs, objects, tails))
        s = f"{s} in {rng.randint(1400, 2100)}."
        sentences.append(s[0].upper() + s[1:])
        count += len(s.split())
    return " ".join(sentences)
