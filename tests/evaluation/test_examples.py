"""The examples and the demo, as far as they go without a server."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

from examples import demo
from nexus_sglang import cli
from nexus_sglang.errors import ConfigError
from nexus_sglang.harness import server as serving
from nexus_sglang.policy import Blocks, Evidence, make_policy

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROGRAMS = [path for path in EXAMPLES if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
README = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
HELD = {"logical": 60, "resident": 40, "evicted": 20, "peak_resident": 60, "budget": 40, "events": 1}


def run(*command: object, timeout: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def chat():
    """A server that counts words as tokens; yields (url, bodies seen by path). ``chat.meta`` is its meta_info."""
    seen: dict[str, list[dict]] = {"/v1/chat/completions": [], "/generate": []}

    class Handler(BaseHTTPRequestHandler):
        meta: dict | None = None

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen[self.path].append(body)
            tokens = sum(len(m["content"].split()) for m in body.get("messages", []))
            number = len(seen[self.path])
            answer = {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": "default",
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "length" if number == 1 else "stop",
                        "message": {"role": "assistant", "content": f"the disk /data, reply {number}"},
                        "prompt_token_ids": [1] * tokens,
                        "response_token_ids": [7, 8, 9],
                        **({"meta_info": self.meta} if self.meta else {}),
                    }
                ],
                "usage": {"prompt_tokens": tokens, "completion_tokens": 3, "total_tokens": tokens + 3},
            }
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", seen, Handler
    server.shutdown()
    server.server_close()


def test_agent_on_a_stock_server_shows_dashes(chat):
    url, seen, _ = chat
    done = run(demo.AGENT, "--url", url + "/v1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    assert lines[2].split()[2:] == ["-", "-", "-", "-", "-", "yes"]
    assert len(seen["/v1/chat/completions"]) == 7
    assert any(m["role"] == "tool" for m in seen["/v1/chat/completions"][-1]["messages"])


def test_agent_replays_recorded_replies(chat, tmp_path):
    url, seen, handler = chat
    handler.meta = {"nexus": [HELD], "decode_throughput": 12.5}
    first = run(demo.AGENT, "--url", url, "--json", tmp_path / "first.json")
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[1].split()[3:] == ["60", "40", "20", "12.5", "-"]
    again = run(demo.AGENT, "--url", url, "--replay", tmp_path / "first.json")
    assert again.returncode == 0, again.stderr
    chats = [body["messages"] for body in seen["/v1/chat/completions"]]
    assert chats[:7] == chats[7:]
    recorded = json.loads((tmp_path / "first.json").read_text())["turns"]
    cached = [len(body["input_ids"]) - t["prompt_tokens"] for body, t in zip(seen["/generate"], recorded, strict=True)]
    assert cached == [2, 3, 3, 3, 3, 3, 3]  # the last token of a reply that was cut off is not in a cache


def test_agent_without_a_server_says_so():
    done = run(demo.AGENT, "--url", f"http://127.0.0.1:{serving.free_port()}")
    assert done.returncode == 1 and "multi_turn_agent" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_programs_say_how_they_are_run(path):
    module = ast.parse(path.read_text(encoding="utf-8"))  # not run: two of them import SGLang, which takes long
    assert f"python examples/{path.name}" in ast.get_docstring(module)
    assert f"python examples/{path.name}" in README


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_readme_names_every_file(path):
    assert f"[{path.name}]({path.name})" in README


@pytest.fixture
def passages(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return make_policy("custom_policy:Passages", {})


def test_custom_policy_is_listed_by_both_of_its_names(passages, capsys):
    for name in ("custom_policy:Passages", "examples.custom_policy:Passages"):
        assert cli.main(["policies", name]) == 0 and '"spill": 0.25' in capsys.readouterr().out
    with pytest.raises(ConfigError, match="spill 2 is not a number from 0 to 1"):
        make_policy("custom_policy:Passages", {"spill": 2})


def test_custom_policy_lends_to_the_blocks_beside(passages):
    forced = torch.tensor([True, False, False, False, False, True])
    index = torch.tensor([0, 1, 2, 5, 6, 7])  # blocks 3 and 4 are gone
    blocks = Blocks(index, forced, torch.arange(6), torch.zeros(6, 0), 256, 0)
    seen = torch.tensor([[9.0, 0.1, 0.2, 1.0, 0.1, 8.0]])
    weights = passages.weigh(Evidence(seen), blocks).weights
    assert weights[1:5].tolist() == pytest.approx([0.1, 0.2, 1.0, 0.25])
    alone = make_policy("custom_policy:Passages", {"spill": 0}).weigh(Evidence(seen), blocks).weights
    assert alone.tolist() == pytest.approx(seen[0].tolist())
    assert seen[0, 4] == pytest.approx(0.1), "the evidence is left as it was"


def turns(**changes) -> list[dict]:
    common = {"prompt_tokens": 57, "completion_tokens": 4, "finish_reason": "stop", "fact_found": True}
    common |= {"decode_tokens_per_s": 10.0, **HELD}
    return [{**common, "turn": 1, "cached_tokens": 0}, {**common, "turn": 2, "cached_tokens": 40, **changes}]


def test_demo_accepts_what_holds():
    assert demo.check(turns(), turns()) == []
    assert "57" in demo.compare(turns(), turns())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resident": 73}, "more than budget + block = 72"),
        ({"peak_resident": 90}, "chunk in flight = 89"),
        ({"cached_tokens": 39}, "39 tokens cached, 40 with stock"),
        ({"prompt_tokens": 58}, "prompts differ"),
    ],
)
def test_demo_names_what_does_not_hold(changes, message):
    assert message in " ".join(demo.check(turns(**changes), turns()))


def test_a_server_that_fails_shows_its_log(tmp_path, monkeypatch):
    script = tmp_path / "server.py"
    script.write_text("import sys; print('x' * 9000); print('no such model'); sys.exit(3)")
    monkeypatch.setattr(serving, "command", lambda *args: [sys.executable, str(script)])
    with pytest.raises(serving.ServerError, match=r"ended with 3:\n[\s\S]*no such model") as caught:
        with demo.server("model", 0, []):
            pass
    assert max(map(len, str(caught.value).splitlines())) < 400


def test_the_whole_group_stops_on_interrupt(monkeypatch):
    monkeypatch.setattr(serving, "command", lambda *args: ["bash", "-c", "sleep 600 & echo $!; wait"])
    monkeypatch.setattr(serving.Server, "wait", lambda self, progress: self)
    with pytest.raises(KeyboardInterrupt):
        with demo.server("model", 0, []) as running:
            while not running.text().strip():
                pass
            raise KeyboardInterrupt
    child = Path(f"/proc/{running.text().strip()}/stat")
    for _ in range(100):  # a killed process takes a moment to go
        if not child.exists() or child.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the server's child still runs")
