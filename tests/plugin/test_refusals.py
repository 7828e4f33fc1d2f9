"""Unsupported combinations are refused at start, naming the flag and a legal recipe."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nexus_sglang.errors import ConfigError
from nexus_sglang.sglang_plugin.launcher.refusals import (
    REFUSALS,
    VARIABLES,
    choose_backend,
    refuse,
    refuse_model,
)
from nexus_sglang.sglang_plugin.scheduler.built_check import refuse_layer, refuse_pool

BAD = {
    "--disaggregation-mode": "prefill",
    "--kv-canary": "log",
    "--kv-cache-dtype": "fp8_e4m3",
    "--page-size": 16,
    "--cuda-graph-backend-prefill": "full",
    "--pp-size": 2,
    "--dcp-size": 2,
    "--attn-cp-size": 2,
    "--tokenizer-worker-num": 2,
}


def arguments(**changes):
    fields = {rule.flag[2:].replace("-", "_"): None for rule in REFUSALS}
    fields.update(
        disaggregation_mode="null",
        kv_canary="none",
        kv_cache_dtype="auto",
        page_size=1,
        pp_size=1,
        tp_size=1,
        dcp_size=1,
        attn_cp_size=1,
        tokenizer_worker_num=1,
        attention_backend="torch_native",
        prefill_attention_backend=None,
        decode_attention_backend=None,
        device="cuda",
        grpc_mode=False,
    )
    return SimpleNamespace(**{**fields, **changes})


def test_the_plain_setup_is_accepted():
    refuse(arguments())
    refuse(arguments(tp_size=4))


@pytest.mark.parametrize("rule", REFUSALS, ids=lambda rule: rule.flag)
def test_each_flag_is_named_with_a_recipe(rule):
    name = rule.flag[2:].replace("-", "_")
    with pytest.raises(ConfigError) as caught:
        refuse(arguments(**{name: BAD.get(rule.flag, True)}))
    assert rule.flag in str(caught.value) and "Recipe: " in str(caught.value)


def test_attention_backends(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for backend in ("torch_native", "triton", "flashinfer"):
        refuse(arguments(attention_backend=backend))
    refuse(arguments(attention_backend="flashinfer", prefill_attention_backend="triton"))
    with pytest.raises(ConfigError, match="--attention-backend fa3.*Recipe: --attention-backend flashinfer, or triton"):
        refuse(arguments(attention_backend="fa3"))
    with pytest.raises(ConfigError, match="--attention-backend trtllm_mha"):
        refuse(arguments(attention_backend="triton", decode_attention_backend="trtllm_mha"))
    with pytest.raises(ConfigError, match="triton: it needs a GPU. Recipe: --attention-backend torch_native"):
        refuse(arguments(attention_backend="triton", device="cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    refuse(arguments(attention_backend="triton", device="cpu"))
    with pytest.raises(ConfigError, match="flashinfer: it needs a GPU"):
        refuse(arguments(attention_backend="flashinfer", device="cpu"))


def test_a_prefill_graph_the_model_asked_for_is_refused_too():
    with pytest.raises(ConfigError, match="--cuda-graph-backend-prefill.*breakable"):
        refuse(arguments(cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend="full"))))


@pytest.mark.parametrize("variable", VARIABLES)
def test_variables_are_refused(variable, monkeypatch):
    monkeypatch.setenv(variable, "0")
    refuse(arguments())
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ConfigError, match=f"{variable}=true.*Recipe: unset it"):
        refuse(arguments())


def test_what_is_refused_exists():
    """A rule with a misspelled name would never apply."""
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    assert {rule.flag[2:].replace("-", "_") for rule in REFUSALS} | {"grpc_mode"} <= set(ServerArgs.__struct_fields__)
    assert all(hasattr(envs, variable) for variable in VARIABLES)


@pytest.mark.parametrize(
    "default, flashinfer, chosen",
    [
        ("fa3", True, "flashinfer"),
        ("trtllm_mha", False, "triton"),
        ("flashinfer", True, None),
        ("torch_native", False, None),
    ],
)
def test_a_default_without_a_reader_is_replaced(default, flashinfer, chosen, monkeypatch, caplog):
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups import model_override_base as resolution

    monkeypatch.setattr(resolution, "get_default_attn_backend", lambda *args: default)
    monkeypatch.setattr(resolution, "model_config_of", lambda args: None)
    monkeypatch.setattr(resolution, "use_mla_backend", lambda args: False)
    monkeypatch.setattr(runtime_context, "get_platform", lambda: SimpleNamespace(has_flashinfer=flashinfer))
    seen = []

    def look(args):
        seen.append(resolution.resolving_view(args).attention_backend)

    for config, given, expected in (
        (object(), None, chosen),
        (object(), "torch_native", "torch_native"),
        (None, None, None),
    ):
        args = SimpleNamespace(
            _nexus_config=config, attention_backend=given, prefill_attention_backend=None, decode_attention_backend=None
        )
        caplog.clear()
        choose_backend(args, look)
        assert seen.pop() == expected
        replaced = f"--attention-backend {chosen} in place of {default}" in caplog.text
        assert replaced == (expected == chosen and chosen is not None)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"is_hybrid_swa": True}, "sliding window"),
        ({"sliding_window_size": 4096}, "sliding window"),
        ({"attention_arch": SimpleNamespace(name="MLA")}, "MLA"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_multimodal": True}, "multimodal"),
        ({"has_attention_sinks": True}, "attention sinks"),
        ({"is_generation": False}, "does not generate"),
    ],
)
def test_models(changes, word):
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=["SomeModel"]), **changes)
    with pytest.raises(ConfigError, match=f"SomeModel.*{word}|SomeModel: it {word}"):
        refuse_model(model)


def test_layers():
    plain = dict(
        is_cross_attention=False,
        sliding_window_size=-1,
        logit_cap=0.0,
        attn_type=SimpleNamespace(value="decoder"),
        layer_id=3,
    )
    refuse_layer(SimpleNamespace(**plain))
    with pytest.raises(ConfigError, match="layer 3 has a sliding window of 128"):
        refuse_layer(SimpleNamespace(**{**plain, "sliding_window_size": 128}))
    with pytest.raises(ConfigError, match="logit cap of 50"):
        refuse_layer(SimpleNamespace(**{**plain, "logit_cap": 50.0}))
    refuse_layer(SimpleNamespace(**plain, k_scale_float=1.0))
    with pytest.raises(ConfigError, match="layer 3 has keys cached at a scale of 0.25"):
        refuse_layer(SimpleNamespace(**plain, k_scale_float=0.25))


def test_a_pool_that_the_checkpoint_quantises_is_refused():
    refuse_pool(torch.bfloat16)
    refuse_pool(torch.float32)
    with pytest.raises(ConfigError, match="torch.float8_e4m3fn.*Recipe: --kv-cache-dtype bfloat16"):
        refuse_pool(torch.float8_e4m3fn)
