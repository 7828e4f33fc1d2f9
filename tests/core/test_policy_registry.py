"""Names, the list on the command line, and a policy written outside the package."""

import json
import textwrap

import pytest
import torch

from nexus_sglang.cli import main
from nexus_sglang.errors import ConfigError
from nexus_sglang.policy import POLICIES, Blocks, Evidence, find_policy, make_policy
from nexus_sglang.policy.base import Policy

EXPECTED = {
    "nexus",
    "nexus-paper",
    "streaming-llm",
    "h2o",
    "tova",
    "snapkv",
    "morphkv",
    "keyformer",
    "vase",
    "keydiff",
    "expected-attention",
    "defensive",
    "random",
    "composed",
}

STRANGER = '''
from dataclasses import dataclass

from nexus_sglang.policy import Blocks, Evidence, Policy, Weighing
from nexus_sglang.policy.base import check_range


@dataclass(frozen=True)
class EveryOther(Policy):
    """Recent attention, halved for odd blocks, averaged with what was seen before."""

    name = "every-other"
    source = "a stranger's notebook"
    state_width = 1

    keep_share: float = 0.5

    def __post_init__(self):
        check_range(self.name, "keep_share", self.keep_share, 0, 1)

    def weigh(self, evidence: Evidence, blocks: Blocks) -> Weighing:
        now = evidence.attention.mean(dim=0)
        old = blocks.state[:, 0].nan_to_num(0)
        weights = (now + old) / 2
        weights = weights * (1 - self.keep_share * (blocks.index % 2))
        return Weighing(weights, weights[:, None])
'''


def test_all_named_policies_are_registered():
    assert set(POLICIES) == EXPECTED


def test_cli_lists_fields_defaults_and_sources(capsys):
    assert main(["policies"]) == 0
    out = capsys.readouterr().out
    for name, cls in POLICIES.items():
        assert f"{name} " in out and cls.source in out
    fields = next(line for line in out.splitlines() if line.startswith("nexus-paper ")).split("fields", 1)[1]
    assert json.loads(fields)["draws"] == 5


@pytest.mark.parametrize("wrong, near", [("nexsus", "nexus"), ("snap-kv", "snapkv"), ("H2O", "h2o"), ("zzz", "")])
def test_unknown_names_get_the_list_and_the_nearest(wrong, near, capsys):
    with pytest.raises(ConfigError, match="keyformer") as caught:
        find_policy(wrong)
    assert near in str(caught.value) and "did you mean" in str(caught.value)
    assert main(["policies", wrong]) == 2 and "did you mean" in capsys.readouterr().err


def test_a_strangers_policy_loads_by_module_and_class(tmp_path, monkeypatch, capsys):
    assert len(STRANGER.strip().splitlines()) <= 30
    (tmp_path / "my_module.py").write_text(STRANGER)
    (tmp_path / "not_one.py").write_text(textwrap.dedent("class Thing: pass"))
    monkeypatch.syspath_prepend(tmp_path)
    policy = make_policy("my_module:EveryOther", {"keep_share": 0.25})
    assert isinstance(policy, Policy) and policy.keep_share == 0.25
    blocks = Blocks(
        torch.arange(4), torch.zeros(4, dtype=torch.bool), torch.arange(4), torch.full((4, 1), torch.nan), 9, 0
    )
    out = policy.weigh(Evidence(torch.ones(2, 4)), blocks)
    assert out.weights.tolist() == [0.5, 0.375, 0.5, 0.375] and out.state.shape == (4, 1)
    assert main(["policies", "my_module:EveryOther"]) == 0 and "stranger" in capsys.readouterr().out
    for name, why in (
        ("my_module:Nothing", "does not load"),
        ("no_such_module:X", "does not load"),
        ("not_one:Thing", "subclass"),
    ):
        with pytest.raises(ConfigError, match=why):
            find_policy(name)
    with pytest.raises(ConfigError, match="keep_share"):
        make_policy("my_module:EveryOther", {"keep_share": 2})
    with pytest.raises(ConfigError, match="keep_share"):
        make_policy("my_module:EveryOther", {"nothing": 2})


def test_docs_show_the_same_stranger():
    from pathlib import Path

    page = Path(__file__).parents[2] / "docs" / "guide" / "own-policy.md"
    assert STRANGER.strip() in page.read_text(encoding="utf-8")
