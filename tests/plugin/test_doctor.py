"""``nexus-sglang doctor``: a healthy installation, and faults that are planted. Imports SGLang."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest

from nexus_sglang import cli
from nexus_sglang.sglang_plugin import doctor, hook_table

LOADED = "import sys, nexus_sglang.cli as cli\n{}\nsys.exit(bool({{'torch', 'sglang'}} & set(sys.modules)))"


@pytest.fixture
def report(monkeypatch, capsys, tmp_path):
    """Runs the command; returns its exit status, its findings by what they are about, and its text."""
    for variable in ("SGLANG_PLUGINS", "SGLANG_PLATFORM", "NEXUS_SGLANG_KERNELS", "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NEXUS_SGLANG_CACHE", str(tmp_path))

    def run():
        status = cli.main(["doctor", "--json"])
        shown = json.loads(capsys.readouterr().out)
        findings = [doctor.Finding(**one) for one in shown["findings"]]
        assert shown["faults"] == doctor.faults(findings)
        return status, {one.what: one for one in findings}, doctor.as_text(findings)

    return run


def test_a_healthy_installation(report, tmp_path):
    status, found, text = report()
    assert status == 0 and "FAULT" not in text and text.endswith("\nno faults")
    assert {"python", "torch", "triton", "sglang", "flashinfer", "nexus-sglang"} <= set(found)
    assert found["sglang"].text == "0.5.23" and found["plugin"].status == "ok"
    assert f"{len(hook_table.ALL)} hooked functions" in found["hooks"].text
    assert found["attention"].text.split(",")[0] in ("torch_native", "triton", "flashinfer")
    assert found["kernels"].status == "ok" and "GiB free" in found["host memory"].text
    assert str(tmp_path) in found["model cache"].text
    columns = {line.index(one.text) for line, one in zip(text.splitlines(), found.values(), strict=False)}
    assert len(columns) == 1, "aligned"


def test_another_sglang(report, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.24" if name == "sglang" else version(name))
    status, found, text = report()
    assert status == 1 and "1 fault" in text
    assert found["sglang"] == (
        "sglang",
        "FAULT",
        "sglang 0.5.24 is installed, the hooks fit 0.5.23 only",
        "pip install 'sglang==0.5.23'",
    )


def test_a_hooked_function_that_changed(report, monkeypatch):
    from sglang.srt.managers.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "init_req_max_new_tokens", lambda self, req, limit: None)
    status, found, _ = report()
    assert status == 1 and found["hooks"].status == "FAULT" and "sglang==0.5.23" in found["hooks"].way_out
    named = "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens takes other parameters"
    assert found["hooks"].text.startswith(named)


def test_a_hooked_function_that_is_gone(report, monkeypatch):
    from sglang.srt.managers.scheduler import Scheduler

    monkeypatch.delattr(Scheduler, "init_req_max_new_tokens")
    status, found, _ = report()
    assert status == 1 and "Scheduler.init_req_max_new_tokens is gone" in found["hooks"].text


def test_a_function_that_was_edited_is_no_fault(report, monkeypatch):
    from sglang.srt.managers.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "init_req_max_new_tokens", lambda self, req: None)
    status, _, text = report()
    assert status == 0
    assert [
        line for line in text.splitlines() if line.startswith("warn") and "init_req_max_new_tokens was edited" in line
    ]


@pytest.mark.parametrize(
    "variable, value, what, way_out",
    [
        ("SGLANG_PLUGINS", "other", "plugin", "add nexus"),
        ("SGLANG_PLATFORM", "other", "plugin", "unset it"),
        ("SGLANG_RUST_SERVER", "1", "environment", "unset it"),
        ("NEXUS_SGLANG_KERNELS", "fast", "kernels", "unset NEXUS_SGLANG_KERNELS"),
    ],
)
def test_variables_that_keep_it_from_serving(report, monkeypatch, variable, value, what, way_out):
    monkeypatch.setenv(variable, value)
    status, found, _ = report()
    assert status == 1 and found[what].status == "FAULT"
    assert f"{variable}=" in found[what].text and way_out in found[what].way_out


def test_what_cannot_be_looked_at_is_a_fault_and_the_rest_is_shown(report, monkeypatch):
    def broken():
        raise ImportError("no such library")

    monkeypatch.setattr(doctor, "_attention", broken)
    status, found, _ = report()
    assert status == 1 and found["attention"].text == "cannot be looked at: ImportError: no such library"
    assert found["kernels"].status == "ok"


@pytest.mark.parametrize("call", ["", "try: cli.main(['eval', '--help'])\nexcept SystemExit: pass"])
def test_other_commands_do_not_wait_for_torch_and_sglang(call):
    run = subprocess.run([sys.executable, "-c", LOADED.format(call)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
