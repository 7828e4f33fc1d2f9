"""A broken policy is refused before the model loads; every registered one passes."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import pytest
import torch

from nexus_sglang.errors import ConfigError
from nexus_sglang.policy import POLICIES, Policy, Weighing, base, make_policy
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
        (lambda e, b: Weighing(e.value_norm.double()), "value_norm \\(needs_values = True\\)"),
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


def test_the_policy_in_the_contract_works():
    """The example in the docstring runs as it stands there."""
    example = textwrap.dedent(base.__doc__.split("::\n\n", 1)[1].split("\n\nShapes.", 1)[0])
    given: dict = {}
    exec(compile(example, "example", "exec", dont_inherit=True), given)
    peak = given["Peak"](decay=0.25)
    probe(peak)
    assert peak.head_reduction == "mean" and peak.needs_attention and not peak.needs_values
    with pytest.raises(ValueError, match="peak: decay 2 is not a number from 0 to 1"):
        given["Peak"](decay=2)
