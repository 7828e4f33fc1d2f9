"""Passages, questions, contestants: one prefill serves every policy, budget and setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks.offline.choosing import describe_blocks, keep_tokens
from benchmarks.offline.reader import Kept, Prefix, Reader
from nexus_sglang.config import NexusConfig, TokenAmount
from nexus_sglang.evaluation.plan import SETTINGS
from nexus_sglang.evaluation.recall import RecallSample
from nexus_sglang.evidence.measure import NEEDS
from nexus_sglang.policy.base import Evidence, Policy

BATCH = 9
"""Reduced caches that answer at once."""


class Contestant(NamedTuple):
    """A policy with one choice for all layers, as the server applies it.

    Attributes:
        policy: with its fields.
        recent: newest tokens that always stay, as in ``--kv-recent-tokens``.
    """

    policy: Policy
    recent: TokenAmount = TokenAmount(64)


Reference = Callable[[Prefix, NexusConfig, int], Kept]
"""A method in which each layer chooses for itself: prefix, config and budget in tokens to what is kept."""
Contestants = dict[str, Contestant | Reference]
"""By label."""


class Score(NamedTuple):
    """How one reduced cache answered one question.

    Attributes:
        exact: whether greedy decoding writes the whole answer.
        logprob: mean log-probability of the answer's tokens, in nats.
        resident: share of tokens kept.
    """

    exact: bool
    logprob: float
    resident: float

    def rounded(self) -> list[float]:
        """As it is stored."""
        return [int(self.exact), round(self.logprob, 3), round(self.resident, 4)]


@dataclass
class _Bench:
    """Evidence of one prefix, measured once per head reduction."""

    prefix: Prefix
    block_size: int
    cache: dict[str, Evidence]
    needs: dict[str, dict[str, bool]]

    @classmethod
    def on(cls, prefix: Prefix, contestants: Contestants, block_size: int) -> _Bench:
        """A bench that measures what any of the contestants asks for."""
        needs: dict[str, dict[str, bool]] = {}
        for entry in contestants.values():
            if isinstance(entry, Contestant):
                wanted = needs.setdefault(entry.policy.head_reduction, {})
                for need in NEEDS:
                    wanted[need] = wanted.get(need, False) or getattr(entry.policy, need)
        return cls(prefix, block_size, {}, needs)

    def evidence(self, policy: Policy) -> Evidence:
        """What this policy is to judge by."""
        kind = policy.head_reduction
        if kind not in self.cache:
            probe = SimpleNamespace(head_reduction=kind, **self.needs[kind])
            self.cache[kind] = self.prefix.measure(probe, self.block_size)
        return self.cache[kind]


def cut(bench: _Bench, entry: Contestant | Reference, share: float, seed: int, reader: Reader) -> Kept:
    """What one contestant keeps of a prefix.

    Args:
        bench: the prefix and its evidence.
        entry: the contestant.
        share: budget as a share of the prefix.
        seed: of the draws.
        reader: that read the prefix.
    """
    recent = entry.recent if isinstance(entry, Contestant) else TokenAmount(64)
    config = NexusConfig("nexus", TokenAmount(share), bench.block_size, reader.window, recent_tokens=recent, seed=seed)
    length = len(bench.prefix.ids)
    budget = config.budget_tokens(length)
    if not isinstance(entry, Contestant):
        return entry(bench.prefix, config, budget)
    identities = bench.prefix.identities(bench.block_size)
    blocks = describe_blocks(length, identities, config, budget, entry.policy.state_width)
    tokens = keep_tokens(entry.policy, bench.evidence(entry.policy), blocks, config, budget)
    return Kept.shared(tokens, reader.layers, reader.kv_heads)


def without_last(kept: Kept, length: int) -> Kept:
    """The same without the prefix's last token, which is then read again to get its logits from the reduced cache."""
    return Kept(kept.index, [v & (i != length - 1) for i, v in zip(kept.index, kept.valid, strict=True)])


