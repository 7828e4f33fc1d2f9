"""Wheel and sdist of this checkout, built once."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("nexus_sglang", "kernels", "patches")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")


class Dist(NamedTuple):
    """What ``make build`` makes.

    Attributes:
        wheel: the wheel, which was built from the sdist.
        sdist: the sdist.
    """

    wheel: Path
    sdist: Path


@pytest.fixture(scope="session")
def dist(tmp_path_factory) -> Dist:
    """Built from a copy: setuptools leaves a list of sources behind, which a later build would read."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (wheel,) = (copy / "dist").glob("*.whl")
    (sdist,) = (copy / "dist").glob("*.tar.gz")
    return Dist(wheel, sdist)
