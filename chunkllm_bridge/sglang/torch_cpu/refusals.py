"""What cannot work on this platform, said before a model is loaded: what, where, and what instead."""

from __future__ import annotations

import os
from typing import Any

from ...common.errors import BridgeError

ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


class CannotServeError(BridgeError):
    """A launch that asks this platform for what needs a GPU; lists every reason."""

    exit_code = 2

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n  ".join(["SGLang cannot run like this on a machine with no GPU:", *reasons]))


def check(server_args: Any) -> None:
    """Raise with every reason against these launch parameters."""
    reasons = list(reasons_against(server_args, cores=len(os.sched_getaffinity(0))))
    if reasons:
        raise CannotServeError(reasons)


def reasons_against(server_args: Any, *, cores: int) -> list[str]:
    """As lines `--flag value: why; what instead`."""
    reasons = []
    said = getattr(server_args, "_raw_input", None) or vars(server_args)  # SGLang has filled in others by now
    if server_args.device not in (None, "cpu"):
        reasons.append(f"--device {server_args.device}: there is no such device here; leave it out, or say cpu")
    for name in ATTENTION:
        value = said.get(name)
        if value not in (None, "torch_native"):
            reasons.append(f"{_flag(name)} {value}: needs a GPU's kernels; leave it out, or say torch_native")
    if (sampling := said.get("sampling_backend")) not in (None, "pytorch"):
        reasons.append(f"--sampling-backend {sampling}: needs a GPU; leave it out, or say pytorch")
    if server_args.quantization is not None and (why := reason_against_quantization(server_args.quantization)):
        reasons.append(f"--quantization {server_args.quantization}: {why}")
    if server_args.speculative_algorithm is not None and _built_in(server_args.speculative_algorithm):
        reasons.append(
            f"--speculative-algorithm {server_args.speculative_algorithm}: its verification is written for GPUs only; "
            "use an algorithm that a plugin brings, or leave it out"
        )
    if server_args.enable_torch_compile:
        reasons.append("--enable-torch-compile: the platform compiles by itself; leave it out")
    if (server_args.enable_lora or server_args.lora_paths) and server_args.lora_backend != "torch_native":
        reasons.append(f"--lora-backend {server_args.lora_backend}: needs a GPU's kernels; say torch_native")
    ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
    if ranks > cores:
        reasons.append(f"{ranks} ranks (tensor x pipeline x data parallel) on {cores} cores: give each rank a core")
    return reasons


def reason_against_quantization(name: str) -> str | None:
    """Why not; None for methods that plugins bring, and for none at all."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    method = QUANTIZATION_METHODS.get(name)
    if name == "unquant" or method is None or not method.__module__.startswith("sglang."):
        return None  # an unknown name is refused by SGLang itself, with the known ones
    return "SGLang's own methods need a GPU's kernels; serve the model in bfloat16, or quantize it by a plugin"


def _built_in(algorithm: str) -> bool:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    try:
        found = SpeculativeAlgorithm.from_string(algorithm)
    except ValueError:  # SGLang refuses unknown names itself
        return False
    return isinstance(found, SpeculativeAlgorithm) and found is not SpeculativeAlgorithm.NONE


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