def grade(logits: torch.Tensor, answer: list[int]) -> tuple[bool, float]:
    """Exact match and mean log-probability from logits ``[len(answer), vocab]``, each after the right tokens before.

    Greedy decoding writes the answer exactly when every argmax is right, so no decoding is needed.
    """
    logp = torch.log_softmax(logits, dim=-1)
    right = torch.tensor(answer)
    return bool((logits.argmax(dim=-1) == right).all()), float(logp[torch.arange(len(answer)), right].mean())


def answer_reduced(
    reader: Reader, prefix: Prefix, kept: dict[str, Kept], question: list[int] | None, answer: list[int]
) -> dict[str, Score]:
    """Every reduced cache answers.

    Args:
        reader: the model.
        prefix: what was read.
        kept: what stays of it, by label.
        question: token ids; None when the prefix ends with the question already (visible).
        answer: token ids of the right answer.

    Returns:
        Scores by label.
    """
    length = len(prefix.ids)
    grades: dict[tuple[int, ...], tuple[bool, float]] = {}
    feed, start = (question, length) if question else (prefix.ids[-1:], length - 1)
    different = list({entry.key(): entry for entry in kept.values()}.values())
    for at in range(0, len(different), BATCH):
        part = different[at : at + BATCH]
        caches = [entry if question else without_last(entry, length) for entry in part]
        logits = reader.continue_reduced(prefix, caches, feed + answer[:-1], start, len(answer))
        grades.update({entry.key(): grade(row, answer) for entry, row in zip(part, logits, strict=True)})
    return {label: Score(*grades[entry.key()], entry.count() / length) for label, entry in kept.items()}


def cut_all(bench: _Bench, contestants: Contestants, share: float, seed: int, reader: Reader) -> dict[str, Kept]:
    """What every contestant keeps, by label; arguments as in :func:`cut`."""
    return {label: cut(bench, entry, share, seed, reader) for label, entry in contestants.items()}


def run_sample(
    reader: Reader,
    sample: RecallSample,
    contestants: Contestants,
    shares: list[float],
    settings: tuple[str, ...] = SETTINGS,
    block_size: int = 32,
) -> list[dict[str, Any]]:
    """All contestants on one sample.

    Args:
        reader: the model.
        sample: passage and questions.
        contestants: by label.
        shares: budgets, as shares of what is read.
        settings: whether the question is known when the cache is cut.
        block_size: tokens per block.

    Returns:
        One record per question: task, seed, tokens of the passage, ``full`` and, per setting and share, per label, the
        rounded :class:`Score`.
    """
    passage = reader.read(reader.ids(sample.passage))
    bench = _Bench.on(passage, contestants, block_size)
    hidden = shares if "hidden" in settings else []
    kept_hidden = {share: cut_all(bench, contestants, share, sample.seed, reader) for share in hidden}
    records = []
    for question in sample.questions:
        asked = reader.ids(question.text)
        answer = reader.ids(question.answer)
        prompt = reader.read(asked, passage)
        after = reader.read(answer[:-1], prompt, last=len(answer) - 1)
        full = Score(*grade(torch.cat((prompt.logits, after.logits)), answer), 1.0)
        record: dict[str, Any] = {"task": sample.task, "seed": sample.seed, "tokens": len(passage.ids)}
        record["full"] = full.rounded()
        visible = _Bench.on(prompt, contestants, block_size)
        for setting in settings:
            record[setting] = {}
            for share in shares:
                if setting == "hidden":
                    scores = answer_reduced(reader, passage, kept_hidden[share], asked, answer)
                else:
                    kept = cut_all(visible, contestants, share, sample.seed, reader)
                    scores = answer_reduced(reader, prompt, kept, None, answer)
                record[setting][f"{share:g}"] = {label: score.rounded() for label, score in scores.items()}
        records.append(record)
    return records
