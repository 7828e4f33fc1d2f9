"""Write the README's table of flags from ``nexus_sglang.config.FLAGS``: ``make docs``."""

from __future__ import annotations

from pathlib import Path

from nexus_sglang.config import readme_table

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN = "<!-- flags: written by make docs -->\n"
END = "<!-- end of flags -->"


def with_flags(text: str) -> str:
    """The text with today's table between the two markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + readme_table() + END + after


if __name__ == "__main__":
    README.write_text(with_flags(README.read_text()))
