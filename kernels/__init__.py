"""Compute kernels, each beside its torch reference; imports nothing of the rest of the package."""
