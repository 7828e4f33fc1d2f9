"""A broken policy is refused before the model loads; every registered one passes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from nexus_sglang.errors import ConfigError
from nexus_sglang.policy import POLICIES, Policy, Weighing, make_policy
from nexus_sglang.policy.probe import probe


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_registered_policies_pass(name):
    probe(make_policy(name, {}))


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda e, b: Weighing(torch.zeros(3)), "weights of shape \\(3,\\)"),
        (lambda e, b: Weighing(torch.full((12,), torch.nan)), "weights with NaN"),
        (lambda e, b: Weighing([1.0] * 12), "AttributeError"),
        (lambda e, b: 1 / 0, "ZeroDivisionError"),
        (lambda e, b: Weighing(torch.ones(12), torch.ones(12)), "state of shape \\(12,\\) where \\(12, 0\\)"),
    ],
)
def test_broken_policies_are_named(answer, words):
    @dataclass(frozen=True)
    class Broken(Policy):
        name = "broken"
        source = "test"

        def weigh(self, evidence, blocks):
            return answer(evidence, blocks)

    with pytest.raises(ConfigError, match=f"'broken'.*{words}"):
        probe(Broken())
