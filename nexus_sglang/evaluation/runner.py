"""Plays jobs against one running server and returns their rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nexus_sglang.harness.client import Answer, post_generate, read_answer
from nexus_sglang.harness.server import flush_cache

from . import fidelity
from .conversations import Script, make_conversation
from .documents import Document, DocumentQuestion, make_document
from .plan import FULL, Job, Plan
from .scoring import match_all
from .user_data import UserSample


class Runner:
    """One server that serves one policy; every budget is a request hint.

    Args:
        url: of the server.
        policy: that it serves; :data:`FULL` for a server without one.
        tokenizer: the served model's Hugging Face tokenizer.
        plan: what the whole run measures.
        parallel: most requests in flight for one document.
    """

    def __init__(self, url: str, policy: str, tokenizer: Any, plan: Plan, parallel: int = 16) -> None:
        self.url = url
        self.policy = policy
        self.tokenizer = tokenizer
        self.plan = plan
        self.parallel = parallel
        self._streams: dict[int, list[fidelity.Position]] = {}
        self._one_reference = threading.Lock()

    def count_tokens(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def ask(self, ids: list[int], tokens: int, budget: float, **options: Any) -> Answer:
        """One greedy request.

        Args:
            ids: token ids of the prompt.
            tokens: most tokens of the answer.
            budget: share or count that it may keep; 1.0 is everything.
            options: ``pin`` is the number of leading tokens to pin; the rest as in
                :func:`nexus_sglang.harness.client.post_generate`.
        """
        pin = options.pop("pin", 0)
        if self.policy != FULL:
            pinned = {"kv_pin_tokens": pin} if pin else {}
            options["custom"] = {"kv_evict": False} if budget == 1.0 else {"kv_budget": budget, **pinned}
        return read_answer(post_generate(self.url, ids, tokens, **options))

    def flush(self) -> None:
        """Empty the prefix cache, so that what comes next does not depend on what was played before.

        Raises:
            ServerError: the server has other work, so it keeps its cache.
        """
        flush_cache(self.url)

    def run(self, job: Job) -> dict[str, Any]:
        """The row of one job: scores, and how much was resident and evicted.

        Args:
            job: of any kind but ``data``, see :meth:`data`.
        """
        play = {"document": self._document, "conversation": self._conversation, "fidelity": self._fidelity}
        return play[job.kind](job)

    def _document(self, job: Job) -> dict[str, Any]:
        document = make_document(job.seed, job.length, self.count_tokens)
        questions = [q for q in document.questions if q.task in self.plan.tasks]
        play = self._hidden if job.what == "hidden" else self._visible
        answers = play(document, questions, job.budget)
        return {
            "scores": {q.task: round(q.score(a.text, q.answers), 4) for q, a in zip(questions, answers, strict=True)},
            "depths": {q.task: q.depth for q in questions if q.depth is not None},
            **_held(answers),
        }

    def _hidden(self, document: Document, questions: list[DocumentQuestion], budget: float) -> list[Answer]:
        """The document alone first, then every question as a branch of what is left of it."""
        ids = self.ids(document.text)
        first = self.ask(ids, 1, budget)
        with ThreadPoolExecutor(self.parallel) as threads:
            answers = list(threads.map(lambda q: self.ask(ids + self.ids(q.text), q.tokens, budget), questions))
        # An answer's own eviction is not what the setting is about: that the document's happened is.
        return [a._replace(evicted=a.evicted + first.evicted) for a in answers]

    def _visible(self, document: Document, questions: list[DocumentQuestion], budget: float) -> list[Answer]:
        """Document and question in one prompt, each with a prefix space of its own."""
        ids = self.ids(document.text)

        def ask(question: DocumentQuestion) -> Answer:
            return self.ask(ids + self.ids(question.text), question.tokens, budget, cache_salt=question.task)

        with ThreadPoolExecutor(self.parallel) as threads:
            return list(threads.map(ask, questions))

    def _conversation(self, job: Job) -> dict[str, Any]:
        kind, _, pinned = job.what.partition(" ")  # "rule", "rule pinned"
        script = Script(make_conversation(kind, job.seed, job.length, self.count_tokens), self.tokenizer)
        pin = script.pinned_tokens(pinned)
        salt = f"{job.what} {job.seed}"
        scores: dict[str, list[float]] = {}
        answers: list[Answer] = []
        play = script.play()
        turn, ids = next(play)
        while True:
            answer = self.ask(ids, turn.tokens, job.budget, pin=pin, cache_salt=salt)
            answers.append(answer)
            if turn.task is not None:
                scores.setdefault(turn.task, []).append(round(turn.score(answer.text, turn.answers), 4))
            try:
                turn, ids = play.send(answer.text)
            except StopIteration:
                break
        return {"scores": scores, **_held(answers[-1:], any_of=answers)}

    def _fidelity(self, job: Job) -> dict[str, Any]:
        ids = self._texts()[job.seed]
        with self._one_reference:
            if job.seed not in self._streams:
                self._streams[job.seed] = self._stream(ids, 1.0)[0]
        full = self._streams[job.seed]
        reduced, answers = self._stream(ids, job.budget)
        numbers = {name: round(value, 6) for name, value in fidelity.compare(full, reduced).items()}
        return {**numbers, "nll_full": round(-sum(p.logprob for p in full) / len(full), 6), **_held(answers)}

    def _texts(self) -> list[list[int]]:
        path = Path(self.plan.text_file) if self.plan.text_file else None
        return fidelity.texts(path, self.plan.texts, self.plan.text_tokens, self.tokenizer)

    def _stream(self, ids: list[int], budget: float) -> tuple[list[fidelity.Position], list[Answer]]:
        """Positions of the second half of a text, in steps; the first half is the first prompt."""
        positions: list[fidelity.Position] = []
        start = len(ids) // 2
        answers = [self.ask(ids[:start], 1, budget)]
        for begin in range(start, len(ids) - fidelity.STEP + 1, fidelity.STEP):
            answer = self.ask(
                ids[: begin + fidelity.STEP],
                tokens=1,
                budget=budget,
                return_logprob=True,
                logprob_start_len=begin,
                top_logprobs_num=fidelity.TOP,
            )
            positions += fidelity.read_positions(answer.meta)
            answers.append(answer)
        return positions, answers

    def data(self, sample: UserSample, budget: float) -> dict[str, Any]:
        """The row of one line of a user's file.

        Args:
            sample: the line.
            budget: share or count that it may keep.
        """
        text = self.tokenizer.apply_chat_template(sample.messages, tokenize=False, add_generation_prompt=True)
        answer = self.ask(self.ids(text), sample.tokens, budget, ignore_eos=False)
        score = round(match_all(answer.text, sample.expect), 4)
        return {"score": score, "prompt": answer.prompt, "sample": sample.digest, **_held([answer])}


def _held(answers: list[Answer], any_of: list[Answer] | None = None) -> dict[str, Any]:
    """What the cache held: mean resident share, and in how many of how many requests eviction had taken place."""
    counted = any_of or answers
    return {
        "resident": round(sum(a.resident for a in answers) / len(answers), 4),
        "evicted": sum(a.evicted > 0 for a in counted),
        "requests": len(counted),
    }


def run_jobs(
    runner: Runner, jobs: list[Job], at_once: int, done: Callable[[Job, dict[str, Any]], None], stop: threading.Event
) -> None:
    """Run jobs.

    The budgets of one document or text are played side by side (they never share a prefix), then the cache is emptied.

    Args:
        runner: plays them.
        jobs: of any kind but ``data``.
        at_once: conversations that are played at a time.
        done: called with every finished job and its row.
        stop: once set, no further job begins.
    """

    def one(job: Job) -> dict[str, Any] | None:
        return None if stop.is_set() else runner.run(job)

    def play(together: list[Job]) -> None:
        with ThreadPoolExecutor(at_once) as threads:
            for job, row in zip(together, threads.map(one, together), strict=True):
                if row is not None:
                    done(job, row)
        runner.flush()

    groups: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        alone = job.kind != "conversation"
        groups.setdefault((job.kind, job.what, job.length, job.seed) if alone else ("conversation",), []).append(job)
    for group in groups.values():
        if not stop.is_set():
            play(group)
