"""Eviction policies: pure functions of tensors, one file per method. Nothing here imports SGLang.

Whoever writes a policy imports from here: the base class :class:`Policy`, what it is given (:class:`Evidence`,
:class:`Blocks`), what it returns (:class:`Weighing`), and checks for its settings (:func:`check_choice`,
:func:`check_range`, :func:`check_whole`). The contract is the docstring of ``nexus_sglang.policy.base``. Building
blocks that other policies use are in ``nexus_sglang.policy.parts``: random draws, reductions of the window, the walk,
selectors.
"""

from .base import Blocks, Evidence, Policy, Weighing, check_choice, check_range, check_whole
from .registry import POLICIES, find_policy, make_policy

__all__ = [
    "POLICIES",
    "Blocks",
    "Evidence",
    "Policy",
    "Weighing",
    "check_choice",
    "check_range",
    "check_whole",
    "find_policy",
    "make_policy",
]
