"""benchmarks/kvpress: prompts fixed by their seeds, rows scored as nexus-sglang eval scores them."""

import json
import zlib

import pytest

from benchmarks import ROOT
from benchmarks.kvpress import prompts, tables

PINNED = "9e60c49dea31c8af2818beb3ec14684668f1a50adfb8dcc606669beb9792147d"


def words(text: str) -> list[int]:
    """A stand-in for the tokenizer: a word a token."""
    return [zlib.crc32(word.encode()) % 50_000 for word in text.split()]


@pytest.fixture(scope="module")
def made():
    return list(prompts.make_prompts(words))


@pytest.fixture(scope="module")
def result():
    return json.loads((ROOT / "benchmarks" / "kvpress" / "results.json").read_text(encoding="utf-8"))


def test_prompts_are_fixed(made, result):
    """Other prompts under the same seeds would make results.json stale."""
    assert prompts.digest(made) == prompts.digest(list(prompts.make_prompts(words))) == PINNED
    # Answers may differ: how much filler is drawn before them depends on the tokenizer.
    assert [(p["id"], p["score"]) for p in made] == [(p["id"], p["score"]) for p in result["prompts"]]


def test_prompts_hold_their_answer_and_end_with_the_question(made):
    assert len({prompt["id"] for prompt in made}) == len(made) == 40
    for prompt in made:
        (answer,) = prompt["answers"]
        known = {*prompt["ids"]}
        assert known & {*words(answer + "."), *words(answer)}, prompt["id"]
        assert prompt["ids"][-1] in words("is: is in")


def test_rows_are_scored_by_the_suite(result):
    asked = {prompt["id"]: prompt for prompt in result["prompts"]}
    systems = {(r["side"], r["system"], r["budget"]) for r in result["rows"]}
    assert len(result["rows"]) == len(systems) * len(asked)
    for row in result["rows"]:
        prompt = asked[row["id"]]
        assert row["score"] == prompts.SCORES[prompt["score"]](row["text"], prompt["answers"]) in (0.0, 1.0)
        assert 0 < row["kept"] < prompt["length"] * row["budget"] + 1  # a share rounds up


def test_sign_test():
    assert tables.sign_test(0, 0) == 1.0
    assert tables.sign_test(0, 6) == tables.sign_test(6, 0) == pytest.approx(2 / 64)
    assert tables.sign_test(3, 5) == pytest.approx(0.7265625)
