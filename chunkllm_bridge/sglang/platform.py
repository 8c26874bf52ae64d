"""SGLang on a machine with no GPU, and no CPU kernels of its own: an out-of-tree platform with torch's operations.

SGLang asks for it by the entry point `sglang.srt.platforms`, whether our plugin is wanted or not.
"""

from __future__ import annotations

import functools
import os
from typing import Any


def activate() -> str | None:
    """The platform's class for SGLang; None where there is an accelerator, or SGLang's own CPU engine is wanted."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or torch.accelerator.is_available():
        return None
    return f"{__name__}.TorchCpuPlatform"


def __getattr__(name: str) -> Any:
    if name != "TorchCpuPlatform":
        raise AttributeError(name)
    return _platform_class()


@functools.cache
def _platform_class() -> Any:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()

        def get_device(self, device_id: int = 0) -> str:
            return "cpu"  # SGLang takes it for `--device` where none is given, and splits it as text

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

        def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
            """(free, total) bytes; no more than the control group of this process may still take."""
            from sglang.srt.utils.common import get_free_cpu_memory

            return get_free_cpu_memory(), self.get_device_total_memory()

        def get_current_memory_usage(self, device: Any = None) -> float:
            free, total = self.get_available_memory()
            return float(total - free)

        def apply_server_args_defaults(self, server_args: Any) -> None:
            from .torch_cpu import defaults

            defaults.apply(server_args)

        def get_quantization_config(self, quantization: str) -> None:
            """Refuse what a model's own files ask for and this platform cannot compute; else SGLang's default."""
            from .torch_cpu.refusals import CannotServeError, reason_against_quantization

            if why := reason_against_quantization(quantization):
                raise CannotServeError([f"this model is quantized by {quantization}: {why}"])

        def supports_speculative_algorithm(self, algorithm: str) -> bool:
            return False  # the built-in ones; those of plugins are not asked about

        def init_backend(self) -> None:
            """Once in each worker: attention under the name that SGLang's own logic knows, and no GPU's kernels."""
            from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

            from .torch_cpu.attention import backend_class
            from .torch_cpu.slots import replace_kernels

            ATTENTION_BACKENDS["torch_native"] = lambda runner: backend_class()(runner)
            replace_kernels()

        def get_kv_pool_cls(self, *, kind: str) -> Any:
            from .torch_cpu.slots import pool_class

            return pool_class() if kind == "mha" else None

        def post_load_model(self, model: Any) -> None:
            from .torch_cpu.compiler import compiler
            from .torch_cpu.decoder import follow_direct_updates, speed_up
            from .torch_cpu.defaults import hold_cores

            hold_cores()
            follow_direct_updates()
            speed_up(model, compiler(os.environ))

    return TorchCpuPlatform
