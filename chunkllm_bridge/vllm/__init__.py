"""The bridge on vLLM. `LLM` is vLLM's own offline class with `plugin=`; nothing happens before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chunkllm_bridge.vllm.offline import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from chunkllm_bridge.vllm.offline import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
