"""The built wheel and sdist serve from an environment that knows nothing of this checkout.

The environment sees the SGLang of the present one. With ``NEXUS_SGLANG_FRESH=1`` it installs everything itself: 11 GB.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.server]

ROOT = Path(__file__).resolve().parents[2]
FRESH = os.environ.get("NEXUS_SGLANG_FRESH") == "1"

SERVE = """
import json, sys
import nexus_sglang
from nexus_sglang import kernels, patches
from nexus_sglang.harness.models import ensure_model
from nexus_sglang.harness.server import Server

flags = "--max-total-tokens 4096 --chunked-prefill-size 512 --kv-budget 0.2 --kv-policy".split() + [sys.argv[1]]
with Server(str(ensure_model("smollm2-135m")), *flags) as server:
    answer = server.generate([100 + 7 * i % 900 for i in range(900)], 8)
    print(json.dumps({
        "files": [module.__file__ for module in (nexus_sglang, kernels, patches)],
        "nexus": answer["meta_info"]["nexus"][0],
        "output_ids": answer["output_ids"],
        "policy": server.info()["policy"],
    }))
"""

OLDEST_LAST = """
from dataclasses import dataclass

from nexus_sglang.policy import Policy, Weighing


@dataclass(frozen=True)
class OldestLast(Policy):
    name = "oldest-last"
    source = "a test"
    needs_attention = False

    def weigh(self, evidence, blocks):
        return Weighing(-blocks.index.double())
"""


class Environment:
    """A virtual environment and a working folder beside it.

    Args:
        folder: where both are made.
        artefact: the wheel or sdist to install.
    """

    def __init__(self, folder: Path, artefact: Path):
        self.site = folder / "venv"
        self.work = folder / "work"
        self.work.mkdir()
        venv.create(self.site, with_pip=FRESH, symlinks=True)
        self.python = self.site / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "-q"]
        if FRESH:
            self.run([*pip, "-c", str(ROOT / "constraints.txt"), "setuptools", str(artefact)], 3600)
        else:
            # A line of a .pth file in a .pth folder is not followed, so the editable install there stays unseen.
            seen = Path(importlib.util.find_spec("sglang").origin).parents[1]
            (packages,) = self.site.glob("lib/python*/site-packages")
            (packages / "present.pth").write_text(f"{seen}\n")
            offline = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
            self.run([*pip, *offline, str(artefact)], 600)

    def run(self, command: list[str], seconds: int) -> str:
        """What the command says, in an environment without traces of the present one."""
        hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        variables = {name: value for name, value in os.environ.items() if name not in hidden}
        variables["PYTHONPATH"] = str(self.work)
        done = subprocess.run(
            command,
            cwd=self.work,
            env=variables,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done.stdout

    def serve(self, policy: str) -> dict:
        """One request to a server with this policy, and where the package was imported from."""
        (self.work / "serve_once.py").write_text(SERVE)
        said = self.run([str(self.python), "serve_once.py", policy], 1200)
        return json.loads(said.splitlines()[-1])


@pytest.fixture(scope="module")
def from_wheel(dist, tmp_path_factory) -> Environment:
    return Environment(tmp_path_factory.mktemp("wheel"), dist.wheel)


def served_with_eviction(environment: Environment, policy: str) -> None:
    answer = environment.serve(policy)
    assert all(Path(file).is_relative_to(environment.site) for file in answer["files"]), answer["files"]
    assert len(answer["output_ids"]) == 8
    assert answer["nexus"]["evicted"] > 0
    assert answer["policy"] == policy


def test_the_wheel_serves(from_wheel):
    served_with_eviction(from_wheel, "nexus")


def test_a_policy_from_a_file_is_served(from_wheel):
    (from_wheel.work / "my_policies.py").write_text(OLDEST_LAST)
    served_with_eviction(from_wheel, "my_policies:OldestLast")


def test_the_sdist_serves(dist, tmp_path):
    served_with_eviction(Environment(tmp_path, dist.sdist), "nexus")


def test_the_command_is_installed(from_wheel):
    assert "nexus-paper" in from_wheel.run([str(from_wheel.site / "bin" / "nexus-sglang"), "policies"], 120)
