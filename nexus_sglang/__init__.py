"""KV-cache eviction inside SGLang's radix cache, chosen by Nexus Sampling (arXiv 2606.23961)."""

__version__ = "0.1.0"
"""Of this package; ``pyproject.toml`` reads it here."""

SGLANG_VERSION = "0.5.23"
"""The one release that the hooks fit (``patches/``); ``pyproject.toml`` and ``constraints.txt`` ask for it."""
