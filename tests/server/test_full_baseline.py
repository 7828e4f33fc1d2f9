"""The suite's full-cache baseline against Hugging Face: the same answers to 50 prompts."""

from __future__ import annotations

import copy

import pytest

from nexus_sglang.evaluation.documents import make_document

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_stock_server_answers_as_hugging_face(stock, model_path, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    asked = 0
    differing = []
    for seed in range(4):
        document = make_document(500 + seed, 1000, lambda text: len(tokenizer.encode(text)))
        ids = tokenizer.encode(document.text)
        cache = DynamicCache()
        with torch.no_grad():
            model(torch.tensor([ids]), past_key_values=cache)
        for question in document.questions[: 50 - asked]:
            prompt = ids + tokenizer.encode(question.text)
            with torch.no_grad():
                whole = model.generate(
                    torch.tensor([prompt]),
                    past_key_values=copy.deepcopy(cache),
                    do_sample=False,
                    max_new_tokens=question.tokens,
                )
            theirs = tokenizer.decode(whole[0, len(prompt) :], skip_special_tokens=True)
            ours = stock.generate(prompt, question.tokens, ignore_eos=False)["text"]
            asked += 1
            if ours != theirs:
                differing.append((seed, question.task, ours, theirs))
    assert asked == 50 and not differing
