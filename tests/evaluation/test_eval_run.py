"""A run of ``nexus-sglang eval`` without a server: plan, result file, report, runner, command line."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from types import SimpleNamespace

import pytest

from nexus_sglang.cli import main
from nexus_sglang.errors import ConfigError
from nexus_sglang.evaluation import command
from nexus_sglang.evaluation.command import check_data, check_inputs
from nexus_sglang.evaluation.documents import FAMILIES
from nexus_sglang.evaluation.plan import FULL, Job, Plan, Results, read_results
from nexus_sglang.evaluation.report import write_report
from nexus_sglang.evaluation.runner import Runner, run_jobs
from nexus_sglang.evaluation.tables import FEWEST, Rows, cell, leads, residency, wins
from nexus_sglang.evaluation.user_data import read_samples
from nexus_sglang.harness.server import ServerError
from tests.support.word_tokenizer import Words

SMALL = Plan((FULL, "nexus", "snapkv"), (0.2, 0.5), {1024: 7, 2048: FEWEST}, {1024: 1}, conversations=2, texts=2)


def test_jobs_cover_every_cell_once():
    jobs = [job for policy in SMALL.policies for job in SMALL.jobs(policy)]
    assert len({job.key for job in jobs}) == len(jobs)
    hidden = [job for job in jobs if job[:3] == ("document", "hidden", "nexus")]
    assert len(hidden) == (7 + FEWEST) * 2
    assert {job.budget for job in jobs if job.policy == FULL} == {1.0}


def test_bad_settings_are_named():
    with pytest.raises(ConfigError, match="--lengths 500"):
        Plan((FULL,), (0.2,), {500: 1}, {})
    with pytest.raises(ConfigError, match="--tasks 'needel'.*single-number"):
        Plan((FULL,), (0.2,), {1024: 1}, {}, tasks=("needel",))
    with pytest.raises(ConfigError, match="--budgets"):
        Plan((FULL,), (-1.0,), {1024: 1}, {})
    with pytest.raises(ConfigError, match="--text-tokens 100 .* 128 or more"):
        Plan((FULL,), (0.2,), {1024: 1}, {}, texts=1, text_tokens=100)


def fake_row(job: Job) -> dict:
    share = 1.0 if job.policy == FULL else job.budget
    held = {"resident": share, "evicted": int(share < 1), "requests": 1}
    if job.kind == "document":
        good = {FULL: 1.0, "nexus": 0.5}.get(job.policy, 0.0)
        return {"scores": dict.fromkeys(FAMILIES, good), "depths": {FAMILIES[0]: 0.3}, **held}
    if job.kind == "conversation":
        kind = job.what.split()[0]
        tasks = {"questions": ("question-1", "question-2", "question-3"), "rule": ("rule",)}.get(kind)
        return {"scores": {task: [1.0] * 10 for task in tasks or ("fact-number", "fact-town")}, **held}
    return {"positions": 9, "nll": 2.0, "kl": 0.1, "top1": 0.9, "nll_full": 1.9, **held}


HEAD = {"model": "m", "sglang": "0", "first_seed": 1, "python": "3", "machine": "x", "commands": ["nexus-sglang eval"]}


def fill(path) -> Results:
    results = Results(path, HEAD)
    for policy in SMALL.policies:
        for job in SMALL.jobs(policy):
            results.add(job, fake_row(job))
    return results


def test_a_run_goes_on_where_it_was_cut_off(tmp_path):
    path = tmp_path / "results.jsonl"
    rows = fill(path).rows
    text = path.read_text()
    path.write_text(text[: len(text) - 20])
    again = Results(path, {**HEAD, "commands": ["nexus-sglang eval --more"]})
    assert len(again.rows) == len(rows) - 1
    head, read = read_results(path)
    assert head["commands"] == ["nexus-sglang eval", "nexus-sglang eval --more"] and read == again.rows
    with pytest.raises(ConfigError, match="model 'm', this run has 'other'"):
        Results(path, {**HEAD, "model": "other"})


def test_the_report_regenerates_byte_for_byte(tmp_path):
    pytest.importorskip("matplotlib")
    fill(tmp_path / "results.jsonl")
    first = [path.read_bytes() for path in write_report(tmp_path, *_read(tmp_path)).files]
    report = write_report(tmp_path, *_read(tmp_path))
    assert [path.read_bytes() for path in report.files] == first
    assert [path.name for path in report.files] == ["report.md", "accuracy.png", "depth.png", "tasks.png"]
    assert "0.50" in report.summary


def _read(folder):
    head, rows = read_results(folder / "results.jsonl")
    return head, list(rows.values())


def test_controls_are_labelled_and_losses_counted(tmp_path):
    data = Rows(list(fill(tmp_path / "results.jsonl").rows.values()))
    lines = residency(data)
    assert "(control)" in next(line for line in lines if line.startswith("| full"))
    assert "0.20 (7/7)" in next(line for line in lines if line.startswith("| nexus 0.2"))
    # Two lengths with enough documents, two budgets, every task; 1.0 against 0.5 against 0.0.
    cells = 2 * 2 * len(FAMILIES)
    table = {line.split(" | ")[0][2:]: line for line in wins(data, "nexus")}
    assert table["full"] == f"| full | 0 | {cells} | 0 |" and table["snapkv"] == f"| snapkv | {cells} | 0 | 0 |"


def test_leads_are_taken_document_by_document():
    """Scores differ between documents far more than the policies do, which costs the means precision, not the lead."""

    def row(policy, budget, seed, score):
        cell = {"kind": "document", "what": "hidden", "policy": policy, "budget": budget, "length": 1024, "seed": seed}
        return cell | {"scores": dict.fromkeys(FAMILIES, score)}

    easy = {seed: seed % 2 for seed in range(10)}
    rows = [row("full", 1.0, seed, 1.0) for seed in easy]
    rows += [row("nexus", 0.2, seed, 0.2 + 0.6 * hard) for seed, hard in easy.items()]
    rows += [row("random", 0.2, seed, 0.1 + 0.6 * hard + 0.01 * (seed % 3)) for seed, hard in easy.items()]
    data = Rows(rows)
    gap = data.difference("hidden", 1024, 0.2, list(FAMILIES), "nexus", "random")
    assert (
        gap.mean == pytest.approx(0.091)
        and gap.half < 0.01 < data.mean_cell("hidden", 1024, "nexus", 0.2, list(FAMILIES)).half
    )
    lines = {line.split(" | ")[0][2:]: line for line in leads(data, "hidden", "nexus")}
    assert lines["random"] == "| random | 0.09 ±0.01 |" and lines["full"].startswith("| full | -0.50 ±")
    assert "nexus" not in lines


def test_intervals_are_wider_for_few_documents():
    """Two documents, 1 and 0: half the interval is 12.706 standard errors of 0.5."""
    assert cell([1.0, 0.0], [1, 2]).half == pytest.approx(12.706 * 0.5)
    values = [0.0, 1.0] * 50
    assert cell(values, range(100)).half == pytest.approx(1.9842 * math.sqrt(0.25 / 99), rel=1e-4)


def test_without_the_full_cache_the_report_does_not_say_what_it_solves(tmp_path):
    fill(tmp_path / "results.jsonl")
    head, rows = _read(tmp_path)
    write_report(tmp_path, head, [row for row in rows if row["policy"] != FULL])
    text = (tmp_path / "report.md").read_text()
    assert "Hardly solved" not in text and "the full cache was not asked" in text
    assert "| nexus | 0.50 ±0.00 |" in text


def test_other_tasks_texts_or_data_need_another_folder(tmp_path):
    path = tmp_path / "results.jsonl"
    head = {**HEAD, "tasks": "a,b", "text": None}
    Results(path, head)
    Results(path, {**HEAD, "tasks": None, "text": "t"})
    assert (read_results(path)[0]["tasks"], read_results(path)[0]["text"]) == ("a,b", "t")
    with pytest.raises(ConfigError, match="holds results with tasks 'a,b', this run has 'a'"):
        Results(path, {**HEAD, "tasks": "a", "text": "t"})

    mine = tmp_path / "mine.jsonl"
    lines = [f'{{"messages": [{{"role": "user", "content": "q{i}"}}], "expect": "x"}}\n' for i in range(3)]
    args = SimpleNamespace(data=mine, out=tmp_path)
    mine.write_text(lines[0])
    (sample,) = read_samples(mine)
    results = Results(path, head)
    results.add(Job("data", "", "nexus", 0.2, 0, 1), {"score": 1.0, "sample": sample.digest})
    mine.write_text(lines[0] + lines[1])
    check_data(args, read_samples(mine), results)
    mine.write_text(lines[2])
    with pytest.raises(ConfigError, match="line 1: --out .* holds a result of another line"):
        check_data(args, read_samples(mine), results)


def test_what_cannot_be_asked_is_said_before_the_first_server_starts(tmp_path):
    class Base(Words):
        def apply_chat_template(self, *args, **kwargs):
            raise ValueError("tokenizer.chat_template is not set")

    assert check_inputs(SMALL, [], Words()).startswith("documentation of CPython 3")
    with pytest.raises(ConfigError, match="--conversations: .*chat_template is not set.*--tokenizer"):
        check_inputs(SMALL, [], Base())
    quiet = dataclasses.replace(SMALL, conversations=0, texts=2, text_file=str(tmp_path / "none.txt"))
    with pytest.raises(ConfigError, match="--text .*none.txt cannot be read"):
        check_inputs(quiet, [], Base())


def test_a_cache_that_is_not_emptied_is_not_measured_over(monkeypatch):
    from nexus_sglang.harness import server

    answers = [SimpleNamespace(ok=ok, status_code=400, text="pending requests") for ok in (False, True)]
    monkeypatch.setattr(server.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(
        server.requests, "post", lambda *args, **kwargs: answers.pop(0) if len(answers) > 1 else answers[0]
    )
    Runner("http://x", "nexus", Words(), SMALL).flush()
    answers[:] = [SimpleNamespace(ok=False, status_code=400, text="pending requests")]
    with pytest.raises(ServerError, match="http://x cannot be emptied .400, pending requests"):
        Runner("http://x", "nexus", Words(), SMALL).flush()


class Recorder:
    """Stands for a runner: what is played together, and when the cache is emptied."""

    def __init__(self, stop_after=None):
        self.events = []
        self.stop = threading.Event()
        self.left = stop_after

    def run(self, job):
        self.events.append(job.key)
        return fake_row(job)

    def flush(self):
        self.events.append("flush")
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.stop.set()


def test_budgets_of_one_document_are_played_together_and_a_stop_is_heard():
    jobs = list(SMALL.jobs("nexus"))
    recorder = Recorder()
    heard = []
    run_jobs(recorder, jobs, 4, lambda job, row: heard.append(job.key), recorder.stop)
    assert sorted(heard) == sorted(job.key for job in jobs)
    assert {key.split("/")[3] for key in recorder.events[:2]} == {"0.2", "0.5"} and recorder.events[2] == "flush"
    early = Recorder(stop_after=2)
    heard = []
    run_jobs(early, jobs, 4, lambda job, row: heard.append(job.key), early.stop)
    assert len(heard) == 4
    talks = [job for job in jobs if job.kind == "conversation"]

    class Interrupted(Recorder):
        def run(self, job):
            if len(self.events) == 2:
                self.stop.set()
            return super().run(job)

    recorder = Interrupted()
    heard = []
    run_jobs(recorder, talks, 1, lambda job, row: heard.append(job.key), recorder.stop)
    assert heard == [job.key for job in talks[:3]], "conversations are one group, and hear it too; what ran is kept"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policies", "full,nexsu"], "--policies 'nexsu'"),
        (["--servers", "0"], "--servers 0"),
        (["--url", "http://127.0.0.1:9"], "--url http://127.0.0.1:9 is not a running SGLang server"),
        (["--report", "--out", "nowhere"], "nowhere has no readable results.jsonl"),
        (["--data", "missing.jsonl"], "--data missing.jsonl cannot be read"),
    ],
)
def test_bad_command_lines_get_one_clear_error(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *words]) == 2
    assert says in capsys.readouterr().err


def test_rows_are_json(tmp_path):
    fill(tmp_path / "results.jsonl")
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_commands_are_recorded_without_paths():
    import argparse

    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    words = ["eval", "--out", "/somewhere/else/mine", "--data", "/home/me/chats.jsonl", "--budgets", "0.2"]
    args = parser.parse_args(words)
    args.command_line = words
    assert command.command_line(args) == "nexus-sglang eval --out mine --data chats.jsonl --budgets 0.2"
