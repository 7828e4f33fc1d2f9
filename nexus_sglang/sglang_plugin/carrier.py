"""The wall between the launching process and the scheduler processes, and the one thing that passes through it.

SGLang's ``ServerArgs`` cannot take fields from outside, so the checked config travels in one environment variable,
which the processes that SGLang starts inherit. It is set or cleared with every launch: off means off.
"""

from __future__ import annotations

import functools
import os

from nexus_sglang.config import NexusConfig

VARIABLE = "NEXUS_SGLANG_CONFIG"
"""Environment variable that carries the config, as JSON."""

NO_RESIZE = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
"""SGLang would otherwise resize the pool under the page table once CUDA graphs are captured."""


def publish(config: NexusConfig | None) -> None:
    """Hand the config to the processes that this one will start; None takes back what was published before."""
    if config is not None:
        os.environ[VARIABLE] = config.to_json()
        os.environ[NO_RESIZE] = "0"
    elif os.environ.pop(VARIABLE, None) is not None:
        os.environ.pop(NO_RESIZE, None)


def current() -> NexusConfig | None:
    """The published config, in the process that published it and in those it started."""
    text = os.environ.get(VARIABLE)
    return _read(text) if text else None


@functools.lru_cache(maxsize=1)
def _read(text: str) -> NexusConfig:
    return NexusConfig.from_json(text)
