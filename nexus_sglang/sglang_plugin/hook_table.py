"""Every hook, by when it is installed. The hooks themselves stand with the code that runs in them."""

from __future__ import annotations

from .launcher import chat_pins, flags
from .scheduler import hooks

LAUNCH = flags.HOOKS
"""In every process of SGLang."""

CHAT = chat_pins.HOOKS
"""In the process that serves HTTP, when a policy is on that pins what chat requests begin with."""

SERVE = hooks.HOOKS
"""In scheduler processes, when a policy is on."""

ALL = (*LAUNCH, *CHAT, *SERVE)
