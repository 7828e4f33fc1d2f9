"""One table of flags: what the README shows, what fields a config has, and that each flag can be said."""

import dataclasses
import re
from pathlib import Path

from nexus_sglang.config import FLAGS, NexusConfig, readme_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_shows_the_table():
    shown = re.findall(
        r"<!-- flags: written by make docs -->\n(.*?)<!-- end of flags -->", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert shown == [readme_table()], "run `make docs`"


def test_every_field_but_the_modes_is_a_flag():
    fields = [field.name for field in dataclasses.fields(NexusConfig)]
    assert fields == [flag.field for flag in FLAGS] + ["debug", "timing"]


def test_a_default_is_what_nobody_said():
    config = NexusConfig("nexus")
    for flag in FLAGS[1:]:
        assert getattr(config, flag.field) == flag.default
        assert flag.read(flag.default_text, flag.option) == flag.default, "written out, it is read as the same value"


def test_flag_and_keyword():
    names = [(flag.option, flag.keyword) for flag in FLAGS]
    assert names[0] == ("--kv-policy", "kv_policy") and names[2] == ("--kv-block-size", "kv_block_size")
    assert names[-1] == ("--kv-policy-config", "kv_policy_config")
