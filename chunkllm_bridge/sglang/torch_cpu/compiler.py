"""Whether pieces are compiled, and how."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = structlog.get_logger("chunkllm.torch_cpu")

SWITCH = "CHUNKLLM_CPU_COMPILE"
CHUNK = 16384  # elements that a thread must get before a loop is shared out: at a few rows, waking it costs more


def compiler(environ: Mapping[str, str]) -> Callable[..., Any] | None:
    """What compiles a piece, or None to run it as it is: switched off, or no C++ compiler on this machine."""
    wanted = environ.get(SWITCH, "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"{SWITCH}={wanted!r} is neither 0 nor 1")
    if wanted == "0":
        return None
    if not any(shutil.which(name) for name in (environ.get("CXX", ""), "g++", "clang++") if name):
        log.warning("cpu.no_compiler", note="no g++ or clang++ found: running uncompiled, at about half the speed")
        return None
    import torch

    def compile(function: Callable[..., Any]) -> Any:
        return torch.compile(function, fullgraph=True, options={"size_asserts": False, "cpp.min_chunk_size": CHUNK})

    return compile
