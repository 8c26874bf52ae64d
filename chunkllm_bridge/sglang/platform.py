"""SGLang on a machine with no GPU, and no CPU kernels of its own: an out-of-tree platform with torch's operations.

SGLang asks for it by the entry point `sglang.srt.platforms`, whether our plugin is wanted or not.
"""

from __future__ import annotations

from typing import Any


def activate() -> str | None:
    """The platform's class for SGLang, or None where the machine has an accelerator."""
    import torch

    if torch.cuda.is_available():
        return None
    return f"{__name__}.TorchCpuPlatform"


def __getattr__(name: str) -> Any:
    if name != "TorchCpuPlatform":
        raise AttributeError(name)
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

    globals()["TorchCpuPlatform"] = TorchCpuPlatform
    return TorchCpuPlatform
