"""What a request costs in physical slots, while SGLang decides whether to admit it (see ``prefill_budget``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nexus_sglang.sglang_plugin.installer import Hook


def note_candidate(original: Callable[..., Any], adder: Any, req: Any, **kwargs: Any) -> Any:
    """AROUND ``PrefillAdder._check_prefill_budget``: the budget has to know whose price it computes.

    Args:
        original: asks the budget.
        adder: SGLang's ``PrefillAdder``.
        req: the request to be admitted.
        kwargs: as for the hooked function.

    Returns:
        What ``original`` says.
    """
    adder.memory_budget.candidate = req
    return original(adder, req, **kwargs)


HOOKS = (Hook("managers.schedule_policy.PrefillAdder._check_prefill_budget", "around", note_candidate),)
