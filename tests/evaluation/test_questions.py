"""What ``nexus-sglang eval`` asks and how answers are scored, without a server."""

from __future__ import annotations

import hashlib
import math
import re

import pytest

from nexus_sglang.errors import ConfigError
from nexus_sglang.evaluation import fidelity
from nexus_sglang.evaluation.conversations import KINDS, PINS, RULES, Script, make_conversation
from nexus_sglang.evaluation.documents import FAMILIES, make_document
from nexus_sglang.evaluation.fidelity import Position
from nexus_sglang.evaluation.scoring import match_all, match_part, match_word
from nexus_sglang.evaluation.user_data import read_samples
from tests.support.word_tokenizer import Words


def length(text: str) -> int:
    return len(Words().encode(text))


def test_scores_are_rulers():
    assert match_all("It is 123 and ABC", ("123", "abc", "x")) == pytest.approx(2 / 3)
    assert match_part("It is abc", ("x", "ABC")) == 1.0 and match_part("no", ("x",)) == 0.0


def test_an_english_answer_does_not_follow_a_rule_for_another_language():
    english = (
        "The best way to travel around people, animals and vanilla is until noon; I feel the sound of a little pencil."
    )
    assert [match_word(english, words) for _, words in RULES] == [0.0] * len(RULES)
    spoken = ("Puede usar el arroz.", "C'est le chat.", "Das ist gut.", "Il gatto è nero.")
    assert [match_word(text, words) for text, (_, words) in zip(spoken, RULES, strict=True)] == [1.0] * len(RULES)


@pytest.mark.parametrize("tokens", [1024, 2048, 4096])
def test_a_document_asks_every_family_once(tokens):
    document = make_document(7, tokens, length)
    assert tuple(q.task for q in document.questions) == FAMILIES
    assert abs(length(document.text) - tokens) < 0.06 * tokens
    for question in document.questions:
        assert all(answer in document.text for answer in question.answers), question.task
        assert question.depth is None or 0 <= question.depth <= 1
        assert not any(answer in question.text for answer in question.answers) or question.task == "variable-tracking"


def test_depth_is_where_the_fact_stands():
    for seed in range(20):
        document = make_document(seed, 1024, length)
        for question in document.questions:
            if question.depth is not None and question.task.startswith("single"):
                at = document.text.index(f"is: {question.answers[0]}") / len(document.text)
                assert abs(at - question.depth) < 0.08


def test_documents_depend_on_nothing_but_the_seed():
    assert make_document(3, 1024, length) == make_document(3, 1024, length)
    assert make_document(3, 1024, length).text != make_document(4, 1024, length).text


GENERATED = "3b3b880c3b399f4e5fa379592c793c95cbfe83a3fd928ce1c016efbf7c377d13"


def test_what_is_asked_is_pinned():
    """Another text under the same seed would make every checked-in result stale."""
    digest = hashlib.sha256()

    def count_tokens(text: str) -> int:
        return len(text.split())

    for seed in (1, 1000):
        document = make_document(seed, 1024, count_tokens)
        digest.update(repr((document.text, [question[:-1] for question in document.questions])).encode())
        for kind in KINDS:
            conversation = make_conversation(kind, seed, 1024, count_tokens)
            digest.update(repr((conversation.system, [turn[:-1] for turn in conversation.turns])).encode())
    assert digest.hexdigest() == GENERATED


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_grows_and_keeps_what_was_said(kind):
    conversation = make_conversation(kind, 5, 1024, length)
    script = Script(conversation, Words())
    pins = [script.pinned_tokens(pin) for pin in ("", *PINS[kind])]
    assert pins[0] == 0 and pins == sorted(set(pins)), "the opening is more than the system message"
    play = script.play()
    before: list[int] = []
    turns = 0
    turn, ids = next(play)
    assert pins[-1] <= len(ids) and (pins[-1] >= len(ids) - 3) == ("opening" in PINS[kind]), (
        "all but the start of an answer"
    )
    while True:
        turns += 1
        assert len(ids) > len(before)
        if before and not turn.begin and conversation.system is not None:
            assert ids[: len(before) - 3] == before[: len(before) - 3], "a prefix of the next turn"
        before = ids[: len(ids) - len(Words().encode(turn.begin))]
        try:
            turn, ids = play.send("something")
        except StopIteration:
            break
    assert turns == len(conversation.turns)


def test_divergence_is_a_lower_bound_of_kl():
    p = [0.5, 0.3, 0.1, 0.1]
    q = [0.25, 0.25, 0.25, 0.25]
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

    def position(values, named):
        return Position(0.0, {i: math.log(values[i]) for i in named})

    assert fidelity.divergence(position(p, range(4)), position(q, range(4))) == pytest.approx(kl)
    coarse = fidelity.divergence(position(p, (0, 1)), position(q, (0, 2)))
    assert 0 < coarse < kl
    assert fidelity.divergence(position(p, (0, 1)), position(p, (0, 1))) == 0
    same = [position(p, range(4))] * 3
    assert fidelity.compare(same, [position(q[::-1], range(4))] * 3)["top1"] == 1.0
    with pytest.raises(ValueError, match="3 positions"):
        fidelity.compare(same, same[:2])


def test_texts_are_cut_from_a_file_or_refused(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("one two three " * 40)
    assert [len(ids) for ids in fidelity.texts(path, 2, 100, Words())] == [100, 100]
    with pytest.raises(ValueError, match="--text .* has 240 tokens"):
        fidelity.texts(path, 3, 100, Words())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: not a JSON object"),
        ('{"expect": ["x"]}', "'messages'"),
        ('{"messages": [{"role": "user"}], "expect": ["x"]}', "'role' and 'content'"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "'expect'"),
        ('{"messages": [{"role": "user", "content": "q"}], "expect": ["x"], "max_tokens": 0}', "'max_tokens' 0"),
    ],
)
def test_user_data_says_which_line_and_shows_a_good_one(tmp_path, line, says):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "q"}], "expect": "x"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=re.escape(says)) as err:
        read_samples(path)
    assert "A usable line: {" in str(err.value)


def test_user_data_is_read(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "q"}], "expect": "x", "max_tokens": 5}\n\n')
    (sample,) = read_samples(path)
    assert (sample.line, sample.expect, sample.tokens) == (1, ("x",), 5)
