"""Triton kernels, each beside its torch reference: imported as ``nexus_sglang.kernels``, nothing of which they import.

The folder stands at the top of the repository, and ``pyproject.toml`` maps it to that name
(``[tool.setuptools.package-dir]``). An editor or a type checker that reads folders does not know the mapping;
README.md here says how to show it.
"""
