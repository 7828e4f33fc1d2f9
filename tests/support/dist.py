"""Builds the wheel and the sdist of this checkout."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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


def build(folder: Path) -> Dist:
    """Built from a copy: setuptools leaves a list of sources behind, which a later build would read.

    Args:
        folder: an empty folder for the copy.
    """
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return Dist(wheel, sdist)
