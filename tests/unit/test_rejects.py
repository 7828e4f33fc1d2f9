"""S17: unsupported combinations are refused at start, naming the flag and a legal recipe."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nexus_sglang.binding.rejects import REFUSALS, refuse, refuse_layer, refuse_model
from nexus_sglang.config import ConfigError

BAD = {
    "--disaggregation-mode": "prefill", "--kv-canary": "log", "--kv-cache-dtype": "fp8_e4m3", "--page-size": 16,
    "--pp-size": 2, "--dcp-size": 2, "--attn-cp-size": 2, "--tokenizer-worker-num": 2,
}  # fmt: skip


def arguments(**changes):
    fields = {rule.flag[2:].replace("-", "_"): None for rule in REFUSALS}
    fields.update(
        disaggregation_mode="null", kv_canary="none", kv_cache_dtype="auto", page_size=1, pp_size=1, tp_size=1,
        dcp_size=1, attn_cp_size=1, tokenizer_worker_num=1, attention_backend="torch_native",
        prefill_attention_backend=None, decode_attention_backend=None,
    )  # fmt: skip
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


def test_attention_backends():
    with pytest.raises(ConfigError, match="--attention-backend fa3.*Recipe: --attention-backend torch_native"):
        refuse(arguments(attention_backend="fa3"))
    with pytest.raises(ConfigError, match="--attention-backend triton"):
        refuse(arguments(decode_attention_backend="triton"))


@pytest.mark.parametrize("changes, word", [
    ({"is_hybrid_swa": True}, "sliding window"),
    ({"sliding_window_size": 4096}, "sliding window"),
    ({"attention_arch": SimpleNamespace(name="MLA")}, "MLA"),
    ({"is_encoder_decoder": True}, "encoder-decoder"),
    ({"is_multimodal": True}, "multimodal"),
    ({"is_generation": False}, "does not generate"),
])  # fmt: skip
def test_models(changes, word):
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=["SomeModel"]), **changes)
    with pytest.raises(ConfigError, match=f"SomeModel.*{word}|SomeModel: it {word}"):
        refuse_model(model)


def test_layers():
    plain = dict(is_cross_attention=False, sliding_window_size=-1, logit_cap=0.0,
                 attn_type=SimpleNamespace(value="decoder"), layer_id=3)  # fmt: skip
    refuse_layer(SimpleNamespace(**plain))
    with pytest.raises(ConfigError, match="layer 3 has a sliding window of 128"):
        refuse_layer(SimpleNamespace(**{**plain, "sliding_window_size": 128}))
    with pytest.raises(ConfigError, match="logit cap of 50"):
        refuse_layer(SimpleNamespace(**{**plain, "logit_cap": 50.0}))
