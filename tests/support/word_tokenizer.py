"""A tokenizer for tests that need no model: words, spaces and punctuation, with a chat template."""

from __future__ import annotations

import re
import zlib


class Words:
    """A token per word and per other character. Ids depend on the text alone."""

    def encode(self, text, add_special_tokens=False):
        return [zlib.crc32(word.encode()) for word in re.findall(r"\w+|\W", text)]

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=False):
        text = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        return text + "<assistant>" * add_generation_prompt
