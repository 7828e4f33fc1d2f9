"""What is in the wheel and the sdist, from the built files. Imports no SGLang."""

import re
import tarfile
import tomllib
import zipfile

import nexus_sglang
from tests.support.dist import FILES, ROOT, SOURCES

DATA = {"nexus_sglang/py.typed", f"patches/sglang-{nexus_sglang.SGLANG_VERSION}.json"}


def code() -> set[str]:
    return {str(path.relative_to(ROOT)) for folder in SOURCES for path in (ROOT / folder).rglob("*.py")}


def installed(path: str) -> str:
    """``kernels/dispatch.py`` -> ``nexus_sglang/kernels/dispatch.py``."""
    return path if path.split("/")[0] == "nexus_sglang" else f"nexus_sglang/{path}"


def test_the_wheel_holds_the_package_and_nothing_else(dist):
    with zipfile.ZipFile(dist.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {installed(path) for path in code() | DATA}


def test_the_sdist_holds_what_the_wheel_is_built_from(dist):
    with tarfile.open(dist.sdist) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    assert code() | DATA | set(FILES) == {
        name for name in names if not re.match(r".*egg-info/|setup.cfg$|PKG-INFO$", name)
    }


def test_every_package_is_listed():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.rpartition("/")[0] for path in code() if path.endswith("/__init__.py")}
    assert setuptools["packages"] == sorted(installed(folder).replace("/", ".") for folder in folders)
