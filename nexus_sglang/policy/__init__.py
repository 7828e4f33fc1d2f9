"""Eviction policies: pure tensor functions that import nothing of SGLang. One file per method."""

from .base import Blocks, Evidence, Policy, Weighing
from .registry import POLICIES, find_policy, make_policy

__all__ = ["POLICIES", "Blocks", "Evidence", "Policy", "Weighing", "find_policy", "make_policy"]
