"""The platform class; imported only where it is active."""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out-of-tree: SGLang then takes its ``forward_native`` paths, which need no compiled CPU kernels."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        """The backend that this package serves on without a GPU."""
        return "torch_native"

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")
