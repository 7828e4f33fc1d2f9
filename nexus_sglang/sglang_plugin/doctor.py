"""Whether this installation could serve, without starting a server: ``nexus-sglang doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from nexus_sglang import SGLANG_VERSION, __version__
from nexus_sglang.sglang_plugin import installer

OK, WARN, FAULT = "ok", "warn", "FAULT"
RIGHT_SGLANG = f"pip install 'sglang=={SGLANG_VERSION}'"
AGAIN = "install nexus-sglang again, into the environment that SGLang is in"
GIB = 2**30
LITTLE_MEMORY = 4 * GIB
"""Less free host memory than this is said to be little: a server on the CPU holds 3 to 4 GB with the demo model."""


class Finding(NamedTuple):
    """One line of the doctor's report.

    Attributes:
        what: what was looked at.
        status: ``ok``, ``warn`` (serving works, with a drawback) or ``FAULT`` (serving with a policy would not work).
        text: what was found.
        way_out: what to do about it; empty where nothing is to be done.
    """

    what: str
    status: str
    text: str
    way_out: str = ""


def examine(cache: Path) -> list[Finding]:
    """Look at everything. Imports SGLang, so it takes half a minute.

    Args:
        cache: folder in which demo models are kept.
    """
    looks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("versions", _versions),
        ("plugin", _plugin),
        ("hooks", _hooks),
        ("environment", _environment),
        ("attention", _attention),
        ("kernels", _kernels),
        ("memory", _memory),
        ("model cache", lambda: _cache(cache)),
    )
    findings: list[Finding] = []
    for what, look in looks:
        try:
            findings += look()
        except Exception as err:  # a broken installation fails anywhere; the other lines are worth having
            findings.append(Finding(what, FAULT, f"cannot be looked at: {type(err).__name__}: {err}", RIGHT_SGLANG))
    return findings


def as_text(findings: list[Finding]) -> str:
    """The report for people: one line each, then the outcome."""
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        text = " ".join(finding.text.split())
        way_out = f". Way out: {finding.way_out}" if finding.way_out else ""
        lines.append(f"{finding.status:5}  {finding.what:{width}}  {text}{way_out}")
    return "\n".join([*lines, "", f"{faults(findings) or 'no'} fault{'s' if faults(findings) != 1 else ''}"])


def faults(findings: list[Finding]) -> int:
    """How many of them keep a server from serving with a policy."""
    return sum(finding.status == FAULT for finding in findings)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in ((3, 11), (3, 12)):
        yield Finding("python", OK, python)
    else:
        yield Finding("python", WARN, f"{python}, tried with 3.11 and 3.12 only")
    for package in ("torch", "triton"):
        version = _installed(package)
        if version is None:
            yield Finding(package, FAULT, "not installed", RIGHT_SGLANG)
        else:
            yield Finding(package, OK, version)
    version = _installed("flashinfer-python")
    if version is None:
        yield Finding("flashinfer", WARN, "not installed: on a GPU, attention runs on triton", RIGHT_SGLANG)
    else:
        yield Finding("flashinfer", OK, version)
    yield _sglang()
    if _installed("nexus-sglang") == __version__:
        yield Finding("nexus-sglang", OK, __version__)
    else:
        yield Finding("nexus-sglang", WARN, f"{__version__}, installed as {_installed('nexus-sglang')}", AGAIN)


def _sglang() -> Finding:
    version = _installed("sglang")
    if version is None:
        return Finding("sglang", FAULT, "not installed", RIGHT_SGLANG)
    problems = installer.check_version()
    if problems:
        return Finding("sglang", FAULT, problems[0], RIGHT_SGLANG)
    return Finding("sglang", OK, version)


def _plugin() -> Iterator[Finding]:
    """Whether SGLang would find and load the plugin."""
    plugins = {point.name: point.value for point in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    platforms = {point.name: point.value for point in importlib.metadata.entry_points(group="sglang.srt.platforms")}
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    platform = os.environ.get("SGLANG_PLATFORM", "")
    if plugins.get("nexus") != "nexus_sglang.sglang_plugin.entry:register":
        yield Finding("plugin", FAULT, "SGLang does not see the entry point nexus", AGAIN)
    elif allowed and "nexus" not in allowed:
        text = f"SGLANG_PLUGINS={','.join(allowed)} leaves nexus out"
        yield Finding("plugin", FAULT, text, "unset it, or add nexus, and nexus-cpu without a GPU")
    elif platform and platform != "nexus-cpu":
        text = f"SGLANG_PLATFORM={platform}: SGLang then skips packages that bring another platform, this one too"
        yield Finding("plugin", FAULT, text, "unset it")
    else:
        yield Finding("plugin", OK, "SGLang sees the entry point nexus")
    if "nexus-cpu" not in platforms or (allowed and "nexus-cpu" not in allowed):
        yield Finding("CPU platform", WARN, "SGLang does not see nexus-cpu, and serves on GPUs only", AGAIN)


def _hooks() -> Iterator[Finding]:
    from . import hook_table  # late: with a broken SGLang, everything else is still reported

    replaced = (*hook_table.LAUNCH_REPLACES, *hook_table.SERVE_REPLACES)
    found = installer.misfits(hook_table.ALL, replaced, hook_table.OVERRIDING)
    for misfit in found:
        yield Finding("hooks", WARN if misfit.edited else FAULT, misfit.text, RIGHT_SGLANG)
    if not any(not misfit.edited for misfit in found):
        text = f"{len(hook_table.ALL)} hooked functions and {len(replaced)} replaced attributes fit"
        yield Finding("hooks", OK, text)


def _environment() -> Iterator[Finding]:
    from .launcher import refusals

    for variable, why in refusals.refused_variables().items():
        yield Finding("environment", FAULT, f"{variable}={os.environ[variable]}: {why}", "unset it")


def _attention() -> Iterator[Finding]:
    """The backend that a plain model would get with a policy and without ``--attention-backend``."""
    from sglang.srt.arg_groups import model_override_base as resolution
    from sglang.srt.runtime_context import get_platform

    from .launcher import refusals

    arguments = SimpleNamespace(speculative_algorithm=None, speculative_eagle_topk=None)
    config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    model = SimpleNamespace(hf_config=config, has_attention_sinks=False, has_asymmetric_kv=False)
    default = resolution.get_default_attn_backend(arguments, False, model)
    chosen = refusals.backend_with_reader(default, get_platform().has_flashinfer)
    instead = "" if chosen == default else f", in place of {default}, which has no reader for evicted sequences"
    yield Finding("attention", OK, f"{chosen}{instead}")


def _kernels() -> Iterator[Finding]:
    import torch

    from nexus_sglang.kernels import dispatch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        triton = dispatch.uses_triton(torch.empty(0, device=device))
    except dispatch.KernelChoiceError as err:
        yield Finding("kernels", FAULT, str(err), f"unset {dispatch.VARIABLE}")
        return
    if dispatch.interpreted():
        way_out = "unset TRITON_INTERPRET"
        yield Finding("kernels", WARN, "Triton's interpreter is on: for tests, far too slow to serve", way_out)
    elif triton:
        yield Finding("kernels", OK, "Triton, compiled for the GPU")
    elif device == "cuda":
        yield Finding("kernels", WARN, "torch references on a GPU, which is slow", f"unset {dispatch.VARIABLE}")
    else:
        yield Finding("kernels", OK, "torch references, on the CPU")


def _memory() -> Iterator[Finding]:
    import psutil
    import torch

    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding(f"GPU {index}", OK, f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")
    if not torch.cuda.is_available():
        yield Finding("GPU", OK, "none, SGLang would serve on the CPU")
    host = psutil.virtual_memory()
    text = f"{host.available / GIB:.1f} of {host.total / GIB:.1f} GiB free"
    yield Finding("host memory", OK if host.available >= LITTLE_MEMORY else WARN, text)


def _cache(folder: Path) -> Iterator[Finding]:
    parent = folder
    while not parent.exists():
        parent = parent.parent
    models = sorted(path.name for path in (folder / "models").glob("*") if not path.name.startswith("."))
    held = f"holds {', '.join(models)}" if models else "no model made yet"
    if os.access(parent, os.W_OK):
        yield Finding("model cache", OK, f"{folder}, {held}")
    else:
        yield Finding("model cache", WARN, f"{folder} is not writable, {held}", "set NEXUS_SGLANG_CACHE to a folder")
