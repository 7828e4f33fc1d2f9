"""The offline reader on a tiny random model: reduced caches answer like masked attention."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.offline.experiment import Contestant, answer_reduced, run_sample
from benchmarks.offline.reader import Kept, Reader
from benchmarks.offline.references import REFERENCES
from nexus_sglang.config import NexusConfig, TokenAmount
from nexus_sglang.evaluation.plan import SETTINGS
from nexus_sglang.evaluation.recall import RecallQuestion, RecallSample
from nexus_sglang.policy import POLICIES, make_policy

LAYERS = 2
KV = 2
"""KV heads."""


def tiny_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV,
        head_dim=8,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture(scope="module")
def reader():
    return Reader(tiny_model(), None)


IDS = torch.randint(0, 64, (230,), generator=torch.Generator().manual_seed(2)).tolist()


def test_reading_in_parts_is_reading_at_once(reader):
    whole = reader.read(IDS, last=3)
    parts = reader.read(IDS[100:], reader.read(IDS[:100]), last=3)
    assert parts.ids == whole.ids and torch.allclose(parts.logits, whole.logits, atol=1e-4)
    for layer in range(LAYERS):
        assert torch.allclose(parts.keys[layer], whole.keys[layer], atol=1e-4)
        assert torch.allclose(parts.window.rings[layer], whole.window.rings[layer], atol=1e-4)


def masked(ids, new, dropped):
    """Logits of the last ``new`` tokens with ``dropped`` positions hidden from them, by stock attention."""
    model = tiny_model().eval()
    total = len(ids)
    model.set_attn_implementation("eager")
    mask = torch.full((total, total), torch.finfo(torch.float32).min).triu(1)
    mask[total - new :, dropped] = torch.finfo(torch.float32).min
    with torch.inference_mode():
        return model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0, -new:]


def test_a_reduced_cache_is_masked_attention(reader):
    prefix = reader.read(IDS)
    question = [5, 6, 7, 8]
    kept = torch.cat((torch.arange(32), torch.arange(96, 128), torch.arange(170, 230)))
    dropped = sorted(set(range(230)) - set(kept.tolist()))
    short = Kept.shared(kept, LAYERS, KV)
    everything = Kept.shared(torch.arange(230), LAYERS, KV)
    alone = reader.continue_reduced(prefix, [short], question, 230, 4)[0]
    assert torch.allclose(alone, masked(IDS + question, 4, dropped), atol=1e-3)
    both = reader.continue_reduced(prefix, [everything, short], question, 230, 4)  # the second is padded
    assert torch.allclose(both[1], alone, atol=1e-4)
    assert torch.allclose(both[0], reader.read(question, prefix, last=4).logits, atol=1e-4)
    assert short.count() == 124 and short.key() == Kept.shared(kept.clone(), LAYERS, KV).key() != everything.key()


def test_visible_reads_the_last_token_again(reader):
    prefix = reader.read(IDS)
    everything = Kept.shared(torch.arange(230), LAYERS, KV)
    answer = [int(prefix.logits[-1].argmax()), 3]
    score = answer_reduced(reader, prefix, {"all": everything}, None, answer)["all"]
    direct = torch.cat((prefix.logits, reader.read(answer[:1], prefix).logits)).log_softmax(dim=-1)
    assert score.logprob == pytest.approx(float(direct[[0, 1], answer].mean()), abs=1e-4)


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_references_keep_the_budget(reader, name):
    prefix = reader.read(IDS)
    config = NexusConfig("nexus", TokenAmount(0.5), min_tokens=0)
    kept = REFERENCES[name](prefix, config, 115)
    assert 115 - 32 < kept.count() <= 116
    for index, valid in zip(kept.index, kept.valid, strict=True):
        for head in range(KV):
            mine = index[head][valid[head]].tolist()
            assert len(set(mine)) == len(mine) and set(range(214, 230)) <= set(mine)


def test_a_whole_sample_runs(reader, monkeypatch):
    monkeypatch.setattr(reader, "ids", lambda text: [ord(c) % 64 for c in text])
    sample = RecallSample(
        "needle", 1, 300, "a passage about nothing " * 14, [RecallQuestion(" what is the number of a thing?", " 12")]
    )
    entries = {name: Contestant(make_policy(name, {})) for name in POLICIES} | REFERENCES
    (record,) = run_sample(reader, sample, entries, [0.5])
    assert record["full"][2] == 1 and record["tokens"] == 336
    for setting in SETTINGS:
        assert set(record[setting]["0.5"]) == set(entries)
        for exact, logprob, resident in record[setting]["0.5"].values():
            assert exact in (0, 1) and logprob < 0 and 0.3 < resident < 0.56
