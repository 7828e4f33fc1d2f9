"""kvpress on the same prompts, in an environment of its own: see docs/results/kvpress.md.

    python -m benchmarks.kvpress.reference prompts.jsonl kvpress.json --model FOLDER

Imports nothing of nexus_sglang. A press does not change the pass it is applied in: the layers attend to everything and
the cache is cut behind them. So one prefill serves all presses (:class:`Several`); for the first ``--check`` prompts
each press is also applied alone, as kvpress documents it, and must give the same answers. Presses that the output file
already holds are not run again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from kvpress import BasePress, ChunkKVPress, ScorerPress, SnapKVPress, StreamingLLMPress, TOVAPress
from transformers import AutoModelForCausalLM, DynamicCache

BUDGETS = (0.2, 0.5)
CONTROL_BUDGET = 0.2
OUR_BLOCK = 32
OUR_WINDOW = 16


def make_presses() -> dict[str, BasePress]:
    """``"METHOD BUDGET"`` to press with kvpress's defaults, then ``"METHOD, VARIANT BUDGET"`` to the controls."""
    kinds = {"snapkv": SnapKVPress, "streaming-llm": StreamingLLMPress, "tova": TOVAPress}
    presses: dict[str, BasePress] = {
        f"{name} {budget:g}": kind(compression_ratio=1 - budget) for budget in BUDGETS for name, kind in kinds.items()
    }
    for budget in BUDGETS:
        presses[f"snapkv, window 16 {budget:g}"] = SnapKVPress(1 - budget, window_size=OUR_WINDOW)
    ratio = 1 - CONTROL_BUDGET
    windowed = SnapKVPress(ratio, window_size=OUR_WINDOW)
    presses[f"snapkv, window 16, chunks of 32 {CONTROL_BUDGET:g}"] = ChunkKVPress(windowed, chunk_length=OUR_BLOCK)
    presses[f"snapkv, chunks of 32 {CONTROL_BUDGET:g}"] = ChunkKVPress(SnapKVPress(ratio), chunk_length=OUR_BLOCK)
    presses[f"tova, chunks of 32 {CONTROL_BUDGET:g}"] = ChunkKVPress(TOVAPress(ratio), chunk_length=OUR_BLOCK)
    return presses


@dataclass
class Several(BasePress):
    """Applies every press to the same pass and keeps what each would leave; the pass's own cache stays whole.

    Attributes:
        kept: name to one (keys, values) per layer, ``[1, Hkv, kept, D]`` each.
    """

    presses: dict[str, ScorerPress | ChunkKVPress]
    kept: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def post_init_from_model(self, model: Any) -> None:
        """Called by kvpress before a pass."""
        self.kept = {name: [] for name in self.presses}
        for press in self.presses.values():
            press.post_init_from_model(model)

    def compress(
        self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Called by kvpress after each layer's prefill, in order."""
        for name, press in self.presses.items():
            self.kept[name].append(press.compress(module, hidden_states, keys, values, attentions, kwargs))
        return keys, values

    def cache(self, name: str) -> DynamicCache:
        """What this press would leave."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(self.kept[name]):
            cache.update(keys, values, layer)
        return cache


def prefill(model: Any, ids: list[int], press: BasePress) -> tuple[DynamicCache, int]:
    """The cache after the whole prompt, cut by ``press``, and the first token (which no press can change)."""
    cache = DynamicCache()
    with press(model):
        logits = model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits
    return cache, int(logits[0, -1].argmax())


def decode(model: Any, cache: DynamicCache, prompt: int, first: int, tokens: int) -> list[int]:
    """``tokens`` greedy tokens after ``first``'s prefill; positions go on at the prompt's length, not the cache's."""
    out = [first]
    for position in range(prompt, prompt + tokens - 1):
        where = torch.tensor([[position]])
        logits = model(torch.tensor([out[-1:]]), past_key_values=cache, position_ids=where).logits
        out.append(int(logits[0, -1].argmax()))
    return out


def lengths(cache: DynamicCache) -> int:
    """Tokens in the cache, the same in every layer.

    Raises:
        RuntimeError: layers differ.
    """
    seen = {layer.keys.shape[2] for layer in cache.layers}
    if len(seen) != 1:
        raise RuntimeError(f"layers hold different numbers of tokens: {sorted(seen)}")
    return seen.pop()


def answer_all(model: Any, prompt: dict[str, Any], presses: dict[str, BasePress]) -> dict[str, dict[str, Any]]:
    """Name (and ``full``) to ids and tokens kept after prefill."""
    several = Several(presses)
    ids = prompt["ids"]
    full, first = prefill(model, ids, several)
    answers = {}
    for name in presses:
        cache = several.cache(name)
        kept = lengths(cache)
        answers[name] = {"ids": decode(model, cache, len(ids), first, prompt["tokens"]), "kept": kept}
    kept = lengths(full)
    return {"full": {"ids": decode(model, full, len(ids), first, prompt["tokens"]), "kept": kept}, **answers}


def check(model: Any, prompt: dict[str, Any], presses: dict[str, BasePress], answers: dict[str, dict]) -> None:
    """Every press alone, as documented, must answer as it did from the common prefill.

    Raises:
        RuntimeError: it does not.
    """
    for name, press in presses.items():
        cache, first = prefill(model, prompt["ids"], press)
        kept = lengths(cache)
        alone = {"ids": decode(model, cache, len(prompt["ids"]), first, prompt["tokens"]), "kept": kept}
        if alone != answers[name]:
            raise RuntimeError(f"{name}, {prompt['id']}: alone {alone}, from the common prefill {answers[name]}")


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--check", type=int, default=2, help="prompts on which every press is applied alone as well")
    options = parser.parse_args(argv)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval()
    prompts = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    old = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.out.exists() else {}
    rows = {prompt["id"]: old.get(prompt["id"], {}) for prompt in prompts}
    presses = {name: press for name, press in make_presses().items() if not all(name in row for row in rows.values())}
    with torch.inference_mode():
        for i, prompt in enumerate(prompts):
            answers = answer_all(model, prompt, presses)
            if i < options.check:
                check(model, prompt, presses, answers)
            rows[prompt["id"]] |= answers
            print(f"{i + 1}/{len(prompts)}", file=sys.stderr, flush=True)
    result = {
        "command": f"python -m benchmarks.kvpress.reference {options.prompts.name} {options.out.name} --model FOLDER"
        f" --dtype {options.dtype} --check {options.check}",
        "versions": {name: importlib.metadata.version(name) for name in ("kvpress", "transformers", "torch")},
        "python": platform.python_version(),
        "dtype": options.dtype,
        "attention": model.config._attn_implementation,
        "checked_alone": options.check,
        "rows": rows,
    }
    options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
