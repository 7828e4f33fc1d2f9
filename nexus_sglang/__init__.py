"""KV-cache eviction inside SGLang's radix cache, chosen by Nexus Sampling (arXiv 2606.23961)."""

__version__ = "0.1.0"
SGLANG_VERSION = "0.5.23"  # the one release the hooks in binding/ were written against
